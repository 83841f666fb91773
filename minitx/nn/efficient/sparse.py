"""Exact attention on the tiles that hold a visible cell: sliding windows and block-sparse masks.

Queries and keys are cut into blocks of b; a *tile* is one block of queries meeting one block of keys. Only the listed
tiles are computed, all of them in one batched product, and a softmax over each query's tiles joins them:

    m_i = max_tiles max_j z_ij      l_i = Σ_tiles Σ_j exp(z_ij − m_i)      o_i = Σ_tiles Σ_j exp(z_ij − m_i) v_j / l_i

which is softmax attention under the mask, to rounding. Work and memory grow with the number of tiles times b².
Child et al. 2019, arXiv:1904.10509 (block-sparse patterns); Beltagy et al. 2020, arXiv:2004.05150, §3.1 (windows).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minitx.nn.bias import as_bias
from minitx.nn.efficient.base import EfficientAttention
from minitx.nn.functional import AttentionCall, attention_weights
from minitx.nn.masks import And, Causal, Dense, Documents, Mask, Or, Padding, SlidingWindow, intersect

Shape = tuple[int, int, int, int]  # (B, H, L, S)


@dataclass(frozen=True, eq=False)
class Tiles:
    """P tiles: query blocks (P,), key blocks (P,), and the cells that are visible, bool (B or 1, H or 1, P, b or 1, b)."""

    query_block: Tensor
    key_block: Tensor
    visible: Tensor


class BlockSparseAttention(EfficientAttention):
    """softmax(c · QKᵀ) V under any ``Mask``, computing only the b × b tiles in which some query sees some key.

    Equals ``math`` under the same mask, gradients and empty rows (zero) included. Which tiles are needed follows from the
    mask's rule where that is cheap (causal, windows, prefixes, padding, documents and their combinations: (L/b)·(S/b)
    bits), and the cells of those tiles settle the rest; a dense mask or a rule of your own is read cell by cell, L × S
    bools. A tile is computed for all batch rows and heads if one of them needs it. Finding the tiles looks at the mask's
    values once a call, which on an accelerator is one synchronisation.

    Cost: tiles · b² · (D + Dv) multiplications, tiles · b · (b + 2D + Dv) numbers held.

    Args:
        block_size: b, positions in a block.
        dropout: on the weights, in training only. softcap: t in t · tanh(z / t), or None.

    Refuses nothing that ``DotProductAttention`` takes: biases (a rule is evaluated on the tiles, a tensor gathered), sinks,
    soft-cap and dropout are honoured, and ``need_weights`` computes (B, H, L, S) beside the tiles.

    Raises:
        ValueError: ``block_size`` below 1; arguments that do not fit.

    >>> from minitx.nn.masks import Causal
    >>> x = torch.randn(2, 3, 100, 8)
    >>> BlockSparseAttention(block_size=16)(x, x, x, mask=Causal() & SlidingWindow(20)).shape
    torch.Size([2, 3, 100, 8])
    """

    def __init__(self, *, block_size: int = 64, dropout: float = 0.0, softcap: float | None = None) -> None:
        super().__init__(dropout=dropout, softcap=softcap)
        _require_count("block_size", block_size)
        self.block_size = block_size

    def effective_mask(self, mask: Mask | None) -> Mask | None:
        """What is visible: here the mask of the call."""
        return mask

    def tiles(self, mask: Mask | None, shape: Shape, device: torch.device) -> Tiles:
        """The tiles that are computed for a call of ``shape`` = (B, H, L, S) under the effective mask."""

        def find() -> Tiles:
            query_block, key_block = _candidates(mask, shape[2], shape[3], self.block_size, device).nonzero().unbind(1)
            visible = _visible(mask, query_block, key_block, self.block_size, shape)
            needed = visible.sum((0, 1, 3, 4)) > 0
            return Tiles(query_block[needed], key_block[needed], visible[:, :, needed])

        return find() if mask is None else mask.remember("tiles", (shape, self.block_size, device), find)

    def attend(self, call: AttentionCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        Hkv, L, S, b = key.shape[1], *call.shape[2:], self.block_size
        tiles = self.tiles(self.effective_mask(call.mask), call.shape, query.device)
        visible, bias = _grouped(tiles.visible, Hkv), None
        if call.attn_bias is not None:
            index = _indices(tiles.query_block, tiles.key_block, b, call.shape)
            bias = _grouped(as_bias(call.attn_bias).value(*index, S - L), Hkv).to(query.dtype)  # (B|1, Hkv|1, P, G|1, b|1, b|1)
            visible = visible & (bias != -torch.inf)
        k, v = _blocks(key, b), _blocks(value, b)  # (B, Hkv, S/b, b, D)
        seen = visible.any(4).any(3).to(k.dtype)  # (B|1, Hkv|1, P, b)
        seen = seen.new_zeros(*seen.shape[:2], *k.shape[2:4]).index_add(2, tiles.key_block, seen) > 0
        k, v = (x.masked_fill(~seen.unsqueeze(-1), 0.0) for x in (k, v))  # a NaN that no query sees stays where it is
        q = _blocks(query.unflatten(1, (Hkv, -1)), b).movedim(2, 3)  # (B, Hkv, L/b, G, b, D), G = H / Hkv
        out = self._join(q, k, v, replace(tiles, visible=visible), bias, call)  # (B, Hkv, L/b, G, b, Dv)
        return out.movedim(3, 2).flatten(3, 4)[..., :L, :].flatten(1, 2)  # (B, Hkv, G, L, Dv) -> (B, H, L, Dv)

    def _join(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, bias: Tensor | None, call: AttentionCall) -> Tensor:
        """Scores of each tile, then one softmax over all the tiles of a query block."""
        rows, columns, hidden = tiles.query_block, tiles.key_block, ~tiles.visible
        grouped = q[:, :, rows].flatten(3, 4)  # (B, Hkv, P, G * b, D): a group's query heads share the product
        scores = (grouped @ k[:, :, columns].transpose(-1, -2)).unflatten(3, q.shape[3:5])  # (B, Hkv, P, G, b, b)
        scores = scores * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        scores = scores if bias is None else scores + bias
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        top = scores.new_full(q.shape[:-1], torch.finfo(scores.dtype).min)  # (B, Hkv, L/b, G, b)
        index = rows.view(-1, 1, 1).expand(*scores.shape[:-1])
        top = top.scatter_reduce(2, index, scores.detach().amax(-1), "amax")
        sink = None if call.sinks is None else call.sinks.to(top.dtype).view(q.shape[1], 1, q.shape[3], 1)
        if sink is not None:
            top = torch.maximum(top, sink.detach())
        parts = (scores - top[:, :, rows].unsqueeze(-1)).exp().masked_fill(hidden, 0.0)
        total = torch.zeros_like(top).index_add(2, rows, parts.sum(-1))
        if sink is not None:
            total = total + (sink - top).exp()
        if call.dropout_p > 0.0:
            parts = F.dropout(parts, call.dropout_p)
        sums = (parts.flatten(3, 4) @ v[:, :, columns]).unflatten(3, q.shape[3:5])  # (B, Hkv, P, G, b, Dv)
        out = sums.new_zeros(*q.shape[:-1], v.shape[-1]).index_add(2, rows, sums)
        return out / total.masked_fill(total == 0, 1.0).unsqueeze(-1)

    def attend_weights(self, call: AttentionCall) -> Tensor:
        return attention_weights(call.query, call.key, **{**call.terms, "mask": self.effective_mask(call.mask)})

    def extra_repr(self) -> str:
        return f"block_size={self.block_size}, {super().extra_repr()}"


class SlidingWindowAttention(BlockSparseAttention):
    """softmax(c · QKᵀ) V over the keys nearer than ``window``: |i + S − L − j| < window, and whatever the mask leaves of them.

    With ``Causal()`` in the mask, as in every decoder, a query sees ``window`` keys including its own; without it the
    window reaches both ways, 2 · window − 1 keys. Equals ``math`` under ``SlidingWindow(window) & mask``. The tiles follow
    from the shapes alone: nothing is read back from the device.

    Cost: about L · (window + b) · (D + Dv) multiplications and L · (window + b) numbers held, twice the window without
    ``Causal()``: linear in L.

    Args:
        window: number of visible keys including the query's own.
        block_size: b; default the window's size, at most 64. Smaller wastes less at the edges, larger has fewer products.
        dropout: on the weights, in training only. softcap: t in t · tanh(z / t), or None.

    Any mask intersects with the window; biases, sinks, soft-cap, dropout and ``need_weights`` are honoured.

    Raises:
        ValueError: ``window`` or ``block_size`` below 1; arguments that do not fit.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(12, 3, core=SlidingWindowAttention(window=16))
    >>> attention(torch.randn(2, 50, 12), is_causal=True).shape
    torch.Size([2, 50, 12])
    """

    def __init__(
        self, window: int, *, block_size: int | None = None, dropout: float = 0.0, softcap: float | None = None
    ) -> None:
        _require_count("window", window)
        super().__init__(block_size=min(window, 64) if block_size is None else block_size, dropout=dropout, softcap=softcap)
        self.window = window

    def effective_mask(self, mask: Mask | None) -> Mask | None:
        """The mask of the call within the window."""
        return intersect(SlidingWindow(self.window), mask)

    def tiles(self, mask: Mask | None, shape: Shape, device: torch.device) -> Tiles:
        L, S, b, reach = shape[2], shape[3], self.block_size, self.window - 1
        ahead = 0 if mask is not None and any(isinstance(part, Causal) for part in mask.parts()) else reach
        first, last = (S - L - reach) // b, (S - L + b - 1 + ahead) // b  # key blocks of query block 0; of block i, i more
        query_block = torch.arange(-(-L // b)).unsqueeze(1).expand(-1, last - first + 1)
        key_block = query_block + torch.arange(first, last + 1)
        exists = (key_block >= 0) & (key_block < -(-S // b))
        # compiled, the edges of the band are computed and hidden: how many exist would tie the graph to one length
        chosen = (x.flatten() if torch.compiler.is_compiling() else x[exists] for x in (query_block, key_block, exists))
        query_block, key_block, exists = (x.to(device) for x in chosen)
        key_block = key_block.clamp(0, -(-S // b) - 1)
        visible = _visible(mask, query_block, key_block, b, shape) & exists.view(-1, 1, 1)
        return Tiles(query_block, key_block, visible)

    def extra_repr(self) -> str:
        return f"window={self.window}, {super().extra_repr()}"


def _require_count(name: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{name} must be a positive whole number, got {number!r}")


def _blocks(tensor: Tensor, block_size: int) -> Tensor:
    """(..., length, D) -> (..., length / b, b, D), the last block filled up with zeros."""
    # compiled, at least one position is added: whether none is missing would cost a guard, and a graph
    missing = block_size - tensor.shape[-2] % block_size if torch.compiler.is_compiling() else -tensor.shape[-2] % block_size
    return F.pad(tensor, (0, 0, 0, missing)).unflatten(-2, (-1, block_size))


def _grouped(cells: Tensor, num_kv_heads: int) -> Tensor:
    """(B or 1, H or 1, P, b, b) -> (B or 1, Hkv or 1, P, G or 1, b, b)."""
    return cells.unsqueeze(3) if cells.shape[1] == 1 else cells.unflatten(1, (num_kv_heads, -1)).movedim(2, 3)


def _indices(query_block: Tensor, key_block: Tensor, block_size: int, shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch, head, row and key of each tile's cells, broadcastable to (B, H, P, b, b), as rules want them.

    Past the last row or key they repeat it.
    """
    B, H, L, S = shape
    device = query_block.device
    inside = torch.arange(block_size, device=device)
    row = (query_block.view(-1, 1, 1) * block_size + inside.view(-1, 1)).clamp(max=L - 1)
    key = (key_block.view(-1, 1, 1) * block_size + inside).clamp(max=S - 1)
    batch, head = torch.arange(B, device=device).view(-1, 1, 1, 1, 1), torch.arange(H, device=device).view(1, -1, 1, 1, 1)
    return batch, head, row[None, None], key[None, None]


