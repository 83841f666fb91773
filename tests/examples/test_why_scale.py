"""The claims of docs/why_scale.md hold where the tests run, and every number of the page, English or Chinese, is one that the script
printed."""

import re

import pytest

from tests.examples.conftest import ROOT, scripts

RECORDS = "(?s)<!-- from the records -->.*?<!-- end of the records -->"  # tests/tools/test_answer.py has these
TEXTS = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("why_scale.md", "why_scale.zh.md")}
PERCENT = re.compile(r"(\d+\.\d) %")  # of what the script prints as a share
PAGES = {
    name: PERCENT.sub(lambda share: f"{float(share[1]) / 100:.3f}", re.sub(RECORDS, "", text)) for name, text in TEXTS.items()
}
EVERY_PAGE = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
FIGURES = ROOT / "docs" / "why_scale"
TABLES = (FIGURES / "tables.md").read_text(encoding="utf-8")

why, drawing = scripts("why_scale", "why_scale_figures")

LONGER = {"training", "limits", "gradients"}  # dozens of runs; their parts are in the tests below


def numbers(text):
    """Every number of a text, as it is written."""
    return re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)", text)


def cells(text):
    """The numbers in the cells of each recorded table, by its name."""
    found = dict(re.findall(r"<!-- ([\w ]+) -->\n((?:\|.*\|\n)+)", text))
    return {name: [float(x) for x in re.findall(r"(?<=\| )-?\d[\d.e+-]*(?= \|)", table)] for name, table in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("section", [
    pytest.param(section, marks=[pytest.mark.release] * (section.__name__ in LONGER)) for section in why.SECTIONS
], ids=lambda section: section.__name__)  # fmt: skip
def test_every_claim_holds_with_the_recorded_numbers(section, tmp_path):
    out = drawing.Output(tmp_path)
    section(out)  # asserts its claims
    ours, recorded = cells(out.tables), cells(TABLES)
    assert ours
    for name in set(ours) - {"rates", "folds", "fold"}:  # those of whole training runs differ from machine to machine
        assert ours[name] == pytest.approx(recorded[name], rel=0.05, abs=0.01), name


def test_the_first_update_moves_unscaled_logits_by_root_d_k_times_as_much():
    unscaled, scaled = (why.first_logit_step(scale=scale) for scale in ("unscaled", "inv_sqrt"))
    assert unscaled / scaled == pytest.approx(8.0, rel=0.1)


@pytest.mark.parametrize("optimizer", [why.folded_adamw, why.adafactor])
def test_the_scale_folded_into_w_q_gives_the_same_run_bit_for_bit(optimizer):
    scores, weights = why.twins(optimizer)
    assert scores == weights and scores[-1] < scores[0] / 10


@EVERY_PAGE
def test_every_number_of_the_page_is_one_that_the_script_printed(page):
    text = page.translate(str.maketrans("（）", "()")).partition("[tables.md]")[0]
    text = re.sub(r"```.*?```|\]\([^)]*\)|\([^()]*(?:19|20)\d\d[^()]*\)", "", text, flags=re.DOTALL)  # code, links, sources
    printed = set(numbers(TABLES))
    settings = set(numbers((ROOT / "examples" / "why_scale.py").read_text(encoding="utf-8")))
    for number in numbers(text):
        assert number in printed or number in settings, number
        assert "." not in number or number in printed or number == "0.02", f"{number} was not measured"  # GPT-2's σ is 0.02


def test_the_chinese_page_has_the_numbers_of_the_english_one():
    assert set(numbers(PAGES["why_scale.zh.md"])) == set(numbers(PAGES["why_scale.md"]))


@EVERY_PAGE
def test_the_page_shows_every_picture(page):
    shown = re.findall(r"!\[[^\]]{20,}\]\(why_scale/(\w+\.png)\)", page)
    assert set(shown) == {path.name for path in FIGURES.glob("*.png")}
