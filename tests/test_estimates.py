"""The interval of a mean."""

import math

import numpy as np

from minitx.estimates import Interval


def test_the_interval_of_a_mean_covers_it():
    draw = np.random.default_rng(3)
    intervals = [Interval.of(draw.normal(1.0, 2.0, size=6)) for _ in range(1000)]
    assert 0.93 <= np.mean([interval.low <= 1.0 <= interval.high for interval in intervals]) <= 0.97


def test_a_single_value_has_no_interval_and_nan_does_not_count():
    assert Interval.of([1.0, math.nan, 3.0]) == Interval.of([1.0, 3.0])
    assert math.isnan(Interval.of([1.0]).low)
