"""Figures that every question can use. A run is a dot or a line; no run is hidden, and no axis is cut.

A number that a run does not have (it never solved the task, its loss was not finite) is drawn in a row of its own, which is
named. Lines that show runs have ``gid="runs"``; medians, laws and margins have not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from minitx.ablation.arms import solved_step
from minitx.ablation.config import AblationConfig, Condition
from minitx.ablation.judge import Finding, Findings, Pair
from minitx.ablation.records import Run
from minitx.ablation.statistics import Span
from minitx.ablation.wording import RATIOS, condition_text, where_text, words
from minitx.analysis.canvas import GREY, INK, PALETTE, dodge, label, legend, log_ticks, panels, wrapped_panels
from minitx.analysis.lettering import drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Value = Callable[[Run], float | None]
MARGIN = "#EFEFEF"
EFFECTS = {
    "ratio": "ratio (above 1: slower, or less stable)",
    "largest_rate": "difference in steps of the grid of rates (below 0: narrower)",
    "loss": "difference in nats (above 0: worse)",
    "accuracy": "difference (below 0: worse)",
}
"""What an effect is, at the axis of the pairs."""


def style(grid: AblationConfig, arm: str) -> tuple[str, str]:
    """Colour and marker of an arm: the same in every figure of a grid."""
    return PALETTE[list(grid.arms).index(arm) % len(PALETTE)]


def arms_legend(figure: Figure, grid: AblationConfig, arms: Sequence[str], extra: Sequence[Any] = (), line: str = "") -> None:
    """Names the arms by their words, then ``extra`` lines of a legend."""
    entries = [(words(grid, arm), *style(grid, arm), line) for arm in arms] + list(extra)
    legend(figure, entries)
    longest = max((len(text) for text, *_ in entries), default=0)
    figure.legends[0].set_ncols(max(1, min(len(entries), int(figure.get_figwidth() / (0.6 + 0.075 * longest)))))


def lettered(grid: AblationConfig) -> AbstractContextManager[None]:
    """A context in which figures have fonts for every name of the grid."""
    import matplotlib

    texts = [*grid.words.values(), *grid.arms, *grid.studies, *(study.title for study in grid.studies.values())]
    texts += [name for study in grid.studies.values() for factor, levels in study.factors.items() for name in (factor, *levels)]
    return matplotlib.rc_context({"font.family": drawable(texts)[1]})


def spelled(text: str) -> str:
    """A name as it is drawn: without formulas, and with code points for what no font has."""
    return "\n".join(drawable([line])[0][0] for line in text.split("\n")).replace("$", r"\$")


def steps_to_solve(grid: AblationConfig, run: Run) -> int | None:
    """The step at which a run solved its task, as its study defines it."""
    return solved_step(run, solved=grid.studies[run.study].solved)


def arms_of(grid: AblationConfig, runs: Sequence[Run]) -> list[str]:
    """The arms of some runs, in the order of the grid."""
    return [arm for arm in grid.arms if any(run.arm == arm for run in runs)]


# --- dots against the rate


def by_rate(findings: Findings, study: str, value: Value, y: str, *, missing: str = "not solved", log: bool = False) -> Figure:
    """A panel a condition: every run a dot over its learning rate."""
    grid, runs = findings.grid, findings.runs.select(study, status="done")
    conditions = list({condition_text(grid, run.condition): run.condition for run in runs}.values())
    figure, axes = wrapped_panels(len(conditions), y, sharey=True, width=5.6 if len(conditions) == 1 else 4.2)
    top = row_above(runs, value, log)
    for ax, condition in zip(axes, conditions, strict=True):
        draw_by_rate(ax, grid, [run for run in runs if run.condition == condition], value, missing, log=log, top=top)
        label(ax, spelled(condition_text(grid, condition)), "learning rate")
    arms_legend(figure, grid, arms_of(grid, runs))
    return figure


def rate_of(run: Run) -> float:
    """The learning rate of a run; 1 where the grid sets none."""
    return float(run.rate or 1)


def draw_by_rate(
    ax: Axes,
    grid: AblationConfig,
    runs: Sequence[Run],
    value: Value,
    missing: str,
    *,
    log: bool = False,
    top: float | None = None,
) -> None:
    """Every run a dot over its rate, side by side, and a line through the medians over seeds; runs without a value at ``top``."""
    arms, rates = arms_of(grid, runs), sorted({rate_of(run) for run in runs})
    top = row_above(runs, value, log) if top is None else top
    found = {run.place: v if (v := value(run)) is not None and math.isfinite(v) else top for run in runs}
    gaps = np.diff(np.log10(rates))
    slot = 0.65 * min([0.25, *gaps])
    for i, arm in enumerate(arms):
        color, marker = style(grid, arm)
        xs, ys, middles = [], [], []
        for rate in rates:
            shown = [found[run.place] for run in runs if (run.arm, rate_of(run)) == (arm, rate)]
            ys += shown
            xs += [rate * 10 ** (slot * beside(len(arms), i, len(shown), k)) for k in range(len(shown))]
            middles.append(float(np.median(shown)) if shown and np.median(shown) < top else math.nan)
        ax.plot(rates, middles, "-", color=color, linewidth=1, alpha=0.6)
        ax.plot(xs, ys, marker, color=color, markersize=3.6, alpha=0.8, markeredgewidth=0, gid="runs")
    ax.set_xscale("log")
    names = [f"{rate:g}" if runs[0].rate else "" for rate in rates]
    ax.set_xticks(rates, names, rotation=45 if len(rates) > 4 else 0)
    ax.set_xlim(rates[0] / 1.4, rates[-1] * 1.4)
    ax.minorticks_off()
    if log:
        log_ticks(ax)
    if top in found.values():
        name_row(ax, top, missing)


def beside(arms: int, arm: int, seeds: int, seed: int) -> float:
    """Offset of a dot from the middle of its slot, in slots: no two runs of a slot have the same."""
    return dodge(arms, arm, 1 / arms) + dodge(seeds, seed, 0.8 / (seeds * arms))


def row_above(runs: Sequence[Run], value: Value, log: bool) -> float:
    """Where the row of runs without a value lies: above all values that there are."""
    known = [v for run in runs if (v := value(run)) is not None and math.isfinite(v)]
    if not known:
        return 1.0
    return max(known) * 1.8 if log else max(known) + 0.12 * max(max(known) - min(known), 0.1 * abs(max(known)), 1e-3)


def name_row(ax: Axes, y: float, name: str) -> None:
    """The name of the row at ``y``, beside it."""
    ax.axhline(y, color=GREY, linewidth=6, alpha=0.15, zorder=0)
    ax.text(1.01, y, name.replace(" ", "\n"), transform=ax.get_yaxis_transform(), va="center", fontsize=7, color=INK)


# --- budgets and pairs


def gap_against_budget(findings: Findings, listed: Sequence[Finding]) -> Figure:
    """A panel a condition of ``time``: the share of judged seeds that solved the task by each step, at the arm's own best rate."""
    grid = findings.grid
    figure, axes = wrapped_panels(
        len(listed), "share of seeds that solved it", sharey=True, width=5.6 if len(listed) == 1 else 4.2
    )
    for ax, finding in zip(axes, listed, strict=True):
        for arm, line in zip(finding.comparison.arms, ("-", "--"), strict=True):
            runs = judged_runs(findings, finding, arm)
            steps = [steps_to_solve(grid, run) for run in runs]
            cap = max((run.result["cap"] for run in runs), default=1)
            reached = sorted(step for step in steps if step is not None)
            shares = [k / max(len(runs), 1) for k in range(len(reached) + 1)]
            color = style(grid, arm)[0]
            ax.step([0, *reached, cap], [*shares, shares[-1]], line, where="post", color=color, linewidth=1.8)
        ax.set_ylim(-0.04, 1.04)
        label(ax, spelled(where_text(grid, finding)), "budget in steps")
    arms_legend(figure, grid, listed[0].comparison.arms, line="-")
    return figure


