"""Scores of two arms, seed by seed, and what the difference is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minitx.ablation.records import ARMS, RATE, SCORES, TEXT, Cells, Condition, Score
from minitx.ablation.statistics import Choices, Floats, Interval, leave_one_out, paired_t_interval, tuned_choice


def score_table(
    cells: Cells, study: str, arm: str, condition: Condition, seeds: Sequence[int], rates: Sequence[str], score: Score
) -> Floats:
    """The scores of an arm, (seeds, rates); NaN where the cell is missing or failed."""
    found = {(r["seed"], r["factors"].get(RATE, "")): score.of(r) for r in cells.select(study, arm, **condition)}
    values = [[found.get((seed, rate), math.nan) for rate in rates] for seed in seeds]
    return np.array(values, dtype=float).reshape(len(seeds), len(rates))


@dataclass(frozen=True)
class Effect:
    """Scores of two arms, a pair a seed. The interval is Student's 95 %, ``None`` under two pairs."""

    reference: Sequence[float]
    treatment: Sequence[float]

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


class Paired:
    """A score of several arms of a study under one condition, on the seeds that have it of every arm at every rate.

    Attributes:
        rates: those that all arms have, ascending; one empty name where the study has none.
        seeds: that are judged and complete.
        values: the scores of these seeds, (seeds, rates) an arm.
        tuning: the scores of the seeds that choose the rates, (tuning seeds, rates) an arm; empty where the grid has none.
        incomplete: the seeds of either kind that lack a cell in one of the arms.
        usable: whether there is something to compare: a seed, and, where the grid has tuning seeds, one that is complete.
    """

    def __init__(self, cells: Cells, study: str, arms: Sequence[str], condition: Condition, score: Score) -> None:
        self.cells, self.study, self.arms, self.condition, self.score = cells, study, arms, condition, score
        self.rates = tuple(
            rate
            for rate in cells.levels(study, RATE, **condition)
            if set(arms) <= set(cells.arms(study, **{**condition, RATE: rate}))
        ) or ("",)
        judged = sorted({seed for arm in arms for seed in cells.seeds(study, arm, **condition)})
        tune_seeds = cells.planned(study).tune_seeds
        self.seeds, self.values = self._complete(judged)
        tuned_on, self.tuning = self._complete(tune_seeds)
        self.incomplete = tuple(sorted({*judged, *tune_seeds} - {*self.seeds, *tuned_on}))
        self.usable = bool(self.seeds) and (bool(tuned_on) or not tune_seeds)

    def _table(self, arm: str, seeds: Sequence[int], score: Score) -> Floats:
        return score_table(self.cells, self.study, arm, self.condition, seeds, self.rates, score)

    def _complete(self, seeds: Sequence[int]) -> tuple[tuple[int, ...], tuple[Floats, ...]]:
        """The seeds that have every score, and their scores."""
        tables = [self._table(arm, seeds, self.score) for arm in self.arms]
        keep = np.flatnonzero(np.isfinite(tables).all(axis=(0, 2))).tolist()
        return tuple(seeds[i] for i in keep), tuple(table[keep] for table in tables)

    def choices(self, arm: int, plateau: float = 0.0) -> Choices:
        """The rate of each judged seed for one of the arms, chosen on the tuning seeds or on the other seeds."""
        better, tuning = self.score.better, self.tuning[arm]
        if tuning.size:
            return tuned_choice(better * tuning, len(self.seeds), plateau=plateau)
        return leave_one_out(better * self.values[arm], plateau=plateau)

    def at_best(self, arm: int, measured: Score | None = None) -> Floats:
        """The score of one of the arms, or what else is ``measured``, at the rate that is chosen for each seed."""
        table = self._table(self.arms[arm], self.seeds, measured or self.score)
        return table[range(len(self.seeds)), self.choices(arm).picks]

    def effect(self, measured: Score | None = None) -> Effect | None:
        """The first two arms, each at its own best rate; ``None`` where nothing can be compared or a run left no number."""
        values = [self.at_best(arm, measured) for arm in (0, 1)] if self.usable else []
        return Effect(*(v.tolist() for v in values)) if values and np.isfinite(values).all() else None


def best_rate_loss(cells: Cells, condition: Condition) -> Effect | None:
    """Unscaled − inv_sqrt of the loss on text, each arm at its own best rate; ``None`` where no seed is complete."""
    return Paired(cells, TEXT, ARMS, condition, SCORES["loss"]).effect()


def rate_effects(cells: Cells, study: str, arms: Sequence[str], condition: Condition, score: Score) -> dict[str, Effect]:
    """The difference of two arms at the same rate, by rate, on the seeds that both arms finished."""
    rates = cells.levels(study, RATE, **condition)
    pairs = {rate: Paired(cells, study, arms, {**condition, RATE: rate}, score) for rate in rates}
    return {f"lr {rate}": Effect(*(v[:, 0].tolist() for v in p.values)) for rate, p in pairs.items() if p.seeds}
