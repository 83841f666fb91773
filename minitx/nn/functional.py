"""Reference attention: the definition of correct, in the order of the papers.

    scores  z = c · q·k                      (then soft-cap: t · tanh(z / t), then + bias)
    weights p = softmax over visible keys    (exact zero elsewhere; with sinks the row sums below 1)
    output  o = dropout(p) · v

Everything is computed in at least float32. Shapes: query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv);
query head h uses key head h // (H / Hkv).

Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.2.1.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from minitx.nn.bias import Bias, as_bias
from minitx.nn.masks import Mask


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
    """The weights that attention uses, before dropout: (B, H, L, S), in at least float32."""
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
    """Attention as the module's docstring defines it: (B, H, L, Dv) in the value's dtype. Twice differentiable."""
    attn_bias = dense_bias(attn_bias, (*query.shape[:3], key.shape[2]), query.device)  # type: ignore[arg-type]
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
