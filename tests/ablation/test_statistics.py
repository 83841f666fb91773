"""The statistics, on simulated data whose truth is known, and by their properties."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitx.ablation.statistics import Span, crossing, holm, median, median_interval, sign_test


def exact(values):
    return [Span(float(value), float(value)) for value in values]


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
