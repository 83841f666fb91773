"""Position-wise feed-forward networks, plain or gated."""

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
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "reglu": F.relu,
}
GATED = ("swiglu", "geglu", "geglu_tanh", "reglu")


class FeedForward(nn.Module):
    """The feed-forward network of a block: down(a(up(x))), or with a gate down(a(gate(x)) · up(x)).

    Input and output have shape (B, L, E). Without a gate: Vaswani et al. 2017, arXiv:1706.03762, §3.3. With a gate: Shazeer 2020,
    arXiv:2002.05202. ``relu2`` is the square of ReLU: So et al. 2021, arXiv:2109.08668.

    Args:
        embed_dim: E.
        ffn_dim: F, the hidden width.
        activation: ``gelu``, ``gelu_tanh`` (GPT-2's approximation), ``relu`` or ``relu2``. With a gate: ``swiglu`` (a = SiLU),
            ``geglu`` (GELU), ``geglu_tanh`` or ``reglu`` (ReLU).
        bias: whether the projections have biases.
        dropout: the dropout probability on the hidden layer in training.

    Raises:
        ValueError: an unknown activation, or a width below 1.

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
        if embed_dim < 1 or ffn_dim < 1:
            raise ValueError(f"embed_dim and ffn_dim must be positive, got {embed_dim} and {ffn_dim}")
        self.activation = activation
        self.gate_proj = nn.Linear(embed_dim, ffn_dim, bias=bias) if activation in GATED else None
        self.up_proj = nn.Linear(embed_dim, ffn_dim, bias=bias)
        self.down_proj = nn.Linear(ffn_dim, embed_dim, bias=bias)
        self.dropout = nn.Dropout(dropout) if dropout != 0.0 else None

    def forward(self, x: Tensor) -> Tensor:
        activate = ACTIVATIONS[self.activation]
        hidden = activate(self.up_proj(x)) if self.gate_proj is None else activate(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden if self.dropout is None else self.dropout(hidden))
