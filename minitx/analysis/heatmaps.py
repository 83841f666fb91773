"""Heatmaps of attention weights: all heads of all layers, or one head with its tokens.

Each function returns a matplotlib ``Figure``; ``minitx.analysis.save_figure`` writes it to a file. Weights run from white to
dark blue on a scale that all figures share, hidden cells are grey and hatched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minitx.analysis.canvas import DPI, INK, label
from minitx.analysis.lettering import drawable, short_name, token_labels
from minitx.analysis.snapshot import AttentionMap, Snapshot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

SEQUENTIAL = "Blues"
HIDDEN, HATCH = "#D9D9D9", "#B0B0B0"


def heatmap_grid(snapshot: Snapshot, row: int = 0) -> Figure:
    """The weights of all heads of all layers: a row of panels a layer, a column a head.

    In a panel, queries run from top to bottom and keys from left to right. The colour is stretched by a square root, on a
    scale from 0 to 1 that all figures share: one key among a hundred does not look like none, and equal colours are equal
    weights everywhere. Cells that a mask hides are grey and hatched.

    Args:
        row: of the batch; its padding is left out.

    Raises:
        ValueError: no such row; weights that are not finite.

    >>> import torch
    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> from minitx.analysis import take_snapshot
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> snapshot = take_snapshot(model, {"input_ids": torch.tensor([[1, 2, 3, 5]])})
    >>> len(heatmap_grid(snapshot).axes)  # two layers of three heads, and the colour bar
    7
    """
    from matplotlib.figure import Figure

    layers = snapshot.sentence(row).maps
    names, heads = [short_name(layer.name) for layer in layers], max(layer.weights.shape[1] for layer in layers)
    cell = max(0.6, min(1.3, 9.0 / heads))  # inches
    left, right, above, below = 0.3 + 0.075 * max(map(len, names)), 0.9, 0.6, 0.4
    width, height = max(left + cell * heads + right, 5.0), above + cell * len(layers) + below
    frame = {"left": left / width, "right": (left + cell * heads) / width, "top": 1 - above / height, "bottom": below / height}
    figure = Figure(figsize=(width, height), dpi=DPI)  # a layout engine takes longer than all the drawing
    axes = figure.subplots(len(layers), heads, squeeze=False, gridspec_kw={**frame, "wspace": 0.08, "hspace": 0.08})
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
    named = 0
    for name, layer, line in zip(names, layers, axes, strict=True):
        line[0].set_ylabel(name, fontsize=8.5, color=INK, rotation=0, ha="right", va="center")
        for head in range(layer.weights.shape[1]):
            image = _draw_weights(line[head], layer, head)
            label(line[head], f"head {head}" if head >= named else "")
        named = max(named, layer.weights.shape[1])
        for ax in line[layer.weights.shape[1] :]:
            ax.remove()
    bar = figure.add_axes((frame["right"] + 0.15 / width, frame["bottom"], 0.13 / width, frame["top"] - frame["bottom"]))
    _color_bar(figure, image, cax=bar)
    _mention_hidden(figure, layers, loc="lower left")
    words = "query from top to bottom, key from left to right"
    figure.text(1 - 0.15 / width, 0.12 / height, words, fontsize=8, color=INK, ha="right")
    _headline(figure, snapshot, y=1 - 0.1 / height)
    return figure


def head_heatmap(snapshot: Snapshot, layer: int | str, head: int, row: int = 0) -> Figure:
    """The weights of one head, with the tokens on both axes and, up to twelve tokens, the numbers in the cells.

    Colours are those of ``heatmap_grid``. Where there is no room for all tokens, every second, third … is named. Tokens of
    any script are drawn in the fonts that are installed, and as code points where none has them.

    Args:
        layer: index in ``snapshot.maps``, or a part of a layer's name that no other has. head: index; both may be negative,
            from the end.
        row: of the batch; its padding is left out.

    Raises:
        ValueError: no such layer, head or row; weights that are not finite.

    >>> import torch
    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> from minitx.analysis import take_snapshot
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> texts = {"input_ids": [["to", " be", " or", " not"]]}
    >>> snapshot = take_snapshot(model, {"input_ids": torch.tensor([[1, 2, 3, 5]])}, tokens=texts)
    >>> [text.get_text() for text in head_heatmap(snapshot, layer=-1, head=2).axes[0].get_yticklabels()]
    ['to', '␣be', '␣or', '␣not']
    """
    from matplotlib.figure import Figure

    sentence = snapshot.sentence(row)
    chosen = sentence.maps[_index(sentence, layer)]
    _, H, L, S = chosen.weights.shape
    if not -H <= head < H:
        raise ValueError(f"head={head} must be one of 0 to {H - 1} of {chosen.name}")
    head %= H
    cell = max(0.034, min(0.42, 6.8 / max(L, S)))  # inches
    width, height = max(S * cell, 1.5), max(L * cell, 1.5)
    queries, keys = (token_labels(sentence.tokens[axis][0]) for axis in (chosen.queries, chosen.keys))
    lies = max(map(len, keys[0])) * 0.09 <= max(width / S, 0.12)
    left, below = 0.075 * max(map(len, queries[0])), 0.2 if lies else 0.075 * max(map(len, keys[0]))
    figure = Figure(figsize=(width + left + 1.5, height + below + 1.2), dpi=DPI, layout="constrained")
    ax = figure.subplots()
    ax.tick_params(length=2, colors=INK)
    image = _draw_weights(ax, chosen, head)
    ax.set_aspect("equal" if min(L, S) * cell >= 1.5 else "auto")
    label(ax, f"{short_name(chosen.name)}, head {head}", "key", "query")
    _name_tokens(ax.yaxis, *queries, height / L)
    _name_tokens(ax.xaxis, *keys, width / S, rotation=0 if lies else 90)
    if max(L, S) <= 12:
        _write_weights(ax, chosen, head)
    _color_bar(figure, image, ax=ax, shrink=min(1.0, 2.6 / height), anchor=(0.0, 1.0), pad=0.03)
    _mention_hidden(figure, [chosen], loc="outside lower right")
    _headline(figure, snapshot)
    return figure


def _draw_weights(ax: Axes, layer: AttentionMap, head: int) -> AxesImage:
    """The only row of ``layer``; hidden cells show what lies behind the image."""
    import numpy as np
    from matplotlib.colors import PowerNorm

    weights, visible = layer.weights[0, head].float(), layer.visible[0, head]
    if not weights.isfinite().all():
        raise ValueError(f"{layer.name} has weights that are not finite in head {head}; there is nothing to draw")
    ax.patch.set(facecolor=HIDDEN, edgecolor=HATCH, hatch="/////", linewidth=0.0)
    ax.grid(False)
    drawn = np.ma.masked_array(weights.numpy(), ~visible.numpy())
    return ax.imshow(drawn, cmap=SEQUENTIAL, norm=PowerNorm(0.5, 0.0, 1.0), aspect="auto")


def _write_weights(ax: Axes, layer: AttentionMap, head: int) -> None:
    weights = layer.weights[0, head]
    for i, j in layer.visible[0, head].nonzero().tolist():
        color = "#FFFFFF" if weights[i, j] > 0.4 else INK
        ax.text(j, i, f"{weights[i, j]:.2f}", ha="center", va="center", fontsize=7, color=color)


def _name_tokens(axis: Any, labels: Sequence[str], families: Sequence[str], cell: float, **options: Any) -> None:
    """Tick labels, ``cell`` inches apart; the axis' name says which are left out."""
    every = max(1, math.ceil(0.125 / cell))
    places = range(0, len(labels), every)
    look = {"fontsize": 7.5, "fontfamily": families, "parse_math": False, **options}
    axis.set_ticks(places, [labels[i] for i in places], **look)
    if every > 1:
        axis.set_label_text(f"{axis.get_label_text()} (one in {every} named)")


