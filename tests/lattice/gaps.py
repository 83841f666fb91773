"""The gaps of two identities that no program needs: an output that is linear in an argument, and the slope of a function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minitx.check.properties import FACTOR, Gap


def linear_gap(output: Tensor, cotangent: Tensor, value: Tensor, gradient: Tensor) -> Gap:
    """Return the difference between ⟨cotangent, output⟩ and ⟨value, gradient⟩. They are equal if the output is linear in ``value``.

    Attention is linear in its values. The two differ if the backward pass of dropout drops other weights than the forward pass.

    Args:
        output: a function of ``value``. cotangent: a tensor of the same shape.
        value: the argument. gradient: the gradient of ⟨cotangent, output⟩ with respect to ``value``.
    """
    sides = [
        (left.detach().double() * right.detach().double()).flatten() for left, right in ((cotangent, output), (value, gradient))
    ]
    epsilon = torch.finfo(output.dtype).eps
    size = abs(float(sides[0].sum() - sides[1].sum()))
    return Gap(size, 2 * FACTOR * epsilon * sum(float(side.norm()) for side in sides), ())


def slope_gap(function: Callable[[float], float], slope: float, step: float = 1e-4) -> Gap:
    """Return the difference between ``slope`` and the derivative of ``function`` at 0, from central differences in float64.

    The error of a central difference falls to a quarter when the step is halved. The allowed difference follows from this.
    """
    ends = [(function(length), function(-length)) for length in (step, step / 2)]
    long, short = ((right - left) / (2 * length) for (right, left), length in zip(ends, (step, step / 2), strict=True))
    noise = torch.finfo(torch.float64).eps * max(1.0, *(abs(value) for pair in ends for value in pair)) / step
    return Gap(abs(short - slope), abs(long - short) + FACTOR * noise, ())
