"""The judge on fabricated records: each rule of the protocol's section 5, and simulations whose truth is known."""

import dataclasses
import itertools
import math
import random
from collections import Counter
from functools import cache

import numpy as np
import pytest

from minitx.ablation.arms import Arm, unsolved
from minitx.ablation.config import ComparisonConfig, ExpectedConfig, PredictionConfig, Solved, StudyConfig
from minitx.ablation.judge import judge, printed
from minitx.ablation.predictions import answers
from minitx.ablation.records import Run, Runs, solved_step
from minitx.ablation.statistics import Span
from minitx.config import ConfigError
from tests.ablation import made_up
from tests.ablation.made_up import RATES, SCALED, SEEDS, TUNE_SEEDS, UNSCALED, Truth

WIDE = {"head_dim": "128"}
RECALL = {"recall": made_up.studies()["recall"]}


def find(study, endpoint, truth=None, condition=WIDE, treatment=UNSCALED, **fields):
    """The finding of one study; ``fields`` change the study."""
    studies = {name: config for name, config in made_up.studies().items() if name in (study, "solved", "text_first")}
    studies[study] = dataclasses.replace(studies[study], **fields)
    grid = made_up.grid(studies=studies)
    found = judge(grid, made_up.runs(grid, truth)).find(study, endpoint, (SCALED, treatment), condition)
    assert len(found) == 1
    return found[0]


def times(arm, *steps, dim="128"):
    """Steps to solve at each rate, for ``Truth``."""
    return {(arm, dim, rate): value for rate, value in zip(RATES, steps, strict=True)}


def by_seed(judged, tuning=100):
    """One number a seed: the judged ones in order, and one for tuning."""
    return dict(zip(SEEDS, judged, strict=True)) | dict.fromkeys(TUNE_SEEDS, tuning)


# --- the whole grid ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole():
    grid = made_up.grid()
    return judge(grid, made_up.runs(grid, Truth(spread=1.02)))


def test_the_verdicts_of_a_grid_are_those_of_its_truth(whole):
    words = {
        (f.comparison.study, f.comparison.arms[1], f.endpoint, f.condition.get("head_dim")): f.verdict for f in whole.findings
    }
    assert words[("recall", UNSCALED, "time", "128")] == "SLOWER"
    assert words[("recall", UNSCALED, "largest_rate", "128")] == "NARROWER"
    assert words[("stability_adamw", UNSCALED, "stability", "8")] == "LESS STABLE"
    assert words[("stability_sgd", UNSCALED, "stability", "128")] == "LESS STABLE"
    assert words[("stability_adamw", "full_fold", "stability", "128")] == "SAME"
    assert words[("text", UNSCALED, "loss", None)] == "WORSE"
    assert words[("text_stability", UNSCALED, "stability", None)] == "LESS STABLE"


def test_three_primary_comparisons_of_six_pairs_reach_three_64ths(whole):
    primary = [finding for finding in whole.findings if finding.is_primary]
    assert [(f.comparison.study, f.p, f.p_adjusted) for f in primary] == [
        (study, 1 / 64, 3 / 64) for study in ("recall", "stability_adamw", "stability_sgd")
    ]
    assert all(finding.p_adjusted is None for finding in whole.findings if not finding.is_primary)


def test_ratios_are_held_against_the_law_of_their_condition(whole):
    laws = {(f.comparison.study, f.condition.get("head_dim")): f.law for f in whole.findings if f.comparison.law}
    assert laws[("stability_adamw", "8")] == pytest.approx(8**0.25)
    assert laws[("stability_sgd", "128")] == pytest.approx(128**0.5)


def test_the_order_of_the_records_means_nothing(whole):
    mixed = list(whole.runs.all)
    random.Random(0).shuffle(mixed)
    again = judge(whole.grid, Runs(tuple(mixed)))
    assert {repr(f) for f in again.findings} == {repr(f) for f in whole.findings}


