"""P12: a grid of small runs through the run axis, against the same runs one after another. Target on one GPU: 20 times.

The runs are those of one arm of ``configs/ablation/gpu.yaml``: rates x seeds, kv-lookup, one layer with d_k 256. A is the
ordinary trainer, one run after another; B is ``train_stack`` with all runs at once. Both count whole: data, building, training,
validation. In each pair A makes ``--block`` of the R runs, another part of them each time, and counts R / block times; all R
one after another are timed once, to show that this is fair. Stacks of one run tell how much of the ratio is not the axis but
what a stack leaves out (Lightning's loop, a row of ``metrics.csv`` and a device sync a step). Equality comes first.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from measure import in_pairs, judged, median_interval, write

from minitx.ablation.stacked import train_stack
from minitx.config import (
    CallbacksConfig,
    KeyValueDataConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
    TransformerConfig,
)
from minitx.training.run import train

TARGET, TOLERANCE = 20.0, 1e-9
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


def grid_runs(num_rates: int, num_seeds: int, width: int, steps: int) -> list[RunConfig]:
    """Rates x seeds of the arm inv_sqrt, as the cells of the grid have them."""
    model = TransformerConfig(
        embed_dim=width, num_heads=1, num_layers=1, ffn_dim=128, max_len=32, init="lecun", activation="relu", position="none",
        tie_embeddings=False,
    )  # fmt: skip
    trainer = TrainerConfig(max_steps=steps, threads=1, val_every=0, val_batch_size=256, log_every=1, ckpt_every=0)
    base = RunConfig(
        model=model,
        data=KeyValueDataConfig(),
        schedule=ScheduleConfig(warmup_steps=steps // 20),
        trainer=trainer,
        callbacks=CallbacksConfig(progress=False),
        on_nonfinite="record",
    )
    pairs = itertools.product(range(num_seeds), RATES[:num_rates])
    return [replace(base, seed=seed, optimizer=OptimizerConfig(lr=lr)) for seed, lr in pairs]


def one_after_another(configs: Sequence[RunConfig]) -> list[dict[str, object]]:
    """Each run by the ordinary trainer, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return [train(config, Path(folder) / str(i)) for i, config in enumerate(configs)]


def largest_difference(configs: Sequence[RunConfig]) -> float:
    """Of every loss and norm of three runs, five steps in float64, between the two sides."""
    runs = [replace(c, trainer=replace(c.trainer, precision="64-true", max_steps=5)) for c in configs]
    runs = [replace(run, schedule=ScheduleConfig(warmup_steps=2)) for run in runs]
    found = 0.0
    for ours, theirs in zip(train_stack(runs), one_after_another(runs), strict=True):
        numbers = [torch.tensor([[0.0, r["val_loss"], 0.0], *r["curve"]], dtype=torch.float64) for r in (ours, theirs)]
        found = max(found, float((numbers[0] - numbers[1]).abs().max()))
    return found


def seconds_of(work: Callable[[], object]) -> float:
    """Wall seconds; both sides end by reading their losses from the device."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def blocks(configs: Sequence[RunConfig], size: int) -> Iterator[list[RunConfig]]:
    """``size`` of the runs after each other, round and round."""
    endless = itertools.cycle(configs)
    while True:
        yield list(itertools.islice(endless, size))


def ratios(a: Callable[[], object], b: Callable[[], object], pairs: int, factor: float = 1.0) -> dict[str, float]:
    """Median of ``factor`` x seconds of ``a`` / seconds of ``b`` over the pairs, with its 95 % interval."""
    first, second = in_pairs(lambda: seconds_of(a), lambda: seconds_of(b), pairs)
    logs = median_interval([float(torch.tensor(factor * x / y).log()) for x, y in zip(first, second, strict=True)])
    interval = {name: float(torch.tensor(value).exp()) for name, value in logs.items()}
    return {**interval, "a_seconds": median_interval(first)["median"], "b_seconds": median_interval(second)["median"]}


def measured(
    configs: list[RunConfig], block: int, pairs: int
) -> tuple[dict[str, dict[str, float]], tuple[float, float], int | None]:
    """The ratios, the seconds of all runs once on each side, and the peak memory of the stack on a GPU."""
    part = blocks(configs, block)
    sides: dict[str, Callable[[], object]] = {
        "one after another": lambda: one_after_another(next(part)),
        "stacks of one": lambda: [train_stack([config]) for config in next(part)],
        "one stack": lambda: train_stack(configs),
    }
    for work in sides.values():
        work()  # kernels are loaded, pages are touched
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        train_stack(configs)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    table = {}
    for name, other, factor in (
        ("one after another", "one stack", len(configs) / block),
        ("stacks of one", "one stack", len(configs) / block),
        ("one after another", "one after another", 1.0),
    ):
        label = "control: A / A" if name == other else f"{name} / {other}"
        table[label] = ratios(sides[name], sides[other], pairs, factor)
    return table, (seconds_of(lambda: one_after_another(configs)), seconds_of(sides["one stack"])), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="d_k, with one head")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--block", type=int, default=1, help="runs that the one side makes in a pair")
    parser.add_argument("--pairs", type=int, default=20)
    given = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    configs = grid_runs(given.rates, given.seeds, given.width, given.steps)
    R = len(configs)
    difference = largest_difference([configs[0], configs[min(1, R - 1)], configs[-1]])
    print(f"{R} runs of {given.steps} steps, d_k {given.width}, on {device}, torch {torch.__version__}")
    print(f"largest difference to the ordinary trainer in float64: {difference:.1e}")
    if not difference <= TOLERANCE:
        sys.exit(f"the two sides do not agree to {TOLERANCE}: nothing to measure")

    table, whole, peak = measured(configs, given.block, given.pairs)
    print("\n| ratio | median | 95 % | A, s | B, s |\n|---|---|---|---|---|")
    for label, row in table.items():
        interval = f"{row['low']:.2f} to {row['high']:.2f}"
        print(f"| {label} | {row['median']:.2f} | {interval} | {row['a_seconds']:.2f} | {row['b_seconds']:.2f} |")
    wanted = f">= {TARGET:g}" if device != "cpu" else None  # the target speaks of a GPU
    rows = [
        judged(label, {name: row[name] for name in ("median", "low", "high")}, wanted if i == 0 else None)
        for i, (label, row) in enumerate(table.items())
    ]
    met = table["one after another / one stack"]["low"] >= TARGET
    print(f"\nall {R}, once: {whole[0]:.1f} s one after another, {whole[1]:.1f} s stacked: {whole[0] / whole[1]:.2f}")
    print(f"peak memory of the stack: {'not measured on a CPU' if peak is None else f'{peak / 2**20:.0f} MiB'}")
    print(f"target {TARGET:g} on a GPU: {'met' if met else 'not met'} on {device}")
    results = {
        "target": "P12",
        "title": f"{R} small runs through the run axis over one after another, {device}",
        "rows": rows,
        "device": device,
        "runs": R,
        **vars(given),
        "target_ratio": TARGET,
        "met": met,
        "largest_difference_float64": difference,
        "ratios": table,
        "whole_once_seconds": {"one after another": whole[0], "one stack": whole[1]},
        "peak_bytes": peak,
    }
    print(write(f"run_axis_{'cpu' if device == 'cpu' else 'gpu'}", results))


if __name__ == "__main__":
    main()
