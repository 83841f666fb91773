"""Figures for any question. Each run is a dot or a line. No run is hidden, and no axis is truncated.

A run without a value (because it never solved the task, or its loss was not finite) is drawn in a separate, labelled row.
Artists that show runs have ``gid="runs"``; medians, laws and margins do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minitx.ablation.design import AblationConfig
from minitx.ablation.formatting import condition_text, sides, words
from minitx.ablation.grid import Run, solved_step
from minitx.ablation.intervals import Span
from minitx.ablation.judge import Contrast, Findings, middle
from minitx.canvas import (
    GREY,
    INK,
    PALETTE,
    Entry,
    dodge,
    label,
    legend,
    log_ticks,
    panels,
    weight_bar,
    weight_image,
    wrapped_panels,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def style(grid: AblationConfig, arm: str) -> tuple[str, str]:
    """Return the colour and the marker of an arm. All figures of a grid use the same."""
    return PALETTE[list(grid.arms).index(arm) % len(PALETTE)]


def arms_legend(figure: Figure, grid: AblationConfig, arms: Sequence[str], extra: Sequence[Any] = (), line: str = "") -> None:
    """Draw a legend of the arms, followed by the lines ``extra``."""
    entries = [(words(grid, arm), *style(grid, arm), line) for arm in arms] + list(extra)
    legend(figure, entries)
    longest = max((len(text) for text, *_ in entries), default=0)
    figure.legends[0].set_ncols(max(1, min(len(entries), int(figure.get_figwidth() / (0.6 + 0.075 * longest)))))


# --- dots against the rate


def by_rate(findings: Findings, study: str, score: str, y: str, missing: str) -> Figure:
    """Draw a panel per condition. Each run is a dot at its learning rate; a line connects the medians over seeds.

    ``score`` is loss, accuracy or time (the step at which a run solved its task). Runs without a value are drawn in a row above
    all others, with the label ``missing``.
    """
    grid, runs, is_time = findings.grid, findings.runs.select(study, status="done"), score == "time"
    solved = grid.studies[study].solved
    values = {run: solved_step(run.result, solved) if is_time else run.result[f"val_{score}"] for run in runs}
    finite = [value for value in values.values() if value is not None and math.isfinite(value)] or [1.0]
    above = 0.8 * max(finite) if is_time else 0.12 * max(max(finite) - min(finite), 0.1 * abs(max(finite)), 1e-3)
    heights = {run: value if value in finite else max(finite) + above for run, value in values.items()}
    conditions = list({condition_text(grid, run.condition): run.condition for run in runs}.values())
    figure, axes = wrapped_panels(len(conditions), y, sharey=True, width=5.6 if len(conditions) == 1 else 4.2)
    for ax, condition in zip(axes, conditions, strict=True):
        of_condition = {run: height for run, height in heights.items() if run.condition == condition}
        _draw_by_rate(ax, grid, of_condition, missing, max(finite) + above)
        label(ax, condition_text(grid, condition), "learning rate")
        if is_time:
            log_ticks(ax)
    arms_legend(figure, grid, [arm for arm in grid.arms if any(run.arm == arm for run in runs)])
    return figure


def _draw_by_rate(ax: Axes, grid: AblationConfig, heights: Mapping[Run, float], missing: str, top: float) -> None:
    """Draw the runs of each rate side by side, and runs without a value at ``top``."""
    arms = [arm for arm in grid.arms if any(run.arm == arm for run in heights)]
    rates = sorted({float(run.rate) for run in heights})
    slot = 0.65 * min([0.25, *np.diff(np.log10(rates))])
    for i, arm in enumerate(arms):
        color, marker = style(grid, arm)
        medians = []
        for rate in rates:
            ys = [y for run, y in heights.items() if (run.arm, float(run.rate)) == (arm, rate)]
            xs = [rate * 10 ** (slot * offset(len(arms), i, len(ys), k)) for k in range(len(ys))]
            ax.plot(xs, ys, marker, color=color, markersize=3.6, alpha=0.8, markeredgewidth=0, gid="runs")
            median = float(np.median(ys)) if ys else top
            medians.append(median if median < top else math.nan)
        ax.plot(rates, medians, "-", color=color, linewidth=1, alpha=0.6)
    ax.set_xscale("log")
    ax.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=45 if len(rates) > 4 else 0)
    ax.set_xlim(rates[0] / 1.4, rates[-1] * 1.4)
    ax.minorticks_off()
    if top in heights.values():
        ax.axhline(top, color=GREY, linewidth=6, alpha=0.15, zorder=0)
        ax.text(1.01, top, missing.replace(" ", "\n"), transform=ax.get_yaxis_transform(), va="center", fontsize=7, color=INK)


def offset(arms: int, arm: int, seeds: int, seed: int) -> float:
    """Return the offset of a dot from the middle of its slot, in slots. All runs in a slot have different offsets."""
    return dodge(arms, arm, 1 / arms) + dodge(seeds, seed, 0.8 / (seeds * arms))


# --- thresholds, curves, attention


def threshold_panel(findings: Findings, listed: Sequence[Contrast]) -> Figure:
    """Draw the thresholds of findings of a comparison in one panel."""
    figure, axes = panels(1, 1, width=7.6, height=3.2)  # as wide as the legend
    law = listed[0].comparison.law
    assert law is not None
    draw_thresholds(axes[0, 0], findings.grid, listed)
    label(axes[0, 0], "", words(findings.grid, law.factor), "learning rate")
    arms_legend(figure, findings.grid, listed[0].comparison.arms, law_lines(findings.grid, listed))
    return figure


def law_lines(grid: AblationConfig, listed: Sequence[Contrast]) -> list[Entry]:
    """Return legend entries for the lines of ``draw_thresholds``."""
    laws = dict.fromkeys(law.text or f"{law.factor}^{law.power:g}" for f in listed if (law := f.comparison.law))
    predicted = (f"{words(grid, listed[0].comparison.arms[1])}, predicted", INK, "", "-")
    bound = (f"predicted at the lowest: ÷ {' or '.join(laws)}", INK, "", "--")
    return [predicted, bound] if any(f.predicted for f in listed) else [bound]


def draw_thresholds(ax: Axes, grid: AblationConfig, listed: Sequence[Contrast]) -> None:
    """Draw the largest stable rates of both arms against the factor of the law. Each seed is a dot.

    Below the medians of the first arm, a solid line shows the prediction of the formula, and a dashed line shows the law.
    """
    xs, predicted, bounds = [], [], []
    for f in sorted(listed, key=lambda f: f.level):
        xs.append(f.level)
        dots(ax, grid, f, lambda shift, x=f.level: x * 2 ** (0.5 * shift))  # type: ignore[misc]
        median = float(np.median([middle(pair.values[0]) for pair in f.pairs]))
        predicted.append(median / f.predicted if f.predicted else math.nan)
        bounds.append(median / f.bound if f.bound else math.nan)
    for ys, look, width in ((predicted, "-", 1.2), (bounds, "--", 1.0)):
        # a single level needs two points to show a line
        line = (xs, ys) if len(xs) > 1 else ([xs[0] * 2**way for way in (-0.25, 0.25)], ys * 2)
        ax.plot(*line, look, color=INK, linewidth=width)
    ax.set_xscale("log", base=2)
    log_ticks(ax)
    ax.set_xticks(xs, [f"{x:g}" for x in xs])
    ax.minorticks_off()


def dots(ax: Axes, grid: AblationConfig, finding: Contrast, x: Callable[[float], float]) -> None:
    """Draw each value of each seed as a dot at the geometric mean of its ends, with a line from end to end.

    A triangle marks a value without an upper end. ``x`` maps the offset of a dot, in slots, to its position.
    """
    for k, pair in enumerate(finding.pairs):
        for i, (arm, span) in enumerate(zip(finding.comparison.arms, pair.values, strict=True)):
            (color, marker), at = style(grid, arm), x(offset(2, i, len(finding.pairs), k))
            known = span if math.isfinite(span.high) else Span(span.low, span.low)
            ax.plot([at, at], [known.low, known.high], "-", color=color, linewidth=1)
            ax.plot([at], [middle(known)], marker if known == span else "^", color=color, markersize=4.5, gid="runs")


def effect_panel(findings: Findings, listed: Sequence[Contrast]) -> Figure:
    """Draw the effects of comparisons with the same first side: a row for each setting, a dot for each seed.

    A line covers the range of the median. Effects in the grey band count as the same. A triangle marks an effect without an upper end.
    """
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    grid, endpoint, margin = findings.grid, listed[0].endpoint, listed[0].margin
    figure, axes = panels(1, 1, width=7.6, height=1.1 + 0.22 * len(listed))
    ax = axes[0, 0]
    ax.axvspan(margin.low, margin.high, color=GREY, alpha=0.15, linewidth=0)
    ax.axvline(1.0 if endpoint.is_ratio else 0.0, color=GREY, linewidth=0.8)
    for row, f in enumerate(listed):
        color, marker = style(grid, f.comparison.arms[1])
        for k, pair in enumerate(f.pairs):
            shape = ">" if math.isinf(pair.effect.high) else marker
            height = row + dodge(len(f.pairs), k, 0.6 / len(f.pairs))
            ax.plot([pair.effect.low], [height], shape, color=color, markersize=3.6, alpha=0.8, markeredgewidth=0, gid="runs")
        if f.interval is not None and math.isfinite(f.interval[0].high):
            ax.plot([f.interval[0].low, f.interval[0].high], [row, row], "-", color=INK, linewidth=1)
        ax.plot([f.estimate.low], [row], "|", color=INK, markersize=11, markeredgewidth=1.6)
    if endpoint.is_ratio:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.minorticks_off()
    ax.set_yticks(range(len(listed)), [condition_text(grid, f.condition) for f in listed])
    ax.invert_yaxis()
    first, second = sides(grid, listed[0].comparison, listed[0].condition)
    if listed[0].comparison.against:
        second = "each row"
    over, under = (first, second) if endpoint.is_inverse else (second, first)
    label(ax, "", f"{over} / {under}" if endpoint.is_ratio else f"{second} − {first}")
    seconds = list(dict.fromkeys(f.comparison.arms[1] for f in listed))
    if len(seconds) > 1:
        arms_legend(figure, grid, seconds)
    return figure


def curves(ax: Axes, grid: AblationConfig, runs: Sequence[Run], name: str = "loss", window: int = 1) -> None:
    """Draw the loss or accuracy of every run as a line over steps. A cross marks the end of a non-finite run.

    Each point is the mean of the last ``window`` steps, or of all steps so far if there are fewer.
    """
    for run in runs:
        color, _ = style(grid, run.arm)
        values = running_means(run.result[name] or [], window)
        ax.plot(range(1, len(values) + 1), values, "-", color=color, linewidth=0.9, alpha=0.75, gid="runs")
        finite = [(step, value) for step, value in enumerate(values, 1) if math.isfinite(value)]
        if run.result["nonfinite_step"] is not None and finite:
            ax.plot(*finite[-1], "x", color=color, markersize=7, markeredgewidth=2)


def running_means(values: Sequence[float | None], window: int) -> list[float]:
    """Return for each step the mean of the last ``window`` values, or of all values so far if there are fewer. A missing value is NaN.

    >>> running_means([1.0, 3.0, 5.0, None], 2)
    [1.0, 2.0, 4.0, nan]
    """
    numbers = [math.nan if value is None else value for value in values]
    parts = (numbers[max(0, end - window) : end] for end in range(1, len(numbers) + 1))
    return [math.fsum(part) / len(part) for part in parts]


def curve_panels(findings: Findings, study: str) -> Figure:
    """Draw the training loss of every run, with a panel per setting, and grey lines at the losses of n-gram models."""
    grid, by_setting = findings.grid, dict[tuple[str, str], list[Run]]()
    for run in findings.runs.select(study, status="done"):
        by_setting.setdefault((condition_text(grid, run.condition), run.rate), []).append(run)
    figure, axes = wrapped_panels(len(by_setting), "training loss", sharey=True)
    for ax, ((setting, rate), runs) in zip(axes, by_setting.items(), strict=True):
        curves(ax, grid, runs)
        for floor in sorted({value for run in runs for value in run.result["floors"].values()}):
            ax.axhline(floor, color=GREY, linewidth=0.8, linestyle=":")
        label(ax, ", ".join(text for text in (setting, rate and f"rate {rate}") if text), "step")
    arms_legend(figure, grid, grid.studies[study].arms, line="-")
    return figure


def attention(maps: Sequence[tuple[str, Sequence[Any]]], keys: Sequence[int] = ()) -> Figure:
    """Draw the attention weights of the last query, with a row per example.

    Args:
        maps: titles, each with the weights (examples, L, S) of a head.
        keys: the correct key of each example, to mark in the figure.
    """
    figure, axes = panels(1, len(maps), width=3.2, height=1.6)
    for ax, (title, weights) in zip(axes[0], maps, strict=True):
        rows = np.asarray(weights, dtype=np.float64)[:, -1]
        image = weight_image(ax, rows)
        ax.plot(keys, range(len(keys)), "s", markersize=5, markerfacecolor="none", markeredgecolor=PALETTE[1][0])
        ax.set(yticks=range(len(rows)), xticks=range(0, rows.shape[1], 4))
        label(ax, title, "key (position in the row)", "example")
    weight_bar(figure, list(axes[0]), image, "weight of the last query", shrink=0.9)
    return figure