def test_names_of_studies_and_arms_mean_nothing(whole):
    def rename(text):
        return {"recall": "alpha", SCALED: "beta", UNSCALED: "gamma", "head_dim": "delta"}.get(text, text)

    recall = whole.grid.studies["recall"]
    study = dataclasses.replace(
        recall, arms=tuple(map(rename, recall.arms)), factors={rename(k): v for k, v in recall.factors.items()}
    )
    compared = ComparisonConfig(study="alpha", arms=("beta", "gamma"), primary=({"delta": "128"},))
    arms = {rename(name): value for name, value in whole.grid.arms.items()}
    grid = dataclasses.replace(whole.grid, studies={"alpha": study}, arms=arms, comparisons=(compared,), predictions={})
    runs = []
    for run in whole.runs.select("recall"):
        factors = tuple(sorted((rename(name), level) for name, level in run.factors))
        runs.append(dataclasses.replace(run, study="alpha", arm=rename(run.arm), factors=factors))
    found = judge(grid, Runs(tuple(runs))).findings
    assert [f.pairs for f in found] == [f.pairs for f in whole.findings if f.comparison.study == "recall"]


# --- time -------------------------------------------------------------------------------------------------------------------


def test_the_ratio_of_times_is_that_of_the_own_best_rates():
    found = find("recall", "time", Truth(spread=1.0))
    assert found.estimate == pytest.approx(469 / 67) and not found.or_more
    assert found.rates == (("3.2e-3",) * 6, ("1e-3",) * 6) and found.at_edge == (False, True)


@pytest.mark.parametrize("value", [0.5, 0.9, 0.99])
def test_a_run_solves_at_the_first_step_where_the_window_reaches_the_value(value):
    run = made_up.runs(made_up.grid(studies=RECALL), Truth(spread=1.0)).select("recall", SCALED, WIDE, rate="3.2e-3")[0]
    step, accuracy = solved_step(run.result, Solved(value=value)), run.result["accuracy"]
    assert np.mean(accuracy[step - 16 : step]) >= value > np.mean(accuracy[step - 17 : step - 1])
    assert value != 0.9 or step == 67


def test_a_run_that_never_solves_is_a_range_from_the_cap_on():
    judged = {(SCALED, "128", "3.2e-3"): by_seed([100] * 6, tuning=60)}
    judged |= {(UNSCALED, "128", "1e-3"): by_seed([None] * 4 + [400, 400], tuning=400), (UNSCALED, "128", "1.8e-3"): None}
    found = find("recall", "time", Truth(judged))
    assert [pair.effect for pair in found.pairs] == [Span(15, math.inf)] * 4 + [Span(4, 4)] * 2
    assert (found.estimate, found.or_more, found.interval) == (15, True, Span(4, math.inf))


def test_a_reference_at_the_cap_bounds_a_pair_from_above_and_two_at_the_cap_tell_nothing():
    judged = {(SCALED, "128", "3.2e-3"): by_seed([None, None, 100, 100, 100, 100], tuning=50)}
    judged |= {(UNSCALED, "128", "1e-3"): by_seed([300, None, 300, 300, 300, 300], tuning=300)}
    found = find("recall", "time", Truth(judged))
    assert [pair.effect for pair in found.pairs][:2] == [Span(0, 300 / 1500), Span(0, math.inf)]
    assert (found.verdict, found.p) == ("UNDECIDED", 22 / 64)  # four of six pairs are wholly beyond the margin


def test_a_run_that_became_nonfinite_counts_as_the_cap_even_after_it_solved():
    every = {("recall", UNSCALED, rate): "NONFINITE" for rate in RATES}
    grid = made_up.grid(studies=RECALL)
    runs = made_up.runs(grid, Truth(outcomes=every))
    for run in runs.select("recall", UNSCALED, status="done"):
        run.record["result"]["accuracy"] = [0.0] * 50 + [1.0] * 50
    assert judge(grid, runs).find("recall", "time")[0].pairs[0].treatment == Span(1500, math.inf)


