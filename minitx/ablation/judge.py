"""Judge the records: endpoints, ratios with their ranges, and predictions. See ``docs/ablation.md``, "How it is judged"."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from minitx.ablation.design import PARTS, AblationConfig, ComparisonConfig, Condition, ExpectedConfig, LawConfig, StudyConfig
from minitx.ablation.grid import Run, Runs, solved_step
from minitx.ablation.intervals import Span, median, median_interval

RATIOS = {
    "threshold": "largest stable learning rate",
    "time": "steps until the task is solved",
    "speedup": "speed: operations to the same loss, first / second",
}
SCORES = {"loss": "validation loss", "accuracy": "validation accuracy"}
"""The texts of endpoints. The text of a measure is its name."""


@dataclass(frozen=True)
class Endpoint:
    """The compared quantity of the runs of a study: the largest stable rate, the time, the speed, a score or a measure."""

    name: str
    study: StudyConfig

    @property
    def text(self) -> str:
        """The text of the endpoint for reports."""
        return {**RATIOS, **SCORES}.get(self.name, self.name)

    @property
    def is_ratio(self) -> bool:
        """Whether the effect is a ratio; otherwise it is a difference."""
        return self.name in RATIOS

    @property
    def is_inverse(self) -> bool:
        """Whether the ratio is reference / treatment, as for rates and operations; otherwise it is treatment / reference."""
        return self.name in ("threshold", "speedup")

    def value(self, run: Run) -> Span | None:
        """Return the value of a finished run, or None if it does not have one.

        A threshold is known up to its bracket. If a run did not solve its task within the cap, its time is at least the cap. A
        run that was not finite has accuracy 0, and as loss its first finite training loss: that of the untrained network on its
        first batch, unless that one was not finite, either.
        """
        result = run.result
        if self.name == "threshold":
            return Span(result["low"], result["high"])
        if self.name == "time":
            steps = solved_step(result, self.study.solved)
            return Span(steps, steps) if steps else Span(result["cap"], math.inf)
        if self.name not in SCORES:
            value = result["measures"].get(self.name)
        elif result["nonfinite_step"] is None:
            value = result[f"val_{self.name}"]
        else:
            value = 0.0 if self.name == "accuracy" else next((loss for loss in result["loss"] if loss is not None), None)
        return None if value is None else Span(value, value)

    def values(self, reference: Run, treatment: Run) -> tuple[Span | None, Span | None]:
        """Return the values of both runs. For the speed, these are the operations until each reaches the larger one of both final losses."""
        if self.name != "speedup":
            return self.value(reference), self.value(treatment)
        if not all("operations" in run.result["measures"] for run in (reference, treatment)):
            return None, None
        final = [replace(self, name="loss").value(run) for run in (reference, treatment)]
        target = max(span.low if span else math.inf for span in final)
        return operations_until(reference.result, target), operations_until(treatment.result, target)

    def cost(self, run: Run) -> float:
        """Return the quantity that the best rate minimises.

        This is the logarithm of the time, the loss, or minus the accuracy; for the speed or a measure, the first of the scores
        loss and accuracy.
        """
        has_cost = self.name in self.study.scores and self.name != "speedup"
        name = self.name if has_cost else next(score for score in self.study.scores if score in SCORES)
        value = replace(self, name=name).value(run)
        if value is None:
            return math.inf
        return math.log(value.low) if name == "time" else -value.low if name == "accuracy" else value.low

    def effect(self, reference: Span, treatment: Span) -> Span:
        """Return the ratio, or treatment − reference for scores. The ratio of thresholds uses the middles of their brackets."""
        if self.name == "threshold":
            ratio = middle(reference) / middle(treatment)
            return Span(ratio, ratio)
        if self.is_inverse:
            return reference.over(treatment)
        return treatment.over(reference) if self.is_ratio else treatment.minus(reference)


def operations_until(result: Mapping[str, Any], loss: float) -> Span:
    """Return the operations of a run until its validation loss first is at most ``loss``, by interpolation between two validations.

    The first validation counts as a whole. If the run never reaches the loss, the result is open above.

    >>> result = {"steps": 30, "measures": {"operations": 2.0}, "validation": [[10, 3.0], [20, 2.0], [30, 1.5]]}
    >>> operations_until(result, 2.25), operations_until(result, 1.0)
    (Span(low=35.0, high=35.0), Span(low=60.0, high=inf))
    """
    operations, before = float(result["measures"]["operations"]), None
    for step, value in result["validation"]:
        if value is None:
            continue
        if value <= loss:
            if before is not None and before[1] > value:
                step -= (loss - value) / (before[1] - value) * (step - before[0])
            return Span(step * operations, step * operations)
        before = step, value
    return Span(result["steps"] * operations, math.inf)


def middle(span: Span) -> float:
    """Return the geometric mean of the ends."""
    return math.sqrt(span.low * span.high)


class Arm:
    """The finished runs or thresholds of an arm under a condition, by rate and seed."""

    def __init__(self, grid: AblationConfig, runs: Runs, study: str, arm: str, condition: Condition) -> None:
        self.seeds, finished = grid.studies[study].seeds, runs.select(study, arm, condition, status="done")
        self.done: dict[tuple[str | None, int], Run] = {(run.rate, run.seed): run for run in finished}
        self.rates = sorted({run.rate for run in finished}, key=lambda rate: float(rate or 1))
        self._costs: dict[tuple[str, str | None, int], float] = {}

    def best_rate(self, endpoint: Endpoint, seed: int) -> str | None:
        """Return the rate with the lowest mean cost on the other seeds, among the rates with the most runs. If several are equal: the middle one."""
        if len(self.rates) < 2:
            return self.rates[0] if self.rates else None
        others = [other for other in self.seeds if other != seed] or [seed]
        seeds = {rate: [other for other in others if (rate, other) in self.done] for rate in self.rates}
        most_runs = max(map(len, seeds.values()))
        costs = {
            rate: math.fsum(self._cost(endpoint, rate, other) for other in found)
            for rate, found in seeds.items()
            if len(found) == most_runs > 0
        }
        tied = [rate for rate, cost in costs.items() if cost <= min(costs.values()) + 1e-9 * most_runs]
        return tied[(len(tied) - 1) // 2] if tied else None

    def _cost(self, endpoint: Endpoint, rate: str | None, seed: int) -> float:
        """The cost of a finished run, cached because every other seed needs it."""
        place = (endpoint.name, rate, seed)
        if place not in self._costs:
            self._costs[place] = endpoint.cost(self.done[rate, seed])
        return self._costs[place]


# --- comparisons


class SeedPair(NamedTuple):
    """A seed of a comparison: the rates and values of reference and treatment, and the effect."""

    seed: int
    rates: list[str]
    values: tuple[Span, Span]
    effect: Span


class Parts(NamedTuple):
    """The largest stable rates of one model: of all its weights, of W_Q and W_K alone, and of the rest alone. Each is known within its bracket."""

    seed: int
    whole: Span
    qk: Span
    rest: Span

    @property
    def share(self) -> float:
        """The share of W_Q and W_K in the sum 1 / η_QK + 1 / η_R."""
        qk, rest = 1 / middle(self.qk), 1 / middle(self.rest)
        return qk / (qk + rest)

    @property
    def lower(self) -> Span:
        """1 / (1 / η_QK + 1 / η_R). ``whole`` is not below it if the loss is quadratic and curves upward in every direction."""
        return Span(1 / (1 / self.qk.low + 1 / self.rest.low), 1 / (1 / self.qk.high + 1 / self.rest.high))

    @property
    def upper(self) -> Span:
        """The smaller one of η_QK and η_R. ``whole`` is not above it if the loss is quadratic."""
        return Span(min(self.qk.low, self.rest.low), min(self.qk.high, self.rest.high))

    @property
    def place(self) -> str:
        """Where the bracket of ``whole`` is: ``between`` the bounds, or ``below`` or ``above`` both with no number in common."""
        return "below" if self.whole.high < self.lower.low else "above" if self.whole.low > self.upper.high else "between"


@dataclass(frozen=True)
class Contrast:
    """The result of a comparison on one endpoint under one condition.

    Attributes:
        comparison: study, arms and law.
        endpoint: the compared quantity.
        condition: the levels of all factors but the rate.
        pairs: the seeds with a value for both arms.
        at_edge: whether a rate of ``pairs`` is the smallest or the largest that was tried.
        margin: effects within ``margin`` count as the same.
        bound: the upper bound of the ratio by the law, or None. If only W_Q and W_K train, the law predicts this ratio exactly.
        parts: the thresholds of the reference and of its parts, by seed, if the law has parts and all weights train.
    """

    comparison: ComparisonConfig
    endpoint: Endpoint
    condition: Condition
    pairs: tuple[SeedPair, ...]
    at_edge: bool
    margin: Span
    bound: float | None
    parts: tuple[Parts, ...] = ()

    @cached_property
    def predicted(self) -> float | None:
        """The ratio that the formula of the law predicts: the median over ``parts`` of 1 + (bound - 1) · share; None without parts."""
        if not self.parts or self.bound is None:
            return None
        return float(np.median([1 + (self.bound - 1) * parts.share for parts in self.parts]))

    @property
    def share(self) -> Span | None:
        """The median share of W_Q and W_K; None without parts."""
        return median(self._shares, ratio=False) if self.parts else None

    @property
    def share_interval(self) -> tuple[Span, float] | None:
        """The interval of the median share and its coverage. None with fewer than five seeds."""
        return median_interval(self._shares)

    @property
    def _shares(self) -> list[Span]:
        return [Span(parts.share, parts.share) for parts in self.parts]

    @property
    def level(self) -> float:
        """The level of the factor in the law."""
        assert self.comparison.law is not None
        return float(self.condition[self.comparison.law.factor])

    @cached_property
    def estimate(self) -> Span:
        """The median effect. It is a range if runs ended at their cap."""
        return median([pair.effect for pair in self.pairs], ratio=self.endpoint.is_ratio)

    @cached_property
    def interval(self) -> tuple[Span, float] | None:
        """The interval of the median effect and its coverage; None with fewer than five pairs."""
        return median_interval([pair.effect for pair in self.pairs])

    @property
    def word(self) -> str:
        """The verdict: MORE, LESS, SAME or UNDECIDED.

        MORE or LESS: the treatment has more or less of the measured quantity by more than the margin, in the whole interval.
        SAME: the whole interval is within the margin. The interval of a ratio of thresholds is widened by the resolution of the
        search, high / low.
        """
        if self.interval is None:
            return "UNDECIDED"
        span, is_threshold = self.interval[0], self.endpoint.name == "threshold"
        step = max(value.high / value.low for pair in self.pairs for value in pair.values) if is_threshold else 1.0
        span = Span(span.low / step, span.high * step)
        if span.within(self.margin):
            return "SAME"
        # a ratio of thresholds is reference / treatment
        above, below = ("LESS", "MORE") if is_threshold else ("MORE", "LESS")
        return above if span.low > self.margin.high else below if span.high < self.margin.low else "UNDECIDED"


class Equality(NamedTuple):
    """The score ``equal``: for each seed, whether the losses of both arms are equal bit for bit, over ``steps`` steps."""

    comparison: ComparisonConfig
    condition: Condition
    equal: Mapping[int, bool]
    steps: int


@dataclass(frozen=True)
class Findings:
    """All results of ``judge``, with the runs. Comparisons without a pair are omitted."""

    grid: AblationConfig
    runs: Runs
    findings: tuple[Contrast, ...]
    equalities: tuple[Equality, ...]

    def find(self, study: str, endpoint: str, arms: tuple[str, ...] = (), condition: Mapping[str, str] = {}) -> list[Contrast]:
        """Return the findings that match all arguments. If ``arms`` is empty, all arms match."""
        matching = (f for f in self.findings if (f.comparison.study, f.endpoint.name) == (study, endpoint))
        return [f for f in matching if arms in ((), f.comparison.arms) and condition.items() <= f.condition.items()]


def slopes(listed: Sequence[Contrast]) -> list[float]:
    """Return, for each seed, the slope of log(ratio) against the log of the law's factor, over all levels in ``listed``."""
    xs = np.log([f.level for f in listed])
    by_seed = [{pair.seed: pair.effect.low for pair in f.pairs} for f in listed]
    seeds = sorted(set.intersection(*map(set, by_seed))) if len(listed) > 1 else []
    return [float(np.polyfit(xs, np.log([ratios[seed] for ratios in by_seed]), 1)[0]) for seed in seeds]


