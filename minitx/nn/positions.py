"""Positions: sinusoidal and learned embeddings, and rotary positions for queries and keys.

All of them take ``position_ids`` of shape (B, L) or (1, L). Left-padded, packed and cached sequences therefore get correct positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minitx.nn.tracing import can_look

ID_DTYPES = (torch.int32, torch.int64)
"""The dtypes of ids that an embedding table reads."""


class SinusoidalPositions(nn.Module):
    """Sinusoidal position embeddings: positions (..., L) to (..., L, E). Any length, no parameters.

    PE(pos, 2i) = sin(pos / base^(2i/E)), PE(pos, 2i+1) = cos(pos / base^(2i/E)). Vaswani et al. 2017, arXiv:1706.03762, §3.5.

    Args:
        embed_dim: E.
        base: the wavelengths grow from 2π to 2π · base positions.

    >>> SinusoidalPositions(4)(torch.tensor([0])).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    """

    def __init__(self, embed_dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        self.embed_dim, self.base = embed_dim, base

    def forward(self, position_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        high = torch.promote_types(dtype, torch.float32)
        even = torch.arange(0, self.embed_dim, 2, dtype=high, device=position_ids.device)
        angles = position_ids.unsqueeze(-1).to(high) * torch.exp(even * (-math.log(self.base) / self.embed_dim))
        # (..., 2 * ceil(E / 2)), which has a column too many if E is odd
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[..., : self.embed_dim].to(dtype)


class LearnedPositions(nn.Module):
    """Learned position embeddings, a table (max_len, E) (Gehring et al. 2017, arXiv:1705.03122; GPT-2).

    Args:
        max_len: the number of positions.
        embed_dim: E.

    Raises:
        ValueError: position_ids outside the table. On a GPU the values are not read, because that would wait for the GPU; torch's
            own assertion reports the error there.

    >>> LearnedPositions(7, 4)(torch.tensor([[0, 1, 2]])).shape
    torch.Size([1, 3, 4])
    """

    def __init__(self, max_len: int, embed_dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_len, embed_dim)

    def forward(self, position_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        check_range("position_ids", position_ids, num_rows(self.table))
        return self.table(position_ids).to(dtype)


@dataclass(frozen=True)
class RotaryScaling:
    """How to change rotary frequencies for a context ``factor`` times as long as in training.

    Channel pair i has frequency f_i = base^(-2i/D). Over the original length it makes r_i = original_max_len · f_i / 2π turns.

    * ``linear``: f_i / factor (position interpolation; Chen et al. 2023, arXiv:2306.15595).
    * ``ntk``: the base becomes base · factor^(D/(D-2)). This divides the lowest frequency by the factor and keeps the highest
      (bloc97 2023, "NTK-aware scaled RoPE"; Peng et al. 2023, arXiv:2309.00071, §3.1).
    * ``llama3``: f_i (1 - γ_i) / factor + f_i γ_i with γ_i = clamp((r_i - low) / (high - low), 0, 1), low = 1 and high = 4
      (Llama 3.1, ``apply_scaling``; "NTK-by-parts" of arXiv:2309.00071, §3.2).
    * ``yarn``: the same formula, but γ_i is linear in i between the pair that makes high = 32 turns and the pair that makes low = 1
      turn. Both indices are rounded outwards, as in the authors' code. q and k are each multiplied by 0.1 ln(factor) + 1
      (arXiv:2309.00071, §3.3 and eq. 22).

    Args:
        kind: ``linear``, ``ntk``, ``llama3`` or ``yarn``.
        factor: the new length divided by the original length, at least 1.
        original_max_len: the length in training, in tokens. ``llama3`` and ``yarn`` need it.
        low: pairs with fewer turns are interpolated. None: the default of the kind, as above.
        high: pairs with more turns are kept. None: the default of the kind.

    Raises:
        ValueError: an unknown kind, a factor below 1, a missing or non-positive length, a ``low`` that is not positive, or a ``low``
            above ``high``.

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
            raise ValueError(f"rotary_factor={self.factor} must be at least 1: it is the new length over the original length")
        if self.kind in ("yarn", "llama3") and (self.original_max_len is None or self.original_max_len < 1):
            raise ValueError(f"rotary_original_len={self.original_max_len} must be positive with rotary_scaling={self.kind}")
        low, high = self.turns
        if not 0.0 < low <= high < math.inf:
            raise ValueError(f"rotary_low={low} must be positive and not above rotary_high={high}")

    @property
    def turns(self) -> tuple[float, float]:
        """``low`` and ``high``, or the defaults of the kind."""
        high = 4.0 if self.kind == "llama3" else 32.0
        return 1.0 if self.low is None else self.low, high if self.high is None else self.high

    @property
    def magnitude(self) -> float:
        """The factor on rotated queries and keys: 0.1 ln(factor) + 1 for ``yarn``, else 1."""
        return 0.1 * math.log(self.factor) + 1.0 if self.kind == "yarn" else 1.0

    def frequencies(self, head_dim: int, base: float, pairs: Tensor) -> Tensor:
        """Return the scaled frequencies (D/2,) of the channel pairs ``pairs`` = 0 … D/2 - 1."""
        if self.kind == "ntk":
            base = base * self.factor ** (head_dim / max(head_dim - 2, 1))
            return base ** (-2.0 * pairs / head_dim)
        plain = base ** (-2.0 * pairs / head_dim)
        if self.kind == "linear":
            return plain / self.factor
        assert self.original_max_len is not None
        low, high = self.turns
        if self.kind == "llama3":
            kept = (self.original_max_len / (2 * math.pi) * plain - low) / max(high - low, 1e-9)
        else:
            first, last = (self._pair_of(turns, head_dim, base) for turns in (high, low))
            start, stop = max(math.floor(first), 0), min(math.ceil(last), head_dim - 1)
            kept = 1.0 - (pairs - start) / max(stop - start, 0.001)
        kept = kept.clamp(0.0, 1.0)
        return plain * kept + plain / self.factor * (1.0 - kept)

    def _pair_of(self, turns: float, head_dim: int, base: float) -> float:
        """Return the index (a real number) of the pair that makes ``turns`` turns over the original length."""
        assert self.original_max_len is not None
        return head_dim * math.log(self.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(base))


