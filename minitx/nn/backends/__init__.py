"""The backends of ``scaled_dot_product_attention``: choosing, explaining and registering them.

Every backend gives the same result as ``math``, or refuses the call with a reason. ``auto`` chooses by the kind of call (``choose``):
usually torch's fused kernel, ``flex`` for what this kernel lacks on an accelerator, ``chunked`` for large matrices and sparse masks
on a CPU, and torch's plain path or ``math`` for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from minitx.nn.backends import chunked, flex, sdpa
from minitx.nn.bias import Bias
from minitx.nn.functional import AttentionCall, make_call, reference_attention, with_weights
from minitx.nn.masks import Mask, simplify


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


SDPA = Backend("sdpa", sdpa.run, sdpa.why_not, sdpa.falls_back)
CHUNKED = Backend("chunked", chunked.run, chunked.why_not, chunked.falls_back)
MATH = Backend("math", reference_attention, falls_back=lambda call: "it holds the whole L x S matrix")
FLEX = Backend("flex", flex.run, flex.why_not)
_OURS = {backend.name: backend for backend in (SDPA, CHUNKED, MATH, FLEX)}
_REGISTRY: dict[str, Backend] = dict(_OURS)
# Total score counts (B·H·L·S) above which ``chunked`` beats ``math``, and torch's unfused path without dropout, on a CPU
# (measured: docs/dev/decisions.md).
CHUNKED_FROM, CHUNKED_FROM_OVER_PLAIN = 2**21, 2**23
# The share of visible tiles up to which ``chunked`` beats torch's CPU kernel. That kernel also computes hidden tiles.
FEW_TILES = 0.25


def backend_names() -> tuple[str, ...]:
    """Return the names that ``backend=`` accepts: ``auto`` and every registered backend.

    >>> {"auto", "math", "sdpa", "chunked", "flex"} <= set(backend_names())
    True
    """
    return ("auto", *_REGISTRY)


def register_backend(
    name: str,
    run: Callable[[AttentionCall], Tensor],
    *,
    why_not: Callable[[AttentionCall], str | None] = never,
    falls_back: Callable[[AttentionCall], str | None] = never,
) -> None:
    """Register a backend. ``backend=name`` then calls ``run``, in functions, modules and configs.

    Args:
        name: a new name. ``auto`` never chooses it, so it must be named.
        run: a function of a checked ``AttentionCall`` that returns (B, H, L, Dv).
        why_not: a function of a call that returns the reason why ``run`` does not support it, or None.
        falls_back: a function of a call that returns the reason why ``run`` would not use its fused kernel, or None.

    Raises:
        ValueError: the name is already in use.

    >>> from minitx.nn import reference_attention
    >>> register_backend("mine", reference_attention, why_not=lambda call: "no sinks" if call.sinks is not None else None)
    >>> "mine" in backend_names()
    True
    >>> unregister_backend("mine")
    """
    if name in backend_names():
        raise ValueError(f"backend {name!r} is already registered: choose another name than {', '.join(backend_names())}")
    _REGISTRY[name] = Backend(name, run, why_not, falls_back)


def unregister_backend(name: str) -> None:
    """Remove a backend that ``register_backend`` added.

    Raises:
        ValueError: the name is not registered, or it is a built-in backend.
    """
    if name not in _REGISTRY or name in _OURS:
        raise ValueError(f"backend {name!r} was not registered by register_backend")
    del _REGISTRY[name]


def choose(call: AttentionCall, backend: str) -> tuple[Backend, str]:
    """Return the backend for a name, and the reason if ``auto`` chose it. A named backend may not support the call.

    ``auto`` reads types and sizes only. ``benchmarks/attention.py`` measures the sizes.
    """
    if backend != "auto":
        if backend not in _REGISTRY:
            raise ValueError(f"backend={backend!r} must be one of {', '.join(backend_names())}")
        return _REGISTRY[backend], ""
    if call.transforms():
        return _for_derivatives(call)
    if call.softcap is not None or call.sinks is not None:
        return _for_cap_or_sinks(call)
    if call.mask is not None and call.mask.is_sparse:
        return _for_sparse_mask(call)
    return _for_plain(call)


def _for_derivatives(call: AttentionCall) -> tuple[Backend, str]:
    """Inside of torch.func, or with dual tensors."""
    if sdpa.why_not(call) is None:
        return SDPA, "only torch's kernels support torch.func"
    return MATH, "no kernel supports this derivative"


def _for_cap_or_sinks(call: AttentionCall) -> tuple[Backend, str]:
    num_queries, on_cpu = call.shape[2], call.query.device.type == "cpu"
    if not on_cpu and flex.why_not(call) is None:
        return FLEX, "it supports what torch's kernels lack"
    if on_cpu and num_queries == 1 and _tiles_win(call, 0):
        return CHUNKED, "one query is one tile"
    if num_queries > 1 and _tiles_win(call, CHUNKED_FROM):
        return CHUNKED, "tiles beat a large matrix"
    return MATH, "torch's kernels have no soft-cap and no sinks"


def _for_sparse_mask(call: AttentionCall) -> tuple[Backend, str]:
    """The mask hides most tiles, unless it hides nothing in this call: a window as long as the keys."""
    mask = simplify(call.mask, *call.shape[2:])
    if mask is None or not mask.is_sparse:
        return _for_plain(call)
    if call.query.device.type != "cpu":
        return (FLEX, "it supports what torch's kernels lack") if flex.why_not(call) is None else _for_plain(call)
    if _tiles_win(call, CHUNKED_FROM) and sdpa.falls_back(call) is None and chunked.share_of_tiles(call) <= FEW_TILES:
        return CHUNKED, "it skips hidden tiles, which torch's CPU kernel computes"
    return _for_plain(call)


def _for_plain(call: AttentionCall) -> tuple[Backend, str]:
    if sdpa.falls_back(call) is None:
        return SDPA, "torch's fused kernel supports it"
    if call.shape[2] > 1 and _tiles_win(call, CHUNKED_FROM if call.dropout_p > 0.0 else CHUNKED_FROM_OVER_PLAIN):
        return CHUNKED, "torch has no fused kernel; tiles beat its plain path"
    return SDPA, "torch's plain path is the fastest for a small matrix"


def _tiles_win(call: AttentionCall, start: int) -> bool:
    """Whether the call has at least ``start`` scores and ``chunked`` supports it. In a compiled graph, ``chunked`` causes a graph break."""
    return math.prod(call.shape) >= start and not is_compiling() and chunked.why_not(call) is None


def backend_for(call: AttentionCall, name: str = "auto", *, strict: bool = False) -> Backend:
    """Return the backend that runs a checked call.

    Args:
        call: as ``make_call`` returns it.
        name: the backend's name, or ``auto``.
        strict: raise an error if no fused kernel would be used, except for an empty call.

    Raises:
        ValueError: an unknown name. NotImplementedError (a RuntimeError): the named backend does not support the call. The
            message gives the reason and the backends that do. RuntimeError: with ``strict``, no fused kernel would be used.
    """
    if call.scores is not None or call.weights is not None:
        return MATH  # no kernel accepts scores or weights
    chosen, _ = choose(call, name)
    if name != "auto" and (reason := chosen.why_not(call)) is not None:
        able = ", ".join(other.name for other in _REGISTRY.values() if other.why_not(call) is None)
        raise NotImplementedError(f"backend {chosen.name!r} cannot serve this call: {reason}; {able} can")
    if strict and call.query.numel() > 0 and (reason := chosen.falls_back(call)) is not None:
        raise RuntimeError(f"strict: backend {chosen.name!r} would serve this call without a fused kernel: {reason}")
    return chosen


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    attn_bias: Tensor | Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
    need_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(c · QKᵀ + mask) V. Every backend gives the same result.

    The first six arguments and ``scale`` are torch's (``torch.nn.functional.scaled_dot_product_attention``). Five things differ.
    Tensors are 4-D. ``is_causal`` is lower-right aligned (the last query sees the last key) and intersects with ``attn_mask``.
    A float or 3-D ``attn_mask`` is an error. Grouped heads follow from the shapes, without ``enable_gqa``. The output of a row
    without a visible key is zero.

    Args:
        query: (B, H, L, D).
        key: (B, Hkv, S, D). Hkv divides H, and query head h uses key head h // (H / Hkv).
        value: (B, Hkv, S, Dv).
        attn_mask: bool (L, S) or 4-D broadcastable to (B, H, L, S), True = may attend; or a ``Mask``.
        dropout_p: the probability of dropping a weight. It always applies, even in evaluation.
        is_causal: query i sees keys up to i + S - L.
        scale: the factor on q·k. ``None`` is 1/√D, ``1.0`` is unscaled.
        attn_bias: float, (L, S) or broadcastable to (B, H, L, S), added to the scaled scores (-inf hides a key); or a ``Bias``.
        softcap: t in t · tanh(z / t), before bias and mask (Gemma 2, arXiv:2408.00118).
        sinks: (H,) extra logits without a value.
        backend: ``auto``, ``math``, ``sdpa``, ``chunked``, ``flex``, or a registered name. Torch's context manager
            ``torch.nn.attention.sdpa_kernel`` chooses among the kernels of ``sdpa``.
        need_weights: also return the weights (B, H, L, S), before dropout.

    Returns:
        (B, H, L, Dv), or ``(output, weights)``.

    Raises:
        ValueError, TypeError: arguments that do not fit. The message names them. RuntimeError: the named backend does not
            support the call.

    >>> import torch
    >>> q = torch.randn(2, 3, 5, 7)
    >>> scaled_dot_product_attention(q, q, q, is_causal=True).shape
    torch.Size([2, 3, 5, 7])
    """
    options: dict[str, Any] = {"attn_bias": attn_bias, "softcap": softcap, "sinks": sinks, "need_weights": need_weights}
    call = make_call(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)
    output = backend_for(call, backend).run(call)
    return with_weights(call, output) if need_weights else output


