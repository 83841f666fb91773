"""Kernels behind one function: choice, explanation, and a slot for yours.

Every backend equals ``math`` or refuses with a reason. ``auto`` takes torch's fused kernel where it serves the call;
where it does not, ``chunked`` for large score matrices, and for small ones torch's plain path or ``math``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.compiler import is_compiling

from minitx.nn.backends import chunked, flash_attn, flex, math, sdpa
from minitx.nn.backends.base import Backend, always
from minitx.nn.bias import Bias
from minitx.nn.functional import AttentionCall, attention_weights, make_call
from minitx.nn.masks import Mask, SlidingWindow

__all__ = [
    "AttentionCall",
    "Backend",
    "BackendReport",
    "backend_names",
    "explain_backends",
    "register_backend",
    "run_attention",
    "scaled_dot_product_attention",
    "unregister_backend",
]

_BUILT_IN = (sdpa.BACKEND, chunked.BACKEND, math.BACKEND, flex.BACKEND, flash_attn.BACKEND, *sdpa.VARIANTS)
_REGISTRY: dict[str, Backend] = {backend.name: backend for backend in _BUILT_IN}
# scores of all heads together, from which on tiles beat the whole matrix on CPU (measured: docs/decisions.md): that of math, and
# that of torch's plain path, which makes it in fewer calls as long as it need not draw another for dropout
CHUNKED_FROM, CHUNKED_FROM_OVER_PLAIN = 2**21, 2**23
# of the tiles, the share up to which computing them alone beats torch's CPU kernel, which computes what a mask hides, too
FEW_TILES = 0.25


def backend_names() -> tuple[str, ...]:
    """What ``backend=`` takes: ``auto``, and every backend that is registered now.

    >>> {"auto", "math", "sdpa", "chunked", "flex"} <= set(backend_names())
    True
    """
    return ("auto", *_REGISTRY)


def register_backend(
    name: str,
    run: Callable[[AttentionCall], Tensor],
    *,
    supports: Callable[[AttentionCall], str | None] = always,
    falls_back: Callable[[AttentionCall], str | None] = always,
) -> None:
    """Make ``backend=name`` mean ``run(call)``, everywhere: functions, modules, configs.

    ``supports(call)`` returns None where ``run`` can serve the call, else the reason why not; ``falls_back(call)`` likewise why
    it would serve it without its fused kernel. A registered backend is used when it is named; ``auto`` does not pick it.

    Raises:
        ValueError: a name that is taken.

    >>> from minitx.nn import reference_attention
    >>> register_backend("mine", lambda call: reference_attention(call.query, call.key, call.value, **call.terms))
    >>> "mine" in backend_names()
    True
    >>> unregister_backend("mine")
    """
    if name in backend_names():
        raise ValueError(f"backend {name!r} is taken; registered are {', '.join(backend_names())}")
    _REGISTRY[name] = Backend(name, run, refuses=supports, falls_back=falls_back)


def unregister_backend(name: str) -> None:
    """Forget a backend that ``register_backend`` added.

    Raises:
        ValueError: a name that is not registered, or that is minitx's own.
    """
    if name not in _REGISTRY or name in (backend.name for backend in _BUILT_IN):
        raise ValueError(f"backend {name!r} was not registered by register_backend")
    del _REGISTRY[name]


def _fastest(call: AttentionCall) -> Backend:
    """What ``auto`` runs: looks at types and sizes only. The rules are measured by ``benchmarks/kernel_choice.py``."""
    B, H, L, S = call.shape
    scores, on_cpu = B * H * L * S, call.query.device.type == "cpu"
    tiled = chunked.BACKEND.refuses(call) is None
    if sdpa.BACKEND.refuses(call) is not None:  # a soft-cap or sinks
        few_rows = L == 1 and on_cpu  # a row of scores and its online softmax are one tile
        large = scores >= CHUNKED_FROM and L > 1
        return chunked.BACKEND if tiled and (few_rows or large) else math.BACKEND
    if sdpa.BACKEND.falls_back(call) is None:
        return chunked.BACKEND if tiled and on_cpu and _few_tiles(call, scores) else sdpa.BACKEND
    start = CHUNKED_FROM if call.dropout_p > 0.0 else CHUNKED_FROM_OVER_PLAIN
    return chunked.BACKEND if tiled and L > 1 and scores >= start else sdpa.BACKEND


def _few_tiles(call: AttentionCall, scores: int) -> bool:
    """Whether a window leaves few tiles of many; not asked in a graph, whose sizes may be symbols: each would be one graph."""
    windowed = call.mask is not None and any(isinstance(part, SlidingWindow) for part in call.mask.parts())
    return windowed and not is_compiling() and scores >= CHUNKED_FROM and chunked.share_of_tiles(call) <= FEW_TILES


def named(call: AttentionCall, backend: str) -> Backend:
    """The backend that a name stands for in a call, whether it can serve it or not."""
    if backend == "auto":
        return _fastest(call)
    if backend not in _REGISTRY:
        raise ValueError(f"backend={backend!r} is not known; one of {', '.join(backend_names())}")
    return _REGISTRY[backend]


def choose(call: AttentionCall, backend: str, *, strict: bool) -> Backend:
    """The backend that serves ``call``.

    Raises:
        ValueError: an unknown name. NotImplementedError (a RuntimeError): a named backend that cannot serve the call,
            with the reason and the ones that could. RuntimeError: with ``strict``, one that would leave its fused kernel.
    """
    chosen = named(call, backend)
    reason = chosen.refuses(call)
    if reason is not None:
        able = [b.name for b in _REGISTRY.values() if b not in sdpa.VARIANTS and b.refuses(call) is None]
        raise NotImplementedError(f"backend {chosen.name!r} cannot serve this call: {reason}; {', '.join(able)} can")
    reason = chosen.falls_back(call) if strict else None
    if reason is not None:
        raise RuntimeError(f"strict: backend {chosen.name!r} would serve this call without a fused kernel: {reason}")
    return chosen


def run_attention(
    call: AttentionCall, *, backend: str = "auto", strict: bool = False, need_weights: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Serve a checked call; with ``need_weights`` the weights are computed *beside* the kernel, not instead of it.

    Args:
        call: as ``make_call`` gives it. backend: a name, or ``auto``.
        strict: a fall from a fused kernel is an error.
    """
    output = choose(call, backend, strict=strict).run(call)
    if not need_weights:
        return output
    weights = attention_weights(call.query, call.key, **call.terms)
    return output, weights.to(call.query.dtype)


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
    """softmax(c · QKᵀ + mask) V, one kernel or another, the same answer.

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
        backend: ``auto``, ``math``, ``sdpa``, ``sdpa:flash`` (``efficient``, ``cudnn``, ``math``), ``chunked``, ``flex``,
            ``flash_attn``, or a registered name.
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
    call = make_call(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, attn_bias=attn_bias, softcap=softcap, sinks=sinks
    )
    return run_attention(call, backend=backend, need_weights=need_weights)


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


def explain_backends(
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
) -> list[BackendReport]:
    """For a call with these arguments: every backend, whether it can and why not, and which one runs. Nothing is run.

    A named ``backend`` that cannot serve the call is explained, not raised: no line runs then. ``query``, ``key``, ``value``,
    ``attn_mask``, ``dropout_p``, ``is_causal``, ``scale``, ``attn_bias``, ``softcap`` and ``sinks`` are those of
    ``scaled_dot_product_attention``.

    >>> import torch
    >>> q = torch.randn(1, 2, 5, 8)
    >>> for line in explain_backends(q, q, q, is_causal=True, softcap=30.0)[:3]:
    ...     print(line)
       sdpa           cannot  torch's kernels have no soft-cap
       chunked        can     it works tile by tile in plain torch
    -> math           can     it holds the whole L x S matrix
    """
    call = make_call(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, attn_bias=attn_bias, softcap=softcap, sinks=sinks
    )
    chosen = named(call, backend)
    reports = []
    for candidate in _REGISTRY.values():
        refusal = candidate.refuses(call)
        slow = candidate.falls_back(call) if refusal is None else None
        fused, runs = refusal is None and slow is None, refusal is None and candidate is chosen
        reports.append(BackendReport(candidate.name, refusal is None, fused, runs, refusal or slow or ""))
    return reports
