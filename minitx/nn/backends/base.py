"""What a backend is: a call, a function that serves it, and a reason where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from torch import Tensor

from minitx.nn.bias import Bias, as_bias
from minitx.nn.functional import dense_bias
from minitx.nn.masks import Causal, Mask, as_mask, intersect

_CAUSAL = Causal()


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One checked attention call, as every backend gets it.

        query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv) with Hkv dividing H; ``scale`` is a plain multiplier
        (never ``None``); ``mask`` is symbolic, ``None`` when nothing is hidden; ``attn_bias`` is a tensor or a rule, and
    ``dense_bias()`` makes a tensor of either. The order of operations is scale → soft-cap
        → + bias → mask → sinks → softmax → dropout → · value.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None = None
    scale: float = 1.0
    attn_bias: Tensor | Bias | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, L, S)."""
        return (*self.query.shape[:3], self.key.shape[2])  # type: ignore[return-value]

    def dense_bias(self) -> Tensor | None:
        """The bias as a tensor that broadcasts to (B, H, L, S), or None."""
        return dense_bias(self.attn_bias, self.shape, self.query.device)


def always(call: AttentionCall) -> None:
    """No objection."""


@dataclass(frozen=True)
class Backend:
    """A named way to compute attention.

    ``run(call)`` returns (B, H, L, Dv). ``refuses(call)`` gives the reason why it cannot serve a call, or None.
    ``falls_back(call)`` gives the reason why it serves the call without its fused kernel (slower, with an L × S matrix),
    or None; backends without a fused kernel always give one.
    """

    name: str
    run: Callable[[AttentionCall], Tensor]
    refuses: Callable[[AttentionCall], str | None] = always
    falls_back: Callable[[AttentionCall], str | None] = always


def make_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    attn_bias: Tensor | Bias | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> AttentionCall:
    """Check the arguments against each other and fill in the scale; every message names the argument.

    Raises:
        ValueError: shapes, devices or numbers that do not fit. TypeError: dtypes or kinds that do not fit.
    """
    _check_tensors(query, key, value)
    B, H, L, D = query.shape
    S = key.shape[2]
    mask = intersect(as_mask(attn_mask), _CAUSAL if is_causal else None)
    if mask is not None:
        mask.check(B, H, L, S)
    if isinstance(attn_bias, Bias):
        attn_bias = as_bias(attn_bias)  # a module becomes the rule that it stands for
    _check_extras((B, H, L, S), query, attn_bias, softcap, sinks, dropout_p)
    if scale is None:
        scale = D**-0.5
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale must be a number or None (1/sqrt(D)), got {scale!r}; words belong to modules and configs")
    if not -inf < scale < inf:
        raise ValueError(f"scale must be finite, got {scale}")
    return AttentionCall(query, key, value, mask, float(scale), attn_bias, softcap, sinks, float(dropout_p))


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have shape (batch, heads, length, width), got {tuple(tensor.shape)}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}, but query is {query.dtype} on {query.device}")
        if 0 in tensor.shape[1:]:
            raise ValueError(f"{name} must have at least one head, position and channel, got shape {tuple(tensor.shape)}")
    if key.shape[0] != query.shape[0] or value.shape[0] != query.shape[0]:
        sizes = query.shape[0], key.shape[0], value.shape[0]
        raise ValueError(f"query, key and value must have one batch size, got {sizes}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key must have the query's width D = {query.shape[-1]}, got {key.shape[-1]}")
    if key.shape[1:3] != value.shape[1:3]:
        got = tuple(key.shape[1:3]), tuple(value.shape[1:3])
        raise ValueError(f"key and value must agree in heads and length, got {got[0]} and {got[1]}")
    if query.shape[1] % key.shape[1]:
        raise ValueError(
            f"the number of key heads must divide the number of query heads, got {key.shape[1]} and {query.shape[1]}"
        )


def _check_extras(
    shape: tuple[int, int, int, int],
    query: Tensor,
    attn_bias: Tensor | Bias | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout_p: float,
) -> None:
    if attn_bias is not None:
        as_bias(attn_bias).check(*shape)
    if softcap is not None and not 0 < softcap < inf:
        raise ValueError(f"softcap must be positive and finite (or None for off), got {softcap}")
    if sinks is not None and not (isinstance(sinks, Tensor) and sinks.is_floating_point()):
        raise TypeError(f"sinks must be a floating-point tensor, got {getattr(sinks, 'dtype', type(sinks).__name__)}")
    if sinks is not None and tuple(sinks.shape) != (shape[1],):
        raise ValueError(f"sinks must have shape (H,) = ({shape[1]},), got {tuple(sinks.shape)}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must lie in [0, 1), got {dropout_p}")
    if query.shape[0] == 0:
        raise ValueError(f"query must have at least one row in its batch, got shape {tuple(query.shape)}")
