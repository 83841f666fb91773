"""The parts of reports about the scale: ``about: minitx.ablation.scaling``. Its options are in ``configs/ablation/parts/scaling.yaml``.

Three fixed sentences and a figure are filled with numbers. Each is omitted if its records are missing.
"""

from __future__ import annotations

from typing import Any

from minitx.ablation import curves
from minitx.ablation import formatting as say
from minitx.ablation.grid import Run
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.report import Picture, Section, text
from minitx.canvas import INK, label, log_ticks, panels

ARMS = ("inv_sqrt", "unscaled")
"""The arms with and without the scale, in every grid about the scale."""
WINDOW = 8
"""The number of steps over which the first figure averages the accuracy."""


def sentences(findings: Findings) -> list[str]:
    """Return sentences on the effects of the scale, with the numbers of this grid."""
    widths, equal = findings.grid.options["widths"], [value for e in findings.equalities for value in e.equal.values()]
    wide, narrow = (_thresholds(findings, widths[name]) for name in ("wide", "narrow"))
    return text("scaling.txt", "sentences", findings.grid.options, _started(findings), wide, narrow, equal).splitlines()


def _thresholds(findings: Findings, width: str) -> dict[str, Finding]:
    """Return the threshold findings at one d_k, by the name of the optimizer."""
    studies = findings.grid.options["optimizers"]
    by_optimizer = {name: findings.find(study, "threshold", ARMS, {"head_dim": width}) for name, study in studies.items()}
    return {name: listed[0] for name, listed in by_optimizer.items() if listed}


def _started(findings: Findings) -> dict[str, Finding]:
    """Return the findings on the steps to solve the task, by initial weights."""
    (study,) = findings.grid.options["time"].values()
    findings_of_time = findings.find(study, "time", ARMS)
    first = findings.grid.options["inits"]["large"]
    return {f.condition.get("init", first): f for f in findings_of_time if f.estimate.low > 0}  # 0: both ran into their cap


# --- the first figure


def figure(findings: Findings) -> list[Picture]:
    """Draw the accuracy of solved models that are trained further, the largest stable rates against d_k, and the steps to learn from scratch."""
    options, grid = findings.grid.options, findings.grid
    shown = {name: runs_of_name for name, rate in options["shown"].items() if (runs_of_name := _shown(findings, name, rate))}
    stable = {name: listed for name, s in options["optimizers"].items() if (listed := findings.find(s, "threshold", ARMS))}
    started = _started(findings)
    columns = len(shown) + len(stable) + bool(started)
    if not columns:
        return []
    drawn, axes = panels(1, columns, width=12.5 / columns, height=2.6)
    for ax, (name, runs) in zip(axes[0], shown.items(), strict=False):
        curves.curves(ax, grid, runs, "accuracy", WINDOW)
        label(ax, f"solved models, {name},\nrate {options['shown'][name]}", "step", f"accuracy, mean of the last {WINDOW}")
    for ax, (name, of_study) in zip(axes[0, len(shown) :], stable.items(), strict=False):
        curves.draw_thresholds(ax, grid, of_study)
        label(ax, f"largest rate without a collapse,\n{name}", "d_k", "learning rate")
    if started:
        _draw_times(axes[0, -1], findings, started)
    lines = curves.law_lines(grid, [f for listed in stable.values() for f in listed]) if stable else []
    if started:
        lines.append(("ended at its cap of steps, not solved", INK, "^", ""))
    curves.arms_legend(drawn, grid, ARMS, lines, line="-")
    threshold = next((grid.studies[listed[0].comparison.study].threshold for listed in stable.values()), None)
    caption = text("scaling.txt", "caption", started, threshold)
    return [Picture("scale", "What happens without the scale", caption, drawn)]


def _draw_times(ax: Any, findings: Findings, started: dict[str, Finding]) -> None:
    """Draw the steps of each seed, by initial weights and arm, with a triangle if the task was not solved within the cap."""
    for column, f in enumerate(started.values()):
        curves.dots(ax, findings.grid, f, lambda shift, column=column: column + 0.6 * shift)  # type: ignore[misc]
    log_ticks(ax)
    ax.set_xlim(-0.5, len(started) - 0.5)
    ax.set_xticks(range(len(started)), [say.words(findings.grid, init).replace(" (", "\n(") for init in started])
    (optimizer,) = findings.grid.options["time"]
    label(ax, f"from scratch, {optimizer},\nby initial weights", "", "steps to solve")


def _shown(findings: Findings, name: str, rate: str) -> list[Run]:
    """Return the finished runs whose curves are shown for an optimizer at one rate, or [] unless both arms have some."""
    study = findings.grid.options["curves"].get(name, "")
    runs_by_arm = [findings.runs.select(study, arm, rate=rate, status="done") for arm in ARMS]
    return [run for runs in runs_by_arm for run in runs] if all(runs_by_arm) else []


# --- below


def sections(findings: Findings) -> list[Section]:
    """Return a section with the attention of a head before and after further training, and the loss curves on text."""
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
    """Draw the attention of the question before and after further steps, with and without the scale."""
    before = kept[0].result["attention"]["0"]
    maps = [("before", before)]
    for run in kept:
        last = max(run.result["attention"], key=int)
        maps.append((f"{say.words(findings.grid, run.arm)},\n{last} steps later", run.result["attention"][last]))
    keys = [max(range(len(rows[-1])), key=rows[-1].__getitem__) for rows in before]
    title = "Attention of a solved model, before and after it was trained on"
    return Picture("attention", title, text("scaling.txt", "attention", kept[0]), curves.attention(maps, keys))


def limits(findings: Findings) -> list[str]:
    """Return the limits of the statements about the scale."""
    return text("scaling.txt", "limits", {f.endpoint.name for f in findings.findings}).splitlines()
