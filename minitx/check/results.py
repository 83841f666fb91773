"""Results of a check: what was tried, what is wrong, and how to mend it.

A ``Report`` is printed as a table. ``Report.json`` is for graders: its ids stay the same when a sentence is written anew.

    >>> no_scale = Finding("no-scale", Severity.WRONG, "no scale", "Divide the scores by √d_k.", "the output of the case plain differs by 1.2")
    >>> checks = Check("plain", Status.FAILED), Check("mask", Status.NOT_TRIED, "the function takes no mask")
    >>> report = Report("attention", "attention(q, k, v)", 0, checks, (no_scale,))
    >>> print(report)
    attention, seed 0
    called as  attention(q, k, v)
    wrong      no scale
               Divide the scores by √d_k.
               the output of the case plain differs by 1.2
    not tried  mask: the function takes no mask
    >>> report.exit_code
    1
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

WIDTH = 100
"""The width of a list in the table, in letters."""

VERSION = 1
"""The version of the JSON. A key or an id that changes its meaning raises it."""


class Severity(StrEnum):
    """How bad a finding is. The program exits with 1 if something is wrong."""

    WRONG = "wrong"
    FRAGILE = "fragile"
    NOTE = "note"


class Status(StrEnum):
    """The result of one check. A check that was not tried is never counted as passed."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Check:
    """One thing that was tried, or why it was not.

    Attributes:
        id: stable, such as ``causal-with-a-cache``.
        reason: why it was not tried, or what failed.
        size: the largest difference from what is right. None: nothing was compared.
        allowed: the difference that rounding explains.
    """

    id: str
    status: Status
    reason: str = ""
    size: float | None = None
    allowed: float | None = None


@dataclass(frozen=True)
class Finding:
    """A mistake, or something that the author should know.

    Attributes:
        id: stable, such as ``no-scale``.
        fault: the mistake in one line.
        advice: what to write instead.
        witness: where the mistake shows, and by how much.
        repeat: the command that repeats it.
    """

    id: str
    severity: Severity
    fault: str
    advice: str = ""
    witness: str = ""
    repeat: str = ""


@dataclass(frozen=True)
class Report:
    """The result of a check.

    Attributes:
        subject: the name of the function, layer or model.
        called_as: how it was called. "": no way to call it was found.
        seed: of the random inputs.
        checks: all checks, also those that were not tried.
        findings: the mistakes. Of equal severity, the one to mend first comes first.
        stage: of a graded exercise. None: not graded.
    """

    subject: str
    called_as: str
    seed: int
    checks: tuple[Check, ...] = ()
    findings: tuple[Finding, ...] = ()
    stage: int | None = None

    def __post_init__(self) -> None:
        order = list(Severity)
        object.__setattr__(self, "findings", tuple(sorted(self.findings, key=lambda finding: order.index(finding.severity))))

    @property
    def mend_first(self) -> Finding | None:
        """Return the worst finding, of equals the first. None if there are only notes."""
        return next((finding for finding in self.findings if finding.severity != Severity.NOTE), None)

    @property
    def is_right(self) -> bool:
        """Return whether nothing is wrong. Something may be fragile."""
        return all(finding.severity != Severity.WRONG for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """Return 1 if something is wrong, else 0."""
        return 0 if self.is_right else 1

    @property
    def points(self) -> tuple[int, int] | None:
        """Return (points, the most points) of a graded exercise, one for each check that passed. None: not graded."""
        return None if self.stage is None else (len(self.with_status(Status.PASSED)), len(self.checks))

    def with_status(self, status: Status) -> tuple[Check, ...]:
        """Return the checks with this status."""
        return tuple(check for check in self.checks if check.status == status)

    def as_dict(self) -> dict[str, Any]:
        """Return what ``json`` writes."""
        points = self.points
        return {
            "version": VERSION,
            "subject": self.subject,
            "called_as": self.called_as,
            "seed": self.seed,
            "stage": self.stage,
            "is_right": self.is_right,
            "points": None if points is None else {"reached": points[0], "most": points[1]},
            "mend_first": None if self.mend_first is None else self.mend_first.id,
            "findings": [asdict(finding) for finding in self.findings],
            "checks": [asdict(check) for check in self.checks],
        }

    def json(self) -> str:
        """Return the report as JSON. A number that is not finite is written as text, "inf" or "nan"."""
        return json.dumps(_finite(self.as_dict()), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def __str__(self) -> str:
        return "\n".join([f"{self.subject}, seed {self.seed}", *_rows(self._lines())])

    def _lines(self) -> Iterator[tuple[str, str]]:
        """The rows of the table: a heading ("": of the row above) and a text."""
        if self.called_as:
            yield "called as", self.called_as
        for finding in self.findings:
            yield finding.severity.value, finding.fault
            yield from (("", text) for text in (finding.advice, finding.witness, finding.repeat) if text)
        yield from _grouped(self.with_status(Status.NOT_TRIED))
        if passed := self.with_status(Status.PASSED):
            yield from _wrapped("passed", ", ".join(dict.fromkeys(map(_name, passed))))
        if self.points is not None:
            yield "points", f"{self.points[0]} of {self.points[1]} in stage {self.stage}"
        if self.mend_first is not None and len([f for f in self.findings if f.severity != Severity.NOTE]) > 1:
            yield "mend first", self.mend_first.fault


def stable_id(name: str) -> str:
    """Return the id for a name of plain words.

    >>> stable_id("zeros_like(Q) for d_v ≠ d_k")
    'zeros-like-q-for-d-v-d-k'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _rows(lines: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{heading:<10} {text}".rstrip() for heading, text in lines]


def _grouped(checks: Iterable[Check]) -> Iterator[tuple[str, str]]:
    """A line for each reason why something was not tried."""
    reasons: dict[str, list[str]] = {}
    for check in checks:
        names = reasons.setdefault(check.reason, [])
        if (name := _name(check)) not in names:
            names.append(name)
    for reason, names in reasons.items():
        yield from _wrapped("not tried", f"{', '.join(names)}: {reason}")


def _name(check: Check) -> str:
    """The name of a check for people. What stands behind a slash is a part of it."""
    return check.id.partition("/")[0].replace("-", " ")


def _wrapped(heading: str, text: str) -> Iterator[tuple[str, str]]:
    """A long text in several rows."""
    for number, line in enumerate(textwrap.wrap(text, WIDTH)):
        yield ("" if number else heading), line


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
