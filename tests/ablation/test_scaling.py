"""What the page says of the scale: each sentence on records with a known truth, the figure, the sections, the rules."""

import dataclasses
import math
import re

import numpy as np
import pytest

from minitx.ablation import figures, scaling
from minitx.ablation.blocks import Table
from minitx.ablation.predictions import answers
from minitx.ablation.records import worst_accuracy
from minitx.ablation.report import write_report
from minitx.ablation.scaling import RULES
from minitx.ablation.scaling.initial_weights import SCHEMES, WIDTHS, init_sweep, variance_slope
from minitx.ablation.wording import percent
from minitx.cli.compose import build_grid, composed
from minitx.config import ConfigError
from tests.ablation import made_up, told
from tests.ablation.made_up import FOLD, RATES, SCALED, SEEDS, UNSCALED, Truth

TIME, ADAMW, SGD = "recall", "stability_adamw", "stability_sgd"
CALM = {"spread": 1.0}


def times(arm, steps, dim="128"):
    """The same steps to solve at every rate."""
    return {(arm, dim, rate): steps for rate in RATES}


def by_seed(*steps):
    return dict(zip((0, 1, *SEEDS), (steps[0], steps[0], *steps), strict=True))


def said(*studies, **rest):
    return scaling.sentences(told.of_the_scale(*studies, **rest))


def sentence(start, *studies, **rest):
    """The one sentence that has ``start`` in it."""
    found = [text for text in said(*studies, **rest) if start in text]
    assert len(found) == 1
    return found[0]


@pytest.fixture(scope="module")
def whole():
    return told.of_the_scale(truth=Truth(spread=1.02))


# --- sentences


def test_the_first_screen_says_what_happened_with_the_numbers_of_the_records(whole):
    text = scaling.sentences(whole)
    accuracies = {
        (study, arm): [worst_accuracy(run.result, 8) for run in whole.runs.select(study, arm, {"head_dim": "128"}, rate=rate)]
        for study, rate in ((ADAMW, "1e-2"), (SGD, "3.2e-2"))
        for arm in (SCALED, UNSCALED)
    }
    assert len(text) == 6
    assert text[0].startswith("A model that had learned to look up a value (one head, d_k = 128) was copied.")
    for said_here, name, rate, study, window in ((text[1], "AdamW", "1e-2", ADAMW, 8), (text[2], "SGD", "3.2e-2", SGD, 8)):
        assert said_here.startswith(
            f"At learning rate {rate} with {name}, the lowest accuracy (mean of {window} steps) of 6 seeds"
        )
        assert f"was {percent(accuracies[study, UNSCALED])}" in said_here
        assert f"{percent(accuracies[study, SCALED])} with it" in said_here
    assert "(guessing: 6 %)" in text[2]
    assert re.search(r"3\.2 times smaller with AdamW \(median of 6 seeds, interval .*; predicted: d_k\^¼ = 3\.4\)", text[3])
    assert re.search(r"11 times smaller with SGD \(median of 6 seeds, interval .*; predicted: √d_k = 11\.3\)", text[3])
    assert re.search(
        r"needs (6\.9|7\.0) times as many steps .* within 1,500 steps, at the best of the learning rates tried", text[4]
    )
    assert re.fullmatch(
        r"At d_k = 8 these factors are 1\.6 \(AdamW\), 2\.4 \(SGD\) and 1\.3 \(steps from scratch.*\), within 200 and 1,500 steps\.",
        text[5],
    )


def test_every_sentence_with_a_number_names_its_budget(whole):
    cases = [
        whole,
        told.of_the_scale(TIME, seeds=4),
        told.of_the_scale(ADAMW, TIME, dims=("128",), truth=Truth(times=times(UNSCALED, None))),
        told.of_the_scale(TIME, truth=Truth(times=times(UNSCALED, 70))),
        told.of_the_scale("null", truth=Truth(equal=False)),
    ]
    found = [text for case in cases for text in scaling.sentences(case)]
    assert len(found) >= 13
    assert [
        text
        for text in found
        if re.search(r"\d", text) and "was copied" not in text and not re.search(r"[Ww]ithin [\d,]+( and [\d,]+)? steps", text)
    ] == []


