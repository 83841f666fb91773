"""An output gate: each number of a head's output is multiplied by a sigmoid of the layer's input.

    Y' = Y ⊙ σ(X W_θ),    output = Y' W_O

X is the layer's normed input and Y the joined outputs of the heads, softmax(c · QKᵀ) V (Qiu et al. 2025, arXiv:2505.06708, §2.2: the position
G1, after attention, elementwise, multiplicative).
"""

from typing import Any

import torch
from torch import Tensor, nn

from minitx.nn import MultiHeadAttention


class OutputGate(MultiHeadAttention):
    """``MultiHeadAttention`` with a gate on each number of the heads' outputs.

    Args:
        embed_dim, num_heads, options: as for ``MultiHeadAttention``.
    """

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        has_bias = self.q_proj.bias is not None
        self.gate_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=has_bias)

    def merge(self, heads: Tensor, query: Tensor) -> Tensor:
        """Multiply the heads (B, H, L, D) by the gate of the input (B, L, E) and project them."""
        gate = torch.sigmoid(self.gate_proj(query))  # (B, L, H * D)
        return super().merge(heads * gate.unflatten(-1, (self.num_heads, -1)).transpose(1, 2), query)