def test_a_treatment_that_no_tuning_run_solves_is_slower_by_the_cap_or_more():
    found = find("recall", "time", Truth(times(UNSCALED, None, None, None, None, None), spread=1.0))
    assert (found.verdict, found.estimate, found.or_more) == ("SLOWER", pytest.approx(1500 / 67), True)
    assert set(found.rates[1]) == {"3.2e-3"}  # all end alike: the most central


def test_an_arm_that_never_solves_takes_the_rate_with_the_best_last_score():
    grid = made_up.grid(studies=RECALL)
    runs = made_up.runs(grid, Truth(times(UNSCALED, None, None, None, None, None)))
    for run in runs.select("recall", UNSCALED, WIDE, rate="1.8e-3"):
        run.record["result"]["val_accuracy"] = 0.5
    assert Arm(grid, runs, "recall", UNSCALED, WIDE).best_rate("time", TUNE_SEEDS) == "1.8e-3"


def test_a_reference_that_no_tuning_run_solves_leaves_it_undecided_with_p_1():
    found = find("recall", "time", Truth(times(SCALED, None, None, None, None, None)))
    assert (found.verdict, found.p) == ("UNDECIDED", 1) and "first arm" in found.reason


def test_equal_rates_are_settled_by_the_middle_of_those_that_solve():
    assert set(find("recall", "time", Truth(times(SCALED, 100, 100, 100, 100, 100), spread=1.0)).rates[0]) == {"3.2e-3"}
    assert set(find("recall", "time", Truth(times(SCALED, None, None, 100, 100, 100), spread=1.0)).rates[0]) == {"5.6e-3"}


def test_the_best_rate_has_the_least_geometric_mean():
    ragged = {
        (SCALED, "128", "1e-3"): by_seed([50] * 6) | {0: 20, 1: 500},
        (SCALED, "128", "3.2e-3"): by_seed([50] * 6) | {0: 120, 1: 120},
    }
    truth = Truth({**times(SCALED, None, None, None, None, None), **ragged})
    assert set(find("recall", "time", truth).rates[0]) == {"1e-3"}  # sqrt(20 * 500) = 100; the arithmetic mean is 260


def test_without_tuning_seeds_a_seed_is_not_among_those_that_choose_its_rate():
    fast, slow = by_seed([100] * 6), by_seed([40, 110, 110, 110, 110, 110])
    truth = Truth(
        {**times(SCALED, None, None, None, None, None), (SCALED, "128", "1e-3"): fast, (SCALED, "128", "1.8e-3"): slow}
    )
    found = find("recall", "time", truth, tune_seeds=(), prune=None)
    assert found.rates[0] == ("1e-3",) + ("1.8e-3",) * 5


def test_tuning_seeds_are_never_judged():
    assert [pair.seed for pair in find("recall", "time").pairs] == list(SEEDS)


def test_a_verdict_that_a_better_choice_of_the_rate_would_change_is_undecided():
    unlucky = {
        (UNSCALED, "128", "1e-3"): by_seed([300] * 6, tuning=300),
        (UNSCALED, "128", "1.8e-3"): by_seed([70] * 6, tuning=400),
    }
    found = find("recall", "time", Truth(unlucky))
    assert found.verdict == "UNDECIDED" and found.interval.low > 1.25 and "1.8e-3" in found.reason


def test_fewer_than_six_pairs_give_neither_verdict_nor_p():
    found = find(
        "recall", "time", Truth(statuses={("recall", UNSCALED, None, 12): "failed", ("recall", SCALED, None, 14): "missing"})
    )
    assert (found.verdict, found.p, found.p_adjusted, found.interval) == ("UNDECIDED", None, None, None)
    assert found.missing == (12, 14) and len(found.pairs) == 4 and "4 pairs" in found.reason


@pytest.mark.parametrize(
    ("steps", "word"), [(100, "SAME"), (125, "SAME"), (80, "SAME"), (126, "SLOWER"), (79, "FASTER"), ((120, 130), "UNDECIDED")]
)
def test_the_margin_itself_counts_as_the_same(steps, word):
    judged = by_seed([steps] * 6) if isinstance(steps, int) else by_seed(list(steps) * 3)
    never = times(SCALED, None, None, None, None, None) | times(UNSCALED, None, None, None, None, None)
    truth = Truth({**never, (SCALED, "128", "1e-3"): by_seed([100] * 6), (UNSCALED, "128", "1e-3"): judged})
    assert find("recall", "time", truth).verdict == word