def judge(grid: AblationConfig, runs: Runs) -> Findings:
    """Judge a grid. The result depends only on the config and the runs."""
    findings, equalities = [], []
    for comparison in grid.comparisons:
        for condition in _conditions(runs, comparison):
            for name in grid.studies[comparison.study].endpoints:
                if name == "equal":
                    equalities.append(_equality(grid, runs, comparison, condition))
                else:
                    findings.append(_contrast(grid, runs, comparison, condition, name))
    return Findings(grid, runs, tuple(f for f in findings if f.pairs), tuple(e for e in equalities if e.equal))


def _conditions(runs: Runs, comparison: ComparisonConfig) -> list[Condition]:
    """Return the conditions under which both arms have runs. The conditions are the treatment's."""
    reference, treatment = ([run.condition for run in runs.select(comparison.study, arm)] for arm in comparison.arms)
    is_one_arm = comparison.arms[0] == comparison.arms[1]
    return [
        condition
        for i, condition in enumerate(treatment)
        if {**condition, **comparison.against} in reference
        and condition not in treatment[:i]
        and not (is_one_arm and comparison.against.items() <= condition.items())
    ]


def _contrast(grid: AblationConfig, runs: Runs, comparison: ComparisonConfig, condition: Condition, name: str) -> Contrast:
    conditions = {**condition, **comparison.against}, condition
    both = zip(comparison.arms, conditions, strict=True)
    arms = [Arm(grid, runs, comparison.study, arm, levels) for arm, levels in both]
    endpoint, margin = Endpoint(name, grid.studies[comparison.study]), grid.score_margin
    pairs = []
    for seed in arms[0].seeds:
        first, second = (arm.done.get((arm.best_rate(endpoint, seed), seed)) for arm in arms)
        if first is None or second is None:
            continue
        reference, treatment = endpoint.values(first, second)
        if reference is not None and treatment is not None:
            effect = endpoint.effect(reference, treatment)
            pairs.append(SeedPair(seed, [first.rate, second.rate], (reference, treatment), effect))
    tried = [(arm.rates[0], arm.rates[-1]) for arm in arms if arm.rates]
    law = comparison.law if endpoint.is_ratio else None
    part = law.part(condition) if law else None
    return Contrast(
        comparison=comparison,
        endpoint=endpoint,
        condition=condition,
        pairs=tuple(pairs),
        at_edge=any(rate in ends for pair in pairs for rate, ends in zip(pair.rates, tried, strict=True) if rate),
        margin=Span(1 / grid.ratio_margin, grid.ratio_margin) if endpoint.is_ratio else Span(-margin, margin),
        bound=None if law is None or part == "rest" else float(condition[law.factor]) ** law.power,
        parts=_parts_by_seed(runs, comparison, law, condition) if law and law.parts and not part else (),
    )


