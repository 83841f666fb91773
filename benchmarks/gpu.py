"""One GPU in one call of at most ten minutes: P1, P4, P5, P6, P8, P9 and P11, with the ceilings of the same run.

    python benchmarks/gpu.py                     # benchmarks/results/gpu.json; needs torch and this checkout; P4 and P11 Lightning, too
    NANOGPT=PATH python benchmarks/gpu.py        # and nanoGPT, from a checkout
    python benchmarks/gpu.py --quick             # tiny sizes on any device: does it run?

The same programs as on a CPU, on bfloat16; the clock waits for the device before and after each block. Tokens are random, never zeros; peak
memory is ``max_memory_allocated`` after a reset. The ceilings: a product of two 8192² matrices of random bfloat16 numbers, and a copy
of 4 GiB. Each kernel is held against float64 on a small call before it is timed. P2, P3 and P12 are whole runs: ``quality.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from attention import choice, fused
from harness import Row, compare, exact, median_interval, over, parser, peak, row, seconds_of, write
from peers import NANOGPT, loss_of, nano_gpt
from step import chunked_loss, probed_over_none, raw_step, trainer_over_loop

from minitx.analysis.counting import train_flops
from minitx.config import TransformerConfig
from minitx.generation import generate
from minitx.nn import DecoderLM, scaled_dot_product_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPT2 = TransformerConfig(vocab_size=50304, embed_dim=768, num_heads=12, num_layers=12, max_len=1024, bias=False)
TINY = TransformerConfig(vocab_size=512, embed_dim=64, num_heads=2, num_layers=2, max_len=64, bias=False)


def several(work: Any, blocks: int, calls: int) -> dict[str, float]:
    """Seconds of a call: median over blocks of ``calls``."""
    work()
    return median_interval([seconds_of(lambda: [work() for _ in range(calls)]) / calls for _ in range(blocks)])


def ceilings(n: int, size: int) -> dict[str, float]:
    """FLOP/s of a bfloat16 product of n x n matrices and bytes/s of a copy of ``size`` bytes."""
    a, b = torch.randn(2, n, n, dtype=torch.bfloat16)
    source = torch.empty(size, dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    product, copy = several(lambda: a @ b, 10, 20)["median"], several(lambda: target.copy_(source), 10, 20)["median"]
    return {"flops": 2 * n**3 / product, "bytes": 2 * size / copy}


def training(pairs: int, flops: float, config: TransformerConfig, B: int, compiled: Any) -> Iterator[Row]:
    """P1 and P9: GPT-2, compiled; ours plain, with a chunked loss, and with checkpointing besides."""
    T, V = config.max_len, config.vocab_size or 0
    ids, labels = torch.randint(V, (2, B, T))
    narrow = torch.autocast(DEVICE, torch.bfloat16)
    sides, peaks = {}, {}

    def add(name: str, model: Any, loss: Any) -> None:
        sides[name] = raw_step(model, narrow(loss))
        sides[name]()  # compiles
        peaks[name] = peak(sides[name])

    if NANOGPT:
        theirs = nano_gpt(config, NANOGPT).module
        run = compiled(theirs)
        add("nanoGPT", theirs, lambda: run(ids, labels)[1])
    for name, checkpointing in (("plain", False), ("chunked loss", False), ("chunked loss, checkpointing", True)):
        model = DecoderLM(dataclasses.replace(config, checkpointing=checkpointing))
        ours = compiled(model)
        plain = partial(lambda ours: loss_of(ours(ids), labels), ours)
        add(name, model, plain if name == "plain" else partial(chunked_loss, ours, ids, labels, B * T // 16))
    label, took = f"{config.num_layers} x {config.embed_dim}, {B} x {T}, compiled, bfloat16", several(sides["plain"], 10, 3)
    ceiling = train_flops(config, T) * B / flops
    yield row("P1", "share of the matrix product's ceiling", label, over(ceiling, took), ">= 0.57", peak_bytes=peaks)
    yield row("P1", "thousand tokens a second", label, over(B * T / 1e3, took), None)
    for name in sides if NANOGPT else ():
        found = compare(sides["nanoGPT"], sides[name], pairs=pairs, block=1.0)
        if name == "plain":
            yield row("P1", "raw loop over nanoGPT", label, found, ">= 1.25")
        elif name != "nanoGPT":
            yield row("P9", f"speed over nanoGPT's, {name}", label, found, ">= 0.97")
            yield row("P9", f"peak memory over nanoGPT's, {name}", label, exact(peaks[name] / peaks["nanoGPT"]), "<= 0.45")


def gate(backend: str) -> None:
    """End the benchmark where a small causal call or its gradients are far from float64."""
    half = [torch.randn(2, 3, 37, 64).bfloat16().requires_grad_() for _ in range(3)]
    wide = [t.detach().double().requires_grad_() for t in half]  # the same numbers
    outs = []
    for tensors, name in ((wide, "math"), (half, backend)):
        out = scaled_dot_product_attention(*tensors, is_causal=True, backend=name)
        out.sum().backward()
        outs.append([out, *(t.grad for t in tensors)])
    error = max(float(((a - b.double()).abs().max() / a.abs().max()).detach()) for a, b in zip(*outs, strict=True))  # type: ignore[union-attr]
    if error > 0.03:
        raise SystemExit(f"error: {backend} is off by {error:.3f} from float64")


def decoding(config: TransformerConfig, prompt: int, new: int) -> Iterator[Row]:
    """P8: greedy decoding with a cache, batch 1, bfloat16 weights."""
    model = DecoderLM(config).eval().to(torch.bfloat16)
    ids = torch.randint(config.vocab_size or 1, (1, prompt))
    took = several(partial(generate, model, ids, max_new_tokens=new, stop=()), 5, 1)
    yield row("P8", "tokens a second", f"{prompt} + {new} tokens, bfloat16", over(new, took), None)


def device() -> str:
    """The device, its driver, clocks and power."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return DEVICE


def main() -> None:
    parse = parser(__doc__, pairs=8)
    parse.add_argument("--quick", action="store_true", help="tiny sizes, on any device; writes nothing")
    given = parse.parse_args()
    quick, pairs = given.quick, given.pairs
    if DEVICE == "cpu" and not quick:
        sys.exit("error: torch sees no GPU here; --quick tries the script on any device")
    torch.manual_seed(0)
    rows: list[Row] = []
    with torch.device(DEVICE):
        most = ceilings(*((512, 2**20) if quick else (8192, 2**32)))
        config, B, compiled = (TINY, 4, lambda model: model) if quick else (GPT2, 64, torch.compile)
        rows += training(pairs, most["flops"], config, B, compiled)
        gate("sdpa")
        for length, wanted in ((64, ">= 9"), (128, ">= 12")) if quick else ((1024, ">= 9"), (8192, ">= 12")):
            rows += fused(pairs, (1 if quick else 2**14 // length, 12, length, 64), {"sdpa": wanted}, torch.bfloat16)
        rows += decoding(config, *((8, 8) if quick else (256, 256)))
        rows += choice(pairs, "causal 16" if quick else "", torch.bfloat16)
    if DEVICE == "cuda" and find_spec("lightning") is not None:
        rows += [*trainer_over_loop(pairs, 50, 2048, "<= 1.005"), *probed_over_none(pairs, rows=2048, wanted="<= 1.02")]
    if not quick:
        write("gpu", rows, device=device(), ceilings=most)


if __name__ == "__main__":
    main()
