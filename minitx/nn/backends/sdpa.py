"""``sdpa``: torch's fused kernels, called through ``F.scaled_dot_product_attention``.

Where torch's function differs from ours, and what this file does:

=====================================================  ==============================================================================
condition                                              reason, and answer
=====================================================  ==============================================================================
no scale is given                                      ``scale=None`` means 1/√D in torch: ``run`` always passes a number
scale ≤ 0                                              the kernels multiply by it after they set hidden scores to -inf, which gives
                                                       NaN: ``run`` multiplies the query by the sign (or by 0)
``Causal`` alone, L = S                                torch's ``is_causal`` is upper-left aligned and excludes a mask: ``_plan`` sets
                                                       it here only, and makes every other mask a tensor
a row without a visible key                            no kernel has to handle it: it gets all keys (``_plan``), and its output is set
                                                       to zero
keys that no query sees                                a NaN there would leak: ``run`` zeroes them, on a CPU only if they are not
                                                       finite (``_is_harmless``)
CPU: dropout, a bias that learns, Dv ≠ D               torch leaves its fused kernel silently: ``falls_back`` reports it
CPU, gradients: all visible keys of a query have a     float32 keeps no digit of the log-sum-exp that the kernel stores, so gradients
bias of -1e9                                           are too large: ``math`` computes the call (``_loses_log_sum``). Not seen on
                                                       accelerators, in a compiled graph and in torch.func, where values are not read
CUDA: grouped heads and a mask                         the memory-efficient kernel has no grouped heads: ``run`` repeats keys and
                                                       values, which costs less than an L × S matrix
CUDA: Hopper and later, torch ≥ 2.11                   cuDNN comes first there, plans every new shape, refuses some dropout rates and
                                                       deterministic mode, and can return NaN gradients: ``_choice`` leaves it out,
                                                       unless the caller chose with ``torch.nn.attention.sdpa_kernel``
autocast                                               it would round queries, keys, values and a float32 bias: ``run`` disables it
=====================================================  ==============================================================================

The kernel's form of a mask is computed once and stored with the mask, so the layers of a model share it. Known difference:
torch's CPU kernel gives 0 for a query that contains a NaN, where ``math`` gives NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import isfinite
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from minitx.nn.bias import Bias
from minitx.nn.functional import AttentionCall, reference_attention, visible_keys
from minitx.nn.masks import Causal, simplify
from minitx.nn.precision import full_precision
from minitx.nn.rules import tensors_of
from minitx.nn.tracing import can_look


class KernelMask(NamedTuple):
    """The kernel's form of a mask. ``hidden_keys`` and ``empty_rows`` are None if there are none."""

    is_causal: bool = False
    kernel_mask: Tensor | None = None  # broadcastable to (B, H, L, S); an empty row shows all keys
    hidden_keys: Tensor | None = None  # bool (B or 1, Hkv or 1, S, 1): no query sees the key
    empty_rows: Tensor | None = None  # bool (B or 1, H or 1, L or 1, 1): the query sees no key


NO_MASK = KernelMask()
LARGEST_BIAS = 1024.0
"""If the largest bias of a row is larger, rounding of the log-sum-exp may change gradients by a ten-thousandth."""


def run(call: AttentionCall) -> Tensor:
    """Compute attention with the kernel that torch chooses."""
    query, key, value, scale = call.query, call.key, call.value, call.scale
    plan = NO_MASK
    if call.attn_bias is not None:
        if _loses_log_sum(call):
            return reference_attention(call)
        plan = _plan(call)
    elif call.mask is not None:
        plan = call.mask.remember("sdpa", (query.shape, key.shape, query.dtype, query.device), _plan, call)
    if plan.hidden_keys is not None and not (_is_harmless(key) and _is_harmless(value)):
        key, value = key.masked_fill(plan.hidden_keys, 0.0), value.masked_fill(plan.hidden_keys, 0.0)
    if scale <= 0.0:
        query, scale = (-query, -scale) if scale < 0.0 else (query * 0.0, 1.0)
    if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:  # no fused kernel supports other strides
        query, key, value = (t.clone(memory_format=torch.contiguous_format) for t in (query, key, value))
    group = query.shape[1] // key.shape[1]
    device = query.device
    with _choice(device) if device.type == "cuda" else _NOTHING, full_precision(device) if _narrows(device) else _NOTHING:
        if group > 1 and plan.kernel_mask is not None and repeats_heads(device.type, group):
            key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
            group = 1
        output = F.scaled_dot_product_attention(
            *(query, key, value),
            attn_mask=plan.kernel_mask,
            dropout_p=call.dropout_p,
            is_causal=plan.is_causal,
            scale=scale,
            enable_gqa=bool(group > 1),  # a tensor under torch.jit.trace
        )
    return output if plan.empty_rows is None else output.masked_fill(plan.empty_rows, 0.0)