def judged_runs(findings: Findings, finding: Finding, arm: str) -> list[Run]:
    """The runs of an arm that a finding rests on: each judged seed at the rate that was chosen for it."""
    study = finding.comparison.study
    rates = finding.rates[finding.comparison.arms.index(arm)]
    chosen = zip(findings.grid.studies[study].seeds, rates, strict=False)
    return [
        run
        for seed, rate in chosen
        for run in findings.runs.select(study, arm, finding.condition, rate=rate, seeds=[seed], status="done")
    ]


def paired_effects(findings: Findings, listed: Sequence[Finding]) -> Figure:
    """A row a finding: the effect of every pair as a dot, the interval of the median as a bar, the margin as a band."""
    grid, ratios = findings.grid, listed[0].endpoint in RATIOS
    margin = {"largest_rate": 1.0}.get(listed[0].endpoint, grid.score_margin)
    band, same = ((1 / grid.ratio_margin, grid.ratio_margin), 1.0) if ratios else ((-margin, margin), 0.0)
    figure, axes = panels(1, 1, width=8.4, height=0.45 * len(listed) + 0.5)
    ax = axes[0, 0]
    ax.axvspan(*band, color=MARGIN)
    for i, finding in enumerate(listed):
        if finding.interval is not None:
            known = [
                end for pair in finding.pairs for end in (pair.effect.low, pair.effect.high) if 0 != abs(end) != math.inf
            ] or [same]
            low, high = finding.interval.low, finding.interval.high
            ends = [min(known) if low in (0, -math.inf) else low, max(known) if math.isinf(high) else high]
            ax.fill_betweenx([i - 0.4, i + 0.4], *ends, color=GREY, alpha=0.3, linewidth=0)
        for k, pair in enumerate(finding.pairs):
            y = i + dodge(len(finding.pairs), k, 0.6 / len(finding.pairs))
            draw_span(ax, y, pair.effect, style(grid, finding.comparison.arms[1]), across=True, unknown=same)
        if finding.law is not None:
            ax.plot([finding.law] * 2, [i - 0.42, i + 0.42], "--", color=INK, linewidth=1.4)
    if ratios:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
    label(ax, x=EFFECTS.get("ratio" if ratios else listed[0].endpoint, "difference"))
    names = [
        f"{where_text(grid, f)}\n{words(grid, f.comparison.arms[1])} / {words(grid, f.comparison.arms[0])}" for f in listed
    ]
    ax.set_yticks(range(len(listed)), [spelled(name) for name in names], fontsize=7.5)
    ax.set_ylim(len(listed) - 0.5, -0.5)
    return figure


