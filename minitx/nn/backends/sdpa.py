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
* The memory-efficient CUDA kernel knows no grouped heads: beside a mask they are repeated, which costs keys and values
  once a group, instead of an L × S matrix.
* On Hopper from torch 2.11 cuDNN comes first: it builds a plan for every new shape, refuses some dropout rates and
  deterministic mode, and its backward can be NaN. It runs there only where it is named.

``sdpa`` lets torch pick among the kernels; ``sdpa:flash``, ``sdpa:efficient``, ``sdpa:cudnn`` and ``sdpa:math`` name one.
What remains: torch's CPU kernel gives 0 for a query that holds a NaN, where ``math`` gives NaN.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from minitx.nn.backends.base import Backend, always
from minitx.nn.backends.programs import tensors_of
from minitx.nn.functional import AttentionCall, hide_unseen, visible_keys
from minitx.nn.masks import Causal, simplify

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def run(call: AttentionCall, kernel: str | None = None) -> Tensor:
    """Attention through one of torch's kernels: the one that is named, or the one that torch picks."""
    with _choice(call.query.device, kernel):
        return _attend(call)


def _choice(device: torch.device, kernel: str | None) -> AbstractContextManager[object]:
    if kernel is not None:
        return sdpa_kernel([KERNELS[kernel]])
    if device.type != "cuda" or not avoids_cudnn(torch.cuda.get_device_capability(device), torch.__version__):
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def avoids_cudnn(capability: tuple[int, int], version: str) -> bool:
    """Whether cuDNN would come first unasked: on Hopper and later, from torch 2.11."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return capability >= (9, 0) and (major, minor) >= (2, 11)


def _attend(call: AttentionCall) -> Tensor:
    B, H, L, S = call.shape
    mask = simplify(call.mask, L, S)
    query, key, value = _readable(call.query), _readable(call.key), _readable(call.value)
    scale = call.scale
    if scale <= 0.0:
        query, scale = (-query, -scale) if scale < 0.0 else (query * 0.0, 1.0)
    kernel = partial(F.scaled_dot_product_attention, dropout_p=call.dropout_p, scale=scale)
    group = H // call.key.shape[1]
    if not _needs_mask(call):
        return kernel(query, key, value, is_causal=mask is not None, enable_gqa=group > 1)

    attn_bias = call.dense_bias()
    visible = visible_keys((B, H, L, S), mask, attn_bias, call.query.device)
    assert visible is not None  # there is a mask or a bias
    has_key = visible.any(dim=-1, keepdim=True)
    kernel_mask = visible | ~has_key
    if attn_bias is not None:
        kernel_mask = torch.where(kernel_mask, _finite_bias(attn_bias, query), -torch.inf)
    key, value = hide_unseen(key, visible), hide_unseen(value, visible)
    if repeats_heads(query.device.type, group):
        key, value, group = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1), 1
    output = kernel(query, key, value, attn_mask=kernel_mask, enable_gqa=group > 1)
    return output.masked_fill(~has_key, 0.0)


def repeats_heads(device: str, group: int) -> bool:
    """Whether grouped heads beside a mask have to be spelled out: no CUDA kernel but cuDNN takes both."""
    return device == "cuda" and group > 1


def _needs_mask(call: AttentionCall) -> bool:
    """Whether the call is more than a plain or a square causal one."""
    _, _, L, S = call.shape
    mask = simplify(call.mask, L, S)
    return call.attn_bias is not None or not (mask is None or (type(mask) is Causal and L == S))


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
    if any(tensor.requires_grad for tensor in tensors_of(call.attn_bias)):
        return "torch's CPU kernel has no gradient for the bias"
    if call.value.shape[-1] != call.query.shape[-1]:
        return "torch's CPU kernel wants values as wide as queries"
    return None


def refuses_kernel(call: AttentionCall, kernel: str) -> str | None:
    """Why a call cannot go to the one kernel that was named: torch is asked where it can tell."""
    reason = refuses(call)
    if reason is not None or kernel == "math":
        return reason
    if call.query.device.type == "cpu":
        return falls_back(call) if kernel == "flash" else f"torch has no {kernel} kernel for the CPU"
    if call.query.device.type != "cuda":
        return f"torch has no {kernel} kernel for {call.query.device.type}"
    needs_mask = _needs_mask(call)
    if needs_mask and kernel == "flash":
        return "torch's flash kernel takes no mask or bias"
    grouped = call.key.shape[1] != call.query.shape[1] and not needs_mask
    is_causal = call.mask is not None and not needs_mask
    params = cuda.SDPAParams(call.query, call.key, call.value, None, call.dropout_p, is_causal, grouped)
    can = {
        "flash": cuda.can_use_flash_attention,
        "efficient": cuda.can_use_efficient_attention,
        "cudnn": cuda.can_use_cudnn_attention,
    }[kernel]
    return None if can(params) else f"torch's {kernel} kernel does not take these dtypes, widths or options"


BACKEND = Backend("sdpa", run, refuses=refuses, falls_back=falls_back)
VARIANTS = tuple(
    Backend(
        f"sdpa:{kernel}",
        partial(run, kernel=kernel),
        refuses=partial(refuses_kernel, kernel=kernel),
        falls_back=(lambda call: "torch's own plain path") if kernel == "math" else always,
    )
    for kernel in KERNELS
)
