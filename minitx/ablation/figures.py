"""The figures of the report: every run is a dot or a line, medians and intervals lie on top.

Each function takes the findings and returns a matplotlib ``Figure``, or ``None`` where the grid has nothing to draw.
Here are the rates and the paired seeds; ``design_figures`` sets arms and doses side by side, ``probe_figures`` looks into the
attention and at the ladder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from minitx.ablation import design_figures, probe_figures
from minitx.ablation.effects import score_table
from minitx.ablation.records import DOSE, RATE, RECALL, TWO_BY_TWO, Cells
from minitx.ablation.render import Drawing
from minitx.ablation.statistics import Floats, wilson_interval
from minitx.ablation.tables import steps_of
from minitx.ablation.verdict import Comparison, Findings
from minitx.ablation.wording import condition_text, place_text, style
from minitx.analysis.canvas import DPI, GREY, dodge, label, legend, png, wrapped_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def by_rate(findings: Findings, study: str, *, shares: bool) -> Figure | None:
    """The learning rates side by side, a panel a condition: every run a dot at its score, or the ``shares`` of seeds that solve
    the task with Wilson's 95 % interval.
    """
    cells, arms, score = findings.cells, findings.cells.arms(study), findings.cells.score(study)
    conditions = [c for c in cells.conditions(study) if cells.levels(study, RATE, **c)]
    if score is None or not conditions or not cells.select(study):
        return None
    solved = cells.planned(study).solved
    figure, axes = wrapped_panels(len(conditions), "share of seeds solved" if shares else score.name, sharey=True)
    for ax, condition in zip(axes, conditions, strict=True):
        rates = cells.levels(study, RATE, **condition)
        here = cells.arms(study, **condition)
        for i, arm in enumerate(here):
            values = score_table(cells, study, arm, condition, cells.seeds(study, arm, **condition), rates, score)
            x = np.arange(len(rates), dtype=np.float64) + dodge(len(here), i, 0.12 if shares else 0.05)
            if shares:
                _draw_shares(ax, values, solved, x, *style(arm, arms))
            else:
                _draw_runs(ax, values, x, *style(arm, arms))
        ax.set_xticks(range(len(rates)), rates)
        ax.set_xlim(-0.5, len(rates) - 0.5)
        if score.better > 0:
            if not shares:
                ax.axhline(solved, color=GREY, linewidth=0.8, linestyle="--")
            ax.set_ylim(-0.05, 1.05)
        label(ax, condition_text(condition) if condition else study, "learning rate")
    legend(figure, [(arm, *style(arm, arms), "-") for arm in arms])
    return figure


def _draw_runs(ax: Axes, values: Floats, x: Floats, color: str, marker: str) -> None:
    """A dot a run, and the medians of the rates that ran."""
    for row in values:
        ax.plot(x, row, marker, color=color, markersize=4, alpha=0.55, markeredgewidth=0)
    ran = np.isfinite(values).any(axis=0)
    medians = np.nanmedian(values[:, ran], axis=0)
    ax.plot(x[ran], medians, "-", color=color, linewidth=1.6)
    ax.plot(x[ran], medians, "_", color=color, markersize=9, markeredgewidth=2)


def _draw_shares(ax: Axes, values: Floats, solved: float, x: Floats, color: str, marker: str) -> None:
    for position, column in zip(x, values.T, strict=True):
        ran = column[np.isfinite(column)]
        if len(ran):
            share = wilson_interval(int((ran >= solved).sum()), len(ran))
            ax.plot([position, position], [share.low, share.high], "-", color=color, linewidth=1.4)
            ax.plot(position, share.estimate, marker, color=color, markersize=5)


def paired_slopes(findings: Findings) -> Figure | None:
    """Each seed's score under both arms: a line a seed, a panel a comparison that the grid is about."""
    found = [c for c in findings.main if c.effect]
    if not found:
        return None
    figure, axes = wrapped_panels(len(found), "", width=2.3, height=2.1)
    for ax, c in zip(axes, found, strict=True):
        _draw_pairs(ax, c, *(style(arm, findings.cells.arms(c.study))[0] for arm in c.arms))
        label(ax, f"{c.endpoint}, {place_text(c.study, c.condition)}\n{c.judgement.word}")
        ax.set_xticks([0, 1], c.arms)
        ax.set_xlim(-0.4, 1.4)
        if c.better > 0:
            ax.set_ylim(-0.06, 1.06)
    return figure


