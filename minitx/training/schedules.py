"""Learning-rate schedules. The arguments of each function are its keys in a config. Yours can be used as well."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import torch
from torch.optim.lr_scheduler import LambdaLR

from minitx.config.schema import Bound, NotNegative, require

DecayFraction = Annotated[float, Bound("lie in (0, 1]", lambda share: 0.0 < share <= 1.0)]
Warmup = Annotated[
    int | float,
    Bound(
        "be a whole number of steps, or a share of all steps below 1",
        lambda steps: 0 <= steps < math.inf and (steps < 1 or float(steps).is_integer()),
    ),
]
"""The length of a warm-up."""


def constant(optimizer: torch.optim.Optimizer, max_steps: int, *, warmup_steps: Warmup = 0) -> LambdaLR:
    """A constant learning rate after a linear warm-up (step + 1) / ``warmup_steps``.

    Args:
        max_steps: the number of steps; the run passes it.
        warmup_steps: steps of a linear rise from zero; below 1: a share of all steps.
    """
    return _after_warmup(optimizer, max_steps, warmup_steps, lambda t: 1.0)


def linear(
    optimizer: torch.optim.Optimizer, max_steps: int, *, warmup_steps: Warmup = 0, final_lr: NotNegative = 0.1
) -> LambdaLR:
    """A linear decay from the peak to f = ``final_lr``: 1 - (1 - f) t, where t runs from 0 to 1 after the warm-up.

    Args:
        max_steps, warmup_steps: see ``constant``.
        final_lr: final learning rate, as a share of optimizer.lr.

    >>> schedule = linear(torch.optim.SGD([torch.zeros(1)], lr=1.0), 6, warmup_steps=2, final_lr=0.0)
    >>> [schedule.lr_lambdas[0](step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    return _after_warmup(optimizer, max_steps, warmup_steps, lambda t: 1.0 - (1.0 - final_lr) * t)


def cosine(
    optimizer: torch.optim.Optimizer, max_steps: int, *, warmup_steps: Warmup = 0, final_lr: NotNegative = 0.1
) -> LambdaLR:
    """Half a cosine from the peak to f = ``final_lr``: f + (1 - f) (1 + cos πt) / 2 (Loshchilov & Hutter 2017, arXiv:1608.03983).

    Args:
        max_steps, warmup_steps: see ``constant``.
        final_lr: see ``linear``.
    """
    return _after_warmup(
        optimizer, max_steps, warmup_steps, lambda t: final_lr + (1.0 - final_lr) * 0.5 * (1.0 + math.cos(math.pi * t))
    )


def trapezoid(
    optimizer: torch.optim.Optimizer,
    max_steps: int,
    *,
    warmup_steps: Warmup = 0,
    final_lr: NotNegative = 0.1,
    decay_fraction: DecayFraction = 0.2,
) -> LambdaLR:
    """A constant learning rate, then a linear decay to ``final_lr`` (warm-up, stable, decay: WSD; Hu et al. 2024, arXiv:2404.06395).

    Args:
        max_steps, warmup_steps: see ``constant``.
        final_lr: see ``linear``.
        decay_fraction: share of the steps, at the end, for the decay.
    """
    start = max(warmup_of(warmup_steps, max_steps), max_steps - round(decay_fraction * max_steps))
    return _after_warmup(optimizer, max_steps, warmup_steps, lambda t: 1.0 - (1.0 - final_lr) * t, start)


def warmup_of(steps: float, max_steps: int) -> int:
    """Return the number of warm-up steps: ``steps``, or, if it is below 1, this share of ``max_steps``, rounded.

    >>> warmup_of(100, 2000), warmup_of(0.1, 2000), warmup_of(0.1, 3)
    (100, 200, 0)
    """
    return round(steps * max_steps) if steps < 1 else int(steps)


def _after_warmup(
    optimizer: torch.optim.Optimizer, max_steps: int, steps: float, curve: Callable[[float], float], start: int | None = None
) -> LambdaLR:
    """Return a schedule: (step + 1) / warmup, then ``curve(t)``, where t runs from 0 at step ``start`` to 1 at ``max_steps``."""
    warmup = warmup_of(steps, max_steps)
    require(
        warmup <= max_steps,
        f"schedule.warmup_steps={warmup} must not exceed trainer.max_steps={max_steps}; a value below 1 is a share of them",
    )
    first = warmup if start is None else start

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return curve(min(1.0, max(0.0, (step - first) / max(1, max_steps - first))))

    return LambdaLR(optimizer, factor)
