"""One GPU in one call of at most ten minutes: P1, P4, P5, P6, P8, P9 and P11, with the ceilings of the same run.

    python benchmarks/gpu.py                     # benchmarks/results/gpu.json; needs torch and this checkout; P4 and P11 Lightning, too
    NANOGPT=PATH python benchmarks/gpu.py        # and nanoGPT, from a checkout
    python benchmarks/gpu.py --quick --pairs 4   # tiny sizes on any device: does each part run?
    DEVICE=pretend python benchmarks/gpu.py --quick --pairs 4   # on the pretended accelerator: is a device mixed with the CPU?

The same programs as on a CPU, on bfloat16; the clock waits for the device before and after each block. Tokens are random, never zeros;
memory is ``max_memory_allocated`` after a reset, less what was there before. First of all, the calls of attention of
``tests/lattice/calls.py`` run on the device for two minutes, and are judged by loops on the CPU. The ceilings: a product of two 8192²
matrices of random bfloat16 numbers, and a copy of 4 GiB. Each kernel is held against float64 on a small call before it is timed. P2, P3
and P12 are whole runs: ``quality.py``. A part that fails costs no other part: its traceback is printed, and the exit code is 1. The file
is written after each part, and no part begins after ``--minutes``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from attention import choice, fused
from harness import ROOT, Row, compare, exact, median_interval, over, parser, row, seconds_of, write
from peers import NANOGPT, loss_of, nano_gpt
from step import chunked_loss, most_bytes, probed_over_none, raw_step, trainer_over_loop

from minitx.config import TransformerConfig
from minitx.generation import generate
from minitx.nn import DecoderLM, scaled_dot_product_attention
from minitx.nn.counting import train_flops

DEVICE = os.environ.get("DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE == "pretend":
    from tests import pretend

    pretend.register()
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
        peaks[name] = most_bytes(model, sides[name])

    if NANOGPT:
        theirs = nano_gpt(config, NANOGPT).module
        add("nanoGPT", theirs, partial(compiled(lambda ids, labels: theirs(ids, labels)[1]), ids, labels))
    for name, checkpointing in (("plain", False), ("chunked loss", False), ("chunked loss, checkpointing", True)):
        model = DecoderLM(dataclasses.replace(config, checkpointing=checkpointing))
        whole = compiled(lambda ids, labels, model=model: loss_of(model(ids), labels))  # the loss, too, as nanoGPT's
        chunked = partial(chunked_loss, compiled(model), ids, labels, B * T // 16)
        add(name, model, partial(whole, ids, labels) if name == "plain" else chunked)
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
    """Raise RuntimeError where a small causal call or its gradients are far from float64."""
    half = [torch.randn(2, 3, 37, 64).bfloat16().requires_grad_() for _ in range(3)]
    wide = [t.detach().double().requires_grad_() for t in half]  # the same numbers
    outs = []
    for tensors, name in ((wide, "math"), (half, backend)):
        out = scaled_dot_product_attention(*tensors, is_causal=True, backend=name)
        out.sum().backward()
        outs.append([out, *(t.grad for t in tensors)])
    error = max(float(((a - b.double()).abs().max() / a.abs().max()).detach()) for a, b in zip(*outs, strict=True))  # type: ignore[union-attr]
    if error > 0.03:
        raise RuntimeError(f"{backend} is off by {error:.3f} from float64")


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


def calls(*options: str, limit: float | None) -> dict[str, Any]:
    """The lattice of calls on the device, as a program of its own: its exit code (1: a call is wrong), and what it prints.

    It is killed after ``limit`` seconds.
    """
    command = [sys.executable, str(ROOT / "tests" / "lattice" / "calls.py"), *options]
    with subprocess.Popen(command, env={**os.environ, "DEVICE": DEVICE}, stdout=subprocess.PIPE, text=True) as process:
        watch = None if limit is None else threading.Timer(limit, process.kill)
        if watch is not None:
            watch.start()
        lines = []
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip())
        if watch is not None:
            watch.cancel()
    return {"code": process.returncode, "lines": lines}


def there(part: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows of a part whose tensors are made on the device."""
    with torch.device(DEVICE):
        yield from part()


