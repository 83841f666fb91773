"""The figures of the report: every run is a dot or a line, medians and intervals lie on top.

Each function takes the findings and returns a matplotlib ``Figure``, or ``None`` where the grid has nothing to draw.
Figures are made without pyplot, so that no global state and no display is touched. Colours are those of Okabe and Ito,
which colour-blind readers can tell apart; arms also differ by marker.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from minitx.ablation import analysis as an
from minitx.ablation.statistics import wilson_interval
from minitx.ablation.verdict import ENDPOINTS, Findings, primary_condition

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 110
INK, GREY = "#222222", "#767676"
STYLES = {
    an.REFERENCE: ("#0072B2", "o"),
    an.TREATMENT: ("#D55E00", "s"),
    an.FOLD: ("#009E73", "^"),
    an.FLOOR: ("#767676", "D"),
}
MORE_STYLES = (("#CC79A7", "v"), ("#56B4E9", "P"), ("#E69F00", "X"), ("#8A6D00", "<"), ("#000000", ">"))


class Drawing(NamedTuple):
    """One figure of the report: file name without ending, title, what it shows, width in pixels, and its PNG bytes."""

    name: str
    title: str
    caption: str
    width: int
    png: bytes


def style(arm: str, arms: Sequence[str]) -> tuple[str, str]:
    """Colour and marker of an arm: the same in every figure."""
    if arm in STYLES:
        return STYLES[arm]
    others = [a for a in arms if a not in STYLES]
    return MORE_STYLES[others.index(arm) % len(MORE_STYLES)]


def _panels(rows: int, columns: int, width: float = 2.9, height: float = 2.5, **share: Any) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(width * columns, 4.2), height * rows + 0.35), dpi=DPI, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **share)
    for ax in axes.flat:
        ax.tick_params(labelsize=8, colors=INK)
        ax.grid(True, color="#E6E6E6", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(figure: Figure, entries: Sequence[tuple[str, str, str, Any]]) -> None:
    """One legend above all panels; entries are (label, colour, marker, line style)."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=color, marker=marker, linestyle=line, markersize=5, label=label.replace("$", r"\$"))
        for label, color, marker, line in entries
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 4), fontsize=8, frameon=False)


def _label(ax: Axes, title: str = "", x: str = "", y: str = "") -> None:
    ax.set_title(title, fontsize=9, color=INK, parse_math=False)
    ax.set_xlabel(x, fontsize=8.5, color=INK)
    ax.set_ylabel(y, fontsize=8.5, color=INK)


def _spread(count: int, index: int, width: float = 0.16) -> float:
    """Offset of series ``index`` of ``count``, so that the dots of two arms do not hide each other."""
    return (index - (count - 1) / 2) * width


# --- recall


def rate_against_score(findings: Findings, study: str = an.RECALL) -> Figure | None:
    """Learning rate against accuracy (recall) or validation loss (text), a panel a condition, every run a dot."""
    is_recall = study == an.RECALL
    score: Callable[[an.Record], float] = an.accuracy_of if is_recall else an.loss_of
    return _by_rate(findings, study, score, "accuracy" if is_recall else "validation loss (nats)", _draw_runs)


def solve_rate(findings: Findings) -> Figure | None:
    """Share of seeds that solve recall, with Wilson's 95 % interval, against the learning rate."""
    return _by_rate(findings, an.RECALL, an.accuracy_of, "share of seeds solved", _draw_shares)


