"""The class of a backend: a function that computes a call, and the reasons why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from minitx.nn.functional import AttentionCall
from minitx.nn.tensor_rule import tensors_of


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


def transforms(call: AttentionCall) -> list[str]:
    """Return the transforms around a call: ``Grad``, ``Vmap``, ``Jvp`` … of torch.func, and ``Jvp`` for dual tensors.

    The compiler has transforms of its own, so the list is empty in a graph.
    """
    if torch.compiler.is_compiling():
        return []
    # torch has public functions for neither; unpack_dual alone would take a tenth of a decoding step
    names = [level.key().name for level in torch._C._functorch.get_interpreter_stack() or ()]
    if forward_ad._current_level < 0:
        return names
    more = () if call.sinks is call.attn_bias is None else tensors_of((call.sinks, call.attn_bias))
    inputs = (call.query, call.key, call.value, *more)
    return [*names, "Jvp"] if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in inputs) else names