def _visible(mask: Mask | None, query_block: Tensor, key_block: Tensor, block_size: int, shape: Shape) -> Tensor:
    """The mask's rule on each tile's cells: bool (B or 1, H or 1, P, b or 1, b), False past the last key."""
    L, S = shape[2:]
    place = key_block.view(-1, 1, 1) * block_size + torch.arange(block_size, device=key_block.device)
    exists = (place < S)[None, None]  # (1, 1, P, 1, b)
    return exists if mask is None else exists & mask.visible(*_indices(query_block, key_block, block_size, shape), S - L)


def _candidates(mask: Mask | None, L: int, S: int, b: int, device: torch.device) -> Tensor:
    """Bool (L/b, S/b): False only where the mask hides the whole tile from every batch row and head.

    Without reading L × S cells, except of a dense mask; a rule that knows nothing about tiles leaves every one to be read.
    """
    rows, keys = ([slice(i, min(i + b, length)) for i in range(0, length, b)] for length in (L, S))
    match mask:
        case And(members=members):
            return torch.stack([_candidates(member, L, S, b, device) for member in members]).all(0)
        case Or(members=members):
            return torch.stack([_candidates(member, L, S, b, device) for member in members]).any(0)
        case Padding(key_mask=key_mask):
            real = _blocks(key_mask.any(0).unsqueeze(-1).float(), b).amax((-1, -2)) > 0  # (S/b,)
            return real.expand(len(rows), -1)
        case Documents(ids=ids):  # two blocks share a document only if their ranges of ids meet
            spans = []
            for start, blocks in ((S - L, rows), (0, keys)):
                index = (start + torch.arange(len(blocks) * b, device=device)).clamp(max=S - 1)
                spans.append(ids[:, index].unflatten(1, (-1, b)).aminmax(dim=-1))  # (B, L/b), (B, S/b)
            own, other = spans
            return ((own.min.unsqueeze(2) <= other.max.unsqueeze(1)) & (other.min.unsqueeze(1) <= own.max.unsqueeze(2))).any(0)
        case Dense(tensor=tensor):
            cells = tensor.flatten(0, -3).any(0) if tensor.dim() > 2 else tensor
            some = _blocks(cells.expand(L, S).float(), b).amax(1)  # (L/b, S): S columns of L/b blocks of b rows
            return _blocks(some.T, b).amax(1).T > 0
    open_tiles = [[mask is None or mask.covers(row, key, S - L) is not False for key in keys] for row in rows]
    return torch.tensor(open_tiles, device=device)
