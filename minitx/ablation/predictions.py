"""Compare the predictions with the findings."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from minitx.ablation.design import AblationConfig, ExpectedConfig
from minitx.ablation.intervals import MIN_PAIRS, Span
from minitx.ablation.judge import Finding, Findings, printed
from minitx.ablation.wording import ENDPOINTS, condition_text, count_text, effect_text, title, words
from minitx.config import ConfigError

HELD, NOT_HELD, UNDECIDED, NOT_TESTED = "HELD", "NOT HELD", "UNDECIDED", "NOT TESTED"


class Answer(NamedTuple):
    """The answer to a prediction: HELD, NOT HELD, UNDECIDED or NOT TESTED, with the numbers in one sentence."""

    name: str
    statement: str
    status: str
    evidence: str


def answers(findings: Findings) -> tuple[Answer, ...]:
    """Return the answers to the predictions of the grid, in its order."""
    grid, found = findings.grid, []
    for name, prediction in grid.predictions.items():
        parts = [part for expected in prediction.expect for part in _answer(findings, expected)]
        if prediction.rule is not None:
            parts.append(rule_of(grid, prediction.rule)(findings, **prediction.options))
        status = together([status for status, _ in parts])
        found.append(Answer(name, prediction.statement, status, "; ".join(text for _, text in parts)))
    return tuple(found)


def check_rules(grid: AblationConfig) -> None:
    """Raise a ConfigError if the module ``about`` or a rule of a prediction does not exist."""
    if grid.about is not None:
        try:
            importlib.import_module(grid.about)
        except (ImportError, TypeError, ValueError) as error:  # also of a name that cannot be one
            raise ConfigError(f"about={grid.about} cannot be imported: {error}") from error
    for prediction in grid.predictions.values():
        if prediction.rule is not None:
            rule_of(grid, prediction.rule)


def rule_of(grid: AblationConfig, name: str) -> Callable[..., tuple[str, str]]:
    """Return the function ``RULES[name]`` of the module ``about``: (findings, **options) -> (status, evidence).

    Raises:
        ConfigError: there is no module, or it has no such rule.
    """
    if grid.about is None:
        raise ConfigError(f"about=null has no rule {name}, which a prediction needs")
    rules = getattr(importlib.import_module(grid.about), "RULES", {})
    if name not in rules:
        raise ConfigError(f"about={grid.about} has no rule {name}; it has {', '.join(rules) or 'none'}")
    return rules[name]  # type: ignore[no-any-return]


def together(statuses: Sequence[str]) -> str:
    """Return the status of a prediction with several parts. It holds if all parts hold, and fails if one part fails."""
    for status in (NOT_HELD, UNDECIDED):
        if status in statuses:
            return status
    if NOT_TESTED in statuses or not statuses:
        return UNDECIDED if HELD in statuses else NOT_TESTED
    return HELD


def _answer(findings: Findings, expected: ExpectedConfig) -> list[tuple[str, str]]:
    """A status and its evidence for each finding that ``expected`` is about."""
    grid = findings.grid
    arms = " against ".join(f"“{words(grid, arm)}”" for arm in reversed(expected.arms))
    where = f"{title(grid, expected.study)}, {ENDPOINTS.get(expected.endpoint, words(grid, expected.endpoint))}, {arms}"
    if expected.endpoint == "equal":
        fits = [e for e in findings.equalities if e.comparison.study == expected.study and e.comparison.arms == expected.arms]
        equal = [value for e in fits if expected.condition.items() <= e.condition.items() for value in e.equal.values()]
        status = (HELD if all(equal) else NOT_HELD) if equal else NOT_TESTED
        return [(status, f"{where}: {sum(equal)} of {len(equal)} pairs of runs are equal")]
    found = findings.find(expected.study, expected.endpoint, expected.arms, expected.condition)
    return [(_status(finding, expected), f"{where}{_said(grid, finding)}") for finding in found] or [
        (NOT_TESTED, f"{where}: no runs")
    ]


def _status(finding: Finding, expected: ExpectedConfig) -> str:
    if len(finding.pairs) < MIN_PAIRS:
        return UNDECIDED if finding.pairs else NOT_TESTED
    parts = [HELD]
    if expected.verdict is not None and finding.verdict != expected.verdict:
        parts.append(UNDECIDED if finding.verdict == "UNDECIDED" else NOT_HELD)
    low, high = expected.ratio
    bounds = Span(-math.inf if low is None else low, math.inf if high is None else high)
    middle = printed(finding.endpoint, finding.pairs)
    if not middle.within(bounds):  # a range that reaches into the bounds is open
        parts.append(NOT_HELD if middle.high < bounds.low or middle.low > bounds.high else UNDECIDED)
    return together(parts)


def _said(grid: AblationConfig, finding: Finding) -> str:
    condition = f", {condition_text(grid, finding.condition)}" if finding.condition else ""
    if finding.estimate is None:
        return f"{condition}: no pairs"
    return f"{condition}: {finding.verdict}, {effect_text(finding)} ({count_text(len(finding.pairs), 'pair')})"
