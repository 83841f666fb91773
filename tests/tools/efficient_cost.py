"""What the efficient cores cost and how far they are from exact attention: the tables of docs/dev/attention_records.md.

Costs are counted, operations and bytes, by ``minitx.nn.counting`` on the cases of the tests that assert them: no seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from minitx.nn import Causal, Mask
from minitx.nn.efficient import LinearAttention, LinformerAttention, PerformerAttention, approximation_error

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "nn"), str(ROOT / "benchmarks")]
from harness import about, save  # noqa: E402
from test_efficient_cost import CASES, growth  # noqa: E402

HEADS, LENGTH, WIDTH, SEEDS = 4, 256, 64, 5
CORES = {
    "`LinearAttention()`": (lambda: LinearAttention(), True),
    "`PerformerAttention(64)`, m = 267": (lambda: PerformerAttention(WIDTH), True),
    "`PerformerAttention(64)`, m = 4096": (lambda: PerformerAttention(WIDTH, num_features=4096), True),
    "`LinformerAttention(256, 64)`, untrained": (lambda: LinformerAttention(LENGTH, 64), False),
}


def error(build: Callable[[], nn.Module], mask: Mask | None, size: float) -> float:
    """Mean over seeds of the relative error; queries and keys of standard deviation ``size``."""
    found = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        q, k, v = torch.randn(3, 1, HEADS, LENGTH, WIDTH).unbind()
        found.append(approximation_error(build(), size * q, size * k, v, mask=mask)["relative_error"])
    return sum(found) / SEEDS


def cell(number: float) -> str:
    """Two digits after the point, or the power of ten."""
    return f"{number:.0e}" if number < 1e-3 else f"{number:.2f}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    costs = [(backward, kind) for backward in (False, True) for kind in ("flops", "peak")]
    exponents = {name: [growth(name, backward)[kind] for backward, kind in costs] for name in CASES}
    print("| case | flops | peak bytes | flops, with backward | peak bytes, with backward |\n|---|---|---|---|---|")
    for name, costs in exponents.items():
        print(f"| {name} | {' | '.join(f'{cost:.2f}' for cost in costs)} |")
    sizes = (0.5, 1.0, 2.0)
    errors = {
        name: [error(build, mask, size) for mask in ((None, Causal()) if causal else (None,)) for size in sizes]
        for name, (build, causal) in CORES.items()
    }
    print(f"\n| core | {' | '.join(f'{size}' for size in sizes)} | {' | '.join(f'{size}, causal' for size in sizes)} |")
    print("|---|---|---|---|---|---|---|")
    for name, numbers in errors.items():
        print(f"| {name} | {' | '.join(map(cell, numbers))} |" + " refused |" * (2 * len(sizes) - len(numbers)))
    save("efficient_cost", {**about(), "exponents": exponents, "relative_errors": errors})


if __name__ == "__main__":
    main()
