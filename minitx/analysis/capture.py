"""Record what attention sees, beside the fused kernel; the output stays bit-equal to a run without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minitx.analysis.statistics import attention_statistics, favourite_keys
from minitx.nn.attention import DotProductAttention
from minitx.nn.blocks import is_recomputing
from minitx.nn.functional import attention_weights

Record = dict[str, Any]


def _statistics(core: DotProductAttention, query: Tensor, key: Tensor, call: Record) -> dict[str, Tensor]:
    common = {"scale": call["scale"], "mask": call["mask"], "attn_bias": call["attn_bias"]}
    statistics = attention_statistics(query, key, **common, softcap=core.softcap, sinks=call["sinks"])
    return {**statistics, "favourite": favourite_keys(query, key, **common)}


def _weights(core: DotProductAttention, query: Tensor, key: Tensor, call: Record) -> Tensor:
    return attention_weights(
        query,
        key,
        mask=call["mask"],
        scale=call["scale"],
        attn_bias=call["attn_bias"],
        softcap=core.softcap,
        sinks=call["sinks"],
    )


RECORDERS: dict[str, Callable[[DotProductAttention, Tensor, Tensor, Record], Any]] = {
    "statistics": _statistics,
    "weights": _weights,
}


@contextmanager
def capture(model: nn.Module, *, what: str = "statistics") -> Iterator[dict[str, list[Any]]]:
    """Record every attention call of ``model`` while the context is open.

    Yields a dict from the attention core's name (``blocks.0.attention.core``) to a list with one entry a call:
    ``statistics`` (see ``attention_statistics``, plus ``favourite`` (B, H, L)) or ``weights`` (B, H, L, S), before
    dropout. Values are recomputed from the core's inputs; nothing is stored on the modules and the hooks are removed.

    Raises:
        ValueError: an unknown ``what``; a model without attention. RuntimeError: a compiled module, named, because hooks
            that are added after compiling never fire.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(6, 2)
    >>> with capture(attention, what="weights") as seen:
    ...     _ = attention(torch.randn(1, 3, 6), is_causal=True)
    >>> seen["core"][0].shape
    torch.Size([1, 2, 3, 3])
    """
    if what not in RECORDERS:
        raise ValueError(f"what={what!r} must be one of {', '.join(RECORDERS)}")
    cores = {name: module for name, module in model.named_modules() if isinstance(module, DotProductAttention)}
    if not cores:
        raise ValueError(f"{type(model).__name__} has no DotProductAttention to look at")
    compiled = [name or type(module).__name__ for name, module in model.named_modules() if _is_compiled(module)]
    if compiled:
        raise RuntimeError(f"{compiled[0]} is compiled, and hooks added after compiling never fire: capture the plain module")
    seen: dict[str, list[Any]] = {name: [] for name in cores}
    handles = [
        core.register_forward_pre_hook(partial(_record, seen[name], what), with_kwargs=True) for name, core in cores.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


@torch.no_grad()
def _record(entries: list[Any], what: str, core: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if is_recomputing():  # activation checkpointing runs a block again in the backward pass
        return
    assert isinstance(core, DotProductAttention)
    query, key = args[:2]
    call = {"mask": None, "scale": query.shape[-1] ** -0.5, "attn_bias": None, "sinks": None}
    call.update({name: given for name, given in kwargs.items() if name in call and given is not None})
    entries.append(RECORDERS[what](core, query.detach(), key.detach(), call))
