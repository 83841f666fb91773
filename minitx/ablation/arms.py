"""One arm of a study under one condition: its best rate and its measured values."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cached_property

from minitx.ablation.design import RATE, AblationConfig, Condition, Endpoint
from minitx.ablation.intervals import Span, crossing
from minitx.ablation.outcomes import initial_loss, last_mean
from minitx.ablation.records import Run, Runs, solved_step, worst_accuracy


class Arm:
    """The runs of an arm under a condition, and the values that are computed from them."""

    def __init__(self, grid: AblationConfig, runs: Runs, study: str, arm: str, condition: Condition) -> None:
        self.name, self.runs, self.grid, self.study = arm, runs, grid, grid.studies[study]
        self.rates = sorted(self.study.factors.get(RATE, {"": ()}), key=_number)
        self.done = {(run.rate, run.seed): run for run in runs.select(study, arm, condition, status="done")}
        self.tried = [rate for rate in self.rates if any(rate == other for other, _ in self.done)]

    @cached_property
    def steps(self) -> dict[tuple[str, int], int | None]:
        """The steps to solve the task, by rate and seed."""
        return {key: solved_step(run.result, self.study.solved) for key, run in self.done.items()}

    def tuning_seeds(self, seed: int) -> Collection[int]:
        """Return the seeds that choose the rate for a judged seed: the tuning seeds, or without them all other judged seeds."""
        return self.study.tune_seeds or [other for other in self.study.seeds if other != seed]

    def solves(self, seeds: Collection[int]) -> bool:
        """Return whether a run of any of ``seeds`` solves the task."""
        return any(steps for (_, seed), steps in self.steps.items() if seed in seeds)

    def best_rate(self, score: str, seeds: Collection[int]) -> str | None:
        """Return the rate with the lowest mean cost, among the rates with the most runs of ``seeds``. Ties go to the most central rate.

        If no run solves the task, it is the rate with the best score after the last step.
        """
        ran = {rate: [(rate, seed) for seed in seeds if (rate, seed) in self.done] for rate in self.tried}
        most = max(map(len, ran.values()), default=0)
        ran = {rate: keys for rate, keys in ran.items() if len(keys) == most > 0}
        costs = {rate: sum(self._cost(score, key) for key in keys) / most for rate, keys in ran.items()}
        tied = central = [rate for rate, cost in costs.items() if cost <= min(costs.values()) + 1e-9]
        if score == "time":
            central = [rate for rate in costs if any(self.steps[key] for key in ran[rate])]
            if costs and not central:
                return self.best_rate(self.study.solved.metric.removeprefix("train_"), seeds)
        logs = {rate: math.log(_number(rate)) for rate in costs}
        return min(tied, key=lambda rate: round(abs(2 * logs[rate] - logs[central[0]] - logs[central[-1]]), 9), default=None)

    def has_edge(self, rates: Collection[str]) -> bool:
        """Return whether one of ``rates`` is the smallest or the largest that was tried."""
        return RATE in self.study.factors and any(rate in (self.tried[0], self.tried[-1]) for rate in rates)

    def _cost(self, score: str, key: tuple[str, int]) -> float:
        if score == "time":
            return math.log(self.steps[key] or self.done[key].result["cap"])
        value = self.score(score, self.done[key])
        return math.inf if value is None else -value if score == "accuracy" else value

    def score(self, endpoint: Endpoint, run: Run) -> float | None:
        """Return a score or a measure of a run. A diverged run gets the loss of the untrained network, a NONFINITE run also accuracy 0."""
        result, is_broken = run.result, run.result["nonfinite_step"] is not None
        if endpoint == "accuracy":
            return 0.0 if is_broken else result["val_accuracy"]
        if endpoint != "loss":
            return result["measures"].get(endpoint)  # type: ignore[no-any-return]
        first, last = initial_loss(self.runs, run), result["val_loss"]
        if is_broken or first is None or last is None:
            return first if is_broken else last  # type: ignore[no-any-return]
        return min(first, last)

    def value(self, endpoint: Endpoint, rate: str | None, seed: int) -> Span | None:
        """Return the value of a seed at ``rate``, or None. ``stability`` is measured over all rates, so ``rate`` is then ignored."""
        if endpoint == "stability":
            return self._largest_stable(seed)
        if rate is None or (rate, seed) not in self.done:
            return None
        if endpoint == "time":
            steps = self.steps[rate, seed]
            return Span(steps, steps) if steps else Span(self.done[rate, seed].result["cap"], math.inf)
        if endpoint == "largest_rate":
            return self._largest_rate(rate, seed)
        value = self.score(endpoint, self.done[rate, seed])
        return None if value is None else Span(value, value)

    def _largest_rate(self, rate: str, seed: int) -> Span:
        """The top of the unbroken run of rates that ``seed`` solves and that contains ``rate``, as an index."""
        top = self.rates.index(rate)
        if not self.steps[rate, seed]:
            return Span(-math.inf, top - 1)
        for i, above in enumerate(self.rates[top + 1 :], top + 1):
            if (above, seed) not in self.done:
                break
            if not self.steps[above, seed]:
                return Span(i - 1, i - 1)
            top = i
        return Span(top, math.inf)

    def _largest_stable(self, seed: int) -> Span | None:
        """The largest rate that is stable; None where there is no run, or the first phase did not solve its task."""
        stable, start = self.study.stable, self.study.start
        assert start is not None
        mine = {rate: self.done[rate, seed] for rate in self.rates if (rate, seed) in self.done}
        first = self.runs.start_of(next(iter(mine.values()))) if mine else None
        if first is None or first.status != "done":
            return None
        if start.solved and solved_step(first.result, self.grid.studies[start.study].solved) is None:
            return None
        if stable.metric == "train_accuracy":
            levels, limit = [worst_accuracy(run.result, stable.window) for run in mine.values()], stable.value
        else:
            levels, limit = [-last_mean(run, "loss", stable.window) for run in mine.values()], -stable.value
            limit -= last_mean(first, "loss", stable.window)
        return crossing([_number(rate) for rate in mine], levels, limit)


def _number(rate: str) -> float:
    return float(rate or 1)  # a study without the factor lr has one rate


def unsolved(grid: AblationConfig, runs: Runs, study: str, arm: str, condition: Condition) -> dict[str, tuple[int, int]]:
    """For each rate that was tried, count the judged runs of an arm that never solve their task, and all of them."""
    mine = Arm(grid, runs, study, arm, condition)
    steps = {rate: [mine.steps[rate, s] for s in mine.study.seeds if (rate, s) in mine.done] for rate in mine.tried}
    return {rate: (own.count(None), len(own)) for rate, own in steps.items() if own}
