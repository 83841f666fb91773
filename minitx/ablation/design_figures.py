"""Figures with arms or doses side by side, a dot a seed: dose and response, bad start against large steps, measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from minitx.ablation.effects import Paired
from minitx.ablation.records import DOSE, SCORES, TWO_BY_TWO, Cells, Condition, Score, measure
from minitx.ablation.statistics import usable_window
from minitx.ablation.verdict import WINDOW, Findings
from minitx.ablation.wording import condition_text, style
from minitx.analysis.canvas import INK, PALETTE, dodge, label, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WORDS = ("accuracy at the best rate", WINDOW)
STARTS_AND_STEPS = {
    "inv_sqrt": "start 1\nsteps matched",
    "lr_fold": "start √d_k\nsteps matched",
    "init_fold": "start 1\nsteps large",
    "unscaled": "start √d_k\nsteps large",
}
"""What the four arms of the two by two are: logit std at init, and the step of the logits."""


def _endpoints(cells: Cells, study: str, arm: str, condition: Condition) -> tuple[Sequence[float], ...]:
    """E1 and E2 of an arm, a number a seed; empty where no seed is complete."""
    runs = Paired(cells, study, (arm,), condition, SCORES["accuracy"])
    if not runs.usable:
        return (), ()
    return runs.at_best(0).tolist(), usable_window(runs.values[0], cells.planned(study).solved).share


def _draw_seeds(ax: Axes, x: float, values: Sequence[float], color: str, marker: str) -> None:
    """A dot a seed, and their median."""
    for i, value in enumerate(values):
        ax.plot(x + dodge(len(values), i, 0.05), value, marker, color=color, markersize=4, alpha=0.6, markeredgewidth=0)
    if len(values):
        ax.plot([x - 0.3, x + 0.3], [np.median(values)] * 2, "-", color=color, linewidth=2)


def _frame(ax: Axes, title: str, ticks: Sequence[str], x: str = "") -> None:
    ax.set_xticks(range(len(ticks)), ticks)
    ax.set_xlim(-0.6, len(ticks) - 0.4)
    ax.set_ylim(-0.05, 1.05)
    label(ax, title, x)


def dose_response(findings: Findings) -> Figure | None:
    """Accuracy at the best rate and the usable window against α, where the scores are α / √d_k · q·k."""
    cells = findings.cells
    doses = cells.levels(DOSE, "alpha")
    if not cells.select(DOSE):
        return None
    figure, axes = panels(1, len(_WORDS), width=4.2, height=2.8)
    for i, (ax, words) in enumerate(zip(axes.flat, _WORDS, strict=True)):
        for x, dose in enumerate(doses):
            _draw_seeds(ax, x, _endpoints(cells, DOSE, "inv_sqrt", {"alpha": dose})[i], *PALETTE[0])
        _frame(ax, words, doses, "α")
    return figure


def two_by_two(findings: Findings) -> Figure | None:
    """The four arms of {logit std at init 1 | √d_k} × {logit step matched | not}: a row an endpoint, a column a condition."""
    cells = findings.cells
    arms = [arm for arm in STARTS_AND_STEPS if arm in cells.arms(TWO_BY_TWO)]
    conditions = cells.conditions(TWO_BY_TWO)
    if not cells.select(TWO_BY_TWO):
        return None
    figure, axes = panels(len(_WORDS), len(conditions), width=4.2, height=2.4, sharey="row")
    for column, condition in enumerate(conditions):
        for row, words in enumerate(_WORDS):
            ax = axes[row, column]
            for x, arm in enumerate(arms):
                _draw_seeds(ax, x, _endpoints(cells, TWO_BY_TWO, arm, condition)[row], *PALETTE[x])
            _frame(ax, condition_text(condition) if row == 0 else "", [STARTS_AND_STEPS[arm] for arm in arms])
            ax.tick_params(axis="x", labelsize=7)
            if column == 0:
                ax.set_ylabel(words, fontsize=8.5, color=INK)
    return figure


def measures_by_arm(findings: Findings, study: str) -> Figure | None:
    """The score and every measure of a study at the rate that the score chose: a panel a condition and number."""
    cells = findings.cells
    score, conditions = cells.score(study), cells.conditions(study)
    if score is None or not cells.select(study):
        return None
    numbers = [score, *(measure(name) for name in cells.grid.studies[study].measures)]
    width = max(2.6, 0.62 * len(cells.arms(study)))
    if len(numbers) > 1:
        figure, axes = panels(len(conditions), len(numbers), width=width, height=2.3)
    else:
        figure, axes = panels(1, len(conditions), width=width, height=2.3, sharey=True)
        axes = axes.T
    for i, (row, condition) in enumerate(zip(axes, conditions, strict=True)):
        place = condition_text(condition) if condition else study
        for ax, number in zip(row, numbers, strict=True):
            _draw_arms(ax, cells, study, condition, score, number)
            label(ax, place if len(numbers) == 1 else number.name if i == 0 else "", "")
        row[0].set_ylabel(place if len(numbers) > 1 else score.name if i == 0 else "", fontsize=8, color=INK)
    return figure


def _draw_arms(ax: Axes, cells: Cells, study: str, condition: Condition, score: Score, number: Score) -> None:
    arms = cells.arms(study, **condition)
    for x, arm in enumerate(arms):
        runs = Paired(cells, study, (arm,), condition, score)
        if runs.usable:
            picked = runs.at_best(0, number)
            _draw_seeds(ax, x, picked[np.isfinite(picked)].tolist(), *style(arm, cells.arms(study)))
    ax.set_xticks(range(len(arms)), arms, rotation=30, ha="right", fontsize=7.5)
    ax.set_xlim(-0.6, len(arms) - 0.4)
