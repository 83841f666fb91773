"""What the page says of the scale: each sentence on records with a known truth, the figure, the sections, the rules."""

import re
import sys

import numpy as np
import pytest

from minitx.ablation import scaling
from minitx.ablation.judge import judge
from minitx.ablation.layout import Table
from minitx.ablation.predictions import answers
from minitx.ablation.records import Runs, worst_accuracy
from minitx.ablation.scaling import RULES
from minitx.ablation.scaling.initial_weights import variance_slope
from minitx.ablation.wording import percent
from minitx.cli.compose import build_grid, composed
from tests.ablation.made_up import BOTH, FOLD, RATES, SCALED, SEEDS, UNSCALED, WIDE, Truth, of_the_scale

TIME, ADAMW, SGD = "recall", "stability_adamw", "stability_sgd"
CALM = {"spread": 1.0}


def times(arm, steps):
    """The same steps to solve at every rate."""
    return {(arm, "128", rate): steps for rate in RATES}


def said(*studies, **rest):
    return scaling.sentences(of_the_scale(*studies, **rest))


# --- sentences


def test_the_first_screen_says_what_happened_with_the_numbers_of_the_records(whole):
    text = scaling.sentences(whole)
    assert len(text) == 6
    for said_here, name, rate, study in ((text[1], "AdamW", "1e-2", ADAMW), (text[2], "SGD", "3.2e-2", SGD)):
        assert said_here.startswith(f"At learning rate {rate} with {name}, the lowest accuracy (mean of 8 steps) of 6 seeds")
        for words, arm in (("was {}", UNSCALED), ("{} with it", SCALED)):
            accuracies = [worst_accuracy(run.result, 8) for run in whole.runs.select(study, arm, WIDE, rate=rate)]
            assert words.format(percent(accuracies)) in said_here
    assert re.search(r"3\.2 times smaller with AdamW \(median of 6 seeds, interval .*; predicted: d_k\^¼ = 3\.4\)", text[3])
    assert re.search(r"11 times smaller with SGD \(median of 6 seeds, interval .*; predicted: √d_k = 11\.3\)", text[3])
    assert re.search(r"(6\.9|7\.0) times as many steps .* within 1,500 steps, at the best of the learning rates tried", text[4])
    small = r"At d_k = 8 these factors are 1\.6 \(AdamW\), 2\.4 \(SGD\) and 1\.3 \(steps from scratch.*\), within 200 and 1,500 steps\."
    assert re.fullmatch(small, text[5])


ONE_SOLVES = dict.fromkeys(SEEDS) | {0: 600, 1: 600, 10: 600}


@pytest.mark.parametrize(("study", "truth", "words"), [
    (TIME, {"times": times(UNSCALED, 67)}, r"both models need about the same number of steps .* \(ratio 1\.0\)"),
    (TIME, {"times": times(UNSCALED, None)}, r"without the scale solved the task at none of the learning rates tried within 1,500 steps; the model with"),
    (TIME, {"times": times(SCALED, None)}, r"with the scale solved the task at none of the learning rates tried .* cannot be compared"),
    (TIME, {"times": times(UNSCALED, ONE_SOLVES)}, r"needs 22 or more times as many steps .*1 of 6 seeds solved it at all"),
    (ADAMW, {"stable": {(ADAMW, UNSCALED, "128"): 0.0125}}, r"90 % within 200 steps.* was the same with AdamW \(ratio 1\.0\)\."),
    (ADAMW, {"stable": {(ADAMW, UNSCALED, "128"): 1e-5}}, r"was at least 1\d times smaller with AdamW"),
    (ADAMW, {"outcomes": {(ADAMW, UNSCALED, "1e-2"): "NONFINITE"}}, "was 0 %.*The loss of 6 of 6 runs without the scale was no longer a finite"),
])  # fmt: skip
def test_a_sentence_says_what_the_records_show(study, truth, words):
    text = said(study, dims=("128",), truth=Truth(**truth, prune=study == TIME, **CALM))
    assert any(re.search(words, one) for one in text)