def attention_parts(pairs: int, quick: bool) -> Iterator[Row]:
    """P5."""
    gate("sdpa")
    for length, wanted in ((64, ">= 9"), (128, ">= 12")) if quick else ((1024, ">= 9"), (8192, ">= 12")):
        yield from fused(pairs, (1 if quick else 2**14 // length, 12, length, 64), {"sdpa": wanted}, torch.bfloat16)


def choice_part(pairs: int, quick: bool, is_over: Callable[[], bool]) -> Iterator[Row]:
    """P6."""
    for backend in ("math", "chunked", *(["flex"] if DEVICE == "cuda" else [])):
        gate(backend)
    yield from choice(pairs, "causal 16" if quick else "", torch.bfloat16, is_over)


def main() -> int:
    parse = parser(__doc__, pairs=8)
    parse.add_argument("--quick", action="store_true", help="tiny sizes, on any device; writes nothing")
    parse.add_argument(
        "--minutes", type=float, default=8.5, help="no part begins later, so that all is done in ten; --quick has no limit"
    )
    options = parse.parse_args()
    quick, pairs = options.quick, options.pairs
    deadline = math.inf if quick else time.monotonic() + 60 * options.minutes
    if DEVICE != "cuda" and not quick:
        sys.exit("error: torch sees no GPU here; --quick tries the script on any device")
    if DEVICE == "cuda":
        torch._dynamo.config.recompile_limit = 64  # each kind of call has a kernel of FlexAttention
    words = [f"trainer.accelerator={'gpu' if DEVICE == 'cuda' else DEVICE}"]
    of_fits: dict[str, Any] = {"rows": 12} if quick else {"rows": 2048}
    most: dict[str, float] = {}
    judged: dict[str, Any] = {}
    failed: dict[str, str] = {}
    rows: list[Row] = []

    def is_over() -> bool:
        return time.monotonic() > deadline

    def judge() -> Iterator[Row]:
        times = ["--limit=3"] if quick else ["--seconds=60"]
        for where in ("backend=!flex", "backend=flex"):  # whose compiler takes seconds a call
            judged[where] = calls("--where", where, *times, limit=None if quick else 120)
            if judged[where]["code"]:
                failed[f"calls, {where}"] = f"exit code {judged[where]['code']}"
        return iter(())

    def measure_ceilings() -> Iterator[Row]:
        most.update(ceilings(*((512, 2**20) if quick else (8192, 2**32))))
        return iter(())

    compilers = {"cuda": torch.compile, "cpu": partial(torch.compile, backend="aot_eager")}
    compiled = compilers.get(DEVICE, lambda function: function)  # the compiler knows no other device
    parts: dict[str, Callable[[], Iterable[Row]]] = {
        "calls": judge,
        "ceilings": partial(there, measure_ceilings),
        "P5": partial(there, partial(attention_parts, pairs, quick)),
        "P8": partial(there, lambda: decoding(TINY if quick else GPT2, *((8, 8) if quick else (256, 256)))),
        "P1 and P9": partial(
            there, lambda: training(pairs, most["flops"], TINY if quick else GPT2, 4 if quick else 64, compiled)
        ),
    }
    if find_spec("lightning") is not None:
        parts["P4"] = lambda: trainer_over_loop(pairs, *words, steps=2 if quick else 50, wanted="<= 1.005", **of_fits)
        parts["P11"] = lambda: probed_over_none(pairs, *words, every=2 if quick else 50, wanted="<= 1.02", **of_fits)
    parts["P6"] = partial(there, partial(choice_part, pairs, quick, is_over))
    for name, part in parts.items():
        started = time.monotonic()
        if is_over():
            failed[name] = f"not begun: {options.minutes:g} minutes were over"
            continue
        torch.manual_seed(0)
        try:
            rows.extend(part())
        except Exception as error:
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
        print(f"# {name}: {time.monotonic() - started:.0f} s", flush=True)
        if DEVICE == "cuda":  # nothing of this part is left in the memory of the next
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
        if not quick:
            write("gpu", rows, device=device(), ceilings=most, calls=judged, failed=failed)
    for name, reason in failed.items():
        print(f"FAILED {name}: {reason}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
