"""The report: its files, its words, and figures that show every run."""

import dataclasses
import html
import math
import random
import re

import pandas
import pytest

from minitx.ablation import curves, generic
from minitx.ablation.intervals import Span
from minitx.ablation.judge import judge
from minitx.ablation.records import Runs
from minitx.ablation.report import write_report
from minitx.ablation.wording import effect_text, finding_sentence
from tests.ablation import made_up
from tests.ablation.made_up import META, SCALED, UNSCALED, WORDS, Truth


def drawn(ax):
    """The (x, y) of every dot of a run."""
    return [point for line in ax.lines if line.get_gid() == "runs" for point in zip(*line.get_data(), strict=True)]


def text_of(page):
    """What a reader sees of a page."""
    body = page.split("<body>")[1]
    return html.unescape(re.sub(r"<[^>]*>", " ", re.sub(r'src="data:[^"]*"', "", body)))


@pytest.fixture(scope="module")
def found():
    statuses = {("recall", UNSCALED, "1e-3", 12): "failed", ("text", UNSCALED, "1e-2", 13): "missing"}
    return made_up.findings("recall", "text", truth=Truth(statuses=statuses), note="A demonstration.")


@pytest.fixture(scope="module")
def written(found, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(found, folder, meta=META)
    return folder


@pytest.fixture(scope="module")
def page(written):
    return (written / "report.html").read_text(encoding="utf-8")


def test_the_page_loads_nothing_from_elsewhere(page):
    sources = re.findall(r'(?:src|href|action)\s*=\s*"([^"]*)"', page)
    assert sources and all(source.startswith(("data:image/png;base64,", "#")) for source in sources)
    assert not re.search(r"http|//|@import|<link|<script|url\(", re.sub(r'src="data:[^"]*"', "", page))


def test_the_page_has_its_parts_in_order_what_made_it_and_words_for_names(page):
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", page)
    assert titles == ["What was run", "Verdicts", "Figures", "Predictions", "Limits", "How to reproduce"]
    shown, _, reproduced = text_of(page).rpartition("How to reproduce")
    facts = [META[name] for name in ("commit", "command", "date", "hardware")]
    assert all(text in shown + reproduced for text in (*facts, "torch 2.13", "A demonstration.", "plain average"))
    assert [name for name in WORDS if re.search(rf"\b{name}\b", shown)] == []


def test_equal_runs_give_equal_files_in_any_order_of_the_records(tmp_path):
    grid, files = made_up.grid("text"), []
    records = made_up.records(grid)
    for i in range(2):
        random.Random(i).shuffle(records)
        folder = tmp_path / str(i)
        write_report(judge(grid, Runs.of([run.place for run in made_up.runs(grid).all], records)), folder, meta=META)
        files.append({p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()})
    assert len(files[0]) > 4
    assert files[0] == files[1]


def test_every_figure_of_the_page_lies_beside_it_as_png_and_svg(written, page):
    files = {path.name for path in (written / "figures").iterdir()}
    names = {file.partition(".")[0] for file in files}
    assert files == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert page.count("<img") == len(names)
    assert all(f"figures/{name}.png" in (written / "summary.md").read_text(encoding="utf-8") for name in names)


def test_runs_that_failed_or_are_missing_are_counted_and_named(page, found):
    shown = text_of(page)
    not_run = [run for run in found.runs.all if run.status == "not run"]
    assert re.search(rf"not complete. \d+ runs: \d+ done, {len(not_run)} not run, 2 failed, 1 missing", shown)
    assert re.search(r"without the scale\s+d_k 128\s+learning rate 0.001\s+12\s+failed\s+RuntimeError", shown)
    assert re.search(r"without the scale\s+learning rate 0.01\s+13\s+missing", shown)
    assert shown.count("a lower rate did not work") == len(not_run) > 0


def test_the_table_of_runs_has_a_row_for_every_run(written, found):
    table = pandas.read_csv(written / "cells.csv", keep_default_na=False)
    assert sorted(table["status"]) == sorted(run.status for run in found.runs.all)
    one = table[(table["study"] == "text") & (table["arm"] == SCALED) & (table["lr"] == "1e-3") & (table["seed"] == 10)]
    run = found.runs.select("text", SCALED, rate="1e-3", seeds=[10])[0]
    assert [float(one[name].item()) for name in ("val_loss", "steps")] == [run.result["val_loss"], 120]
    assert one["command"].item() == run.record["command"]


HOSTILE = ("<script>alert(1)</script>", "$x^2_$ 注意力 | *a*", "\U0001f9e8 </td> &amp;")


def test_hostile_names_are_text_on_the_page_and_in_figures(tmp_path):
    words = {**WORDS, SCALED: HOSTILE[0], UNSCALED: HOSTILE[1], "lr": HOSTILE[2], "text": "注意力 $y$"}
    found = made_up.findings("text", words=words, question=HOSTILE[0], note=HOSTILE[2])
    write_report(found, tmp_path, meta={"command": HOSTILE[0]})
    page, summary = ((tmp_path / name).read_text(encoding="utf-8") for name in ("report.html", "summary.md"))
    assert "<script" not in page and "</td> &amp;<" not in page
    assert all(name in text_of(page) for name in HOSTILE)
    assert "<script" not in summary and r"\$x^2\_\$ 注意力 \| \*a\*" in summary


def test_a_grid_without_records_has_a_page_that_says_so(tmp_path):
    found = made_up.findings("recall", truth=Truth(statuses={(None,) * 4: "missing"}))
    assert write_report(found, tmp_path, meta={}) == [
        "No comparison of this grid has a pair: two finished runs of the same seed, each at a learning rate that other seeds chose."
    ]
    assert f"{len(found.runs.all)} missing" in text_of((tmp_path / "report.html").read_text(encoding="utf-8"))


# --- sentences of any question


def test_the_first_sentences_are_those_of_the_primary_findings_and_each_names_its_budget(whole):
    said = [finding_sentence(whole, f) for f in whole.findings if f.is_primary]
    assert generic.sentences(whole) == said and len(said) == 3
    every = [finding_sentence(whole, f) for f in whole.findings if f.pairs]
    assert len(every) > 8 and all(re.search(r"within [\d,]+ steps", text) for text in every)


@pytest.mark.parametrize(("steps", "options", "words"), [
    (400, {}, r"the task takes (5\.9|6\.\d) times as many steps as “with the scale”"),
    (68, {}, r"is the same as that of “with the scale”, within the margin \(× 1\.0"),
    (None, {}, r"the task takes 2\d or more times as many steps"),
    (400, {"seeds": 4}, r"\(× \d\.\d; 4 pairs, six are needed\)"),
])  # fmt: skip
def test_a_sentence_says_its_verdict_and_no_more(steps, options, words):
    times = {(UNSCALED, "128", rate): steps for rate in made_up.RATES}
    found = made_up.findings("recall", truth=Truth(times=times), dims=("128",), **options)
    assert re.search(words, finding_sentence(found, found.find("recall", "time")[0]))


@pytest.mark.parametrize(("spans", "text"), [
    ([(2, 4), (3, 5)], "× 2.4 to 4.5"), ([(0, 0.25)] * 2, "× 0 to 0.2"), ([(0, math.inf)] * 2, "unknown"),
    ([(2, math.inf)] * 2, "× 2.0 or more"), ([(3, 3)] * 2, "× 3.0"),
])  # fmt: skip
def test_a_range_with_a_known_upper_end_names_it(whole, spans, text):
    finding = whole.find("recall", "time", condition=made_up.WIDE)[0]
    pairs = [dataclasses.replace(finding.pairs[0], effect=Span(*span)) for span in spans]
    assert effect_text(dataclasses.replace(finding, pairs=tuple(pairs))) == text


# --- figures


def test_every_finished_run_is_a_dot_over_its_rate_and_those_that_solved_nothing_are_above(found):
    figure = curves.by_rate(found, "recall", lambda run: curves.steps_to_solve(found.grid, run), "steps", log=True)
    points = [drawn(ax) for ax in figure.axes]
    steps = [curves.steps_to_solve(found.grid, run) for run in found.runs.select("recall", status="done")]
    for ax, own in zip(figure.axes, points, strict=True):
        (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
        assert len(set(own)) == len(own)  # none covers another
        assert all(left <= x <= right and low <= y <= high for x, y in own)
    heights, unsolved = sorted(y for own in points for _, y in own), steps.count(None)
    assert len(heights) == len(steps) and unsolved > 10
    assert len(set(heights[-unsolved:])) == 1 and heights[-unsolved] > heights[-unsolved - 1] == max(filter(None, steps))


def test_a_study_without_a_rate_has_a_figure_and_its_measures_a_row(tmp_path):
    """A question with arms alone: no rate is tuned, and a measure is compared."""
    truth, fields = Truth(losses={(SCALED, ""): 2.0, (UNSCALED, ""): 2.5}), {"factors": {}, "measures": ("attention_cost",)}
    found = made_up.findings("text", truth=truth, fields=fields, words={"attention_cost": "cost of a pass"})
    for run in found.runs.all:
        run.record["result"]["measures"] = {"attention_cost": float(run.seed)}
    write_report(judge(found.grid, found.runs), tmp_path, meta={})
    shown = text_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "cost of a pass" in shown and "+0.5 nats" in shown
    assert (tmp_path / "figures" / "text_loss.png").exists()
