"""Where a token stands: added to the embeddings (sinusoidal, learned) or turned into q and k (rotary).

All three take ``position_ids`` (B, L) or (1, L), so that left-padded, packed and cached sequences count rightly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

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
    """Fixed sinusoids (..., L) -> (..., L, E); any length, no parameters (Vaswani et al. 2017, §3.5).

    Args:
        embed_dim: E.
        base: of the wavelengths, which grow from 2π to base · 2π.

    >>> SinusoidalPositions(4)(torch.tensor([0])).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    """

    def __init__(self, embed_dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        self.embed_dim, self.base = embed_dim, base

    def forward(self, position_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return sinusoids(position_ids, self.embed_dim, base=self.base, dtype=dtype)


class LearnedPositions(nn.Module):
    """A table (max_len, E) (Gehring et al. 2017, arXiv:1705.03122; GPT-2).

    Args:
        max_len: rows, the positions that there are.
        embed_dim: E.

    Raises:
        ValueError: position_ids outside the table (looked at on the CPU only; an accelerator's own assertion answers
            there, because reading values would make it wait).

    >>> LearnedPositions(7, 4)(torch.tensor([[0, 1, 2]])).shape
    torch.Size([1, 3, 4])
    """

    def __init__(self, max_len: int, embed_dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_len, embed_dim)

    def forward(self, position_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        check_range("position_ids", position_ids, self.table.num_embeddings)
        return self.table(position_ids).to(dtype)


@dataclass(frozen=True)
class RotaryScaling:
    """How rotary frequencies stretch to contexts ``factor`` times as long as those that a model was trained on.

    With f_i = base^(-2i/D) and r_i = original_max_len · f_i / 2π, the turns that channel pair i makes over the original
    length:

    * ``linear``: f_i / factor: positions are interpolated (Chen et al. 2023, arXiv:2306.15595).
    * ``ntk``: base · factor^(D/(D-2)) as base, so that the slowest pair is interpolated and the fastest is left alone
      (bloc97 2023, "NTK-aware scaled RoPE"; Peng et al. 2023, arXiv:2309.00071, §3.1).
    * ``llama3``: f_i (1 - γ_i) / factor + f_i γ_i with γ = clamp((r - low) / (high - low), 0, 1), low 1 and high 4
      (Llama 3.1, ``apply_scaling``; "NTK-by-parts" of arXiv:2309.00071, §3.2).
    * ``yarn``: the same mixture with a ramp that is linear in the channel index between the pairs that make ``high`` 32
      and ``low`` 1 turns, rounded outwards, as in the authors' code; q and k are multiplied by 0.1 ln(factor) + 1 each
      (arXiv:2309.00071, §3.3 and eq. 22).

    Args:
        kind: one of the four.
        factor: at least 1; new length over original length.
        original_max_len: the length of training; needed by ``llama3`` and ``yarn``.
        low, high: turns below which a pair is interpolated and above which it is kept; ``None``: the defaults above.

    Raises:
        ValueError: another kind, a factor below 1, a missing or non-positive length.

    >>> RotaryScaling("linear", factor=2.0).factor
    2.0
    """

    kind: str
    factor: float
    original_max_len: int | None = None
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "ntk", "yarn", "llama3"):
            raise ValueError(f"rotary_scaling={self.kind!r} must be one of linear, ntk, yarn, llama3")
        if not 1.0 <= self.factor < math.inf:
            raise ValueError(f"rotary_factor={self.factor} must be a number from 1 (new length over original length)")
        if self.kind in ("yarn", "llama3") and (self.original_max_len is None or self.original_max_len < 1):
            raise ValueError(f"rotary_original_len={self.original_max_len} must be positive with rotary_scaling={self.kind}")

    @property
    def magnitude(self) -> float:
        """What multiplies turned queries and keys: the temperature of ``yarn``, 1 otherwise."""
        return 0.1 * math.log(self.factor) + 1.0 if self.kind == "yarn" else 1.0

    def frequencies(self, head_dim: int, base: float, pairs: Tensor) -> Tensor:
        """The stretched frequencies (D/2,) of channel pairs ``pairs`` = 0 … D/2 - 1."""
        if self.kind == "ntk":
            base = base * self.factor ** (head_dim / max(head_dim - 2, 1))
        plain = base ** (-2.0 * pairs / head_dim)
        if self.kind == "ntk":
            return plain
        if self.kind == "linear":
            return plain / self.factor
        assert self.original_max_len is not None
        low = 1.0 if self.low is None else self.low
        if self.kind == "llama3":
            high = 4.0 if self.high is None else self.high
            kept = (self.original_max_len / (2 * math.pi) * plain - low) / (high - low)
        else:
            first, last = (self._pair_of(turns, head_dim, base) for turns in (32.0 if self.high is None else self.high, low))
            start, stop = max(math.floor(first), 0), min(math.ceil(last), head_dim - 1)
            kept = 1.0 - (pairs - start) / max(stop - start, 0.001)
        kept = kept.clamp(0.0, 1.0)
        return plain * kept + plain / self.factor * (1.0 - kept)

    def _pair_of(self, turns: float, head_dim: int, base: float) -> float:
        """Which pair (a real number) makes ``turns`` turns over the original length."""
        assert self.original_max_len is not None
        return head_dim * math.log(self.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(base))


class Rotation(NamedTuple):
    """cos and sin of the angles of some positions, each (B or 1, 1, L, D/2): what ``Rotary`` turns queries and keys by."""

    cos: Tensor
    sin: Tensor


class Rotary(nn.Module):
    """Rotate pairs of channels by an angle that grows with the position, so that q·k depends on their distance.

    Pair i is turned by pos · base^(-2i/D). Half-split pairs are the channels (i, i + D/2), as in Llama and GPT-NeoX;
    interleaved ones (2i, 2i + 1), as in the paper and GPT-J. Su et al. 2021, "RoFormer", arXiv:2104.09864, §3.2 and
    §3.4.2.

    Args:
        head_dim: D, even. base: the wavelengths run from 2π to 2π · base.
        interleaved: which channels are a pair.
        scaling: a ``RotaryScaling`` for long contexts, or None.

    Raises:
        ValueError: an odd ``head_dim``; ``position_ids`` that do not fit.

    A rotation keeps lengths, and position 0 turns nothing:

    >>> x = torch.randn(1, 1, 3, 4)
    >>> y = Rotary(4)(x, torch.tensor([[0, 1, 2]]))
    >>> bool(torch.equal(y[..., 0, :], x[..., 0, :])), bool(torch.allclose(y.norm(dim=-1), x.norm(dim=-1)))
    (True, True)
    """

    def __init__(
        self, head_dim: int, *, base: float = 10000.0, interleaved: bool = False, scaling: RotaryScaling | None = None
    ) -> None:
        super().__init__()
        if head_dim % 2 or head_dim < 2:
            raise ValueError(f"rotary positions pair channels: head_dim must be even, got {head_dim}")
        self.head_dim, self.base, self.interleaved, self.scaling = head_dim, base, interleaved, scaling

    def forward(self, x: Tensor, position_ids: Tensor | Rotation) -> Tensor:
        """x (B, H, L, D) at position_ids (B or 1, L), or turned by a ``Rotation``, which layers can share."""
        if isinstance(position_ids, Tensor):
            position_ids = self.rotation(position_ids, x.shape[0], x.shape[2], x.dtype)
        cos, sin = position_ids.cos.to(x.dtype), position_ids.sin.to(x.dtype)
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else x.chunk(2, dim=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        return torch.stack(turned, dim=-1).flatten(-2) if self.interleaved else torch.cat(turned, dim=-1)

    def rotation(self, position_ids: Tensor, batch_size: int, length: int, dtype: torch.dtype) -> Rotation:
        """The angles at position_ids (B or 1, L), in at least float32 and the precision of ``dtype``."""
        check_position_ids(position_ids, batch_size, length)
        frequencies = self.frequencies(torch.promote_types(dtype, torch.float32), position_ids.device)
        angles = position_ids[:, None, :, None] * frequencies  # (B, 1, L, D/2)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        return Rotation(angles.cos() * magnitude, angles.sin() * magnitude)

    def frequencies(self, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
        """Radians a position, (D/2,)."""
        pairs = torch.arange(self.head_dim // 2, dtype=dtype, device=device)
        if self.scaling is not None:
            return self.scaling.frequencies(self.head_dim, self.base, pairs)
        return self.base ** (-2.0 * pairs / self.head_dim)

    def extra_repr(self) -> str:
        more = ", interleaved" if self.interleaved else ""
        return f"head_dim={self.head_dim}, base={self.base}{more}" + (f", {self.scaling}" if self.scaling else "")


def check_position_ids(position_ids: Tensor, batch_size: int, length: int) -> None:
    """Refuse position_ids that are not whole numbers of shape (B or 1, L)."""
    whole = not position_ids.is_floating_point() and position_ids.dtype != torch.bool
    if not whole or position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch_size) or position_ids.shape[1] != length:
        raise ValueError(
            f"position_ids must be whole numbers of shape (B or 1, L) = ({batch_size} or 1, {length}), "
            f"got {position_ids.dtype} {tuple(position_ids.shape)}"
        )


def check_range(name: str, ids: Tensor, size: int) -> None:
    """Refuse ids outside 0 … size - 1, where looking costs nothing: on the CPU, outside of a compiled graph and of vmap."""
    traced = torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(ids)
    if ids.device.type == "cpu" and not traced and ids.numel():
        ends = ids.aminmax()
        low, high = int(ends.min), int(ends.max)
        if low < 0 or high >= size:
            raise ValueError(f"{name} must lie between 0 and {size - 1}, the end of the table; got {low} to {high}")


def position_ids_from(key_mask: Tensor | None, document_ids: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Positions (B or 1, L): count real tokens only, and from 0 again in every packed document.

    >>> position_ids_from(torch.tensor([[False, True, True]]), None, 3, torch.device("cpu")).tolist()
    [[0, 0, 1]]
    >>> position_ids_from(None, torch.tensor([[7, 7, 8, 8]]), 4, torch.device("cpu")).tolist()
    [[0, 1, 0, 1]]
    """
    if key_mask is None and document_ids is None:
        return torch.arange(length, device=device).unsqueeze(0)
    real = torch.ones(1, length, dtype=torch.long, device=device) if key_mask is None else key_mask.long()
    count = real.cumsum(-1)  # real tokens up to and including this one
    if document_ids is not None:
        is_start = torch.ones_like(document_ids, dtype=torch.bool)
        is_start[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        count = count - torch.where(is_start, count - real, 0).cummax(dim=-1).values
    return (count - 1).clamp(min=0)
