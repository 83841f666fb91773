"""Numbers, names and findings as text for the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from minitx.ablation.design import AblationConfig, Condition
from minitx.ablation.intervals import Span
from minitx.ablation.judge import Finding, Findings, printed
from minitx.ablation.records import Run

ENDPOINTS = {
    "time": "steps until the task is solved",
    "largest_rate": "largest usable learning rate",
    "stability": "largest stable learning rate",
    "loss": "validation loss",
    "accuracy": "validation accuracy",
}
RATIOS = ("time", "stability")
"""Endpoints whose effects are ratios. The effects of other endpoints are differences."""


def words(grid: AblationConfig, name: str) -> str:
    """Return the grid's words for a study, an arm, a factor, a level or a measure. Without words, return the name."""
    return grid.words.get(name, name)


def title(grid: AblationConfig, study: str) -> str:
    """Return the title of a study."""
    return grid.words.get(study) or grid.studies[study].title or study


def condition_text(grid: AblationConfig, condition: Condition) -> str:
    """Return a condition as text: ``{"head_dim": "128"}`` as ``d_k 128``, with the words of the grid."""
    return ", ".join(f"{words(grid, factor)} {words(grid, level)}".strip() for factor, level in condition.items())


def setting_text(grid: AblationConfig, run: Run) -> str:
    """Return the condition of a run and its learning rate, each on one line."""
    rate = f"learning rate {float(run.rate):g}" if run.rate else ""
    return "\n".join(text for text in (condition_text(grid, run.condition), rate) if text)


def endpoint_text(grid: AblationConfig, finding: Finding) -> str:
    """Return what a finding compares."""
    return ENDPOINTS.get(finding.endpoint, words(grid, finding.endpoint))


def where_text(grid: AblationConfig, finding: Finding) -> str:
    """Return the study of a finding and its condition."""
    return ": ".join(text for text in (title(grid, finding.comparison.study), condition_text(grid, finding.condition)) if text)


def number(value: float | None) -> str:
    """Return a number with three digits, or "–" for None.

    >>> number(0.03162), number(None), number(-12345.6), number(math.inf)
    ('0.0316', '–', '−12,346', '∞')
    """
    if value is None or math.isnan(value):
        return "–"
    text = f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.3g}"
    return text.replace("inf", "∞").replace("-", "−")


def times(value: float) -> str:
    """Return a factor as text.

    >>> times(3.04), times(11.3), times(140.2)
    ('3.0', '11', '140')
    """
    return number(value) if not 0.1 <= value < math.inf else f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def span_text(span: Span | None) -> str:
    """Return an interval as text, with "or more" or "or less" for an open end.

    >>> span_text(Span(2, 4)), span_text(Span(2, math.inf)), span_text(Span(-math.inf, -2))
    ('2 to 4', '2 or more', '−2 or less')
    """
    if span is None:
        return "no interval"
    if span.low == span.high:
        return number(span.low)
    if math.isinf(span.high):
        return "unknown" if span.low in (0, -math.inf) else f"{number(span.low)} or more"
    return f"{number(span.high)} or less" if math.isinf(span.low) else f"{number(span.low)} to {number(span.high)}"


def effect_text(finding: Finding) -> str:
    """Return the estimate of a finding with its sign or ×, or the range in which it lies."""
    if finding.estimate is None:
        return "–"
    if finding.endpoint == "largest_rate":
        return f"{span_text(printed(finding.endpoint, finding.pairs))}, in steps of the grid of rates"
    if finding.endpoint in RATIOS:
        middle = printed(finding.endpoint, finding.pairs)
        if (middle.low, middle.high) == (0, math.inf):
            return "unknown"
        low, high = times(middle.low), times(middle.high)
        return f"× {low}" + ("" if low == high else " or more" if math.isinf(middle.high) else f" to {high}")
    sign = "+" if finding.estimate > 0 else ""
    return f"{sign}{number(finding.estimate)}" + (" nats" if finding.endpoint == "loss" else "")


def percent(values: Iterable[float]) -> str:
    """Return shares as one percentage or a range.

    >>> percent([0.19, 0.604]), percent([0.991, 0.99])
    ('19–60 %', '99 %')
    """
    rounded = sorted({round(100 * value) for value in values})
    return f"{rounded[0]} %" if len(rounded) == 1 else f"{rounded[0]}–{rounded[-1]} %"


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> count_text(1, "seed"), count_text(1200, "step")
    ('1 seed', '1,200 steps')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def list_text(items: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def budget(runs: Sequence[Run]) -> str:
    """Return the budget of the runs: ``1,500 steps``, or a list of budgets."""
    caps = sorted({run.result["cap"] for run in runs if run.status == "done"})
    return f"{list_text([f'{cap:,}' for cap in caps])} steps"


def runs_of(findings: Findings, finding: Finding) -> list[Run]:
    """Return the finished runs of a finding's two arms."""
    arms = finding.comparison.arms
    return [
        run for arm in arms for run in findings.runs.select(finding.comparison.study, arm, finding.condition, status="done")
    ]


PLAIN = {
    "SLOWER": "the task takes {ratio} times as many steps as {reference}",
    "FASTER": "the task takes {ratio} times as many steps as {reference}",
    "LESS STABLE": "the largest stable learning rate is {ratio} times smaller than that of {reference}",
    "MORE STABLE": "the largest stable learning rate is larger than that of {reference} (ratio {effect})",
    "NARROWER": "the largest learning rate that solves the task is lower than that of {reference} ({effect})",
    "WIDER": "the largest learning rate that solves the task is higher than that of {reference} ({effect})",
    "WORSE": "the {endpoint} is worse than that of {reference} ({effect})",
    "BETTER": "the {endpoint} is better than that of {reference} ({effect})",
    "SAME": "the {endpoint} is the same as that of {reference}, within the margin ({effect})",
    "UNDECIDED": "whether the {endpoint} differs from that of {reference} is undecided ({effect})",
}


def finding_sentence(findings: Findings, finding: Finding) -> str:
    """Return a finding in one sentence, with its budget."""
    grid = findings.grid
    reference, treatment = (f"“{words(grid, arm)}”" for arm in finding.comparison.arms)
    effect = effect_text(finding)
    if finding.interval is None:
        effect += f"; {count_text(len(finding.pairs), 'pair')}, six are needed"
    ratio, endpoint = effect.removeprefix("× "), endpoint_text(grid, finding)
    said = PLAIN[finding.verdict].format(effect=effect, ratio=ratio, reference=reference, endpoint=endpoint)
    where = condition_text(grid, finding.condition)
    return (
        f"{treatment}{f' ({where})' if where else ''}: {said}{rate_text(finding)}, within {budget(runs_of(findings, finding))}."
    )


def rate_text(finding: Finding) -> str:
    """Return at which learning rates the arms of a finding were compared."""
    if finding.endpoint in ("stability", "largest_rate") or not any(finding.rates):
        return ""
    return ", at the best of the learning rates tried" if any(finding.at_edge) else ", each at its own best learning rate"