_NOTHING = nullcontext()


def _narrows(device: torch.device) -> bool:
    """Whether autocast is on. It would round queries, keys, values and a float32 bias to its own dtype."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def _is_harmless(tensor: Tensor) -> bool:
    """Whether hidden keys need not be zeroed, because every product of an entry with a weight of zero is zero.

    A finite norm implies that no entry is NaN, infinite, or so large that a product overflows. The norm costs a tenth of zeroing.
    """
    return can_look(tensor) and isfinite(torch.linalg.vector_norm(tensor.detach()).item())


def _choice(device: torch.device) -> AbstractContextManager[object]:
    """A context that disables cuDNN if torch would prefer it. It changes nothing if the caller has chosen the kernels."""
    if _prefers_cudnn(device):
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    return _NOTHING


def _prefers_cudnn(device: torch.device) -> bool:
    enabled = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled())
    return prefers_cudnn(torch.cuda.get_device_capability(device), torch.__version__, enabled)


def prefers_cudnn(capability: tuple[int, int], version: str, enabled: Sequence[bool]) -> bool:
    """Return whether torch takes cuDNN first: by default, on Hopper and later GPUs, from torch 2.11.

    Args:
        capability: the compute capability of the GPU. version: the version of torch.
        enabled: whether flash, memory-efficient, plain and cuDNN attention are enabled. All are by default.

    >>> prefers_cudnn((9, 0), "2.11.0+cu130", [True] * 4), prefers_cudnn((8, 9), "2.11.0", [True] * 4)
    (True, False)
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    return all(enabled) and capability >= (9, 0) and (major, minor) >= (2, 11)


# Torch's compiler cannot trace this function and would break the graph in every layer. This attribute makes it call the function
# once. ``torch.compiler.assume_constant_result`` sets the same attribute, but imports the compiler (two seconds at every start).
_prefers_cudnn._dynamo_marked_constant = True  # type: ignore[attr-defined]


def repeats_heads(device: str, group: int) -> bool:
    """Return whether key heads must be repeated in a call with a mask: on CUDA only cuDNN supports grouped heads with a mask."""
    return device == "cuda" and group > 1


def mask_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a float mask for queries of ``dtype``: float32 for half precision on a CPU, elsewhere the same dtype."""
    return torch.promote_types(dtype, torch.float32) if device == "cpu" else dtype


def _plan(call: AttentionCall) -> KernelMask:
    """Convert mask and bias to the kernel's form. Without empty rows or hidden keys these are None, if values can be read at no cost.

    A bias becomes a float mask with -inf where a key is hidden and finite numbers elsewhere: a float32 bias of -1e5 would be -inf in
    float16.
    """
    _, _, L, S = call.shape
    attn_bias = call.dense_bias()
    dtype = call.query.dtype
    if attn_bias is None:
        mask = simplify(call.mask, L, S)
        if mask is None:
            return NO_MASK
        if type(mask) is Causal and L == S:
            return KernelMask(is_causal=True)
        call = replace(call, mask=mask)
    visible = call.visible(attn_bias)
    assert visible is not None
    some = visible.any(-1, keepdim=True)
    seen = visible_keys(visible, call.key.shape[1])
    looks = can_look(visible)
    all_rows, all_keys = looks and bool(some.all()), looks and bool(seen.all())
    kernel_mask = visible if all_rows else visible | ~some
    if attn_bias is not None:
        dtype = mask_dtype(call.query.device.type, dtype)
        limit = min(torch.finfo(dtype).max, torch.finfo(attn_bias.dtype).max)
        finite = attn_bias.masked_fill(attn_bias == -torch.inf, 0.0).clamp(-limit, limit).to(dtype)
        kernel_mask = torch.where(kernel_mask, finite, -torch.inf)
    elif call.query.device.type == "cpu":  # otherwise the kernel converts the bool mask in every layer
        kernel_mask = torch.where(kernel_mask, torch.zeros((), dtype=dtype), -torch.inf)
    return KernelMask(False, kernel_mask, None if all_keys else ~seen, None if all_rows else ~some)


def why_not(call: AttentionCall) -> str | None:
    """Return why torch's kernels cannot compute the call, or None if they can."""
    if call.softcap is not None:
        return "torch's kernels have no soft-cap"
    if call.sinks is not None:
        return "torch's kernels have no sinks"
    around = call.transforms()
    lacks = "Jvp" in around or around.count("Grad") > 1 or (around and _learns(call.attn_bias))
    return "torch's kernels have no forward derivatives, no second derivatives, and no derivative of a bias" if lacks else None


