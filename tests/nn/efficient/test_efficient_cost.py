"""Cost grows as claimed, counted in operations and bytes: n, n·w, n·k, against exact attention's n²."""

import functools

import pytest
import torch

from minitx.analysis.meter import Meter, fit_exponent, measure
from minitx.nn import Causal, Documents, Padding, SlidingWindow, reference_attention
from minitx.nn.efficient import (
    BlockSparseAttention,
    LinearAttention,
    LinformerAttention,
    PerformerAttention,
    SlidingWindowAttention,
)

D, SIZES = 8, (512, 1024, 2048)
LINEAR = (0.85, 1.1)
QUADRATIC = (1.9, 2.1)


def exact(query, key, value, *, mask=None):
    return reference_attention(query, key, value, mask=mask, scale=D**-0.5)


def documents(n):
    return Documents((torch.arange(n) // 64)[None])


CASES = {  # what is built for n positions: the core, the mask
    "window": lambda n: (SlidingWindowAttention(64, block_size=32), None),
    "window, causal": lambda n: (SlidingWindowAttention(64, block_size=32), Causal()),
    "window, padding": lambda n: (SlidingWindowAttention(64, block_size=32), Padding(torch.arange(n)[None] < n - 5)),
    "block-sparse, window": lambda n: (BlockSparseAttention(block_size=32), SlidingWindow(64) & Causal()),
    "block-sparse, documents": lambda n: (BlockSparseAttention(block_size=32), documents(n) & Causal()),
    "linear": lambda n: (LinearAttention(), None),
    "linear, causal": lambda n: (LinearAttention(), Causal()),
    "performer": lambda n: (PerformerAttention(D, num_features=16), None),
    "performer, causal": lambda n: (PerformerAttention(D, num_features=16), Causal()),
    "linformer": lambda n: (LinformerAttention(n, 32), None),
    "exact": lambda n: (exact, None),
    "exact, causal": lambda n: (exact, Causal()),
}


def cost(core, mask, n, *, backward):
    leaves = [torch.randn(1, 2, n, D, requires_grad=backward) for _ in range(3)]

    def run():
        out = core(*leaves, mask=mask)
        if backward:
            out.sum().backward()

    return measure(run)


@functools.cache
def growth(name, backward):
    """The exponent in n of each cost of one case."""
    torch.manual_seed(0)
    costs = [cost(*CASES[name](n), n, backward=backward) for n in SIZES]
    return {kind: fit_exponent(SIZES, [one[kind] for one in costs]) for kind in costs[0]}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("kind", ["flops", "cells", "peak"])
@pytest.mark.parametrize("name", CASES)
def test_cost_grows_with_the_claimed_power_of_the_length(name, kind, backward):
    low, high = QUADRATIC if name.startswith("exact") else LINEAR
    assert low < growth(name, backward)[kind] < high


@pytest.mark.parametrize("kind", ["flops", "peak"])
@pytest.mark.parametrize(
    "build",
    [
        lambda size: (SlidingWindowAttention(size, block_size=8), Causal()),
        lambda size: (LinformerAttention(2048, size), None),
        lambda size: (PerformerAttention(D, num_features=size, chunk_size=16), Causal()),
    ],
    ids=["window", "slots", "features"],
)
@pytest.mark.slow
def test_cost_grows_in_proportion_to_window_slots_and_features(build, kind):
    sizes = (64, 128, 256)
    costs = [cost(*build(size), 2048, backward=False)[kind] for size in sizes]
    assert 0.8 < fit_exponent(sizes, costs) < 1.1


def test_block_sparse_attention_multiplies_only_the_tiles_that_hold_a_visible_cell():
    core, n, b = BlockSparseAttention(block_size=16), 160, 16
    for mask in (
        Causal(),
        SlidingWindow(20),
        Documents((torch.arange(n) // 30)[None]) & Causal(),
        Padding(torch.arange(n)[None] < 40),
    ):
        blocks = mask.dense(n, n).expand(1, 1, n, n)[0, 0].unflatten(0, (-1, b)).unflatten(2, (-1, b))
        tiles = int(blocks.any(3).any(1).sum())
        assert cost(core, mask, n, backward=False)["flops"] == tiles * 2 * (2 * b * b * (D + D))  # two heads, q·k and p·v


def test_no_linear_core_holds_a_matrix_of_queries_by_keys():
    n = 2048
    for name, build in CASES.items():
        if not name.startswith("exact"):
            assert cost(*build(n), n, backward=True)["largest"] < n * n / 4, name


def test_the_meter_counts_a_case_worked_out_by_hand():
    x, y = torch.randn(3, 5), torch.randn(5, 7)

    def run():
        z = x @ y  # 21 cells, 84 bytes
        z = z + 1  # 21 more while the first are alive
        z.view(-1).mul_(2)  # in place and a view: nothing
        return z.sum()  # 1 cell, 4 bytes, after the first 84 are gone

    assert measure(run) == {"flops": 2 * 3 * 5 * 7, "cells": 43, "peak": 168, "largest": 21}
    with Meter() as meter:
        run()
    assert meter.live == 0
    assert fit_exponent((1, 10, 100), (3, 300, 30000)) == pytest.approx(2.0)
