"""Rules of predictions that a grid chooses by name: each gives HELD, NOT HELD, UNDECIDED or NOT TESTED, and the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from minitx.ablation.config import Condition
from minitx.ablation.figures import judged_runs, steps_to_solve
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.outcomes import END, Levels, initial_loss, last_mean, outcome
from minitx.ablation.records import Run
from minitx.ablation.scaling.initial_weights import variance_slope
from minitx.ablation.scaling.options import Options, by_width
from minitx.ablation.wording import effect_text, number, words

Answered = tuple[str, str]
NOTHING: Answered = ("NOT TESTED", "the runs are not there")


def _status(holds: bool) -> str:
    return "HELD" if holds else "NOT HELD"


def follows_law(findings: Findings, *, studies: Sequence[str], arms: Sequence[str], low: float, high: float) -> Answered:
    """The ratio of the largest stable rates grows with d_k and lies between ``low`` and ``high`` times the law at every d_k."""
    said, statuses = [], []
    for study in studies:
        found = by_width(findings, study, "stability", arms)
        if len(found) < 2 or any(f.law is None for f in found):
            return NOTHING
        parts = [(f.estimate or 0.0) / (f.law or 1.0) for f in found]
        open_ends = any(f.or_more for f in found)
        grows = all((a.estimate or 0.0) < (b.estimate or 0.0) for a, b in pairwise(found))
        holds = grows and all(low <= part <= high for part in parts)
        statuses.append("UNDECIDED" if open_ends else _status(holds))
        listed = [
            f"{_width(findings, f)}: {effect_text(f)} ({part:.2f} of the law)" for f, part in zip(found, parts, strict=True)
        ]
        said.append(f"{words(findings.grid, study)}: {', '.join(listed)}")
    return _all(statuses), "; ".join(said)


def ratio_grows(
    findings: Findings, *, study: str, endpoint: str, arms: Sequence[str], condition: Condition | None = None
) -> Answered:
    """The median ratio of a comparison is larger at each larger d_k."""
    found = [f for f in by_width(findings, study, endpoint, arms) if (condition or {}).items() <= f.condition.items()]
    if len(found) < 2:
        return NOTHING
    said = ", ".join(f"{_width(findings, f)}: {effect_text(f)}" for f in found)
    return _status(all((a.estimate or 0.0) < (b.estimate or 0.0) for a, b in pairwise(found))), said


def wider_or_edge(findings: Findings, *, study: str, arms: Sequence[str], condition: Condition) -> Answered:
    """The second arm's largest usable rate is higher, or both arms reach the top of the grid of rates."""
    found = findings.find(study, "largest_rate", arms, condition)
    if not found or not found[0].pairs:
        return NOTHING
    f = found[0]
    at_top = all(math.isinf(pair.reference.high) and math.isinf(pair.treatment.high) for pair in f.pairs)
    status = "UNDECIDED" if f.verdict == "UNDECIDED" and not at_top else _status(at_top or f.verdict == "WIDER")
    return status, "both arms solve the task at the top of the grid" if at_top else f"{f.verdict}: {effect_text(f)}"


def all_solve_within(findings: Findings, *, study: str, arms: Sequence[str], head_dims: Sequence[str], steps: int) -> Answered:
    """At each d_k of ``head_dims`` every judged seed of both arms solves the task within ``steps`` at its arm's best rate."""
    found = [f for f in by_width(findings, study, "time", arms) if f.condition[Options.of(findings).width] in head_dims]
    if len(found) < len(head_dims):
        return NOTHING
    slowest: dict[str, float] = {}
    for f in found:
        for arm in arms:
            needed = [steps_to_solve(findings.grid, run) or math.inf for run in judged_runs(findings, f, arm)]
            slowest[f"{_width(findings, f)}, {words(findings.grid, arm)}"] = max(needed, default=math.inf)
    said = "; ".join(f"{name}: {number(value)} steps" for name, value in slowest.items())
    return _status(max(slowest.values()) <= steps), f"slowest judged seed: {said}"


