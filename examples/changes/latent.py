"""Latent attention (MLA): keys and values are made from one narrow vector, and positions have channels of their own.

    c = RMSNorm(x W_DKV),    K^C = c W_UK,    V = c W_UV,    K^R = rotate(x W_KR),    [Q^C; Q^R] = x W_Q with Q^R rotated

A key is [K^C; K^R], where all heads share K^R (DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, §2.1.2 and §2.1.3; without compressed queries,
as in DeepSeek-V2-Lite). The paper's gain is a small cache; here a cache stores the keys and values.
"""

from typing import Any

import torch
from torch import Tensor, nn

from minitx.config.schema import Count
from minitx.nn import MultiHeadAttention, Rotary


class LatentAttention(MultiHeadAttention):
    """Self-attention with latent keys and values.

    Args:
        embed_dim, num_heads, options: as for ``MultiHeadAttention``.
        latent_dim: the width of c.
        rotary_dim: how many of a head's D channels are rotated.
        rotary: the base and the layout of the rotary positions.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        latent_dim: Count,
        rotary_dim: Count,
        rotary: Rotary | None = None,
        **options: Any,
    ) -> None:
        if rotary is None:
            raise ValueError("latent attention needs model.position=rotary")
        super().__init__(embed_dim, num_heads, **options)
        has_bias = self.q_proj.bias is not None
        content_dim, self.rotary_dim = self.head_dim - rotary_dim, rotary_dim
        self.down_proj = nn.Linear(embed_dim, latent_dim, bias=has_bias)
        self.latent_norm = nn.RMSNorm(latent_dim, eps=1e-6)
        self.k_proj = nn.Linear(latent_dim, num_heads * content_dim, bias=has_bias)
        self.v_proj = nn.Linear(latent_dim, num_heads * self.head_dim, bias=has_bias)
        self.rotary_k_proj = nn.Linear(embed_dim, rotary_dim, bias=has_bias)
        self.rotary = Rotary(rotary_dim, base=rotary.base, interleaved=rotary.interleaved)

    def project(self, query: Tensor, key: Tensor | None, value: Tensor | None, rotation: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v (B, H, L, D) of the input (B, L, E)."""
        latent = self.latent_norm(self.down_proj(query))
        q, k, v = (  # (B, L, H * d) -> (B, H, L, d)
            x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x in (self.q_proj(query), self.k_proj(latent), self.v_proj(latent))
        )
        q, rotated_q = q.split((self.head_dim - self.rotary_dim, self.rotary_dim), dim=-1)
        rotated_k = self.rotary(self.rotary_k_proj(query).unsqueeze(1), rotation)  # (B, 1, L, R)
        q = torch.cat((q, self.rotary(rotated_q, rotation)), dim=-1)
        return q, torch.cat((k, rotated_k.expand(-1, self.num_heads, -1, -1)), dim=-1), v