# --- the largest usable rate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "top"),
    [
        ((100, 90, 80, None, None), Span(2, 2)),
        ((100, 90, 80, 90, 100), Span(4, math.inf)),  # at the edge of the grid
        ((80, None, 90, 90, None), Span(0, 0)),  # the run of rates that contains the best one
        ((80, None, None, None, None), Span(0, 0)),
    ],
)
def test_the_largest_usable_rate_ends_an_unbroken_run_that_contains_the_best_one(steps, top):
    assert {pair.treatment for pair in find("recall", "largest_rate", Truth(times(UNSCALED, *steps))).pairs} == {top}


def test_a_seed_that_fails_at_its_best_rate_has_a_top_below_it():
    judged = {(UNSCALED, "128", "1.8e-3"): by_seed([None] + [100] * 5), (UNSCALED, "128", "1e-3"): None}
    assert find("recall", "largest_rate", Truth(judged)).pairs[0].treatment == Span(-math.inf, 0)


def test_a_rate_that_was_not_run_leaves_the_top_open():
    grows = times(UNSCALED, 100, None, None, None, None)
    grows |= {(UNSCALED, "128", rate): by_seed([100] * 6, tuning=None) for rate in ("1.8e-3", "3.2e-3")}
    assert find("recall", "largest_rate", Truth(grows)).pairs[0].treatment == Span(2, math.inf)


@pytest.mark.parametrize(
    ("scaled", "unscaled", "word", "effect"),
    [
        ((9, 8, 9, 9, None), (8, None, None, None, None), "NARROWER", Span(-4, -2)),
        ((9, 8, 9, None, None), (8, None, None, None, None), "UNDECIDED", Span(-3, -1)),
        ((9, 8, 9, None, None), (9, 8, 9, None, None), "SAME", Span(-1, 1)),
        ((8, None, None, None, None), (9, 8, 9, 9, None), "WIDER", Span(2, 4)),
        ((9, 8, 9, 9, 9), (9, 8, 9, 9, 9), "UNDECIDED", Span(-math.inf, math.inf)),
    ],
)
def test_a_difference_of_largest_rates_is_known_to_one_step(scaled, unscaled, word, effect):
    tens = [tuple(value and 10 * value for value in steps) for steps in (scaled, unscaled)]
    found = find("recall", "largest_rate", Truth(times(SCALED, *tens[0]) | times(UNSCALED, *tens[1])))
    assert (found.verdict, found.pairs[0].effect) == (word, effect)
    assert math.isinf(effect.low) or printed("largest_rate", found.pairs) == Span(effect.low + 1, effect.high - 1)


def test_runs_that_never_solve_are_counted_at_every_rate_that_was_tried():
    grid = made_up.grid(studies=RECALL)
    found = unsolved(grid, made_up.runs(grid), "recall", UNSCALED, WIDE)
    assert [(one.rate, one.count, one.total) for one in found] == [
        ("1e-3", 0, 6),
        ("1.8e-3", 0, 6),
        ("3.2e-3", 6, 6),
        ("5.6e-3", 6, 6),
    ]
    assert found[-1].interval.low == pytest.approx(0.61, abs=0.01)


# --- stability --------------------------------------------------------------------------------------------------------------


def stability(largest, study="stability_adamw", condition=WIDE, **truth):
    """The finding where the reference's and the treatment's largest stable rates are known."""
    dim = condition.get("head_dim", "")
    known = {(study, arm, dim): dict.fromkeys(SEEDS, rate) for arm, rate in zip((SCALED, UNSCALED), largest, strict=True)}
    return find(study, "stability", Truth(stable=known, **truth), condition)


