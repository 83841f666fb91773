"""The figures of the report: every run is a dot or a line, medians and intervals lie on top.

Each function takes the findings and returns a matplotlib ``Figure``, or ``None`` where the grid has nothing to draw.
Here are the rates and the paired seeds; ``design_figures`` has the studies that take the scale apart, ``probe_figures`` looks
into the attention and at the ladder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from minitx.ablation import design_figures, probe_figures
from minitx.ablation.effects import Score, score_table
from minitx.ablation.records import ARMS, RATE, RECALL, REFERENCE, SOLVED, TEXT, TREATMENT, accuracy_of, loss_of
from minitx.ablation.render import Drawing
from minitx.ablation.statistics import Floats, wilson_interval
from minitx.ablation.verdict import ENDPOINTS, Comparison, Findings
from minitx.ablation.wording import STYLES, condition_text, style
from minitx.analysis.canvas import DPI, GREY, INK, dodge, label, legend, panels, png, wrapped_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def rate_against_score(findings: Findings, study: str = RECALL) -> Figure | None:
    """Learning rate against accuracy (recall) or validation loss (text), a panel a condition, every run a dot."""
    score, y = (accuracy_of, "accuracy") if study == RECALL else (loss_of, "validation loss (nats)")
    return _by_rate(findings, study, score, y, _draw_runs)


def solve_rate(findings: Findings) -> Figure | None:
    """Share of seeds that solve recall, with Wilson's 95 % interval, against the learning rate."""
    return _by_rate(findings, RECALL, accuracy_of, "share of seeds solved", _draw_shares)


def _by_rate(findings: Findings, study: str, score: Score, y: str, draw: Callable[..., None]) -> Figure | None:
    """A panel a condition with the learning rates side by side; ``draw`` fills in one arm."""
    cells, arms = findings.cells, findings.cells.arms(study)
    conditions = [c for c in cells.conditions(study) if cells.levels(study, RATE, **c)]
    if not conditions or not cells.select(study):
        return None
    figure, axes = wrapped_panels(len(conditions), y, sharey=True)
    for ax, condition in zip(axes, conditions, strict=True):
        rates = cells.levels(study, RATE, **condition)
        here = cells.arms(study, **condition)
        width = 0.05 if draw is _draw_runs else 0.12
        for i, arm in enumerate(here):
            values = score_table(cells, study, arm, condition, cells.seeds(study, arm, **condition), rates, score)
            draw(ax, values, np.arange(len(rates)) + dodge(len(here), i, width), *style(arm, arms))
        ax.set_xticks(range(len(rates)), rates)
        ax.set_xlim(-0.5, len(rates) - 0.5)
        if study == RECALL:
            ax.axhline(SOLVED, color=GREY, linewidth=0.8, linestyle="--" if draw is _draw_runs else "")
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


def _draw_shares(ax: Axes, values: Floats, x: Floats, color: str, marker: str) -> None:
    for position, column in zip(x, values.T, strict=True):
        ran = column[np.isfinite(column)]
        if len(ran):
            share = wilson_interval(int((ran >= SOLVED).sum()), len(ran))
            ax.plot([position, position], [share.low, share.high], "-", color=color, linewidth=1.4)
            ax.plot(position, share.estimate, marker, color=color, markersize=5)


def paired_slopes(findings: Findings) -> Figure | None:
    """Each seed's score with and without the scale: a line a seed, one row of panels an endpoint."""
    found = {(c.endpoint, condition_text(c.condition)): c for c in findings.main if c.effect}
    places = [condition_text(c) for c in findings.cells.conditions(RECALL) if ("E1", condition_text(c)) in found]
    if not places:
        return None
    figure, axes = panels(len(ENDPOINTS), len(places), width=2.4, height=2.1, sharey="row")
    for row, (endpoint, words) in zip(axes, ENDPOINTS.items(), strict=True):
        for ax, place in zip(row, places, strict=True):
            _draw_pairs(ax, found[endpoint, place])
            label(ax, f"{place}\n{found[endpoint, place].judgement.word}")
            ax.set_xticks([0, 1], ARMS)
            ax.set_xlim(-0.4, 1.4)
            ax.set_ylim(-0.06, 1.06)
        row[0].set_ylabel(f"{endpoint}: {words}", fontsize=8, color=INK)
    return figure


def _draw_pairs(ax: Axes, c: Comparison) -> None:
    assert c.effect is not None
    for i, (a, b) in enumerate(zip(c.effect.reference, c.effect.treatment, strict=True)):
        shift = dodge(len(c.seeds), i, 0.035)
        ax.plot([shift, 1 + shift], [a, b], "-", color="#B0B0B0", linewidth=1)
        ax.plot(shift, a, "o", color=STYLES[REFERENCE][0], markersize=4.5)
        ax.plot(1 + shift, b, "s", color=STYLES[TREATMENT][0], markersize=4.5)


FIGURES: tuple[tuple[str, str, str, Callable[[Findings], Figure | None]], ...] = (
    (
        "recall_rates",
        "Learning rate against accuracy",
        "Recall (T1): a dot is a run, lines join the medians of the seeds. The dashed line is the bar for solved.",
        rate_against_score,
    ),
    (
        "recall_solved",
        "Share of seeds that solve recall",
        "Points are shares, bars are Wilson's 95 % intervals.",
        solve_rate,
    ),
    (
        "paired_seeds",
        "The same seed with and without the scale",
        "Each line is a seed. Above: accuracy at the rate chosen on the other seeds. Below: share of the rates solved.",
        paired_slopes,
    ),
    (
        "text_rates",
        "Learning rate against validation loss on text",
        "Character language model (T4): a dot is a run, lines join medians.",
        functools.partial(rate_against_score, study=TEXT),
    ),
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
        "during_training",
        "Attention during training",
        "A line is one layer of one run; deeper layers are darker.",
        probe_figures.during_training,
    ),
    (
        "ladder_loss",
        "Stress ladder: training loss",
        "Every rung, both arms, one run each. Grey: n-gram models on the same text. A diverging loss leaves the panel.",
        probe_figures.ladder_losses,
    ),
    (
        "ladder_gradients",
        "Stress ladder: gradient norm",
        "Before any clipping, logarithmic; the panels have their own scales.",
        probe_figures.ladder_gradients,
    ),
)
"""File name, title, caption, and what draws it."""


def draw_all(findings: Findings) -> list[Drawing]:
    """Every figure that the grid has data for, as PNG; equal findings give equal bytes."""
    drawn = [(name, title, caption, draw(findings)) for name, title, caption, draw in FIGURES]
    return [
        Drawing(name, title, caption, round(figure.get_figwidth() * DPI), png(figure))
        for name, title, caption, figure in drawn
        if figure is not None
    ]
