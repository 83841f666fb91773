"""What one layer's attention costs between its projections, by formula: one function for every kind of core.

Letters: B batch, H query heads, G of them a key head, L length (queries and keys alike), D head_dim, m features, k slots,
b side of a tile, w window; q = B·H·L·D, k = B·(H/G)·L·D. A *matrix* is B·H·L·L numbers of four bytes.

Operations are exact. Bytes are leading terms in float32, read off each core's own lines: what autograd keeps of them, and
what is alive beside it at the worst moment. That peak is an estimate: within 15 % for ``math`` and ``sdpa``, within a factor
of 1.5 for the others (``tests/analysis/test_cost.py``); where ``sdpa`` leaves its fused kernel, or a bias or a soft-cap is
evaluated tile by tile, it is farther off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.nn.backends import explain_backends
from minitx.nn.backends.chunked import tile_sizes
from minitx.nn.bias import Bias, as_bias
from minitx.nn.functional import AttentionCall
from minitx.nn.masks import Causal, Mask, SlidingWindow, intersect
from minitx.nn.models.parts import build_attention_core, build_bias

FLOAT = 4


def mean_visible(length: int, window: int | None, *, causal: bool) -> float:
    """How many keys a query sees on average in a row of ``length`` tokens.

    >>> mean_visible(4, None, causal=True), mean_visible(4, 2, causal=False)
    (2.5, 2.5)
    """
    w = length if window is None else min(window, length)
    before = sum(min(i + 1, w) for i in range(length)) / length  # a query's own key included
    return before if causal else 2 * before - 1


@dataclass(frozen=True)
class AttentionShape:
    """One attention call as a model of ``config`` makes it: ``length`` queries and keys, causal or not, cross or self."""

    config: TransformerConfig
    batch_size: int
    length: int
    causal: bool
    cross: bool = False
    training: bool = True

    @property
    def window(self) -> int | None:
        """Visible keys, or None where the window hides nothing."""
        window = None if self.cross else self.config.window
        if isinstance(window, tuple):
            raise ValueError(f"window={list(window)}: there is a formula for one window in all layers only")
        return None if window is None or window >= self.length else window

    @property
    def bias(self) -> str | None:
        """``alibi``, ``t5`` or None."""
        return self.config.position if self.config.position in ("alibi", "t5") and not self.cross else None

    @property
    def hides(self) -> bool:
        """Whether there is a mask, or what is handled as one."""
        return self.causal or self.window is not None or self.bias is not None

    @property
    def heads(self) -> int:
        """B · H."""
        return self.batch_size * self.config.num_heads

    @property
    def rows(self) -> int:
        """B · H · L."""
        return self.heads * self.length

    @property
    def q(self) -> int:
        """Numbers of the queries."""
        return self.rows * self.config.width_per_head

    @property
    def k(self) -> int:
        """Numbers of the keys; of the values too."""
        return self.batch_size * self.config.kv_heads * self.length * self.config.width_per_head

    @property
    def cells(self) -> int:
        """Scores: B · H · L · L."""
        return self.rows * self.length

    @property
    def needed(self) -> int:
        """Forward operations of exact attention under the mask: q·k and p·v for every visible pair."""
        pairs = self.rows * mean_visible(self.length, self.window, causal=self.causal)
        return round(4 * self.config.width_per_head * pairs)

    @property
    def mask(self) -> Mask | None:
        """The mask that the model builds."""
        window = None if self.window is None else SlidingWindow(self.window)
        return intersect(Causal() if self.causal else None, window)

    def attn_bias(self) -> Bias | None:
        """The bias that the model builds, with a table of its own."""
        bias = None if self.cross else build_bias(self.config, decoder=self.causal)
        return None if bias is None else as_bias(bias)

    def sinks(self) -> Tensor | None:
        """Sinks, where the model has them."""
        return torch.zeros(self.config.num_heads, requires_grad=True) if self.config.sinks else None


class CoreCost(NamedTuple):
    """Of one layer's core. ``forward`` and ``backward``: operations. ``reads``: numbers of queries, keys and values that wait
    for the backward pass; ``keeps``: further bytes that do, outputs left out; ``outputs``: of B·H·L·D numbers that do, the
    one that ``out_proj`` reads included. ``working``: most bytes at once that the core adds in a forward pass by itself,
    and that the backward pass adds to what was kept.
    """

    forward: int
    backward: int
    reads: int
    keeps: int
    outputs: int
    working: tuple[int, int]


def running_core(shape: AttentionShape) -> str:
    """What serves the call: the kind of an efficient core, or ``math``, ``sdpa`` or ``chunked`` as ``explain_backends`` says.

    Where ``sdpa`` leaves its fused kernel, it is called ``sdpa, plain``, torch's plain path.

    Raises:
        ValueError: a backend that cannot serve the call, with its reason, or of which no formula is known.
    """
    config = shape.config
    if isinstance(config.attention, str) and config.attention in _CORES:
        return config.attention
    if config.attention != "exact":
        raise ValueError(f"attention={config.attention} has no formula here")
    query, key = (
        torch.empty(()).expand(shape.batch_size, heads, shape.length, config.width_per_head)
        for heads in (config.num_heads, config.kv_heads)
    )
    options = {"softcap": config.softcap, "sinks": shape.sinks(), "attn_bias": shape.attn_bias(), "backend": config.backend}
    dropout = config.dropout if shape.training else 0.0
    lines = explain_backends(query, key, key, shape.mask, dropout, **options)  # type: ignore[arg-type]
    chosen = next((line for line in lines if line.runs), None)
    if chosen is None:
        reason = next((line.reason for line in lines if line.name == config.backend), "")
        raise ValueError(f"backend={config.backend} cannot serve this call: {reason}")
    name = "sdpa, plain" if chosen.name == "sdpa" and not chosen.fused else chosen.name
    if name not in _CORES:
        raise ValueError(f"backend={chosen.name} has no formula here; math, sdpa and chunked have one")
    return name


def core_cost(shape: AttentionShape) -> CoreCost:
    """The cost of whatever ``running_core`` names.

    >>> config = TransformerConfig(embed_dim=12, num_heads=3, backend="math")
    >>> core_cost(AttentionShape(config, batch_size=2, length=5, causal=True)).forward == 4 * 2 * 3 * 5 * 5 * 4
    True
    """
    return _CORES[running_core(shape)](shape)


def attention_cost(shape: AttentionShape) -> tuple[int, int]:
    """(operations, peak bytes) of one attention call by itself, with its backward pass where ``shape.training``."""
    cost = core_cost(shape)
    if not shape.training:
        return cost.forward, cost.working[0]
    kept = cost.keeps + cost.outputs * FLOAT * shape.q
    return cost.forward + cost.backward, max(cost.working[0], kept + cost.working[1])


def attention_call(shape: AttentionShape) -> Callable[[], None]:
    """The call that ``attention_cost`` is about, on random queries, keys and values laid out as a layer hands them on."""
    config, training = shape.config, shape.training
    core: nn.Module = build_attention_core(config).train(training)
    leaves = [
        torch.randn(shape.batch_size, shape.length, heads, config.width_per_head, requires_grad=training)
        for heads in (config.num_heads, config.kv_heads, config.kv_heads)
    ]
    options: dict[str, Any] = {"mask": shape.mask, "attn_bias": shape.attn_bias(), "sinks": shape.sinks()}

    def run() -> None:
        with torch.set_grad_enabled(training):
            dropout_p = config.dropout if training else 0.0
            query, key, value = (leaf.transpose(1, 2) for leaf in leaves)
            call = AttentionCall(query, key, value, softcap=config.softcap, dropout_p=dropout_p, **options)
            out = core(replace(call, scale=config.width_per_head**-0.5))
            if training:
                out.backward(torch.ones(()).expand_as(out))

    return run


def _rule(shape: AttentionShape) -> int:
    """Bytes at once while a dense mask is evaluated from its rule, in whole numbers of eight bytes."""
    wide = 44 if shape.bias == "t5" else 17 if shape.window is not None or shape.bias else 10 if shape.causal else 0
    return wide * shape.length**2


def _math(shape: AttentionShape) -> CoreCost:
    """Kept: exp, weights, and exp again where something is hidden; of the mask, two bools a cell, and T5's buckets."""
    config, matrix, hides = shape.config, FLOAT * shape.cells, shape.hides
    dropout = config.dropout if shape.training else 0.0
    matrices = 2 + hides + (config.softcap is not None) + (dropout > 0.0)
    dense = shape.length**2 * (config.num_heads if shape.bias else 1)  # cells of the mask
    forward = 4 * config.width_per_head * shape.cells
    # keys and values of a group are spelled out for each of its heads
    reads = shape.q + 2 * (shape.q if config.kv_heads < config.num_heads else shape.k)
    keeps = matrix * matrices + 2 * dense * hides + 8 * shape.length**2 * (shape.bias == "t5") + FLOAT * shape.rows
    alone = matrix * (3 + hides) + dense * (2 * hides + FLOAT * (shape.bias is not None))
    return CoreCost(forward, 2 * forward, reads, keeps, 1, (max(_rule(shape), alone), 4 * matrix + FLOAT * reads))


