"""The class of a backend: a function that computes a call, and the reasons why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from minitx.nn.functional import AttentionCall


def never(call: AttentionCall) -> None:
    """Return None: every call is supported."""


@dataclass(frozen=True)
class Backend:
    """A named way to compute attention.

    Args:
        name: the value of ``backend=``.
        run: computes a call. ``run(call)`` returns (B, H, L, Dv).
        why_not: returns the reason why ``run`` does not support a call, or None.
        falls_back: returns the reason why ``run`` would compute a call without a fused kernel (slower, with an L × S matrix),
            or None. A backend without a fused kernel always returns one.
    """

    name: str
    run: Callable[[AttentionCall], Tensor]
    why_not: Callable[[AttentionCall], str | None] = never
    falls_back: Callable[[AttentionCall], str | None] = never
