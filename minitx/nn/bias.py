"""Biases on the scores: small values with a rule, evaluated tile by tile.

A ``Bias`` answers one question, as a ``Mask`` does: what is added to the scaled score of query ``i`` and key ``j``? It
uses the same indices (query row ``i`` stands at position ``i + offset``, ``offset = S - L``), so that decoding with a
cache and training are the same rule, and a kernel that works in tiles never holds the whole (H, L, S) tensor.

    >>> ALiBi(2).dense(1, 4, num_heads=2)[0, :, 0].tolist()  # the last of four positions, two heads
    [[-0.1875, -0.125, -0.0625, -0.0], [-0.01171875, -0.0078125, -0.00390625, -0.0]]

Gradients reach every tensor of a rule. A rule of your own is a frozen dataclass with ``value``; its fields are tensors,
numbers, words, or rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minitx.nn.tensor_rule import TensorRule


class Bias:
    """A rule ``value(batch, head, row, key, offset) -> float`` over broadcastable index tensors.

    >>> ALiBi(slopes=torch.tensor([0.5])).dense(1, 3).flatten().tolist()  # one query after two cached keys
    [-1.0, -0.5, -0.0]
    """

    def value(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        """What is added to the score of query ``row`` (at position ``row + offset``) and ``key``; indices broadcast."""
        raise NotImplementedError(f"{type(self).__name__} defines no rule")

    def check(self, batch_size: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        """Raise a ValueError if the bias does not fit a call of this shape."""

    def dense(
        self,
        num_queries: int,
        num_keys: int,
        *,
        batch_size: int = 1,
        num_heads: int = 1,
        device: torch.device | str | None = None,
        rows: slice = slice(None),
        keys: slice = slice(None),
    ) -> Tensor:
        """The rule as a tensor, broadcastable to (B, H, L, S); ``rows`` and ``keys`` cut a tile out of it."""
        batch = torch.arange(batch_size, device=device).view(-1, 1, 1, 1)
        head = torch.arange(num_heads, device=device).view(1, -1, 1, 1)
        row = torch.arange(num_queries, device=device)[rows].view(1, 1, -1, 1)
        key = torch.arange(num_keys, device=device)[keys].view(1, 1, 1, -1)
        return self.value(batch, head, row, key, num_keys - num_queries)


@dataclass(frozen=True, eq=False)
class TensorBias(TensorRule, Bias):
    """A plain tensor as a rule: (L, S), or 4-D and broadcastable to (B, H, L, S).

    >>> TensorBias(torch.tensor([[0.0, -1.0]])).dense(1, 2).flatten().tolist()
    [0.0, -1.0]
    """

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor) or not self.tensor.is_floating_point():
            got = getattr(self.tensor, "dtype", type(self.tensor).__name__)
            raise TypeError(f"attn_bias must be a floating-point tensor or a Bias, got {got}")

    def value(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return self.at(batch, head, row, key)

    def check(self, batch_size: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        wanted, got = (batch_size, num_heads, num_queries, num_keys), tuple(self.tensor.shape)
        if len(got) not in (2, 4) or not self.broadcasts_to(wanted):
            raise ValueError(f"attn_bias of shape {got} must be (L, S) or broadcast to (B, H, L, S) = {wanted}")


@dataclass(frozen=True, eq=False)
class ALiBi(Bias):
    """−m_h · |i + offset − j|: the farther the key, the lower its score (Press et al. 2022, arXiv:2108.12409, §3).

    With a causal mask this is the paper's bias; without one it is its symmetric form for encoders.

    Args:
        num_heads: H; the slopes are the paper's, 2^(−8h/H) for h = 1 … H where H is a power of two, and for other H
            those of the power below, followed by every second of twice that power.
        slopes: (H,) instead of ``num_heads``; may be a parameter.

    Raises:
        ValueError: neither or both; TypeError: slopes that are no float tensor.

    >>> ALiBi(8).dense(1, 2, num_heads=8)[0, :, 0, 0].tolist()
    [-0.5, -0.25, -0.125, -0.0625, -0.03125, -0.015625, -0.0078125, -0.00390625]
    """

    num_heads: int | None = None
    slopes: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.num_heads is None) == (self.slopes is None):
            raise ValueError("ALiBi needs num_heads or slopes, and not both")
        if self.slopes is not None and not (isinstance(self.slopes, Tensor) and self.slopes.is_floating_point()):
            raise TypeError(f"ALiBi slopes must be a floating-point tensor of shape (H,), got {self.slopes!r}")
        if self.num_heads is not None and (not isinstance(self.num_heads, int) or self.num_heads < 1):
            raise ValueError(f"ALiBi num_heads must be a positive whole number, got {self.num_heads!r}")

    def value(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return -self.slope(head) * (row + offset - key).abs()

    def slope(self, head: Tensor) -> Tensor:
        """m_h, computed from the index: nothing has to be moved to the device."""
        if self.slopes is not None:
            return widened(self.slopes)[head]
        assert self.num_heads is not None
        power = 2 ** int(math.log2(self.num_heads))
        # Press et al.'s code (ofirpress/attention_with_linear_biases, get_slopes): what is left over interleaves
        exponent = torch.where(head < power, 8.0 * (head + 1), 4.0 * (2 * (head - power) + 1)) / power
        return torch.exp2(-exponent)

    def check(self, batch_size: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        heads = self.num_heads if self.slopes is None else tuple(self.slopes.shape)
        if heads not in (num_heads, (num_heads,)):
            raise ValueError(f"attn_bias ALiBi has slopes for {heads} heads, but query has {num_heads}")


@dataclass(frozen=True, eq=False)
class RelativeBuckets(Bias):
    """``table[bucket(j − i − offset), h]``: what ``T5RelativeBias`` hands to a kernel. ``table`` is (num_buckets, H)."""

    table: Tensor
    max_distance: int = 128
    bidirectional: bool = True

    def value(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return widened(self.table)[self.bucket(key - (row + offset)), head]

    def bucket(self, distance: Tensor) -> Tensor:
        """T5's bucket of ``j − i``: exact up to a half of the buckets, then logarithmic up to ``max_distance``.

        Raffel et al. 2020, arXiv:1910.10683, §2.1; the arithmetic is that of its code, float32 logarithm included.
        """
        buckets, first = self.table.shape[0], torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            first, distance = (distance > 0) * buckets, distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        ratio = (distance.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact)
        far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return first + torch.where(distance < exact, distance, far)

    def check(self, batch_size: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        if self.table.shape[1] != num_heads:
            raise ValueError(f"attn_bias T5RelativeBias has a table for {self.table.shape[1]} heads, but query has {num_heads}")


class T5RelativeBias(nn.Module, Bias):
    """A learned number for every head and bucket of relative positions, added to the scores, shared by all layers.

    Raffel et al. 2020, "Exploring the Limits of Transfer Learning", arXiv:1910.10683, §2.1. Give the module itself as
    ``attn_bias``; the gradient flows into ``weight`` through every backend that takes a bias.

    Args:
        num_heads: H.
        num_buckets: rows of the table; half of them for each direction if ``bidirectional``.
        max_distance: from here on all distances share a bucket.
        bidirectional: whether keys after the query have buckets of their own (encoders); else they share bucket 0.

    Attributes:
        weight: (num_buckets, H), a parameter that starts at zero: a new model starts without a preference.

    Raises:
        ValueError: numbers that leave no bucket for near or far.

    >>> bias = T5RelativeBias(2, num_buckets=8, max_distance=16)
    >>> bias().bucket(torch.tensor([-20, -3, -1, 0, 1, 3, 20])).tolist()
    [3, 2, 1, 0, 5, 6, 7]
    """

    def __init__(self, num_heads: int, *, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> None:
        super().__init__()
        per_direction = num_buckets // 2 if bidirectional else num_buckets
        if num_heads < 1 or per_direction < 2 or max_distance <= per_direction // 2:
            raise ValueError(
                "T5RelativeBias needs num_heads >= 1, two buckets a direction, and max_distance beyond the exact ones, "
                f"got num_heads={num_heads}, num_buckets={num_buckets}, max_distance={max_distance}"
            )
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self.weight = nn.Parameter(torch.zeros(num_buckets, num_heads))

    def reset_parameters(self) -> None:
        """Back to zero."""
        nn.init.zeros_(self.weight)

    def forward(self) -> RelativeBuckets:
        """The rule with the table as it is now; through ``forward``, because sharded parameters live behind its hooks."""
        return RelativeBuckets(self.weight, self.max_distance, self.bidirectional)

    def value(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return self().value(batch, head, row, key, offset)

    def extra_repr(self) -> str:
        return f"buckets={tuple(self.weight.shape)}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


def widened(tensor: Tensor) -> Tensor:
    """In at least float32: the gradient of a small table is a sum over all pairs, and bfloat16 would lose most of it."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def as_bias(attn_bias: Tensor | Bias) -> Bias:
    """``attn_bias`` as a rule; a tensor becomes ``TensorBias``, a module gives the rule that it stands for.

    Raises:
        TypeError: anything else.
    """
    if isinstance(attn_bias, nn.Module) and isinstance(attn_bias, Bias):
        attn_bias = attn_bias()
    return attn_bias if isinstance(attn_bias, Bias) else TensorBias(attn_bias)
