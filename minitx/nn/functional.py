"""Reference attention: the definition of correct, in the order of the papers.

    scores  z = c · q·k                      (then soft-cap: t · tanh(z / t), then + bias)
    weights p = softmax over visible keys    (exact zero elsewhere; with sinks the row sums below 1)
    output  o = dropout(p) · v

Everything is computed in at least float32. Shapes: query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv);
query head h uses key head h // (H / Hkv). ``make_call`` checks the arguments, once for every backend and core.

Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.2.1.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from minitx.nn.bias import Bias, as_bias
from minitx.nn.masks import Causal, Mask, as_mask, intersect

_CAUSAL = Causal()


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off, on devices that know it (``meta`` does not)."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()


def dense_bias(attn_bias: Tensor | Bias | None, shape: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
    """A rule as a tensor that broadcasts to ``shape`` = (B, H, L, S); tensors and None stay what they are."""
    if attn_bias is None or isinstance(attn_bias, Tensor):
        return attn_bias
    B, H, L, S = shape
    return as_bias(attn_bias).dense(L, S, batch_size=B, num_heads=H, device=device)


def attention_scores(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    attn_bias: Tensor | None = None,
) -> Tensor:
    """Scaled scores before mask and softmax, (B, H, L, S), in at least float32.

    Args:
        query: (B, H, L, D). key: (B, Hkv, S, D), Hkv dividing H.
        scale: multiplies q·k. softcap: t, scores become t · tanh(score / t).
        attn_bias: added last, broadcastable to (B, H, L, S).

    >>> attention_scores(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), scale=0.5).item()
    2.0
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    B, H, L, D = query.shape
    Hkv, S = key.shape[1], key.shape[2]
    grouped = query.to(dtype).reshape(B, Hkv, H // Hkv, L, D)  # query head h = (key head, member of its group)
    scores = grouped @ key.to(dtype).unsqueeze(2).transpose(-1, -2)  # (B, Hkv, H/Hkv, L, S)
    scores = scores.reshape(B, H, L, S) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores if attn_bias is None else scores + attn_bias.to(dtype)


def masked_softmax(scores: Tensor, visible: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the last axis among visible keys; a row without any is zero, with zero gradient.

    p_ij = exp(z_ij - m_i) / (Σ_visible exp(z_ij - m_i) + exp(sink_h - m_i)), m_i the row's largest logit. Hidden scores
    are filled with the dtype's minimum and their weights set to exact zero: no magic number, no NaN from an empty row.

    Args:
        scores: (B, H, L, S), at least float32.
        visible: bool, broadcastable to scores; True = may attend; None = all.
        sinks: (H,) extra logits without a value (Xiao et al. 2023, arXiv:2309.17453; gpt-oss), or None.

    >>> masked_softmax(torch.tensor([[0.0, 0.0, 9.0]]), torch.tensor([[True, True, False]])).tolist()
    [[0.5, 0.5, 0.0]]
    """
    if visible is not None:
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    top = scores.amax(-1, keepdim=True).detach()  # softmax does not depend on the shift, so neither does its gradient
    if sinks is not None:
        sink_logits = sinks.to(scores.dtype).view(-1, 1, 1)
        top = torch.maximum(top, sink_logits.detach())
    exponentials = (scores - top).exp()
    if visible is not None:
        exponentials = exponentials.masked_fill(~visible, 0.0)
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sink_logits - top).exp()
    return exponentials / total.masked_fill(total == 0, 1.0)


def visible_keys(
    call_shape: tuple[int, int, int, int], mask: Mask | None, attn_bias: Tensor | None, device: torch.device
) -> Tensor | None:
    """Which keys each query may see, as a bool tensor broadcastable to ``call_shape`` = (B, H, L, S), or None for all.

    A -inf in ``attn_bias`` hides a key as False would.
    """
    B, H, L, S = call_shape
    visible = None if mask is None else mask.dense(L, S, batch_size=B, num_heads=H, device=device)
    if attn_bias is not None:
        allowed = (attn_bias if attn_bias.dim() == 4 else attn_bias[None, None]) != -torch.inf
        visible = allowed if visible is None else visible & allowed
    return visible


def hide_unseen(tensor: Tensor, visible: Tensor | None) -> Tensor:
    """Zero the keys or values (B, Hkv, S, D) that no query may see, so that a NaN there cannot leak as 0 · NaN."""
    if visible is None:
        return tensor
    seen = visible.any(dim=-2)  # (B or 1, H or 1, S or 1)
    Hkv = tensor.shape[1]
    if seen.shape[1] not in (1, Hkv):  # a key head is seen if one query head of its group sees it
        seen = seen.unflatten(1, (Hkv, -1)).any(dim=2)
    return tensor.masked_fill(~seen.unsqueeze(-1), 0.0)


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    mask: Mask | None = None,
    scale: float,
    attn_bias: Tensor | Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The weights that attention uses, before dropout: (B, H, L, S), in at least float32.

    Args:
        query, key, scale, softcap: as in ``attention_scores``.
        mask: which keys are visible; None: all.
        attn_bias: a tensor or a rule; −inf in it hides.
        sinks: (H,) extra logits without a value.

    >>> attention_weights(torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 2, 4), scale=1.0).tolist()
    [[[[0.5, 0.5]]]]
    """
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    with full_precision(query.device):
        attn_bias = dense_bias(attn_bias, shape, query.device)
        visible = visible_keys(shape, mask, attn_bias, query.device)
        scores = attention_scores(query, hide_unseen(key, visible), scale=scale, softcap=softcap, attn_bias=attn_bias)
        return masked_softmax(scores, visible, sinks)


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    scale: float,
    attn_bias: Tensor | Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention as the module's docstring defines it: (B, H, L, Dv) in the value's dtype. Twice differentiable.

    Args:
        query, key, mask, scale, attn_bias, softcap, sinks: as in ``attention_weights``.
        value: (B, Hkv, S, Dv).
        dropout_p: probability with which a weight is dropped.

    >>> value = torch.tensor([[[[1.0], [3.0]]]])
    >>> reference_attention(torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 2, 4), value, scale=1.0).item()
    2.0
    """
    attn_bias = dense_bias(attn_bias, (*query.shape[:3], key.shape[2]), query.device)
    weights = attention_weights(query, key, mask=mask, scale=scale, attn_bias=attn_bias, softcap=softcap, sinks=sinks)
    if dropout_p > 0.0:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    B, H, L, S = weights.shape
    Hkv = value.shape[1]
    with full_precision(query.device):
        visible = visible_keys((B, H, L, S), mask, attn_bias, query.device)
        seen_value = hide_unseen(value, visible).to(weights.dtype).unsqueeze(2)  # (B, Hkv, 1, S, Dv)
        output = weights.reshape(B, Hkv, H // Hkv, L, S) @ seen_value
    return output.reshape(B, H, L, value.shape[-1]).to(value.dtype)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One checked attention call, as every backend and every efficient core gets it.

    query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv) with Hkv dividing H; ``scale`` is a plain multiplier
    (never ``None``); ``mask`` is symbolic, ``None`` when nothing is hidden; ``attn_bias`` is a tensor or a rule, and
    ``dense_bias()`` makes a tensor of either; ``softcap`` and ``sinks`` are None where there are none, and ``dropout_p`` is 0.0
    outside of training. The order of operations is scale → soft-cap → + bias → mask → sinks → softmax
    → dropout → · value.
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
        return (*self.query.shape[:3], self.key.shape[2])

    def dense_bias(self) -> Tensor | None:
        """The bias as a tensor that broadcasts to (B, H, L, S), or None."""
        return dense_bias(self.attn_bias, self.shape, self.query.device)

    @property
    def terms(self) -> dict[str, Any]:
        """What the weights depend on beside query and key, as ``attention_weights`` and ``reference_attention`` take it."""
        return {name: getattr(self, name) for name in ("mask", "scale", "attn_bias", "softcap", "sinks")}


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
    check_settings(softcap, dropout_p, "dropout_p")
    if sinks is not None and not (isinstance(sinks, Tensor) and sinks.is_floating_point()):
        raise TypeError(f"sinks must be a floating-point tensor, got {getattr(sinks, 'dtype', type(sinks).__name__)}")
    if sinks is not None and tuple(sinks.shape) != (shape[1],):
        raise ValueError(f"sinks must have shape (H,) = ({shape[1]},), got {tuple(sinks.shape)}")
    if query.shape[0] == 0:
        raise ValueError(f"query must have at least one row in its batch, got shape {tuple(query.shape)}")


def check_settings(softcap: float | None, dropout: float, name: str = "dropout") -> None:
    """Refuse a soft-cap or a dropout (called ``name`` there) that is out of range."""
    if softcap is not None and not 0 < softcap < inf:
        raise ValueError(f"softcap must be positive and finite (or None for off), got {softcap}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"{name} must lie in [0, 1), got {dropout}")