def _parts_by_seed(runs: Runs, comparison: ComparisonConfig, law: LawConfig, condition: Condition) -> tuple[Parts, ...]:
    """Return the thresholds of the reference and of its parts, for the seeds that have all three."""
    by_level = []
    for level in (condition[str(law.parts)], *PARTS):
        finished = runs.select(comparison.study, comparison.arms[0], {**condition, str(law.parts): level}, status="done")
        by_level.append({run.seed: Span(run.result["low"], run.result["high"]) for run in finished})
    return tuple(Parts(seed, *(of[seed] for of in by_level)) for seed in by_level[0] if all(seed in of for of in by_level))


def _equality(grid: AblationConfig, runs: Runs, comparison: ComparisonConfig, condition: Condition) -> Equality:
    reference, treatment = (Arm(grid, runs, comparison.study, arm, condition) for arm in comparison.arms)
    both = {key: (run.result, treatment.done[key].result) for key, run in reference.done.items() if key in treatment.done}
    alike = {key: first["digest"] == second["digest"] for key, (first, second) in both.items()}
    equal = {seed: all(same for (_, second), same in alike.items() if second == seed) for _, seed in both}
    return Equality(comparison, condition, equal, min((first["steps"] for first, _ in both.values()), default=0))


# --- predictions


class Verdict(NamedTuple):
    """Whether an expected range of a prediction holds under a condition: HELD, NOT HELD or UNDECIDED."""

    statement: str
    finding: Contrast
    measured: Span | None
    status: str