def _by_rate(
    findings: Findings, study: str, score: Callable[[an.Record], float], y: str, draw: Callable[..., None]
) -> Figure | None:
    """A panel a condition with the learning rates side by side; ``draw`` fills in one arm."""
    cells, arms = findings.cells, findings.cells.arms(study)
    conditions = [c for c in cells.conditions(study) if cells.levels(study, an.RATE, **c)]
    if not conditions or not cells.select(study):
        return None
    columns = min(len(conditions), 4)
    figure, axes = _panels(math.ceil(len(conditions) / columns), columns, sharey=True)
    for ax, condition in zip(axes.flat, conditions, strict=False):
        rates = cells.levels(study, an.RATE, **condition)
        for i, arm in enumerate(arms):
            values = an.scores(cells, study, arm, condition, rates, score).values
            if len(values):
                draw(ax, values, np.arange(len(rates)) + _spread(len(arms), i), *style(arm, arms))
        ax.set_xticks(range(len(rates)), rates)
        ax.set_xlim(-0.5, len(rates) - 0.5)
        if study == an.RECALL:
            ax.axhline(an.SOLVED, color=GREY, linewidth=0.8, linestyle="--" if draw is _draw_runs else "")
            ax.set_ylim(-0.05, 1.05)
        _label(ax, an.condition_text(condition) if condition else study, "learning rate")
    _finish(axes, conditions, y)
    _legend(figure, [(arm, *style(arm, arms), "-") for arm in arms])
    return figure


def _draw_runs(ax: Axes, values: np.ndarray, x: np.ndarray, color: str, marker: str) -> None:
    """A dot a run, and the medians of the rates that ran."""
    for row in values:
        ax.plot(x, row, marker, color=color, markersize=4, alpha=0.55, markeredgewidth=0)
    ran = [j for j in range(len(x)) if np.isfinite(values[:, j]).any()]
    medians = [np.nanmedian(values[:, j]) for j in ran]
    ax.plot(x[ran], medians, "-", color=color, linewidth=1.6)
    ax.plot(x[ran], medians, "_", color=color, markersize=9, markeredgewidth=2)


def _draw_shares(ax: Axes, values: np.ndarray, x: np.ndarray, color: str, marker: str) -> None:
    for position, column in zip(x, values.T, strict=True):
        ran = column[np.isfinite(column)]
        if len(ran):
            share = wilson_interval(int((ran >= an.SOLVED).sum()), len(ran))
            ax.plot([position, position], [share.low, share.high], "-", color=color, linewidth=1.4)
            ax.plot(position, share.estimate, marker, color=color, markersize=5)


def _log_ticks(ax: Axes) -> None:
    """A logarithmic y axis with plain, labelled ticks, also where it spans less than a decade."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0), numticks=8))
    ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    ax.minorticks_off()


def _finish(axes: Any, used: Sequence[Any], y: str) -> None:
    """Name the y axis of every first column and remove panels without content."""
    for ax in axes[:, 0]:
        ax.set_ylabel(y, fontsize=8.5, color=INK)
    for ax in axes.flat[len(used) :]:
        ax.remove()


def paired_slopes(findings: Findings) -> Figure | None:
    """Each seed's score with and without the scale: a line a seed, one row of panels an endpoint."""
    mine = [c for c in findings.comparisons if (c.reference, c.treatment) == (an.REFERENCE, an.TREATMENT) and c.effect]
    conditions = [c for c in findings.cells.conditions(an.RECALL) if any(m.condition == c for m in mine)]
    if not conditions:
        return None
    figure, axes = _panels(len(ENDPOINTS), len(conditions), width=2.4, height=2.1, sharey="row")
    for row, (endpoint, words) in enumerate(ENDPOINTS.items()):
        for ax, condition in zip(axes[row], conditions, strict=True):
            for c in (m for m in mine if m.endpoint == endpoint and m.condition == condition and m.effect):
                assert c.effect is not None
                for i, (a, b) in enumerate(zip(c.effect.reference, c.effect.treatment, strict=True)):
                    shift = _spread(len(c.seeds), i, 0.035)
                    ax.plot([shift, 1 + shift], [a, b], "-", color="#B0B0B0", linewidth=1)
                    ax.plot(shift, a, "o", color=STYLES[an.REFERENCE][0], markersize=4.5)
                    ax.plot(1 + shift, b, "s", color=STYLES[an.TREATMENT][0], markersize=4.5)
                _label(ax, f"{an.condition_text(condition)}\n{c.judgement.word}")
            ax.set_xticks([0, 1], [an.REFERENCE, an.TREATMENT])
            ax.set_xlim(-0.4, 1.4)
            ax.set_ylim(-0.06, 1.06)
        axes[row, 0].set_ylabel(f"{endpoint}: {words}", fontsize=8, color=INK)
    return figure


