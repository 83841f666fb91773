"""The report: its files, its words, and figures that show every run."""

import ast
import html
import json
import lzma
import random
import re
from pathlib import Path

import pandas
import pytest

from minitx.ablation import curves
from minitx.ablation.formatting import _catalogue
from minitx.ablation.grid import Runs, cells, solved_step
from minitx.ablation.judge import judge
from minitx.ablation.report import _bound_table, _slope_table, study_pictures, write_report
from minitx.ablation.scaling import figure, sentences
from minitx.canvas import DPI
from minitx.cli.ablate import read_meta
from minitx.cli.compose import compose_grid
from tests.ablation import made_up
from tests.ablation.made_up import META, RATES, SCALED, SEEDS, UNSCALED, WORDS, Truth

ROOT = Path(__file__).parents[2]


def drawn(ax):
    """The (x, y) of every dot of a run."""
    return [point for line in ax.lines if line.get_gid() == "runs" for point in zip(*line.get_data(), strict=True)]


def text_of(page):
    """What a reader sees of a page in English."""
    body = re.sub(r'<span lang="zh-Hans">.*?</span>', "", page.split("<body>")[1])
    return html.unescape(re.sub(r"<[^>]*>", " ", re.sub(r'src="data:[^"]*"', "", body)))


@pytest.fixture(scope="module")
def found():
    truth = Truth(statuses={("recall", UNSCALED, "1e-3", 12): "failed", ("text", UNSCALED, "1e-2", 13): "missing"})
    prediction = made_up.foretold("sgd", "threshold", 9.0, 12.0)
    return made_up.findings("recall", "text", "sgd", truth=truth, note="A demonstration.", predictions=prediction)


