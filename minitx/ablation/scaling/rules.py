"""Rules of predictions that a grid chooses by name: each gives HELD, NOT HELD, UNDECIDED or NOT TESTED, and the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from minitx.ablation import wording as say
from minitx.ablation.config import Condition
from minitx.ablation.figures import judged_runs, steps_to_solve
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.outcomes import END, Levels, initial_loss, last_mean, outcome
from minitx.ablation.predictions import together
from minitx.ablation.records import Run
from minitx.ablation.scaling.initial_weights import variance_slope
from minitx.ablation.scaling.options import Options, by_width

Answered = tuple[str, str]
NOTHING: Answered = ("NOT TESTED", "the runs are not there")


def follows_law(findings: Findings, *, studies: Sequence[str], arms: Sequence[str], low: float, high: float) -> Answered:
    """The ratio of the largest stable rates grows with d_k and lies between ``low`` and ``high`` times the law at every d_k."""
    said, statuses = [], []
    for study in studies:
        found = by_width(findings, study, "stability", arms)
        if len(found) < 2 or not all(f.law for f in found):
            return NOTHING
        parts = [(f.estimate or 0.0) / (f.law or 1.0) for f in found]
        holds = _grows(found) and all(low <= part <= high for part in parts)
        statuses.append("UNDECIDED" if any(f.or_more for f in found) else _status(holds))
        shares = ", ".join(f"{part:.2f}" for part in parts)
        said.append(f"{say.title(findings.grid, study)}: {_listed(findings, found)}; of the law: {shares}")
    return together(statuses), "; ".join(said)


def ratio_grows(
    findings: Findings, *, study: str, endpoint: str, arms: Sequence[str], condition: Condition | None = None
) -> Answered:
    """The median ratio of a comparison is larger at each larger d_k."""
    found = [f for f in by_width(findings, study, endpoint, arms) if (condition or {}).items() <= f.condition.items()]
    return (_status(_grows(found)), _listed(findings, found)) if len(found) > 1 else NOTHING


def wider_or_edge(findings: Findings, *, study: str, arms: Sequence[str], condition: Condition) -> Answered:
    """The second arm's largest usable rate is higher, or both arms reach the top of the grid of rates."""
    found = [f for f in findings.find(study, "largest_rate", arms, condition) if f.pairs]
    if not found:
        return NOTHING
    f = found[0]
    if all(math.isinf(pair.reference.high) and math.isinf(pair.treatment.high) for pair in f.pairs):
        return "HELD", "both arms solve the task at the top of the grid"
    status = "UNDECIDED" if f.verdict == "UNDECIDED" else _status(f.verdict == "WIDER")
    return status, f"{f.verdict}: {say.effect_text(f)}"


def all_solve_within(findings: Findings, *, study: str, arms: Sequence[str], head_dims: Sequence[str], steps: int) -> Answered:
    """At each d_k of ``head_dims`` every judged seed of both arms solves the task within ``steps`` at its arm's best rate."""
    grid, level, slowest = findings.grid, Options.of(findings).level, {}
    found = [f for f in by_width(findings, study, "time", arms) if level(f) in head_dims]
    for f in found:
        for arm in arms:
            needed = [steps_to_solve(grid, run) or math.inf for run in judged_runs(findings, f, arm)]
            slowest[f"d_k {level(f)}, {say.words(grid, arm)}"] = max(needed, default=math.inf)
    said = "; ".join(f"{name}: {say.number(value)} steps" for name, value in slowest.items())
    return (_status(max(slowest.values()) <= steps), f"slowest: {said}") if len(found) >= len(head_dims) else NOTHING