def test_where_only_the_shown_runs_of_a_study_were_chosen_the_page_says_what_there_is():
    shown = {"study": "away", "shown": ADAMW, "rate": "1e-2"}
    sgd = {"study": SGD, "shown": SGD, "rate": "3.2e-2"}
    findings = of_the_scale(TIME, ADAMW, SGD, options={"continued": {"AdamW": shown, "SGD": sgd}})
    text = " ".join(scaling.sentences(findings))
    assert "with SGD" in text and "with AdamW" not in text
    assert len(scaling.figure(findings)[0].figure.axes) == 3  # of SGD, and from scratch


def test_a_broken_null_control_comes_first():
    text = said("null", TIME, truth=Truth(equal=False))
    assert re.search(r"The null control failed.* within 30 steps for 6 seeds of 6.*Do not trust", text[0])
    assert "from scratch" in text[1]
    assert not any("null control" in one for one in said("null", TIME))


# --- figures


def dots(ax):
    return sum(len(line.get_xdata()) for line in ax.lines if line.get_gid() == "runs")


def test_the_first_figure_has_a_line_or_a_dot_for_every_run_and_the_law_below_the_medians(whole):
    titles = {ax.get_title(): ax for ax in scaling.figure(whole)[0].figure.axes}
    assert len(titles) == 5
    for name in ("AdamW at learning rate 1e-2", "SGD at learning rate 3.2e-2"):
        assert [len(line.get_xdata()) for line in titles[name].lines if line.get_gid() == "runs"] == [200] * 12
    for name, study, power in (("AdamW: largest stable rate", ADAMW, 0.25), ("SGD: largest stable rate", SGD, 0.5)):
        found = whole.find(study, "stability", BOTH)
        assert dots(titles[name]) == 2 * sum(len(f.pairs) for f in found) == 24
        (law,) = [line for line in titles[name].lines if line.get_linestyle() == "--"]
        assert law.get_xdata().tolist() == [8, 128]
        medians = [np.median([p.reference.low for p in f.pairs]) for f in found]
        assert law.get_ydata() == pytest.approx([median / dim**power for median, dim in zip(medians, (8, 128), strict=True)])
    scratch = titles["from scratch, one head, d_k = 128"]
    assert dots(scratch) == len(whole.runs.select(TIME, condition=WIDE, status="done"))
    kept = [whole.runs.select(ADAMW, arm, WIDE, rate="1e-2", seeds=SEEDS[:1])[0].result["attention"] for arm in BOTH]
    maps = [ax.images[0].get_array() for ax in scaling.figure(whole)[1].figure.axes if ax.images]
    for drawn, weights in zip(maps, (kept[0]["0"], kept[0]["200"], kept[1]["200"]), strict=False):
        assert np.array_equal(drawn, np.array(weights)[:, -1])  # of the first judged seed, by the last query


# --- sections and rules


def section(found, title):
    return {one.title: one.blocks for one in scaling.sections(found)}[title]


def rows(blocks, caption):
    """The rows of the table whose caption has ``caption`` in it."""
    (table,) = [block for block in blocks if isinstance(block, Table) and caption in block.caption]
    return table.rows


def test_controls_show_the_null_control_the_fold_and_the_start(whole):
    controls = section(whole, "Controls")
    assert [row["result"] for row in rows(controls, "Null control")] == ["EQUAL"]
    assert {row["verdict"] for row in rows(controls, "folded")} == {"SAME"}
    assert variance_slope() == pytest.approx(1, abs=0.02)  # of the scores at LeCun's weights on d_k
    assert any("3e-07" in block for block in controls if isinstance(block, str))