@pytest.fixture(scope="module")
def written(found, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(found, folder, meta=META)
    return folder


@pytest.fixture(scope="module")
def page(written):
    return (written / "report.html").read_text(encoding="utf-8")


def write_texts(findings, folder, meta):
    """Write a report whose figures are laid out and have a file each, but no content."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("png", "svg"):
            patch.setattr(f"minitx.ablation.report.{kind}", lambda figure: b"")
        return write_report(findings, folder, meta=meta)


@pytest.fixture(scope="module")
def whole_report(whole, tmp_path_factory):
    """The folder of the report of the whole fabricated grid."""
    folder = tmp_path_factory.mktemp("whole")
    write_texts(whole, folder, META)
    return folder


def test_the_page_loads_nothing_from_elsewhere(page):
    sources = re.findall(r'(?:src|href|action)\s*=\s*"([^"]*)"', page)
    assert sources and all(source.startswith(("data:image/png;base64,", "#")) for source in sources)
    assert not re.search(r"http|//|@import|<link|<script|url\(", re.sub(r'src="data:[^"]*"', "", page))


def test_the_page_has_its_parts_in_order_what_made_it_and_words_for_names(page):
    titles = [text_of(f"<body>{title}").strip() for title in re.findall(r"<h2[^>]*>(.*?)</h2>", page)]
    assert titles == ["Numbers", "Figures", "Controls", "Predictions", "Limits", "What was run, and how to run it again"]
    shown, _, reproduced = text_of(page).rpartition("What was run")
    facts = [META[name] for name in ("commit", "command", "date", "hardware")]
    assert all(text in shown + reproduced for text in (*facts, "torch 2.13", "A demonstration."))
    assert [name for name in WORDS if re.search(rf"\b{name}\b", shown) and name != "trained"] == []


def test_the_table_has_the_values_of_both_arms_the_ratio_its_range_and_what_was_predicted(page):
    row = r"SGD\s+d_k 128\s+largest stable learning rate\s+with the scale: 0\.0\d+ to 0\.0\d+\s+without the scale: 0\.00\d+ to 0\.00\d+"
    assert re.search(rf"{row}\s+10\.\d\s+\(\d+\.?\d* to 1\d\.?\d*; 6 seeds, 96\.9%\)\s+11\.3\s+LESS", text_of(page))


def test_tables_show_what_limits_the_largest_rate_and_where_each_lies_between_its_bounds(tmp_path):
    # from 0.012 to 0.015, and a bracket of 4.4 %
    wholes = dict(zip(SEEDS, (0.0117, 0.012, 0.0125, 0.014, 0.0153, 0.0157), strict=True))
    found = made_up.findings("adamw", truth=Truth(spread=1.0, stable={("adamw", SCALED, "128", "all"): wholes}))
    write_texts(found, tmp_path, {})
    said = text_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert re.search(
        r"AdamW\s+d_k 128, trained all\s+0\.0133\s+0\.015\s+0\.06\s+0\.8\s+\(0\.8; 6 seeds, 96\.9%\)\s+5 of 6", said
    )
    assert "11 of 12 lie between them" in said  # those of d_k 8, too
    rows = [row for row in _bound_table(found).rows if "d_k 128" in row["setting"]]
    assert [row["η* is"] for row in rows] == [*["between"] * 5, "above"]
    assert [rows[0][name] for name in ("seed", "lower bound", "upper bound")] == ["10", "0.0117 to 0.0123", "0.0147 to 0.0153"]


def test_a_grid_without_parts_has_neither_table(tmp_path):
    write_texts(made_up.findings("sgd"), tmp_path, {})
    assert "share of W_Q" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_what_did_not_hold_comes_first(page):
    said = text_of(page).split("what did not hold comes first")[1]
    assert said.index("NOT HELD") < said.index("HELD", said.index("NOT HELD") + 8)


def test_equal_runs_give_equal_files_in_any_order_of_the_records(tmp_path):
    grid, files = made_up.grid("text"), []
    records = made_up.records(grid)
    for i in range(2):
        random.Random(i).shuffle(records)
        folder = tmp_path / str(i)
        write_report(judge(grid, Runs.of([cell.place for cell in cells(grid)], records)), folder, meta=META)
        files.append({p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()})
    assert len(files[0]) > 4
    assert files[0] == files[1]


def test_every_figure_of_the_page_lies_beside_it_as_png_and_svg(written, page):
    files = {path.name for path in (written / "figures").iterdir()}
    names = {file.partition(".")[0] for file in files}
    assert files == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert page.count("<img") == len(names) == 3
    assert "@media screen and (max-width: 700px) { figure img { max-width: none; }" in page  # paper shrinks them
    assert re.search(r"@media print \{.*td.short \{ white-space: normal; \} td, td.long \{ min-width: 0; \}", page)  # on paper
    assert all(f"figures/{name}.png" in (written / "summary.md").read_text(encoding="utf-8") for name in names)


def test_runs_that_failed_or_are_missing_are_counted_and_named(page):
    shown = text_of(page)
    assert re.search(r"not complete. \d+ runs and searches: \d+ done, 2 failed, 1 missing", shown)
    assert re.search(r"recall: unscaled, init lecun, lr 1e-3, seed 12\s+failed\s+RuntimeError", shown)
    assert re.search(r"text: unscaled, lr 1e-2, seed 13\s+missing", shown)


def test_the_table_of_runs_has_a_row_for_every_run(written, found):
    table = pandas.read_csv(written / "cells.csv", keep_default_na=False)
    assert sorted(table["status"]) == sorted(run.status for run in found.runs.all)
    one = table[(table["study"] == "text") & (table["arm"] == SCALED) & (table["lr"] == "1e-3") & (table["seed"] == 10)]
    run = found.runs.select("text", SCALED, rate="1e-3")[0]
    assert [float(one[name].item()) for name in ("val_loss", "steps")] == [run.result["val_loss"], 120]
    assert one["command"].item() == run.record["command"]


HOSTILE = ("<script>alert(1)</script>", "$x^2_$ 注意力 | *a*", "\U0001f9e8 </td> &amp;")


def test_hostile_names_are_text_on_the_page_and_in_figures(tmp_path):
    words = {**WORDS, SCALED: HOSTILE[0], UNSCALED: HOSTILE[1]}
    found = made_up.findings("text", words=words, question=HOSTILE[0], note=HOSTILE[2])
    write_report(found, tmp_path, meta={"command": HOSTILE[0]})
    page, summary = ((tmp_path / name).read_text(encoding="utf-8") for name in ("report.html", "summary.md"))
    assert "<script" not in page and "</td> &amp;<" not in page
    assert all(name in text_of(page) for name in HOSTILE)
    assert "<script" not in summary and r"\$x^2\_\$ 注意力 \| \*a\*" in summary


def test_a_grid_without_records_has_a_page_that_says_so(tmp_path):
    found = made_up.findings("recall", truth=Truth(statuses={(None,) * 4: "missing"}))
    said = write_report(found, tmp_path, meta={})
    assert said == ["No comparison of this grid has a pair: two finished runs of the same seed."]
    assert f"{len(found.runs.all)} missing" in text_of((tmp_path / "report.html").read_text(encoding="utf-8"))


def test_a_study_without_a_rate_and_a_measure_have_rows(tmp_path):
    """No rate is tuned, a measure is compared, and a factor has the name of a number."""
    factors = {"steps": {"long": ()}}
    truth, fields = (
        Truth(losses={(SCALED, ""): 2.0, (UNSCALED, ""): 2.5}),
        {"factors": factors, "measures": ("attention_cost",)},
    )
    found = made_up.findings("text", truth=truth, fields=fields, words={"attention_cost": "cost of a pass"})
    for run in found.runs.all:
        run.record["result"]["measures"] = {"attention_cost": float(run.seed)}
    said = write_report(judge(found.grid, found.runs), tmp_path, meta={})
    assert re.search(r"Validation loss, .*: MORE, difference 0\.5", said[0])
    assert "cost of a pass" in text_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    table = pandas.read_csv(tmp_path / "cells.csv").query("study == 'text'")
    assert ({*table["factor steps"]}, {*table["steps"]}) == ({"long"}, {120})


# --- figures


def test_thresholds_of_another_setting_have_a_figure_and_an_exponent_of_their_own():
    stable = {("adamw", UNSCALED, dim, part): 0.004 for dim in ("8", "128") for part in ("qk", "rest")}
    found = made_up.findings("adamw", truth=Truth(stable=stable), fields={"skip": ()})
    settings = ["trained all", "trained W_Q and W_K"]  # where the rest trains there is no law
    assert [row["setting"] for row in _slope_table(found).rows] == settings
    pictures = [picture for picture in study_pictures(found) if "threshold" in picture.name]
    assert [len(drawn(picture.figure.axes[0])) for picture in pictures] == [24, 24]
    assert all(setting in picture.title for setting, picture in zip(settings, pictures, strict=True))


def test_every_finished_run_is_a_dot_over_its_rate_and_those_that_solved_nothing_are_above(found):
    drawing = curves.by_rate(found, "recall", "time", "steps", "not solved")
    points = [drawn(ax) for ax in drawing.axes]
    solved = found.grid.studies["recall"].solved
    steps = [solved_step(run.result, solved) for run in found.runs.select("recall", status="done")]
    for ax, own in zip(drawing.axes, points, strict=True):
        (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
        assert len(set(own)) == len(own)  # none covers another
        assert all(left <= x <= right and low <= y <= high for x, y in own)
    heights, unsolved = sorted(y for own in points for _, y in own), steps.count(None)
    assert len(heights) == len(steps) and unsolved > 10
    assert len(set(heights[-unsolved:])) == 1 and heights[-unsolved] > heights[-unsolved - 1] == max(filter(None, steps))


# --- the page about the scale


def test_the_sentences_have_the_numbers_of_the_records_and_fit_the_first_screen(whole):
    said = sentences(whole)
    assert len(said) == 3 and len(" ".join(said).split()) <= 110
    assert re.search(
        r"\(LeCun\), a one-head model \(d_k = 128\) needs (6|7)\.\d+ times as many steps of AdamW \(\d\.\d+–\d\.\d+\) to learn a lookup; "
        r"with GPT-2's smaller weights, our default, no more\.$",
        said[1],
    )
    assert re.search(
        r"was 2\.\d+ times smaller with AdamW \(2\.\d+–\d\.?\d*\) and (9\.\d+|10\.\d) times with SGD \(\d+(\.\d)?–\d+\.?\d*\);",
        said[2],
    )
    assert re.search(r"; d_k = 8: 1\.\d+ and 2\.\d+\. Smaller learning rates for W_Q and W_K undo this\.$", said[2])


def test_no_more_needs_a_range_that_ends_at_one():
    truth = Truth(times={(UNSCALED, "gpt2", rate): {seed: 134 * (seed - 9) for seed in SEEDS} for rate in RATES})
    said = " ".join(sentences(made_up.of_the_scale("recall", truth=truth)))
    assert re.search(r"our default, [\d.]+ \([\d.]+–[\d.]+\)\.$", said)


def test_the_first_figure_shows_every_seed_and_names_the_bounds_and_the_optimizers(whole):
    (picture,) = figure(whole)
    names = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    laws = ["without the scale, predicted", "predicted at the lowest: ÷ d_k^¼ or √d_k"]
    assert names[2:] == [*laws, "ended at its cap of steps, not solved"]
    assert "A collapse: the accuracy falls below 0.9 (mean of 8 steps)." in picture.caption
    titles = [ax.get_title() for ax in picture.figure.axes]
    assert ["AdamW" in title for title in titles] == [False, True, False, True]
    assert picture.figure.get_figheight() * DPI < 340  # beside the sentences on a screen of 800 pixels
    shown, *others = picture.figure.axes
    assert len([line for line in shown.lines if line.get_gid() == "runs"]) == 24  # two d_k
    assert [len(drawn(ax)) for ax in others] == [24, 24, 24]


def test_a_sentence_is_there_only_where_its_records_are():
    assert "W_K undo" not in " ".join(sentences(made_up.of_the_scale("adamw")))  # no null control
    assert "every step" not in " ".join(sentences(made_up.of_the_scale("recall")))
    never = {(arm, "lecun", rate): None for arm in (SCALED, UNSCALED) for rate in RATES}
    assert sentences(made_up.of_the_scale("recall", truth=Truth(times=never))) == []
    assert "(4 seeds)" in sentences(made_up.of_the_scale("adamw", seeds=4))[1]


def test_a_broken_null_control_is_said_first():
    assert "null control failed" in sentences(made_up.of_the_scale("adamw", "null", truth=Truth(equal=False)))[0]


def test_the_page_of_the_scale_shows_attention_curves_and_limits(whole_report):
    page = text_of((whole_report / "report.html").read_text(encoding="utf-8"))
    assert "What the runs look like" in page and "Squares: the key that the model looked at when it had solved the task" in page
    assert "Exponents of the ratios" in page and "EQUAL" in page
    assert {"attention.png", "curves_text.png", "scale.svg"} <= {path.name for path in (whole_report / "figures").iterdir()}


@pytest.mark.parametrize(("studies", "twice"), [(("adamw",), False), (("recall",), False), (("recall", "adamw"), True)])
def test_that_matters_twice_is_said_where_both_follow(studies, twice):
    said = sentences(made_up.of_the_scale(*studies))
    assert said[0].endswith("Two effects follow.") == twice and len(said) == 2 + twice


# --- in two languages

PLACES = r"%\((\w+)\)s"


def literals():
    """Every string in the code of the lab."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "minitx" / "ablation").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return {node.value for node in nodes if isinstance(node.value, str)}


def test_every_message_of_the_code_is_in_the_catalogue_with_the_same_values_and_the_catalogue_has_no_other():
    messages = {entry.id: entry.string for entry in _catalogue() if entry.id}
    assert {text for text in literals() if re.search(PLACES, text) and "\n" not in text} <= messages.keys()
    # facts of the launches are shown by their keys, and a grid has its question in its file
    assert {*messages} - literals() == {"wall seconds", "At which learning rate does the experiment break"}
    assert [
        text for text, twin in messages.items() if sorted(re.findall(PLACES, text)) != sorted(re.findall(PLACES, twin))
    ] == []
    assert all(messages.values())


def check_chinese(page, *own):
    """Each heading, column, caption, sentence and note of a page but ``own`` is there in Chinese, with the same numbers."""
    body = page.partition("<body>")[2]
    shown = re.findall(r"<(?:h2|th|p|summary|b)\b[^>]*>(.*?)</(?:h2|th|p|summary|b)>|</b> (.*?)</figcaption>", body, re.DOTALL)
    alone = {html.unescape(text) for pair in shown for text in pair if text and "<span" not in text}
    assert alone - {"η*", "η_QK", "η_R", *own} == set()
    for pair in re.findall(r'<span lang="en">(.*?)</span><span lang="zh-Hans">(.*?)</span>', body, re.DOTALL):
        # "3 times smaller" is "1/3" in Chinese
        ours, theirs = (sorted(re.findall(r"\d[\d.,]*\d|\d", html.unescape(text).replace("1/", ""))) for text in pair)
        assert ours == theirs, pair


def test_the_pages_are_in_chinese_with_the_same_numbers(page, whole_report, tmp_path):
    check_chinese(page, "A demonstration.")
    check_chinese((whole_report / "report.html").read_text(encoding="utf-8"))
    broken = made_up.of_the_scale("adamw", "null", seeds=4, truth=Truth(equal=False))
    for findings in (broken, made_up.findings("recall", truth=Truth(statuses={(None,) * 4: "missing"}))):
        write_texts(findings, tmp_path, META)
        check_chinese((tmp_path / "report.html").read_text(encoding="utf-8"))


PUBLISHED = [
    pytest.param(path.parent, id=path.parent.name, marks=pytest.mark.slow if path.parent.name in ("init", "limits") else ())
    for path in sorted((ROOT / "docs" / "scaling_ablation").glob("*/summary.md"))
]


@pytest.mark.parametrize("folder", PUBLISHED)
def test_the_record_of_a_published_grid_gives_its_report_and_that_in_chinese(folder, tmp_path):
    grid = compose_grid(["experiment=scaling_ablation", f"ablation={folder.name}"])
    with lzma.open(folder / "cells.jsonl.xz", "rt", encoding="utf-8") as lines:
        findings = judge(grid, Runs.of([cell.place for cell in cells(grid)], map(json.loads, lines)))
    write_texts(findings, tmp_path, read_meta(folder / "launches.json"))
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == (folder / "summary.md").read_text(encoding="utf-8")
    check_chinese((tmp_path / "report.html").read_text(encoding="utf-8"), grid.note)