def above_uniform_and_lost(
    findings: Findings, *, scratch: str, condition: Condition, arm: str, floor: str, continued: Mapping[str, str]
) -> Answered:
    """From scratch ``arm`` ends above ``floor`` at every rate; each of ``continued`` (study to rate) is LEARNED AND LOST."""
    grid, select = findings.grid, findings.runs.select
    level = uniform_level(findings, scratch, floor, condition)
    ends = [last_mean(run, "loss") for run in select(scratch, arm, condition, status="done")]
    lost = {
        study: [outcome(run, levels_of(findings, run)) for run in select(study, arm, rate=rate, status="done")]
        for study, rate in continued.items()
    }
    if level is None or not ends or not all(lost.values()):
        return NOTHING
    outcomes = [found for of_study in lost.values() for found in of_study]
    said = [
        f"from scratch {say.words(grid, arm)} ends at {min(ends):.2f} nats or more, {say.words(grid, floor)} at {level:.2f}"
    ]
    said += [f"{say.title(grid, study)}: {', '.join(of_study)}" for study, of_study in lost.items()]
    return _status(min(ends) > level and set(outcomes) <= {"LEARNED AND LOST"}), "; ".join(said)


def equal_outcomes(findings: Findings, *, studies: Mapping[str, str], reference: str) -> Answered:
    """Every run of an arm (study to arm) has the outcome of the reference's run of the same condition, rate and seed."""
    total, different = 0, []
    for study, arm in studies.items():
        for run in findings.runs.select(study, arm, status="done"):
            for other in findings.runs.select(study, reference, run.condition, rate=run.rate, seeds=[run.seed], status="done"):
                pair = [outcome(one, levels_of(findings, one)) for one in (other, run)]
                total += 1
                different += [f"{say.title(findings.grid, study)}, seed {run.seed}: {' and '.join(pair)}"] * (
                    pair[0] != pair[1]
                )
    said = "; ".join([f"{total - len(different)} of {total} pairs of runs", *different])
    return (_status(not different), said) if total else NOTHING


def variance_law(findings: Findings, *, low: float = 0.98, high: float = 1.02, scheme: str = "lecun") -> Answered:
    """The slope of ln Var(q·k) on ln d_k at the initial weights lies between ``low`` and ``high``."""
    slope = variance_slope(scheme)
    return _status(low <= slope <= high), f"slope {slope:.3f}"


RULES: dict[str, Callable[..., Answered]] = {
    rule.__name__: rule
    for rule in (
        follows_law,
        ratio_grows,
        wider_or_edge,
        all_solve_within,
        above_uniform_and_lost,
        equal_outcomes,
        variance_law,
    )
}


def _status(holds: bool) -> str:
    return "HELD" if holds else "NOT HELD"


def _grows(found: Sequence[Finding]) -> bool:
    return all((a.estimate or 0.0) < (b.estimate or 0.0) for a, b in pairwise(found))


def _listed(findings: Findings, found: Sequence[Finding]) -> str:
    return ", ".join(f"d_k {Options.of(findings).level(f)}: {say.effect_text(f)}" for f in found)


# --- what an outcome is held against


def uniform_level(findings: Findings, study: str, arm: str, condition: Condition, steps: int | None = None) -> float | None:
    """The end of an arm whose attention is a plain average, after ``steps`` (default all), at its best rate; None without one."""
    ends: dict[str, list[float]] = {}
    for run in findings.runs.select(study, arm, condition, status="done"):
        known = run.result["loss"][:steps]
        if len(known) == (steps or len(known)) and None not in known:
            ends.setdefault(run.rate, []).append(fmean(known[-END:]))
    return min(map(fmean, ends.values()), default=None)


def levels_of(findings: Findings, run: Run) -> Levels:
    """What the outcome of a run is held against: the untrained network, the unigram loss, and a plain average.

    The plain average is that of the run's own study, or of the first study of text from scratch for continued models.
    """
    options, solved = Options.of(findings), findings.grid.studies[run.study].solved
    first = findings.runs.start_of(run)
    steps = run.result["cap"] + (first.result["steps"] if first is not None and first.status == "done" else 0)
    scratch = run.study if run.study in options.scratch else next(iter(options.scratch), "")
    unigram = run.result["floors"].get("unigram")
    is_text = unigram is not None or run.result["accuracy"] is None
    level = uniform_level(findings, scratch, options.uniform, {}, steps) if is_text else None
    return Levels(initial_loss(findings.runs, run), unigram, level, solved)
