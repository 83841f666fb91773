"""Rules of predictions and of published results that a grid chooses by name.

Each gives HELD, NOT HELD, UNDECIDED or NOT TESTED, and the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from minitx.ablation import wording as say
from minitx.ablation.curves import judged_runs, steps_to_solve
from minitx.ablation.design import Condition
from minitx.ablation.intervals import MIN_PAIRS
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.outcomes import END, Levels, initial_loss, last_mean, outcome
from minitx.ablation.predictions import together
from minitx.ablation.records import Run
from minitx.ablation.scaling.initial_weights import init_sweep
from minitx.ablation.scaling.studies import by_width, level

Answered = tuple[str, str]
NOTHING: Answered = ("NOT TESTED", "not run")


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
        said.append(f"{say.title(findings.grid, study)}: {_listed(found)}; of the law: {shares}")
    return together(statuses), "; ".join(said)


def ratio_grows(
    findings: Findings, *, study: str, endpoint: str, arms: Sequence[str], condition: Condition | None = None
) -> Answered:
    """The median ratio of a comparison is larger at each larger d_k."""
    found = [f for f in by_width(findings, study, endpoint, arms) if (condition or {}).items() <= f.condition.items()]
    return (_status(_grows(found)), _listed(found)) if len(found) > 1 else NOTHING


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
    grid, slowest = findings.grid, {}
    found = [f for f in by_width(findings, study, "time", arms) if level(f) in head_dims]
    for f in found:
        for arm in arms:
            needed = [steps_to_solve(grid, run) or math.inf for run in judged_runs(findings, f, arm)]
            slowest[f"d_k {level(f)}, {say.words(grid, arm)}"] = max(needed, default=math.inf)
    if len(found) < len(head_dims):
        return NOTHING
    said = "; ".join(f"{name}: {say.number(value)} steps" for name, value in slowest.items())
    return _status(max(slowest.values()) <= steps), f"slowest: {said}"


def above_uniform_and_lost(
    findings: Findings, *, scratch: str, condition: Condition, arm: str, floor: str, continued: Mapping[str, str]
) -> Answered:
    """From scratch ``arm`` ends above ``floor`` at every rate; each of ``continued`` (study to rate) is LEARNED AND LOST."""
    grid, select = findings.grid, findings.runs.select
    uniform = uniform_level(findings, scratch, floor, condition)
    ends = [last_mean(run, "loss") for run in select(scratch, arm, condition, status="done")]
    lost = {
        study: [outcome_of(findings, run) for run in select(study, arm, rate=rate, status="done")]
        for study, rate in continued.items()
    }
    if uniform is None or not ends or not all(lost.values()):
        return NOTHING
    names = say.words(grid, arm), say.words(grid, floor)
    said = [f"from scratch {names[0]} ends at {min(ends):.2f} nats or more, {names[1]} at {uniform:.2f}"]
    said += [f"{say.title(grid, study)}: {', '.join(outcomes)}" for study, outcomes in lost.items()]
    is_lost = all(outcomes == ["LEARNED AND LOST"] * len(outcomes) for outcomes in lost.values())
    return _status(min(ends) > uniform and is_lost), "; ".join(said)


def equal_outcomes(findings: Findings, *, studies: Mapping[str, str], reference: str) -> Answered:
    """Every run of an arm (study to arm) has the outcome of the reference's run of the same condition, rate and seed."""
    total, different = 0, []
    for study, arm in studies.items():
        for run in findings.runs.select(study, arm, status="done"):
            for other in findings.runs.select(study, reference, run.condition, rate=run.rate, seeds=[run.seed], status="done"):
                total += 1
                pair = outcome_of(findings, other), outcome_of(findings, run)
                if pair[0] != pair[1]:
                    different.append(f"{say.title(findings.grid, study)}, seed {run.seed}: {' and '.join(pair)}")
    said = "; ".join([f"{total - len(different)} of {total} pairs of runs", *different])
    return (_status(not different), said) if total else NOTHING


def has_verdict(findings: Findings, *, verdict: str, **place: Any) -> Answered:
    """Every finding at ``place`` (``Findings.find``) has the verdict."""
    found = [f for f in findings.find(**place) if f.pairs]
    verdicts = {f.verdict for f in found}
    said = " ".join(say.finding_sentence(findings, f) for f in found)
    status = "UNDECIDED" if "UNDECIDED" in verdicts else _status(verdicts == {verdict})
    return (status, said) if found else NOTHING


def slope_on_width(findings: Findings, *, study: str) -> Answered:
    """The slope of log₂ (ratio of the steps) on log₂ d_k is above 0 for every seed that has all d_k."""
    found = by_width(findings, study, "time")
    seeds = set.intersection(*({pair.seed for pair in f.pairs} for f in found)) if found else set()
    if len(found) < 2 or not seeds:
        return NOTHING
    if not all(pair.effect.low > 0 for f in found for pair in f.pairs if pair.seed in seeds):
        return "UNDECIDED", "the ratio has no lower limit where a model with the scale did not solve the task"
    widths = np.log2([float(level(f)) for f in found])
    ratios = [[np.log2(pair.effect.low) for pair in f.pairs if pair.seed in seeds] for f in found]  # (d_k, seeds)
    slopes = np.polyfit(widths, ratios, 1)[0]
    said = f"log₂ of the ratio grows by {min(slopes):.2f} to {max(slopes):.2f} a doubling of d_k"
    is_clear = len(slopes) >= MIN_PAIRS and min(slopes) * max(slopes) > 0
    return _status(min(slopes) > 0) if is_clear else "UNDECIDED", f"{said} ({say.count_text(len(slopes), 'seed')})"


def gradients_are_smaller(findings: Findings) -> Answered:
    """At LeCun's initial weights W_Q has smaller gradients without the scale."""
    ratios = {row.width: row.gradient_ratio for row in init_sweep() if row.scheme == "lecun"}
    listed = ", ".join(f"d_k {width}: {say.number(ratio)}" for width, ratio in ratios.items())
    return _status(max(ratios.values()) < 1), f"‖∇W_Q‖ without / with the scale, one layer: {listed}"


_ALL: tuple[Callable[..., Answered], ...] = (
    *(follows_law, ratio_grows, wider_or_edge, all_solve_within, above_uniform_and_lost, equal_outcomes),
    *(has_verdict, slope_on_width, gradients_are_smaller),
)
RULES = {rule.__name__: rule for rule in _ALL}


def _status(holds: bool) -> str:
    return "HELD" if holds else "NOT HELD"


def _grows(found: Sequence[Finding]) -> bool:
    return all((a.estimate or 0.0) < (b.estimate or 0.0) for a, b in pairwise(found))


def _listed(found: Sequence[Finding]) -> str:
    return ", ".join(f"d_k {level(f)}: {say.effect_text(f)}" for f in found)


# --- outcomes


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
    scratch, solved = findings.grid.options["scratch"], findings.grid.studies[run.study].solved
    first = findings.runs.start_of(run)
    steps = run.result["cap"] + (first.result["steps"] if first is not None and first.status == "done" else 0)
    study = run.study if run.study in scratch else next(iter(scratch), "")
    uniform = uniform_level(findings, study, "uniform", {}, steps) if is_text(run) else None
    return Levels(initial_loss(findings.runs, run), run.result["floors"].get("unigram"), uniform, solved)


def is_text(run: Run) -> bool:
    """Whether a run is judged by its loss."""
    return "unigram" in run.result["floors"] or run.result["accuracy"] is None


def outcome_of(findings: Findings, run: Run) -> str:
    """The outcome of a run (protocol, section 5a)."""
    return outcome(run, levels_of(findings, run))
