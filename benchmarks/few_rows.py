"""How many times as fast as ``F.linear`` a product in halves (``minitx.nn.FewRows``) is where a matrix meets a few rows, as in decoding.

One matrix after another of as many of a shape as fill 128 MiB, so that each is read from memory and not from a cache, as in a
model; float32, no gradient. The last rows are all matrices of GPT-2's smallest model. ``LEAST_WEIGHTS`` and ``MOST_ROWS`` come from here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from measure import compare, number, row, table, write
from torch import Tensor

from minitx.nn.few_rows import linear_in_halves

SHAPES = [(128, 128), (256, 256), (768, 768), (3072, 768), (768, 3072), (50257, 768)]
GPT2 = [*([(768, 768)] * 4 + [(3072, 768), (768, 3072)]) * 12, (50257, 768)]


def whole(matrices: Sequence[Tensor], num_rows: int) -> None:
    for matrix in matrices:
        F.linear(torch.ones(num_rows, matrix.shape[1]), matrix)


def halves(matrices: Sequence[Tensor], num_rows: int) -> None:
    for matrix in matrices:
        linear_in_halves(torch.ones(num_rows, matrix.shape[1]), matrix)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    given = parser.parse_args()
    sets = {f"{out} x {width}": [(out, width)] * max(1, 2**25 // (out * width)) for out, width in SHAPES} | {
        "GPT-2, 124M": GPT2
    }
    rows = []
    for name, shapes in sets.items():
        matrices = [torch.randn(shape) for shape in shapes]
        size = 4e-9 * sum(matrix.numel() for matrix in matrices)
        for num_rows in given.rows:
            sides = (partial(side, matrices, num_rows) for side in (whole, halves))
            found = compare(*sides, pairs=given.pairs, block=0.1)
            speeds = {f"{side}_gigabytes_per_second": size / found[f"{side}_seconds"] for side in "ab"}
            rows.append(row(f"{name}, {num_rows} row{'s' if num_rows > 1 else ''}", found, None, **speeds))
            print(f"{rows[-1]['name']}: {number(rows[-1]['median'])}, {speeds}", flush=True)
    print(table(rows))
    title = "Products of a matrix with a few rows on a CPU: how many times as fast in halves as whole"
    print(write("few_rows", {"target": "P8", "title": title, "threads": torch.get_num_threads(), "rows": rows}))


if __name__ == "__main__":
    main()
