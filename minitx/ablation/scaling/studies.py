"""Select the studies shown on the page about the scale, by the ``options`` of the grid. Missing studies are skipped."""

from __future__ import annotations

from collections.abc import Sequence

from minitx.ablation.judge import Finding, Findings
from minitx.ablation.records import Run

ARMS = ("inv_sqrt", "unscaled")
"""With and without the scale."""
WIDTH = "head_dim"
"""The factor whose levels are d_k."""


def level(place: Finding | Run) -> str:
    """The d_k of a finding or a run."""
    return place.condition.get(WIDTH, "0")


def setting(findings: Findings, width: str) -> str:
    """A d_k in words."""
    return findings.grid.options["settings"].get(width, f"d_k = {width}")  # type: ignore[no-any-return]


def by_width(findings: Findings, study: str, endpoint: str, arms: Sequence[str] = ARMS) -> list[Finding]:
    """The findings at each d_k that has pairs, the smallest d_k first, under the option ``where``."""
    where = findings.grid.options["where"].items()
    found = [f for f in findings.find(study, endpoint, arms) if f.pairs]
    found = [f for f in found if all(f.condition.get(name, wanted) == wanted for name, wanted in where)]
    return sorted(found, key=lambda f: float(level(f)))


def widest(findings: Findings) -> str:
    """The largest d_k that the first screen's studies have; "0" where they have no runs."""
    options = findings.grid.options
    studies = [options["time"], *(one["study"] for one in options["continued"].values())]
    levels = {level(run) for study in studies for run in findings.runs.select(study, status="done")}
    return max(levels, key=float, default="0")


def shown_runs(findings: Findings, shown: str, rate: str) -> dict[str, list[Run]]:
    """The runs of both arms of the study ``shown`` at the largest d_k and at ``rate``; {} where an arm has none."""
    condition = {WIDTH: widest(findings)}
    found = {arm: findings.runs.select(shown, arm, condition, rate=rate, status="done") for arm in ARMS}
    return found if all(found.values()) else {}
