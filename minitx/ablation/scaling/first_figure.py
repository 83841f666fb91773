"""The first screen's figures: three panels, and the attention of one head."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minitx.ablation import figures
from minitx.ablation import wording as say
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.records import worst_accuracy
from minitx.ablation.report import Picture
from minitx.ablation.scaling.options import Continued, Options, by_width, shown_runs
from minitx.analysis.canvas import INK, label, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def figure(findings: Findings) -> list[Picture]:
    """Three panels, and below them the attention of one head."""
    options = Options.of(findings)
    rows = {name: one for name, one in options.studies().items() if shown_runs(findings, one)}
    timed = by_width(findings, options.time, "time")[-1:]
    if not rows and not timed:
        return []
    caption = []
    if rows:
        windows = say.list_text(sorted({str(findings.grid.studies[one.study].stable.window) for one in rows.values()}))
        caption = [
            "Left: the loss of a model that had solved the task and is trained on with and without the scale; every seed is a line.",
            "Middle: the largest learning rate at which it stays stable, or its worst accuracy at each rate; every seed is a dot.",
            f"Accuracies are the lowest mean over {windows} steps.",
        ]
    if timed:
        where = "Right: steps" if rows else "Steps"
        caption.append(
            f"{where} to solve the task from scratch; every run is a dot, those that did not solve it in the top row."
        )
    drawn = _three_panels(findings, rows, timed)
    return [Picture("scale", "What happens without the scale", " ".join(caption), drawn), *_attention(findings)]


def _three_panels(findings: Findings, rows: Mapping[str, Continued], timed: Sequence[Finding]) -> Figure:
    grid, options = findings.grid, Options.of(findings)
    columns, laws = 2 * bool(rows) + bool(timed), []
    drawn, axes = panels(max(len(rows), 1), columns, width=10.8 / columns, height=2.1 if len(rows) > 1 else 3.2)
    for i, (name, one) in enumerate(rows.items()):
        shown = shown_runs(findings, one)
        for arm, runs in shown.items():
            figures.curves(axes[i, 0], runs, figures.style(grid, arm)[0])
        rate = float(shown[options.arms[0]][0].rate)
        label(axes[i, 0], f"{name} at learning rate {rate:g}", "step" if i == len(rows) - 1 else "", "loss")
        laws += _stable_panel(axes[i, 1], findings, name, one)
    for f in timed:
        for ax in axes[1:, -1]:
            ax.remove()
        wide, value = axes[0, -1], functools.partial(figures.steps_to_solve, grid)
        wide.set_subplotspec(wide.get_gridspec()[:, -1])
        figures.draw_by_rate(wide, grid, say.runs_of(findings, f), value, "not solved", log=True)
        heading = f"from scratch, {options.setting(options.level(f))}"
        label(wide, figures.spelled(heading), "learning rate", "steps to solve the task")
    law = [(f"theory: with the scale, divided by {say.list_text(laws)}", INK, "", "--")] if laws else []
    figures.arms_legend(drawn, grid, options.arms, law, line="-")
    return drawn


def _stable_panel(ax: Axes, findings: Findings, name: str, one: Continued) -> list[str]:
    """Largest stable rates against d_k; worst accuracy against the rate where one d_k was run. Gives the name of the law drawn."""
    grid, options, found = findings.grid, Options.of(findings), by_width(findings, one.study, "stability")
    if len(found) > 1:
        figures.against_factor(ax, grid, found, options.width)
        label(ax, name, "d_k", "largest stable rate")
        return [f.comparison.law.text or f"the law ({name})" for f in found[:1] if f.comparison.law]
    stable = grid.studies[one.study].stable
    runs = [run for run in findings.runs.select(one.study, status="done") if run.arm in options.arms]
    figures.draw_by_rate(ax, grid, runs, lambda run: worst_accuracy(run.result, stable.window), "")
    ax.axhline(stable.value, color=INK, linewidth=0.8, linestyle=":")
    label(ax, name, "learning rate", "worst accuracy")
    return []


def _attention(findings: Findings) -> list[Picture]:
    """The attention of one head of the first judged seed: as it was, and after the continued steps with and without the scale."""
    options = Options.of(findings)
    rate = next((one.rate for one in options.studies().values()), 1.0)
    shown = shown_runs(findings, Continued(options.attention, rate)) if options.attention else {}
    kept = {arm: next((run for run in runs if run.result["attention"]), None) for arm, runs in shown.items()}
    scaled, unscaled = (kept.get(arm) for arm in options.arms)
    if scaled is None or unscaled is None:
        return []
    maps = [("as it was", scaled.result["attention"]["0"])]
    for run in (scaled, unscaled):
        last = max(run.result["attention"], key=int)
        maps.append((f"{say.words(findings.grid, run.arm)},\n{last} steps later", run.result["attention"][last]))
    examples, keys = say.count_text(len(maps[0][1]), "example"), len(maps[0][1][0][0])
    caption = (
        f"One head of seed {scaled.seed}, learning rate {float(scaled.rate):g}: rows are queries, columns are keys. {options.last_row}"
        f"Entropy (mean over {examples}): 0 is one key, {math.log(keys):.2f} nats is a plain average of all {keys}."
    )
    heading = "Attention of the solved model, and after it was trained on"
    return [Picture("attention", heading, caption, figures.attention(maps))]
