"""Every procedure against cases worked by hand, another implementation, and simulations where the truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from minitx.ablation import statistics as st

SIMULATIONS = [400, pytest.param(2000, marks=pytest.mark.slow)]


def draws(count: int, pairs: int, mean: float = 0.0, sd: float = 1.0) -> np.ndarray:
    return np.random.default_rng(20240 + pairs).normal(mean, sd, size=(count, pairs))


def assert_rate(hits: int, trials: int, truth: float) -> None:
    """The share seen lies in the 99.9 % binomial interval of the truth."""
    assert stats.binomtest(hits, trials, truth).pvalue > 0.001, f"{hits}/{trials} against {truth}"


# --- the sign-flip test


def test_sign_flip_counts_the_patterns_as_extreme_as_the_one_seen() -> None:
    # sums of ±1 ±2 ±4: only −7 and −5 reach down to −5 = −4 −2 +1
    assert st.sign_flip_p([1, -2, -4], "less") == 2 / 8
    assert st.sign_flip_p([1, -2, -4], "greater") == 7 / 8
    assert st.sign_flip_p([1, -2, -4]) == 4 / 8


def test_six_pairs_in_one_direction_reach_the_floor_of_one_in_64() -> None:
    assert st.sign_flip_p([-0.1] * 6, "less") == 1 / 64
    assert st.sign_flip_p([-0.1] * 6) == 2 / 64


def test_equal_pairs_give_p_one() -> None:
    assert st.sign_flip_p([0.0] * 6, "less") == st.sign_flip_p([0.0] * 6) == 1.0


@pytest.mark.parametrize("tail", ["less", "greater", "two-sided"])
def test_sign_flip_agrees_with_scipy_permutation_test(tail: str) -> None:
    sample = draws(1, 7)[0]
    ours = st.sign_flip_p(sample, tail)
    theirs = stats.permutation_test(
        (sample, np.zeros_like(sample)), lambda a, b: np.mean(a - b), permutation_type="samples", alternative=tail
    )
    assert ours == pytest.approx(theirs.pvalue, abs=1e-12)


@pytest.mark.parametrize("simulations", SIMULATIONS)
@pytest.mark.parametrize("tail", ["less", "two-sided"])
def test_sign_flip_rejects_a_true_null_as_often_as_its_discrete_level_says(simulations: int, tail: str) -> None:
    hits = sum(st.sign_flip_p(sample, tail) < 0.05 for sample in draws(simulations, 6))
    assert_rate(hits, simulations, 3 / 64 if tail == "less" else 2 / 64)  # largest level below .05 on 64 patterns


def test_sign_flip_has_power_against_a_large_effect() -> None:
    hits = sum(st.sign_flip_p(sample, "less") < 0.05 for sample in draws(400, 8, mean=-1.5))
    assert hits / 400 > 0.9


def test_sign_flip_refuses_what_it_cannot_judge() -> None:
    with pytest.raises(ValueError, match="at most 16 pairs"):
        st.sign_flip_p([1.0] * 17)
    with pytest.raises(ValueError, match="must be finite"):
        st.sign_flip_p([1.0, float("nan")])
    with pytest.raises(ValueError, match="at least 1"):
        st.sign_flip_p([])


# --- Holm


def test_holm_on_the_textbook_case() -> None:
    assert st.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))


def test_holm_keeps_the_size_of_the_family_when_a_test_is_missing() -> None:
    assert st.holm([0.02], family_size=2) == (0.04,)
    with pytest.raises(ValueError, match="family_size=1"):
        st.holm([0.1, 0.2], family_size=1)


def test_holm_holds_the_family_wise_error() -> None:
    rng = np.random.default_rng(5)
    hits = sum(min(st.holm(list(rng.uniform(size=4)))) < 0.05 for _ in range(2000))
    assert_rate(hits, 2000, 1 - (1 - 0.05 / 4) ** 4)


# --- intervals


def test_paired_t_interval_by_hand() -> None:
    # mean 2, s = 1, n = 3, t(.975, 2) = 4.3027: 2 ± 4.3027/√3
    assert st.paired_t_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 2.48414, 2 + 2.48414), abs=1e-4)


@pytest.mark.parametrize("simulations", SIMULATIONS)
def test_paired_t_interval_covers_the_truth(simulations: int) -> None:
    intervals = [st.paired_t_interval(sample) for sample in draws(simulations, 6, mean=0.3)]
    assert_rate(sum(i.low <= 0.3 <= i.high for i in intervals), simulations, 0.95)


def test_slope_is_exact_on_a_line() -> None:
    x = [3.0, 5.0, 7.0]
    interval = st.slope_interval(x, [[2 * v + shift for v in x] for shift in (0, 1, 5)])
    assert interval == pytest.approx((2.0, 2.0, 2.0))


@pytest.mark.parametrize("simulations", SIMULATIONS)
@pytest.mark.parametrize("seeds", [6, 8])
def test_slope_interval_covers_the_truth_with_few_seeds(simulations: int, seeds: int) -> None:
    rng = np.random.default_rng(11)
    x = np.array([3.0, 5.0, 7.0])
    hits = 0
    for _ in range(simulations):
        interval = st.slope_interval(x, 0.5 * x + rng.normal(size=(seeds, 3)), resamples=999)
        hits += interval.low <= 0.5 <= interval.high
    assert_rate(hits, simulations, 0.932)  # approximate, as documented; plain percentiles give .87 and would fail here


def test_slope_interval_refuses_two_seeds_and_one_level() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        st.slope_interval([1, 2], [[1, 2], [3, 4]])
    with pytest.raises(ValueError, match="two different levels"):
        st.slope_interval([1, 1], [[1, 2]] * 3)


def test_fit_interval_finds_the_exponent_of_a_power_law() -> None:
    widths = np.array([4, 8, 16, 32, 64, 128, 256])
    interval = st.fit_interval(np.log(widths), np.log(3.0 * widths**1.5))
    assert interval.estimate == pytest.approx(1.5)
    assert interval.high - interval.low < 1e-6


def test_wilson_interval_at_the_ends_and_in_the_middle() -> None:
    # k = 0, n = 10: upper end z²/(n + z²) = 3.8415/13.8415
    assert st.wilson_interval(0, 10) == pytest.approx((0.0, 0.0, 0.27753), abs=1e-4)
    assert st.wilson_interval(5, 10) == pytest.approx((0.5, 0.2366, 0.7634), abs=1e-4)
    with pytest.raises(ValueError, match="successes=3"):
        st.wilson_interval(3, 2)


def test_fisher_on_the_lady_tasting_tea() -> None:
    assert st.fisher_p((3, 1), (4, 4), "greater") == pytest.approx(17 / 70)
    assert st.fisher_p((0, 6), (6, 6), "less") == pytest.approx(1 / 924)


# --- equivalence


def test_equivalence_agrees_with_two_scipy_t_tests() -> None:
    sample = draws(1, 8, mean=0.004, sd=0.01)[0]
    low = stats.ttest_1samp(sample, -0.02, alternative="greater").pvalue
    high = stats.ttest_1samp(sample, 0.02, alternative="less").pvalue
    assert st.equivalence_p(sample, 0.02) == pytest.approx(max(low, high))


def test_equal_results_are_equivalent_but_never_with_p_zero() -> None:
    assert st.equivalence_p([0.0] * 6, 0.02) == 1 / 64
    assert st.equivalence_p([0.5] * 6, 0.02) == 1.0


@pytest.mark.parametrize("simulations", SIMULATIONS)
def test_equivalence_is_claimed_wrongly_at_most_at_its_level(simulations: int) -> None:
    hits = sum(st.equivalence_p(sample, 0.02) < 0.05 for sample in draws(simulations, 6, mean=-0.02, sd=0.01))
    assert_rate(hits, simulations, 0.05)  # the truth sits exactly on the margin, and the far side never matters


def test_equivalence_has_power_when_there_is_no_difference() -> None:
    hits = sum(st.equivalence_p(sample, 0.02) < 0.05 for sample in draws(400, 6, sd=0.008))
    assert hits / 400 > 0.9


# --- tuning and the window


def test_each_seed_is_judged_at_the_rate_that_the_others_like_best() -> None:
    scores = [[0.0, 0.9, 0.1], [0.0, 0.8, 0.1], [1.0, 0.0, 0.1]]
    choices = st.leave_one_out(scores)
    assert choices.picks == (0, 0, 1)  # for the third seed the others agree on the middle rate
    assert choices.on_edge == (True, True, False)


def test_changing_the_judged_seed_never_changes_its_own_rate() -> None:
    rng = np.random.default_rng(3)
    scores = rng.uniform(size=(6, 3))
    changed = scores.copy()
    changed[2] = rng.uniform(size=3)
    assert st.leave_one_out(scores).picks[2] == st.leave_one_out(changed).picks[2]


def test_a_tie_goes_to_the_smaller_rate_and_is_no_edge() -> None:
    choices = st.leave_one_out([[1.0, 1.0, 0.2]] * 4)
    assert choices.picks == (0, 0, 0, 0)
    assert not any(choices.on_edge)


def test_a_strictly_best_end_of_the_grid_is_flagged() -> None:
    assert all(st.leave_one_out([[0.2, 0.5, 0.9]] * 3).on_edge)


def test_choosing_by_the_other_seeds_is_unbiased_where_choosing_by_oneself_is_not() -> None:
    scores = np.random.default_rng(8).normal(size=(2000, 6, 3))
    honest = np.mean([s[np.arange(6), list(st.leave_one_out(s).picks)].mean() for s in scores])
    assert abs(honest) < 0.03
    assert scores.max(axis=2).mean() > 0.8


def test_usable_window_is_the_share_of_solved_rates_and_the_largest_of_them() -> None:
    window = st.usable_window([[1.0, 0.99, 0.5], [0.3, 0.2, 0.1], [0.989, 0.2, 1.0]])
    assert window.share == pytest.approx((2 / 3, 0.0, 1 / 3))
    assert window.largest == (1, -1, 2)


# --- the verdict


def test_the_three_verdicts() -> None:
    assert st.verdict([-0.4, -0.5, -0.3, -0.6, -0.4, -0.5], margin=0.02, p_harm=0.031).word == "HARM"
    assert st.verdict([0.0, 0.001, -0.001, 0.0, 0.002, 0.0], margin=0.02, p_harm=0.6).word == "NO HARM"
    assert st.verdict([-0.4, 0.5, -0.3, 0.6, 0.0, -0.1], margin=0.02, p_harm=0.5).word == "INCONCLUSIVE"


def test_a_significant_difference_inside_the_margin_is_no_harm() -> None:
    assert st.verdict([-0.004, -0.005, -0.003, -0.006, -0.004, -0.005], margin=0.02, p_harm=0.016).word == "NO HARM"


def test_few_seeds_are_inconclusive_in_both_directions() -> None:
    for differences in ([-0.9, -0.9], [0.0, 0.0, 0.0, 0.0]):
        judged = st.verdict(differences, margin=0.02, p_harm=0.01)
        assert judged.word == "INCONCLUSIVE"
        assert "at least 5" in judged.reason


def test_a_gain_beyond_the_margin_is_inconclusive_and_says_so() -> None:
    judged = st.verdict([0.4, 0.5, 0.3, 0.6, 0.4, 0.5], margin=0.02, p_harm=1.0)
    assert judged.word == "INCONCLUSIVE"
    assert "better by more than the margin" in judged.reason


@pytest.mark.parametrize("simulations", SIMULATIONS)
def test_the_whole_rule_finds_harm_in_a_null_at_most_at_its_level(simulations: int) -> None:
    hits = 0
    for pair in np.random.default_rng(17).normal(0.0, 0.1, size=(simulations, 2, 6)):
        adjusted = st.holm([st.sign_flip_p(sample, "less") for sample in pair])
        hits += any(st.verdict(d, margin=0.02, p_harm=p).word == "HARM" for d, p in zip(pair, adjusted, strict=True))
    assert_rate(hits, simulations, 1 - (1 - 1 / 64) ** 2)  # with m = 2 only p = 1/64 survives the adjustment