def draw_span(
    ax: Axes, at: float, span: Span, look: tuple[str, str], *, across: bool = False, unknown: float = 1.0, **options: Any
) -> None:
    """A number with ends as a dot; an arrow where an end is open, a cross at ``unknown`` where both are."""
    color, marker = look
    open_low, open_high = span.low in (0, -math.inf), math.isinf(span.high)
    value = unknown if open_low and open_high else span.high if open_low else span.low
    if open_low or open_high:
        marker = "x" if open_low and open_high else ("<" if across else "v") if open_low else (">" if across else "^")
    elif span.high > span.low:
        value = (span.low + span.high) / 2
        ends = ([span.low, span.high], [at, at])
        ax.plot(*(ends if across else ends[::-1]), "-", color=color, linewidth=1)
    place = (value, at) if across else (at, value)
    ax.plot(*([c] for c in place), marker, **{"color": color, "markersize": 4.5, "gid": "runs", **options})


# --- largest stable rates, curves, attention


def against_factor(
    ax: Axes, grid: AblationConfig, listed: Sequence[Finding], factor: str, arms: Mapping[str, Callable[[Pair], Span]]
) -> None:
    """Largest stable rates against the levels of ``factor``: every seed a dot; the law as a line below the reference's medians."""
    xs = [float(finding.condition[factor]) for finding in listed]
    for i, (arm, side) in enumerate(arms.items()):
        for x, finding in zip(xs, listed, strict=True):
            for k, pair in enumerate(finding.pairs):
                draw_span(ax, x * 2 ** (0.5 * beside(len(arms), i, len(finding.pairs), k)), side(pair), style(grid, arm))
    foretold = [
        (x, float(np.median([pair.reference.low for pair in finding.pairs])) / finding.law)
        for x, finding in zip(xs, listed, strict=True)
        if finding.law and finding.pairs
    ]
    ax.plot([x for x, _ in foretold], [y for _, y in foretold], "--", color=INK, linewidth=1.2)
    ax.set_xscale("log", base=2)
    log_ticks(ax)
    ax.set_xticks(xs, [f"{x:g}" for x in xs])
    ax.minorticks_off()


def curves(ax: Axes, runs: Sequence[Run], color: str, *, key: str = "loss", line: str = "-") -> None:
    """Every run a line over its steps; a cross where it ended because a number was not finite."""
    for run in runs:
        values = [math.nan if value is None else value for value in run.result[key]]
        ax.plot(range(1, len(values) + 1), values, line, color=color, linewidth=0.9, alpha=0.75, gid="runs")
        finite = [i for i, value in enumerate(values) if math.isfinite(value)]
        if run.result["nonfinite_step"] is not None and finite:
            ax.plot(finite[-1] + 1, values[finite[-1]], "x", color=color, markersize=7, markeredgewidth=2)


