"""Judge the records: endpoints, ratios with their ranges, predictions. See ``docs/ablation.md``, "How it is judged"."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from minitx.ablation.design import RATE, AblationConfig, ComparisonConfig, Condition, ExpectedConfig, LawConfig
from minitx.ablation.intervals import Span, median, median_interval
from minitx.ablation.records import Run, Runs, solved_step

Word = Literal["MORE", "LESS", "SAME", "UNDECIDED"]


class Arm:
    """The runs or thresholds of an arm under a condition."""

    def __init__(self, grid: AblationConfig, runs: Runs, study: str, arm: str, condition: Condition) -> None:
        self.name, self.study = arm, grid.studies[study]
        self.done = {(run.rate, run.seed): run for run in runs.select(study, arm, condition, status="done")}
        self.rates = sorted({rate for rate, _ in self.done}, key=lambda rate: float(rate or 1))

    def steps(self, run: Run) -> int | None:
        """Return the step at which a run solved its task."""
        return solved_step(run.result, self.study.solved)

    def best_rate(self, endpoint: Endpoint, seed: int) -> str | None:
        """Return the rate with the lowest mean cost on the other seeds, among the rates with the most runs. Ties go to the middle one."""
        others = [other for other in self.study.seeds if other != seed or len(self.study.seeds) == 1]
        runs = {rate: [self.done[rate, other] for other in others if (rate, other) in self.done] for rate in self.rates}
        most = max(map(len, runs.values()), default=0)
        costs = {rate: math.fsum(endpoint.cost(self, run) for run in of) for rate, of in runs.items() if len(of) == most > 0}
        tied = [rate for rate, cost in costs.items() if cost <= min(costs.values()) + 1e-9 * most]
        return tied[(len(tied) - 1) // 2] if tied else None


class Endpoint:
    """What is compared: the value of an arm for a seed, and the effect between two arms."""

    name: str
    text: str
    is_ratio = True
    above: Word = "MORE"  # the treatment has more or less of it, where the effect is above the margin

    def cost(self, arm: Arm, run: Run) -> float:
        """Return what the best rate minimises."""
        raise NotImplementedError

    def value(self, arm: Arm, rate: str, seed: int) -> Span | None:
        """Return the value of a seed at the rate that was chosen for it."""
        raise NotImplementedError

    def effect(self, reference: Span, treatment: Span) -> Span:
        """Return treatment / reference, or for scores treatment − reference."""
        return treatment.over(reference)

    def rate(self, arm: Arm, seed: int) -> str | None:
        """Return the rate at which a seed is judged."""
        return arm.best_rate(self, seed)


class Time(Endpoint):
    """Steps until the task is solved. A run that did not solve it within its cap gives the range from there on."""

    name, text = "time", "steps until the task is solved"

    def cost(self, arm: Arm, run: Run) -> float:
        """Return the logarithm of the steps, or of the cap."""
        return math.log(arm.steps(run) or run.result["cap"])

    def value(self, arm: Arm, rate: str, seed: int) -> Span | None:
        """Return the steps at the rate."""
        if (run := arm.done.get((rate, seed))) is None:
            return None
        steps = arm.steps(run)
        return Span(steps, steps) if steps else Span(run.result["cap"], math.inf)


class Score(Endpoint):
    """A validation metric or a measure after the last step. A run that was not finite counts as the untrained network."""

    is_ratio = False

    def __init__(self, name: str, choice: str) -> None:
        self.name, self._choice = name, choice
        self.text = {"loss": "validation loss", "accuracy": "validation accuracy"}.get(name, name)

    def cost(self, arm: Arm, run: Run) -> float:
        """Return the score that chooses the rate, negative for an accuracy. None is the worst."""
        found = _score(run, self._choice)
        return math.inf if found is None else -found if self._choice == "accuracy" else found

    def value(self, arm: Arm, rate: str, seed: int) -> Span | None:
        """Return the score at the rate."""
        run = arm.done.get((rate, seed))
        found = None if run is None else _score(run, self.name)
        return None if found is None else Span(found, found)

    def effect(self, reference: Span, treatment: Span) -> Span:
        """Return treatment − reference."""
        return treatment.minus(reference)


class Threshold(Endpoint):
    """The largest stable learning rate, known within its bracket. The effect is reference / treatment: how many times smaller."""

    name, text, above = "threshold", "largest stable learning rate", "LESS"

    def rate(self, arm: Arm, seed: int) -> str | None:
        """Return the level of a record without the factor ``lr``."""
        return ""

    def value(self, arm: Arm, rate: str, seed: int) -> Span | None:
        """Return the bracket."""
        run = arm.done.get((rate, seed))
        return None if run is None else Span(run.result["low"], run.result["high"])

    def effect(self, reference: Span, treatment: Span) -> Span:
        """Return the ratio of the middles of the brackets, which is known to about 3 %."""
        ratio = middle(reference) / middle(treatment)
        return Span(ratio, ratio)


def middle(span: Span) -> float:
    """Return the geometric mean of the ends."""
    return math.sqrt(span.low * span.high)


def _score(run: Run, name: str) -> float | None:
    result = run.result
    if name not in ("loss", "accuracy"):
        return result["measures"].get(name)  # type: ignore[no-any-return]
    if result["nonfinite_step"] is not None:
        return 0.0 if name == "accuracy" else next((loss for loss in result["loss"] if loss is not None), None)
    return result[f"val_{name}"]  # type: ignore[no-any-return]


def endpoint_of(name: str, scores: Sequence[str]) -> Endpoint:
    """Return the endpoint of a name; a measure takes the rate that the first loss or accuracy chose."""
    if name in ("time", "threshold"):
        return Time() if name == "time" else Threshold()
    return Score(name, name if name in scores else next(score for score in scores if score in ("loss", "accuracy")))


# --- comparisons


class Pair(NamedTuple):
    """One seed of a comparison: the values of reference and treatment, and their effect."""

    seed: int
    reference: Span
    treatment: Span
    effect: Span


@dataclass(frozen=True)
class Finding:
    """One comparison on one endpoint under one condition.

    Attributes:
        comparison, endpoint, condition: what is compared: study, arms, law; the endpoint; the levels of all factors but the rate.
        rates: the rates of reference and treatment, one for each seed of ``pairs``.
        at_edge: whether one of ``rates`` is the smallest or the largest that was tried.
        pairs: the seeds that have both arms. missing: the others.
        margin: effects within ``margin`` count as the same.
        bound: what the law gives, or None; where only W_Q and W_K train, the ratio itself. predicted: what its formula gives from
            the thresholds of the reference, or None; only where all weights train.
    """

    comparison: ComparisonConfig
    endpoint: Endpoint
    condition: Condition
    rates: tuple[tuple[str, ...], tuple[str, ...]]
    at_edge: bool
    pairs: tuple[Pair, ...]
    missing: tuple[int, ...]
    margin: Span
    bound: float | None
    predicted: float | None

    @cached_property
    def estimate(self) -> Span | None:
        """The median effect; a range where runs ended at their cap."""
        return median([pair.effect for pair in self.pairs], ratio=self.endpoint.is_ratio) if self.pairs else None

    @cached_property
    def interval(self) -> tuple[Span, float] | None:
        """The interval of the median effect and its coverage. None with fewer than five pairs."""
        return median_interval([pair.effect for pair in self.pairs])

    @property
    def word(self) -> Word:
        """MORE or LESS: the treatment has more or less of what is measured, by more than the margin, in the whole interval."""
        if self.interval is None:
            return "UNDECIDED"
        found = self.interval[0]
        if found.within(self.margin):
            return "SAME"
        below: Word = "LESS" if self.endpoint.above == "MORE" else "MORE"
        return self.endpoint.above if found.low > self.margin.high else below if found.high < self.margin.low else "UNDECIDED"


class Equality(NamedTuple):
    """The score ``equal``: for each seed, whether the arms of a comparison have the same losses bit for bit, over so many steps."""

    comparison: ComparisonConfig
    condition: Condition
    equal: Mapping[int, bool]
    steps: int


@dataclass(frozen=True)
class Findings:
    """All results of ``judge``, with the runs."""

    grid: AblationConfig
    runs: Runs
    findings: tuple[Finding, ...]
    equalities: tuple[Equality, ...]

    def find(
        self, study: str, endpoint: str, arms: Sequence[str] | None = None, condition: Condition | None = None
    ) -> list[Finding]:
        """Return the findings that match all arguments and have a pair."""
        wanted = (condition or {}).items()
        return [
            f
            for f in self.findings
            if (f.comparison.study, f.endpoint.name) == (study, endpoint)
            and f.pairs
            and (arms is None or f.comparison.arms == tuple(arms))
            and wanted <= f.condition.items()
        ]

    def slopes(self, study: str, arms: Sequence[str], factor: str, condition: Condition | None = None) -> list[float]:
        """Return for each seed the slope of the logarithm of the ratio of thresholds on that of ``factor``, over all its levels."""
        found = self.find(study, "threshold", arms, condition)
        xs = np.log([float(f.condition[factor]) for f in found])
        seeds = set.intersection(*({pair.seed for pair in f.pairs} for f in found)) if len(found) > 1 else set()
        of_seed = {seed: [pair.effect.low for f in found for pair in f.pairs if pair.seed == seed] for seed in sorted(seeds)}
        return [float(np.polyfit(xs, np.log(ratios), 1)[0]) for ratios in of_seed.values()]


def judge(grid: AblationConfig, runs: Runs) -> Findings:
    """Judge a grid. The result depends only on its config and its runs."""
    found, equalities = [], []
    for comparison in grid.comparisons:
        for condition in _conditions(runs, comparison):
            reference, treatment = (Arm(grid, runs, comparison.study, arm, condition) for arm in comparison.arms)
            study = grid.studies[comparison.study]
            for name in study.endpoints:
                if name == "equal":
                    equalities.append(_equality(comparison, condition, reference, treatment))
                else:
                    endpoint = endpoint_of(name, study.scores)
                    found.append(_finding(grid, runs, comparison, condition, endpoint, (reference, treatment)))
    return Findings(grid, runs, tuple(found), tuple(equalities))


def _conditions(runs: Runs, comparison: ComparisonConfig) -> list[Condition]:
    """The conditions that the grid has for both arms."""
    reference, treatment = ([run.condition for run in runs.select(comparison.study, arm)] for arm in comparison.arms)
    return [condition for i, condition in enumerate(reference) if condition in treatment and condition not in reference[:i]]


def _finding(
    grid: AblationConfig,
    runs: Runs,
    comparison: ComparisonConfig,
    condition: Condition,
    endpoint: Endpoint,
    arms: tuple[Arm, Arm],
) -> Finding:
    pairs, rates = [], []
    for seed in arms[0].study.seeds:
        chosen = [endpoint.rate(arm, seed) for arm in arms]
        values = [None if rate is None else endpoint.value(arm, rate, seed) for arm, rate in zip(arms, chosen, strict=True)]
        if values[0] is not None and values[1] is not None:
            pairs.append(Pair(seed, values[0], values[1], endpoint.effect(values[0], values[1])))
            rates.append([rate or "" for rate in chosen])
    by_arm = tuple(rate[0] for rate in rates), tuple(rate[1] for rate in rates)
    edge = any(rate in (arm.rates[0], arm.rates[-1]) for arm, of in zip(arms, by_arm, strict=True) for rate in of if rate)
    margin = grid.ratio_margin, grid.score_margin
    law = comparison.law if endpoint.is_ratio else None
    part = law.part(condition) if law else None
    return Finding(
        comparison=comparison,
        endpoint=endpoint,
        condition=condition,
        rates=by_arm,
        at_edge=edge,
        pairs=tuple(pairs),
        missing=tuple(sorted(set(arms[0].study.seeds) - {pair.seed for pair in pairs})),
        margin=Span(1 / margin[0], margin[0]) if endpoint.is_ratio else Span(-margin[1], margin[1]),
        bound=None if law is None or part == "rest" else float(condition[law.factor]) ** law.power,
        predicted=_formula(grid, runs, comparison, law, condition) if law and law.parts and not part else None,
    )


def _formula(
    grid: AblationConfig, runs: Runs, comparison: ComparisonConfig, law: LawConfig, condition: Condition
) -> float | None:
    """The median over the seeds of (b / η_QK + 1 / η_R) / (1 / η_QK + 1 / η_R), of the reference alone; b is the law's bound."""
    found, bound = [], float(condition[law.factor]) ** law.power
    parts = [
        Arm(grid, runs, comparison.study, comparison.arms[0], {**condition, str(law.parts): part}) for part in ("qk", "rest")
    ]
    for seed in parts[0].study.seeds:
        qk, rest = (Threshold().value(part, "", seed) for part in parts)
        if qk is not None and rest is not None:
            found.append((bound / middle(qk) + 1 / middle(rest)) / (1 / middle(qk) + 1 / middle(rest)))
    return float(np.median(found)) if found else None


