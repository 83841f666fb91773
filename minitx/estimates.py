"""Means and their 95 % intervals, for scores of heads and reports of the lab."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_VALUES = 5
"""``Interval.above`` is False for fewer values."""


@dataclass(frozen=True)
class Interval:
    """A mean of n values with Student's 95 % interval. Unknown numbers are NaN."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Tensor | Sequence[float]) -> Interval:
        """Return x̄ ± t_{n−1} · s/√n of ``values`` (n,). NaN is left out. A single value has no interval.

        >>> Interval.of([1.0, 2.0, 3.0, math.nan])
        Interval(mean=2.0, low=-0.4841..., high=4.4841..., n=3)
        """
        from scipy import stats

        values = torch.as_tensor(values, dtype=torch.float64)
        known = values[~values.isnan()]
        n, mean = len(known), float(known.mean())
        reach = float(stats.t.ppf(0.975, n - 1) * known.std() / math.sqrt(n)) if n > 1 else math.nan
        return cls(mean, mean - reach, mean + reach, n)

    def above(self, value: float) -> bool:
        """Return whether the lower end is above ``value``. False for fewer than ``MIN_VALUES`` values."""
        return self.n >= MIN_VALUES and self.low > value
