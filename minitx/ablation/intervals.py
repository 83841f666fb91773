"""Medians and intervals of numbers that are each known within a range. All functions are pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
MIN_PAIRS = 5
"""The smallest number of pairs with an interval. From the smallest to the largest of five, it covers the median with 93.8 %."""


@dataclass(frozen=True)
class Span:
    """A number between two known ends. The ends are equal if the number is known exactly. An end may be 0 or infinite."""

    low: float
    high: float

    def over(self, other: Span) -> Span:
        """Return the span of all ratios self / other, for nonnegative numbers."""
        return Span(self.low / other.high, self.high / other.low if other.low else math.inf)

    def minus(self, other: Span) -> Span:
        """Return the span of all differences self - other. ``Span(inf, inf)`` is not allowed."""
        return Span(self.low - other.high, self.high - other.low)

    def within(self, other: Span) -> bool:
        """Return whether this span is inside ``other``, bounds included."""
        return other.low <= self.low and self.high <= other.high


def median(spans: Sequence[Span], *, ratio: bool) -> Span:
    """Return the median of the lower ends and of the upper ends. For an even number of ratios, use the geometric mean of the middle two.

    >>> median([Span(2, 2), Span(8, math.inf)], ratio=True)
    Span(low=4.0, high=inf)
    """
    ends = np.sort([[span.low for span in spans], [span.high for span in spans]])
    middle = ends[:, [(len(spans) - 1) // 2, len(spans) // 2]]
    values = np.sqrt(middle.prod(axis=1)) if ratio else middle.mean(axis=1)
    return Span(float(values[0]), float(values[1]))


def median_interval(spans: Sequence[Span]) -> tuple[Span, float] | None:
    """Return a confidence interval of the median and its coverage, or None for fewer than ``MIN_PAIRS`` numbers.

    The interval extends from the k-th smallest lower end to the k-th largest upper end. k is the largest number with a coverage
    1 - 2 P(X < k), X ~ Binomial(n, ½), of at least ``CONFIDENCE``; for five numbers, k is 1. No distribution of the numbers is
    assumed. Source: David and Nagaraja 2003, *Order Statistics*, section 7.1.

    >>> median_interval([Span(x, x) for x in (3, 1, 2, 6, 5, 4)])
    (Span(low=1.0, high=6.0), 0.96875)
    """
    pairs = len(spans)
    if pairs < MIN_PAIRS:
        return None
    k = max(1, int(stats.binom.ppf((1 - CONFIDENCE) / 2, pairs, 0.5)))
    low, high = sorted(span.low for span in spans)[k - 1], sorted(span.high for span in spans)[-k]
    return Span(float(low), float(high)), 1 - 2 * float(stats.binom.cdf(k - 1, pairs, 0.5))
