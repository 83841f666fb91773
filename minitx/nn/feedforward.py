"""Position-wise feed-forward networks, plain and gated."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "swiglu": F.silu,
}


class FeedForward(nn.Module):
    """down(a(up(x))), or with ``swiglu`` down(silu(gate(x)) · up(x)); (B, L, E) in and out.

    Vaswani et al. 2017 (arXiv:1706.03762, §3.3); SwiGLU: Shazeer 2020 (arXiv:2002.05202); ReLU²: So et al. 2021
    (arXiv:2109.08668).

    Args:
        embed_dim: E. ffn_dim: F, the hidden width.
        activation: a key of ``ACTIVATIONS``; ``gelu_tanh`` is GPT-2's approximation.
        bias: whether the projections have biases.
        dropout: on the hidden layer, in training only.

    Raises:
        ValueError: an unknown activation.

    >>> import torch
    >>> FeedForward(6, 24, activation="swiglu")(torch.randn(2, 5, 6)).shape
    torch.Size([2, 5, 6])
    """

    def __init__(
        self, embed_dim: int, ffn_dim: int, *, activation: str = "gelu", bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r} must be one of {', '.join(ACTIVATIONS)}")
        self.activation = activation
        self.gate_proj = nn.Linear(embed_dim, ffn_dim, bias=bias) if activation == "swiglu" else None
        self.up_proj = nn.Linear(embed_dim, ffn_dim, bias=bias)
        self.down_proj = nn.Linear(ffn_dim, embed_dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        activate = ACTIVATIONS[self.activation]
        hidden = activate(self.up_proj(x)) if self.gate_proj is None else activate(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(self.dropout(hidden))
