"""The package ``flash-attn`` as a backend: importing this file registers it, ``backend="flash_attn"`` names it.

FlashAttention-2 (Dao 2023, arXiv:2307.08691) serves causal calls (lower-right aligned since 2.1, as here), sliding windows, grouped
heads, soft-cap, dropout and ALiBi, in half precision on CUDA. It has no argument for other masks, biases and sinks, and it refuses
soft-cap together with dropout. ``why_not`` says so before anything is computed.

    python examples/flash_attn_backend.py
    python examples/flash_attn_backend.py --device cuda     # with a GPU and the package

It prints for six calls whether the package can serve them, or why it cannot. In a run, ``imports=[flash_attn_backend]
model.backend=flash_attn`` uses it, with this folder on the PYTHONPATH.
"""

import argparse
from importlib.util import find_spec

import torch
from torch import Tensor

from minitx.nn import ALiBi, AttentionCall, Causal, SlidingWindow, backend_names, explain_backends, register_backend
from minitx.nn.masks import simplify


def run(call: AttentionCall) -> Tensor:
    """Attention through ``flash_attn_func``, which wants (B, L, H, D)."""
    from flash_attn import flash_attn_func

    window = window_of(call)
    slopes = None
    if isinstance(call.attn_bias, ALiBi):
        slopes = call.attn_bias.slope(torch.arange(call.query.shape[1], device=call.query.device)).float()
    output = flash_attn_func(
        *(tensor.transpose(1, 2) for tensor in (call.query, call.key, call.value)),
        dropout_p=call.dropout_p,
        softmax_scale=call.scale,
        causal=window[1] == 0,
        window_size=window,
        softcap=call.softcap or 0.0,  # 0 is its word for none
        alibi_slopes=slopes,
    )
    return output.transpose(1, 2)


def window_of(call: AttentionCall) -> tuple[int, int] | None:
    """The mask as (keys to the left, keys to the right) of the query's own key, -1 for all. None where it is no such band."""
    mask = simplify(call.mask, *call.shape[2:])
    left = right = -1
    for part in () if mask is None else mask.parts():
        if type(part) is Causal:
            right = 0
        elif isinstance(part, SlidingWindow):
            reach = part.window - 1
            left = reach if left < 0 else min(left, reach)
            right = reach if right < 0 else min(right, reach)
        else:
            return None
    return left, right


def why_not(call: AttentionCall) -> str | None:
    """The reason why the package cannot serve a call, or None."""
    if call.sinks is not None:
        return "flash-attn has no sinks"
    if call.attn_bias is not None and not isinstance(call.attn_bias, ALiBi):
        return "flash-attn has no bias but ALiBi"
    if call.softcap is not None and call.dropout_p > 0.0:
        return "flash-attn has no soft-cap together with dropout"
    if window_of(call) is None:
        return "flash-attn has causal and window masks only"
    if call.value.shape[-1] != call.query.shape[-1]:
        return "flash-attn wants values as wide as queries"
    if call.scale <= 0.0:
        return "flash-attn wants a positive scale"
    if find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    if call.query.device.type != "cuda" or call.query.dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn computes in float16 or bfloat16 on CUDA, not in {call.query.dtype} on {call.query.device.type}"
    return None


if "flash_attn" not in backend_names():  # a module may be imported twice
    register_backend("flash_attn", run, why_not=why_not)


def main(device: str = "cpu") -> dict[str, str]:
    """Print and return, for each call, why the package cannot serve it; an empty text where it can."""
    query = torch.randn(1, 4, 6, 8, device=device, dtype=torch.bfloat16)
    calls = {
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "attn_mask": SlidingWindow(3)},
        "ALiBi": {"is_causal": True, "attn_bias": ALiBi(4)},
        "soft-cap": {"softcap": 30.0},
        "soft-cap and dropout": {"softcap": 30.0, "dropout_p": 0.1},
        "sinks": {"sinks": torch.zeros(4, device=device)},
    }
    reasons = {}
    for name, options in calls.items():
        reports = explain_backends(query, query, query, backend="flash_attn", **options)
        reasons[name] = next(report.reason for report in reports if report.name == "flash_attn")
        print(f"{name:21} {reasons[name] or 'served'}")
    return reasons


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    main(parser.parse_args().device)