@pytest.mark.parametrize("study", ["stability_adamw", "text_stability"])
def test_the_largest_stable_rate_is_recovered(study):
    found = stability((0.012, 0.004), study, WIDE if study == "stability_adamw" else {})
    assert found.pairs[0].reference.low == pytest.approx(0.012, rel=0.01)
    assert found.estimate == pytest.approx(3, rel=0.02) and found.verdict == "LESS STABLE" and found.rates == ((), ())


@pytest.mark.parametrize(
    ("largest", "effect", "word"),
    [
        ((0.05, 0.01), (3.2, math.inf), "LESS STABLE"),  # above the largest rate
        ((0.01, 0.0003), (10, math.inf), "LESS STABLE"),  # lost at the smallest rate; no higher one is run
        ((0.05, 0.05), (0, math.inf), "UNDECIDED"),
        ((0.0003, 0.01), (0, 0.1), "MORE STABLE"),
        ((0.01, 0.01), (1, 1), "SAME"),
    ],
)
def test_a_largest_stable_rate_beyond_the_grid_makes_a_range(largest, effect, word):
    found = stability(largest)
    assert found.verdict == word
    assert found.pairs[0].effect == Span(pytest.approx(effect[0], rel=0.01), pytest.approx(effect[1], rel=0.01))


def test_a_nonfinite_run_counts_as_accuracy_0():
    found = stability((0.03, 0.03), outcomes={("stability_adamw", UNSCALED, "1e-2"): "NONFINITE"})
    assert 0.0056 < found.pairs[0].treatment.low < 0.0064
    assert found.pairs[0].treatment.low == found.pairs[0].treatment.high


def test_a_nonfinite_loss_puts_the_rate_between_two():
    found = stability((0.03, 0.03), "text_stability", {}, outcomes={("text_stability", UNSCALED, "1e-2"): "NONFINITE"})
    assert found.pairs[0].treatment == Span(0.0056, 0.01)


def test_a_pair_whose_first_phase_did_not_solve_is_missing():
    studies = {name: config for name, config in made_up.studies().items() if name in ("solved", "stability_adamw")}
    grid = made_up.grid(studies=studies)
    runs = made_up.runs(grid)
    first = runs.select("solved", condition=WIDE, seeds=[13])[0]
    first.record["result"]["accuracy"] = [0.5] * 100
    found = judge(grid, runs).find("stability_adamw", "stability", (SCALED, UNSCALED))
    assert [finding.missing for finding in found] == [(), (13,)]


# --- scores, measures, equality ---------------------------------------------------------------------------------------------


def losses(arm, values):
    return {(arm, rate): values for rate in made_up.TEXT_RATES}


@pytest.mark.parametrize(("loss", "word"), [(1.7, "WORSE"), (1.6, "SAME"), (1.5, "BETTER"), ((1.6, 1.7), "UNDECIDED")])
def test_a_larger_loss_is_worse(loss, word):
    values = {seed: loss if isinstance(loss, float) else loss[seed % 2] for seed in SEEDS}
    truth = Truth(losses={**losses(SCALED, dict.fromkeys(SEEDS, 1.6)), **losses(UNSCALED, values)})
    assert find("text", "loss", truth, {}).verdict == word


def test_a_lower_accuracy_is_worse():
    grid = made_up.grid(studies={"text": dataclasses.replace(made_up.studies()["text"], scores=("accuracy",))})
    runs = made_up.runs(grid)
    for run in runs.all:
        run.record["result"]["val_accuracy"] = 0.5 if run.arm == UNSCALED else 0.6 + (0.1 if run.rate == "1e-2" else 0.0)
    found = judge(grid, runs).find("text", "accuracy")[0]
    assert (found.verdict, found.estimate, found.rates[0][0]) == ("WORSE", pytest.approx(-0.2), "1e-2")


@pytest.mark.parametrize("outcome", ["NONFINITE", "DIVERGED"])
def test_a_run_that_diverged_scores_its_initial_loss(outcome):
    every = {("text", UNSCALED, rate): outcome for rate in made_up.TEXT_RATES}
    pair = find("text", "loss", Truth(outcomes=every), {}).pairs[0]
    assert pair.treatment.low == pytest.approx(made_up.INITIAL, abs=0.01)