# --- init


def variance_and_spread(findings: Findings) -> Figure | None:
    """Var(q·k) and the row std of the logits against d_k, log–log, with d_k, √d_k and the freezing threshold."""
    rows = [r for r in findings.init if an.as_number(r.head_dim)]
    if not rows:
        return None
    figure, axes = _panels(1, 2, width=4.4, height=3.4)
    inits = list(dict.fromkeys(r.init for r in rows))
    widths = sorted({float(r.head_dim) for r in rows})
    palette = (*STYLES.values(), *MORE_STYLES)
    for i, init in enumerate(inits):
        color, marker = palette[i % len(palette)]
        for ax, name, arm, line in (
            (axes[0, 0], "dot_product_variance", an.TREATMENT, "-"),
            (axes[0, 1], "row_std", an.TREATMENT, "-"),
            (axes[0, 1], "row_std", an.REFERENCE, ":"),
        ):
            points = [(float(r.head_dim), r.values[name]) for r in rows if r.init == init and r.arm == arm]
            points = [(w, v) for w, v in points if v]
            if points:
                ax.plot(*zip(*points, strict=True), line, marker=marker, color=color, markersize=4.5, linewidth=1.2)
    axes[0, 0].plot(widths, widths, "--", color=INK, linewidth=1)
    axes[0, 1].plot(widths, np.sqrt(widths), "--", color=INK, linewidth=1)
    axes[0, 1].axhline(rows[0].threshold, color="#B00020", linewidth=1, linestyle="-.")
    for ax in axes.flat:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(widths, [f"{w:g}" for w in widths])
        ax.minorticks_off()
    _label(axes[0, 0], "Var(q·k) before scaling", "d_k", "variance, row-centred")
    _label(axes[0, 1], "spread of the logits at step 0", "d_k", "row std of the logits")
    extra = [("y = d_k (left), √d_k (right)", INK, "", "--"), ("√(2 ln n), attention frozen above", "#B00020", "", "-.")]
    extra += [("unscaled", GREY, "", "-"), ("inv_sqrt", GREY, "", ":")]
    _legend(figure, [(init, *palette[i % len(palette)], "") for i, init in enumerate(inits)] + extra)
    return figure


def init_map(findings: Findings) -> Figure | None:
    """Heat map of the row std at step 0 over init × d_k; frozen cells (above √(2 ln n)) are framed."""
    rows = [r for r in findings.init if r.values["row_std"] and r.arm in (an.REFERENCE, an.TREATMENT)]
    if not rows:
        return None
    from matplotlib.patches import Rectangle

    arms = [arm for arm in (an.TREATMENT, an.REFERENCE) if any(r.arm == arm for r in rows)]
    inits = list(dict.fromkeys(r.init for r in rows))
    widths = sorted({r.head_dim for r in rows}, key=lambda w: an.as_number(w) or 0.0)
    figure, axes = _panels(1, len(arms), width=4.6, height=0.42 * len(inits) + 1.1, sharey=True)
    for ax, arm in zip(axes.flat, arms, strict=True):
        table = np.full((len(inits), len(widths)), np.nan)
        for r in (r for r in rows if r.arm == arm):
            i, j, value = inits.index(r.init), widths.index(r.head_dim), float(r.values["row_std"] or math.nan)
            table[i, j] = np.log2(value)
            color = "#FFFFFF" if abs(table[i, j]) > 3.4 else INK
            digits = 2 if value < 9.995 else 1
            ax.text(j, i, f"{value:.{digits}f}", ha="center", va="center", fontsize=8, color=color)
            if value > r.threshold:
                ax.add_patch(Rectangle((j - 0.47, i - 0.47), 0.94, 0.94, fill=False, edgecolor="#B00020", linewidth=1.6))
        ax.imshow(table, cmap="PuOr_r", vmin=-6, vmax=6, aspect="auto")
        ax.grid(False)
        ax.set_xticks(range(len(widths)), widths)
        ax.set_yticks(range(len(inits)), inits)
        _label(ax, arm, "d_k")
    figure.suptitle(f"framed: row std above √(2 ln n) = {rows[0].threshold:.2f}", fontsize=8.5, color=INK)
    return figure