def above_uniform_and_lost(
    findings: Findings, *, scratch: str, condition: Condition, arm: str, floor: str, continued: Mapping[str, str]
) -> Answered:
    """From scratch ``arm`` ends above ``floor`` at every rate; each of ``continued`` (study to rate) is LEARNED AND LOST."""
    rates = sorted({run.rate for run in findings.runs.select(scratch, arm, condition, status="done")}, key=float)
    level = uniform_level(findings, scratch, floor, condition)
    ends = {
        rate: min(last_mean(run, "loss") for run in findings.runs.select(scratch, arm, condition, rate=rate, status="done"))
        for rate in rates
    }
    lost = {
        study: [outcome(run, levels_of(findings, run)) for run in findings.runs.select(study, arm, rate=rate, status="done")]
        for study, rate in continued.items()
    }
    if level is None or not ends or not all(lost.values()):
        return NOTHING
    holds = min(ends.values()) > level and all(found == "LEARNED AND LOST" for of_study in lost.values() for found in of_study)
    said = [f"{words(findings.grid, floor)} ends at {level:.2f} nats"]
    said += [f"learning rate {float(rate):g}: {end:.2f} or more" for rate, end in ends.items()]
    said += [f"{words(findings.grid, study)}: {', '.join(of_study)}" for study, of_study in lost.items()]
    return _status(holds), "; ".join(said)


def equal_outcomes(findings: Findings, *, studies: Mapping[str, str], reference: str) -> Answered:
    """Every run of an arm (study to arm) has the outcome of the reference's run of the same condition, rate and seed."""
    equal, total, different = 0, 0, []
    for study, arm in studies.items():
        for run in findings.runs.select(study, arm, status="done"):
            others = findings.runs.select(study, reference, run.condition, rate=run.rate, seeds=[run.seed], status="done")
            for other in others:
                pair = [outcome(one, levels_of(findings, one)) for one in (other, run)]
                total += 1
                equal += pair[0] == pair[1]
                different += [f"{run.place}: {pair[0]} and {pair[1]}"] * (pair[0] != pair[1])
    if not total:
        return NOTHING
    return _status(equal == total), "; ".join([f"{equal} of {total} pairs of runs", *different])


def variance_law(findings: Findings, *, low: float = 0.98, high: float = 1.02, scheme: str = "lecun") -> Answered:
    """The slope of ln Var(q·k) on ln d_k at the initial weights lies between ``low`` and ``high``."""
    slope = variance_slope(scheme)
    return _status(low <= slope <= high), f"slope {slope:.3f}"


def _width(findings: Findings, f: Finding) -> str:
    return f"d_k {f.condition[Options.of(findings).width]}"


def _all(statuses: Sequence[str]) -> str:
    """NOT HELD where one is not, else UNDECIDED where one is."""
    return next((status for status in ("NOT HELD", "UNDECIDED") if status in statuses), "HELD")


# --- what an outcome is held against


def uniform_level(findings: Findings, study: str, arm: str, condition: Condition, steps: int | None = None) -> float | None:
    """The end of an arm whose attention is a plain average, after ``steps`` (default all), at its best rate; None without one."""
    ends: dict[str, list[float]] = {}
    for run in findings.runs.select(study, arm, condition, status="done"):
        known = run.result["loss"][:steps]
        if len(known) == (steps or len(known)) and None not in known:
            ends.setdefault(run.rate, []).append(fmean(known[-END:]))
    return min((fmean(values) for values in ends.values()), default=None)


def levels_of(findings: Findings, run: Run) -> Levels:
    """What the outcome of a run is held against: the untrained network, the unigram loss, and a plain average."""
    options = Options.of(findings)
    first = findings.runs.start_of(run)
    steps = run.result["cap"] + (first.result["steps"] if first is not None and first.status == "done" else 0)
    levels = [uniform_level(findings, study, options.uniform, {}, steps) for study in options.scratch]
    of_run = levels[list(options.scratch).index(run.study)] if run.study in options.scratch else next(iter(levels), None)
    solved, unigram = findings.grid.studies[run.study].solved, run.result["floors"].get("unigram")
    is_text = unigram is not None or run.result["accuracy"] is None
    return Levels(initial_loss(findings.runs, run), unigram, of_run if is_text else None, solved)


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
