"""``flex``: torch's FlexAttention. Masks become block masks, soft-cap and biases become score modifications.

Torch's compiler generates the kernel at the first call of a kind (seconds to minutes) and keeps it. It runs on CUDA only: the
kernel generated for CPUs has no backward pass, and its forward pass reads uninitialised memory (seen in torch 2.13 at 40
queries and keys of width 16: errors of 0.4, or NaN; compare pytorch issue 159247). Sinks are applied after the kernel: softmax
with a sink is softmax without it, times σ(lse − sink), where lse is the log of the row's sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from minitx.nn.bias import Bias, as_bias
from minitx.nn.functional import AttentionCall, hide_unseen
from minitx.nn.masks import Mask, simplify


@cache
def _kernel() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def run(call: AttentionCall) -> Tensor:
    """Compute attention with a generated kernel."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    _, H, L, S = call.shape
    mask = simplify(call.mask, L, S)
    bias = None if call.attn_bias is None else as_bias(call.attn_bias)
    query, key, value = call.query, call.key, call.value
    seen = seen_keys(mask, bias, call)
    key, value = hide_unseen(key, seen), hide_unseen(value, seen)
    kernel: Any = flex_attention if torch.compiler.is_compiling() else _kernel()
    result = kernel(
        query,
        key,
        value,
        score_mod=score_modification(bias, call.softcap, S - L),
        block_mask=None if mask is None else block_mask(mask, call),
        scale=call.scale,
        enable_gqa=key.shape[1] != H,
        return_aux=None if call.sinks is None else AuxRequest(lse=True),
    )
    if call.sinks is None:
        return result
    output, aux = result
    share = torch.sigmoid(aux.lse - call.sinks.to(aux.lse.dtype).view(-1, 1))  # (B, H, L)
    return (output * share.unsqueeze(-1)).to(call.value.dtype)


def score_modification(bias: Bias | None, softcap: float | None, offset: int) -> Callable[..., Tensor] | None:
    """Return soft-cap and bias as a function of one scaled score and its indices, or None without both."""
    if bias is None and softcap is None:
        return None

    def modify(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if bias is None else score + bias.value(batch, head, row, key, offset)

    return modify


def block_mask(mask: Mask, call: AttentionCall) -> Any:
    """Return torch's block mask. It is computed once for all layers that share the mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    B, H, L, S = call.shape

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return mask.visible(batch, head, row, key, S - L)

    device = call.query.device
    return mask.remember("block", (B, H, L, S, device), lambda: create_block_mask(visible, B, H, L, S, device=device))


def seen_keys(mask: Mask | None, bias: Bias | None, call: AttentionCall) -> Tensor | None:
    """Return which keys at least one query may see, (B or 1, H or 1, 1, S or 1), or None for all. It reads a thousand rows at a time."""
    B, H, L, S = call.shape
    hiding = bias if bias is not None and bias.may_hide else None
    options: dict[str, Any] = {"batch_size": B, "num_heads": H, "device": call.query.device}

    def shown(rows: slice) -> Tensor:
        parts = [] if mask is None else [mask.dense(L, S, rows=rows, **options)]
        parts += [] if hiding is None else [hiding.dense(L, S, rows=rows, **options) != -torch.inf]
        return reduce(and_, parts).any(-2, keepdim=True)

    def build() -> Tensor:
        return torch.stack([shown(slice(i, i + 1024)) for i in range(0, L, 1024)]).any(0)

    if hiding is not None:  # a bias may change from call to call
        return build()
    return None if mask is None else mask.remember("seen", (B, H, L, S, call.query.device), build)


def why_not(call: AttentionCall) -> str | None:
    """Return what FlexAttention cannot do or computes wrongly, or None."""
    query = call.query
    if lack := lacks(query.device.type, query.dtype, (query.shape[-1], call.value.shape[-1]), query.shape[0], call.dropout_p):
        return lack
    return "a compiled kernel cannot be entered by torch.func or forward derivatives" if call.transforms() else None


def lacks(device: str, dtype: torch.dtype, widths: tuple[int, int], num_rows: int, dropout_p: float) -> str | None:
    """Return what FlexAttention lacks for a call on a kind of device, or None.

    Args:
        widths: D and Dv, the widths of queries and values. num_rows: B, the batch size.

    >>> lacks("cuda", torch.float64, (64, 64), 2, 0.0)
    'FlexAttention computes in float32'
    """
    if dropout_p > 0.0:
        return "FlexAttention has no dropout"
    if dtype == torch.float64:
        return "FlexAttention computes in float32"
    if num_rows == 0:
        return "FlexAttention cannot build a block mask for an empty batch"
    if device != "cuda":
        return "FlexAttention needs CUDA: its CPU kernel has no backward pass and gives wrong results at some sizes"
    if min(widths) < 16:  # otherwise torch's compiler raises at the first call
        return f"FlexAttention's CUDA kernel needs heads of width 16 or more, got {min(widths)}"
    return None
