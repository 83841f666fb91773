"""Results of a check: the checks that were tried, the mistakes, and advice.

A ``Report`` is printed as a table. ``Report.json`` is for graders: its ids stay the same when a sentence is rewritten.

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
import re
import textwrap
import tomllib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

WIDTH = 100
"""The width of a list in the table, in characters."""

VERSION = 1
"""The version of the JSON. It increases when a key or an id changes its meaning."""


class Severity(StrEnum):
    """The severity of a finding. ``minitx-check`` exits with 1 if something is wrong."""

    WRONG = "wrong"
    FRAGILE = "fragile"
    NOTE = "note"


class Status(StrEnum):
    """The result of one check. A check that was not tried is never counted as passed."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_TRIED = "not tried"


WRONG, FRAGILE, NOTE = Severity
PASSED, FAILED, NOT_TRIED = Status


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        id: a stable id, such as ``causal-with-a-cache``.
        status: whether it passed, failed, or was not tried.
        reason: the reason why it failed or was not tried. Of an argument that passed: its meaning.
        size: the largest difference from the correct result. None: nothing was compared.
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
        id: a stable id, such as ``no-scale``.
        severity: wrong, fragile or note.
        fault: the mistake in one line.
        advice: what to write instead.
        witness: where the mistake shows, and by how much.
        repeat: the command that repeats the finding.
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
        called_as: a description of the call. "": no way to call it was found.
        seed: the seed of the random inputs.
        checks: all checks, including those that were not tried.
        findings: the mistakes, the worst first. Within a severity, the finding to mend first comes first.
        stage: the stage of a graded exercise. None: not graded.
        taken_as: a description of the positions that a token sees, and the reason. "": not examined.
        only: the properties that were asked for. (): all.
    """

    subject: str
    called_as: str
    seed: int
    checks: tuple[Check, ...] = ()
    findings: tuple[Finding, ...] = ()
    stage: int | None = None
    taken_as: str = ""
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        order = list(Severity)
        object.__setattr__(self, "findings", tuple(sorted(self.findings, key=lambda finding: order.index(finding.severity))))

    @property
    def mend_first(self) -> Finding | None:
        """Return the first of the worst findings, or None if there are only notes."""
        return next((finding for finding in self.findings if finding.severity != Severity.NOTE), None)

    @property
    def is_right(self) -> bool:
        """Return whether nothing is wrong. There may be fragile findings."""
        return all(finding.severity != Severity.WRONG for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """Return 1 if something is wrong, 2 if nothing was tried but calls, or no check of a property in ``only``, else 0."""
        tried = {check.id.partition("/")[0] for check in self.checks if check.status != NOT_TRIED}
        is_tried = self.called_as and tried - {"call"} and tried.issuperset(self.only)
        return 1 if not self.is_right else 0 if is_tried else 2

    @property
    def points(self) -> tuple[int, int] | None:
        """Return (points, largest possible points) of a graded exercise, one for each check that passed. None: not graded."""
        return None if self.stage is None else (len(self.with_status(Status.PASSED)), len(self.checks))

    def with_status(self, status: Status) -> tuple[Check, ...]:
        """Return the checks with this status."""
        return tuple(check for check in self.checks if check.status == status)

    def json(self) -> str:
        """Return the report as JSON. A number that is not finite is written as text, "inf" or "nan"."""
        points = None if self.points is None else dict(zip(("reached", "most"), self.points, strict=True))
        first = None if self.mend_first is None else self.mend_first.id
        more = {"version": VERSION, "is_right": self.is_right, "points": points, "mend_first": first}
        plain = json.loads(json.dumps(asdict(self) | more), parse_constant=lambda number: str(float(number)))
        return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"

    def __str__(self) -> str:
        rows = [f"{heading:<10} {text}".rstrip() for heading, text in self._lines()]
        return "\n".join([f"{self.subject}, seed {self.seed}", *rows])

    def _lines(self) -> Iterator[tuple[str, str]]:
        """The rows of the table: a heading ("": as in the row above) and a text."""
        if self.called_as:
            yield "called as", self.called_as
        if self.taken_as:
            yield from _wrapped("taken as", self.taken_as)
        for finding in self.findings:
            yield finding.severity.value, finding.fault
            yield from (("", text) for text in (finding.advice, finding.witness, finding.repeat) if text)
        failed = {_readable_id(check) for check in self.with_status(Status.FAILED)}
        yield from _grouped(self.with_status(Status.NOT_TRIED), {*map(_readable_id, self.with_status(Status.PASSED)), *failed})
        if passed := [name for name in dict.fromkeys(map(_readable_id, self.with_status(Status.PASSED))) if name not in failed]:
            yield from _wrapped("passed", ", ".join(passed))
        if self.points is not None:
            yield "points", f"{self.points[0]} of {self.points[1]} in stage {self.stage}"
        if self.mend_first is not None and len([f for f in self.findings if f.severity != Severity.NOTE]) > 1:
            yield "mend first", self.mend_first.fault


FINDINGS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))
"""The findings by their ids. Without a severity, a finding depends on the declaration."""


def finding(key: str, severity: Severity | None = None, **words: Any) -> Finding:
    """Return the finding ``key`` of ``findings.toml``, with ``words`` in its id and its sentences.

    >>> finding("few-axes", few="(L, D)", many="(B, H, L, D)", also="").fault
    'checked with (L, D): with (B, H, L, D), it runs and gives another result'
    """
    sentences = {name: sentence.format(**words) for name, sentence in FINDINGS[key].items()}
    usual = sentences.pop("severity", severity or NOTE)
    return Finding(key.format(**words), Severity(usual), **sentences)


def stable_id(name: str) -> str:
    """Return the id for a name in plain words.

    >>> stable_id("zeros_like(Q) for d_v ≠ d_k")
    'zeros-like-q-for-d-v-d-k'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _grouped(checks: Iterable[Check], tried: Collection[str]) -> Iterator[tuple[str, str]]:
    """A line for each reason why checks were not tried. If other parts of a check were tried, the line names the part."""
    reasons: dict[str, list[str]] = {}
    for check in checks:
        names = reasons.setdefault(check.reason, [])
        if (name := _readable_id(check)) in tried and (part := check.id.partition("/")[2]):
            name += f" ({part.replace('-', ' ')})"
        if name not in names:
            names.append(name)
    for reason, names in reasons.items():
        yield from _wrapped("not tried", f"{', '.join(names)}: {reason}")


def _readable_id(check: Check) -> str:
    """The readable name of a check, without the part after the slash."""
    return check.id.partition("/")[0].replace("-", " ")


def _wrapped(heading: str, text: str) -> Iterator[tuple[str, str]]:
    """A long text in several rows."""
    for number, line in enumerate(textwrap.wrap(text, WIDTH)):
        yield ("" if number else heading), line
