"""Learning-rate schedules as functions from the step to a factor on the peak rate."""

from __future__ import annotations

import math
from collections.abc import Callable

from minitx.config import ScheduleConfig


def lr_factor(config: ScheduleConfig, max_steps: int) -> Callable[[int], float]:
    """Return a function from ``step`` = 0, 1, …, max_steps - 1 to the factor on the learning rate.

    After a linear warm-up (step + 1) / warmup_steps, t runs from 0 to 1:

    * ``constant``: 1
    * ``linear``: 1 - (1 - f) t; ``cosine``: f + (1 - f) (1 + cos πt) / 2 (Loshchilov & Hutter 2017, arXiv:1608.03983)
    * ``trapezoid``: 1, then linearly to f over the last ``decay_fraction`` of the run (WSD; Hu et al. 2024, arXiv:2404.06395)

    with f = ``final_lr``.

    >>> factor = lr_factor(ScheduleConfig(name="linear", warmup_steps=2, final_lr=0.0), max_steps=6)
    >>> [factor(step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warmup, final = config.warmup_steps, config.final_lr
    decay_start = {"trapezoid": max(warmup, max_steps - round(config.decay_fraction * max_steps))}.get(config.name, warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        t = min(1.0, max(0.0, (step - decay_start) / max(1, max_steps - decay_start)))
        if config.name == "constant":
            return 1.0
        if config.name == "cosine":
            return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * t))
        return 1.0 - (1.0 - final) * t

    return factor