def test_what_was_not_run_is_not_named():
    assert not any(word in " ".join(said(TIME)) for word in ("SGD", "AdamW", "stable"))
    assert not any(word in " ".join(said(ADAMW)) for word in ("SGD", "scratch"))
    assert not any("d_k = 8" in text for text in said(TIME, ADAMW, dims=("128",)))
    assert said("text") == ["No comparison with and without the scale has finished."]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (times(UNSCALED, 67), r"both models need about the same number of steps .* \(ratio 1\.0\)"),
        (times(UNSCALED, 30), r"needs fewer steps .* \(0\.4\d? times as many\)"),
        ({(UNSCALED, "128", r): by_seed(60, 65, 70, 80, 90, 100) for r in RATES}, r"it is undecided .* \(ratio 1\.1, median of 6 seeds, interval 0\.896 to 1\.49\)"),
        (times(UNSCALED, None), r"without the scale solved the task at none of the learning rates tried within 1,500 steps; the model with the scale solved it"),
        (times(SCALED, None), r"with the scale solved the task at none of the learning rates tried .* cannot be compared"),
        ({(UNSCALED, "128", RATES[2]): 335}, r"needs 5\.0 times as many steps .*, each at its own best learning rate"),
        ({(UNSCALED, "128", r): by_seed(600, None, None, None, None, None) for r in RATES}, r"needs 22 or more times as many steps .*1 of 6 seeds solved it at all"),
    ],
)  # fmt: skip
def test_steps_from_scratch_are_told_as_their_row_says(changes, words):
    text = sentence("from scratch", TIME, dims=("128",), truth=Truth(times=changes, **CALM))
    assert re.search(words, text)


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        (0.0125 / 5, r"was 5\.0 times smaller with AdamW \(median of 6 seeds, interval .*; predicted: d_k\^¼ = 3\.4\)\."),
        (0.0125, r"was the same with AdamW \(ratio 1\.0\)\."),
        (0.0125 * 2, r"was larger with AdamW \(ratio 0\.5"),
        (dict(zip(SEEDS, (0.01, 0.011, 0.012, 0.0125, 0.008, 0.009), strict=True)), r"not clearly different with AdamW \(ratio 1\.\d, median of 6 seeds, interval 1 to 1\.56\)"),
        (1e-5, r"was at least 1\d times smaller with AdamW"),
    ],
)  # fmt: skip
def test_the_largest_stable_rate_is_told_as_its_row_says(rates, words):
    text = sentence(
        "largest stable", ADAMW, dims=("128",), truth=Truth(stable={(ADAMW, UNSCALED, "128"): rates}, prune=False, **CALM)
    )
    assert "90 % within 200 steps" in text
    assert re.search(words, text)


def test_fewer_than_six_pairs_give_no_verdict_in_any_sentence():
    text = said(TIME, ADAMW, dims=("128",), seeds=4, truth=Truth(**CALM))
    assert [sum("4 seeds, too few for a verdict" in one for one in text), len(text)] == [2, 4]


def test_curves_need_both_arms_at_the_named_rate():
    full = told.of_the_scale(ADAMW, dims=("128",))
    cut = told.without(full, keep=lambda run: (run.study, run.arm, run.rate) != (ADAMW, SCALED, "1e-2"))
    assert not any("the lowest accuracy" in text for text in scaling.sentences(cut))
    assert any("largest stable" in text for text in scaling.sentences(cut))


def test_a_loss_that_is_not_finite_is_said():
    truth = Truth(outcomes={(ADAMW, UNSCALED, "1e-2"): "NONFINITE"})
    text = sentence("with AdamW, the lowest", ADAMW, dims=("128",), truth=truth)
    assert "was 0 %" in text
    assert "The loss of 6 of 6 runs without the scale was no longer a finite number within 200 steps" in text


def test_a_broken_null_control_comes_first():
    text = said("null", TIME, truth=Truth(equal=False))
    assert re.search(r"The null control failed.* within 30 steps for 6 seeds of 6.*Do not trust", text[0])
    assert "from scratch" in text[1]
    assert not any("null control" in one for one in said("null", TIME))


def test_a_study_of_one_rate_gives_the_curves_where_the_grid_names_one():
    options = {"continued": {"AdamW": {"study": ADAMW, "shown": SGD, "rate": "3.2e-2"}}}
    assert "At learning rate 3.2e-2 with AdamW" in said(ADAMW, SGD, dims=("128",), options=options)[1]


# --- figures


def dots(ax):
    return sum(len(line.get_xdata()) for line in ax.lines if line.get_gid() == "runs")


def test_the_first_figure_has_a_line_or_a_dot_for_every_run(whole):
    titles = {ax.get_title(): ax for ax in scaling.figure(whole)[0].figure.axes}
    assert len(titles) == 5
    for name in ("AdamW at learning rate 1e-2", "SGD at learning rate 3.2e-2"):
        lines = [line for line in titles[name].lines if line.get_gid() == "runs"]
        assert [len(line.get_xdata()) for line in lines] == [200] * 12
    for name, study in (("AdamW: largest stable rate", ADAMW), ("SGD: largest stable rate", SGD)):
        pairs = [pair for f in whole.find(study, "stability", (SCALED, UNSCALED)) for pair in f.pairs]
        assert dots(titles[name]) == 2 * len(pairs) == 24
    scratch = titles["from scratch, one head, d_k = 128"]
    assert dots(scratch) == len(whole.runs.select(TIME, condition={"head_dim": "128"}, status="done"))


