"""P6: what ``backend=auto`` costs beside the best backend of each call: the regret of the choice, over kinds of call, float32.

For each kind every backend that can serve it runs in turn, forwards and backwards through the list by turns, in blocks; one pass through
the list is a round. The backend that looks best in some rounds looks better than it is there (the winner's curse), so
the rounds are dealt into two halves: the best of one half is compared with auto's choice in the other, and the other way
round. Where auto chose that backend the ratio is 1, as it is the same measurement. Targets: geometric mean at most 1.03, the worst kind at
most 1.10. Calls with a backward pass are timed with it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measure import judged, ratio_interval, seconds_of, write
from torch import Tensor

from minitx.nn import ALiBi, Documents, Padding, SlidingWindow, T5RelativeBias, explain_backends, scaled_dot_product_attention

MEAN, WORST = "<= 1.03", "<= 1.10"


@dataclass(frozen=True)
class Kind:
    """A kind of call: lengths, what is asked for, and whether there is a backward pass."""

    L: int
    S: int
    options: Callable[[Kind], dict[str, Any]]
    grad: bool = True
    B: int = 4
    H: int = 4
    Hkv: int = 4
    D: int = 32
    Dv: int = 32

    def call(self) -> tuple[list[Tensor], dict[str, Any]]:
        shapes = (self.H, self.L, self.D), (self.Hkv, self.S, self.D), (self.Hkv, self.S, self.Dv)
        return [torch.randn(self.B, *shape, requires_grad=self.grad) for shape in shapes], self.options(self)


def causal(kind: Kind) -> dict[str, Any]:
    return {"is_causal": True}


def plain(kind: Kind) -> dict[str, Any]:
    return {}


def padded(kind: Kind) -> dict[str, Any]:
    lengths = torch.linspace(kind.S // 4, kind.S, kind.B).long()
    return {"attn_mask": Padding(torch.arange(kind.S)[None] < lengths[:, None])}


def documents(kind: Kind) -> dict[str, Any]:
    return {"attn_mask": Documents((torch.arange(kind.S) * 5 // kind.S).expand(kind.B, -1)), "is_causal": True}


def window(kind: Kind) -> dict[str, Any]:
    return {"attn_mask": SlidingWindow(64), "is_causal": True}


def alibi(kind: Kind) -> dict[str, Any]:
    return {"attn_bias": ALiBi(kind.H), "is_causal": True}


def t5(kind: Kind) -> dict[str, Any]:
    return {"attn_bias": T5RelativeBias(kind.H)}


def dropout(kind: Kind) -> dict[str, Any]:
    return {"dropout_p": 0.1, "is_causal": True}


def softcap(kind: Kind) -> dict[str, Any]:
    return {"softcap": 30.0, "is_causal": True}


def sinks(kind: Kind) -> dict[str, Any]:
    return {"sinks": torch.zeros(kind.H, requires_grad=kind.grad), "is_causal": True}


KINDS = {
    **{f"causal {n}": Kind(n, n, causal, B=max(1, min(16, 4096 // n))) for n in (16, 64, 256, 1024, 2048)},
    "full 512": Kind(512, 512, plain),
    "padded 128": Kind(128, 128, padded),
    "padded 512": Kind(512, 512, padded),
    "documents 512": Kind(512, 512, documents),
    "window 64 of 256": Kind(256, 256, window),
    "window 64 of 2048": Kind(2048, 2048, window, B=1),
    "alibi 512": Kind(512, 512, alibi),
    "t5 128": Kind(128, 128, t5),
    "t5 1024": Kind(1024, 1024, t5, B=1),
    "grouped 512": Kind(512, 512, causal, Hkv=1),
    "dropout 64": Kind(64, 64, dropout),
    "dropout 512": Kind(512, 512, dropout),
    "soft-cap 128": Kind(128, 128, softcap),
    "soft-cap 1024": Kind(1024, 1024, softcap, B=1),
    "wide values 512": Kind(512, 512, causal, Dv=64),
    "no gradient 512": Kind(512, 512, causal, grad=False),
    "cross 64 to 512, padded": Kind(64, 512, padded),
    "decoding 1 of 512, padded": Kind(1, 512, padded, grad=False),
    "decoding 1 of 512, sinks": Kind(1, 512, sinks, grad=False),
}


def work(tensors: list[Tensor], options: dict[str, Any], backend: str) -> Callable[[], None]:
    def run() -> None:
        out = scaled_dot_product_attention(*tensors, **options, backend=backend)
        if out.requires_grad:
            out.sum().backward()

    return run


def several(run: Callable[[], None], times: int) -> None:
    for _ in range(times):
        run()


def measured(kind: Kind, rounds: int, block: float) -> tuple[str, dict[str, list[float]]]:
    """What auto chooses, and the seconds of every backend that can serve the call, round by round."""
    torch.manual_seed(0)
    tensors, options = kind.call()
    reports = [report for report in explain_backends(*tensors, **options) if report.can]
    runs = {report.name: work(tensors, options, report.name) for report in reports}
    repeats = {}
    for name, run in runs.items():
        run()
        repeats[name] = max(1, math.ceil(block / min(seconds_of(run) for _ in range(3))))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        for name in list(runs)[:: 1 if index % 2 == 0 else -1]:
            seconds[name].append(seconds_of(partial(several, runs[name], repeats[name])) / repeats[name])
    return next(report.name for report in reports if report.runs), seconds


def regret(auto: str, seconds: dict[str, list[float]]) -> tuple[list[float], list[str]]:
    """Auto's seconds over those of the best backend of the other half, a round; and the best of either half."""
    rounds = range(len(seconds[auto]))
    halves = [[i for i in rounds if i // 2 % 2 == half] for half in (0, 1)]  # rounds run forwards and backwards in each
    best = [min(seconds, key=lambda name: statistics.median(seconds[name][i] for i in half)) for half in halves]
    ratios = [seconds[auto][i] / seconds[best[1 - half]][i] for half in (0, 1) for i in halves[half]]
    return ratios, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="rounds: passes through the backends of a kind, a multiple of 4")
    parser.add_argument("--block", type=float, default=0.05, help="seconds that a backend runs in a round")
    parser.add_argument("--only", default="", help="kinds whose name holds this")
    given = parser.parse_args()
    if given.pairs < 4 or given.pairs % 4:
        parser.error(f"--pairs={given.pairs} must be a multiple of 4: two halves of rounds in both directions")
    rows, all_ratios = [], []
    print("| kind | auto | best, by halves | regret | 95 % | seconds |\n|---|---|---|---|---|---|")
    for name, kind in KINDS.items():
        if given.only not in name:
            continue
        auto, seconds = measured(kind, given.pairs, given.block)
        ratios, best = regret(auto, seconds)
        medians = {backend: statistics.median(values) for backend, values in seconds.items()}
        rows.append(judged(name, ratio_interval(ratios), None, auto=auto, best=best, seconds=medians))
        all_ratios.append(ratios)
        interval = f"{rows[-1]['low']:.3f} to {rows[-1]['high']:.3f}"
        times = ", ".join(f"{backend} {1e3 * value:.3g} ms" for backend, value in medians.items())
        print(
            f"| {name} | {auto} | {' '.join(sorted(set(best)))} | {rows[-1]['median']:.3f} | {interval} | {times} |", flush=True
        )
    means = [math.exp(statistics.fmean(map(math.log, column))) for column in zip(*all_ratios, strict=True)]
    worst = max(rows, key=lambda row: row["median"])
    summary = [
        judged(f"geometric mean of {len(rows)} kinds", ratio_interval(means), MEAN),
        judged(f"worst kind: {worst['name']}", {key: worst[key] for key in ("median", "low", "high")}, WORST),
    ]
    for row in summary:
        print(f"\n{row['name']}: {row['median']:.3f} ({row['low']:.3f} to {row['high']:.3f}), wanted {row['wanted']}")
    title = "Regret of backend=auto: its time over the best backend's"
    results = {"target": "P6", "title": title, "rows": [*summary, *rows], "threads": torch.get_num_threads(), **vars(given)}
    print(write("kernel_choice_cpu", results))


if __name__ == "__main__":
    main()
