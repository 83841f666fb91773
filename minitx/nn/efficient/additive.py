"""Additive attention: a small network computes the score of a query and a key."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitx.nn.functional import AttentionCall, full_precision, hide_unseen, masked_softmax


class AdditiveAttention(nn.Module):
    """Additive attention: softmax(z) V with z_ij = c · vᵀ tanh(W q_i + U k_j).

    Bahdanau et al. 2015, "Neural Machine Translation by Jointly Learning to Align and Translate", arXiv:1409.0473, §A.1.2. W, U and v
    are shared by the heads of a layer. The paper has no scale: use ``scale="unscaled"`` for c = 1. |z| is at most Σ|v| for any D.
    Britz et al. 2017 (arXiv:1703.03906, §4.5) compare it with dot products.

    It supports every option of ``DotProductAttention``. Soft-cap, bias, mask, sinks and dropout act on z as they act on scores there.
    It computes B · H · L · S · m values of tanh and stores all of them at once.

    Args:
        head_dim: D.
        hidden_dim: m, the width of the network. Default: D.

    Shapes: query (B, H, L, D), key (B, Hkv, S, D) and value (B, Hkv, S, Dv) give (B, H, L, Dv), and weights (B, H, L, S) if the call
    asks for them.

    Raises:
        ValueError: a width below 1.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(12, 3, scale="unscaled", core=AdditiveAttention(head_dim=4))
    >>> attention(torch.randn(2, 5, 12), is_causal=True).shape
    torch.Size([2, 5, 12])
    """

    def __init__(self, head_dim: int, hidden_dim: int | None = None) -> None:
        super().__init__()
        width = head_dim if hidden_dim is None else hidden_dim
        if min(head_dim, width) < 1:
            raise ValueError(f"head_dim and hidden_dim must be positive, got {head_dim} and {hidden_dim}")
        self.query_map = nn.Linear(head_dim, width, bias=False)  # W
        self.key_map = nn.Linear(head_dim, width, bias=False)  # U
        self.energy = nn.Linear(width, 1, bias=False)  # v

    def forward(self, call: AttentionCall) -> Tensor | tuple[Tensor, Tensor]:
        """Return the output (B, H, L, Dv), or ``(output, weights)`` if the call asks for weights."""
        dtype, group = torch.promote_types(call.query.dtype, torch.float32), call.query.shape[1] // call.key.shape[1]
        with full_precision(call.query.device):
            attn_bias = call.dense_bias()
            visible = call.visible(attn_bias)
            key, value = (hide_unseen(x, visible).to(dtype).repeat_interleave(group, dim=1) for x in (call.key, call.value))
            W, U, v = (part.weight.to(dtype) for part in (self.query_map, self.key_map, self.energy))
            q, k = F.linear(call.query.to(dtype), W), F.linear(key, U)  # (B, H, L, m), (B, H, S, m)
            scores = F.linear(torch.tanh(q.unsqueeze(3) + k.unsqueeze(2)), v).squeeze(-1) * call.scale  # (B, H, L, S)
            if call.softcap is not None:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            weights = masked_softmax(scores if attn_bias is None else scores + attn_bias.to(dtype), visible, call.sinks)
            kept = F.dropout(weights, call.dropout_p) if call.dropout_p > 0.0 else weights
            output = (kept @ value).to(call.value.dtype)
        return (output, weights.to(call.query.dtype)) if call.need_weights else output
