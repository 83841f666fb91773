"""Figures of the head atlas: every head coloured by its class, at one moment and over training steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minitx.analysis.atlas import CLASSES, Atlas, HeadScores
from minitx.analysis.canvas import GREY, INK, PALETTE, Entry, label, legend, panels, step_axis, wrapped_panels
from minitx.analysis.figures import KINDS
from minitx.analysis.patterns import BEST

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS: Mapping[str, str] = {
    "previous": "#0072B2",
    "next": "#56B4E9",
    "duplicate": "#E69F00",
    "induction": "#D55E00",
    "offset": "#332288",
    "shifted": "#882255",
    "syntactic": "#CC79A7",
    "global": "#009E73",
    "local": "#8A6D00",
    "mixed": "#B5B5B5",
    "none": "#EDEDED",
}


def atlas_figure(atlas: Atlas) -> Figure:
    """A panel for each kind of attention: layers × heads, coloured by class, with the mean of the leading score."""
    kinds: dict[str, dict[str, list[HeadScores]]] = {}
    for head in atlas.heads:
        kinds.setdefault(head.kind, {}).setdefault(head.layer, []).append(head)
    most = max(len(heads) for layers in kinds.values() for heads in layers.values())
    deepest = max(map(len, kinds.values()))
    figure, axes = panels(1, len(kinds), width=max(0.85 * most + 0.6, 2.6), height=0.6 * deepest + 1.1)
    for ax, (kind, layers) in zip(axes[0], kinds.items(), strict=True):
        for row, heads in enumerate(layers.values()):
            for head in heads:
                _cell(ax, head, head.head, row)
        _grid(ax, [str(i) for i in range(max(map(len, layers.values())))], [str(i) for i in range(len(layers))])
        label(ax, KINDS[kind], "head", "layer")
    legend(figure, _classes(atlas.heads))
    return figure


def classes_figure(atlases: Sequence[Atlas]) -> Figure:
    """Heads × recorded steps, coloured by class."""
    heads, steps = atlases[-1].heads, [str(atlas.step) for atlas in atlases]
    figure, axes = panels(1, 1, width=max(0.42 * len(steps) + 2.4, 5.0), height=0.24 * len(heads) + 1.1)
    ax = axes[0, 0]
    for column, atlas in enumerate(atlases):
        for row, head in enumerate(atlas.heads):
            _cell(ax, head, column, row, text=False)
    names = [f"{head.layer.removesuffix('.core')} {head.head}" for head in heads]
    _grid(ax, steps, names)
    ax.tick_params(axis="x", rotation=90 if max(map(len, steps)) > 3 else 0)
    label(ax, "", "step", "head")
    legend(figure, _classes([head for atlas in atlases for head in atlas.heads]))
    return figure


def scores_figure(atlases: Sequence[Atlas], final: Atlas | None = None) -> Figure:
    """Excess of each score (and of agreement) against the step: a line a head, coloured by its class at the end.

    Agreement is that with the relation that the head follows at the end. Bands are 95 % intervals; values below −1
    (nearness of heads that look far away) are cut off.

    Args:
        final: the atlas that the classes are taken from, such as one with the shuffled control; default the last.
    """
    heads = (final or atlases[-1]).heads
    names = [name for name in BEST if any(not math.isnan(head.scores[name].excess.mean) for head in atlases[-1].heads)]
    names += ["agreement"] * any(head.agreement is not None for head in atlases[-1].heads)
    figure, axes = wrapped_panels(len(names), "excess over uniform", width=2.7, height=2.1, sharey=True)
    steps = [atlas.step or 0 for atlas in atlases]
    layers = list(dict.fromkeys(head.layer for head in heads))
    markers = {layer: PALETTE[i % len(PALETTE)][1] for i, layer in enumerate(layers)}
    for ax, name in zip(axes, names, strict=True):
        for i, head in enumerate(heads):
            low, mean, high = zip(*(_excess(atlas.heads[i], name, head) for atlas in atlases), strict=True)
            color, plain = _ink(head.label), head.label in ("mixed", "none")
            thin = {"linewidth": 0.7, "markersize": 2} if plain else {"linewidth": 1.3, "markersize": 3.5}
            ax.plot(steps, mean, color=color, marker=markers[head.layer], **thin)
            ax.fill_between(steps, low, high, color=color, alpha=0.05 if plain else 0.15, linewidth=0)
        if len(steps) > 2 and 16 * steps[1] < steps[-1]:  # recorded at powers of two
            step_axis(ax, max(steps))
        label(ax, name if name != "agreement" else "agreement − position", "step")
    axes[0].set_ylim(max(axes[0].get_ylim()[0], -1.0), 1.05)  # of all panels
    classes = [(name, _ink(name), mark, "-") for name, _, mark, _ in _classes(heads)]
    legend(figure, classes + [(layer.removesuffix(".core"), INK, mark, "") for layer, mark in markers.items()])
    return figure


def _excess(head: HeadScores, name: str, final: HeadScores) -> tuple[float, float, float]:
    """(low, mean, high) of a score, or of agreement with what the head follows at the end."""
    found = [head.scores[name].excess] if name in head.scores else []
    if name == "agreement" and final.agreement is not None:
        wanted = final.agreement.relation, final.agreement.direction
        found = [one.excess for one in head.relations if (one.relation, one.direction) == wanted]
    return next(((one.low, one.mean, one.high) for one in found), (math.nan,) * 3)


def _cell(ax: Axes, head: HeadScores, column: int, row: int, *, text: bool = True) -> None:
    from matplotlib.patches import Rectangle

    color = COLORS[head.label]
    ax.add_patch(Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, facecolor=color, edgecolor="none"))
    if not text:
        return
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    ink = INK if 0.3 * red + 0.59 * green + 0.11 * blue > 130 else "#FFFFFF"
    if head.label == "syntactic" and head.agreement is not None:
        name, value = head.agreement.relation, head.agreement.share
    else:
        score = head.scores[head.leading]
        name, value = head.leading + ("" if score.at is None else f" {score.at:+}"), score.excess.mean
    words = name if math.isnan(value) else f"{name}\n{value:.2f}"
    ax.text(column, row, words, ha="center", va="center", fontsize=7, color=ink, parse_math=False)


def _grid(ax: Axes, columns: Sequence[str], rows: Sequence[str]) -> None:
    ax.grid(False)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xlim(-0.55, len(columns) - 0.45)
    ax.set_ylim(len(rows) - 0.45, -0.55)


def _classes(heads: Sequence[HeadScores]) -> list[Entry]:
    """The legend of the classes that these heads have."""
    there = {head.label for head in heads}
    return [(name, COLORS[name], "s", "") for name in CLASSES if name in there]


def _ink(name: str) -> str:
    """A line's colour: that of ``none`` is too pale for one."""
    return {"mixed": GREY, "none": COLORS["mixed"]}.get(name, COLORS[name])
