"""Scores of two arms, seed by seed, and what the difference is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from minitx.ablation.records import ARMS, RATE, Cells, Condition, Record
from minitx.ablation.statistics import Floats, Interval, leave_one_out, paired_t_interval

Score = Callable[[Record], float]


def score_table(
    cells: Cells, study: str, arm: str, condition: Condition, seeds: Sequence[int], rates: Sequence[str], score: Score
) -> Floats:
    """The scores of an arm, (seeds, rates); NaN where the cell is missing or failed."""
    found = {(r["seed"], r["factors"].get(RATE, "")): score(r) for r in cells.select(study, arm, **condition)}
    values = [[found.get((seed, rate), math.nan) for rate in rates] for seed in seeds]
    return np.array(values, dtype=float).reshape(len(seeds), len(rates))


@dataclass(frozen=True)
class Paired:
    """Scores of several arms, (seeds, rates) each, on the seeds that are complete in all; rates ascending and common."""

    rates: tuple[str, ...]
    seeds: tuple[int, ...]
    incomplete: tuple[int, ...]
    values: tuple[Floats, ...]


def paired_scores(cells: Cells, study: str, arms: Sequence[str], condition: Condition, score: Score) -> Paired:
    """The scores of these arms; a seed that lacks a cell in one of them is left out of all, and named."""
    rates = tuple(
        rate
        for rate in cells.levels(study, RATE, **condition)
        if set(arms) <= set(cells.arms(study, **{**condition, RATE: rate}))
    ) or ("",)
    seeds = sorted({seed for arm in arms for seed in cells.seeds(study, arm, **condition)})
    values = [score_table(cells, study, arm, condition, seeds, rates, score) for arm in arms]
    keep = [i for i in range(len(seeds)) if all(np.isfinite(table[i]).all() for table in values)]
    gone = tuple(seed for i, seed in enumerate(seeds) if i not in keep)
    return Paired(rates, tuple(seeds[i] for i in keep), gone, tuple(table[keep] for table in values))


@dataclass(frozen=True)
class Effect:
    """Scores of two arms, a pair a seed. The interval is Student's 95 %, ``None`` under two pairs."""

    label: str
    reference: tuple[float, ...]
    treatment: tuple[float, ...]

    @property
    def difference(self) -> float:
        """Mean of treatment − reference."""
        return float(np.mean(self.differences))

    @property
    def differences(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(self.reference, self.treatment, strict=True))

    @property
    def interval(self) -> Interval | None:
        return paired_t_interval(self.differences) if len(self.reference) > 1 else None


def own_best(label: str, values: Sequence[Floats], better: int = 1) -> Effect:
    """Each arm at its own best rate, chosen for every seed on the other seeds; ``better`` is −1 where small is good."""
    chosen = [v[range(len(v)), leave_one_out(better * v).picks] for v in values]
    return Effect(label, *(tuple(v.tolist()) for v in chosen))


def best_rate_loss(cells: Cells, study: str, condition: Condition, loss: Score) -> Effect | None:
    """Unscaled − inv_sqrt of a loss, each arm at its own best rate; ``None`` where no seed is complete."""
    pair = paired_scores(cells, study, ARMS, condition, loss)
    label = "own best rate" + (" (tuned on itself)" if len(pair.seeds) < 2 else "")
    return own_best(label, pair.values, better=-1) if pair.seeds else None


def rate_effects(cells: Cells, study: str, condition: Condition, score: Score) -> list[Effect]:
    """Unscaled − inv_sqrt at the same rate, one effect a rate, on the seeds that both arms finished."""
    effects = []
    for rate in cells.levels(study, RATE, **condition):
        pair = paired_scores(cells, study, ARMS, {**condition, RATE: rate}, score)
        if pair.seeds:
            effects.append(Effect(f"lr {rate}", *(tuple(v[:, 0].tolist()) for v in pair.values)))
    return effects
