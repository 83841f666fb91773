"""Use the package ``flash-attn`` as a backend. Importing this file registers it as ``backend="flash_attn"``.

FlashAttention-2 (Dao 2023, arXiv:2307.08691) runs in half precision on CUDA. It supports causal masks (lower-right aligned since version
2.1, as in minitx), sliding windows, grouped heads, soft-cap, dropout and ALiBi. It does not support other masks and biases, sinks, or
soft-cap together with dropout. ``why_not`` checks this before anything is computed.

    python examples/flash_attn_backend.py
    python examples/flash_attn_backend.py --device cuda     # with a GPU and the package

This prints for six calls whether the package can compute them, and if not, why. In a training run, put this folder on the PYTHONPATH and
add ``imports=[flash_attn_backend] model.backend=flash_attn``.
"""

import argparse
from importlib.util import find_spec

import torch
from torch import Tensor

from minitx.nn import ALiBi, AttentionCall, Causal, SlidingWindow, backend_names, explain_backends, register_backend
from minitx.nn.masks import simplify


def run(call: AttentionCall) -> Tensor:
    """Compute attention with ``flash_attn_func``, whose tensors have shape (B, L, H, D)."""
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
        softcap=call.softcap or 0.0,  # 0 means none
        alibi_slopes=slopes,
    )
    return output.transpose(1, 2)


def window_of(call: AttentionCall) -> tuple[int, int] | None:
    """Return how many keys a query sees left and right of itself, -1 for all. None for any other mask."""
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
    """Return why the package cannot compute a call, or None if it can."""
    if call.sinks is not None:
        return "flash-attn does not support sinks"
    if call.attn_bias is not None and not isinstance(call.attn_bias, ALiBi):
        return "flash-attn does not support a bias other than ALiBi"
    if call.softcap is not None and call.dropout_p > 0.0:
        return "flash-attn does not support soft-cap together with dropout"
    if window_of(call) is None:
        return "flash-attn does not support a mask other than causal and window masks"
    if call.value.shape[-1] != call.query.shape[-1]:
        return "flash-attn needs values of the same width as queries"
    if call.scale <= 0.0:
        return "flash-attn needs a positive scale"
    if find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    if call.query.device.type != "cuda" or call.query.dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn computes in float16 or bfloat16 on CUDA, not in {call.query.dtype} on {call.query.device.type}"
    return None


if "flash_attn" not in backend_names():  # this file may be imported twice
    register_backend("flash_attn", run, why_not=why_not)


def main(device: str = "cpu") -> dict[str, str]:
    """Print and return for each call why the package cannot compute it, or an empty string if it can."""
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
        print(f"{name:21} {reasons[name] or 'supported'}")
    return reasons


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    main(parser.parse_args().device)
