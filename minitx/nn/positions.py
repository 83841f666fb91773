"""Where a token stands: added to the embeddings (sinusoidal, learned) or turned into q and k (rotary).

All three take ``position_ids`` (B, L) or (1, L), so that left-padded, packed and cached sequences count rightly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def sinusoids(position_ids: Tensor, width: int, *, base: float = 10000.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """PE(pos, 2i) = sin(pos / base^(2i/width)), PE(pos, 2i+1) = cos(same): (..., width).

    Vaswani et al. 2017, arXiv:1706.03762, §3.5.

    >>> sinusoids(torch.tensor([0]), 4).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    """
    high = torch.promote_types(dtype, torch.float32)
    even = torch.arange(0, width, 2, dtype=high, device=position_ids.device)
    angles = position_ids.unsqueeze(-1).to(high) * torch.exp(even * (-math.log(base) / width))
    interleaved = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # (..., 2 * ceil(width / 2))
    return interleaved[..., :width].to(dtype)


class SinusoidalPositions(nn.Module):
    """Fixed sinusoids (..., L) -> (..., L, E); any length, no parameters."""

    def __init__(self, embed_dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        self.embed_dim, self.base = embed_dim, base

    def forward(self, position_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return sinusoids(position_ids, self.embed_dim, base=self.base, dtype=dtype)


class LearnedPositions(nn.Module):
    """A table (max_len, E) (Gehring et al. 2017, arXiv:1705.03122; GPT-2)."""

    def __init__(self, max_len: int, embed_dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_len, embed_dim)

    def forward(self, position_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.table(position_ids).to(dtype)


class Rotary(nn.Module):
    """Rotate pairs of channels by an angle that grows with the position, so that q·k depends on their distance.

    Channel i is paired with channel i + D/2 (half-split, as in Llama and GPT-NeoX) and turned by pos · base^(-2i/D).
    Su et al. 2021, "RoFormer", arXiv:2104.09864, §3.2.

    Args:
        head_dim: D, even. base: the wavelengths run from 2π to 2π · base.

    Raises:
        ValueError: an odd ``head_dim``.

    A rotation keeps lengths, and position 0 turns nothing:

    >>> x = torch.randn(1, 1, 3, 4)
    >>> y = Rotary(4)(x, torch.tensor([[0, 1, 2]]))
    >>> bool(torch.equal(y[..., 0, :], x[..., 0, :])), bool(torch.allclose(y.norm(dim=-1), x.norm(dim=-1)))
    (True, True)
    """

    def __init__(self, head_dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary positions pair channels: head_dim must be even, got {head_dim}")
        self.head_dim, self.base = head_dim, base

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """x (B, H, L, D) at position_ids (B or 1, L)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        pairs = torch.arange(0, self.head_dim, 2, dtype=dtype, device=x.device)
        angles = position_ids[:, None, :, None].to(dtype) * self.base ** (-pairs / self.head_dim)  # (B, 1, L, D/2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, base={self.base}"


def position_ids_from(key_mask: Tensor | None, document_ids: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Positions (B or 1, L): count real tokens only, and from 0 again in every packed document.

    >>> position_ids_from(torch.tensor([[False, True, True]]), None, 3, torch.device("cpu")).tolist()
    [[0, 0, 1]]
    >>> position_ids_from(None, torch.tensor([[7, 7, 8, 8]]), 4, torch.device("cpu")).tolist()
    [[0, 1, 0, 1]]
    """
    real = torch.ones(1, length, dtype=torch.long, device=device) if key_mask is None else key_mask.long()
    count = real.cumsum(-1)  # real tokens up to and including this one
    if document_ids is not None:
        is_start = torch.ones_like(document_ids, dtype=torch.bool)
        is_start[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        count = count - torch.where(is_start, count - real, 0).cummax(dim=-1).values
    return (count - 1).clamp(min=0)