class Rotation(NamedTuple):
    """The cosine and sine of the rotation angles, each (B or 1, 1, L, D/2). ``Rotary`` applies them to queries and keys."""

    cos: Tensor
    sin: Tensor


class Rotary(nn.Module):
    """Rotary positions: rotate pairs of channels by an angle proportional to the position.

    The angle of pair i is pos · base^(-2i/D). The product q·k then depends on the distance between the two positions. Su et al.
    2021, "RoFormer", arXiv:2104.09864, §3.2 and §3.4.2.

    Args:
        head_dim: D, an even number.
        base: the wavelengths grow from 2π to 2π · base positions.
        interleaved: if True, channels (2i, 2i + 1) form a pair, as in the paper and GPT-J. If False, channels (i, i + D/2) do, as
            in Llama and GPT-NeoX.
        scaling: a ``RotaryScaling`` for long contexts, or None.

    Raises:
        ValueError: an odd ``head_dim``, or ``position_ids`` of a wrong shape or dtype.

    A rotation does not change the length of a vector, and position 0 is not rotated:

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
            raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")
        self.head_dim, self.base, self.interleaved, self.scaling = head_dim, base, interleaved, scaling

    def forward(self, x: Tensor, position_ids: Tensor | Rotation) -> Tensor:
        """Rotate x (B, H, L, D) by its position_ids (B or 1, L), or by a ``Rotation`` that layers share."""
        if isinstance(position_ids, Tensor):
            position_ids = self.rotation(position_ids, x.shape[0], x.shape[2], x.dtype)
        cos, sin = position_ids.cos.to(x.dtype), position_ids.sin.to(x.dtype)
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else x.chunk(2, dim=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        return torch.stack(turned, dim=-1).flatten(-2) if self.interleaved else torch.cat(turned, dim=-1)

    def rotation(self, position_ids: Tensor, batch_size: int, length: int, dtype: torch.dtype) -> Rotation:
        """Return cosine and sine for position_ids (B or 1, L), in float32 or in ``dtype`` if that is wider."""
        check_position_ids(position_ids, batch_size, length)
        frequencies = self.frequencies(torch.promote_types(dtype, torch.float32), position_ids.device)
        angles = position_ids[:, None, :, None] * frequencies  # (B, 1, L, D/2)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        return Rotation(angles.cos() * magnitude, angles.sin() * magnitude)

    def frequencies(self, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
        """Return the frequencies (D/2,) in radians per position."""
        pairs = torch.arange(self.head_dim // 2, dtype=dtype, device=device)
        if self.scaling is not None:
            return self.scaling.frequencies(self.head_dim, self.base, pairs)
        return self.base ** (-2.0 * pairs / self.head_dim)

    def extra_repr(self) -> str:
        more = ", interleaved" if self.interleaved else ""
        return f"head_dim={self.head_dim}, base={self.base}{more}" + (f", {self.scaling}" if self.scaling else "")


def check_position_ids(position_ids: Tensor, batch_size: int, length: int) -> None:
    """Raise a ValueError unless position_ids are int32 or int64 of shape (B or 1, L)."""
    if position_ids.dtype not in ID_DTYPES or tuple(position_ids.shape) not in ((1, length), (batch_size, length)):
        raise ValueError(
            f"position_ids must be int32 or int64 of shape (B or 1, L) = ({batch_size} or 1, {length}), "
            f"got {position_ids.dtype} {tuple(position_ids.shape)}"
        )


def check_range(name: str, ids: Tensor, size: int) -> None:
    """Raise a ValueError for ids outside 0 … size - 1, if the values can be read at no cost (``can_look``)."""
    if can_look(ids) and ids.numel():
        low, high = map(int, ids.aminmax())
        if low < 0 or high >= size:
            raise ValueError(f"{name} must be between 0 and {size - 1}, got {low} to {high}")


def num_rows(table: nn.Module) -> int:
    """Return the number of rows of an embedding table. PEFT adapters around it hide its sizes."""
    return next(module.num_embeddings for module in table.modules() if hasattr(module, "num_embeddings"))  # type: ignore[return-value]


def position_ids_from(key_mask: Tensor | None, document_ids: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Return positions (B or 1, L). Only real tokens count, and every packed document starts at 0.

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
