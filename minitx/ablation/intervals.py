"""Intervals and tests for paired runs, in which each pair is known within a range. All are pure functions of numbers.

They use only the signs of the pairs. They assume no distribution and hold on any increasing scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
ALPHA = 0.05
MIN_PAIRS = 6
"""With five pairs, even the interval from smallest to largest covers the median with less than 95 % (1 - 2 / 2^5 = .9375)."""


@dataclass(frozen=True)
class Span:
    """A number known to be between two ends. The ends are equal if it is known exactly. An end may be 0 or infinite."""

    low: float
    high: float

    def over(self, other: Span) -> Span:
        """Return the span of all ratios self / other, for numbers that are not negative."""
        return Span(self.low / other.high, self.high / other.low if other.low else math.inf)

    def minus(self, other: Span) -> Span:
        """Return the span of all differences self - other. ``Span(inf, inf)`` is not allowed."""
        return Span(self.low - other.high, self.high - other.low)

    def within(self, other: Span) -> bool:
        """Return whether it is inside ``other``, bounds included."""
        return other.low <= self.low and self.high <= other.high


def median(spans: Sequence[Span], *, ratio: bool) -> Span:
    """Return the medians of the lower and of the upper ends. For an even number of ratios, use the geometric mean of the middle two.

    >>> median([Span(2, 2), Span(8, math.inf)], ratio=True)
    Span(low=4.0, high=inf)
    """
    ends = np.sort([[span.low for span in spans], [span.high for span in spans]])
    middle = ends[:, [(len(spans) - 1) // 2, len(spans) // 2]]
    values = np.sqrt(middle.prod(axis=1)) if ratio else middle.mean(axis=1)
    return Span(float(values[0]), float(values[1]))


def median_interval(spans: Sequence[Span]) -> tuple[Span, float] | None:
    """Return a confidence interval of the median and its coverage, or None for fewer than ``MIN_PAIRS``.

    The interval is from the k-th smallest lower end to the k-th largest upper end, with the largest k for a coverage 1 - 2 P(X
    < k) of at least ``CONFIDENCE``, X ~ Binomial(n, ½). Source: David and Nagaraja 2003, *Order Statistics*, section 7.1.

    >>> median_interval([Span(x, x) for x in (3, 1, 2, 6, 5, 4)])
    (Span(low=1.0, high=6.0), 0.96875)
    """
    pairs = len(spans)
    if pairs < MIN_PAIRS:
        return None
    k, coverage = _rank(pairs)
    low, high = sorted(span.low for span in spans)[k - 1], sorted(span.high for span in spans)[-k]
    return Span(float(low), float(high)), coverage


@cache
def _rank(pairs: int) -> tuple[int, float]:
    """k of the interval, and its coverage."""
    coverage = 1 - 2 * stats.binom.cdf(np.arange(pairs // 2), pairs, 0.5)  # of k = 1, 2, ...
    k = int(np.sum(coverage >= CONFIDENCE))
    return k, float(coverage[k - 1])


def sign_test(beyond: int, pairs: int) -> float:
    """Return the one-sided p of the sign test: P(X >= beyond), X ~ Binomial(pairs, ½).

    >>> sign_test(6, 6)
    0.015625
    """
    return float(stats.binom.sf(beyond - 1, pairs, 0.5))


def holm(p_values: Sequence[float], family: int) -> list[float]:
    """Return p values adjusted by Holm, in the given order: max over j up to i of min(1, (family - j + 1) p_(j)).

    Args:
        p_values: the known p values.
        family: the size of the family, fixed before the runs. Comparisons without p still count.

    Source: Holm 1979, *Scand. J. Statist.* 6, 65-70.

    >>> holm([0.04, 0.01], family=3)
    [0.08, 0.03]
    """
    order = np.argsort(p_values, kind="stable")
    steps = np.minimum(1, np.asarray(p_values)[order] * (family - np.arange(len(p_values))))
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.maximum.accumulate(steps)
    return [float(p) for p in adjusted]


def wilson(count: int, total: int) -> Span:
    """Return Wilson's 95 % interval of a share. ``total`` is at least 1."""
    low, high = stats.binomtest(count, total).proportion_ci(CONFIDENCE, method="wilson")
    return Span(float(low), float(high))


def crossing(rates: Sequence[float], levels: Sequence[float], limit: float) -> Span:
    """Return the rate at which the level first falls below ``limit``, interpolated linearly in log(rate) between neighbouring rates.

    ``rates`` ascend. If no level is below, the result is the largest rate or more. If the first level is below, it is the
    smallest rate or less. Between a finite and an infinite level, it is anywhere between the two rates.

    >>> round(crossing([0.01, 1.0], [1.0, 0.8], 0.9).low, 12)
    0.1
    """
    first = next((i for i, level in enumerate(levels) if level < limit), len(rates))
    if first == len(rates):
        return Span(rates[-1], math.inf)
    if first == 0:
        return Span(0.0, rates[0])
    (start, end), (above, below) = rates[first - 1 : first + 1], levels[first - 1 : first + 1]
    if math.isinf(below):
        return Span(start, end)
    rate = start * (end / start) ** ((above - limit) / (above - below))
    return Span(rate, rate)
