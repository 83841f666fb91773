"""``sdpa``: torch's fused kernels behind ``F.scaled_dot_product_attention``, with its traps handled.

* ``scale=None`` means 1/√D there too: the scale is always passed as a number, 1.0 when unscaled.
* The fused kernels multiply by the scale after they hid the future with -inf, and keep the largest score before
  they multiply: with a scale of zero or less that is NaN. The query takes the sign (or the zero), the kernel gets a
  positive number.
* Its ``is_causal`` is upper-left aligned and must not meet a mask: the flag is used for a square, purely causal call
  only; everything else becomes one bool (or float, with a bias) mask.
* A row without a visible key is given all keys and its output zeroed, so that no kernel meets an empty row; keys and
  values that no query may see are zero-filled, so that a NaN there cannot leak.
* On CPU, dropout, a bias that requires grad and Dv ≠ D leave the fused kernel silently: ``falls_back`` says so.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minitx.nn.backends.base import AttentionCall, Backend
from minitx.nn.functional import hide_unseen, visible_keys
from minitx.nn.masks import Causal, simplify


def run(call: AttentionCall) -> Tensor:
    """Attention through the fused kernel that torch picks."""
    B, H, L, S = call.shape
    mask = simplify(call.mask, L, S)
    query, key, value = _readable(call.query), _readable(call.key), _readable(call.value)
    scale = call.scale
    if scale <= 0.0:
        query, scale = (-query, -scale) if scale < 0.0 else (query * 0.0, 1.0)
    kernel = partial(F.scaled_dot_product_attention, dropout_p=call.dropout_p, scale=scale, enable_gqa=call.key.shape[1] != H)
    if call.attn_bias is None and (mask is None or (type(mask) is Causal and L == S)):
        return kernel(query, key, value, is_causal=mask is not None)

    visible = visible_keys((B, H, L, S), mask, call.attn_bias, call.query.device)
    assert visible is not None  # there is a mask or a bias
    has_key = visible.any(dim=-1, keepdim=True)
    kernel_mask = visible | ~has_key
    if call.attn_bias is not None:
        kernel_mask = torch.where(kernel_mask, _finite_bias(call.attn_bias, query), -torch.inf)
    output = kernel(query, hide_unseen(key, visible), hide_unseen(value, visible), attn_mask=kernel_mask)
    return output.masked_fill(~has_key, 0.0)


def _readable(tensor: Tensor) -> Tensor:
    """With its last axis contiguous: otherwise every fused kernel steps aside without saying so."""
    return tensor if tensor.stride(-1) == 1 else tensor.clone(memory_format=torch.contiguous_format)


def _finite_bias(attn_bias: Tensor, query: Tensor) -> Tensor:
    """The bias in a dtype that the kernel takes, with 0 for -inf (the mask hides those) and no new infinities.

    A float32 bias of -1e5 would be -inf in float16. The CPU kernel takes float32 beside half-precision queries.
    """
    on_cpu = query.device.type == "cpu"
    dtype = torch.promote_types(query.dtype, torch.float32) if on_cpu else query.dtype
    limit = min(torch.finfo(dtype).max, torch.finfo(attn_bias.dtype).max)
    return attn_bias.masked_fill(attn_bias == -torch.inf, 0.0).clamp(-limit, limit).to(dtype)


def refuses(call: AttentionCall) -> str | None:
    """Soft-cap and sinks stand between the scores and the softmax, where torch's kernels have no slot."""
    if call.softcap is not None:
        return "torch's kernels have no soft-cap"
    if call.sinks is not None:
        return "torch's kernels have no sinks"
    return None


def falls_back(call: AttentionCall) -> str | None:
    """The calls that torch serves with its slow path, without saying so."""
    if call.query.device.type != "cpu":
        return None
    if call.dropout_p > 0.0:
        return "torch's CPU kernel has no dropout"
    if call.attn_bias is not None and call.attn_bias.requires_grad:
        return "torch's CPU kernel has no gradient for the bias"
    if call.value.shape[-1] != call.query.shape[-1]:
        return "torch's CPU kernel wants values as wide as queries"
    return None


BACKEND = Backend("sdpa", run, refuses=refuses, falls_back=falls_back)
