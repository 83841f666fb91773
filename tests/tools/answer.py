"""Compute the numbers of README's answer from the record of the ablation, and print the answer in both languages.

python tests/tools/answer.py

It reads the runs and uses none of the lab's code. ``tests/test_readme.py`` compares what it prints with both READMEs.

- A ratio of steps: the steps from scratch until the mean accuracy of 16 steps (1,024 answers) reaches 90 %, without the scale over
  with it. Each arm runs at the rate that needs the fewest steps on the *other* seeds (mean; a run that does not get there counts
  as 1,500 steps).
- A ratio of rates: the largest rate at which the mean accuracy of 8 steps never falls below 90 %, with the scale over without it.
  The rate is interpolated, linearly in log(rate), between the last rate that was tried above 90 % and the first one below.

A number is the median of six seeds, and its range goes from the smallest seed to the largest (coverage 96.9 %).
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RECORD = Path(__file__).parents[2] / "docs" / "scaling_ablation" / "record" / "cells.jsonl.xz"
SEEDS = range(10, 16)
CAP = 1500
Curves = dict[tuple[str, float, int], list[float]]
"""The accuracy of each step, by arm, learning rate and seed."""


class Ratio(NamedTuple):
    """The median of the seeds, the smallest and the largest."""

    median: float
    low: float
    high: float


def read(path: Path = RECORD) -> list[dict[str, Any]]:
    """The runs that were made."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [run for run in map(json.loads, lines) if run["status"] == "done"]


def curves(runs: Sequence[dict[str, Any]], study: str, **factors: str) -> Curves:
    """The curves of a study at some levels of its factors."""
    chosen = (run for run in runs if run["study"] == study and factors.items() <= run["factors"].items())
    return {(run["arm"], float(run["factors"]["lr"]), run["seed"]): run["result"]["accuracy"] for run in chosen}


def means(curve: Sequence[float], window: int) -> list[float]:
    """The mean over each ``window`` consecutive steps."""
    return [math.fsum(curve[end - window : end]) / window for end in range(window, len(curve) + 1)]


def ratio(of_seed: Callable[[int], float], seeds: Sequence[int] = SEEDS) -> Ratio:
    found = sorted(map(of_seed, seeds))
    middle = found[(len(found) - 1) // 2] * found[len(found) // 2]
    return Ratio(math.sqrt(middle), found[0], found[-1])


def steps(curve: Sequence[float] | None) -> int:
    """Steps to 90 % of 16 steps; a run that was left out or does not get there counts as the cap."""
    return next((end for end, mean in enumerate(means(curve or [], 16), 16) if mean >= 0.9), CAP)


def ratio_of_steps(found: Curves, seeds: Sequence[int] = SEEDS) -> Ratio:
    rates = sorted({rate for _, rate, _ in found})

    def at_the_rate_of_the_others(arm: str, seed: int) -> int:
        others = [other for other in seeds if other != seed]
        best = min(rates, key=lambda rate: sum(steps(found.get((arm, rate, other))) for other in others))
        return steps(found.get((arm, best, seed)))

    return ratio(lambda seed: at_the_rate_of_the_others("unscaled", seed) / at_the_rate_of_the_others("inv_sqrt", seed), seeds)


def largest_rate(found: Curves, arm: str, seed: int) -> float:
    worst = sorted((rate, min(means(curve, 8))) for (one, rate, other), curve in found.items() if (one, other) == (arm, seed))
    first = next(i for i, (_, level) in enumerate(worst) if level < 0.9)
    assert first, "a rate above 90 % was tried"
    (start, above), (end, below) = worst[first - 1], worst[first]
    return float(start * (end / start) ** ((above - 0.9) / (above - below)))


def ratio_of_rates(found: Curves, seeds: Sequence[int] = SEEDS) -> Ratio:
    return ratio(lambda seed: largest_rate(found, "inv_sqrt", seed) / largest_rate(found, "unscaled", seed), seeds)


def numbers(runs: Sequence[dict[str, Any]]) -> dict[str, Ratio]:
    """Every ratio that README uses."""
    found = {f"lecun {d}": ratio_of_steps(curves(runs, "recall", init="lecun", head_dim=d)) for d in ("8", "32", "128")}
    found["gpt2 128"] = ratio_of_steps(curves(runs, "recall", init="gpt2", head_dim="128"))
    for optimizer in ("adamw", "sgd"):
        for d in ("8", "128"):
            found[f"{optimizer} {d}"] = ratio_of_rates(curves(runs, f"stability_{optimizer}", head_dim=d))
    return found


def answer(found: dict[str, Ratio]) -> dict[str, str]:
    """README's answer, by the name of the page. The words "no more" need a range that ends at 1 or below."""
    assert found["gpt2 128"].high <= 1

    def told(name: str) -> str:
        return f"{found[name].low:.3g}–{found[name].high:.3g}"

    def times(name: str) -> str:
        return f"{found[name].median:.1f}"

    adamw, sgd, scratch = times("adamw 128"), round(found["sgd 128"].median), round(found["lecun 128"].median)
    return {
        "README.md": (
            "A model learned to look up values (one head, d_k = 128). A copy lost the scale, with W_Q and W_K shrunk so that it "
            "computes the same; both trained on. "
            f"The copy's largest learning rate without a collapse is **{adamw} times smaller with AdamW** ({told('adamw 128')}) "
            f"**and about {sgd} times with SGD** ({told('sgd 128')}); at d_k = 8, {times('adamw 8')} and {times('sgd 8')} times. "
            "Both factors grow with d_k. From scratch, with LeCun's initial weights, a model without the scale needs about "
            f"{scratch} times as many steps ({told('lecun 128')}); with GPT-2's, our default, no more. "
            "A model without the scale can compute the same functions; the scale makes larger learning rates safe."
        ),
        "README.zh.md": (
            "先让一个模型学会根据键查值（一个头，d_k = 128）。再复制一份，去掉缩放，并相应缩小 W_Q 和 W_K，使副本算出的结果不变；然后两者继续训练。"
            f"副本不崩溃的最大学习率，**在 AdamW 下只有原模型的 1/{adamw}**（倍数的范围 {told('adamw 128')}），"
            f"**在 SGD 下约为 1/{sgd}**（{told('sgd 128')}）；d_k = 8 时分别是 1/{times('adamw 8')} 和 1/{times('sgd 8')}。"
            f"两个倍数都随 d_k 增大。用 LeCun 初始权重从头训练时，没有缩放的模型需要约 {scratch} 倍的步数（{told('lecun 128')}）；"
            "用 GPT-2 初始权重（minitx 的默认值）时，并不需要更多。没有缩放的模型能计算同样的函数；缩放使较大的学习率也是安全的。"
        ),
    }


if __name__ == "__main__":
    found = numbers(read())
    for name, one in found.items():
        print(f"{name:10} {one.median:.3f} ({one.low:.3f} to {one.high:.3f})")
    for page, text in answer(found).items():
        print(f"\n{page}\n{text}")