def test_the_law_is_drawn_below_the_medians_with_the_scale(whole):
    ax = next(ax for ax in scaling.figure(whole)[0].figure.axes if ax.get_title() == "SGD: largest stable rate")
    (law,) = [line for line in ax.lines if line.get_linestyle() == "--"]
    medians = [np.median([p.reference.low for p in f.pairs]) for f in whole.find(SGD, "stability", (SCALED, UNSCALED))]
    assert law.get_xdata().tolist() == [8, 128]
    assert law.get_ydata() == pytest.approx([medians[0] / 8**0.5, medians[1] / 128**0.5])


def test_one_d_k_gives_worst_accuracies_instead_of_largest_rates():
    found = told.of_the_scale(ADAMW, dims=("128",))
    ax = next(ax for ax in scaling.figure(found)[0].figure.axes if ax.get_title().startswith("AdamW: lowest accuracy"))
    runs = [run for arm in (SCALED, UNSCALED) for run in found.runs.select(ADAMW, arm, status="done")]
    assert (ax.get_xlabel(), ax.get_ylabel(), dots(ax)) == ("learning rate", "accuracy", len(runs))


def test_the_figure_has_the_panels_that_were_run():
    only_time = scaling.figure(told.of_the_scale(TIME))
    assert [len(picture.figure.axes) for picture in only_time] == [1]
    assert scaling.figure(told.of_the_scale("text")) == []


def test_the_attention_is_that_of_the_first_judged_seed_at_the_shown_rate(whole):
    picture = scaling.figure(whole)[1]
    maps = [ax for ax in picture.figure.axes if ax.images]
    kept = [whole.runs.select(ADAMW, arm, {"head_dim": "128"}, rate="1e-2", seeds=SEEDS[:1])[0] for arm in (SCALED, UNSCALED)]
    wanted = [kept[0].result["attention"]["0"], *(run.result["attention"]["200"] for run in kept)]
    assert [ax.get_title().split("\n")[-1] for ax in maps[:3]] == ["before", "200 steps later", "200 steps later"]
    for ax, weights in zip(maps, wanted, strict=False):
        assert np.array_equal(ax.images[0].get_array(), np.array(weights)[:, -1])
        assert f"{figures.entropy(weights):.2f} nats" in ax.get_xlabel()
    assert "seed 10, learning rate 0.01." in picture.caption


# --- initial weights


def test_the_variance_of_unscaled_scores_is_d_k_under_lecuns_initial_weights():
    rows = {row.width: row for row in init_sweep() if row.scheme == "lecun"}
    assert variance_slope() == pytest.approx(1, abs=0.02)
    assert all(rows[width].variance == pytest.approx(width, rel=0.1) for width in WIDTHS)
    assert all(rows[width].row_std == pytest.approx(math.sqrt(width), rel=0.1) for width in WIDTHS)


def test_the_spread_of_the_scores_is_what_each_scheme_predicts():
    expected = {"lecun": 8.0, "torch_mha": 4.0, "torch_linear": 8 / 3, "t5": 1.0, "gpt2": 0.41}
    found = {row.scheme: row.row_std for row in init_sweep() if row.width == 64}
    assert set(found) == set(SCHEMES)
    assert found == pytest.approx(expected, rel=0.1)


# --- sections and rules


@pytest.fixture(scope="module")
def parts(whole):
    return {section.title: section.blocks for section in scaling.sections(whole)}


def rows(blocks, caption):
    """The rows of the table whose caption has ``caption`` in it."""
    (table,) = [block for block in blocks if isinstance(block, Table) and caption in block.caption]
    return table.rows


def test_the_page_about_the_scale_has_all_its_parts_in_order(whole, tmp_path):
    write_report(whole, tmp_path, meta=told.META)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", page)
    own = ["Where the effect disappears", "Instability from scratch and on text", "Controls", "Published results"]
    assert titles == ["What was run", "Verdicts", "Figures", *own, "Predictions", "Limits", "How to reproduce"]
    assert "width of a head" in page.split("<h2")[0]


