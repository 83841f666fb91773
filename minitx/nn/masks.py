"""Attention masks, written as rules.

A mask decides whether query ``i`` may attend to key ``j``. **True = may attend**, everywhere in this package. Queries are the
*last* ``L`` of the ``S`` positions (lower-right alignment): query row ``i`` has position ``i + offset``, with
``offset = S - L``. One rule therefore serves training and decoding with a cache.

    >>> print((Causal() & SlidingWindow(2)).grid(4))
    x . . .
    x x . .
    . x x .
    . . x x
    >>> print(Causal().grid(2, 5))  # two new queries after three cached keys
    x x x x .
    x x x x x

Masks and bool tensors combine with ``&`` (both must allow) and ``|`` (one must allow). A mask becomes a tensor (``dense``) only if
a kernel needs one, and a kernel that works in tiles gets one tile at a time. The layers of a model share the dense form of a mask.
It is computed once, and again after one of the mask's tensors was changed in place. Torch does not count changes through
``tensor.data``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from minitx.nn.precision import widest_float
from minitx.nn.rules import MASKS_PAGE, Remembering, TensorRule, tensors_of

Range = tuple[Any, Any]  # first and last


class Mask(Remembering):
    """A rule ``visible(batch, head, row, key, offset) -> bool`` over broadcastable index tensors.

    To write a mask of your own, define a frozen dataclass with a method ``visible``, as in ``examples/custom_mask.py``. A field is a
    tensor, a number, a string, None, a rule, or a tuple of these. Define ``verdict`` or ``tile_map`` to report empty tiles;
    ``chunked`` skips them.

    >>> (Causal() & SlidingWindow(2)).grid(3).splitlines()
    ['x . .', 'x x .', '. x x']
    """

    is_causality: ClassVar[bool] = False
    """Whether the rule defines which later positions a query sees. It then replaces the ``Causal`` mask of a model."""
    is_sparse: ClassVar[bool] = False
    """Whether the rule hides most tiles of a long sequence. ``auto`` then counts the tiles to choose a backend."""

    def visible(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        """Return True where query ``row`` (at position ``row + offset``) may attend to ``key``. Indices broadcast."""
        raise NotImplementedError(f"{type(self).__name__} must define visible()")

    def entries(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return self.visible(batch, head, row, key, offset)

    def verdict(self, rows: Range, keys: Range) -> tuple[Any, Any]:
        """Return whether every cell of a tile is visible, and whether every cell is hidden.

        The answer may use positions only. (False, False) is always allowed and means that both are unknown.

        Args:
            rows: the first and the last *position* of the queries (row + offset), as numbers or tensors that broadcast.
            keys: the first and the last position of the keys.
        """
        return False, False

    def tile_map(self, rows: Tensor, keys: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Return ``(whole, empty)``, both bool (R, C), for a grid of tiles.

        A tile is whole if all its cells are visible in every head and every batch row. It is empty if all are hidden.
        Where a rule cannot tell, both are False.

        Args:
            rows: the edges of the tiles along the queries, (R + 1,), from 0 to L.
            keys: the edges along the keys, (C + 1,), from 0 to S.
            offset: S - L.
        """
        positions = (rows[:-1, None] + offset, rows[1:, None] + offset - 1)
        shape = len(rows) - 1, len(keys) - 1
        verdicts = self.verdict(positions, (keys[None, :-1], keys[None, 1:] - 1))
        whole, empty = (torch.as_tensor(verdict, device=rows.device).expand(shape) for verdict in verdicts)
        return whole, empty

    def grain(self) -> int | None:
        """Return a suitable tile size for the rule, or None if any size is."""
        return None

    def parts(self) -> Iterator[Mask]:
        """Yield the masks whose intersection is this mask."""
        yield self

    def __and__(self, other: Mask | Tensor) -> Mask:
        if not isinstance(other, Mask | Tensor):
            return NotImplemented
        return And((*self.parts(), *_as_rule(other).parts()))

    def __or__(self, other: Mask | Tensor) -> Mask:
        return Or((self, _as_rule(other))) if isinstance(other, Mask | Tensor) else NotImplemented

    __rand__, __ror__ = __and__, __or__  # a tensor on the left

    def grid(self, num_queries: int, num_keys: int | None = None, *, batch: int = 0, head: int = 0) -> str:
        """Return the mask as text: one line for each query, one column for each key, ``x`` = may attend, ``.`` = hidden."""
        num_keys = num_queries if num_keys is None else num_keys
        device = next((tensor.device for tensor in tensors_of(self)), None)
        row, key = (torch.arange(count, device=device) for count in (num_queries, num_keys))
        places = torch.tensor([batch, head], device=device)
        cells = self.visible(places[0], places[1], row.view(1, 1, -1, 1), key.view(1, 1, 1, -1), num_keys - num_queries)
        cells = cells.expand(1, 1, num_queries, num_keys)[0, 0]
        return "\n".join(" ".join("x" if cell else "." for cell in line) for line in cells.tolist())

    def size(self) -> tuple[int, int] | None:
        """Return the numbers of queries and keys that the mask was made for, or None if it fits any."""
        return None

    def __str__(self) -> str:
        return self.grid(*(self.size() or (6, 6)))


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """A query sees its own position and all earlier ones: ``j <= i + offset`` (lower-right aligned).

    >>> print(Causal().grid(2, 3))  # two queries after one cached key
    x x .
    x x x
    """

    is_causality: ClassVar[bool] = True

    def visible(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return key <= row + offset

    def verdict(self, rows: Range, keys: Range) -> tuple[Any, Any]:
        return keys[1] <= rows[0], keys[0] > rows[1]

    def check(self, batch_size: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        if num_queries > num_keys:
            raise ValueError(
                f"is_causal needs at least as many keys as queries, got {num_queries} queries and {num_keys} keys: "
                f"the last query is aligned with the last key ({MASKS_PAGE})"
            )


@dataclass(frozen=True, eq=False)
class SlidingWindow(Mask):
    """A query sees the keys at a distance below ``window``: ``|i + offset - j| < window``.

    With ``& Causal()``, a query sees ``window`` keys, *including its own*.

    >>> print((SlidingWindow(2) & Causal()).grid(3))
    x . .
    x x .
    . x x
    """

    is_sparse: ClassVar[bool] = True
    window: int

    def __post_init__(self) -> None:
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window must be a positive integer, got {self.window!r}")

    def visible(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return (row + offset - key).abs() < self.window

    def verdict(self, rows: Range, keys: Range) -> tuple[Any, Any]:
        w = self.window
        whole = (rows[1] - keys[0] < w) & (keys[1] - rows[0] < w)
        return whole, (rows[0] - keys[1] >= w) | (keys[0] - rows[1] >= w)

    def grain(self) -> int:
        return self.window


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Hide padded keys. ``key_mask`` is bool (B, S), **True = real token**, like the ``attention_mask`` of a tokenizer.

    >>> print(Padding(torch.tensor([[False, True, True]])).grid(2, 3))
    . x x
    . x x
    """

    key_mask: Tensor

    def __post_init__(self) -> None:
        require_bool("key_mask", self.key_mask)
        if self.key_mask.dim() != 2:
            raise ValueError(f"key_mask must have shape (B, S), got {tuple(self.key_mask.shape)} ({MASKS_PAGE})")

    def visible(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return self.key_mask[batch, key]

    def dense(self, num_queries: int, num_keys: int, *, keys: slice = slice(None), **options: object) -> Tensor:
        return self.key_mask[:, None, None, keys]

    def tile_map(self, rows: Tensor, keys: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        real, all_real = (_count(column, keys) for column in (self.key_mask.any(0), self.key_mask.all(0)))
        shape = len(rows) - 1, -1
        return (all_real == keys.diff()).expand(shape), (real == 0).expand(shape)

    def check(self, batch_size: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        if tuple(self.key_mask.shape) != (batch_size, num_keys):
            expected = f"(B, S) = {(batch_size, num_keys)}"
            raise ValueError(f"key_mask must have shape {expected}, got {tuple(self.key_mask.shape)} ({MASKS_PAGE})")

    def size(self) -> tuple[int, int]:
        return self.key_mask.shape[1], self.key_mask.shape[1]


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Separate packed documents: a query sees only keys of the same document. ``ids`` is an integer tensor (B, S).

    >>> print(Documents(torch.tensor([[0, 0, 1]])).grid(3))
    x x .
    x x .
    . . x
    """

    is_sparse: ClassVar[bool] = True
    ids: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.ids, Tensor):
            raise TypeError(f"document ids must be an integer tensor of shape (B, S), got {type(self.ids).__name__}")
        if self.ids.dim() != 2 or self.ids.is_floating_point() or self.ids.dtype == torch.bool:
            raise ValueError(
                f"document ids must be an integer tensor of shape (B, S), got {self.ids.dtype} {tuple(self.ids.shape)}"
            )

    def visible(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return self.ids[batch, row + offset] == self.ids[batch, key]

    def tile_map(self, rows: Tensor, keys: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """A tile is empty if the id ranges of its queries and keys do not overlap, and whole if it has a single id."""
        (low, high), (first, last) = _extremes(self.ids, rows + offset), _extremes(self.ids, keys)  # (B, R), (B, C)
        low, high, first, last = low.unsqueeze(2), high.unsqueeze(2), first.unsqueeze(1), last.unsqueeze(1)
        whole = (low == high) & (first == last) & (low == first)
        return whole.all(0), ((low > last) | (first > high)).all(0)

    def check(self, batch_size: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        if tuple(self.ids.shape) != (batch_size, num_keys) or num_queries > num_keys:
            raise ValueError(
                f"document ids must have shape (B, S) = {(batch_size, num_keys)} with L <= S, "
                f"got {tuple(self.ids.shape)} and L = {num_queries}"
            )

    def size(self) -> tuple[int, int]:
        return self.ids.shape[1], self.ids.shape[1]


@dataclass(frozen=True, eq=False)
class PrefixLM(Mask):
    """Causal, except that all queries see the first ``length`` positions. ``length`` is an int, or a tensor (B,).

    >>> print(PrefixLM(2).grid(3))
    x x .
    x x .
    x x x
    """

    is_causality: ClassVar[bool] = True
    length: int | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.length, Tensor):
            is_wrong = self.length.is_floating_point() or self.length.dtype == torch.bool
        else:
            is_wrong = not isinstance(self.length, int) or isinstance(self.length, bool) or self.length < 0
        if is_wrong:
            raise ValueError(f"prefix length must be a non-negative integer or an integer tensor, got {self.length!r}")

    def visible(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        length = self.length[batch] if isinstance(self.length, Tensor) else self.length
        return (key <= row + offset) | (key < length)

    def verdict(self, rows: Range, keys: Range) -> tuple[Any, Any]:
        whole, empty = Causal().verdict(rows, keys)
        if isinstance(self.length, Tensor):
            return whole, False
        return whole | (keys[1] < self.length), empty & (keys[0] >= self.length)

    def check(self, batch_size: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        Causal().check(batch_size, num_heads, num_queries, num_keys)
        if isinstance(self.length, Tensor) and tuple(self.length.shape) != (batch_size,):
            raise ValueError(
                f"prefix length must be an integer or have shape (B,) = ({batch_size},), got {tuple(self.length.shape)}"
            )


@dataclass(frozen=True, eq=False)
class Dense(TensorRule, Mask):
    """A mask given as a bool tensor of shape (L, S), or 4-D and broadcastable to (B, H, L, S). True = may attend.

    >>> print(Dense(torch.tensor([[True, False], [False, True]])).grid(2))
    x .
    . x
    """

    def __post_init__(self) -> None:
        _check_dense("attn_mask", self.tensor)

    def visible(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return self.entries(batch, head, row, key, offset)

    def tile_map(self, rows: Tensor, keys: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        cells = self.tensor.flatten(0, -3) if self.tensor.dim() > 2 else self.tensor[None]
        cells = cells.expand(-1, int(rows[-1]), int(keys[-1]))
        return _pooled(cells.all(0), rows, keys, torch.all, True), ~_pooled(cells.any(0), rows, keys, torch.any, False)

    def check(self, batch_size: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        expected = (batch_size, num_heads, num_queries, num_keys)
        if not self.broadcasts_to(expected):
            got = tuple(self.tensor.shape)
            raise ValueError(f"attn_mask of shape {got} does not broadcast to (B, H, L, S) = {expected} ({MASKS_PAGE})")

    def size(self) -> tuple[int, int]:
        return self.tensor.shape[-2], self.tensor.shape[-1]


@dataclass(frozen=True, eq=False)
class BlockSparse(Mask):
    """Show or hide blocks of b × b positions. Position p belongs to block p // b.

    Child et al. 2019, "Sparse Transformers", arXiv:1904.10509. The ``chunked`` backend skips hidden tiles.

    Args:
        pattern: bool (n, n) with n · b >= S, or (H, n, n) for one pattern per head. True = may attend. A query's row in the
            pattern follows from its position, so one pattern for the whole sequence also works with a growing cache, as long
            as the cache keeps all keys.
        block_size: b, the number of positions in a block.

    Raises:
        ValueError: another shape, or a block size below 1.
        TypeError: another dtype.

    >>> print((BlockSparse(torch.eye(2, dtype=torch.bool), 2) & Causal()).grid(4))
    x . . .
    x x . .
    . . x .
    . . x x
    """

    is_sparse: ClassVar[bool] = True
    pattern: Tensor
    block_size: int = 64

    def __post_init__(self) -> None:
        require_bool("pattern", self.pattern)
        if self.pattern.dim() not in (2, 3) or self.pattern.shape[-1] != self.pattern.shape[-2]:
            raise ValueError(f"pattern must be (blocks, blocks) or (H, blocks, blocks), got shape {tuple(self.pattern.shape)}")
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int) or self.block_size < 1:
            raise ValueError(f"block_size must be a positive integer, got {self.block_size!r}")

    def visible(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        place = (row + offset) // self.block_size, key // self.block_size
        return self.pattern[place] if self.pattern.dim() == 2 else self.pattern[(head, *place)]

    def tile_map(self, rows: Tensor, keys: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        cells = self.pattern if self.pattern.dim() == 3 else self.pattern[None]
        starts = self.block_size * torch.arange(self.pattern.shape[-1], device=rows.device)
        ends = starts + self.block_size
        wide = widest_float(rows.device)
        in_rows, in_keys = (  # the number of positions that a tile and a block share, (R, blocks) and (C, blocks)
            (torch.minimum(edges[1:, None], ends) - torch.maximum(edges[:-1, None], starts)).clamp(min=0).to(wide)
            for edges in (rows + offset, keys)
        )
        every, some = (in_rows @ blocks.to(wide) @ in_keys.T for blocks in (cells.all(0), cells.any(0)))
        return every == rows.diff()[:, None] * keys.diff(), some == 0

    def grain(self) -> int:
        return self.block_size

    def check(self, batch_size: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        got = tuple(self.pattern.shape)
        if got[-1] * self.block_size < num_keys or got[:-2] not in ((), (num_heads,)) or num_queries > num_keys:
            n = -(-num_keys // self.block_size)
            raise ValueError(
                f"pattern must have shape (n, n) or ({num_heads}, n, n) with n >= {n} for {num_keys} keys in blocks of "
                f"{self.block_size}, and L <= S; got {got} and L = {num_queries}"
            )

    def size(self) -> tuple[int, int]:
        return self.pattern.shape[-1] * self.block_size, self.pattern.shape[-1] * self.block_size


@dataclass(frozen=True, eq=False, repr=False)
class Combined(Mask):
    """The base of ``And`` and ``Or``. It keeps its dense form, and all layers share it."""

    members: tuple[Mask, ...]
    join: ClassVar[Any]  # combines two bool tensors
    sign: ClassVar[str]

    def __post_init__(self) -> None:
        both = self.join is operator.and_
        # an intersection is causal or sparse if one member is; a union is sparse if all members are, and never causal
        object.__setattr__(self, "is_causality", both and any(member.is_causality for member in self.members))
        object.__setattr__(self, "is_sparse", (any if both else all)(member.is_sparse for member in self.members))

    def visible(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return reduce(self.join, [member.visible(batch, head, row, key, offset) for member in self.members])

    def dense(self, num_queries: int, num_keys: int, **options: object) -> Tensor:
        def build() -> Tensor:
            return reduce(self.join, [member.dense(num_queries, num_keys, **options) for member in self.members])  # type: ignore[arg-type]

        if "rows" in options or "keys" in options:
            return build()
        return self.remember("dense", (num_queries, num_keys, *(options[name] for name in sorted(options))), build)

    def verdict(self, rows: Range, keys: Range) -> tuple[Any, Any]:
        return self._joined([member.verdict(rows, keys) for member in self.members])

    def tile_map(self, rows: Tensor, keys: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        return self._joined([member.tile_map(rows, keys, offset) for member in self.members])

    def _joined(self, verdicts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """An intersection is whole if all members are whole, and empty if one member is empty. A union is the reverse."""
        opposite = operator.or_ if self.join is operator.and_ else operator.and_
        return reduce(self.join, [whole for whole, _ in verdicts]), reduce(opposite, [empty for _, empty in verdicts])

    def grain(self) -> int | None:
        return min((grain for member in self.members if (grain := member.grain())), default=None)

    def check(self, batch_size: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        for member in self.members:
            member.check(batch_size, num_heads, num_queries, num_keys)

    def size(self) -> tuple[int, int] | None:
        known = [size for member in self.members if (size := member.size())]
        if not known:
            return None
        num_keys = max(keys for _, keys in known)
        return next((queries for queries, keys in known if 1 < queries != keys), num_keys), num_keys

    def __repr__(self) -> str:
        return self.sign.join(f"({member!r})" if isinstance(member, Or) else repr(member) for member in self.members)


class And(Combined):
    """The intersection of masks, written ``a & b``: visible where all members allow it."""

    join, sign = operator.and_, " & "

    def parts(self) -> Iterator[Mask]:
        return iter(self.members)


class Or(Combined):
    """The union of masks, written ``a | b``: visible where at least one member allows it."""

    join, sign = operator.or_, " | "


def _count(column: Tensor, edges: Tensor) -> Tensor:
    """Count the True entries of (..., n) between neighbouring edges (m + 1,). Returns (..., m)."""
    return F.pad(column.cumsum(-1), (1, 0))[..., edges].diff()


def _pooled(cells: Tensor, rows: Tensor, keys: Tensor, join: Callable[..., Tensor], neutral: bool) -> Tensor:
    """Apply ``join`` to the cells (L, S) of each tile. Returns bool (R, C)."""
    height, width, L, S = int(rows[1]), int(keys[1]), *cells.shape
    padded = F.pad(cells, (0, -S % width, 0, -L % height), value=neutral)
    return join(join(padded.unflatten(0, (-1, height)).unflatten(2, (-1, width)), dim=3), dim=1)


def _extremes(ids: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest of the ids (B, S) between neighbouring edges (m + 1,), both (B, m)."""
    parts = [ids[:, start:stop].aminmax(dim=-1) for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    return torch.stack([part.min for part in parts], -1), torch.stack([part.max for part in parts], -1)


def require_bool(name: str, tensor: Any) -> None:
    """Raise a TypeError unless ``tensor`` is a bool tensor. The message explains how to convert a mask of another dtype.

    Args:
        name: the argument: ``key_mask``, ``decoder_key_mask``, ``key_padding_mask``, ``pattern``, or another name for a mask of
            queries and keys.
    """
    if isinstance(tensor, Tensor) and tensor.dtype == torch.bool:
        return
    meaning = "hidden" if name == "key_padding_mask" else "real token" if name.endswith("key_mask") else "may attend"
    requirement = f"{name} must be a bool tensor (True = {meaning})"
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{requirement}, got {type(tensor).__name__} ({MASKS_PAGE})")
    advice = f"convert 0 and 1 by .bool() (1 = {meaning})"
    if tensor.is_floating_point() and name != "pattern":
        advice += f", and 0 and -inf by {name} {'!=' if meaning == 'hidden' else '=='} 0"
        advice += "; pass additive values as attn_bias" if meaning == "may attend" else ""
    raise TypeError(f"{requirement}, got {tensor.dtype}: {advice} ({MASKS_PAGE})")


def _check_dense(name: str, tensor: Tensor) -> None:
    """Check the dtype and the number of axes of a mask of queries and keys."""
    require_bool(name, tensor)
    shape = tuple(tensor.shape)
    if len(shape) == 3:
        both = "it could be (B, L, S) or (H, L, S); use (B, 1, L, S) or (1, H, L, S)"
        raise ValueError(f"{name} of shape {shape} is ambiguous: {both} ({MASKS_PAGE})")
    if len(shape) not in (2, 4):
        raise ValueError(f"{name} must have shape (L, S) or (B, H, L, S), got {shape} ({MASKS_PAGE})")


def _as_rule(mask: Tensor | Mask) -> Mask:
    return mask if isinstance(mask, Mask) else Dense(mask)


def as_mask(attn_mask: Tensor | Mask | None, name: str = "attn_mask") -> Mask | None:
    """Convert ``attn_mask`` to a ``Mask``. A bool tensor becomes a ``Dense``. Another dtype raises a TypeError that names ``name``."""
    if attn_mask is not None and not isinstance(attn_mask, Mask) and name != "attn_mask":
        _check_dense(name, attn_mask)
    return None if attn_mask is None else _as_rule(attn_mask)


def intersect(*masks: Tensor | Mask | None) -> Mask | None:
    """Return the intersection of the masks that are not None, or None if there is none.

    Repeated parts are dropped. If one of the masks already contains all the parts, that object is returned, so that layers share
    its dense form.

    >>> print(intersect(Causal(), None, SlidingWindow(1)).grid(2))
    x .
    . x
    """
    present = [mask for mask in map(as_mask, masks) if mask is not None]
    parts = _distinct_masks(part for mask in present for part in mask.parts())
    for mask in present:
        if len(_distinct_masks(mask.parts())) == len(parts):
            return mask
    return And(tuple(parts)) if parts else None


def _distinct_masks(parts: Iterable[Mask]) -> list[Mask]:
    """Drop repeated parts. Two ``Causal`` objects count as one."""
    kept: list[Mask] = []
    for part in parts:
        # not ==: a user's dataclass would compare its tensors
        if not any(part is other or type(part) is type(other) is Causal for other in kept):
            kept.append(part)
    return kept


def simplify(mask: Mask | None, num_queries: int, num_keys: int) -> Mask | None:
    """Drop the parts that hide nothing in a call of this shape: ``Causal`` for one query, or a window as long as the keys.

    It looks at types and shapes only, never at the values of tensors.
    """
    if mask is None:
        return None
    parts = list(mask.parts())
    queries, keys = (num_keys - num_queries, num_keys - 1), (0, num_keys - 1)  # the first and the last position
    is_compiling = torch.compiler.is_compiling()
    kept = []
    for part in parts:
        if is_compiling and type(part) is not Causal:
            hides_nothing = False  # comparing a window with the length would compile a new graph for each length
        else:
            hides_nothing, _ = part.verdict(queries, keys)
        if not hides_nothing:
            kept.append(part)
    if len(kept) == len(parts):
        return mask
    if len(kept) > 1:  # remembered, so that layers share the new mask and its dense form
        members = tuple(kept)
        return mask.remember("simplify", (members,), And, members)
    return kept[0] if kept else None


def _row_lengths(mask: Mask) -> list[Mask]:
    """The masks whose intersection shows the keys that belong to the sequence up to a query."""
    if not isinstance(mask, Combined):
        return [mask] if mask.is_causality or isinstance(mask, Padding | Documents) else []
    lengths = [_row_lengths(member) for member in mask.members]
    if isinstance(mask, And):
        return [length for parts in lengths for length in parts]
    members = (And(tuple(parts)) if parts else member for parts, member in zip(lengths, mask.members, strict=True))
    return [Or(tuple(members))] if any(lengths) else []


def real_key_counts(
    mask: Mask | None, batch_size: int, num_heads: int, num_queries: int, num_keys: int, device: torch.device
) -> Tensor:
    """Return n_i, the length of the sequence up to query i, of shape (B or 1, H or 1, L, 1).

    This is the number of keys that ``Padding``, ``Documents``, and ``Causal`` or ``PrefixLM`` leave visible. Windows and other masks
    do not change the length. In a union, a member of another kind adds the keys that it shows.
    """
    parts = [] if mask is None else _row_lengths(mask)
    if not all(isinstance(part, Padding | Causal) for part in parts):
        cells = And(tuple(parts)).dense(num_queries, num_keys, batch_size=batch_size, num_heads=num_heads, device=device)
        return cells.sum(-1, keepdim=True)
    masks = [part.key_mask for part in parts if isinstance(part, Padding)]
    real = reduce(operator.and_, masks, torch.ones(1, num_keys, dtype=torch.bool, device=device))
    if any(isinstance(part, Causal) for part in parts):
        counts = real.cumsum(-1)[:, num_keys - num_queries :]
    else:
        counts = real.sum(-1, keepdim=True).expand(-1, num_queries)
    return counts[:, None, :, None]


def hides_later(visible: Tensor) -> bool:
    """Return whether a bool mask (..., L, S), True = may attend, hides every later position. This reads the values.

    A mask that is the same for all queries, such as padding, is not causal.

    >>> hides_later(torch.ones(3, 3, dtype=torch.bool).tril()), hides_later(torch.tensor([[True, False], [True, False]]))
    (True, False)
    """
    L, S = visible.shape[-2:]
    if not 1 < L <= S or visible.triu(S - L + 1).any():
        return False
    return bool((visible != visible[..., :1, :]).any())


def from_key_padding_mask(key_padding_mask: Tensor) -> Tensor:
    """Convert torch's ``key_padding_mask`` (True = *hidden*) to a ``key_mask`` (True = real token).

    >>> from_key_padding_mask(torch.tensor([[False, True]])).tolist()
    [[True, False]]
    """
    require_bool("key_padding_mask", key_padding_mask)
    return ~key_padding_mask
