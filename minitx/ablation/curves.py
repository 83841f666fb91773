"""Figures for any question. Each run is a dot or a line. No run is hidden, and no axis is cut.

A run without a value (it never solved the task, or its loss was not finite) is drawn in a separate, labelled row. Lines that
show runs have ``gid="runs"``; medians, laws and margins do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minitx.ablation.design import AblationConfig
from minitx.ablation.intervals import Span
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.records import Run, solved_step
from minitx.ablation.wording import condition_text, setting_text, where_text, words
from minitx.analysis.canvas import GREY, INK, PALETTE, dodge, label, legend, log_ticks, panels, wrapped_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Value = Callable[[Run], float | None]


def style(grid: AblationConfig, arm: str) -> tuple[str, str]:
    """Return the colour and the marker of an arm. They are the same in every figure of a grid."""
    return PALETTE[list(grid.arms).index(arm) % len(PALETTE)]


def arms_legend(figure: Figure, grid: AblationConfig, arms: Sequence[str], extra: Sequence[Any] = (), line: str = "") -> None:
    """Draw a legend of the arms, followed by the lines ``extra``."""
    entries = [(words(grid, arm), *style(grid, arm), line) for arm in arms] + list(extra)
    legend(figure, entries)
    longest = max((len(text) for text, *_ in entries), default=0)
    figure.legends[0].set_ncols(max(1, min(len(entries), int(figure.get_figwidth() / (0.6 + 0.075 * longest)))))


def steps_to_solve(grid: AblationConfig, run: Run) -> int | None:
    """Return the step at which a run solved its task, as its study defines it."""
    return solved_step(run.result, grid.studies[run.study].solved)


def arms_of(grid: AblationConfig, runs: Sequence[Run]) -> list[str]:
    """Return the arms of some runs, in the order of the grid."""
    return [arm for arm in grid.arms if any(run.arm == arm for run in runs)]


# --- dots against the rate


def by_rate(findings: Findings, study: str, value: Value, y: str, missing: str = "not solved", *, log: bool = False) -> Figure:
    """Draw one panel per condition: each run is a dot over its learning rate."""
    grid, runs = findings.grid, findings.runs.select(study, status="done")
    conditions = list({condition_text(grid, run.condition): run.condition for run in runs}.values())
    figure, axes = wrapped_panels(len(conditions), y, sharey=True, width=5.6 if len(conditions) == 1 else 4.2)
    top = row_above(runs, value, log=log)
    for ax, condition in zip(axes, conditions, strict=True):
        of_condition = [run for run in runs if run.condition == condition]
        draw_by_rate(ax, grid, of_condition, value, missing, top=top, log=log)
        label(ax, condition_text(grid, condition), "learning rate")
    arms_legend(figure, grid, arms_of(grid, runs))
    return figure


def rate_of(run: Run) -> float:
    """Return the learning rate of a run, or 1 if the grid sets none."""
    return float(run.rate or 1)


def row_above(runs: Sequence[Run], value: Value, *, log: bool) -> float:
    """Return the height of the row of runs without a value: above all values."""
    known = [v for run in runs if (v := value(run)) is not None and math.isfinite(v)]
    if not known:
        return 1.0
    return max(known) * 1.8 if log else max(known) + 0.12 * max(max(known) - min(known), 0.1 * abs(max(known)), 1e-3)


def draw_by_rate(
    ax: Axes,
    grid: AblationConfig,
    runs: Sequence[Run],
    value: Value,
    missing: str,
    *,
    top: float | None = None,
    log: bool = False,
) -> None:
    """Draw each run as a dot over its rate, side by side, and a line through the medians over seeds.

    Runs without a value are in a row at ``top`` with the label ``missing``. Default: above all others.
    """
    arms, rates = arms_of(grid, runs), sorted({rate_of(run) for run in runs})
    top = row_above(runs, value, log=log) if top is None else top
    found = {run.place: v if (v := value(run)) is not None and math.isfinite(v) else top for run in runs}
    slot = 0.65 * min([0.25, *np.diff(np.log10(rates))])
    for i, arm in enumerate(arms):
        color, marker = style(grid, arm)
        medians = []
        for rate in rates:
            heights = [found[run.place] for run in runs if (run.arm, rate_of(run)) == (arm, rate)]
            xs = [rate * 10 ** (slot * beside(len(arms), i, len(heights), k)) for k in range(len(heights))]
            ax.plot(xs, heights, marker, color=color, markersize=3.6, alpha=0.8, markeredgewidth=0, gid="runs")
            median = float(np.median(heights)) if heights else top
            medians.append(median if median < top else math.nan)
        ax.plot(rates, medians, "-", color=color, linewidth=1, alpha=0.6)
    ax.set_xscale("log")
    ax.set_xticks(rates, [f"{rate:g}" if runs[0].rate else "" for rate in rates], rotation=45 if len(rates) > 4 else 0)
    ax.set_xlim(rates[0] / 1.4, rates[-1] * 1.4)
    ax.minorticks_off()
    if log:
        log_ticks(ax)
    if top in found.values():
        ax.axhline(top, color=GREY, linewidth=6, alpha=0.15, zorder=0)
        name = missing.replace(" ", "\n")
        ax.text(1.01, top, name, transform=ax.get_yaxis_transform(), va="center", fontsize=7, color=INK)


def beside(arms: int, arm: int, seeds: int, seed: int) -> float:
    """Return the offset of a dot from the middle of its slot, in slots. All runs of a slot have different offsets."""
    return dodge(arms, arm, 1 / arms) + dodge(seeds, seed, 0.8 / (seeds * arms))


# --- budgets


def gap_against_budget(findings: Findings, listed: Sequence[Finding]) -> Figure:
    """Draw one panel per condition of ``time``: the share of judged seeds that solved the task by each step, at the arm's best rate."""
    grid = findings.grid
    figure, axes = wrapped_panels(len(listed), "share of seeds that solved it", sharey=True, width=4.2)
    for ax, finding in zip(axes, listed, strict=True):
        for arm, line in zip(finding.comparison.arms, ("-", "--"), strict=True):
            runs = judged_runs(findings, finding, arm)
            reached = sorted(step for run in runs if (step := steps_to_solve(grid, run)) is not None)
            shares = [k / max(len(runs), 1) for k in range(len(reached) + 1)]
            cap = max((run.result["cap"] for run in runs), default=1)  # a run that ended is carried forward
            color = style(grid, arm)[0]
            ax.step([0, *reached, cap], [*shares, shares[-1]], line, where="post", color=color, linewidth=1.8)
        ax.set_ylim(-0.04, 1.04)
        label(ax, where_text(grid, finding), "budget in steps")
    arms_legend(figure, grid, listed[0].comparison.arms, line="-")
    return figure