def test_controls_show_the_null_control_the_fold_and_the_start(parts):
    assert [row["result"] for row in rows(parts["Controls"], "Null control")] == ["EQUAL"]
    assert {row["verdict"] for row in rows(parts["Controls"], "folded")} == {"SAME"}
    assert any("3e-07" in block for block in parts["Controls"] if isinstance(block, str))


def test_published_results_are_pass_fail_or_not_run(whole):
    found = {"study": TIME, "arms": [SCALED, UNSCALED], "endpoint": "time", "condition": {"head_dim": "128"}}
    published = {
        "slower": {"statement": "", "rule": "has_verdict", "options": {**found, "verdict": "SLOWER"}},
        "same": {"statement": "", "rule": "has_verdict", "options": {**found, "verdict": "SAME"}},
        "nowhere": {"statement": "", "rule": "has_verdict", "options": {**found, "study": "absent", "verdict": "SAME"}},
        "slope": {"statement": "", "rule": "slope_on_width", "options": {"study": TIME}},
        "gradients": {"statement": "", "rule": "gradients_are_smaller", "options": {}},
        "no rule": {"statement": ""},
    }
    grid = dataclasses.replace(whole.grid, options={**whole.grid.options, "published": published})
    blocks = {s.title: s.blocks for s in scaling.sections(dataclasses.replace(whole, grid=grid))}["Published results"]
    statuses = {row["name"]: row["status"] for row in rows(blocks, "Published")}
    assert statuses == {
        "slower": "PASS", "same": "FAIL", "nowhere": "NOT RUN", "slope": "PASS", "gradients": "FAIL", "no rule": "NOT RUN"
    }  # fmt: skip


def test_outcomes_are_counted_for_every_arm_and_rate():
    truth = Truth(outcomes={("text_stability", UNSCALED, "1e-2"): "DIVERGED", ("text", SCALED, "1e-3"): "NONFINITE"})
    outcomes = outcomes_of(told.of_the_scale("text", "text_stability", truth=truth))
    assert outcomes["From a model trained on text", "learning rate 0.01", "without the scale"] == "6 DIVERGED"
    assert outcomes["Text from scratch", "learning rate 0.001", "with the scale"] == "6 NONFINITE"
    assert outcomes["Text from scratch", "learning rate 0.0032", "with the scale"] == "6 TRAINED"


def outcomes_of(found):
    blocks = {section.title: section.blocks for section in scaling.sections(found)}["Instability from scratch and on text"]
    return {(row["study"], row["setting"], row["arm"]): row["outcomes"] for row in rows(blocks, "Outcomes")}


def test_without_a_plain_average_no_text_run_is_said_to_be_trained():
    truth = Truth(outcomes={("text_stability", UNSCALED, "1e-2"): "DIVERGED"})
    outcomes = outcomes_of(told.of_the_scale("text_stability", truth=truth))
    assert outcomes.pop(("From a model trained on text", "learning rate 0.01", "without the scale")) == "6 DIVERGED"
    assert "6 with no outcome that these rules can tell" in outcomes.values()
    assert not any("TRAINED" in text for text in outcomes.values())


def test_the_effect_disappears_where_the_verdicts_say_so_and_undecided_ones_stand_apart():
    undecided = {(UNSCALED, "128", r): by_seed(60, 65, 70, 80, 90, 100) for r in RATES}
    found = told.of_the_scale(TIME, truth=Truth(times={**times(UNSCALED, 134, "8"), **undecided}, **CALM))
    blocks = {section.title: section.blocks for section in scaling.sections(found)}["Where the effect disappears"]
    same = [row["finding"] for row in rows(blocks, "without harm") if row["verdict"] == "SAME"]
    apart = rows(blocks, "undecided")
    assert any("d_k 8" in text and "steps until" in text for text in same)
    assert any("d_k 128" in row["finding"] for row in apart) and {row["verdict"] for row in apart} == {"UNDECIDED"}


def test_a_ladder_has_a_panel_for_each_rung_with_its_name_written_out():
    rungs = {"S0": ("optimizer.lr=1e-3",), "S1": ("model.init=lecun",)}
    ladder = dataclasses.replace(made_up.studies()["text_first"], arms=(SCALED, UNSCALED), factors={"rung": rungs})
    words = {**told.WORDS, "rung": "rung", "S0": "GPT-2 defaults", "S1": "LeCun weights"}
    grid = made_up.grid(studies={"text_first": ladder}, words=words, options={**told.OPTIONS, "ladder": "text_first"})
    found = told.judge(grid, made_up.runs(grid))
    table, curves, _ = {section.title: section.blocks for section in scaling.sections(found)}["Stress ladder"]
    assert [row["setting"] for row in table.rows] == ["rung GPT-2 defaults"] * 2 + ["rung LeCun weights"] * 2
    assert [ax.get_title() for ax in curves.figure.axes] == ["rung GPT-2 defaults", "rung LeCun weights"]
    assert [dots(ax) for ax in curves.figure.axes] == [2 * 6 * 80] * 2