def test_a_run_without_validation_has_no_score():
    grid = made_up.grid(studies={"text": made_up.studies()["text"]})
    runs = made_up.runs(grid)
    for run in runs.select("text", UNSCALED, seeds=[11]):
        run.record["result"]["val_loss"] = None
    assert judge(grid, runs).find("text", "loss")[0].missing == (11,)


def test_a_measure_is_judged_at_the_rate_that_the_score_chose():
    grid = made_up.grid(studies={"text": dataclasses.replace(made_up.studies()["text"], measures=("loss_at_64",))})
    runs = made_up.runs(grid)
    for run in runs.all:
        run.record["result"]["measures"]["loss_at_64"] = {"1e-3": 1.0, "3.2e-3": 2.0, "1e-2": 3.0}[run.rate]
    found = judge(grid, runs).find("text", "loss_at_64")[0]
    assert (found.verdict, found.estimate, found.rates[0][0]) == ("BETTER", -1.0, "3.2e-3")


@pytest.mark.parametrize("equal", [True, False])
def test_equality_is_that_of_the_losses_bit_for_bit(equal):
    grid = made_up.grid(studies={"null": made_up.studies()["null"]})
    found = judge(grid, made_up.runs(grid, Truth(equal=equal, statuses={("null", SCALED, "", 11): "missing"})))
    assert found.equalities[0].equal == {seed: equal for seed in SEEDS if seed != 11} and found.equalities[0].steps == 30
    assert not found.findings


# --- the family -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_in_grid", [True, False])
def test_a_primary_comparison_without_runs_still_counts_in_the_family(whole, is_in_grid):
    kept = tuple(run for run in whole.runs.all if run.study != "stability_sgd")
    gone = tuple(dataclasses.replace(run, record={}) for run in whole.runs.select("stability_sgd")) if is_in_grid else ()
    primary = [finding for finding in judge(whole.grid, Runs(kept + gone)).findings if finding.is_primary]
    found = [(f.p_adjusted, f.verdict) for f in primary]
    assert found == [(3 / 64, "SLOWER"), (3 / 64, "LESS STABLE")] + [(None, "UNDECIDED")] * is_in_grid


def test_a_primary_comparison_needs_its_adjusted_p():
    primary = ({"head_dim": "128"}, {"head_dim": "8"})
    grid = made_up.grid(
        studies=RECALL, comparisons=(ComparisonConfig(study="recall", arms=(SCALED, UNSCALED), primary=primary),) * 2
    )
    found = judge(grid, made_up.runs(grid)).find("recall", "time", condition=WIDE)[0]
    assert (found.p_adjusted, found.verdict) == (4 / 64, "UNDECIDED") and "adjusted p" in found.reason


# --- predictions ------------------------------------------------------------------------------------------------------------


RULES = {"count": lambda findings, least=0: ("HELD" if len(findings.findings) >= least else "NOT HELD", "counted")}


def answer(truth=None, *, rule=None, options=None, about=__name__, **expected):
    """The answer to one prediction about ``recall``."""
    expect = ()
    if expected:
        expect = (
            ExpectedConfig(
                **{"study": "recall", "arms": (SCALED, UNSCALED), "endpoint": "time", "condition": WIDE, **expected}
            ),
        )
    prediction = PredictionConfig(statement="It is so.", expect=expect, rule=rule, options=options or {})
    grid = made_up.grid(studies=RECALL, predictions={"Q": prediction}, about=about)
    (found,) = answers(judge(grid, made_up.runs(grid, truth)))
    return found


