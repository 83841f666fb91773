"""Scores of two arms, seed by seed, and what the difference is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from minitx.ablation.records import ARMS, RATE, Cells, Condition, Record
from minitx.ablation.statistics import Choices, Floats, Interval, leave_one_out, paired_t_interval, tuned_choice

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
    """Scores of several arms, (seeds, rates) each, on the seeds that are complete in all; rates ascending and common.

    ``tuning`` are the scores of the seeds that choose the rates, (tuning seeds, rates) each; empty where the grid has
    none. A seed of either kind that lacks a cell in one of the arms is in ``incomplete``.
    """

    rates: tuple[str, ...]
    seeds: tuple[int, ...]
    incomplete: tuple[int, ...]
    values: tuple[Floats, ...]
    tuning: tuple[Floats, ...]
    has_tune_seeds: bool

    @property
    def is_tuned(self) -> bool:
        """Whether rates can be chosen: on tuning seeds, where the grid has them, or on the other seeds."""
        return not self.has_tune_seeds or bool(self.tuning[0].size)

    def choices(self, arm: int, better: int = 1, plateau: float = 0.0) -> Choices:
        """The rate of each judged seed for one of the arms; ``better`` is −1 where small is good."""
        tuning = self.tuning[arm]
        if tuning.size:
            return tuned_choice(better * tuning, len(self.seeds), plateau=plateau)
        return leave_one_out(better * self.values[arm], plateau=plateau)


def paired_scores(cells: Cells, study: str, arms: Sequence[str], condition: Condition, score: Score) -> Paired:
    """The scores of these arms; a seed that lacks a cell in one of them is left out of all, and named."""
    rates = tuple(
        rate
        for rate in cells.levels(study, RATE, **condition)
        if set(arms) <= set(cells.arms(study, **{**condition, RATE: rate}))
    ) or ("",)
    seeds = sorted({seed for arm in arms for seed in cells.seeds(study, arm, **condition)})
    kept, complete = [], []
    for group in (seeds, cells.tune_seeds(study)):
        values = [score_table(cells, study, arm, condition, group, rates, score) for arm in arms]
        keep = [i for i in range(len(group)) if all(np.isfinite(table[i]).all() for table in values)]
        kept.append(tuple(group[i] for i in keep))
        complete.append(tuple(table[keep] for table in values))
    gone = sorted({*seeds, *cells.tune_seeds(study)} - {*kept[0], *kept[1]})
    return Paired(rates, kept[0], tuple(gone), complete[0], complete[1], bool(cells.tune_seeds(study)))


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
        """Treatment minus reference, seed by seed."""
        return tuple(b - a for a, b in zip(self.reference, self.treatment, strict=True))

    @property
    def interval(self) -> Interval | None:
        """Student's interval of the mean difference; None for a single pair."""
        return paired_t_interval(self.differences) if len(self.reference) > 1 else None


def own_best(label: str, pair: Paired, better: int = 1) -> Effect:
    """Each arm at its own best rate, chosen on the tuning seeds or on the other seeds; ``better`` is −1 where small is good."""
    chosen = [v[range(len(v)), pair.choices(arm, better).picks] for arm, v in enumerate(pair.values)]
    return Effect(label, *(tuple(v.tolist()) for v in chosen))


def best_rate_loss(cells: Cells, study: str, condition: Condition, loss: Score) -> Effect | None:
    """Unscaled − inv_sqrt of a loss, each arm at its own best rate; ``None`` where no seed is complete."""
    pair = paired_scores(cells, study, ARMS, condition, loss)
    label = "own best rate" + (" (tuned on itself)" if len(pair.seeds) < 2 else "")
    return own_best(label, pair, better=-1) if pair.seeds and pair.is_tuned else None


def rate_effects(cells: Cells, study: str, arms: Sequence[str], condition: Condition, score: Score) -> list[Effect]:
    """The difference of two arms at the same rate, one effect a rate, on the seeds that both arms finished."""
    effects = []
    for rate in cells.levels(study, RATE, **condition):
        pair = paired_scores(cells, study, arms, {**condition, RATE: rate}, score)
        if pair.seeds:
            effects.append(Effect(f"lr {rate}", *(tuple(v[:, 0].tolist()) for v in pair.values)))
    return effects