# --- during training


PROBED = (
    ("entropy", "normalised entropy"),
    ("saturation_90", "share of rows, max p > 0.9"),
    ("ratio", "‖∇W_Q‖ / ‖∇W_V‖"),
    ("max_logit", "largest |logit|"),
)


def _probe_value(layer: Any, name: str) -> float:
    if name == "ratio":
        top, bottom = an.finite(layer.get("grad_q")), an.finite(layer.get("grad_v"))
        return top / bottom if top is not None and bottom else math.nan
    value = an.finite(layer.get(name))
    return math.nan if value is None else value


def _probed_groups(findings: Findings) -> list[tuple[str, list[an.Record]]]:
    """Runs worth a row of panels: primary recall, text, and the first rung with instability (or the last rung)."""
    cells = findings.cells
    shaky = [row.rung for row in findings.ladder if row.signs] + [row.rung for row in findings.ladder[-1:]]
    groups = [
        ("recall, " + an.condition_text(c), [r for a in _ARMS for r in cells.select(an.RECALL, a, **c)])
        for c in (primary_condition(cells),)
        if c is not None
    ]
    groups.append(("text", [r for a in _ARMS for r in cells.select(an.TEXT, a)]))
    groups += [(f"ladder, {rung}", [r for a in _ARMS for r in cells.select(an.LADDER, a, rung=rung)]) for rung in shaky[:1]]
    probed = [(title, [r for r in runs if len(r["result"]["probes"]) > 1]) for title, runs in groups]
    return [(title, runs) for title, runs in probed if runs]


_ARMS = (an.REFERENCE, an.TREATMENT)


def during_training(findings: Findings) -> Figure | None:
    """Entropy, saturation, gradient ratio and largest logit against the step: a line a run and layer."""
    groups = _probed_groups(findings)
    if not groups:
        return None
    figure, axes = _panels(len(groups), len(PROBED), width=2.6, height=2.1)
    for row, (title, runs) in enumerate(groups):
        for ax, (name, words) in zip(axes[row], PROBED, strict=True):
            for record in runs:
                probes = sorted(record["result"]["probes"], key=lambda p: p["step"])
                layers = min(len(p["layers"]) for p in probes)
                for layer in range(layers):
                    values = [_probe_value(p["layers"][layer], name) for p in probes]
                    ax.plot(
                        [p["step"] for p in probes],
                        values,
                        "-",
                        color=STYLES[record["arm"]][0],
                        linewidth=0.8,
                        alpha=0.35 + 0.65 * (layer + 1) / layers if layers > 1 else 0.7,
                    )
            ax.set_xscale("symlog", linthresh=1, base=2)
            last = max(p["step"] for r in runs for p in r["result"]["probes"])
            ticks = [0, *(t for t in (1, 4, 16, 64, 256, 1024, 4096, 16384) if t <= last)]
            ax.set_xticks(ticks, [str(t) for t in ticks])
            ax.set_xlim(0, last)
            ax.minorticks_off()
            if name in ("ratio", "max_logit"):
                _log_ticks(ax)
            else:
                ax.set_ylim(-0.03, 1.03)
            _label(ax, words if row == 0 else "", "step" if row == len(groups) - 1 else "")
        axes[row, 0].set_ylabel(title, fontsize=8, color=INK)
    _legend(figure, [(arm, STYLES[arm][0], "", "-") for arm in _ARMS])
    return figure