def judged_runs(findings: Findings, finding: Finding, arm: str) -> list[Run]:
    """Return the runs of an arm in a finding: each judged seed at the rate chosen for it."""
    study, select = finding.comparison.study, findings.runs.select
    rates = finding.rates[finding.comparison.arms.index(arm)]
    chosen = zip(findings.grid.studies[study].seeds, rates, strict=False)
    found = [select(study, arm, finding.condition, rate=rate, seeds=[seed], status="done") for seed, rate in chosen]
    return [run for of_seed in found for run in of_seed]


# --- largest stable rates, curves, attention


def against_factor(ax: Axes, grid: AblationConfig, listed: Sequence[Finding], factor: str) -> None:
    """Draw the largest stable rates of both arms against the levels of ``factor``. Each seed is a dot. The law is drawn below the reference's medians."""
    xs, foretold = [float(finding.condition[factor]) for finding in listed], []
    for x, finding in zip(xs, listed, strict=True):
        count = len(finding.pairs)
        for k, pair in enumerate(finding.pairs):
            for i, (arm, span) in enumerate(zip(finding.comparison.arms, (pair.reference, pair.treatment), strict=True)):
                draw_span(ax, x * 2 ** (0.5 * beside(2, i, count, k)), span, style(grid, arm))
        median = float(np.median([pair.reference.low for pair in finding.pairs]))
        foretold.append(median / finding.law if finding.law and median else math.nan)
    ax.plot(xs, foretold, "--", color=INK, linewidth=1.2)
    ax.set_xscale("log", base=2)
    log_ticks(ax)
    ax.set_xticks(xs, [f"{x:g}" for x in xs])
    ax.minorticks_off()


def draw_span(ax: Axes, x: float, span: Span, look: tuple[str, str]) -> None:
    """Draw a number known between two ends as a dot: an arrow if one end is open, a cross at 1 if both are."""
    color, marker = look
    is_open = span.low == 0, math.isinf(span.high)
    value = {(True, True): 1.0, (True, False): span.high, (False, True): span.low}.get(is_open, (span.low + span.high) / 2)
    marker = {(True, True): "x", (True, False): "v", (False, True): "^"}.get(is_open, marker)
    if not any(is_open):
        ax.plot([x, x], [span.low, span.high], "-", color=color, linewidth=1)
    ax.plot([x], [value], marker, color=color, markersize=4.5, gid="runs")