def _learns(attn_bias: Tensor | Bias | None) -> bool:
    """Whether a gradient of the bias is recorded."""
    return attn_bias is not None and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_of(attn_bias))


def falls_back(call: AttentionCall) -> str | None:
    """Return the reason why torch would use no fused kernel, or None. Torch itself gives no notice."""
    if call.query.numel() == 0 or call.key.numel() == 0:
        return "torch computes an empty call without a kernel"
    if call.query.device.type == "cuda":
        return _falls_back_on_cuda(call)
    if call.query.device.type != "cpu":
        return None
    if call.dropout_p > 0.0:
        return "torch's CPU kernel has no dropout"
    if _learns(call.attn_bias):
        return "torch's CPU kernel has no gradient for the bias"
    if call.value.shape[-1] != call.query.shape[-1]:
        return "torch's CPU kernel needs values as wide as queries"
    if _loses_log_sum(call):
        return "gradients of the kernel are wrong where all keys of a query have a very large bias"
    return None


def _loses_log_sum(call: AttentionCall) -> bool:
    """Whether a gradient is recorded and a row's largest bias exceeds ``LARGEST_BIAS``. False if reading the bias is not free."""
    rule = call.attn_bias
    if rule is None or (isinstance(rule, Bias) and not rule.may_hide):  # only a bias that hides keys has such numbers
        return False
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (call.query, call.key, call.value))):
        return False
    dense = call.dense_bias()
    assert dense is not None
    attn_bias = dense.detach()
    if not can_look(attn_bias) or attn_bias.numel() == 0:
        return False
    if call.mask is not None:
        if attn_bias.nan_to_num(neginf=0.0).abs().amax() <= LARGEST_BIAS:
            return False
        B, H, L, S = call.shape
        visible = call.mask.dense(L, S, batch_size=B, num_heads=H, device=attn_bias.device)
        attn_bias = torch.where(visible, attn_bias, -torch.inf)
    largest = attn_bias.amax(-1)  # -inf in a row without a visible key
    return bool(((largest.abs() > LARGEST_BIAS) & (largest != -torch.inf)).any())


def _falls_back_on_cuda(call: AttentionCall) -> str | None:
    """Let torch decide whether a fused kernel supports these tensors and this dropout, with or without a mask."""
    parameters = cuda.SDPAParams(*kernel_arguments(call))
    kernels = (cuda.can_use_flash_attention, cuda.can_use_efficient_attention, cuda.can_use_cudnn_attention)
    return None if any(can(parameters) for can in kernels) else "no fused CUDA kernel supports these dtypes, widths or options"


def kernel_arguments(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool, bool]:
    """Return the arguments of ``SDPAParams`` that match the kernel call of ``run`` on CUDA.

    They are query, key, value, mask, dropout, causality, and whether heads are grouped. The mask is a placeholder of the right shape.
    With a mask, key heads are repeated.
    """
    _, H, L, S = call.shape
    mask = simplify(call.mask, L, S)
    is_causal = type(mask) is Causal and L == S
    key, value = call.key, call.value
    placeholder = None
    if call.attn_bias is not None or not (mask is None or is_causal):
        placeholder = call.query.new_empty(1, 1, 1, 1).expand(call.shape)
        if repeats_heads("cuda", H // key.shape[1]):
            key, value = (t.narrow(1, 0, 1).expand(-1, H, -1, -1) for t in (key, value))
    return call.query, key, value, placeholder, call.dropout_p, is_causal and placeholder is None, key.shape[1] != H