@pytest.mark.parametrize(
    ("status", "truth", "expected"),
    [
        ("HELD", None, {"verdict": "SLOWER", "ratio": (4, None)}),
        ("NOT HELD", None, {"verdict": "SAME"}),
        ("NOT HELD", None, {"verdict": "SLOWER", "ratio": (None, 4)}),
        ("UNDECIDED", None, {"verdict": "SLOWER", "condition": {"head_dim": "8"}}),  # the verdict is UNDECIDED
        ("HELD", None, {"ratio": (1.1, 1.6), "condition": {"head_dim": "8"}}),
        ("UNDECIDED", None, {"ratio": (1.1, None), "condition": {}, "verdict": "SLOWER"}),  # one of two holds
        ("NOT TESTED", Truth(statuses={(None, None, None, None): "missing"}), {"verdict": "SLOWER"}),
        ("UNDECIDED", Truth(statuses={(None, None, None, 12): "missing"}), {"ratio": (4, None)}),
        # 1,500 / 67 = 22 or more
        ("HELD", Truth(times(UNSCALED, None, None, None, None, None)), {"ratio": (20, None)}),
        ("UNDECIDED", Truth(times(UNSCALED, None, None, None, None, None)), {"ratio": (20, 30)}),
        ("NOT HELD", Truth(times(UNSCALED, None, None, None, None, None)), {"ratio": (4, 10)}),
    ],
)
def test_a_prediction_is_refuted_only_by_what_is_known(status, truth, expected):
    found = answer(truth, **expected)
    assert found.status == status and found.evidence


def test_a_rule_is_a_function_of_the_module_that_the_grid_names():
    assert answer(rule="count", options={"least": 1}).status == "HELD"
    assert answer(rule="count", options={"least": 99}, verdict="SLOWER").status == "NOT HELD"


@pytest.mark.parametrize("about", [None, __name__])
def test_a_rule_that_is_not_there_is_named(about):
    with pytest.raises(ConfigError, match="no rule vanished"):
        answer(rule="vanished", about=about)


# --- simulations ------------------------------------------------------------------------------------------------------------

TRIALS, CAP = 2000, 400
STUDY = StudyConfig(
    base=("trainer.max_steps=400",),
    arms=("a", "b"),
    factors={"lr": {"1e-3": (), "1e-2": ()}},
    seeds=SEEDS,
    scores=("time",),
    solved=Solved(window=1),
)
SIMULATED = made_up.grid(
    studies={"s": STUDY},
    arms={"a": (), "b": ()},
    comparisons=(ComparisonConfig(study="s", arms=("a", "b"), primary=({},)),),
    predictions={},
)


@cache
def verdicts(ratio, spread=0.2, trials=TRIALS, margin=1.25):
    """The share of each verdict where times are lognormal, equal at both rates, and the median ratio is known."""
    rng, grid, found = np.random.default_rng(3), dataclasses.replace(SIMULATED, ratio_margin=margin), Counter()
    for _ in range(trials):
        runs = []
        for arm, middle in (("a", 40), ("b", 40 * ratio)):
            for rate, seed in itertools.product(STUDY.factors["lr"], SEEDS):
                steps = round(middle * np.exp(spread * rng.normal()))
                result = {"accuracy": [0.0] * (steps - 1) + [1.0], "cap": CAP, "nonfinite_step": None, "val_accuracy": 1.0}
                runs.append(Run("s", arm, (("lr", rate),), seed, {"status": "done", "result": result}))
        found[judge(grid, Runs(tuple(runs))).findings[0].verdict] += 1 / trials
    return found


@pytest.mark.parametrize(("word", "ratio"), [("SLOWER", 1.25), ("SAME", 1.25), ("FASTER", 0.8)])
def test_a_verdict_that_is_not_true_is_given_in_six_of_a_hundred_at_most(word, ratio):
    assert verdicts(ratio)[word] <= 0.06


def test_a_judge_with_another_margin_gives_verdicts_that_are_not_true():
    """A seeded fault: the test above can fail."""
    assert verdicts(1.25, trials=200, margin=1.01)["SLOWER"] > 0.06


def test_a_large_effect_is_found():
    assert verdicts(4.0, trials=200)["SLOWER"] >= 0.95


def test_equal_arms_are_the_same_where_runs_vary_little():
    assert verdicts(1.0, spread=0.03, trials=200)["SAME"] >= 0.95
