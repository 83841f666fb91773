"""``flash_attn``: the package of that name (Dao 2023, arXiv:2307.08691), where it is installed; imported on use.

It serves causal calls (lower-right aligned since 2.1, as here), sliding windows, grouped heads, soft-cap, dropout and
ALiBi in half precision on CUDA. Other masks, biases and sinks it has no slot for.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from minitx.nn.backends.base import Backend
from minitx.nn.bias import ALiBi
from minitx.nn.functional import AttentionCall
from minitx.nn.masks import Causal, SlidingWindow, simplify


def run(call: AttentionCall) -> Tensor:
    """Attention through ``flash_attn_func``, which wants (B, L, H, D)."""
    from flash_attn import flash_attn_func

    window = window_of(call)
    assert window is not None  # else it was refused
    slopes = None
    if isinstance(call.attn_bias, ALiBi):
        head = torch.arange(call.query.shape[1], device=call.query.device)
        slopes = call.attn_bias.slope(head).float()
    output = flash_attn_func(
        *(t.transpose(1, 2) for t in (call.query, call.key, call.value)),
        dropout_p=call.dropout_p,
        softmax_scale=call.scale,
        causal=window[1] == 0,
        window_size=window,
        softcap=call.softcap or 0.0,  # 0 is its word for none
        alibi_slopes=slopes,
    )
    return output.transpose(1, 2)


def window_of(call: AttentionCall) -> tuple[int, int] | None:
    """The mask as (keys to the left, keys to the right) of the query's own, -1 for all; None where it is no band."""
    mask = simplify(call.mask, *call.shape[2:])
    left = right = -1
    for part in () if mask is None else mask.parts():
        if type(part) is Causal:
            right = 0
        elif isinstance(part, SlidingWindow):
            reach = part.window - 1
            left, right = reach if left < 0 else min(left, reach), reach if right < 0 else min(right, reach)
        else:
            return None
    return left, right


def refuses(call: AttentionCall) -> str | None:
    """Whatever the package has no argument for."""
    if find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    if call.query.device.type != "cuda" or call.query.dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn computes in float16 or bfloat16 on CUDA, not in {call.query.dtype} on {call.query.device.type}"
    if call.sinks is not None:
        return "flash-attn has no sinks"
    if call.attn_bias is not None and not isinstance(call.attn_bias, ALiBi):
        return "flash-attn knows no bias but ALiBi"
    if window_of(call) is None:
        return "flash-attn knows causal and window masks only"
    if call.value.shape[-1] != call.query.shape[-1]:
        return "flash-attn wants values as wide as queries"
    return None


BACKEND = Backend("flash_attn", run, refuses=refuses)
