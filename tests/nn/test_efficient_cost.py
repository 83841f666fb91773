"""Cost grows as claimed, counted in operations and bytes: n, n·w, n·k, against exact attention's n²."""

import pytest
import torch

from minitx.nn import BlockSparse, Causal, SlidingWindow, scaled_dot_product_attention
from minitx.nn.counting import allocations, count_flops, fit_exponent
from minitx.nn.efficient import LinearAttention, LinformerAttention, PerformerAttention
from minitx.nn.functional import make_call

D, SIZES = 8, (512, 2048)
LINEAR = (0.85, 1.1)
QUADRATIC = (1.9, 2.1)


def by_backend(backend, mask):
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, mask, backend=backend)


def by_core(core, mask=None):
    return lambda q, k, v: core(make_call(q, k, v, mask))


def band(n):
    """Blocks of 64 that see themselves and the block before."""
    blocks = torch.arange(n // 64)
    return BlockSparse((blocks[:, None] - blocks).abs() <= 1, 64) & Causal()


CASES = {  # what is built for n positions
    "window": lambda n: by_backend("chunked", SlidingWindow(64) & Causal()),
    "block window": lambda n: by_backend("chunked", band(n)),
    "linear": lambda n: by_core(LinearAttention()),
    "linear, causal": lambda n: by_core(LinearAttention(), Causal()),
    "performer": lambda n: by_core(PerformerAttention(D, num_features=16)),
    "performer, causal": lambda n: by_core(PerformerAttention(D, num_features=16), Causal()),
    "linformer": lambda n: by_core(LinformerAttention(n, 32)),
    "exact": lambda n: by_backend("math", None),
    "exact, chunked": lambda n: by_backend("chunked", None),
}


def cost(attention, n, *, backward):
    """Operations, the most bytes at once, and the bytes of the largest allocation."""
    leaves, found = [torch.randn(1, 2, n, D, requires_grad=backward) for _ in range(3)], []

    def run():
        out = attention(*leaves)
        if backward:
            out.sum().backward()

    flops = count_flops(lambda: found.extend(allocations(run)))
    return {"flops": flops, "largest": found[0], "peak": found[1]}


def growth(name, backward):
    """The exponents of operations and bytes, and the largest tensor at the longest size as a share of queries by keys."""
    sizes = [2 * n for n in SIZES] if "window" in name else SIZES  # of a few tiles, the two at the ends are many
    costs = [cost(CASES[name](n), n, backward=backward) for n in sizes]
    exponents = {kind: fit_exponent(sizes, [one[kind] for one in costs]) for kind in ("flops", "peak")}
    return {**exponents, "share": costs[-1]["largest"] / sizes[-1] ** 2}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("window", "linear, causal", "exact"))) for name in CASES],
)
def test_cost_grows_with_the_claimed_power_of_the_length_and_no_tensor_is_a_matrix_of_queries_by_keys(name):
    found = growth(name, backward=True)
    low, high = QUADRATIC if name.startswith("exact") else LINEAR
    assert low < found["flops"] < high
    if "window" in name or name == "exact, chunked":
        assert found["peak"] < LINEAR[1]  # a tile, and the output
    else:
        assert low < found["peak"] < high
    assert (found["share"] >= 1) == (name == "exact")
