"""``varlen``: torch's FlashAttention over packed documents, each as a sequence of its own (``torch.nn.attention.varlen``).

It serves ``Documents``, alone or within ``Causal``, in self-attention. The rows of a batch are concatenated, and the kernel
gets the position where each document begins. It computes nothing between two documents. Every query sees its own key: there are
no empty rows and no hidden keys. The positions are read from the device once per mask.

**Not run so far**: the kernel needs CUDA and the project has no GPU at hand. The code around it is tested on a CPU, where a loop over
documents replaces the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda

from minitx.nn.backends.base import Backend
from minitx.nn.functional import AttentionCall
from minitx.nn.masks import Causal, Documents


class Packing(NamedTuple):
    """Where the documents of a batch begin, if its rows are concatenated."""

    starts: Tensor  # int32 (N + 1,): the first position of each document, and the end of the last
    longest: int  # positions in the longest document
    is_contiguous: bool  # whether each id is one run of positions in its row


@cache
def _kernel() -> Callable[..., Any] | None:
    """Torch's function, or None where this torch has none, or an earlier one without the options that we need."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= signature(varlen_attn).parameters.keys() else None


def run(call: AttentionCall) -> Tensor:
    """Compute attention within each document."""
    documents, is_causal = _documents(call)
    kernel = _kernel()
    assert documents is not None
    assert kernel is not None
    packing = _packing(documents)
    query, scale = call.query, call.scale
    if scale <= 0.0:  # the kernel takes the largest score before the scale
        query, scale = (-query, -scale) if scale < 0.0 else (query * 0.0, 1.0)
    output = kernel(
        *(tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (query, call.key, call.value)),  # each (B * L, H, D)
        *(packing.starts, packing.starts, packing.longest, packing.longest),
        scale=scale,
        window_size=(-1, 0) if is_causal else (-1, -1),
        enable_gqa=call.key.shape[1] != call.query.shape[1],
    )
    return output.unflatten(0, (call.query.shape[0], -1)).transpose(1, 2)  # (B * L, H, D) -> (B, H, L, D)


def _documents(call: AttentionCall) -> tuple[Documents | None, bool]:
    """The documents where the mask is ``Documents``, or ``Documents`` and ``Causal``, else None; and whether it is causal."""
    parts = [] if call.mask is None else list(call.mask.parts())
    found = [part for part in parts if type(part) is Documents]
    others = [part for part in parts if type(part) is not Documents]
    serves = len(found) == 1 and all(type(part) is Causal for part in others)
    return found[0] if serves else None, bool(others)


def _packing(documents: Documents) -> Packing:
    return documents.remember("packing", (), pack_documents, documents.ids)


def pack_documents(ids: Tensor) -> Packing:
    """Return where the runs of equal ids (B, L) begin.

    >>> pack_documents(torch.tensor([[7, 7, 2], [2, 2, 2]]))
    Packing(starts=tensor([0, 2, 3, 6], dtype=torch.int32), longest=3, is_contiguous=True)
    """
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = torch.cat((begins.flatten().nonzero().flatten(), torch.tensor([ids.numel()], device=ids.device)))
    ids_in_order = ids.sort(dim=-1).values
    num_ids = ids.shape[0] + (ids_in_order[:, 1:] != ids_in_order[:, :-1]).sum()
    return Packing(starts.int(), int(starts.diff().max()), len(starts) - 1 == int(num_ids))


def why_not(call: AttentionCall) -> str | None:
    """Return what torch's kernel for documents cannot do, or None."""
    documents, _ = _documents(call)
    query, key, value = call.query, call.key, call.value
    if documents is None:
        return "it serves packed documents: Documents as a mask, alone or with Causal"
    if query.shape[2] != key.shape[2]:
        return "it serves self-attention, as many queries as keys"
    options = {"dropout": call.dropout_p > 0.0, "bias": call.attn_bias, "soft-cap": call.softcap, "sinks": call.sinks}
    for name, given in options.items():
        if given is not None and given is not False:
            return f"torch's kernel for documents has no {name}"
    if query.device.type != "cuda":
        return "torch's kernel for documents needs CUDA"
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[-1] % 8 or value.shape[-1] != query.shape[-1]:
        return "torch's kernel for documents wants float16 or bfloat16, and widths that are equal and divisible by 8"
    if _kernel() is None:
        return "this torch has no torch.nn.attention.varlen with scale, window_size and enable_gqa"
    if torch.compiler.is_compiling() or type(documents.ids) is not Tensor:
        return "where the documents begin is read from their ids, which a graph does not have"
    grouped = key.shape[1] != query.shape[1]
    if not cuda.can_use_flash_attention(cuda.SDPAParams(query, key, value, None, 0.0, False, grouped)):
        return "torch's FlashAttention does not take these tensors on this device, or is switched off"
    return None if _packing(documents).is_contiguous else "a document lies in several places of a row"


BACKEND = Backend("varlen", run, why_not=why_not)