def curves(ax: Axes, runs: Sequence[Run], color: str) -> None:
    """Draw the loss of every run as a line over its steps, with a cross where it ended because a number was not finite."""
    for run in runs:
        values = [math.nan if value is None else value for value in run.result["loss"]]
        ax.plot(range(1, len(values) + 1), values, "-", color=color, linewidth=0.9, alpha=0.75, gid="runs")
        finite = [(step, value) for step, value in enumerate(values, 1) if math.isfinite(value)]
        if run.result["nonfinite_step"] is not None and finite:
            ax.plot(*finite[-1], "x", color=color, markersize=7, markeredgewidth=2)


def settings(findings: Findings, study: str) -> dict[str, list[Run]]:
    """Return the finished runs of a study by condition and learning rate (in words), with the rates in order."""
    found: dict[str, list[Run]] = {}
    for run in sorted(findings.runs.select(study, status="done"), key=rate_of):
        found.setdefault(setting_text(findings.grid, run), []).append(run)
    return found


def curve_panels(findings: Findings, study: str) -> Figure:
    """Draw one panel per setting: the training loss of every run, with grey lines at the losses of n-gram models."""
    grid, runs = findings.grid, settings(findings, study)
    figure, axes = wrapped_panels(len(runs), "training loss", sharey=True)
    for ax, (name, of_setting) in zip(axes, runs.items(), strict=True):
        for run in of_setting:
            curves(ax, [run], style(grid, run.arm)[0])
        for floor in sorted({value for run in of_setting for value in run.result["floors"].values()}):
            ax.axhline(floor, color=GREY, linewidth=0.8, linestyle=":")
        label(ax, name, "step")
    arms_legend(figure, grid, grid.studies[study].arms, line="-")
    return figure


PROBED = {"max_logit": "largest |logit|", "entropy": "entropy (1: average)", "saturation_90": "rows, weight > 0.9"}


def probe_panels(findings: Findings, study: str) -> Figure:
    """Draw one column per setting and one row per attention statistic. Every layer of every run is a line over training."""
    grid, runs = findings.grid, settings(findings, study)
    figure, axes = panels(len(PROBED), len(runs), height=1.7, sharey="row", sharex=True)
    for column, (name, of_setting) in enumerate(runs.items()):
        for row, (statistic, text) in enumerate(PROBED.items()):
            for run in of_setting:
                draw_probes(axes[row, column], run, statistic, style(grid, run.arm)[0])
            is_last = row == len(PROBED) - 1
            label(axes[row, column], "" if row else name, "step" if is_last else "", "" if column else text)
    log_ticks(axes[0, 0])
    arms_legend(figure, grid, grid.studies[study].arms, line="-")
    return figure


def draw_probes(ax: Axes, run: Run, statistic: str, color: str) -> None:
    """Draw a statistic of each layer of a run as a line over its steps. Deeper layers are darker."""
    probes = run.result["probes"]
    steps = [probe["step"] for probe in probes]
    layers = len(probes[0]["layers"]) if probes else 0
    for i in range(layers):
        values = [probe["layers"][i].get(statistic, math.nan) for probe in probes]
        ax.plot(steps, values, "-", color=color, linewidth=0.9, alpha=0.35 + 0.6 * i / max(layers - 1, 1), gid="runs")


def attention(maps: Sequence[tuple[str, Sequence[Any]]]) -> Figure:
    """Draw the weights (examples, L, S) of one head, by title: those of the last query as a heat map with one row per example, and their entropy."""
    figure, axes = panels(1, len(maps), width=2.6, height=1.35)
    for ax, (title, weights) in zip(axes[0], maps, strict=True):
        rows = np.asarray(weights, dtype=np.float64)[:, -1]
        image = ax.imshow(rows, vmin=0, vmax=1, cmap="magma_r", interpolation="nearest", aspect="auto")
        ax.grid(False)
        ax.set(xticks=[], yticks=[])
        label(ax, title, f"entropy {entropy(weights):.2f} nats", "example")
    bar = figure.colorbar(image, ax=list(axes[0]), shrink=0.6, aspect=12)
    bar.ax.tick_params(labelsize=7)
    bar.set_label("weight", fontsize=8)
    return figure


def entropy(weights: Sequence[Any]) -> float:
    """Return the entropy of the last query's weights in nats, averaged over the examples."""
    p = np.asarray(weights, dtype=np.float64)[:, -1]
    return abs(float((p * np.log(np.where(p > 0, p, 1.0))).sum(-1).mean()))
