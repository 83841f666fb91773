"""What a backend is: a function that serves a checked call, and a reason where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from minitx.nn.functional import AttentionCall


def never(call: AttentionCall) -> None:
    """No reason against any call."""


@dataclass(frozen=True)
class Backend:
    """A named way to compute attention.

    Args:
        name: what ``backend=`` takes.
        run: serves a call, ``run(call)`` is (B, H, L, Dv).
        why_not: the reason why ``run`` cannot serve a call, or None where it can.
        falls_back: the reason why ``run`` serves a call without its fused kernel (slower, with an L × S matrix), or None. A backend
            without a fused kernel always gives one.
    """

    name: str
    run: Callable[[AttentionCall], Tensor]
    why_not: Callable[[AttentionCall], str | None] = never
    falls_back: Callable[[AttentionCall], str | None] = never
