"""The first screen's sentences: a clause is there only where the records of the grid meet its condition."""

from __future__ import annotations

from statistics import fmean, median

from minitx.ablation import wording as say
from minitx.ablation.figures import steps_to_solve
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.records import worst_accuracy
from minitx.ablation.scaling.options import Continued, Options, by_width, shown_runs, widest

FEW = "too few for a verdict"


def sentences(findings: Findings) -> list[str]:
    """What happened at the largest d_k, and the same factors at the smallest."""
    options, width = Options.of(findings), widest(findings)
    kinds = {name: (one.study, "stability") for name, one in options.studies().items()}
    stable = {name: f for name, kind in kinds.items() for f in by_width(findings, *kind) if options.level(f) == width}
    timed = [f for f in by_width(findings, options.time, "time") if options.level(f) == width]
    fallen = [text for name, one in options.studies().items() for text in _trained_on(findings, name, one)]
    said = _broken_control(findings)
    if fallen:
        task = f"to {options.task}" if options.task else "the task"
        intro = (
            f"A model that had learned {task} was trained on with the scale 1/√d_k removed, without changing what it computes"
        )
        said += [f"{intro} ({options.setting(width)}). {fallen[0]}", *fallen[1:]]
    if stable:
        budget = say.budget([run for f in stable.values() for run in say.runs_of(findings, f)])
        clauses = say.list_text([_stable_clause(name, f) for name, f in stable.items()])
        said.append(f"Within {budget}, the largest stable learning rate without the scale was {clauses}.")
    said += [f"Trained from scratch, {_from_scratch(findings, f)}." for f in timed]
    said += _at_small_width(findings, {**kinds, "steps from scratch": (options.time, "time")})
    return said or ["No comparison with and without the scale has finished."]


def _broken_control(findings: Findings) -> list[str]:
    said = []
    for e in findings.equalities:
        wrong = say.count_text(list(e.equal.values()).count(False), "seed")
        where = say.condition_text(findings.grid, e.condition) or "one setting"
        text = (
            f"The null control failed: two ways to write the same model ({where}) gave different losses within {e.steps} steps"
        )
        said += [] if all(e.equal.values()) else [f"{text} for {wrong} of {len(e.equal)}. Do not trust the numbers below."]
    return said


def _trained_on(findings: Findings, name: str, one: Continued) -> list[str]:
    """What happened to the accuracy of solved models at the shown rate: their lowest mean over the study's window."""
    options, shown = Options.of(findings), shown_runs(findings, one)
    if not shown:
        return []
    stable, runs = findings.grid.studies[one.study].stable, [run for of_arm in shown.values() for run in of_arm]
    scaled, unscaled = ([worst_accuracy(run.result, stable.window) for run in shown[arm]] for arm in options.arms)
    within, rate = f"within {say.budget(runs)}", f"At learning rate {float(runs[0].rate):g} with {name}"
    if max(unscaled) < min(stable.value, *scaled):
        starts = [fmean(start.result["accuracy"][-16:]) for run in runs if (start := findings.runs.start_of(run))]
        before = f"from {say.percent([median(starts)])} " if starts else ""
        is_guess = options.chance is not None and max(unscaled) < 2 * options.chance
        guess = f" (guessing: {say.percent([options.chance or 0])})" if is_guess else ""
        kept = f"with the scale it stayed {say.at_least(min(scaled))}"
        said = f"{rate} its accuracy fell {before}to {say.percent(unscaled)}{guess} {within}; {kept}."
    else:
        kept = f"with the scale it was {say.percent(scaled)}"
        said = f"{rate} its lowest accuracy {within} was {say.percent(unscaled)}; {kept}."
    broken = sum(run.result["nonfinite_step"] is not None for run in shown[options.arms[1]])
    if broken:
        said += f" The loss of {broken} of {len(unscaled)} runs was no longer a finite number {within}."
    return [said]


def _stable_clause(name: str, f: Finding) -> str:
    """How many times smaller the largest stable rate is with one optimizer, as far as the finding says."""
    size, law = say.times(f.estimate or 0), f.comparison.law
    theory = f" (theory: {law.text or 'the law'} = {f.law:.1f})" if law and f.law else ""
    smaller = f"{'at least ' if f.or_more else ''}{size} times smaller with {name}{theory}"
    if f.interval is None:
        return f"{smaller} in {say.count_text(len(f.pairs), 'pair')} of runs, {FEW}"
    other = {
        "LESS STABLE": smaller,
        "MORE STABLE": f"{say.times(1 / f.estimate) if f.estimate else 'many'} times larger with {name}",
        "SAME": f"the same with {name} (ratio {size})",
    }
    return other.get(f.verdict, f"not clearly different with {name} (ratio {size}, interval {say.span_text(f.interval)})")


def _from_scratch(findings: Findings, f: Finding) -> str:
    """The steps to solve, as far as the finding says."""
    runs, size = say.runs_of(findings, f), f"{say.times(f.estimate or 0)}{' or more' if f.or_more else ''}"
    rates = "at the best of the learning rates tried" if any(f.at_edge) else "each model at its own best learning rate"
    within, where = f"within {say.budget(runs)}", f"within {say.budget(runs)}, {rates}"
    solved = {run.arm for run in runs if steps_to_solve(findings.grid, run)}
    if f.comparison.arms[0] not in solved:
        return f"the model with the scale solved the task at none of the learning rates tried {within}, so times cannot be compared"
    if f.comparison.arms[1] not in solved:
        return f"the model without the scale solved the task at none of the learning rates tried {within}; the model with the scale solved it"
    if f.interval is None:
        pairs = say.count_text(len(f.pairs), "pair")
        return f"the model without the scale took {size} times as many steps {where}, in {pairs} of runs, {FEW}"
    said = {
        "SLOWER": f"the model without the scale needs {size} times as many steps to solve the task {where}",
        "FASTER": f"the model without the scale needs fewer steps to solve the task {where}: {size} times those with it",
        "SAME": f"both models need about the same number of steps to solve the task {where} (ratio {size})",
    }
    undecided = f"it is undecided whether the model without the scale needs more steps to solve the task {where}"
    return said.get(f.verdict, f"{undecided} (ratio {size}, interval {say.span_text(f.interval)})")


def _at_small_width(findings: Findings, kinds: dict[str, tuple[str, str]]) -> list[str]:
    """The same factors at the smallest d_k, where another is larger."""
    level, found = Options.of(findings).level, {name: by_width(findings, *kind) for name, kind in kinds.items()}
    first = {name: of_kind[0] for name, of_kind in found.items() if len(of_kind) > 1}
    small = {name: f for name, f in first.items() if level(f) == min(map(level, first.values()), key=float)}
    if not small:
        return []
    clauses = say.list_text([f"{say.times(f.estimate or 0)} ({name}{_reserve(f)})" for name, f in small.items()])
    budget = say.budget([run for f in small.values() for run in say.runs_of(findings, f)])
    verb = "this factor is" if len(small) == 1 else "these factors are"
    return [f"At d_k = {level(next(iter(small.values())))} {verb} {clauses}, within {budget}."]


def _reserve(f: Finding) -> str:
    """What limits a factor: few pairs, no verdict, or an open end."""
    few = f", {say.count_text(len(f.pairs), 'pair')} only" if f.interval is None else ""
    unsure = {"UNDECIDED": ", undecided", "SAME": ", the same within the margin"}.get(f.verdict, "") if f.interval else ""
    return few + unsure + (", or more" if f.or_more else "")
