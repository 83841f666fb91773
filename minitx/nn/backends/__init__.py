"""The backends of ``scaled_dot_product_attention``: choosing, explaining and registering them.

Every backend equals ``math`` or refuses with a reason. ``auto`` takes torch's fused kernel where it serves the call;
where it does not, ``chunked`` for large score matrices, and for small ones torch's plain path or ``math``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from minitx.nn.backends import chunked, flex, math, sdpa, varlen
from minitx.nn.backends.base import Backend, never
from minitx.nn.bias import Bias
from minitx.nn.functional import AttentionCall, attention_weights, make_call
from minitx.nn.masks import Mask

__all__ = [
    "AttentionCall",
    "Backend",
    "BackendReport",
    "attend",
    "backend_names",
    "explain_backends",
    "register_backend",
    "scaled_dot_product_attention",
    "unregister_backend",
]

_BUILT_IN = {backend.name: backend for backend in (sdpa.BACKEND, chunked.BACKEND, math.BACKEND, flex.BACKEND, varlen.BACKEND)}
_REGISTRY: dict[str, Backend] = dict(_BUILT_IN)
# scores of all heads together, from which on tiles beat the whole matrix on CPU (measured: docs/dev/decisions.md): that of math, and
# that of torch's plain path, which makes it in fewer calls as long as it need not draw another for dropout
CHUNKED_FROM, CHUNKED_FROM_OVER_PLAIN = 2**21, 2**23
# of the tiles, the share up to which computing them alone beats torch's CPU kernel, which computes what a mask hides, too
FEW_TILES = 0.25


def backend_names() -> tuple[str, ...]:
    """The names that ``backend=`` accepts: ``auto`` and every registered backend.

    >>> {"auto", "math", "sdpa", "chunked", "flex", "varlen"} <= set(backend_names())
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
    """Make ``backend=name`` mean ``run(call)``, everywhere: functions, modules, configs.

    Args:
        name: a new name. ``auto`` does not pick it; it runs where it is named.
        run: takes a checked ``AttentionCall``, returns (B, H, L, Dv).
        why_not: the reason why ``run`` cannot serve a call, or None where it can.
        falls_back: the reason why ``run`` would serve a call without its fused kernel, or None.

    Raises:
        ValueError: a name that is taken.

    >>> from minitx.nn import reference_attention
    >>> register_backend("mine", reference_attention, why_not=lambda call: "no sinks" if call.sinks is not None else None)
    >>> "mine" in backend_names()
    True
    >>> unregister_backend("mine")
    """
    if name in backend_names():
        raise ValueError(f"backend {name!r} is taken; registered are {', '.join(backend_names())}")
    _REGISTRY[name] = Backend(name, run, why_not, falls_back)


def unregister_backend(name: str) -> None:
    """Remove a backend that ``register_backend`` added.

    Raises:
        ValueError: a name that is not registered, or that is minitx's own.
    """
    if name not in _REGISTRY or name in _BUILT_IN:
        raise ValueError(f"backend {name!r} was not registered by register_backend")
    del _REGISTRY[name]


def _fastest(call: AttentionCall) -> Backend:
    """What ``auto`` runs: looks at types and sizes only. The rules are measured by ``benchmarks/attention.py``."""
    is_sparse = call.mask is not None and call.mask.is_sparse
    if not is_sparse and call.softcap is None and call.sinks is None and sdpa.falls_back(call) is None:
        return sdpa.BACKEND
    B, H, L, S = call.shape
    scores, on_cpu = B * H * L * S, call.query.device.type == "cpu"
    if call.softcap is not None or call.sinks is not None:  # torch's kernels have no place for them
        if not on_cpu and flex.why_not(call) is None:
            return flex.BACKEND
        few_rows = L == 1 and on_cpu  # a row of scores and its online softmax are one tile
        large = scores >= CHUNKED_FROM and L > 1
        return chunked.BACKEND if (few_rows or large) and chunked.why_not(call) is None else math.BACKEND
    if not on_cpu and is_sparse and varlen.why_not(call) is None:
        return varlen.BACKEND  # a document is a sequence of its own
    if not on_cpu and is_sparse and flex.why_not(call) is None:
        return flex.BACKEND  # it skips empty blocks; torch's kernels would get a dense mask
    if sdpa.falls_back(call) is None:
        few = on_cpu and is_sparse and scores >= CHUNKED_FROM and _few_tiles(call)
        return chunked.BACKEND if few else sdpa.BACKEND
    start = CHUNKED_FROM if call.dropout_p > 0.0 else CHUNKED_FROM_OVER_PLAIN
    return chunked.BACKEND if L > 1 and scores >= start and chunked.why_not(call) is None else sdpa.BACKEND


def _few_tiles(call: AttentionCall) -> bool:
    """Whether a rule leaves few tiles of many. Not asked in a graph, whose sizes may be symbols: each would be one graph."""
    return not is_compiling() and chunked.why_not(call) is None and chunked.share_of_tiles(call) <= FEW_TILES


def named(call: AttentionCall, backend: str) -> Backend:
    """The backend that a name stands for in a call, whether it can serve it or not."""
    if backend == "auto":
        return _fastest(call)
    if backend not in _REGISTRY:
        raise ValueError(f"backend={backend!r} is not known; one of {', '.join(backend_names())}")
    return _REGISTRY[backend]