def _color_bar(figure: Figure, image: AxesImage, **place: Any) -> None:
    bar = figure.colorbar(image, **place)
    bar.set_ticks([0.0, 0.01, 0.1, 0.25, 0.5, 1.0], labels=["0", ".01", ".1", ".25", ".5", "1"])
    bar.ax.tick_params(labelsize=7.5, colors=INK)
    bar.set_label("attention weight", fontsize=8.5, color=INK)
    bar.outline.set_visible(False)


def _mention_hidden(figure: Figure, layers: Sequence[AttentionMap], loc: Any) -> None:
    from matplotlib.patches import Patch

    if not all(bool(layer.visible.all()) for layer in layers):
        patch = Patch(facecolor=HIDDEN, edgecolor=HATCH, hatch="/////", linewidth=0.0, label="hidden by the mask")
        figure.legend(handles=[patch], loc=loc, fontsize=8, frameon=False)


def _headline(figure: Figure, snapshot: Snapshot, **place: float) -> None:
    """What was looked at, and when."""
    words = [snapshot.title] if snapshot.title else []
    words += [] if snapshot.step is None else [f"step {snapshot.step}"]
    if words:
        (headline,), families = drawable([", ".join(words)])
        figure.suptitle(headline, fontsize=9, color=INK, fontfamily=families, parse_math=False, **place)


def _index(snapshot: Snapshot, layer: int | str) -> int:
    names = [m.name for m in snapshot.maps]
    if isinstance(layer, int):
        found = [layer] if -len(names) <= layer < len(names) else []
    else:
        exact = [i for i, name in enumerate(names) if layer in (name, short_name(name))]
        found = exact or [i for i, name in enumerate(names) if layer in name]
    if len(found) != 1:
        wrong = "is none" if not found else f"fits {len(found)}"
        raise ValueError(f"layer={layer!r} {wrong} of the {len(names)} attention layers {', '.join(names)}")
    return found[0]
