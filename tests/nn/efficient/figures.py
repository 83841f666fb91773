"""The tables of docs/efficient.md, measured: ``python tests/nn/efficient/figures.py``."""

import platform
from datetime import date

import torch
from test_efficient_cost import CASES, growth

from minitx.nn import Causal
from minitx.nn.efficient import (
    BlockSparseAttention,
    LinearAttention,
    LinformerAttention,
    PerformerAttention,
    SlidingWindowAttention,
    approximation_error,
)

HEADS, LENGTH, WIDTH, SEEDS = 4, 256, 64, 5
CORES = {
    "`BlockSparseAttention()`": (lambda: BlockSparseAttention(), True),
    "`SlidingWindowAttention(64)`": (lambda: SlidingWindowAttention(64), True),
    "`LinearAttention()`": (lambda: LinearAttention(), True),
    "`PerformerAttention(64)`, m = 267": (lambda: PerformerAttention(WIDTH), True),
    "`PerformerAttention(64)`, m = 4096": (lambda: PerformerAttention(WIDTH, num_features=4096), True),
    "`LinformerAttention(256, 64)`, untrained": (lambda: LinformerAttention(LENGTH, 64), False),
}


def error(build, mask, size):
    found = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        q, k, v = torch.randn(3, 1, HEADS, LENGTH, WIDTH).unbind()
        found.append(approximation_error(build(), size * q, size * k, v, mask=mask)["relative_error"])
    return sum(found) / SEEDS


def cell(number):
    return f"{number:.0e}" if number < 1e-3 else f"{number:.2f}"


def main():
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()} CPU, {date.today()}\n")
    print("| case | flops | peak bytes | flops, with backward | peak bytes, with backward |\n|---|---|---|---|---|")
    for name in CASES:
        costs = [growth(name, backward)[kind] for backward in (False, True) for kind in ("flops", "peak")]
        print(f"| {name} | {' | '.join(f'{cost:.2f}' for cost in costs)} |")
    sizes = (0.5, 1.0, 2.0)
    print(f"\n| core | {' | '.join(f'{size}' for size in sizes)} | {' | '.join(f'{size}, causal' for size in sizes)} |")
    print("|---|---|---|---|---|---|---|")
    for name, (build, causal) in CORES.items():
        numbers = [error(build, None, size) for size in sizes]
        numbers += [error(build, Causal(), size) for size in sizes] if causal else []
        print(f"| {name} | {' | '.join(map(cell, numbers))} |" + ("" if causal else " refused |" * len(sizes)))


if __name__ == "__main__":
    main()
