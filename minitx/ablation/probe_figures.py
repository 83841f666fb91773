"""Figures that look into the attention at step 0 and during training, and the curves of the ladder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minitx.ablation import records as rec
from minitx.ablation.records import Record
from minitx.ablation.tables import InitRow
from minitx.ablation.verdict import Findings
from minitx.ablation.wording import STYLES, condition_text
from minitx.analysis.canvas import GREY, INK, PALETTE, RED, label, legend, log_ticks, panels, step_axis, wrapped_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = [(arm, STYLES[arm][0], "", "-") for arm in rec.ARMS]


# --- step 0


def variance_and_spread(findings: Findings) -> Figure | None:
    """Var(q·k) and the row std of the logits against d_k, log–log, with d_k, √d_k and the freezing threshold."""
    rows = [r for r in findings.init if rec.as_number(r.head_dim)]
    if not rows:
        return None
    figure, axes = panels(1, 2, width=4.4, height=3.4)
    left, right = axes[0]
    styles = {init: PALETTE[i % len(PALETTE)] for i, init in enumerate(dict.fromkeys(r.init for r in rows))}
    for init, (color, marker) in styles.items():
        mine = [r for r in rows if r.init == init]
        look = {"marker": marker, "color": color, "markersize": 4.5, "linewidth": 1.2}
        left.plot(*_against_width(mine, rec.TREATMENT, "dot_product_variance"), "-", **look)
        right.plot(*_against_width(mine, rec.TREATMENT, "row_std"), "-", **look)
        right.plot(*_against_width(mine, rec.REFERENCE, "row_std"), ":", **look)
    widths = sorted({float(r.head_dim) for r in rows})
    left.plot(widths, widths, "--", color=INK, linewidth=1)
    right.plot(widths, np.sqrt(widths), "--", color=INK, linewidth=1)
    right.axhline(rows[0].threshold, color=RED, linewidth=1, linestyle="-.")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(widths, [f"{w:g}" for w in widths])
        ax.minorticks_off()
    label(left, "Var(q·k) before scaling", "d_k", "variance, row-centred")
    label(right, "spread of the logits at step 0", "d_k", "row std of the logits")
    extra = [("y = d_k (left), √d_k (right)", INK, "", "--"), ("√(2 ln n), attention frozen above", RED, "", "-.")]
    extra += [("unscaled", GREY, "", "-"), ("inv_sqrt", GREY, "", ":")]
    legend(figure, [(init, *look, "") for init, look in styles.items()] + extra)
    return figure


def _against_width(rows: Iterable[InitRow], arm: str, name: str) -> tuple[list[float], list[float]]:
    """d_k and a statistic of an arm, where it was measured."""
    points = [(float(r.head_dim), value) for r in rows if r.arm == arm and (value := r.values[name])]
    return [width for width, _ in points], [value for _, value in points]


def init_map(findings: Findings) -> Figure | None:
    """Heat map of the row std at step 0 over init × d_k; frozen cells (above √(2 ln n)) are framed."""
    rows = [r for r in findings.init if r.values["row_std"] and r.arm in rec.ARMS]
    if not rows:
        return None
    arms = [arm for arm in (rec.TREATMENT, rec.REFERENCE) if any(r.arm == arm for r in rows)]
    inits = list(dict.fromkeys(r.init for r in rows))
    widths = sorted({r.head_dim for r in rows}, key=lambda w: rec.as_number(w) or 0.0)
    figure, axes = panels(1, len(arms), width=4.6, height=0.42 * len(inits) + 1.1, sharey=True)
    for ax, arm in zip(axes.flat, arms, strict=True):
        _draw_map(ax, [r for r in rows if r.arm == arm], inits, widths)
        label(ax, arm, "d_k")
    figure.suptitle(f"framed: row std above √(2 ln n) = {rows[0].threshold:.2f}", fontsize=8.5, color=INK)
    return figure


def _draw_map(ax: Axes, rows: Iterable[InitRow], inits: Sequence[str], widths: Sequence[str]) -> None:
    from matplotlib.patches import Rectangle

    table = np.full((len(inits), len(widths)), np.nan)
    for r in rows:
        i, j, value = inits.index(r.init), widths.index(r.head_dim), float(r.values["row_std"] or math.nan)
        table[i, j] = np.log2(value)
        color = INK if -3 < table[i, j] < 3.6 else "#FFFFFF"
        digits = 2 if value < 9.995 else 1
        ax.text(j, i, f"{value:.{digits}f}", ha="center", va="center", fontsize=8, color=color)
        if value > r.threshold:
            ax.add_patch(Rectangle((j - 0.47, i - 0.47), 0.94, 0.94, fill=False, edgecolor=RED, linewidth=1.6))
    ax.imshow(table, cmap="PuOr_r", vmin=-6, vmax=6, aspect="auto")
    ax.grid(False)
    ax.set_xticks(range(len(widths)), widths)
    ax.set_yticks(range(len(inits)), inits)


def row_gradients(findings: Findings) -> Figure | None:
    """Histogram of ‖dL/dq_i‖ over the rows at step 0, both arms, a panel a d_k of recall under the primary init."""
    cells = findings.cells
    panels_of = {}
    for condition in cells.conditions(rec.RECALL, *rec.ARMS):
        counts = {arm: _row_histogram(cells.select(rec.RECALL, arm, **condition)) for arm in rec.ARMS}
        if all(counts.values()) and condition.get(rec.INIT, rec.PRIMARY_INIT) == rec.PRIMARY_INIT:
            panels_of[condition_text(condition)] = counts
    if not panels_of:
        return None
    figure, axes = wrapped_panels(len(panels_of), "share of rows", width=3.0, height=2.2, sharey=True)
    for ax, (title, counts) in zip(axes, panels_of.items(), strict=True):
        for arm, of_arm in counts.items():
            edges = sorted(of_arm)
            shares = [of_arm[edge] / sum(of_arm.values()) for edge in edges]
            ax.bar(edges, shares, width=0.25, align="edge", color=STYLES[arm][0], alpha=0.45)
            middle = edges[int(np.searchsorted(np.cumsum(shares), 0.5))]
            ax.axvline(middle + 0.125, color=STYLES[arm][0], linestyle=":", linewidth=1.4)
        label(ax, title, "log₁₀ ‖dL/dq‖")
    legend(figure, LINES)
    return figure


def _row_histogram(runs: Iterable[Record]) -> dict[float, int]:
    """Rows by the lower edge of a quarter of a decade, at step 0, over runs and layers; rows without gradient left out."""
    counts: Counter[float] = Counter()
    for run in runs:
        for probe in (p for p in run["result"]["probes"] if p["step"] == 0):
            for layer in probe["layers"]:
                counts.update({float(e): n for e, n in layer.get("grad_query_histogram", {}).items() if e != "zero"})
    return dict(counts)


# --- during training


PROBED = (
    ("entropy", "normalised entropy"),
    ("saturation_90", "share of rows, max p > 0.9"),
    ("max_logit", "largest |logit|"),
    ("logit_step", "logit step (RMS)"),
    ("ratio", "‖∇W_Q‖ / ‖∇W_V‖"),
)


def during_training(findings: Findings) -> Figure | None:
    """Entropy, saturation, gradient ratio and largest logit against the step: a line a run and layer."""
    groups = _probed_groups(findings)
    if not groups:
        return None
    figure, axes = panels(len(groups), len(PROBED), width=2.3, height=2.1)
    for i, (row, (title, runs)) in enumerate(zip(axes, groups.items(), strict=True), 1):
        for ax, (name, words) in zip(row, PROBED, strict=True):
            for record in runs:
                _draw_probes(ax, record, name)
            step_axis(ax, max(p["step"] for r in runs for p in r["result"]["probes"]))
            if name in ("entropy", "saturation_90"):
                ax.set_ylim(-0.03, 1.03)
            elif any(np.nanmax(line.get_ydata(), initial=0.0) > 0 for line in ax.lines):
                log_ticks(ax)
            label(ax, words if i == 1 else "", "step" if i == len(groups) else "")
        row[0].set_ylabel(title, fontsize=8, color=INK)
    legend(figure, LINES)
    return figure


def _probed_groups(findings: Findings) -> dict[str, list[Record]]:
    """Runs worth a row of panels: primary recall, text, and the first rung with signs (see ``LadderRow``), or the last rung."""
    cells, condition = findings.cells, findings.primary_condition
    shaky = [row.rung for row in findings.ladder if row.signs] + [row.rung for row in findings.ladder[-1:]]
    groups = {}
    if condition is not None:
        groups["recall, " + condition_text(condition)] = [r for a in rec.ARMS for r in cells.select(rec.RECALL, a, **condition)]
    groups["text"] = [r for a in rec.ARMS for r in cells.select(rec.TEXT, a)]
    groups |= {f"ladder, {rung}": [r for a in rec.ARMS for r in cells.select(rec.LADDER, a, rung=rung)] for rung in shaky[:1]}
    probed = {title: [r for r in runs if len(r["result"]["probes"]) > 1] for title, runs in groups.items()}
    return {title: runs for title, runs in probed.items() if runs}


def _draw_probes(ax: Axes, record: Record, name: str) -> None:
    """A line a layer, deeper layers darker."""
    probes = sorted(record["result"]["probes"], key=lambda p: p["step"])
    steps, layers = [p["step"] for p in probes], min(len(p["layers"]) for p in probes)
    for layer in range(layers):
        values = [_probe_value(p["layers"][layer], name) for p in probes]
        alpha = 0.35 + 0.65 * (layer + 1) / layers if layers > 1 else 0.7
        ax.plot(steps, values, "-", color=STYLES[record["arm"]][0], linewidth=0.8, alpha=alpha)


def _probe_value(layer: Mapping[str, Any], name: str) -> float:
    value = rec.quotient(layer.get("grad_q"), layer.get("grad_v")) if name == "ratio" else rec.finite(layer.get(name))
    return math.nan if value is None else value


# --- the ladder


def ladder_losses(findings: Findings) -> Figure | None:
    """Training loss against the step on every rung, both arms, beside the n-gram models of the text."""
    rungs = _runs_by_rung(findings)
    if not rungs:
        return None
    figure, axes = wrapped_panels(len(rungs), "training loss (nats)", width=2.6, height=2.0, sharey=True)
    named: dict[str, str] = {}
    for ax, (rung, runs) in zip(axes, rungs.items(), strict=True):
        _draw_curves(ax, rung, runs, 1)
        _cut_above(ax, runs)
        floors = {k: v for k, v in runs[-1]["result"]["floors"].items() if k in ("unigram", "bigram") and v}
        for (floor, level), line in zip(sorted(floors.items()), (":", "--"), strict=False):
            ax.axhline(level, color=GREY, linewidth=0.9, linestyle=line)
            named[floor] = line
    legend(figure, LINES + [(floor, GREY, "", line) for floor, line in named.items()])
    return figure


def ladder_gradients(findings: Findings) -> Figure | None:
    """Gradient norm against the step on every rung, both arms."""
    rungs = _runs_by_rung(findings)
    if not rungs:
        return None
    figure, axes = wrapped_panels(len(rungs), "gradient norm", width=2.6, height=2.0)
    for ax, (rung, runs) in zip(axes, rungs.items(), strict=True):
        _draw_curves(ax, rung, runs, 2)
        log_ticks(ax)
    legend(figure, LINES)
    return figure


def _runs_by_rung(findings: Findings) -> dict[str, list[Record]]:
    """The finished runs of every rung that has one: all seeds, both arms."""
    rungs: dict[str, list[Record]] = {}
    for row in findings.ladder:
        rungs.setdefault(row.rung, []).extend(run for run in row.runs if run)
    return {rung: runs for rung, runs in rungs.items() if runs}


def _draw_curves(ax: Axes, rung: str, runs: Sequence[Record], column: int) -> None:
    """A line a run; ``column`` of the curve is 1 for the loss, 2 for the gradient norm."""
    for run in runs:
        points = [(point[0], point[column]) for point in run["result"]["curve"] if point[column] is not None]
        if points:
            alpha = 1.0 if len(runs) <= 2 else 0.6
            ax.plot(*zip(*points, strict=True), "-", color=STYLES[run["arm"]][0], linewidth=1.2, alpha=alpha)
    label(ax, rung, "step")


def _cut_above(ax: Axes, runs: Sequence[Record]) -> None:
    """Keep a diverging loss from flattening all others: the axis ends a fifth above the losses at init."""
    starts = [rec.finite(run["result"]["initial_loss"]) for run in runs]
    top = max((start for start in starts if start), default=None)
    if top is not None and ax.get_ylim()[1] > 1.2 * top:
        ax.set_ylim(top=1.2 * top)