def attend(call: AttentionCall, backend: str = "auto", *, strict: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Run a checked call. Weights, if wanted, are computed in addition to the kernel's output, not instead of it.

    Args:
        call: as ``make_call`` returns it. backend: a name, or ``auto``.
        strict: a fall from a fused kernel is an error.

    Returns:
        (B, H, L, Dv), or with ``call.need_weights`` ``(output, weights)``.

    Raises:
        ValueError: an unknown name. NotImplementedError (a RuntimeError): a named backend that cannot serve the call,
            with the reason and the ones that could. RuntimeError: with ``strict``, one that would leave its fused kernel.
    """
    if call.scores is not None or call.weights is not None:
        backend, strict = "math", False  # no kernel takes them
    chosen = _fastest(call) if backend == "auto" else named(call, backend)
    if backend != "auto" and (reason := chosen.why_not(call)) is not None:
        able = ", ".join(other.name for other in _REGISTRY.values() if other.why_not(call) is None)
        raise NotImplementedError(f"backend {chosen.name!r} cannot serve this call: {reason}; {able} can")
    if strict and (reason := chosen.falls_back(call)) is not None:
        raise RuntimeError(f"strict: backend {chosen.name!r} would serve this call without a fused kernel: {reason}")
    output = chosen.run(call)
    return (output, attention_weights(call).to(call.query.dtype)) if call.need_weights else output


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

    The first six arguments and ``scale`` are those of ``torch.nn.functional.scaled_dot_product_attention``. What
    differs: ``is_causal`` is lower-right aligned (the last query sees the last key) and intersects with ``attn_mask``;
    a float or 3-D ``attn_mask`` raises; grouped heads are read off the shapes; a row with no visible key is zero.

    Args:
        query: (B, H, L, D).
        key: (B, Hkv, S, D), Hkv dividing H; query head h uses key head h // (H / Hkv).
        value: (B, Hkv, S, Dv).
        attn_mask: bool (L, S) or 4-D broadcastable to (B, H, L, S), True = may attend; or a ``Mask``.
        dropout_p: probability with which a weight is dropped; applied as given, in train and eval alike.
        is_causal: query i sees keys up to i + S - L.
        scale: multiplier on q·k; ``None`` = 1/√D, ``1.0`` = unscaled.
        attn_bias: float, (L, S) or broadcastable to (B, H, L, S), added to the scaled scores, -inf hides; or a ``Bias``.
        softcap: t in t · tanh(z / t), before bias and mask (Gemma 2, arXiv:2408.00118).
        sinks: (H,) extra logits without a value.
        backend: ``auto``, ``math``, ``sdpa``, ``chunked``, ``flex``, ``varlen``, or a registered name. Torch's context manager
            ``torch.nn.attention.sdpa_kernel`` chooses among the kernels of ``sdpa``.
        need_weights: also return the weights (B, H, L, S), before dropout.

    Returns:
        (B, H, L, Dv), or ``(output, weights)``.

    Raises:
        ValueError, TypeError: arguments that do not fit, named. RuntimeError: a named backend that cannot serve the call.

    >>> import torch
    >>> q = torch.randn(2, 3, 5, 7)
    >>> scaled_dot_product_attention(q, q, q, is_causal=True).shape
    torch.Size([2, 3, 5, 7])
    """
    options: dict[str, Any] = {"attn_bias": attn_bias, "softcap": softcap, "sinks": sinks, "need_weights": need_weights}
    return attend(make_call(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options), backend)


@dataclass(frozen=True)
class BackendReport:
    """One line of ``explain_backends``.

    ``name`` of the backend, whether it ``can`` serve the call, whether by its ``fused`` kernel, whether it is the one that
    ``runs``, and the ``reason`` why not, or what it falls back to.
    """

    name: str
    can: bool
    fused: bool
    runs: bool
    reason: str

    def __str__(self) -> str:
        word = "fused" if self.fused else "can" if self.can else "cannot"
        return f"{'->' if self.runs else '  '} {self.name:14} {word:7} {self.reason}".rstrip()


def explain_backends(*tensors: Tensor, backend: str = "auto", **options: Any) -> list[BackendReport]:
    """For a call: every backend, whether it can serve it and why not, and which one runs. Nothing is run.

    Args:
        tensors, options: the arguments of ``scaled_dot_product_attention``.
        backend: a name, or ``auto``. A named backend that cannot serve the call is explained, not raised: no line runs then.

    >>> import torch
    >>> q = torch.randn(1, 2, 5, 8)
    >>> for line in explain_backends(q, q, q, is_causal=True, softcap=30.0)[:3]:
    ...     print(line)
       sdpa           cannot  torch's kernels have no soft-cap
       chunked        can     it works tile by tile in plain torch
    -> math           can     it holds the whole L x S matrix
    """
    call = make_call(*tensors, **options)  # type: ignore[arg-type]
    chosen, reports = named(call, backend), []
    for candidate in _REGISTRY.values():
        reason = candidate.why_not(call)
        slow = candidate.falls_back(call) if reason is None else None
        can, fused = reason is None, reason is None and slow is None
        reports.append(BackendReport(candidate.name, can, fused, can and candidate is chosen, reason or slow or ""))
    return reports
