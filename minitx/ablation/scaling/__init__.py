"""What only the report about the scale says: ``about: minitx.ablation.scaling``. Its options are in ``configs/ablation/parts/scaling.yaml``.

Three fixed sentences and one figure are filled with numbers. Each is there only where its records are.
"""

from __future__ import annotations

from typing import Any

from minitx.ablation import curves
from minitx.ablation import wording as say
from minitx.ablation.design import ThresholdConfig
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.records import Run
from minitx.ablation.report import Picture, Section
from minitx.analysis.canvas import label, log_ticks, panels

ARMS = ("inv_sqrt", "unscaled")
"""The arms with and without the scale, of every grid about it."""

SCORES = "Without the scale, every attention score is √d_k times larger."
START = (
    "At the start, if initial weights are large: with variance 1/width (LeCun), a one-head model (d_k = {width}) needs {large} to learn a "
    "lookup{small}."
)
STEPS = (
    "At every step: an update moves the scores further. We removed the scale from solved models without changing what they compute, "
    "and trained on. The largest rate without a collapse was {wide}{narrow}.{undone}"
)
UNDONE = " Smaller learning rates for W_Q and W_K undo this."
"""Said where the null control of the grid is bit-equal."""
RANGES = "Ranges in brackets are those of the median over the seeds."
REMOVED = "The scale was removed by dividing W_Q and W_K by d_k^¼ each."
BROKEN = "The null control failed: two ways to write the same model differ. Do not trust the numbers."
LIMITS = {
    "threshold": "The largest stable rate is that of a model that has solved its task and is trained on at a constant rate. Where other "
    "weights limit the rate before W_Q and W_K do, the scale matters less: see the formula.",
    "time": "Steps to solve say how soon a run learns the task, not how good it becomes in the end.",
}


def sentences(findings: Findings) -> list[str]:
    """Return what the scale does, with the numbers of this grid."""
    options = findings.grid.options
    wide, narrow = (_thresholds(findings, options["widths"][name]) for name in ("wide", "narrow"))
    started, said = _started(findings), []
    large, small = (started.get(options["inits"][name]) for name in ("large", "small"))
    if large:
        (optimizer,) = options["time"]
        is_less = small and small.interval and small.interval[0].high <= 1
        clause = f"; with GPT-2's smaller weights, our default, {'no more' if is_less else _factor(small, '')}" if small else ""
        steps = _factor(large, f" times as many steps of {optimizer}")
        said.append(START.format(width=options["widths"]["wide"], large=steps, small=clause))
    if wide:
        smaller = [_factor(f, f" times{'' if i else ' smaller'} with {name}") for i, (name, f) in enumerate(wide.items())]
        alike = narrow.keys() == wide.keys()
        below = say.list_text([say.times(f.estimate) + ("" if alike else f" with {name}") for name, f in narrow.items()])
        equal = [value for e in findings.equalities for value in e.equal.values()]
        clause = f"; d_k = {options['widths']['narrow']}: {below}" if narrow else ""
        said.append(STEPS.format(wide=say.list_text(smaller), narrow=clause, undone=UNDONE if equal and all(equal) else ""))
    control = [] if all(all(e.equal.values()) for e in findings.equalities) else [BROKEN]
    scores = f"{SCORES} Two effects follow." if len(said) > 1 else SCORES
    return [*control, scores, *said] if said or control else []


def _factor(f: Finding, what: str) -> str:
    """The median ratio, and its range or the number of seeds."""
    text = say.count_text(len(f.pairs), "seed")
    if f.interval is not None:
        low, high = say.number(f.interval[0].low), say.number(f.interval[0].high)
        text = f"{low} or more" if high == "∞" else f"{low}–{high}"
    return f"{say.times(f.estimate)}{what} ({text})"


def _thresholds(findings: Findings, width: str) -> dict[str, Finding]:
    """The findings with and without the scale at one d_k, by the name of the optimizer."""
    studies = findings.grid.options["optimizers"]
    found = {name: findings.find(study, "threshold", ARMS, {"head_dim": width}) for name, study in studies.items()}
    return {name: listed[0] for name, listed in found.items() if listed}


def _started(findings: Findings) -> dict[str, Finding]:
    """The findings about the steps to solve, by the initial weights."""
    (study,) = findings.grid.options["time"].values()
    found = findings.find(study, "time", ARMS)
    first = findings.grid.options["inits"]["large"]
    return {f.condition.get("init", first): f for f in found if f.estimate and f.estimate.low > 0}  # 0: both ran into their cap


# --- the first figure