def verdicts(findings: Findings) -> Iterator[Verdict]:
    """Yield the verdicts on the predictions of the grid, in order, for all comparisons that were run. A prediction holds if all verdicts hold."""
    for prediction in findings.grid.predictions.values():
        for expected in prediction.expect:
            for finding in findings.find(expected.study, expected.endpoint, expected.arms, expected.condition):
                divisor = _divisor(findings, finding, expected)
                measured = _measured(finding, expected, divisor)
                yield Verdict(prediction.statement, finding, measured, _status(finding, measured, expected, divisor))


def _divisor(findings: Findings, finding: Contrast, expected: ExpectedConfig) -> Contrast | None:
    """Return the finding of ``over`` that divides the estimate, or None."""
    if (over := expected.over) is None:
        return None
    factors = findings.grid.studies[over.study].factors
    shared = {name: level for name, level in finding.condition.items() if name in factors}
    other = findings.find(over.study, finding.endpoint.name, over.arms, {**shared, **over.condition})
    return other[0] if len(other) == 1 else None


def _measured(finding: Contrast, expected: ExpectedConfig, divisor: Contrast | None) -> Span | None:
    """Return the number or the interval to compare with the range, or None if the divisor or the parts are missing."""
    if expected.share:
        estimate, interval = finding.share, finding.share_interval
    else:
        estimate, interval = finding.estimate, finding.interval
    measured = estimate if expected.by == "median" else interval and interval[0]
    if measured is None:
        return None
    if expected.formula:
        return measured.over(Span(finding.predicted, finding.predicted)) if finding.predicted else None
    if expected.over is None:
        return measured
    return measured.over(divisor.estimate) if divisor else None


def _status(finding: Contrast, measured: Span | None, expected: ExpectedConfig, divisor: Contrast | None) -> str:
    """Return the status. It is UNDECIDED if the finding or its divisor has fewer than five seeds, or if runs at their cap leave it open."""
    if measured is None or (finding.share_interval if expected.share else finding.interval) is None:
        return "UNDECIDED"
    if divisor is not None and divisor.interval is None:
        return "UNDECIDED"
    low, high = expected.range
    bounds = Span(-math.inf if low is None else low, math.inf if high is None else high)
    if measured.low > bounds.high or measured.high < bounds.low:
        return "NOT HELD"
    return "HELD" if expected.by == "interval" or measured.within(bounds) else "UNDECIDED"
