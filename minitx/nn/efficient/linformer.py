"""Linformer: attention over k learned mixtures of the keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from minitx.nn.efficient.base import EfficientAttention
from minitx.nn.functional import AttentionCall, reference_attention


class LinformerAttention(EfficientAttention):
    """Linformer attention: softmax(c · Q (E K)ᵀ) (F V) with learned E and F of shape (k, max_len).

    Wang et al. 2020, "Linformer", arXiv:2006.04768, §4, eq. 7. The heads of a layer share E and F ("headwise sharing"). E and F mix the
    S keys and values into k slots. They are parameters of this core, ``key_mix`` and ``value_mix``. Their columns belong to positions:
    S may not exceed ``max_len``, and a shorter S uses the first S columns.

    Soft-cap and sinks act on the scores of slots, dropout on the weights of slots. The only mask that is supported is ``Padding``:
    padded keys and values are set to zero before mixing. With padding at the end, the output is that of the sequence without padding.
    Other masks, ``attn_bias`` and ``need_weights`` are not supported, because a slot mixes all positions.

    Cost: (L + S) · k · (D + Dv) multiplications, and L · k stored scores. It is linear in the length.

    Args:
        max_len: the largest S.
        num_slots: k. With k = max_len = S and identity matrices for E and F, attention is exact.

    Raises:
        ValueError: an option that is not supported, a size below 1, or more than ``max_len`` keys.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(12, 3, core=LinformerAttention(max_len=50, num_slots=8))
    >>> attention(torch.randn(2, 50, 12)).shape
    torch.Size([2, 50, 12])
    """

    refusals: ClassVar[dict[str, str]] = {
        "attn_bias": "it computes scores for slots, which mix all positions, and not for keys",
        "need_weights": "its weights belong to slots, which mix all positions, and not to keys",
    }

    def __init__(self, max_len: int, num_slots: int) -> None:
        super().__init__()
        if max_len < 1 or num_slots < 1:
            raise ValueError(f"max_len and num_slots must be positive, got {max_len} and {num_slots}")
        self.max_len, self.num_slots = max_len, num_slots
        self.key_mix = nn.Parameter(torch.empty(num_slots, max_len))
        self.value_mix = nn.Parameter(torch.empty(num_slots, max_len))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw E and F from N(0, 1/max_len), so that a slot has the variance of a key. The paper's theorems use N(0, 1/k)."""
        for mix in (self.key_mix, self.value_mix):
            nn.init.normal_(mix, 0.0, self.max_len**-0.5, generator=generator)

    def attend(self, call: AttentionCall) -> Tensor:
        key, value = call.key, call.value
        causal, key_mask = self.causal_and_padding(call.mask)
        if causal:
            raise ValueError(
                "LinformerAttention does not support is_causal: each slot mixes all positions, including those after a query"
            )
        num_keys = key.shape[2]
        if num_keys > self.max_len:
            raise ValueError(f"LinformerAttention takes at most max_len={self.max_len} keys, got {num_keys}")
        if key_mask is not None:
            hidden = ~key_mask[:, None, :, None]
            key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
        slots = self.key_mix[:, :num_keys].to(key.dtype) @ key  # (k, S) · (B, Hkv, S, D) -> (B, Hkv, k, D)
        contents = self.value_mix[:, :num_keys].to(value.dtype) @ value  # (B, Hkv, k, Dv)
        return reference_attention(replace(call, key=slots, value=contents, mask=None))

    def extra_repr(self) -> str:
        return f"max_len={self.max_len}, num_slots={self.num_slots}"
