"""What a grid about the scale says of itself: which studies and arms the report's sentences are about."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minitx.ablation.config import Condition
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.records import Run


@dataclass(frozen=True)
class Continued:
    """A study of solved models that are trained on, with one optimizer.

    Attributes:
        study: scored by ``stability``.
        rate: the learning rate that the first screen shows; the nearest that both arms ran is taken.
        shown: another study that has the curves of that rate; default ``study``.
    """

    study: str
    rate: float
    shown: str = ""


@dataclass(frozen=True)
class Options:
    """What ``options`` of a grid about the scale may hold; a study that the grid has not is passed over.

    Attributes:
        arms: with and without the scale.
        width: the factor whose levels are d_k.
        where: other levels that the first screen is about, such as {init: lecun}; those that a study has count.
        settings: a level of ``width`` to words, such as {"128": "one head, d_k = 128"}.
        task: what the solved models had learned, after "to".
        last_row: a sentence on what the last query of the attention does, with a space after it.
        chance: accuracy of guessing.
        time: the study of steps to solve.
        continued: the optimizer's name to its study, see ``Continued``.
        attention: a study that keeps the attention.
        text: the optimizer's name to a study of text models that are trained on.
        scratch: studies of text from scratch.
        uniform: an arm of them whose attention is a plain average.
        ladder: a study whose one factor besides the rate is the rung.
        published: a result's name (R8 ... R13) to the finding that passes it: study, arms, endpoint, verdict, and condition.
    """

    arms: Sequence[str] = ("inv_sqrt", "unscaled")
    width: str = "head_dim"
    where: Condition = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    task: str = ""
    last_row: str = ""
    chance: float | None = None
    time: str = ""
    continued: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    attention: str = ""
    text: Mapping[str, str] = field(default_factory=dict)
    scratch: Sequence[str] = ()
    uniform: str = "uniform"
    ladder: str = ""
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, findings: Findings) -> Options:
        """The options of a grid."""
        return cls(**findings.grid.options)

    def studies(self) -> dict[str, Continued]:
        """``continued``, by the name of the optimizer."""
        return {name: Continued(**one) for name, one in self.continued.items()}

    def level(self, place: Finding | Run) -> str:
        """The d_k of a finding or a run."""
        return place.condition.get(self.width, "0")

    def setting(self, level: str) -> str:
        """A d_k in words."""
        return self.settings.get(level, f"d_k = {level}")


def by_width(findings: Findings, study: str, endpoint: str, arms: Sequence[str] | None = None) -> list[Finding]:
    """The findings with and without the scale at each d_k that has pairs, under ``where``, the smallest d_k first."""
    options = Options.of(findings)
    found = [f for f in findings.find(study, endpoint, arms or options.arms) if f.pairs]
    found = [f for f in found if all(f.condition.get(name, level) == level for name, level in options.where.items())]
    return sorted(found, key=lambda f: float(options.level(f)))


def widest(findings: Findings) -> str:
    """The largest d_k that the first screen's studies have; "0" where they have no runs."""
    options = Options.of(findings)
    studies = [options.time, *(one.study for one in options.studies().values())]
    levels = {options.level(run) for study in studies for run in findings.runs.select(study, status="done")}
    return max(levels, key=float, default="0")


def shown_runs(findings: Findings, one: Continued) -> dict[str, list[Run]]:
    """The runs of both arms at the largest d_k, at the rate nearest to the named one that both ran; {} where there is none."""
    options, width = Options.of(findings), widest(findings)
    for study in (one.shown, one.study):
        done = [run for run in findings.runs.select(study, status="done") if options.level(run) == width]
        rates = set.intersection(*({run.rate for run in done if run.arm == arm} for arm in options.arms))
        if rates:
            rate = min(sorted(rates, key=float), key=lambda rate: abs(math.log(float(rate) / one.rate)))
            return {arm: [run for run in done if (run.arm, run.rate) == (arm, rate)] for arm in options.arms}
    return {}
