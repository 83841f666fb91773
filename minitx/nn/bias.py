"""Attention biases, written as rules.

A ``Bias`` computes a number that is added to the scaled score of query ``i`` and key ``j``. Its indices are a ``Mask``'s: query row
``i`` has position ``i + offset``, with ``offset = S - L``. One rule therefore serves training and decoding with a cache. A kernel
that works in tiles computes one tile of the bias at a time and never stores the whole (H, L, S) tensor.

    >>> ALiBi(2).dense(1, 4, num_heads=2)[0, :, 0].tolist()  # the last of four positions, two heads
    [[-0.1875, -0.125, -0.0625, -0.0], [-0.01171875, -0.0078125, -0.00390625, -0.0]]

Gradients flow into every tensor of a rule. To write a rule of your own, define a frozen dataclass with a method ``value``. Its
fields are tensors, numbers, strings or other rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from minitx.nn.rules import MASKS_PAGE, Rule, TensorRule


class Bias(Rule):
    """A rule ``value(batch, head, row, key, offset) -> float`` over broadcastable index tensors.

    >>> ALiBi(slopes=torch.tensor([0.5])).dense(1, 3).flatten().tolist()  # one query after two cached keys
    [-1.0, -0.5, -0.0]
    """

    may_hide: ClassVar[bool] = True
    """Whether the rule may return −inf to hide a key. If not, no kernel looks for keys that no query sees."""

    def value(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        """Return the bias of the score of query ``row`` (at position ``row + offset``) and ``key``. Indices broadcast."""
        raise NotImplementedError(f"{type(self).__name__} must define value()")

    def entries(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return self.value(batch, head, row, key, offset)


@dataclass(frozen=True, eq=False)
class TensorBias(TensorRule, Bias):
    """A bias given as a tensor of shape (L, S), or 4-D and broadcastable to (B, H, L, S).

    >>> TensorBias(torch.tensor([[0.0, -1.0]])).dense(1, 2).flatten().tolist()
    [0.0, -1.0]
    """

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor) or not self.tensor.is_floating_point():
            got = getattr(self.tensor, "dtype", type(self.tensor).__name__)
            raise TypeError(
                f"attn_bias must be a floating-point tensor or a Bias, got {got}: pass a mask (True = may attend) as attn_mask "
                f"({MASKS_PAGE})"
            )

    def value(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return self.entries(batch, head, row, key, offset)

    def check(self, batch_size: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        expected, got = (batch_size, num_heads, num_queries, num_keys), tuple(self.tensor.shape)
        if len(got) not in (2, 4) or not self.broadcasts_to(expected):
            raise ValueError(f"attn_bias of shape {got} must be (L, S) or broadcast to (B, H, L, S) = {expected}")


@dataclass(frozen=True, eq=False)
class ALiBi(Bias):
    """Add −m_h · |i + offset − j| to the scores: distant keys get lower scores (Press et al. 2022, arXiv:2108.12409, §3).

    With a causal mask this is the paper's bias. Without one it is the symmetric form for encoders.

    Args:
        num_heads: H. The slopes m_h are the paper's. If H is a power of two, they are 2^(−8h/H) for h = 1 … H. For
            another H, take the slopes of the next lower power of two, then every second slope of twice that power.
        slopes: m_h as a tensor (H,), instead of ``num_heads``. It may be a parameter.

    Raises:
        ValueError: ``num_heads`` and ``slopes`` are both given, or neither is.
        TypeError: ``slopes`` is not a floating-point tensor.

    >>> ALiBi(8).dense(1, 2, num_heads=8)[0, :, 0, 0].tolist()
    [-0.5, -0.25, -0.125, -0.0625, -0.03125, -0.015625, -0.0078125, -0.00390625]
    """

    may_hide: ClassVar[bool] = False
    num_heads: int | None = None
    slopes: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.num_heads is None) == (self.slopes is None):
            raise ValueError("ALiBi needs either num_heads or slopes")
        if self.slopes is not None and not (isinstance(self.slopes, Tensor) and self.slopes.is_floating_point()):
            raise TypeError(f"ALiBi slopes must be a floating-point tensor of shape (H,), got {self.slopes!r}")
        if self.num_heads is not None and (not isinstance(self.num_heads, int) or self.num_heads < 1):
            raise ValueError(f"ALiBi num_heads must be a positive integer, got {self.num_heads!r}")

    def value(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return -self.slope(head) * (row + offset - key).abs()

    def slope(self, head: Tensor) -> Tensor:
        """Return m_h, computed from the head index, so that no tensor is copied to the device."""
        if self.slopes is not None:
            return widened(self.slopes)[head]
        assert self.num_heads is not None
        head = head.float()
        power = 2 ** int(math.log2(self.num_heads))
        # as in get_slopes of Press et al.'s code (ofirpress/attention_with_linear_biases)
        return torch.exp2(-torch.where(head < power, 8.0 * (head + 1), 4.0 * (2 * (head - power) + 1)) / power)

    def check(self, batch_size: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        heads = self.num_heads if self.slopes is None else tuple(self.slopes.shape)
        if heads not in (num_heads, (num_heads,)):
            raise ValueError(f"attn_bias ALiBi has slopes for {heads} heads, but query has {num_heads}")


@dataclass(frozen=True, eq=False)
class RelativeBuckets(Bias):
    """Add ``table[bucket(j − i − offset), h]``: the rule behind ``T5RelativeBias``. ``table`` is (num_buckets, H)."""

    may_hide: ClassVar[bool] = False
    table: Tensor
    max_distance: int = 128
    bidirectional: bool = True

    def value(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return widened(self.table)[self.bucket(key - (row + offset)), head]

    def bucket(self, distance: Tensor) -> Tensor:
        """Return T5's bucket of the distance ``j − i``.

        Half of the buckets hold one distance each. The others grow logarithmically up to ``max_distance``. Raffel et al. 2020,
        arXiv:1910.10683, §2.1. The logarithm is in float32, as in the authors' code.
        """
        buckets = self.table.shape[0]
        first = torch.zeros_like(distance)
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
    """T5's relative position bias: one learned number for each head and each bucket of distances.

    Raffel et al. 2020, "Exploring the Limits of Transfer Learning", arXiv:1910.10683, §2.1. Pass the module as ``attn_bias``. The
    gradient flows into ``weight`` through every backend that supports a bias. A model shares one such bias among its layers.

    Args:
        num_heads: H.
        num_buckets: the number of rows of the table. If ``bidirectional``, half of them are for each direction.
        max_distance: all distances from here on share one bucket.
        bidirectional: whether keys after the query have separate buckets, as in encoders. If not, they share bucket 0.

    Attributes:
        weight: a parameter of shape (num_buckets, H), initially zero.

    Raises:
        ValueError: fewer than two buckets per direction, or a ``max_distance`` within the buckets that hold one distance each.

    >>> bias = T5RelativeBias(2, num_buckets=8, max_distance=16)
    >>> bias().bucket(torch.tensor([-20, -3, -1, 0, 1, 3, 20])).tolist()
    [3, 2, 1, 0, 5, 6, 7]
    """

    def __init__(self, num_heads: int, *, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> None:
        super().__init__()
        per_direction = num_buckets // 2 if bidirectional else num_buckets
        if num_heads < 1 or per_direction < 2 or max_distance <= per_direction // 2:
            raise ValueError(
                "T5RelativeBias needs num_heads >= 1, at least two buckets per direction, and max_distance above half the buckets "
                f"of a direction; got num_heads={num_heads}, num_buckets={num_buckets}, max_distance={max_distance}"
            )
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self.weight = nn.Parameter(torch.zeros(num_buckets, num_heads))

    def reset_parameters(self) -> None:
        """Set the table to zero."""
        nn.init.zeros_(self.weight)

    def forward(self) -> RelativeBuckets:
        """Return the rule with the current table. Sharded parameters are gathered by hooks on ``forward``."""
        return RelativeBuckets(self.weight, self.max_distance, self.bidirectional)

    def value(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return self().value(batch, head, row, key, offset)

    def extra_repr(self) -> str:
        return f"buckets={tuple(self.weight.shape)}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


def widened(tensor: Tensor) -> Tensor:
    """Convert to at least float32. The table's gradient is a sum over all pairs, and bfloat16 cannot represent it."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def as_bias(attn_bias: Tensor | Bias) -> Bias:
    """Convert ``attn_bias`` to a rule. A tensor becomes a ``TensorBias``; a module is called and returns its rule.

    Raises:
        TypeError: ``attn_bias`` is something else.
    """
    if isinstance(attn_bias, nn.Module) and isinstance(attn_bias, Bias):
        attn_bias = attn_bias()
    return attn_bias if isinstance(attn_bias, Bias) else TensorBias(attn_bias)