def _plain(shape: AttentionShape) -> CoreCost:
    """``math``'s products in torch's plain path. Kept: the weights, with dropout its factors and what it left; of a bias that
    learns, its numbers before they were limited, two bools a cell, and T5's buckets."""
    learns, dropout = shape.bias == "t5", shape.training and shape.config.dropout > 0.0
    bias = (6 * shape.config.num_heads + 8) * shape.length**2 * learns
    return _math(shape)._replace(keeps=FLOAT * shape.cells * (1 + 2 * dropout) + bias)


def _sdpa(shape: AttentionShape) -> CoreCost:
    """Kept: one number a row. Whatever is neither plain nor causal alone is one dense float mask."""
    masked = shape.window is not None or shape.bias is not None
    dense = shape.length**2 * (shape.config.num_heads if shape.bias else 1) * masked
    forward = 4 * shape.config.width_per_head * shape.cells
    reads, row = shape.q + 2 * shape.k, FLOAT * shape.rows
    alone = max(_rule(shape) * masked, 14 * dense * (shape.bias is not None), FLOAT * shape.q + row)
    return CoreCost(forward, 5 * forward // 2, reads, row + FLOAT * dense, 1, (alone, FLOAT * reads))


def _chunked(shape: AttentionShape) -> CoreCost:
    """Kept: the output and two numbers a row; worked on: a few tiles of at most 2^19 scores, whatever L is."""
    L, D = shape.length, shape.config.width_per_head
    height, width, most = tile_sizes(shape.mask, (shape.batch_size, shape.config.num_heads, L, L))
    cells = shape.heads * tiled_cells(L, height, width, window=shape.window, causal=shape.causal)
    width = most if width < most else width  # neighbouring tiles are multiplied together
    tile, reads = FLOAT * shape.heads * height * width, shape.q + 2 * shape.k
    before = tile * min(L - width, width) // width  # while a tile is computed, the one before is still there
    capped = 2 * tile * (shape.config.softcap is not None)
    alone = tile * (1 + shape.hides) + before + 3 * FLOAT * shape.q
    beside = 3 * tile + 2 * before + capped + FLOAT * (3 * shape.q + 2 * shape.k)
    outputs = 2 if shape.config.num_heads > 1 else 1
    return CoreCost(4 * D * cells, 10 * D * cells, reads, 2 * FLOAT * shape.rows, outputs, (alone, beside))


def tiled_cells(length: int, height: int, width: int, *, window: int | None, causal: bool) -> int:
    """Cells of the height × width tiles of a length × length matrix in which some query sees some key.

    >>> tiled_cells(4, 2, 2, window=None, causal=True), tiled_cells(6, 2, 2, window=2, causal=False)
    (12, 28)
    """
    cells = 0
    for row in range(0, length, height):
        end = min(row + height, length)  # the rows of this strip; the keys of its first and last one:
        first = 0 if window is None else max(0, row - window + 1)
        last = end if causal else length if window is None else min(length, end - 1 + window)
        cells += (end - row) * (min(length, -(-last // width) * width) - first // width * width)
    return cells


def _kernelised(shape: AttentionShape) -> CoreCost:
    """Kept: a few tensors of L × D and L × m; where causal, for each chunk of c positions two c × c squares and a state too."""
    config, L, D, c = shape.config, shape.length, shape.config.width_per_head, 64
    performer = config.attention == "performer"
    m = (config.num_features or int(D * log(max(D, 2))) + 1) if performer else D
    positions, key_positions, state = shape.rows, shape.batch_size * config.kv_heads * L, m * (D + 1)
    projection = 2 * D * m * (positions + key_positions) * performer
    meet, gain = 2 * positions * state, 2 * key_positions * state
    near = unused = chunked = square = 0
    if shape.causal:
        chunks = [min(c, L - start) for start in range(0, L, c)]
        near = 2 * shape.heads * sum(size * size for size in chunks) * (m + D + 1)
        unused = gain * chunks[-1] // L  # nobody asks for the state after the last chunk
        grouped = positions * (config.kv_heads < config.num_heads)  # its keys and values are spelled out for each head
        square = 3 * shape.heads * min(c, L) ** 2
        chunked = min(c, L) * (positions + key_positions) + grouped * (m + D + 1)
        chunked += len(chunks) * (grouped + key_positions) // L * state
    forward = projection + meet + gain + near
    backward = projection + 2 * (meet + gain - unused + near)  # the projection is not learned
    phi_q, phi_k, value = positions * m, key_positions * m, key_positions * (D + 1)
    if performer:
        numbers, reads = shape.q + shape.k + phi_q + 2 * phi_k + value, 0
    else:
        numbers, reads = 2 * shape.q + shape.k + 2 * phi_q + 2 * phi_k + value + (phi_k + value) * shape.causal, shape.k
    working = FLOAT * (2 * (phi_q + phi_k + shape.q + shape.k) + square), 5 * FLOAT * shape.q
    return CoreCost(forward, backward, reads, FLOAT * (numbers + chunked), 2, working)


def _linformer(shape: AttentionShape) -> CoreCost:
    """Kept: queries, keys, values, and weights over k slots twice."""
    config, D = shape.config, shape.config.width_per_head
    slots = config.num_slots or 0
    cells, mixed = shape.rows * slots, shape.batch_size * config.kv_heads * slots * D
    forward = 4 * shape.k * slots + 4 * D * cells
    reads, keeps = shape.q + 2 * shape.k, FLOAT * (2 * cells + 2 * mixed)
    working = FLOAT * (3 * cells + shape.q), FLOAT * 4 * cells
    return CoreCost(forward, 2 * forward, reads, keeps, 1, working)


_CORES: dict[str, Callable[[AttentionShape], CoreCost]] = {
    "math": _math,
    "sdpa": _sdpa,
    "sdpa, plain": _plain,
    "chunked": _chunked,
    "linear": _kernelised,
    "performer": _kernelised,
    "linformer": _linformer,
}