def settings(runs: Sequence[Run]) -> list[tuple[Condition, str]]:
    """The conditions and learning rates of some runs, the rates in order."""
    found = {(tuple(run.condition.items()), run.rate): (run.condition, run.rate) for run in runs}
    return sorted(found.values(), key=lambda setting: float(setting[1] or 1))


def setting_text(grid: AblationConfig, setting: tuple[Condition, str]) -> str:
    """A condition and a learning rate in words."""
    rate = f"learning rate {float(setting[1]):g}" if setting[1] else ""
    return "\n".join(text for text in (condition_text(grid, setting[0]), rate) if text)


def curve_panels(findings: Findings, study: str) -> Figure:
    """A panel a setting: the training loss of every run; grey lines at the losses of n-gram models."""
    grid, runs = findings.grid, findings.runs.select(study, status="done")
    figure, axes = wrapped_panels(len(settings(runs)), "training loss", sharey=True)
    for ax, setting in zip(axes, settings(runs), strict=True):
        for arm in arms_of(grid, runs):
            curves(ax, findings.runs.select(study, arm, setting[0], rate=setting[1], status="done"), style(grid, arm)[0])
        for floor in sorted({value for run in runs for value in run.result["floors"].values()}):
            ax.axhline(floor, color=GREY, linewidth=0.8, linestyle=":")
        label(ax, setting_text(grid, setting), "step")
    arms_legend(figure, grid, arms_of(grid, runs), line="-")
    return figure


PROBED = {"max_logit": "largest |logit|", "entropy": "entropy of 1", "saturation_90": "rows with a weight > 0.9"}


def probe_panels(findings: Findings, study: str) -> Figure:
    """A column a setting, a row a statistic of the attention over training: every layer of every run a line."""
    grid, runs = findings.grid, findings.runs.select(study, status="done")
    figure, axes = panels(len(PROBED), len(settings(runs)), height=1.7, sharey="row", sharex=True)
    for column, setting in enumerate(settings(runs)):
        for run in findings.runs.select(study, None, setting[0], rate=setting[1], status="done"):
            steps, layers = (
                [probe["step"] for probe in run.result["probes"]],
                [probe["layers"] for probe in run.result["probes"]],
            )
            for (name, _), ax in zip(PROBED.items(), axes[:, column], strict=True):
                for i in range(len(layers[0]) if layers else 0):
                    values = [of_step[i].get(name, math.nan) for of_step in layers]
                    alpha = 0.35 + 0.6 * i / max(len(layers[0]) - 1, 1)
                    ax.plot(steps, values, "-", color=style(grid, run.arm)[0], linewidth=0.9, alpha=alpha, gid="runs")
        label(axes[0, column], setting_text(grid, setting))
        label(axes[-1, column], "", "step")
    for ax, text in zip(axes[:, 0], PROBED.values(), strict=True):
        ax.set_ylabel(text, fontsize=8.5, color=INK)
    for ax in axes[0]:
        ax.set_yscale("log")
    arms_legend(figure, grid, arms_of(grid, runs), line="-")
    return figure


def attention(maps: Sequence[tuple[str, Sequence[Any]]]) -> Figure:
    """(examples, L, S) weights of one head by title: those of the first example as a heat map, the last row's entropy below it."""
    figure, axes = panels(1, len(maps), width=1.9, height=1.95)
    for ax, (title, weights) in zip(axes[0], maps, strict=True):
        image = ax.imshow(np.asarray(weights, dtype=np.float64)[0], vmin=0, vmax=1, cmap="magma_r", interpolation="nearest")
        ax.grid(False)
        ax.set_xticks([])
        ax.set_yticks([])
        label(ax, title, f"entropy of the last row:\n{entropy(weights):.2f} nats")
    bar = figure.colorbar(image, ax=list(axes[0]), shrink=0.6, aspect=12)
    bar.ax.tick_params(labelsize=7)
    bar.set_label("weight", fontsize=8)
    return figure


def entropy(weights: Sequence[Any]) -> float:
    """Entropy of the last query's weights in nats, the mean over the examples."""
    p = np.asarray(weights, dtype=np.float64)[:, -1]
    return abs(float((p * np.log(np.where(p > 0, p, 1.0))).sum(-1).mean()))
