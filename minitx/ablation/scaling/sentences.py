"""The first screen's sentences: a clause is there only where the records of the grid meet its condition."""

from __future__ import annotations

from statistics import fmean, median

from minitx.ablation.figures import steps_to_solve
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.records import worst_accuracy
from minitx.ablation.scaling.options import Continued, Options, by_width, shown_runs
from minitx.ablation.wording import at_least, budget, condition_text, count_text, list_text, percent, runs_of, span_text, times


def sentences(findings: Findings) -> list[str]:
    """What happened, in plain words; a clause is there only where the records meet its condition."""
    options = Options.of(findings)
    said = _broken_control(findings)
    for name, one in options.studies().items():
        said += _trained_on(findings, name, one, is_first=len(said) == len(_broken_control(findings)))
    stable = {
        name: found[-1] for name, one in options.studies().items() if (found := by_width(findings, one.study, "stability"))
    }
    timed = by_width(findings, options.time, "time")
    if stable:
        runs = [run for f in stable.values() for run in runs_of(findings, f)]
        clauses = list_text([_stable_clause(name, f) for name, f in stable.items()])
        said.append(f"Within {budget(runs)}, the largest stable learning rate without the scale was {clauses}.")
    said += [_from_scratch(findings, timed[-1])] if timed else []
    said += _at_small_width(findings)
    return said or ["No comparison with and without the scale has finished."]


def _broken_control(findings: Findings) -> list[str]:
    broken = [e for e in findings.equalities if not all(e.equal.values())]
    return [
        f"The null control failed: two ways to write the same model ({condition_text(findings.grid, e.condition) or 'one setting'}) "
        f"gave different losses within {e.steps} steps for {count_text(list(e.equal.values()).count(False), 'seed')} of {len(e.equal)}. "
        "Do not trust the numbers below."
        for e in broken
    ]


def _trained_on(findings: Findings, name: str, one: Continued, is_first: bool) -> list[str]:
    """What happened to the accuracy of solved models at the named rate, worst mean over the study's window."""
    options, shown = Options.of(findings), shown_runs(findings, one)
    if not shown:
        return []
    stable = findings.grid.studies[one.study].stable
    scaled, unscaled = ([worst_accuracy(run.result, stable.window) for run in shown[arm]] for arm in options.arms)
    runs = [run for of_arm in shown.values() for run in of_arm]
    starts = [start.result["accuracy"][-16:] for run in runs if (start := findings.runs.start_of(run))]
    before = f"from {percent([median(fmean(last) for last in starts)])} " if starts else ""
    width = runs[0].condition.get(options.width, "")
    setting = options.settings.get(width, f"d_k = {width}")
    guess = ""
    if options.chance is not None and max(unscaled) < 2 * options.chance:
        guess = f" (guessing: {percent([options.chance])})"
    where = f"At learning rate {float(runs[0].rate):g} with {name}"
    if max(unscaled) < min(stable.value, *scaled):
        kept = f"with the scale it stayed {at_least(min(scaled))}"
        said = f"{where} its accuracy fell {before}to {percent(unscaled)}{guess} within {budget(runs)}; {kept}."
    else:
        said = f"{where} its lowest accuracy within {budget(runs)} was {percent(unscaled)}; with the scale it was {percent(scaled)}."
    broken = sum(run.result["nonfinite_step"] is not None for run in shown[options.arms[1]])
    said += (
        f" The loss of {broken} of {len(unscaled)} runs was no longer a finite number within {budget(runs)}." if broken else ""
    )
    task = f"to {options.task}" if options.task else "the task"
    first = f"A model that had learned {task} was trained on with the scale 1/√d_k removed, without changing what it computes ({setting})."
    return [f"{first} {said}" if is_first else said]


def _stable_clause(name: str, f: Finding) -> str:
    """How many times smaller the largest stable rate is with one optimizer, as far as the finding says."""
    assert f.estimate is not None
    law = "" if f.law is None else f" (theory: {f.comparison.law.text or 'the law'} = {f.law:.1f})"  # type: ignore[union-attr]
    size = f"{'at least ' if f.or_more else ''}{times(f.estimate)} times smaller with {name}{law}"
    if f.interval is None:
        return f"{size} in {count_text(len(f.pairs), 'pair')} of runs, too few for a verdict"
    return {
        "LESS STABLE": size,
        "MORE STABLE": f"{times(1 / f.estimate) if f.estimate else 'many'} times larger with {name}",
        "SAME": f"the same with {name} (ratio {times(f.estimate)})",
    }.get(f.verdict, f"not clearly different with {name} (ratio {times(f.estimate)}, interval {span_text(f.interval)})")


def _from_scratch(findings: Findings, f: Finding) -> str:
    """The steps to solve at the largest d_k, as far as the finding says."""
    assert f.estimate is not None
    within, at_edge = f"within {budget(runs_of(findings, f))}", any(f.at_edge)
    rates = "at the best of the learning rates tried" if at_edge else "each model at its own best learning rate"
    size = f"{times(f.estimate)}{' or more' if f.or_more else ''}"
    solved = [
        any(steps_to_solve(findings.grid, run) for run in runs_of(findings, f) if run.arm == arm) for arm in f.comparison.arms
    ]
    if not solved[0]:
        return f"Trained from scratch, the model with the scale solved the task at none of the learning rates tried {within}, so times cannot be compared."
    if not solved[1]:
        return f"Trained from scratch, the model without the scale solved the task at none of the learning rates tried {within}; with the scale it was solved."
    if f.interval is None:
        return f"Trained from scratch, the model without the scale took {size} times as many steps {within}, {rates}, in {count_text(len(f.pairs), 'pair')} of runs, too few for a verdict."
    if f.verdict == "SLOWER":
        return f"Trained from scratch, the model without the scale needs {size} times as many steps to solve the task {within}, {rates}."
    if f.verdict == "FASTER":
        return f"Trained from scratch, the model without the scale needs fewer steps to solve the task {within}, {rates}: {size} times those with the scale."
    if f.verdict == "SAME":
        return f"Trained from scratch, both models need about the same number of steps to solve the task {within}, {rates} (ratio {size})."
    return f"Trained from scratch, it is undecided whether the model without the scale needs more steps to solve the task {within}, {rates} (ratio {size}, interval {span_text(f.interval)})."


def _at_small_width(findings: Findings) -> list[str]:
    """The same factors at the smallest d_k, where another is larger."""
    options = Options.of(findings)
    kinds = {name: (one.study, "stability") for name, one in options.studies().items()} | {
        "steps from scratch": (options.time, "time")
    }
    found = {name: of_kind for name, kind in kinds.items() if len(of_kind := by_width(findings, *kind)) > 1}
    if not found:
        return []
    width = min((of_kind[0].condition[options.width] for of_kind in found.values()), key=float)
    small = {name: of_kind[0] for name, of_kind in found.items() if of_kind[0].condition[options.width] == width}
    clauses = [f"{times(f.estimate or 0)} ({name}{_reserve(f)})" for name, f in small.items()]
    runs = [run for f in small.values() for run in runs_of(findings, f)]
    verb = "this factor is" if len(clauses) == 1 else "these factors are"
    return [f"At d_k = {width} {verb} {list_text(clauses)}, within {budget(runs)}."]


def _reserve(f: Finding) -> str:
    if f.interval is None:
        return f", {count_text(len(f.pairs), 'pair')} only"
    return {"UNDECIDED": ", undecided", "SAME": ", the same within the margin"}.get(f.verdict, "") + (
        ", or more" if f.or_more else ""
    )
