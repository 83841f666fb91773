"""The first screen's sentences: a clause is there only where the records of the grid meet its condition."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from minitx.ablation import wording as say
from minitx.ablation.curves import steps_to_solve
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.records import worst_accuracy
from minitx.ablation.scaling.studies import ARMS, by_width, level, setting, shown_runs, widest


def sentences(findings: Findings) -> list[str]:
    """What happened at the largest d_k, and the same factors at the smallest."""
    options, width = findings.grid.options, widest(findings)
    stable = {name: by_width(findings, one["study"], "stability") for name, one in options["continued"].items()}
    timed = by_width(findings, options["time"], "time")
    fallen = [text for name, one in options["continued"].items() for text in _trained_further(findings, name, one)]
    said = _broken_control(findings)
    if fallen:
        said.append(
            f"A model that had learned to {options['task']} ({setting(findings, width)}) was copied. One copy lost the scale 1/√d_k, and its "
            "W_Q and W_K were made smaller to make up for it, so that both copies compute the same at first. "
            "Both were then trained further on the same new examples."
        )
    said += fallen
    at_width = {name: f for name, found in stable.items() for f in found if level(f) == width}
    if at_width:
        limit = findings.grid.studies[options["continued"][next(iter(at_width))]["study"]].stable
        within = say.budget([run for f in at_width.values() for run in say.runs_of(findings, f)])
        said.append(
            f"The largest stable learning rate (lowest accuracy {say.percent([limit.value])} within {within}, interpolated between the rates "
            f"tried) without the scale was {say.list_text([_stable_clause(name, f) for name, f in at_width.items()])}."
        )
    said += [f"Trained from scratch, {_from_scratch(findings, f)}." for f in timed if level(f) == width]
    said += _at_small_width(findings, {**stable, "steps from scratch": timed})
    return said or ["No comparison with and without the scale has finished."]


def _broken_control(findings: Findings) -> list[str]:
    said = []
    for e in findings.equalities:
        wrong = say.count_text(list(e.equal.values()).count(False), "seed")
        where = say.condition_text(findings.grid, e.condition) or "one setting"
        text = (
            f"The null control failed: two ways to write the same model ({where}) gave different losses within {e.steps} steps"
        )
        if not all(e.equal.values()):
            said.append(f"{text} for {wrong} of {len(e.equal)}. Do not trust the numbers below.")
    return said


def _trained_further(findings: Findings, name: str, one: Mapping[str, Any]) -> list[str]:
    """What happened to the accuracy of solved models at the shown rate: their lowest mean over the study's window."""
    shown = shown_runs(findings, one["shown"], one["rate"])
    if not shown or one["study"] not in findings.grid.studies:
        return []
    window, chance = findings.grid.studies[one["study"]].stable.window, findings.grid.options["chance"]
    scaled, unscaled = ([worst_accuracy(run.result, window) for run in shown[arm]] for arm in ARMS)
    within = f"within {say.budget([run for arm in ARMS for run in shown[arm]])}"
    guess = f" (guessing: {say.percent([chance])})" if max(unscaled) < 2 * chance else ""
    said = f"At learning rate {one['rate']} with {name}, the lowest accuracy (mean of {window} steps) of {say.count_text(len(unscaled), 'seed')} "
    said += f"{within} was {say.percent(unscaled)}{guess} without the scale and {say.percent(scaled)} with it."
    broken = sum(run.result["nonfinite_step"] is not None for run in shown[ARMS[1]])
    if broken:
        said += f" The loss of {broken} of {len(unscaled)} runs without the scale was no longer a finite number {within}."
    return [said]


def _stable_clause(name: str, f: Finding) -> str:
    """How many times smaller the largest stable rate is with one optimizer, as far as the finding says."""
    law = f"; predicted: {f.comparison.law.text} = {f.law:.1f}" if f.comparison.law and f.law else ""
    least = "at least " if f.or_more else ""
    said = {
        "LESS STABLE": f"{least}{say.times(f.estimate or 0)} times smaller with {name} ({_basis(f)}{law})",
        "MORE STABLE": f"larger with {name} (ratio {_size(f)})",
        "SAME": f"the same with {name} (ratio {_size(f)})",
        "UNDECIDED": f"not clearly different with {name} (ratio {_size(f)}, {_basis(f)})",
    }
    return said[f.verdict]


def _from_scratch(findings: Findings, f: Finding) -> str:
    """The steps to solve, as far as the finding says."""
    runs = say.runs_of(findings, f)
    within = f"within {say.budget(runs)}"
    solved = {run.arm for run in runs if steps_to_solve(findings.grid, run)}
    if ARMS[0] not in solved:
        return f"the model with the scale solved the task at none of the learning rates tried {within}, so times cannot be compared"
    if ARMS[1] not in solved:
        return f"the model without the scale solved the task at none of the learning rates tried {within}; the model with the scale solved it"
    reached = sum(math.isfinite(pair.treatment.high) for pair in f.pairs)
    missed = "" if reached == len(f.pairs) else f"; {reached} of {len(f.pairs)} seeds solved it at all"
    said = {
        "SLOWER": f"the model without the scale needs {_size(f)} times as many steps to solve the task ({_basis(f)}{missed})",
        "FASTER": f"the model without the scale needs fewer steps to solve the task ({_size(f)} times as many)",
        "SAME": f"both models need about the same number of steps to solve the task (ratio {_size(f)})",
        "UNDECIDED": f"it is undecided whether the model without the scale needs more steps to solve the task (ratio {_size(f)}, {_basis(f)})",
    }
    return f"{said[f.verdict]}, {within}{say.rate_text(f)}"


def _at_small_width(findings: Findings, found: Mapping[str, list[Finding]]) -> list[str]:
    """The same factors at the smallest d_k, where another is larger."""
    first = {name: of_name[0] for name, of_name in found.items() if len(of_name) > 1}
    if not first:
        return []
    width = min(map(level, first.values()), key=float)
    small = {name: f for name, f in first.items() if level(f) == width}
    clauses = []
    for name, f in small.items():
        undecided = f", undecided with {say.count_text(len(f.pairs), 'seed')}"
        unsure = {"UNDECIDED": undecided, "SAME": ", the same within the margin"}.get(f.verdict, "")
        clauses.append(f"{_size(f)} ({name}{unsure})")
    within = say.budget([run for f in small.values() for run in say.runs_of(findings, f)])
    verb = "this factor is" if len(small) == 1 else "these factors are"
    return [f"At d_k = {width} {verb} {say.list_text(clauses)}, within {within}."]


def _size(f: Finding) -> str:
    return say.times(f.estimate or 0) + (" or more" if f.or_more else "")


def _basis(f: Finding) -> str:
    """The seeds and the interval that a number rests on."""
    if f.interval is None:
        return f"{say.count_text(len(f.pairs), 'seed')}, too few for a verdict"
    return f"median of {say.count_text(len(f.pairs), 'seed')}, interval {say.span_text(f.interval)}"