def _draw_pairs(ax: Axes, c: Comparison, first: str, second: str) -> None:
    assert c.effect is not None
    for i, (a, b) in enumerate(zip(c.effect.reference, c.effect.treatment, strict=True)):
        shift = dodge(len(c.seeds), i, 0.035)
        ax.plot([shift, 1 + shift], [a, b], "-", color="#B0B0B0", linewidth=1)
        ax.plot(shift, a, "o", color=first, markersize=4.5)
        ax.plot(1 + shift, b, "s", color=second, markersize=4.5)


Draw = Callable[[Findings], "Figure | None"]
Plan = tuple[str, str, str, Draw]
"""File name, title, caption, and what draws it."""


def _of_study(cells: Cells, study: str) -> list[Plan]:
    """The figures of one judged study: rates where there are several, shares where there is an accuracy."""
    score = cells.score(study)
    if score is None or study in (DOSE, TWO_BY_TWO):  # these have a figure of their own
        return []
    plans: list[Plan] = []
    steps = f" after {found} steps" if (found := steps_of(cells, study)) else ""
    dots = f"A dot is a run{steps}, lines join the medians of the seeds that are judged."
    if len(cells.levels(study, RATE)) > 1:
        bar = " The dashed line is the bar for solved." if score.better > 0 else ""
        title = f"{study}: learning rate against {score.name}"
        plans.append((f"{study}_rates", title, dots + bar, functools.partial(by_rate, study=study, shares=False)))
        if score.better > 0:
            caption = f"Points are shares of the seeds that solve it{steps}, bars are Wilson's 95 % intervals."
            draw = functools.partial(by_rate, study=study, shares=True)
            plans.append((f"{study}_solved", f"{study}: share of seeds that solve it", caption, draw))
    if cells.grid.studies[study].measures or len(cells.levels(study, RATE)) < 2:
        caption = f"At the rate that the score chose: a dot is a seed{steps}, bars are medians."
        draw = functools.partial(design_figures.measures_by_arm, study=study)
        plans.append((f"{study}_arms", f"{study}: every arm", caption, draw))
    return plans


def plans(cells: Cells) -> list[Plan]:
    """What can be drawn of a grid, in order: its judged studies, the pairs, then what speaks of the scale."""
    judged = [plan for study in cells.grid.studies for plan in _of_study(cells, study)]
    judged.sort(key=lambda plan: not plan[0].startswith(RECALL))
    return [*judged, PAIRS, *OF_THE_SCALE]


PAIRS: Plan = (
    "paired_seeds",
    "The same seed under both arms",
    "Each line is a seed. E1: the score at the rate that was chosen. E2: share of the rates that solve the task.",
    paired_slopes,
)
OF_THE_SCALE: tuple[Plan, ...] = (
    (
        "dose_response",
        "Dose and response",
        "Recall with the scores α / √d_k · q·k, α = 1 the scaled arm and √d_k the unscaled: a dot is a seed, bars are medians.",
        design_figures.dose_response,
    ),
    (
        "two_by_two",
        "A bad start against steps that are too large",
        "Recall by {logit std at init 1 | √d_k} × {logit step matched | not}: a dot is a seed, bars are medians.",
        design_figures.two_by_two,
    ),
    (
        "init_variance",
        "Var(q·k) and the spread of the logits at step 0",
        "Means over seeds and layers. Left: the variance law. Right: solid without, dotted with 1/√d_k.",
        probe_figures.variance_and_spread,
    ),
    (
        "init_map",
        "Row std of the logits at step 0, init × d_k",
        "Red frames: above the threshold √(2 ln n), where attention starts frozen on one key.",
        probe_figures.init_map,
    ),
    (
        "row_gradients",
        "Gradient at the queries, row by row, at step 0",
        "Share of rows (all seeds, layers and heads) by ‖dL/dq‖, L summed over the targets; dotted: the median row.",
        probe_figures.row_gradients,
    ),
    (
        "during_training",
        "Attention during training",
        "A line is one layer of one run; deeper layers are darker.",
        probe_figures.during_training,
    ),
    (
        "ladder_loss",
        "Stress ladder: training loss",
        "Every rung, both arms, a line a run. Grey: n-gram models on the same text. The axis is cut: a larger loss leaves the panel.",
        probe_figures.ladder_losses,
    ),
    (
        "ladder_gradients",
        "Stress ladder: gradient norm",
        "Before any clipping, logarithmic; the panels have their own scales.",
        probe_figures.ladder_gradients,
    ),
)


def draw_all(findings: Findings) -> list[Drawing]:
    """Every figure that the grid has data for, as PNG; equal findings give equal bytes."""
    drawn = [(name, title, caption, draw(findings)) for name, title, caption, draw in plans(findings.cells)]
    return [
        Drawing(name, title, caption, round(figure.get_figwidth() * DPI), png(figure))
        for name, title, caption, figure in drawn
        if figure is not None
    ]
