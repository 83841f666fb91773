"""What the records say: endpoints, intervals, verdicts. See ``docs/ablation.md``, "How it is judged"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minitx.ablation.config import AblationConfig, ComparisonConfig, Condition, Endpoint, Verdict
from minitx.ablation.records import Run, Runs


@dataclass(frozen=True)
class Span:
    """A number known to lie between two ends; they are equal where it is known exactly. An end may be 0 or infinite."""

    low: float
    high: float


@dataclass(frozen=True)
class Pair:
    """One seed of a comparison: what was measured on the reference and on the treatment, and their ratio or difference.

    ``time``: steps, the ratio treatment / reference (above 1: slower). ``stability``: largest stable rates, the ratio
    reference / treatment (above 1: less stable). ``largest_rate``: indices on the grid of rates, treatment - reference, in steps
    of the grid. Scores and measures: values, treatment - reference.
    """

    seed: int
    reference: Span
    treatment: Span
    effect: Span


@dataclass(frozen=True)
class Finding:
    """One comparison on one endpoint under one condition.

    Attributes:
        comparison: study, arms, law.
        endpoint: what is compared.
        condition: the levels of all factors but the rate.
        is_primary: whether it belongs to the family that is adjusted.
        rates: the reference's and the treatment's own best rates, one a judged seed; () under ``stability``.
        at_edge: for each arm, whether a best rate is the smallest or largest of the rates tried.
        pairs: one a seed that has both.
        missing: seeds without a pair.
        estimate: the median effect: of the lower ends.
        or_more: the median of the upper ends is larger.
        interval: of the median effect, by order statistics; None where there are fewer than six pairs.
        coverage: of the interval.
        p: one-sided sign test against the margin; None where there are fewer than six pairs.
        p_adjusted: by Holm over the primary findings; None for the others.
        law: the law's value under this condition, or None.
        verdict, reason: the word, and what it rests on, in one sentence.
    """

    comparison: ComparisonConfig
    endpoint: Endpoint
    condition: Condition
    is_primary: bool
    rates: tuple[tuple[str, ...], tuple[str, ...]]
    at_edge: tuple[bool, bool]
    pairs: tuple[Pair, ...]
    missing: tuple[int, ...]
    estimate: float | None
    or_more: bool
    interval: Span | None
    coverage: float | None
    p: float | None
    p_adjusted: float | None
    law: float | None
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Equality:
    """Score ``equal``: whether the arms of a comparison have the same losses bit for bit, for each seed under a condition."""

    comparison: ComparisonConfig
    condition: Condition
    equal: Mapping[int, bool]
    steps: int


@dataclass(frozen=True)
class Answer:
    """Of a prediction: HELD, NOT HELD, UNDECIDED or NOT TESTED, with the numbers in one sentence."""

    name: str
    statement: str
    status: str
    evidence: str


@dataclass(frozen=True)
class Findings:
    """Everything that the judge found, and the runs that it was found from."""

    grid: AblationConfig
    runs: Runs
    findings: tuple[Finding, ...]
    equalities: tuple[Equality, ...]

    def find(self, study: str, endpoint: Endpoint, arms: Sequence[str] | None = None, condition: Condition | None = None) -> list[Finding]:
        """The findings that agree with all that is given."""
        wanted = set((condition or {}).items())
        return [
            f
            for f in self.findings
            if f.comparison.study == study
            and f.endpoint == endpoint
            and (arms is None or f.comparison.arms == tuple(arms))
            and wanted <= set(f.condition.items())
        ]


def judge(grid: AblationConfig, runs: Runs) -> Findings:
    """Judge a grid from its runs alone."""
    return None


def solved_step(run: Run, value: float | None = None) -> int | None:
    """The first step at which the run solved its task (``studies.STUDY.solved``), or None."""
    return None
