"""Linformer: keys and values are mixed along the length into k slots, and attention runs over those."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from minitx.nn.efficient.base import EfficientAttention
from minitx.nn.functional import AttentionCall, reference_attention


class LinformerAttention(EfficientAttention):
    """softmax(c · Q (E K)ᵀ) (F V) with learned E, F of shape (k, max_len).

    Wang et al. 2020, "Linformer", arXiv:2006.04768, §4, eq. 7; E and F shared by the heads of a layer ("headwise
    sharing"). **This core has parameters**: ``key_mix`` (E) and ``value_mix`` (F), trained with the rest and tied to
    positions, so S may not exceed ``max_len``; a shorter S uses their first S columns.

    Every slot mixes all positions, so nothing can be hidden from one query and shown to another: causal and any other
    per-query masks are refused. Padding is honoured by zeroing padded keys and values before they are mixed: the output
    is that of the sequence without them, as long as padding stands at the end (columns belong to positions).

    Cost: S · k · (D + Dv) + L · k · (D + Dv) multiplications, L · k scores held. Linear in length.

    Args:
        max_len: the longest S. num_slots: k; with k = max_len = S and identities for E and F attention is exact.

    Soft-cap and sinks act on the scores of slots, dropout on the weights over slots. Refuses ``attn_bias``, ``need_weights`` and every mask but ``Padding``.

    Raises:
        ValueError: whatever is refused; sizes below 1; more than ``max_len`` keys.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(12, 3, core=LinformerAttention(max_len=50, num_slots=8))
    >>> attention(torch.randn(2, 50, 12)).shape
    torch.Size([2, 50, 12])
    """

    refusals: ClassVar[dict[str, str]] = {
        "attn_bias": "a slot mixes all positions, so a number that belongs to one key has no score to be added to",
        "need_weights": "its weights belong to slots, each a mixture of all positions, not to keys",
    }

    def __init__(self, max_len: int, num_slots: int) -> None:
        super().__init__()
        if max_len < 1 or num_slots < 1:
            raise ValueError(f"max_len and num_slots must be positive, got {max_len} and {num_slots}")
        self.max_len, self.num_slots = max_len, num_slots
        self.key_mix = nn.Parameter(torch.empty(num_slots, max_len))
        self.value_mix = nn.Parameter(torch.empty(num_slots, max_len))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 1/max_len): a slot then starts with the variance of one key. (The paper's theorems use N(0, 1/k).)"""
        for mix in (self.key_mix, self.value_mix):
            nn.init.normal_(mix, 0.0, self.max_len**-0.5)

    def attend(self, call: AttentionCall) -> Tensor:
        key, value = call.key, call.value
        causal, key_mask = self.causal_and_padding(call.mask)
        if causal:
            raise ValueError(
                "LinformerAttention cannot be causal: every slot mixes all positions, the future among them, before a query "
                "meets it, so no mask could hide the future again"
            )
        num_keys = key.shape[2]
        if num_keys > self.max_len:
            raise ValueError(f"LinformerAttention mixes at most max_len={self.max_len} keys, got {num_keys}")
        if key_mask is not None:
            hidden = ~key_mask[:, None, :, None]
            key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
        slots = self.key_mix[:, :num_keys].to(key.dtype) @ key  # (k, S) · (B, Hkv, S, D) -> (B, Hkv, k, D)
        contents = self.value_mix[:, :num_keys].to(value.dtype) @ value  # (B, Hkv, k, Dv)
        return reference_attention(replace(call, key=slots, value=contents, mask=None))

    def extra_repr(self) -> str:
        return f"max_len={self.max_len}, num_slots={self.num_slots}"
