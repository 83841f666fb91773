"""Differential attention: the difference of two softmax maps.

    (softmax(c · Q₁K₁ᵀ) − λ · softmax(c · Q₂K₂ᵀ)) V,    λ = exp(λ_q1 · λ_k1) − exp(λ_q2 · λ_k2) + λ_init

Heads p and p + H/2 are a pair: each has its map of width D, and both have one value of width 2D. The pair's output is RMS-normed and
multiplied by 1 − λ_init, with λ_init = 0.8 − 0.6 · exp(−0.3 (l − 1)) in layer l (Ye et al. 2024, arXiv:2410.05258, §2.1).
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from minitx.nn import AttentionCall, DotProductAttention


class Differential(DotProductAttention):
    """A core for an even number of heads.

    Args:
        head_dim: D, the width of a map.
        layer: the number of the layer, from 0.
    """

    def __init__(self, head_dim: int, layer: int) -> None:
        super().__init__()
        self.start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.vectors = nn.Parameter(torch.empty(4, head_dim))  # λ_q1, λ_k1, λ_q2, λ_k2, for all heads of the layer
        self.norm = nn.RMSNorm(2 * head_dim, eps=1e-5, elementwise_affine=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors from N(0, 0.1²)."""
        nn.init.normal_(self.vectors, std=0.1)

    def forward(self, call: AttentionCall) -> Tensor:
        """Return (B, H, L, D): the outputs of H/2 pairs, each as two halves."""
        if call.need_weights:
            raise ValueError("differential attention has two maps a pair and returns no weights: use minitx.analysis.capture")
        halves = []
        for half in call.value.chunk(2, dim=1):  # each (B, Hkv/2, S, D): the fused kernel wants values as wide as keys
            halves.append(super().forward(replace(call, value=half.repeat(1, 2, 1, 1))))
        first, second = torch.cat(halves, dim=-1).chunk(2, dim=1)  # both (B, H/2, L, 2D)
        q1, k1, q2, k2 = self.vectors
        factor = (q1 @ k1).exp() - (q2 @ k2).exp() + self.start
        out = (1 - self.start) * self.norm(first - factor * second)
        return out.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)  # (B, H/2, L, 2, D) -> (B, H, L, D)
