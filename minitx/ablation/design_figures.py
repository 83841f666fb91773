"""Figures of the studies that take the scale apart: dose and response, and bad start against large steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from minitx.ablation.effects import paired_scores
from minitx.ablation.records import DOSE, SOLVED, TWO_BY_TWO, Cells, Condition, accuracy_of
from minitx.ablation.statistics import usable_window
from minitx.ablation.verdict import ENDPOINTS, Findings
from minitx.ablation.wording import condition_text
from minitx.analysis.canvas import INK, PALETTE, dodge, label, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STARTS_AND_STEPS = {
    "inv_sqrt": "start 1\nsteps matched",
    "lr_fold": "start √d_k\nsteps matched",
    "init_fold": "start 1\nsteps large",
    "unscaled": "start √d_k\nsteps large",
}
"""What the four arms of the two by two are: logit std at init, and the step of the logits."""


def _endpoints(cells: Cells, study: str, arm: str, condition: Condition) -> tuple[Sequence[float], ...]:
    """E1 and E2 of an arm, a number a seed; empty where no seed is complete."""
    pair = paired_scores(cells, study, (arm,), condition, accuracy_of)
    if not pair.seeds or not pair.is_tuned:
        return (), ()
    best = pair.values[0][range(len(pair.seeds)), pair.choices(0).picks]
    return best.tolist(), usable_window(pair.values[0], SOLVED).share


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
    figure, axes = panels(1, len(ENDPOINTS), width=4.2, height=2.8)
    for i, (ax, words) in enumerate(zip(axes.flat, ENDPOINTS.values(), strict=True)):
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
    figure, axes = panels(len(ENDPOINTS), len(conditions), width=4.2, height=2.4, sharey="row")
    for column, condition in enumerate(conditions):
        for row, words in enumerate(ENDPOINTS.values()):
            ax = axes[row, column]
            for x, arm in enumerate(arms):
                _draw_seeds(ax, x, _endpoints(cells, TWO_BY_TWO, arm, condition)[row], *PALETTE[x])
            _frame(ax, condition_text(condition) if row == 0 else "", [STARTS_AND_STEPS[arm] for arm in arms])
            ax.tick_params(axis="x", labelsize=7)
            if column == 0:
                ax.set_ylabel(words, fontsize=8.5, color=INK)
    return figure
