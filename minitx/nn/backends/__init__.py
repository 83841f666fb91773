"""The backends of ``scaled_dot_product_attention``: choosing, explaining and registering them.

Every backend gives the same result as ``math``, or refuses the call with a reason. ``auto`` runs the
first backend of the table ``AUTO`` whose condition holds: usually torch's fused kernel, ``flex`` for what this kernel lacks on an
accelerator, ``chunked`` for large matrices and sparse masks on a CPU, and torch's plain path or ``math`` for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.compiler import is_compiling

from minitx.nn.backends import chunked, flex, sdpa
from minitx.nn.bias import Bias
from minitx.nn.functional import AttentionCall, attention_weights, make_call, reference_attention
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


class CallFacts(NamedTuple):
    """The facts about a call that ``AUTO`` uses: types and sizes only."""

    call: AttentionCall
    num_scores: int  # B · H · L · S
    num_queries: int
    on_cpu: bool
    transformed: bool  # inside of torch.func, or with dual tensors
    adds: bool  # soft-cap or sinks
    sparse: bool  # the mask hides most tiles
    fused: bool  # torch has a fused kernel for the call

    @staticmethod
    def of(call: AttentionCall) -> CallFacts:
        B, H, L, S = call.shape
        transformed = bool(call.transforms())
        adds = call.softcap is not None or call.sinks is not None
        sparse = call.mask is not None and call.mask.is_sparse
        if sparse:  # a window as long as the keys hides nothing
            mask = simplify(call.mask, L, S)
            sparse = mask is not None and mask.is_sparse
        fused = not transformed and not adds and sdpa.falls_back(call) is None
        return CallFacts(call, B * H * L * S, L, call.query.device.type == "cpu", transformed, adds, sparse, fused)

    def tiles_win(self, start: int) -> bool:
        """Whether the call has at least ``start`` scores and ``chunked`` supports it. In a compiled graph, ``chunked`` causes a graph break."""
        return self.num_scores >= start and not is_compiling() and chunked.why_not(self.call) is None


# ``auto`` runs the backend of the first line whose condition holds, and torch's plain path if none does. ``benchmarks/attention.py`` measures the sizes.
AUTO: tuple[tuple[Callable[[CallFacts], bool], Backend, str], ...] = (
    (lambda f: f.fused and not f.sparse, SDPA, "torch's fused kernel supports it"),
    (lambda f: f.transformed and sdpa.why_not(f.call) is None, SDPA, "only torch's kernels support torch.func"),
    (lambda f: f.transformed, MATH, "no kernel supports this derivative"),
    (
        lambda f: not f.on_cpu and (f.adds or f.sparse) and flex.why_not(f.call) is None,
        FLEX,
        "it supports what torch's kernels lack",
    ),
    (lambda f: f.adds and f.on_cpu and f.num_queries == 1 and f.tiles_win(0), CHUNKED, "one query is one tile"),
    (lambda f: f.adds and f.num_queries > 1 and f.tiles_win(CHUNKED_FROM), CHUNKED, "tiles beat a large matrix"),
    (lambda f: f.adds, MATH, "torch's kernels have no soft-cap and no sinks"),
    (lambda f: f.fused and f.on_cpu and _few_tiles(f), CHUNKED, "it skips hidden tiles, which torch's CPU kernel computes"),
    (lambda f: f.fused, SDPA, "torch's fused kernel supports it"),
    (
        lambda f: f.num_queries > 1 and f.tiles_win(CHUNKED_FROM if f.call.dropout_p > 0.0 else CHUNKED_FROM_OVER_PLAIN),
        CHUNKED,
        "torch has no fused kernel; tiles beat its plain path",
    ),
)


def _few_tiles(facts: CallFacts) -> bool:
    return facts.tiles_win(CHUNKED_FROM) and chunked.share_of_tiles(facts.call) <= FEW_TILES


def choose(call: AttentionCall, backend: str) -> tuple[Backend, str]:
    """Return the backend for a name, and the reason if ``auto`` chose it. A named backend may not support the call."""
    if backend != "auto":
        if backend not in _REGISTRY:
            raise ValueError(f"backend={backend!r} must be one of {', '.join(backend_names())}")
        return _REGISTRY[backend], ""
    facts = CallFacts.of(call)
    for holds, chosen, reason in AUTO:
        if holds(facts):
            return chosen, reason
    return SDPA, "torch's plain path is the fastest for a small matrix"


def attend(call: AttentionCall, backend: str = "auto", *, strict: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Run a checked call. If weights are needed, they are computed in addition to the kernel's output.

    Args:
        call: as ``make_call`` returns it. backend: a name, or ``auto``.
        strict: raise an error if no fused kernel would be used, except for an empty call.

    Returns:
        (B, H, L, Dv), or with ``call.need_weights`` ``(output, weights)``.

    Raises:
        ValueError: an unknown name. NotImplementedError (a RuntimeError): the named backend does not support the call. The
            message gives the reason and the backends that do. RuntimeError: with ``strict``, no fused kernel would be used.
    """
    if call.scores is not None or call.weights is not None:
        backend, strict = "math", False  # no kernel accepts scores or weights
    chosen, _ = choose(call, backend)
    if backend != "auto" and (reason := chosen.why_not(call)) is not None:
        able = ", ".join(other.name for other in _REGISTRY.values() if other.why_not(call) is None)
        raise NotImplementedError(f"backend {chosen.name!r} cannot serve this call: {reason}; {able} can")
    if strict and call.query.numel() > 0 and (reason := chosen.falls_back(call)) is not None:
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
    return attend(make_call(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options), backend)


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