def figure(findings: Findings) -> list[Picture]:
    """Draw solved models that are trained on, their largest stable rates against d_k, and steps to learn from scratch."""
    options, grid = findings.grid.options, findings.grid
    shown = {name: found for name, rate in options["shown"].items() if (found := _shown(findings, name, rate))}
    stable = {name: listed for name, s in options["optimizers"].items() if (listed := findings.find(s, "threshold", ARMS))}
    started = _started(findings)
    columns = len(shown) + len(stable) + bool(started)
    if not columns:
        return []
    drawn, axes = panels(1, columns, width=12.5 / columns, height=2.6)
    left = iter(axes[0])
    for name, runs in shown.items():
        ax = next(left)
        curves.curves(ax, grid, runs, "accuracy")
        label(ax, f"solved models, {name},\nrate {options['shown'][name]}", "step", "accuracy")
    for name, of_study in stable.items():
        ax = next(left)
        curves.draw_thresholds(ax, grid, of_study)
        label(ax, f"largest rate without a collapse,\n{name}", "d_k", "learning rate")
    if started:
        _draw_times(next(left), findings, started)
    lines = curves.law_lines(grid, [f for listed in stable.values() for f in listed]) if stable else []
    curves.arms_legend(drawn, grid, ARMS, lines, line="-")
    caption = [f"Every line or dot is a seed{'; a triangle was not solved' if started else ''}.", RANGES]
    if threshold := next((grid.studies[listed[0].comparison.study].threshold for listed in stable.values()), None):
        caption += [_collapse(threshold), REMOVED]
    return [Picture("scale", "What happens without the scale", " ".join(caption), drawn)]


def _collapse(threshold: ThresholdConfig) -> str:
    """What ends a search for the largest stable rate."""
    if threshold.metric == "train_loss":
        return f"A collapse: the loss rises more than {threshold.value:g} nats above that at the start (mean of {threshold.window} steps)."
    return f"A collapse: the accuracy falls below {threshold.value:g} (mean of {threshold.window} steps)."


def _draw_times(ax: Any, findings: Findings, started: dict[str, Finding]) -> None:
    """The steps of each seed, by initial weights and arm; a triangle where the task was not solved within the cap."""
    for column, f in enumerate(started.values()):
        curves.dots(ax, findings.grid, f, lambda beside, column=column: column + 0.6 * beside)  # type: ignore[misc]
    log_ticks(ax)
    ax.set_xlim(-0.5, len(started) - 0.5)
    ax.set_xticks(range(len(started)), [say.words(findings.grid, init).replace(" (", "\n(") for init in started])
    (optimizer,) = findings.grid.options["time"]
    label(ax, f"from scratch, {optimizer},\nby initial weights", "", "steps to solve")


def _shown(findings: Findings, name: str, rate: str) -> list[Run]:
    """The finished runs of the study that shows curves of an optimizer, at one rate, if both arms have some."""
    study = findings.grid.options["curves"].get(name, "")
    found = [findings.runs.select(study, arm, rate=rate, status="done") for arm in ARMS]
    return [run for runs in found for run in runs] if all(found) else []


# --- below


def sections(findings: Findings) -> list[Section]:
    """Return the attention of one head before and after, and the curves of text."""
    study = findings.grid.options["attention"]
    kept = [run for arm in ARMS for run in findings.runs.select(study, arm, status="done")[:1] if run.result["attention"]]
    blocks = [_attention(findings, kept)] if len(kept) == len(ARMS) else []
    for name in findings.grid.options["text"]:
        if findings.runs.select(name, status="done"):
            title = f"{say.title(findings.grid, name)}: training loss"
            caption = "Every run is a line. A cross: its loss was no longer finite. Grey: the loss of n-gram models."
            blocks.append(Picture(f"curves_{name}", title, caption, curves.curve_panels(findings, name)))
    return [Section("What the runs look like", blocks)]


def _attention(findings: Findings, kept: list[Run]) -> Picture:
    """Where the question looks: before, and after the further steps with and without the scale."""
    before = kept[0].result["attention"]["0"]
    maps = [("before", before)]
    for run in kept:
        last = max(run.result["attention"], key=int)
        maps.append((f"{say.words(findings.grid, run.arm)},\n{last} steps later", run.result["attention"][last]))
    keys = [max(range(len(rows[-1])), key=rows[-1].__getitem__) for rows in before]
    caption = (
        f"The last position asks for a key. A row is an example, a column a key. Squares: the key that the solved model looked at before. "
        f"Seed {kept[0].seed}, learning rate {float(kept[0].rate):g}."
    )
    title = "Attention of a solved model, before and after it was trained on"
    return Picture("attention", title, caption, curves.attention(maps, keys))


def limits(findings: Findings) -> list[str]:
    """Return the limits of what is said about the scale."""
    there = {f.endpoint.name for f in findings.findings if f.pairs}
    return [text for name, text in LIMITS.items() if name in there]
