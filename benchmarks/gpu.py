"""The GPU's numbers in one call of at most ten minutes: ceilings, training, kernels, the choice of a kernel, decoding.

    python benchmarks/gpu.py                     # benchmarks/results/gpu.json; needs torch and this checkout, no other package
    python benchmarks/gpu.py --nanogpt PATH      # and nanoGPT beside, from a checkout
    python benchmarks/gpu.py --quick             # tiny sizes on any device: does it run?

Times are CUDA events, medians over blocks; tokens are random, never zeros; peak memory is ``max_memory_allocated`` after a reset. The
ceilings (a product of two 8192² matrices of random bfloat16 numbers, a copy of 4 GiB) are measured in the same run. Each kernel
is held against float64 on a small call before it is timed. P4 needs
Lightning: ``python benchmarks/trainer_tax.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from kernel_choice import KINDS, work
from measure import judged, median_interval, seconds_of, table, write
from torch import Tensor, nn

from minitx.analysis.flops import train_flops
from minitx.config import TransformerConfig
from minitx.generation import CompiledDecoder, generate
from minitx.nn import DecoderLM, explain_backends, scaled_dot_product_attention
from minitx.training.objectives import chunked_cross_entropy

GPT2 = TransformerConfig(
    vocab_size=50304, embed_dim=768, num_heads=12, num_layers=12, max_len=1024, activation="gelu_tanh", bias=False
)
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def timed(run: Callable[[], object], *, blocks: int = 10, block: float = 0.3, warm: int = 3) -> dict[str, float]:
    """Seconds of one call: median over blocks, with its interval."""
    for _ in range(warm):
        run()
    repeats = max(1, math.ceil(block / max(_block(run, 1), 1e-6)))
    return median_interval([_block(run, repeats) / repeats for _ in range(blocks)])


def _block(run: Callable[[], object], repeats: int) -> float:
    if not ON_GPU:
        return seconds_of(lambda: [run() for _ in range(repeats)])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """Bytes at most allocated inside, once it is over."""
    found: list[int] = []
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield found
    found.append(torch.cuda.max_memory_allocated() if ON_GPU else 0)


def ceilings(quick: bool) -> dict[str, float]:
    """FLOP/s of a bfloat16 product and bytes/s of a copy."""
    n, size = (512, 2**24) if quick else (8192, 2**32)
    a, b = torch.randn(2, n, n, device=DEVICE, dtype=torch.bfloat16).unbind()
    product = timed(lambda: a @ b)["median"]
    source = torch.empty(size, device=DEVICE, dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    copy = timed(lambda: target.copy_(source))["median"]
    return {"flops": 2 * n**3 / product, "bytes": 2 * size / copy}


# --- training (P1, P9)


def trainer_of(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A training step under bfloat16 autocast with fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value

    return step


def training(rows: list[dict[str, Any]], ceiling: float, nanogpt: Path | None, quick: bool) -> dict[str, Any]:
    """Tokens a second and peak memory of GPT-2 124M, compiled; ours plain and with a chunked loss, nanoGPT's."""
    config = dataclasses.replace(GPT2, vocab_size=512, embed_dim=64, num_heads=2, num_layers=2, max_len=64) if quick else GPT2
    B, T, V = (4, 64, 512) if quick else (64, 1024, 50304)
    ids, labels = torch.randint(V, (2, B, T), device=DEVICE).unbind()
    found: dict[str, Any] = {}

    def measure(name: str, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        step = trainer_of(model, loss)
        began = time.perf_counter()
        with peak() as bytes_of:
            first = float(step())
        compiled = time.perf_counter() - began
        seconds = timed(step, blocks=10, block=1.0)
        found[name] = {"loss": first, "first_step_seconds": compiled, "peak_bytes": bytes_of[0], "step_seconds": seconds}
        found[name]["tokens_per_second"] = B * T / seconds["median"]
        print(name, found[name], flush=True)

    def ours(name: str, chunk: int | None, **options: Any) -> None:
        torch.manual_seed(0)
        model = DecoderLM(dataclasses.replace(config, **options)).to(DEVICE)
        run = model if quick else torch.compile(model)

        def plain() -> Tensor:
            return F.cross_entropy(run(ids).flatten(0, 1), labels.flatten())

        def chunked() -> Tensor:
            hidden, _ = run(ids, return_extras=True)
            return (
                chunked_cross_entropy(hidden, model.head.weight, None, labels, chunk_tokens=chunk or 1)["loss"] / labels.numel()
            )

        measure(name, model, plain if chunk is None else chunked)

    ours("minitx", None)
    ours("minitx, chunked loss", B * T // 16)
    ours("minitx, chunked loss and checkpointing", B * T // 16, checkpointing=True)
    if nanogpt is not None:
        sys.path.insert(0, str(nanogpt))
        from model import GPT, GPTConfig

        sizes = {"block_size": T, "vocab_size": V, "n_layer": config.num_layers, "n_head": config.num_heads}
        theirs = GPT(GPTConfig(**sizes, n_embd=config.embed_dim, dropout=0.0, bias=False)).to(DEVICE)
        run = theirs if quick else torch.compile(theirs)
        measure("nanoGPT", theirs, lambda: run(ids, labels)[1])
    rows.extend(training_rows(found, ceiling, B * T, train_flops(config, T) / T))
    return found


def training_rows(found: dict[str, Any], ceiling: float, tokens: int, flops: float) -> list[dict[str, Any]]:
    """P1 and P9, of what ``training`` found: ``tokens`` a step, ``flops`` a token, ``ceiling`` operations a second."""
    rows = []
    speed = found["minitx"]["step_seconds"]
    share = {k: flops * tokens / v / ceiling for k, v in speed.items()}
    rows.append(judged("P1: share of the product's ceiling, GPT-2 124M", _upside(share), ">= 0.57"))
    rows.append(judged("P1: thousand tokens a second", _upside({k: tokens / v / 1e3 for k, v in speed.items()}), ">= 565"))
    if "nanoGPT" in found:
        theirs_seconds = found["nanoGPT"]["step_seconds"]["median"]
        rows.append(judged("P1: over nanoGPT", _upside({k: theirs_seconds / v for k, v in speed.items()}), ">= 1.25"))
        for name in [name for name in found if "chunked" in name]:
            ratio = found[name]["peak_bytes"] / max(1, found["nanoGPT"]["peak_bytes"])
            rows.append(judged(f"P9: peak memory over nanoGPT's, {name}", _exact(ratio), "<= 0.45"))
            pace = theirs_seconds / found[name]["step_seconds"]["median"]
            rows.append(judged(f"P9: speed over nanoGPT's, {name}", _exact(pace), ">= 0.97"))
    return rows


# --- kernels (P5, P6)


def gate(backend: str) -> float:
    """The largest error of a small causal call and its gradients against float64, relative to the largest number."""
    torch.manual_seed(1)
    exact = [torch.randn(2, 3, 37, 64, device=DEVICE, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    half = [t.detach().to(torch.bfloat16).requires_grad_() for t in exact]
    exact = [t.detach().double().requires_grad_() for t in half]  # the same numbers
    worst, outs = 0.0, []
    for tensors, name in ((exact, "math"), (half, backend)):
        out = scaled_dot_product_attention(*tensors, is_causal=True, backend=name)
        out.sum().backward()
        outs.append([out, *(t.grad for t in tensors)])
    for a, b in zip(*outs, strict=True):
        worst = max(worst, float((a - b.double()).abs().max() / a.abs().max()))  # type: ignore[union-attr]
    return worst


def fused(rows: list[dict[str, Any]], quick: bool) -> dict[str, Any]:
    """P5: auto over math, forward and backward, causal, bfloat16."""
    found: dict[str, Any] = {"gate": {}}
    for length, wanted in ((64, None), (128, None)) if quick else ((1024, ">= 9"), (8192, ">= 12")):
        B = max(1, 16 * 1024 // length) if not quick else 1
        tensors = [torch.randn(B, 12, length, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        ran = next(r.name for r in explain_backends(*tensors, is_causal=True) if r.runs)
        found["gate"][ran] = gate(ran)
        if found["gate"][ran] > 0.03:
            raise SystemExit(f"error: {ran} is off by {found['gate'][ran]:.3f} from float64")
        seconds, bytes_of = {}, {}
        for name in ("math", "auto"):
            run = work(tensors, {"is_causal": True}, name)
            with peak() as most:
                run()
            seconds[name], bytes_of[name] = timed(run), most[0]
        ratios = {k: seconds["math"]["median"] / v for k, v in seconds["auto"].items()}
        rows.append(judged(f"P5: {ran} over math, {B} x {length}", _upside(ratios), wanted))
        found[str(length)] = {"ran": ran, "seconds": seconds, "peak_bytes": bytes_of}
    return found


def choice(rows: list[dict[str, Any]], quick: bool) -> dict[str, Any]:
    """P6: auto's time over the best backend's; the best is chosen on other blocks than it is measured on."""
    found: dict[str, Any] = {}
    for name, kind in list(KINDS.items())[: 2 if quick else None]:
        tensors, options = kind.call()
        tensors = [t.detach().to(DEVICE, torch.bfloat16 if ON_GPU else t.dtype).requires_grad_(kind.grad) for t in tensors]
        options = {k: _moved(v) for k, v in options.items()}
        reports = [report for report in explain_backends(*tensors, **options) if report.can]
        first, second = (
            {r.name: timed(work(tensors, options, r.name), blocks=5, block=0.05)["median"] for r in reports} for _ in range(2)
        )
        auto = next(r.name for r in reports if r.runs)
        best = min(first, key=first.__getitem__)
        found[name] = {"auto": auto, "best": best, "ratio": second[auto] / second[best], "seconds": second}
        print(name, found[name], flush=True)
    ratios = [one["ratio"] for one in found.values()]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    rows.append(judged("P6: regret of auto, geometric mean", _exact(mean), "<= 1.03"))
    rows.append(judged("P6: regret of auto, worst kind", _exact(max(ratios)), "<= 1.10"))
    return found


def _moved(option: Any) -> Any:
    """An option's tensors on the device; masks and biases are rebuilt from theirs."""
    if isinstance(option, Tensor | nn.Module):
        return option.to(DEVICE)
    for name, value in vars(option).items() if hasattr(option, "__dict__") else ():
        if isinstance(value, Tensor):
            object.__setattr__(option, name, value.to(DEVICE))
    return option


# --- decoding (P8)


def decoding(rows: list[dict[str, Any]], quick: bool) -> dict[str, Any]:
    """Tokens a second of greedy decoding with a cache, batch 1, 256 + 256 tokens, bfloat16 weights: the model, and compiled."""
    config = dataclasses.replace(GPT2, vocab_size=512, embed_dim=64, num_heads=2, num_layers=2) if quick else GPT2
    prompt, new = (8, 8) if quick else (256, 256)
    model = DecoderLM(config).to(DEVICE, torch.bfloat16).eval()
    ids = torch.randint(config.vocab_size or 1, (1, prompt), device=DEVICE)
    writers = {"as it is": model, "compiled, one CUDA graph": CompiledDecoder(model)}
    found: dict[str, Any] = {}
    answers = []
    for name, writer in writers.items():
        answer = partial(generate, writer, ids, max_new_tokens=new, stop=())
        first = seconds_of(lambda answer=answer: answers.append(answer()[0]))  # compiles
        seconds = timed(answer, blocks=5, block=0.5, warm=1)
        rate = {k: new / v for k, v in seconds.items()}
        rows.append(judged(f"P8: tokens a second, greedy, batch 1, {name}", _upside(rate), ">= 4000"))
        found[name] = {"first": first, "seconds": seconds, "tokens_per_second": rate["median"]}
    # in bfloat16 two ids may be equally likely but for rounding, and after the first difference the texts part
    found["equal_ids"] = (answers[0] == answers[1]).float().mean().item()
    model.float()
    short = {"max_new_tokens": min(new, 32), "stop": ()}
    if not torch.equal(generate(model, ids, **short)[0], generate(CompiledDecoder(model), ids, **short)[0]):
        raise SystemExit("error: in float32 the compiled step writes other ids than the model")
    return found


def _upside(ratios: dict[str, float]) -> dict[str, float]:
    """A ratio made by dividing by an interval: its ends have changed places."""
    low, high = sorted((ratios["low"], ratios["high"]))
    return {"median": ratios["median"], "low": low, "high": high}


def _exact(value: float) -> dict[str, float]:
    return dict.fromkeys(("median", "low", "high"), value)


def about() -> dict[str, Any]:
    """The device, its clocks and what drives it."""
    if not ON_GPU:
        return {"device": "cpu"}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return {"device": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()}
    return {"device": torch.cuda.get_device_name()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, on any device; writes nothing")
    given = parser.parse_args()
    if not ON_GPU and not given.quick:
        sys.exit("error: torch sees no GPU here; --quick tries the script on any device")
    if given.nanogpt is not None and not (given.nanogpt / "model.py").is_file():
        sys.exit(f"error: --nanogpt {given.nanogpt} holds no model.py")
    began, rows = time.perf_counter(), list[dict[str, Any]]()
    found: dict[str, Any] = {**about(), "ceilings": ceilings(given.quick)}
    found["training"] = training(rows, found["ceilings"]["flops"], given.nanogpt, given.quick)
    found["fused"] = fused(rows, given.quick)
    found["decoding"] = decoding(rows, given.quick)
    found["choice"] = choice(rows, given.quick)
    print("\n" + table(rows))
    found |= {"seconds": time.perf_counter() - began}
    if not given.quick:
        print(write("gpu", {"target": "P1", "title": f"On one GPU: {found['device']}", "rows": rows, **found}))


if __name__ == "__main__":
    main()
