"""The statistics, on simulated data whose truth is known, and by their properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitx.ablation.intervals import Span, median, median_interval

TRIALS = 1000
CAP = 90.0


def exact(values):
    return [Span(float(value), float(value)) for value in values]


def time(steps):
    return Span(steps, steps) if steps < CAP else Span(CAP, math.inf)


@pytest.mark.parametrize("pairs", [6, 10])
def test_the_interval_covers_the_median_of_censored_pairs(pairs):
    """It holds the true median ratio, 2, where most of the treatment's runs end at the cap."""
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(TRIALS):
        reference, treatment = 60 * np.exp(0.3 * rng.normal(size=pairs)), 120 * np.exp(0.5 * rng.normal(size=pairs))
        interval, _ = median_interval([time(t).over(time(r)) for r, t in zip(reference, treatment, strict=True)])
        found += interval.low <= 2 <= interval.high
    assert found / TRIALS >= 0.93


@pytest.mark.parametrize(("pairs", "wanted"), [
    (5, (1, 5, 0.9375)), (6, (1, 6, 0.96875)), (8, (1, 8, 0.9921875)), (10, (2, 9, 0.978515625)), (40, (14, 27, 0.9615226917)),
])  # fmt: skip
def test_the_interval_is_made_of_the_order_statistics_that_the_protocol_names(pairs, wanted):
    interval, share = median_interval(exact(range(1, pairs + 1)))
    assert (interval.low, interval.high, share) == pytest.approx(wanted)
    assert median_interval(exact(range(4))) is None


@given(st.lists(st.floats(0.1, 10), min_size=6, max_size=12), st.permutations(range(6)))
def test_a_wider_range_of_a_pair_never_makes_the_interval_narrower(values, order):
    narrow = median_interval(exact(values))[0]
    wide = exact(values)
    wide[order[0]], wide[order[1]] = Span(0, values[order[0]]), Span(values[order[1]], math.inf)
    assert narrow.within(median_interval(wide)[0])


def test_the_median_of_ratios_is_geometric_and_that_of_differences_is_not():
    assert median(exact([1, 4, 9, 100]), ratio=True) == Span(6, 6)
    assert median(exact([1, 4, 9, 100]), ratio=False) == Span(6.5, 6.5)
    assert median([Span(0, math.inf)] * 6, ratio=True) == Span(0, math.inf)


@pytest.mark.parametrize(("treatment", "reference", "wanted"), [
    (Span(30, 30), Span(10, 10), Span(3, 3)),
    (Span(100, math.inf), Span(10, 10), Span(10, math.inf)),
    (Span(10, 10), Span(100, math.inf), Span(0, 0.1)),
    (Span(0, 2), Span(0, 4), Span(0, math.inf)),
    (Span(2, 4), Span(1, 2), Span(1, 4)),
])  # fmt: skip
def test_a_ratio_of_ranges_is_as_wide_as_what_is_known(treatment, reference, wanted):
    assert treatment.over(reference) == wanted