@dataclass(frozen=True)
class BackendReport:
    """One line of ``explain_backends``.

    ``name`` is the backend. ``can`` is whether it supports the call, ``fused`` whether its fused kernel would run, and ``runs``
    whether the call would use this backend. ``reason`` is why the backend does not support the call, or has no fused kernel for it.
    ``auto`` is why ``backend="auto"`` chose the backend.
    """

    name: str
    can: bool
    fused: bool
    runs: bool
    reason: str
    auto: str = ""

    def __str__(self) -> str:
        word = "fused" if self.fused else "can" if self.can else "cannot"
        reasons = "; ".join(filter(None, (self.reason, self.auto and f"auto: {self.auto}")))
        return f"{'->' if self.runs else '  '} {self.name:14} {word:7} {reasons}".rstrip()


def explain_backends(*tensors: Tensor, backend: str = "auto", **options: Any) -> list[BackendReport]:
    """List every backend for a call: whether it supports the call, why not, and which one would run. Nothing is run.

    Args:
        tensors, options: the arguments of ``scaled_dot_product_attention``.
        backend: a name, or ``auto``. If a named backend does not support the call, no line has ``runs``. This is not an error.

    >>> import torch
    >>> q = torch.randn(1, 2, 5, 8)
    >>> for line in explain_backends(q, q, q, is_causal=True, softcap=30.0)[:3]:
    ...     print(line)
       sdpa           cannot  torch's kernels have no soft-cap
       chunked        can     it works tile by tile in plain torch, and breaks a graph of torch.compile
    -> math           can     it holds the whole L x S matrix; auto: torch's kernels have no soft-cap and no sinks
    """
    call = make_call(*tensors, **options)  # type: ignore[arg-type]
    chosen, why = choose(call, backend)
    reports = []
    for candidate in _REGISTRY.values():
        reason = candidate.why_not(call)
        slow = candidate.falls_back(call) if reason is None else None
        can, fused = reason is None, reason is None and slow is None
        runs = can and candidate is chosen
        reports.append(BackendReport(candidate.name, can, fused, runs, reason or slow or "", why if runs else ""))
    return reports