def test_rules_hold_where_the_truth_does(whole):
    arms = [SCALED, UNSCALED]
    both = {"studies": [ADAMW, SGD], "arms": arms}
    assert RULES["follows_law"](whole, **both, low=0.45, high=1.25)[0] == "HELD"
    assert RULES["follows_law"](whole, **both, low=0.45, high=0.9)[0] == "NOT HELD"
    assert RULES["ratio_grows"](whole, study=TIME, endpoint="time", arms=arms)[0] == "HELD"
    shrinks = told.of_the_scale(TIME, truth=Truth(times=times(UNSCALED, 70)))
    assert RULES["ratio_grows"](shrinks, study=TIME, endpoint="time", arms=arms)[0] == "NOT HELD"
    solved = {"study": TIME, "arms": arms, "head_dims": ["8", "128"]}
    assert RULES["all_solve_within"](whole, **solved, steps=1000)[0] == "HELD"
    assert RULES["all_solve_within"](whole, **solved, steps=300)[0] == "NOT HELD"
    assert RULES["equal_outcomes"](whole, studies={ADAMW: FOLD, SGD: FOLD}, reference=SCALED)[0] == "HELD"
    assert RULES["equal_outcomes"](whole, studies={ADAMW: UNSCALED}, reference=SCALED)[0] == "NOT HELD"
    assert RULES["wider_or_edge"](whole, study=TIME, arms=arms, condition={"head_dim": "128"})[0] == "NOT HELD"


def test_rules_are_not_tested_without_their_runs():
    found, arms = told.of_the_scale("null"), [SCALED, UNSCALED]
    options = {
        "follows_law": {"studies": [ADAMW], "arms": arms, "low": 0.4, "high": 1.2},
        "ratio_grows": {"study": TIME, "endpoint": "time", "arms": arms},
        "wider_or_edge": {"study": TIME, "arms": arms, "condition": {}},
        "all_solve_within": {"study": TIME, "arms": arms, "head_dims": ["8"], "steps": 10},
        "above_uniform_and_lost": {"scratch": "text", "condition": {}, "arm": UNSCALED, "floor": "uniform", "continued": {}},
        "equal_outcomes": {"studies": {ADAMW: FOLD}, "reference": SCALED},
        "has_verdict": {"study": TIME, "endpoint": "time", "verdict": "SAME"},
        "slope_on_width": {"study": TIME},
    }
    assert {name: RULES[name](found, **given)[0] for name, given in options.items()} == dict.fromkeys(options, "NOT TESTED")
    assert set(options) | {"gradients_are_smaller"} == set(RULES)


def test_both_arms_at_the_top_of_the_grid_count_as_wider_or_edge():
    found = told.of_the_scale(TIME, truth=Truth(times=times(UNSCALED, 90), **CALM))
    status, evidence = RULES["wider_or_edge"](found, study=TIME, arms=[SCALED, UNSCALED], condition={"head_dim": "128"})
    assert (status, "top of the grid" in evidence) == ("HELD", True)


@pytest.mark.parametrize(("largest", "status"), [(0.005, "HELD"), (0.02, "NOT HELD")])
def test_text_is_above_the_plain_average_and_lost(largest, status):
    truth = Truth(stable={("text_stability", UNSCALED, ""): largest})
    found = told.of_the_scale("text", "text_stability", truth=truth, steps={"text": 300})
    given = {"scratch": "text", "condition": {}, "arm": UNSCALED, "floor": "uniform", "continued": {"text_stability": "1e-2"}}
    assert RULES["above_uniform_and_lost"](found, **given)[0] == status


def test_every_rule_that_the_shipped_grids_name_takes_their_options():
    for name in ("quick", "record", "full", "gpu", "smoke"):
        grid = build_grid(composed(["experiment=scaling_ablation", f"ablation={name}"]))
        assert grid is not None
        found = told.judge(grid, told.Runs(()))
        assert [a.status for a in answers(found) if a.status not in ("NOT TESTED", "HELD")] == []
        assert scaling.sentences(found) and scaling.sections(found)


def test_a_rule_that_is_not_there_is_refused():
    prediction = made_up.PredictionConfig(statement="Nothing.", rule="no_such_rule")
    with pytest.raises(ConfigError, match="no_such_rule"):
        answers(told.of_the_scale(TIME, predictions={"Q": prediction}))
