"""Means over sentences with Student's 95 % interval."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval, and of how many sentences; NaN where it is not known."""

    mean: float
    low: float
    high: float
    sentences: int


UNKNOWN = Interval(math.nan, math.nan, math.nan, 0)


@functools.cache
def t_quantile(degrees: int) -> float:
    """The two-sided 95 % point of Student's t with ν = ``degrees``.

    With t = √ν tan θ its density is ∝ cos^(ν−1) θ, which is summed up here: torch has no quantile of it.

    >>> round(t_quantile(1), 2), round(t_quantile(7), 4)
    (12.71, 2.3646)
    """
    theta = torch.linspace(0, math.pi / 2, 20001, dtype=torch.float64)
    area = torch.cumulative_trapezoid(theta.cos() ** (degrees - 1), theta)
    wanted = 0.95 * area[-1]
    i = int(torch.searchsorted(area, wanted))
    part = (wanted - area[i - 1]) / (area[i] - area[i - 1])  # area[i] is that up to theta[i + 1]
    return float(math.sqrt(degrees) * torch.tan(theta[i] + part * (theta[i + 1] - theta[i])))


def mean_interval(values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(mean, low, high, number) over the first axis of float64 (n, ...), each (...); NaN is left out.

    x̄ ± t_{n−1} · s/√n. A single sentence has no interval: NaN. Student's interval and not a bootstrap, because plain
    percentiles are too narrow for the few dozen sentences of an atlas, and because it draws no random numbers.

    >>> [round(float(x), 3) for x in mean_interval(torch.tensor([1.0, 2.0, 3.0, torch.nan]).double())]
    [2.0, -0.484, 4.484, 3.0]
    """
    known = ~values.isnan()
    count = known.sum(0)
    mean = values.nan_to_num().sum(0) / count
    variance = ((values.nan_to_num() - mean) * known).square().sum(0) / (count - 1)
    quantiles = {n: t_quantile(n - 1) if n > 1 else math.nan for n in count.unique().tolist()}
    t = torch.tensor([quantiles[n] for n in count.flatten().tolist()], dtype=torch.float64).view(count.shape)
    reach = t * (variance / count).sqrt()
    return mean, mean - reach, mean + reach, count


def as_interval(values: Tensor) -> Interval:
    """``mean_interval`` of a vector, as numbers."""
    mean, low, high, count = mean_interval(values)
    return Interval(float(mean), float(low), float(high), int(count))
