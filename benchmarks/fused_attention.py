"""P5: forward and backward of causal attention, T = 1024, float32: ``sdpa`` and ``chunked`` beside ``math``, in time and memory.

Queries, keys and values have the shape of a small model's, the backward pass is that of the sum. Time: ``measure.compare``. Memory: the
most bytes that torch's allocator gave at once (``minitx.analysis.counting.allocations``), inside kernels too; a count, so it has no interval.
Targets: ``sdpa`` at least 2.5 times as fast with at most an eighth of the peak; ``chunked`` an eighth of the peak in at most 1.3
times the time. The plain path of torch's kernel (``torch.nn.attention.sdpa_kernel``) stands beside them for comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable

import torch
from measure import compare, inverse, judged, write
from torch.nn.attention import SDPBackend, sdpa_kernel

from minitx.analysis.counting import allocations
from minitx.nn import scaled_dot_product_attention

PLAIN = "sdpa's plain path"
WANTED = {"sdpa": (">= 2.5", "<= 0.125"), "chunked": (None, "<= 0.125"), PLAIN: (None, None)}
SLOWDOWN = {"chunked": "<= 1.3"}


def work(backend: str, tensors: list[torch.Tensor]) -> Callable[[], None]:
    """One forward and backward pass."""

    def run() -> None:
        for tensor in tensors:
            tensor.grad = None
        with sdpa_kernel(SDPBackend.MATH) if backend == PLAIN else contextlib.nullcontext():
            name = "sdpa" if backend == PLAIN else backend
            scaled_dot_product_attention(*tensors, is_causal=True, backend=name).sum().backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"batch": 4, "heads": 8, "length": 1024, "head-dim": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pairs", type=int, default=20)
    given = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler counts bytes here, and says so otherwise
    torch.manual_seed(0)
    shape = given.batch, given.heads, given.length, given.head_dim
    tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    plain = work("math", tensors)
    plain()  # gradients are there, and what a first call loads
    (_, plain_peak), rows = allocations(plain), []
    print(f"math: peak {plain_peak / 2**20:.1f} MiB\n\n| what | median | 95 % | wanted |\n|---|---|---|---|")
    for backend, (faster, smaller) in WANTED.items():
        ours = work(backend, tensors)
        ours()
        peak = allocations(ours)[1]
        share = dict.fromkeys(("median", "low", "high"), peak / plain_peak)
        timed = compare(plain, ours, pairs=given.pairs)
        control = {name: timed[name] for name in ("control", "control_holds", "a_seconds", "b_seconds", "pairs")}
        if backend in SLOWDOWN:
            rows.append(judged(f"{backend} / math, time", inverse(timed["ratio"]), SLOWDOWN[backend], **control))
        else:
            rows.append(judged(f"{backend} over math, speed", timed["ratio"], faster, **control))
        rows.append(judged(f"{backend} / math, peak memory", share, smaller, peak_bytes=peak))
        for row in rows[-2:]:
            print(f"| {row['name']} | {row['median']:.3f} | {row['low']:.3f} to {row['high']:.3f} | {row['wanted'] or ''} |")
    title = f"Causal attention, forward + backward, {given.length} tokens: backends beside math"
    results = {"target": "P5", "title": title, "rows": rows, "threads": torch.get_num_threads(), **vars(given)}
    print(write("fused_attention_cpu", {**results, "math_peak_bytes": plain_peak}))


if __name__ == "__main__":
    main()
