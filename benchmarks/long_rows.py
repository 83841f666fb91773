"""Linear attention up to 1,000,000 tokens beside exact attention: seconds and bytes of one causal forward pass on one thread.

The record of docs/looking.md. Float32, one row, one layer between its projections, no gradient. Each measurement has a process of its
own; its memory is the most that the process ever held (``ru_maxrss``) above what it held with its inputs before the call. One call
a length, after a call on 64 tokens, so that there is no interval. ``cpu_seconds`` leave out the time of other processes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from measure import write

from minitx.nn import Causal, DotProductAttention
from minitx.nn.efficient import LinearAttention
from minitx.nn.functional import make_call

LENGTHS = {"linear": (4_096, 16_384, 65_536, 262_144, 1_000_000), "sdpa": (4_096, 16_384, 65_536)}


@torch.no_grad()
def measure_one(kind: str, length: int, heads: int, head_dim: int) -> dict[str, float]:
    """Seconds and bytes of one forward pass in this process."""
    torch.set_num_threads(1)
    core = LinearAttention() if kind == "linear" else DotProductAttention(backend=kind)

    def call(n: int) -> torch.Tensor:
        return core(make_call(*(part[:, :, :n] for part in inputs), Causal()))

    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, length, head_dim) for _ in range(3)]
    call(64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, own = time.perf_counter(), time.process_time()
    out = call(length)
    seconds, own = time.perf_counter() - started, time.process_time() - own
    assert bool(out.isfinite().all())
    held = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    sizes = {"length": length, "bytes": held, "input_bytes": 3 * 4 * heads * length * head_dim}
    return {**sizes, "cpu_seconds": round(own, 3), "seconds": round(seconds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--only", nargs=2, metavar=("KIND", "LENGTH"), help="measure one in this process, print JSON")
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure_one(given.only[0], int(given.only[1]), given.heads, given.head_dim)))
        return
    rows = []
    sizes = ["--heads", str(given.heads), "--head-dim", str(given.head_dim)]
    for kind, lengths in LENGTHS.items():
        for length in lengths:
            command = [sys.executable, __file__, *sizes, "--only", kind, str(length)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append({"kind": kind, **json.loads(done.stdout)})
            print(
                f"| {kind} | {length:,} | {rows[-1]['cpu_seconds']:.2f} s | {rows[-1]['bytes'] / 2**20:,.0f} MiB |", flush=True
            )
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    title = "One causal forward pass of one attention layer, float32, one row"
    about = {"title": title, "threads": 1, "heads": given.heads, "head_dim": given.head_dim, "commit": commit}
    print(write("long_rows", {**about, "lengths": rows}))


if __name__ == "__main__":
    main()
