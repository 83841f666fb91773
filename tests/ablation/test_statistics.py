"""The statistics, on simulated data whose truth is known, and by their properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitx.ablation.statistics import ALPHA, Span, crossing, holm, median, median_interval, sign_test

TRIALS = 1000
CAP = 90.0


def exact(values):
    return [Span(float(value), float(value)) for value in values]


@pytest.mark.parametrize("pairs", [6, 8, 10])
def test_the_interval_covers_the_median_of_censored_pairs(pairs):
    """The true median ratio is 2, and most of the treatment's runs end at the cap."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(TRIALS):
        reference, treatment = 60 * np.exp(0.3 * rng.normal(size=pairs)), 120 * np.exp(0.5 * rng.normal(size=pairs))
        times = [[Span(t, t) if t < CAP else Span(CAP, math.inf) for t in arm] for arm in (treatment, reference)]
        interval, _ = median_interval([t.over(r) for t, r in zip(*times, strict=True)])
        covered += interval.low <= 2 <= interval.high
    assert covered >= 0.93 * TRIALS


@pytest.mark.parametrize(("pairs", "wanted"), [(6, (1, 6, 0.96875)), (8, (1, 8, 0.9921875)), (10, (2, 9, 0.978515625))])
def test_the_interval_is_made_of_the_order_statistics_that_the_protocol_names(pairs, wanted):
    interval, share = median_interval(exact(range(1, pairs + 1)))
    assert (interval.low, interval.high, share) == wanted
    assert median_interval(exact(range(5))) is None


def test_the_median_of_ratios_is_geometric_and_that_of_differences_is_not():
    assert median(exact([1, 4, 9, 100]), ratio=True) == Span(6, 6)
    assert median(exact([1, 4, 9, 100]), ratio=False) == Span(6.5, 6.5)
    assert median([Span(0, math.inf)] * 6, ratio=True) == Span(0, 2).over(Span(0, 4)) == Span(0, math.inf)


def test_the_sign_test_is_the_binomial_tail():
    assert sign_test(6, 6) == 1 / 64 and sign_test(10, 10) == 1 / 1024
    assert sign_test(5, 6) == pytest.approx(7 / 64) and sign_test(0, 6) == 1


@pytest.mark.parametrize(("effects", "low", "high"), [([0.0] * 5, 0.0, 0.06), ([2.5, 0.0, 0.0], 0.9, 1.0)])
def test_a_family_at_its_margins_is_called_in_six_of_a_hundred_at_most_and_a_large_effect_is_found(effects, low, high):
    """Of ten pairs each."""
    rng, called = np.random.default_rng(1), 0
    for _ in range(TRIALS):
        beyond = (rng.normal(size=(len(effects), 10)) + np.array(effects)[:, None] > 0).sum(axis=1)
        called += min(holm([sign_test(int(count), 10) for count in beyond], len(effects))) < ALPHA
    assert low <= called / TRIALS <= high


@given(st.lists(st.floats(0, 1), max_size=6), st.integers(0, 3))
def test_holm_keeps_the_order_and_a_comparison_without_p_makes_the_others_no_easier(values, absent):
    adjusted, alone = holm(values, len(values) + absent), holm(values, len(values))
    assert all(0 <= p <= b <= a <= 1 for p, a, b in zip(values, adjusted, alone, strict=True))
    assert all(a <= b for p, a in zip(values, adjusted, strict=True) for q, b in zip(values, adjusted, strict=True) if p < q)
    assert (holm([0.01, 0.02], 3), holm([0.01, 0.02], 2)) == ([0.03, 0.04], [0.02, 0.02])


@pytest.mark.parametrize(("levels", "wanted"), [
    ([1.0, 0.95, 0.9], Span(1e-1, math.inf)),
    ([0.89, 1.0, 1.0], Span(0, 1e-3)),
    ([1.0, 0.8, 1.0], Span(10**-2.5, 10**-2.5)),
    ([1.0, 1.0, 0.0], Span(10**-1.9, 10**-1.9)),
    ([1.0, -math.inf, 1.0], Span(1e-3, 1e-2)),
])  # fmt: skip
def test_the_crossing_is_the_first_rate_below_the_limit(levels, wanted):
    found = crossing([1e-3, 1e-2, 1e-1], levels, 0.9)
    assert (found.low, found.high) == (pytest.approx(wanted.low), pytest.approx(wanted.high))
