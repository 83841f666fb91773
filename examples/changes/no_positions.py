"""No positions in every fourth layer: its queries and keys are not rotated, and only the causal mask tells their order.

Yang et al. 2025, "RoPE to NoRoPE and Back Again", arXiv:2501.18795; SmolLM3 has one such layer in four.
"""

from typing import Any

from minitx.config.schema import Count
from minitx.nn import MultiHeadAttention, Rotary


class NoPositions(MultiHeadAttention):
    """``MultiHeadAttention`` without rotary positions in layers ``every``, 2 · ``every``, …

    Args:
        embed_dim, num_heads, rotary, options: as for ``MultiHeadAttention``.
        layer: the number of the layer, from 0.
        every: 4: the fourth layer, the eighth, …
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, layer: int, every: Count = 4, rotary: Rotary | None = None, **options: Any
    ) -> None:
        is_without = (layer + 1) % every == 0
        super().__init__(embed_dim, num_heads, rotary=None if is_without else rotary, **options)
