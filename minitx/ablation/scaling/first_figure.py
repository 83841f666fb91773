"""The first screen's figures: three panels, and the attention of one head."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minitx.ablation import curves
from minitx.ablation import wording as say
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.layout import Picture
from minitx.ablation.records import worst_accuracy
from minitx.ablation.scaling.studies import ARMS, WIDTH, by_width, level, setting, shown_runs, widest
from minitx.analysis.canvas import INK, label, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CONTINUED = (
    "Left: the loss of the two copies while they are trained further; every seed is a line. Middle: the largest learning rate at which they "
    "stay stable at each d_k, or, where one d_k was run, their lowest accuracy (mean of {window} steps) at each rate; every seed is a dot. "
)
FROM_SCRATCH = (
    "{place} steps to solve the task from scratch; every run is a dot, and runs that did not solve it are in the top row. "
)


def figure(findings: Findings) -> list[Picture]:
    """Three panels, and below them the attention of one head."""
    options = findings.grid.options
    rows = {
        name: one
        for name, one in options["continued"].items()
        if shown_runs(findings, one["shown"], one["rate"]) and findings.runs.select(one["study"], status="done")
    }
    timed = by_width(findings, options["time"], "time")[-1:]
    if not rows and not timed:
        return []
    windows = {str(findings.grid.studies[one["study"]].stable.window) for one in rows.values()}
    caption = CONTINUED.format(window=say.list_text(sorted(windows))) if rows else ""
    caption += FROM_SCRATCH.format(place="Right:" if rows else "The") if timed else ""
    drawn = _three_panels(findings, rows, timed[0] if timed else None)
    return [Picture("scale", "What happens without the scale", caption, drawn), *_attention(findings)]


def _three_panels(findings: Findings, rows: Mapping[str, Any], timed: Finding | None) -> Figure:
    """A row an optimizer: curves, and stable rates. Steps from scratch, if any, stand on the right over the whole height."""
    columns, laws = 2 * bool(rows) + bool(timed), []
    drawn, axes = panels(max(len(rows), 1), columns, width=10.8 / columns, height=2.1 if len(rows) > 1 else 3.2)
    for i, (name, one) in enumerate(rows.items()):
        shown = shown_runs(findings, one["shown"], one["rate"])
        for arm, runs in shown.items():
            curves.curves(axes[i, 0], runs, curves.style(findings.grid, arm)[0])
        label(axes[i, 0], f"{name} at learning rate {one['rate']}", "step" if i == len(rows) - 1 else "", "loss")
        laws += _stable_panel(axes[i, 1], findings, name, one["study"])
    if timed:
        for ax in axes[1:, -1]:
            ax.remove()
        wide, runs = axes[0, -1], say.runs_of(findings, timed)
        wide.set_subplotspec(wide.get_gridspec()[:, -1])
        value = functools.partial(curves.steps_to_solve, findings.grid)
        curves.draw_by_rate(
            wide, findings.grid, runs, value, f"not solved in {max(run.result['cap'] for run in runs):,}", log=True
        )
        label(wide, f"from scratch, {setting(findings, level(timed))}", "learning rate", "steps to solve the task")
    law = [(f"predicted without the scale: divided by {say.list_text(laws)}", INK, "", "--")] if laws else []
    curves.arms_legend(drawn, findings.grid, ARMS, law, line="-")
    return drawn


def _stable_panel(ax: Axes, findings: Findings, name: str, study: str) -> list[str]:
    """Largest stable rates against d_k; worst accuracy against the rate where one d_k was run. Gives the name of the law drawn."""
    found = by_width(findings, study, "stability")
    if len(found) > 1:
        curves.against_factor(ax, findings.grid, found, WIDTH)
        label(ax, f"{name}: largest stable rate", "d_k", "learning rate")
        return [f.comparison.law.text for f in found[:1] if f.comparison.law]
    stable = findings.grid.studies[study].stable
    runs = [run for arm in ARMS for run in findings.runs.select(study, arm, status="done")]
    curves.draw_by_rate(ax, findings.grid, runs, lambda run: worst_accuracy(run.result, stable.window), "")
    ax.axhline(stable.value, color=INK, linewidth=0.8, linestyle=":")
    label(ax, f"{name}: lowest accuracy, {setting(findings, widest(findings))}", "learning rate", "accuracy")
    return []


def _attention(findings: Findings) -> list[Picture]:
    """Where the question looks, for the first judged seed: before, and after the further steps with and without the scale."""
    options = findings.grid.options
    shown = shown_runs(findings, options["attention"]["shown"], options["attention"]["rate"])
    kept = [runs[0] for runs in shown.values() if runs[0].result["attention"]]
    if len(kept) < len(ARMS):
        return []
    maps = [("before", kept[0].result["attention"]["0"])]
    for run in kept:
        last = max(run.result["attention"], key=int)
        maps.append((f"{say.words(findings.grid, run.arm)},\n{last} steps later", run.result["attention"][last]))
    keys = len(maps[0][1][0][0])
    caption = (
        f"One head of seed {kept[0].seed}, learning rate {curves.rate_of(kept[0]):g}. {options['last_row']} A row is an example, a column a key; "
        f"before, the dark key is the right one. Entropy, the mean over the examples: 0 is one key, {math.log(keys):.2f} nats is a plain average of all {keys}."
    )
    title = "Attention of the solved model, before and after it was trained further"
    return [Picture("attention", title, caption, curves.attention(maps))]
