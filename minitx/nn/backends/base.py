"""What a backend is: a function that serves a checked call, and a reason where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from minitx.nn.functional import AttentionCall


def always(call: AttentionCall) -> None:
    """No objection."""


@dataclass(frozen=True)
class Backend:
    """A named way to compute attention.

    ``name`` is what ``backend=`` takes. ``run(call)`` returns (B, H, L, Dv). ``refuses(call)`` gives the reason why it cannot serve a call, or None.
    ``falls_back(call)`` gives the reason why it serves the call without its fused kernel (slower, with an L × S matrix),
    or None; backends without a fused kernel always give one.
    """

    name: str
    run: Callable[[AttentionCall], Tensor]
    refuses: Callable[[AttentionCall], str | None] = always
    falls_back: Callable[[AttentionCall], str | None] = always
