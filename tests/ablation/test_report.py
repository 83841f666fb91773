"""The report: its files, its words, and figures that show every run."""

import dataclasses
import html
import itertools
import math
import random
import re
import warnings

import numpy as np
import pandas
import pytest

from minitx.ablation import figures, generic
from minitx.ablation.config import StudyConfig
from minitx.ablation.judge import judge
from minitx.ablation.records import Runs, worst_accuracy
from minitx.ablation.report import write_report
from minitx.ablation.statistics import Span
from minitx.ablation.wording import finding_sentence
from tests.ablation import made_up, told
from tests.ablation.made_up import SCALED, SEEDS, UNSCALED, Truth


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
    return told.findings(truth=Truth(statuses=statuses), note="A demonstration.")


@pytest.fixture(scope="module")
def written(found, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(found, folder, meta=told.META)
    return folder


@pytest.fixture(scope="module")
def page(written):
    return (written / "report.html").read_text(encoding="utf-8")


def test_the_page_loads_nothing_from_elsewhere(page):
    sources = re.findall(r'(?:src|href|action)\s*=\s*"([^"]*)"', page)
    assert sources and all(source.startswith(("data:image/png;base64,", "#")) for source in sources)
    assert not re.search(r"http|//|@import|<link|<script|url\(", re.sub(r'src="data:[^"]*"', "", page))


def test_equal_runs_give_equal_files_in_any_order_of_the_records(tmp_path):
    studies = {name: made_up.studies()[name] for name in ("recall", "text")}
    grid = made_up.grid(studies=studies, words=told.WORDS)
    records, files = made_up.records(grid), []
    for i in range(2):
        random.Random(i).shuffle(records)
        runs = Runs.of(made_up.places(grid), records)
        folder = tmp_path / str(i)
        write_report(judge(grid, runs), folder, meta=told.META)
        files.append({p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()})
    assert len(files[0]) > 8
    assert files[0] == files[1]


def test_every_figure_of_the_page_lies_beside_it_as_png_and_svg(written, page):
    folder = written / "figures"
    names = {path.stem for path in folder.iterdir()}
    assert {path.name for path in folder.iterdir()} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert page.count("<img") == len(names)
    assert all(f"figures/{name}.png" in (folder.parent / "summary.md").read_text(encoding="utf-8") for name in names)


def test_studies_and_arms_are_called_by_their_words(page):
    shown = text_of(page).rpartition("How to reproduce")[0]
    names = [*(set(told.WORDS) - {"null"}), "text_stability", "text_first"]
    assert [name for name in names if re.search(rf"\b{name}\b", shown)] == []
    assert all(words in shown for words in ("with the scale", "without the scale", "plain average"))


def test_runs_that_failed_or_are_missing_are_counted_and_named(page, found):
    shown = text_of(page)
    not_run = [run for run in found.runs.all if run.status == "not run"]
    assert re.search(rf"not complete. \d+ runs: \d+ done, {len(not_run)} not run, 2 failed, 1 missing", shown)
    assert re.search(
        r"Recall from scratch\s+without the scale\s+d_k 128\s+learning rate 0.001\s+12\s+failed\s+RuntimeError", shown
    )
    assert re.search(r"Text from scratch\s+without the scale\s+learning rate 0.01\s+13\s+missing", shown)
    assert shown.count("a lower rate did not work") == len(not_run) > 0


def test_statistics_stand_behind_a_line_that_opens(page):
    inside = "".join(re.findall(r"<details>.*?</details>", page, flags=re.S))
    outside = re.sub(r"<details>.*?</details>", "", page, flags=re.S)
    assert "p by Holm" in inside and "96.9%" in inside
    assert "Holm" not in outside and "96.9" not in outside


def test_what_made_the_page_stands_on_it(page):
    shown = text_of(page)
    assert all(text in shown for text in ("c0ffee", "make ablation", "2026-01-02", "2 cores", "torch 2.13", "A demonstration."))


def test_the_table_of_runs_has_a_row_for_every_run(written, found):
    table = pandas.read_csv(written / "cells.csv", keep_default_na=False)
    assert len(table) == len(found.runs.all)
    assert dict(table["status"].value_counts()) == {
        status: sum(run.status == status for run in found.runs.all) for status in ("done", "not run", "failed", "missing")
    }
    one = table[(table["study"] == "text") & (table["arm"] == SCALED) & (table["lr"] == "1e-3") & (table["seed"] == 10)]
    run = found.runs.select("text", SCALED, rate="1e-3", seeds=[10])[0]
    assert [float(one[name].item()) for name in ("val_loss", "steps")] == [run.result["val_loss"], 120]
    assert one["command"].item() == run.record["command"]


HOSTILE = ("<script>alert(1)</script>", "$x^2_$ 注意力 | *a*", "\U0001f9e8 </td> &amp;")


def test_hostile_names_are_text_on_the_page_and_in_figures(tmp_path):
    words = {**told.WORDS, SCALED: HOSTILE[0], UNSCALED: HOSTILE[1], "head_dim": HOSTILE[2], "recall": "注意力 $y$"}
    found = told.findings("recall", words=words, question=HOSTILE[0], note=HOSTILE[2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(found, tmp_path, meta={"command": HOSTILE[0]})
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page and "</td> &amp;<" not in page
    assert all(name in text_of(page) for name in HOSTILE)
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "<script" not in summary and r"\$x^2\_\$ 注意力 \| \*a\*" in summary


def test_a_grid_without_records_has_a_page_that_says_so(tmp_path):
    found = told.without(told.findings("recall"), keep=lambda run: False)
    said = write_report(found, tmp_path, meta={})
    assert said == ["No comparison of this grid has two finished runs of the same seed."]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"{len(found.runs.all)} missing" in text_of(page)


# --- sentences of any question


def sentence(study, endpoint, dim="128", **rest):
    """What is said of one finding."""
    found = told.findings(study, **rest)
    return finding_sentence(found, found.find(study, endpoint, condition={"head_dim": dim} if dim else {})[0])


def test_the_first_sentences_are_those_of_the_primary_findings(found):
    primary = [finding_sentence(found, f) for f in found.findings if f.is_primary]
    assert generic.sentences(found) == primary
    assert len(primary) == 3


def test_every_sentence_with_a_number_names_its_budget(found):
    said = [finding_sentence(found, f) for f in found.findings if f.pairs]
    assert len(said) > 8
    assert all(re.search(r"within [\d,]+ steps", text) for text in said)


CROSSING = dict(zip((0, 1, *SEEDS), (70, 70, 60, 65, 70, 80, 90, 100), strict=True))


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ((400, 400, 400, 400, 400), r"the task takes (5\.9|6\.\d) times as many steps as “with the scale”"),
        ((20, 20, 20, 20, 20), r"the task takes 0\.\d+ times as many steps"),
        ((68, 68, 68, 68, 68), r"is the same as that of “with the scale”, within the margin \(× 1\.0"),
        ((None,) * 5, r"the task takes 2\d or more times as many steps"),
        ((CROSSING,) * 5, r"whether the steps .* is undecided \(× 1\.\d\)"),
    ],
)
def test_a_sentence_says_its_verdict_and_no_more(times, words):
    truth = Truth(times={(UNSCALED, "128", rate): t for rate, t in zip(made_up.RATES, times, strict=True)})
    assert re.search(words, sentence("recall", "time", truth=truth, dims=("128",)))


def test_fewer_than_six_pairs_are_said():
    assert "(× 7.0; 4 pairs, six are needed)" in sentence("recall", "time", seeds=4, truth=Truth(spread=1.0))


def test_a_best_rate_at_the_edge_is_the_best_of_the_rates_tried():
    edge, inside = sentence("recall", "time"), sentence("recall", "time", dim="8")
    assert "at the best of the learning rates tried" in edge
    assert "each at its own best learning rate" in inside


# --- figures


def test_every_finished_run_is_a_dot_over_its_rate(found):
    figure = figures.by_rate(found, "recall", lambda run: figures.steps_to_solve(found.grid, run), "steps", log=True)
    points = [drawn(ax) for ax in figure.axes]
    assert sum(map(len, points)) == len(found.runs.select("recall", status="done"))
    assert all(len(set(of_panel)) == len(of_panel) for of_panel in points)  # none covers another
    for ax, of_panel in zip(figure.axes, points, strict=True):
        (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
        assert all(left <= x <= right and low <= y <= high for x, y in of_panel)


def test_runs_that_did_not_solve_the_task_are_in_a_row_above_all_others(found):
    figure = figures.by_rate(found, "recall", lambda run: figures.steps_to_solve(found.grid, run), "steps", log=True)
    steps = [figures.steps_to_solve(found.grid, run) for run in found.runs.select("recall", status="done")]
    heights = sorted(y for ax in figure.axes for _, y in drawn(ax))
    unsolved = steps.count(None)
    assert unsolved > 10
    assert len(set(heights[-unsolved:])) == 1 and heights[-unsolved] > heights[-unsolved - 1] == max(filter(None, steps))
    assert "not\nsolved" in [text.get_text() for ax in figure.axes for text in ax.texts]


def test_a_run_without_a_rate_or_a_finite_number_is_drawn_too():
    grid = made_up.grid(studies={"text_first": made_up.studies()["text_first"]})
    runs = made_up.runs(grid, Truth(outcomes={("text_first", SCALED, ""): "NONFINITE"}))
    figure = figures.by_rate(judge(grid, runs), "text_first", lambda run: run.result["val_loss"], "loss", missing="not finite")
    assert len(drawn(figure.axes[0])) == 6


def test_the_gap_against_budget_is_the_share_of_seeds_that_solved_it():
    found = told.findings("recall", dims=("128",))
    (finding,) = found.find("recall", "time")
    ax = figures.gap_against_budget(found, [finding]).axes[0]
    for arm, line in zip(finding.comparison.arms, ax.lines, strict=True):
        steps = [figures.steps_to_solve(found.grid, run) for run in figures.judged_runs(found, finding, arm)]
        xs, ys = line.get_data()
        assert len(steps) == 6
        for budget in (50, 70, 450, 470, 1500):
            shown = ys[np.searchsorted(xs, budget, side="right") - 1]
            assert shown == pytest.approx(sum(step <= budget for step in steps) / 6)


@pytest.mark.parametrize(
    ("span", "value", "marker"),
    [
        (Span(2.0, 2.0), 2.0, "s"),
        (Span(2.0, math.inf), 2.0, "^"),
        (Span(0.0, 3.0), 3.0, "v"),
        (Span(0.0, math.inf), 1.0, "x"),
        (Span(2.0, 4.0), 3.0, "s"),
    ],
)
def test_a_number_that_is_known_in_part_is_drawn_with_an_arrow_or_a_line(span, value, marker):
    ax = figures.panels(1, 1)[1][0, 0]
    figures.draw_span(ax, 5.0, span, ("#000000", "s"))
    assert [(line.get_xydata().tolist(), line.get_marker()) for line in ax.lines][-1] == ([[5.0, value]], marker)


def test_a_curve_has_every_step_and_a_cross_where_it_ended():
    grid = made_up.grid(studies={"text_first": made_up.studies()["text_first"]})
    runs = made_up.runs(grid, Truth(outcomes={("text_first", SCALED, ""): "NONFINITE"})).select("text_first")
    ax = figures.panels(1, 1)[1][0, 0]
    figures.curves(ax, runs, "#000000")
    lines = [line for line in ax.lines if line.get_gid() == "runs"]
    assert [len(line.get_xdata()) for line in lines] == [run.result["steps"] for run in runs]
    assert [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "x"] == [
        len(run.result["loss"]) - 1 for run in runs
    ]


def test_the_entropy_of_attention_is_that_of_its_last_query():
    uniform, one_hot = np.full((2, 3, 7), 1 / 7), np.tile(np.eye(7)[:3], (2, 1, 1))
    assert figures.entropy(uniform) == pytest.approx(math.log(7))
    assert figures.entropy(one_hot) == 0
    assert figures.entropy(np.concatenate([uniform[:, :2], one_hot[:, 2:]], axis=1)) == 0


def test_a_study_without_a_rate_has_a_figure_and_its_measures_a_row(tmp_path):
    """A question with arms alone: no rate is tuned, and a measure is compared."""
    study = StudyConfig(
        base=("trainer.max_steps=120",), arms=(SCALED, UNSCALED), seeds=SEEDS, scores=("loss",), measures=("cost",)
    )
    compared = made_up.ComparisonConfig(study="text", arms=(SCALED, UNSCALED))
    grid = dataclasses.replace(made_up.grid(studies={"text": study}), comparisons=(compared,), words={"cost": "cost of a pass"})
    records = made_up.records(grid, Truth(losses={(SCALED, ""): 2.0, (UNSCALED, ""): 2.5}))
    for record, cost in zip(records, itertools.count(1), strict=False):
        record["result"]["measures"] = {"cost": float(cost)}
    found = judge(grid, Runs.of(made_up.places(grid), records))
    write_report(found, tmp_path, meta={})
    shown = text_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "cost of a pass" in shown and "+0.5 nats" in shown
    assert [path.name for path in tmp_path.glob("figures/*.png")] == ["text_loss.png"]


def test_the_worst_accuracy_is_drawn_for_stability(found):
    value = generic.study_pictures(found, "stability_adamw")[0].figure
    heights = sorted(y for ax in value.axes for _, y in drawn(ax))
    runs = found.runs.select("stability_adamw", status="done")
    assert heights == pytest.approx(sorted(worst_accuracy(run.result, 8) for run in runs))