def _equality(comparison: ComparisonConfig, condition: Condition, reference: Arm, treatment: Arm) -> Equality:
    both = [key for key in reference.done if key in treatment.done]
    equal = {seed: True for _, seed in both}
    for key in both:
        equal[key[1]] &= reference.done[key].result["digest"] == treatment.done[key].result["digest"]
    return Equality(comparison, condition, equal, min((reference.done[key].result["steps"] for key in both), default=0))


# --- predictions


class Answer(NamedTuple):
    """The answer to one expected range of a prediction under one condition: HELD, NOT HELD, UNDECIDED or NOT RUN."""

    name: str
    statement: str
    finding: Finding | None
    measured: Span | None
    status: str


def answers(findings: Findings) -> Iterator[Answer]:
    """Yield the answers to the predictions of the grid, in its order. A prediction holds if all its answers hold."""
    for name, prediction in findings.grid.predictions.items():
        for expected in prediction.expect:
            found = findings.find(expected.study, expected.endpoint, expected.arms, expected.condition)
            for finding in found:
                measured = _measured(findings, finding, expected)
                yield Answer(name, prediction.statement, finding, measured, _status(finding, measured, expected))
            if not found:
                yield Answer(name, prediction.statement, None, None, "NOT RUN")


def _measured(findings: Findings, finding: Finding, expected: ExpectedConfig) -> Span | None:
    """The number that is held against the range, or its interval; None where what it is divided by is missing."""
    found = finding.estimate if expected.by == "median" else finding.interval and finding.interval[0]
    if found is None:
        return None
    if expected.formula:
        return found.over(Span(finding.predicted, finding.predicted)) if finding.predicted else None
    if expected.over is None:
        return found
    study = findings.grid.studies[expected.over.study]
    shared = {factor: level for factor, level in finding.condition.items() if factor in study.factors and factor != RATE}
    other = findings.find(expected.over.study, finding.endpoint.name, expected.over.arms, {**shared, **expected.over.condition})
    return found.over(other[0].estimate) if len(other) == 1 and other[0].estimate else None


def _status(finding: Finding, measured: Span | None, expected: ExpectedConfig) -> str:
    """A ratio of fewer than five pairs decides nothing, and neither does one that runs at their cap leave open."""
    if measured is None or finding.interval is None:
        return "UNDECIDED"
    low, high = (-math.inf if expected.range[0] is None else expected.range[0]), expected.range[1]
    bounds = Span(low, math.inf if high is None else high)
    if measured.low > bounds.high or measured.high < bounds.low:
        return "NOT HELD"
    return "HELD" if expected.by == "interval" or measured.within(bounds) else "UNDECIDED"