def _cut_above(ax: Axes, row: an.LadderRow) -> None:
    """Keep a diverging loss from flattening all others: the axis ends a fifth above the losses at init."""
    starts = [an.finite(r["result"]["initial_loss"]) for r in (row.reference, row.treatment) if r]
    top = max((start for start in starts if start), default=None)
    if top is not None and ax.get_ylim()[1] > 1.2 * top:
        ax.set_ylim(top=1.2 * top)


def ladder_curves(findings: Findings, gradients: bool = False) -> Figure | None:
    """Training loss, or gradient norm, against the step on every rung, both arms."""
    rungs = [row for row in findings.ladder if row.reference or row.treatment]
    if not rungs:
        return None
    columns = min(len(rungs), 4)
    figure, axes = _panels(math.ceil(len(rungs) / columns), columns, width=2.6, height=2.0, sharey=not gradients)
    floors: dict[str, float] = {}
    for ax, row in zip(axes.flat, rungs, strict=False):
        for record in (row.reference, row.treatment):
            if record is None:
                continue
            curve = [(p[0], p[2 if gradients else 1]) for p in record["result"]["curve"]]
            curve = [(step, value) for step, value in curve if value is not None]
            color, _ = STYLES[record["arm"]]
            if curve:
                ax.plot(*zip(*curve, strict=True), "-", color=color, linewidth=1.2)
            floors = {k: v for k, v in record["result"]["floors"].items() if k in ("unigram", "bigram") and v}
        if gradients:
            _log_ticks(ax)
        else:
            _cut_above(ax, row)
        for floor, line in () if gradients else zip(sorted(floors), (":", "--"), strict=False):
            ax.axhline(floors[floor], color=GREY, linewidth=0.9, linestyle=line)
        _label(ax, row.rung if row.seed == 0 else f"{row.rung}, seed {row.seed}", "step")
    _finish(axes, rungs, "gradient norm" if gradients else "training loss (nats)")
    lines = () if gradients else tuple((f, GREY, "", s) for f, s in zip(sorted(floors), (":", "--"), strict=False))
    _legend(figure, [(arm, STYLES[arm][0], "", "-") for arm in _ARMS] + list(lines))
    return figure


# --- all of them


FIGURES: tuple[tuple[str, str, str, Callable[[Findings], Any]], ...] = (
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
        functools.partial(rate_against_score, study=an.TEXT),
    ),
    (
        "init_variance",
        "Var(q·k) and the spread of the logits at step 0",
        "Means over seeds and layers. Left: the variance law. Right: solid without, dotted with 1/√d_k.",
        variance_and_spread,
    ),
    (
        "init_map",
        "Row std of the logits at step 0, init × d_k",
        "Red frames: above the threshold √(2 ln n), where attention starts frozen on one key.",
        init_map,
    ),
    (
        "during_training",
        "Attention during training",
        "A line is one layer of one run; deeper layers are darker.",
        during_training,
    ),
    (
        "ladder_loss",
        "Stress ladder: training loss",
        "Every rung, both arms, one run each. Grey: n-gram models on the same text. A diverging loss leaves the panel.",
        ladder_curves,
    ),
    (
        "ladder_gradients",
        "Stress ladder: gradient norm",
        "Before any clipping, logarithmic; the panels have their own scales.",
        functools.partial(ladder_curves, gradients=True),
    ),
)


def draw_all(findings: Findings) -> list[Drawing]:
    """Every figure that the grid has data for, as PNG; equal findings give equal bytes."""
    drawings = []
    for name, title, caption, draw in FIGURES:
        figure = draw(findings)
        if figure is not None:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
            width = round(figure.get_figwidth() * DPI)
            drawings.append(Drawing(name, title, caption, width, buffer.getvalue()))
    return drawings