def test_outcomes_are_counted_for_every_arm_and_rate_and_without_a_plain_average_none_is_trained():
    lost = ("From a model trained on text", "learning rate 0.01", "without the scale")
    truth = Truth(outcomes={("text_stability", UNSCALED, "1e-2"): "DIVERGED", ("text", SCALED, "1e-3"): "NONFINITE"})
    found = []
    for studies in (("text", "text_stability"), ("text_stability",)):
        table = rows(section(of_the_scale(*studies, truth=truth), "Instability from scratch and on text"), "Outcomes")
        found.append({(row["study"], row["setting"], row["arm"]): row["outcomes"] for row in table})
    outcomes, alone = found
    assert outcomes[lost] == alone.pop(lost) == "6 DIVERGED"
    assert outcomes["Text from scratch", "learning rate 0.001", "with the scale"] == "6 NONFINITE"
    assert outcomes["Text from scratch", "learning rate 0.0032", "with the scale"] == "6 TRAINED"
    assert alone and not any("TRAINED" in text for text in alone.values())


ARMS, LAW, SOLVE = {"arms": [*BOTH]}, {"studies": [ADAMW, SGD], "arms": [*BOTH]}, {"study": TIME, "head_dims": ["8", "128"]}
GROWS, WIDER = {"study": TIME, "endpoint": "time", **ARMS}, {"study": TIME, "condition": WIDE, **ARMS}
LOST = {"scratch": "text", "condition": {}, "arm": UNSCALED, "floor": "uniform", "continued": {"text_stability": "1e-2"}}
EQUAL = {"studies": {ADAMW: FOLD, SGD: FOLD}, "reference": SCALED}


@pytest.mark.parametrize(("status", "rule", "options"), [
    ("HELD", "follows_law", {**LAW, "low": 0.45, "high": 1.25}), ("NOT HELD", "follows_law", {**LAW, "low": 0.45, "high": 0.9}),
    ("HELD", "ratio_grows", GROWS), ("HELD", "all_solve_within", {**SOLVE, **ARMS, "steps": 1000}),
    ("NOT HELD", "wider_or_edge", WIDER), ("HELD", "equal_outcomes", EQUAL),
    ("NOT HELD", "equal_outcomes", {**EQUAL, "studies": {ADAMW: UNSCALED}}),
    ("HELD", "slope_on_width", {"study": TIME}), ("HELD", "has_verdict", {"verdict": "WORSE", "study": "text", "endpoint": "loss"}),
    ("NOT HELD", "gradients_are_smaller", {}),
])  # fmt: skip
def test_rules_hold_where_the_truth_does_and_are_not_tested_without_their_runs(whole, status, rule, options):
    assert RULES[rule](whole, **options)[0] == status
    if options:
        assert RULES[rule](of_the_scale("null"), **options)[0] == "NOT TESTED"


@pytest.mark.parametrize(("largest", "status"), [(0.005, "HELD"), (0.02, "NOT HELD")])
def test_text_is_above_the_plain_average_and_lost(largest, status):
    truth, base = Truth(stable={("text_stability", UNSCALED, ""): largest}), {"base": ("trainer.max_steps=300",)}
    found = of_the_scale("text", "text_stability", truth=truth, fields=base)
    assert RULES["above_uniform_and_lost"](found, **LOST)[0] == status
    assert RULES["above_uniform_and_lost"](of_the_scale("null"), **LOST)[0] == "NOT TESTED"


@pytest.mark.parametrize("name", ["quick", "record", "smoke"])
def test_every_rule_that_the_shipped_grids_name_takes_their_options(name, monkeypatch):
    module = sys.modules["minitx.ablation.scaling.sections"]  # the name in the package is the function's
    monkeypatch.setattr(module, "init_figure", lambda: None)  # it is the same for all
    found = judge(build_grid(composed(["experiment=scaling_ablation", f"ablation={name}"])), Runs(()))
    assert [a.status for a in answers(found) if a.status not in ("NOT TESTED", "HELD")] == []
    assert scaling.sentences(found) and scaling.sections(found)
