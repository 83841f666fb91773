"""The judge, on fabricated records whose truth is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from minitx.ablation.design import ComparisonConfig
from minitx.ablation.formatting import sides
from minitx.ablation.grid import Run
from minitx.ablation.intervals import Span
from minitx.ablation.judge import Arm, Endpoint, Parts, judge, slopes, verdicts
from minitx.config import ConfigError
from tests.ablation import made_up
from tests.ablation.made_up import BOTH, RATES, SCALED, SEEDS, UNSCALED, Truth, foretold

WIDE = {"head_dim": "128"}


def one(found, study, endpoint, **condition):
    (finding,) = found.find(study, endpoint, BOTH, condition)
    return finding


# --- thresholds


@pytest.fixture(scope="module")
def stable():
    return made_up.findings("adamw", "sgd")


def test_the_ratio_of_thresholds_is_the_true_one_and_less_says_so(stable):
    for study, dim, ratio in (("adamw", "8", 1.55), ("adamw", "128", 2.9), ("sgd", "128", 10.3)):
        finding = one(stable, study, "threshold", head_dim=dim)
        assert finding.estimate.low == pytest.approx(ratio, rel=0.08) and finding.estimate.low == finding.estimate.high
        assert finding.word == "LESS" and len(finding.pairs) == 6
        assert finding.interval[0].low <= finding.estimate.low <= finding.interval[0].high


def test_the_formula_takes_the_parts_of_the_first_arm_alone(stable):
    exact = made_up.findings("adamw", truth=Truth(spread=1.0, stable={("adamw", UNSCALED, "128", "all"): 1.0}))
    bound = 128**0.25
    finding = one(exact, "adamw", "threshold", head_dim="128")
    assert finding.bound == pytest.approx(bound)
    assert finding.predicted == pytest.approx((bound / 0.015 + 1 / 0.06) / (1 / 0.015 + 1 / 0.06))
    assert one(stable, "sgd", "threshold", head_dim="128").predicted is None


def test_the_share_of_w_q_and_w_k_is_theirs_in_the_sum_of_both_parts():
    at = {("adamw", SCALED, "128", "qk"): dict(zip(SEEDS, (0.01, 0.02, 0.03, 0.04, 0.05, 0.06), strict=True))}
    finding = one(made_up.findings("adamw", truth=Truth(spread=1.0, stable=at)), "adamw", "threshold", head_dim="128")
    shares = [0.06 / (0.06 + rate) for rate in (0.06, 0.05, 0.04, 0.03, 0.02, 0.01)]  # the rest: 0.06
    assert [parts.share for parts in finding.parts] == pytest.approx(shares[::-1])
    assert finding.share.low == pytest.approx((shares[2] + shares[3]) / 2)
    interval, coverage = finding.share_interval
    assert (interval.low, interval.high, coverage) == pytest.approx((shares[0], shares[-1], 0.96875))
    assert one(made_up.findings("sgd"), "sgd", "threshold", head_dim="128").share is None


def test_the_largest_stable_rate_of_every_convex_quadratic_lies_between_the_bounds():
    """Gradient descent on x·Hx / 2 is stable below 2 / (the largest eigenvalue of H), and a part of the weights has a block of H."""
    rng, places = np.random.default_rng(0), []
    for sign in (1.0, -1.0):  # with -1: curved downward in half of the directions
        for _ in range(200):
            directions, _ = np.linalg.qr(rng.normal(size=(6, 6)))
            curvature = np.append(rng.exponential(size=3) ** 3, sign * rng.exponential(size=3) ** 3)
            hessian = directions @ np.diag(curvature) @ directions.T
            tops = (np.linalg.eigvalsh(block)[-1] for block in (hessian, hessian[:2, :2], hessian[2:, 2:]))
            rates = [2 / top for top in tops]
            if min(rates) > 0:
                places.append((sign, Parts(0, *(Span(rate / (1 + 1e-9), rate * (1 + 1e-9)) for rate in rates)).place))
    assert {place for sign, place in places if sign > 0} == {"between"}
    assert {place for sign, place in places if sign < 0} == {"between", "below"}


@pytest.mark.parametrize(
    ("whole", "place"), [(0.95, "below"), (0.97, "between"), (1.5, "between"), (2.06, "between"), (2.2, "above")]
)
def test_a_rate_is_outside_its_bounds_only_if_no_number_in_the_brackets_is_inside(whole, place):
    qk, rest, all_ = (Span(rate / 1.02, rate * 1.02) for rate in (2.0, 2.0, whole))
    parts = Parts(0, all_, qk, rest)
    assert (parts.lower.low, parts.lower.high, parts.upper.high) == pytest.approx((1 / 1.02, 1.02, 2 * 1.02))
    assert parts.place == place


def test_a_seed_without_one_of_its_three_searches_has_no_share():
    truth = Truth(statuses={("adamw", SCALED, None, 12): "failed"})
    finding = one(made_up.findings("adamw", truth=truth), "adamw", "threshold", head_dim="128")
    assert [parts.seed for parts in finding.parts] == [10, 11, 13, 14, 15]


def test_the_formula_is_about_runs_that_train_all_weights():
    """Where only W_Q and W_K train the law itself is expected, and where only the rest trains the scale changes nothing."""
    parts = {("adamw", UNSCALED, "128", part): 0.005 for part in ("all", "qk", "rest")}
    found = made_up.findings("adamw", truth=Truth(stable=parts), fields={"skip": ({"head_dim": ("8",)},)})
    expected = {part: one(found, "adamw", "threshold", head_dim="128", trained=part) for part in ("all", "qk", "rest")}
    assert [f.predicted is not None for f in expected.values()] == [True, False, False]
    assert [f.bound for f in expected.values()] == [pytest.approx(128**0.25), pytest.approx(128**0.25), None]


def test_the_exponent_is_the_slope_of_each_seed(stable):
    found = slopes(stable.find("sgd", "threshold"))
    assert len(found) == 6
    assert np.mean(found) == pytest.approx(math.log(10.3 / 2.4) / math.log(16), abs=0.03)


@pytest.mark.parametrize(("factor", "step", "word"), [
    (1.15, 1.02, "SAME"), (1.15, 1.2, "UNDECIDED"), (1.25, 1.02, "UNDECIDED"), (1.6, 1.04, "LESS"), (1.6, 1.4, "UNDECIDED"), (0.6, 1.04, "MORE"),
])  # fmt: skip
def test_the_word_is_decided_by_the_whole_interval_and_the_step_of_the_search(factor, step, word, monkeypatch):
    monkeypatch.setattr(made_up, "BRACKET", step**0.5)
    truth = Truth(stable={("sgd", UNSCALED, "128", ""): 0.09 / factor}, spread=1.04)
    assert one(made_up.findings("sgd", truth=truth), "sgd", "threshold", head_dim="128").word == word


# --- times and scores


def test_each_seed_is_judged_at_the_rate_that_is_best_on_the_others():
    """A rate that is best for one seed alone is not taken for it."""
    lucky = {seed: 20 if seed == SEEDS[0] else 1400 for seed in SEEDS}
    found = made_up.findings("recall", truth=Truth(times={(SCALED, "lecun", "1e-3"): lucky}))
    finding = one(found, "recall", "time", init="lecun")
    assert [pair.rates for pair in finding.pairs] == [["3.2e-3", "1e-3"]] * 6
    assert finding.at_edge  # of the second arm


def test_times_are_compared_as_ratios_and_more_means_longer():
    found = made_up.findings("recall")
    slow, fast = (one(found, "recall", "time", init=init) for init in ("lecun", "gpt2"))
    assert slow.estimate.low == pytest.approx(469 / 67, rel=0.15) and slow.word == "MORE"
    assert fast.estimate.low == pytest.approx(100 / 134, rel=0.15) and fast.word in ("LESS", "UNDECIDED")
    times = {(arm, "lecun", rate): steps for arm, steps in ((SCALED, 100), (UNSCALED, 160)) for rate in RATES}
    assert one(made_up.findings("recall", truth=Truth(times=times)), "recall", "time", init="lecun").word == "MORE"


def test_a_run_that_never_solves_gives_a_range_from_its_cap():
    truth = Truth(times={(UNSCALED, "lecun", rate): None for rate in RATES})
    finding = one(made_up.findings("recall", truth=truth), "recall", "time", init="lecun")
    assert finding.estimate.low >= 1500 / 75 and finding.estimate.high == math.inf
    assert finding.word == "MORE"


def test_ties_go_to_the_rate_in_the_middle():
    truth = Truth(times={(SCALED, "lecun", rate): None for rate in RATES})
    config = made_up.grid("recall")
    arm = Arm(config, made_up.runs(config, truth), "recall", SCALED, {"init": "lecun"})
    assert arm.best_rate(Endpoint("time", config.studies["recall"]), SEEDS[0]) == RATES[2]


def test_where_no_rate_is_tuned_a_seed_needs_no_other_seed():
    others = {("text", arm, "", seed): "missing" for arm in BOTH for seed in SEEDS[1:]}
    truth = Truth(losses={(SCALED, ""): 2.0, (UNSCALED, ""): 2.5}, statuses=others)
    (pair,) = one(made_up.findings("text", truth=truth, fields={"factors": {}}), "text", "loss").pairs
    assert pair.effect.low == pytest.approx(0.5, abs=0.01)


def test_losses_are_compared_as_differences_and_a_run_that_is_not_finite_counts_as_untrained():
    finding = one(made_up.findings("text"), "text", "loss")
    assert finding.estimate.low == pytest.approx(2.42 - 1.56, abs=0.01) and finding.word == "MORE"
    broken = {(UNSCALED, rate): None for rate in RATES}
    lost = one(made_up.findings("text", truth=Truth(losses=broken)), "text", "loss")
    assert lost.estimate.low == pytest.approx(4.2 - 1.56, abs=0.01)


@pytest.mark.parametrize(("shift", "word"), [(-0.1, "LESS"), (-0.01, "SAME"), (0.01, "SAME"), (0.1, "MORE")])
def test_losses_that_differ_by_less_than_the_margin_are_the_same(shift, word):
    losses = {(arm, rate): 1.5 + shift * (arm == UNSCALED) for arm in BOTH for rate in RATES}
    assert one(made_up.findings("text", truth=Truth(losses=losses)), "text", "loss").word == word


def test_the_best_rate_has_the_highest_accuracy_or_the_lowest_loss_and_a_measure_takes_the_first_score():
    study = replace(made_up.grid("text").studies["text"], scores=("time", "accuracy", "loss"))
    result = {
        "val_accuracy": 0.9,
        "val_loss": 0.4,
        "nonfinite_step": None,
        "loss": [None, 4.2, 3.0],
        "measures": {"loss_at_9": 7.0},
    }
    run = Run("text", SCALED, (), 0, {"status": "done", "result": result})
    endpoints = [Endpoint(name, study) for name in ("accuracy", "loss", "loss_at_9")]
    assert [endpoint.cost(run) for endpoint in endpoints] == [-0.9, 0.4, -0.9]
    assert [endpoint.value(run).low for endpoint in endpoints] == [0.9, 0.4, 7.0]
    result["nonfinite_step"] = 3
    assert [endpoint.value(run).low for endpoint in endpoints[:2]] == [0.0, 4.2]
    result["measures"] = {}
    assert endpoints[2].value(run) is None


def test_a_measure_is_judged_at_the_rate_that_the_loss_chose():
    found = made_up.findings("text", fields={"measures": ("loss_at_9",)})
    for run in found.runs.select("text"):
        run.result["measures"]["loss_at_9"] = float(run.rate)
    finding = one(judge(found.grid, found.runs), "text", "loss_at_9")
    assert [pair.values[0].low for pair in finding.pairs] == [3.2e-3] * 6
    assert [pair.values[1].low for pair in finding.pairs] == [float(pair.rates[1]) for pair in finding.pairs]


def speeds(slopes_and_operations, **changes):
    """``text`` with validations on a line from 3.0: the finding about the speed."""
    found = made_up.findings("text", fields={"scores": ("loss", "speedup"), "factors": {}})
    for run in found.runs.select("text"):
        slope, operations = slopes_and_operations[run.arm]
        curve = [[step, 3.0 - slope * step] for step in (30, 60, 90, 120)]
        run.record["result"] |= {
            "measures": {"operations": operations},
            "validation": curve,
            "val_loss": curve[-1][1],
            "steps": 120,
        }
        run.record["result"] |= changes.get(run.arm, {})
    return one(judge(found.grid, found.runs), "text", "speedup")


@pytest.mark.parametrize(("slope", "operations", "ratio", "word"), [
    (0.015, 8, 1.5 * 10 / 8, "MORE"), (0.005, 10, 0.5, "LESS"), (0.01, 10, 1.0, "SAME"), (0.01, 5, 2.0, "MORE"),
])  # fmt: skip
def test_the_speed_is_the_ratio_of_operations_until_both_runs_have_the_larger_final_loss(slope, operations, ratio, word):
    finding = speeds({SCALED: (0.01, 10), UNSCALED: (slope, operations)})
    assert finding.estimate.low == finding.estimate.high == pytest.approx(ratio)
    assert finding.word == word and finding.endpoint.is_ratio
    spent = [span.low for span in finding.pairs[0].values]
    assert spent == pytest.approx([120 * 10 * min(1, slope / 0.01), 120 * operations * min(1, 0.01 / slope)])


def test_the_speed_of_a_run_that_is_not_finite_is_that_to_the_loss_of_the_untrained_model():
    finding = speeds(
        {SCALED: (0.01, 10), UNSCALED: (0.01, 10)}, **{UNSCALED: {"nonfinite_step": 9, "validation": [[30, None]]}}
    )
    assert finding.estimate == Span(0.0, 30 / 120) and finding.word == "LESS"  # at the first validation of the other run


def test_the_speed_is_judged_at_the_rate_that_the_loss_chose():
    found = made_up.findings("text", fields={"scores": ("loss", "speedup")})
    for run in found.runs.select("text"):
        run.record["result"] |= {"measures": {"operations": 1.0}, "validation": [[120, run.result["val_loss"]]], "steps": 120}
    rates = {
        name: [pair.rates for pair in one(judge(found.grid, found.runs), "text", name).pairs] for name in ("loss", "speedup")
    }
    assert rates["speedup"] == rates["loss"]


def test_levels_of_a_factor_are_compared_with_one_of_them():
    truth = Truth(spread=1.0, stable={("sgd", SCALED, "8", ""): 0.02, ("sgd", SCALED, "128", ""): 0.08})
    comparison = ComparisonConfig(study="sgd", arms=(SCALED, SCALED), against={"head_dim": "8"})
    found = made_up.findings("sgd", truth=truth, comparisons=(comparison,))
    (finding,) = found.findings
    assert finding.condition == {"head_dim": "128"} and finding.estimate.low == pytest.approx(0.25) and finding.word == "MORE"
    assert sides(found.grid, comparison, finding.condition) == ("d_k 8", "d_k 128")
    both = replace(comparison, arms=BOTH)
    assert sides(found.grid, both, finding.condition) == ("with the scale, d_k 8", "without the scale, d_k 128")
    assert [f.condition["head_dim"] for f in made_up.findings("sgd", comparisons=(both,)).findings] == ["8", "128"]
    for wrong, message in (({"width": "8"}, "against.width"), ({"head_dim": "9"}, "against.head_dim"), ({}, "with itself")):
        with pytest.raises(ConfigError, match=message):
            made_up.findings("sgd", comparisons=(replace(comparison, against=wrong),))


def test_runs_that_failed_leave_pairs_out():
    truth = Truth(statuses={("sgd", UNSCALED, None, 12): "failed", ("sgd", SCALED, None, 13): "missing"})
    finding = one(made_up.findings("sgd", truth=truth), "sgd", "threshold", **WIDE)
    assert [pair.seed for pair in finding.pairs] == [10, 11, 14, 15] and finding.word == "UNDECIDED"


@pytest.mark.parametrize("equal", [True, False])
def test_equal_losses_are_told_seed_by_seed(equal):
    (equality,) = made_up.findings("null", truth=Truth(equal=equal)).equalities
    assert equality.equal == dict.fromkeys(SEEDS, equal) and equality.steps == 30


# --- predictions


def status(study, *args, seeds=6, truth=None, names=(), **rest):
    found = made_up.findings(study, *names, seeds=seeds, truth=truth, predictions=foretold(study, *args, **rest))
    return [(verdict.status, verdict.measured) for verdict in verdicts(found)]


@pytest.mark.parametrize(("low", "high", "wanted"), [(9.0, 12.0, "HELD"), (None, 12.0, "HELD"), (11.5, None, "NOT HELD")])
def test_a_prediction_holds_if_the_median_lies_in_its_range(low, high, wanted):
    ((found, measured),) = status("sgd", "threshold", low, high, condition=WIDE)
    assert found == wanted and measured.low == pytest.approx(10.3, rel=0.08)


def test_too_few_pairs_and_an_open_range_decide_nothing_and_no_runs_have_no_answer():
    assert [found for found, _ in status("sgd", "threshold", 9.0, 12.0, condition=WIDE, seeds=4)] == ["UNDECIDED"]
    never = Truth(times={(UNSCALED, "lecun", rate): None for rate in RATES})
    answer = status("recall", "time", 4.0, 30.0, condition={"init": "lecun"}, truth=never)
    assert [found for found, _ in answer] == ["UNDECIDED"]
    none = Truth(statuses={("sgd", None, None, None): "missing"})
    assert status("sgd", "threshold", 9.0, 12.0, truth=none) == []


def test_a_prediction_is_about_every_condition_that_it_does_not_name():
    assert [found for found, _ in status("sgd", "threshold", 9.0, 12.0)] == ["NOT HELD", "HELD"]


def test_an_interval_holds_a_number_that_its_median_misses():
    ratios = zip(SEEDS, (0.95, 0.98, 1.05, 1.1, 1.1, 1.2), strict=True)
    stable = {("sgd", SCALED, "128", ""): dict.fromkeys(SEEDS, 0.09)}
    truth = Truth(stable=stable | {("sgd", UNSCALED, "128", ""): {seed: 0.09 / ratio for seed, ratio in ratios}})
    ranges = {"condition": WIDE, "truth": truth}
    assert [found for found, _ in status("sgd", "threshold", 1.0, 1.0, by="interval", **ranges)] == ["HELD"]
    assert [found for found, _ in status("sgd", "threshold", 1.0, 1.0, **ranges)] == ["NOT HELD"]


@pytest.mark.parametrize(("low", "high", "wanted"), [(0.75, 0.85, "HELD"), (0.1, 0.22, "NOT HELD")])
def test_a_prediction_of_the_share_takes_the_median_of_the_seeds(low, high, wanted):
    ((found, measured),) = status("adamw", "threshold", low, high, share=True, condition=WIDE)
    assert found == wanted and measured.low == pytest.approx(0.8, abs=0.03)


def test_the_share_of_too_few_seeds_and_of_missing_parts_decides_nothing():
    some = {"share": True, "condition": WIDE}
    assert [found for found, _ in status("adamw", "threshold", 0.5, 1.0, seeds=4, **some)] == ["UNDECIDED"]
    both = made_up.findings("adamw", predictions=foretold("adamw", "threshold", 0.5, 1.0, **some))
    for run in both.runs.select("adamw", condition={"trained": "rest"}):
        run.record["status"] = "missing"
    assert [(verdict.status, verdict.measured) for verdict in verdicts(judge(both.grid, both.runs))] == [("UNDECIDED", None)]


def test_a_ratio_is_held_against_the_formula_or_another_ratio():
    ((found, measured),) = status("adamw", "threshold", 0.87, 1.18, formula=True, condition=WIDE)
    assert found == "HELD" and measured.low == pytest.approx(2.9 / 2.89, rel=0.1)
    none = Truth(statuses={("adamw", None, None, None): "missing"})
    over = {"over": ("adamw", {"trained": "all"}), "condition": WIDE, "names": ("adamw",)}
    ((found, measured),) = status("sgd", "threshold", 2.5, 5.0, **over)
    assert found == "HELD" and measured.low == pytest.approx(10.3 / 2.9, rel=0.1)
    fewer = {"over": ("sgd", {}), "condition": {**WIDE, "trained": "all"}, "names": ("sgd",)}  # a study with fewer factors
    assert [found for found, _ in status("adamw", "threshold", 0.2, 0.4, **fewer)] == ["HELD"]
    assert status("sgd", "threshold", 2.5, 5.0, **over, truth=none) == [("UNDECIDED", None)]  # what it is divided by is missing
    few = Truth(statuses={("adamw", None, None, seed): "missing" for seed in SEEDS[2:]})
    assert [found for found, _ in status("sgd", "threshold", 2.5, 5.0, **over, truth=few)] == ["UNDECIDED"]
