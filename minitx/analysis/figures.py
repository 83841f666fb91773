"""Figures of attention, and input for BertViz.

The figures show all heads, one head with its tokens, any matrix of weights, statistics over training steps, or effects of heads.

Each function returns a matplotlib ``Figure``: a notebook shows it, and ``save_figure`` writes it to a file. Numbers are drawn
without smoothing or clipping. Weights run from white to dark blue, on the same scale in all figures. Hidden cells are grey and
hatched, so that they can be recognised without colours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from minitx.analysis.snapshot import AttentionMap, Snapshot
from minitx.analysis.snapshot_sources import as_weights
from minitx.canvas import (
    GREY,
    INK,
    PALETTE,
    drawable,
    label,
    legend,
    log_ticks,
    panels,
    short_name,
    step_axis,
    token_labels,
    weight_bar,
    weight_image,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from minitx.analysis.experiments import HeadEffects

PALE = "#C8C8C8"
HIDDEN: dict[str, Any] = {"facecolor": "#D9D9D9", "edgecolor": "#B0B0B0", "hatch": "/////", "linewidth": 0.0}
PROBED = {
    "saturation_99": ("one key above 0.99", "share of rows"),
    "saturation_90": ("one key above 0.9", "share of rows"),
    "entropy": ("entropy", "entropy / ln(visible keys)"),
    "max_logit": ("largest logit", "largest |q·k · scale|"),
}
"""Statistics over steps: title and y axis."""

Records = Sequence[Mapping[str, Any]]
PerLayer = tuple[Tensor, ...]


def heatmap_grid(snapshot: Snapshot, row: int = 0) -> Figure:
    """Draw the weights of all heads of all layers, with one row per layer and one column per head.

    In a tile, queries run from top to bottom and keys from left to right. The colour is the square root of the weight, so that
    a weight of 0.01 is still visible. The scale from 0 to 1 is the same in all figures: equal colours are equal weights. Cells
    that a mask hides are grey and hatched.

    Args:
        row: the row of the batch. Its padding is left out.

    Raises:
        ValueError: the row does not exist, or weights are not finite.

    >>> import torch
    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> from minitx.analysis import take_snapshot
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> snapshot = take_snapshot(model, {"input_ids": torch.tensor([[1, 2, 3, 5]])})
    >>> len(heatmap_grid(snapshot).axes[0].images)  # two layers of three heads
    6
    """
    layers = _of(snapshot, row).maps
    heads = max(layer.weights.shape[1] for layer in layers)
    cell = max(0.6, min(1.3, 9.0 / heads))  # inches
    figure, ((ax,),) = panels(1, 1, max(cell * heads + 1.9, 5.0), cell * len(layers) + 0.7)
    for place, layer in enumerate(layers):
        for head in range(layer.weights.shape[1]):
            image = draw_weights(ax, layer, head, (head + 0.04, head + 0.96, place + 0.96, place + 0.04))
    ax.set_xticks([head + 0.5 for head in range(heads)], [f"head {head}" for head in range(heads)])
    ax.set_yticks([place + 0.5 for place in range(len(layers))], [short_name(layer.name) for layer in layers])
    ax.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    ax.spines[:].set_visible(False)
    ax.set(xlim=(0, heads), ylim=(len(layers), 0), aspect="auto")
    label(ax, "", "in each tile: key from left to right", "query from top to bottom")
    _colour_bar(figure, ax, image, layers, "hidden by the mask")
    _headline(figure, snapshot)
    return figure


def _of(snapshot: Any, row: int) -> Snapshot:
    """One row of a snapshot."""
    if not isinstance(snapshot, Snapshot):
        raise TypeError(f"expected a Snapshot from take_snapshot(model, inputs), got {type(snapshot).__name__}")
    return snapshot.sentence(row)


def head_heatmap(snapshot: Snapshot, layer: int | str, head: int, row: int = 0) -> Figure:
    """Draw the weights of one head, with the tokens on both axes. With up to twelve tokens, cells contain numbers.

    Colours are as in ``heatmap_grid``. If not all tokens fit, only every second, third … has a label. Tokens of any script are drawn
    with installed fonts, or as code points if no font has them.

    Args:
        layer: the number of a layer of the model, or a part of a map's name. It must select one map: a decoder block with
            cross-attention has two.
        head: the index of the head. Negative numbers count from the end.
        row: the row of the batch. Its padding is left out.

    Raises:
        ValueError: the layer, head or row does not exist, or weights are not finite.

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
    sentence = _of(snapshot, row)
    chosen = sentence.maps[_index(sentence, layer)]
    _, H, _, _ = chosen.weights.shape
    if not -H <= head < H:
        raise ValueError(f"head={head} must be one of 0 to {H - 1} of {chosen.name}")
    texts = [sentence.tokens[axis][0] for axis in (chosen.queries, chosen.keys)]
    figure = _draw_map(chosen, head % H, texts, f"{short_name(chosen.name)}, head {head % H}", "hidden by the mask")
    _headline(figure, snapshot)
    return figure


def heatmap(weights: Any, tokens: Any = None, *, title: str = "") -> Figure:
    """Draw any matrix of attention weights. With up to twelve tokens, cells contain numbers.

    Colours are as in ``heatmap_grid``, labels as in ``head_heatmap``. Cells whose weight is exactly 0 are grey and hatched.

    Args:
        weights: (L, S), as a tensor, an array or nested lists. Row i contains the weights of query i over the S keys.
        tokens: the texts of the tokens, if queries and keys are the same; or two lists, one for the queries and one for the
            keys. Default: numbers from 0.
        title: a title above the map.

    Raises:
        ValueError: another shape, weights outside of 0 to 1 or not finite, or texts that do not fit the shape.

    Warns:
        UserWarning: matplotlib has no font for a character of a token. The message explains how to add one.

    >>> figure = heatmap([[1.0, 0.0], [0.25, 0.75]], ["the", "cat"], title="By hand")
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['1.00', '0.25', '0.75']

    One head of a layer, and two lists of tokens:

    >>> import torch
    >>> from minitx.nn import MultiHeadAttention
    >>> attention, x, y = MultiHeadAttention(12, 3), torch.randn(1, 2, 12), torch.randn(1, 3, 12)
    >>> _, weights = attention(x, y, y, need_weights=True)  # (B, H, L, S)
    >>> figure = heatmap(weights[0, 2], (["le", "chat"], ["the", "cat", "sat"]))
    """
    drawn = as_weights(weights)
    if drawn.dim() != 2 or not drawn.numel():
        hints = {1: "one row is [weights]", 3: "weights[0] is the first head", 4: "weights[0, 0] is row 0 of the batch, head 0"}
        hint = f": {hints[drawn.dim()]}" if drawn.dim() in hints else ""
        raise ValueError(f"weights must be one matrix (L, S), got {tuple(drawn.shape)}{hint}")
    if bad := (~drawn.isfinite().all(-1)).nonzero().flatten().tolist():
        advice = "softmax gives NaN to a query that sees no key; fill its row with 0"
        raise ValueError(f"weights are not finite in row {bad[0]}, so there is nothing to draw ({advice})")
    whole = drawn[None, None]
    layer = AttentionMap("weights", "cross", "query", "key", whole, whole != 0, whole.amax(-1))
    return _draw_map(layer, 0, _texts_of(tokens, *drawn.shape), title, "weight exactly 0")


def _texts_of(tokens: Any, L: int, S: int) -> list[list[str]]:
    """The texts of queries and keys."""
    if tokens is None:
        return [[str(i) for i in range(size)] for size in (L, S)]
    if isinstance(tokens, str):
        raise ValueError(f"tokens={tokens!r:.40} is one text; give a list with the text of each token")
    entries = list(tokens)
    two = len(entries) == 2 and not any(isinstance(part, str) or not hasattr(part, "__len__") for part in entries)
    texts = [[str(text) for text in part] for part in (entries if two else [entries, entries])]
    if [len(part) for part in texts] != [L, S]:
        got = " and ".join(str(len(part)) for part in texts[: 1 + two])
        raise ValueError(f"tokens must be the texts of {L} queries and of {S} keys (one list if they are the same), got {got}")
    return texts


def _draw_map(layer: AttentionMap, head: int, texts: Sequence[Sequence[str]], title: str, hidden: str) -> Figure:
    """Draw one head of ``layer`` (a single row) with the texts of queries and keys. ``hidden`` explains the hatched cells."""
    L, S = layer.weights.shape[2:]
    cell = max(0.034, min(0.42, 6.8 / max(L, S)))  # inches
    width, height = max(S * cell, 1.5), max(L * cell, 1.5)
    queries, keys = map(token_labels, texts)
    left, below = (0.075 * max(map(len, labels)) for labels, _ in (queries, keys))
    figure, ((ax,),) = panels(1, 1, width + left + 1.5, height + below + 0.9)
    image = draw_weights(ax, layer, head, (-0.5, S - 0.5, L - 0.5, -0.5))
    ax.set_aspect("equal" if min(L, S) * cell >= 1.5 else "auto")
    label(ax, title, "key", "query")
    name_tokens(ax.yaxis, *queries, math.ceil(0.125 / (height / L)))
    name_tokens(ax.xaxis, *keys, math.ceil(0.125 / (width / S)), rotation=0 if below * 1.2 <= max(width / S, 0.12) else 90)
    if max(L, S) <= 12:
        for i, j in layer.visible[0, head].nonzero().tolist():
            weight = float(layer.weights[0, head, i, j])
            ax.text(j, i, f"{weight:.2f}", ha="center", va="center", fontsize=7, color="#FFFFFF" if weight > 0.4 else INK)
    _colour_bar(figure, ax, image, [layer], hidden)
    return figure


def masked_weights(layer: AttentionMap, head: int) -> Any:
    """Return the weights (L, S) of one head of ``layer`` (a single row) as a numpy array with hidden cells masked."""
    import numpy as np

    return np.ma.masked_array(layer.weights[0, head].float().numpy(), ~layer.visible[0, head].numpy())


def draw_weights(ax: Axes, layer: AttentionMap, head: int, extent: tuple[float, float, float, float]) -> AxesImage:
    """Draw ``layer`` (a single row) into the rectangle (left, right, bottom, top). Hidden cells are transparent."""
    from matplotlib.patches import Rectangle

    weights, visible = layer.weights[0, head].float(), layer.visible[0, head]
    if not weights.isfinite().all():
        raise ValueError(f"{layer.name} has weights that are not finite in head {head}; there is nothing to draw")
    left, right, bottom, top = extent
    if not visible.all():
        ax.add_patch(Rectangle((left, top), right - left, bottom - top, zorder=-1, **HIDDEN))
    return weight_image(ax, masked_weights(layer, head), extent=extent)


def _colour_bar(figure: Figure, ax: Axes, image: AxesImage, layers: Sequence[AttentionMap], hidden: str) -> None:
    """Draw the colour bar, and explain the hatched cells."""
    from matplotlib.patches import Patch

    weight_bar(figure, ax, image, shrink=min(1.0, 2.6 / figure.get_figheight()), anchor=(0.0, 1.0), pad=0.03)
    if not all(bool(layer.visible.all()) for layer in layers):
        figure.legend(handles=[Patch(label=hidden, **HIDDEN)], loc="outside lower right", fontsize=8, frameon=False)


def _headline(figure: Figure, snapshot: Snapshot) -> None:
    """Write the title and the step above the figure."""
    words = [snapshot.title] * bool(snapshot.title) + [f"step {snapshot.step}"] * (snapshot.step is not None)
    if words:
        (headline,), families = drawable([", ".join(words)])
        figure.suptitle(headline, fontsize=9, color=INK, fontfamily=families, parse_math=False)


def name_tokens(axis: Any, labels: Sequence[str], families: Sequence[str], every: int, **options: Any) -> None:
    """Label one token in ``every``, and note this in the label of the axis."""
    places = range(0, len(labels), every)
    axis.set_ticks(places, [labels[i] for i in places], fontsize=7.5, fontfamily=families, parse_math=False, **options)
    if every > 1:
        axis.set_label_text(f"{axis.get_label_text()} (one in {every} named)")


def _index(snapshot: Snapshot, layer: int | str) -> int:
    names = [layer_map.name for layer_map in snapshot.maps]
    matching = [name for name in names if layer in (name, short_name(name))] or snapshot.chosen([layer])
    if len(matching) != 1:
        raise ValueError(f"layer={layer!r} fits {len(matching)} of the {len(names)} attention layers {', '.join(names)}")
    return names.index(matching[0])


def saturation_over_steps(probes: Mapping[str, Records] | Records) -> Figure:
    """Draw saturation, normalised entropy and the largest logit against the training step: one colour per run, one line per layer.

    Deeper layers are darker. The axis of steps is logarithmic and starts at 0. One or two steps are drawn as dots without a
    line.

    Args:
        probes: the result of ``minitx.training.json_lines.read_probes``, or up to ten such results by label. A record is ``{"step":
            int, "layers": [{"entropy": …, "max_logit": …, "saturation_90": …, "saturation_99": …}]}``, with one number per
            layer, or one per head to average.

    Raises:
        ValueError: no run, more than ten runs, a run without records, or a record without these statistics.

    >>> layer = {"saturation_99": 0.0, "saturation_90": 0.1, "entropy": [0.8, 0.6], "max_logit": 2.5}
    >>> figure = saturation_over_steps({"scaled": [{"step": 0, "layers": [layer]}, {"step": 1, "layers": [layer]}]})
    >>> [ax.lines[0].get_ydata().tolist() for ax in figure.axes]
    [[0.0, 0.0], [0.1, 0.1], [0.7, 0.7], [2.5, 2.5]]
    """
    import numpy as np

    runs = dict(probes) if isinstance(probes, Mapping) else {"": probes}
    if not 0 < len(runs) <= len(PALETTE):
        raise ValueError(f"probes must have 1 to {len(PALETTE)} runs, got {len(runs)}")
    figure, axes = panels(1, len(PROBED), width=2.8, height=2.3)
    for (name, records), (color, marker) in zip(runs.items(), PALETTE, strict=False):
        missing = sorted({name for record in records for layer in record["layers"] for name in PROBED if name not in layer})
        if missing or not records:
            lacks = ", ".join(missing) or "record; train with callbacks.probe.every=N"
            raise ValueError(f"probes{f' of {name!r}' if name else ''} have no {lacks}")
        ordered = sorted(records, key=lambda record: record["step"])
        steps, layers = [record["step"] for record in ordered], len(ordered[0]["layers"])
        look = {"linestyle": "-" if len(steps) > 2 else "", "marker": marker, "markersize": 3, "linewidth": 1.0}
        for ax, statistic in zip(axes.flat, PROBED, strict=True):
            for i in range(layers):
                values = [np.asarray(record["layers"][i][statistic]).mean() for record in ordered]
                ax.plot(steps, values, color=color, alpha=0.35 + 0.65 * (i + 1) / layers, **look)
    for ax, (statistic, (title, y)) in zip(axes.flat, PROBED.items(), strict=True):
        step_axis(ax, max(record["step"] for records in runs.values() for record in records))
        if statistic == "max_logit":
            log_ticks(ax)
        else:
            ax.set_ylim(-0.03, 1.03)
        label(ax, title, "step", y)
    deeper = any(len(record["layers"]) > 1 for records in runs.values() for record in records)
    entries = [(name, *look, "-") for name, look in zip(runs, PALETTE, strict=False) if name]
    legend(figure, entries + [("deeper layers darker", GREY, "", "-")] * deeper)
    return figure


def induction_steps(scores: Mapping[int, Any]) -> Figure:
    """Draw the previous-token, duplicate-token and induction scores of each self-attention head against the step, one panel each.

    Scores are the excess over uniform attention: 0 is uniform attention, 1 is all weight on the pattern. Bands are 95 %
    intervals. The ten heads with the highest scores have colours, the others are grey.

    Args:
        scores: the results of ``head_scores`` for the snapshots of a run, by step.

    Raises:
        ValueError: no step, or no head with these scores.

    >>> import torch
    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> from minitx.analysis import head_scores, take_snapshot
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> heads = head_scores(take_snapshot(model, {"input_ids": torch.randint(11, (7, 13))}))
    >>> [(ax.get_title(), len(ax.lines)) for ax in induction_steps({0: heads, 50: heads}).axes]
    [('previous', 6), ('duplicate', 6), ('induction', 6)]
    """
    names = ("previous", "duplicate", "induction")
    steps = sorted(scores)
    chosen = [i for i, head in enumerate(scores[steps[-1]].heads) if set(names) <= set(head.scores)] if steps else []
    if not chosen:
        raise ValueError(f"scores has {len(steps)} steps and no head with the scores {', '.join(names)}")
    excess = {(name, i): [scores[step].heads[i].scores[name].excess for step in steps] for name in names for i in chosen}
    best = sorted(
        chosen, key=lambda i: -max((score.mean for n in names for score in excess[n, i] if score.mean == score.mean), default=0)
    )
    looks = dict(zip(best, PALETTE, strict=False))
    figure, (axes,) = panels(1, len(names), width=3.1, height=2.4, sharey=True)
    for ax, name in zip(axes, names, strict=True):
        for i in reversed(best):
            color, marker = looks.get(i, (PALE, ""))
            low, mean, high = zip(*((score.low, score.mean, score.high) for score in excess[name, i]), strict=True)
            look = {"linestyle": "-" if len(steps) > 2 else "", "linewidth": 1.2 if i in looks else 0.6, "markersize": 3.5}
            ax.plot(steps, mean, color=color, marker=marker, **look)
            ax.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
        label(ax, name, "step", "excess over uniform attention" if ax is axes[0] else None)
    heads = {i: scores[steps[-1]].heads[i] for i in sorted(looks)}
    entries = [(f"{short_name(head.layer)}, head {head.head}", *looks[i], "-") for i, head in heads.items()]
    legend(figure, entries + [("other heads", PALE, "", "-")] * (len(looks) < len(chosen)))
    return figure


def to_bertviz(snapshot: Snapshot, row: int = 0) -> PerLayer | tuple[PerLayer | None, PerLayer | None, PerLayer | None]:
    """Return the input of BertViz's ``head_view`` and ``model_view``: one tensor (1, H, L, S) per layer, without padding.

    ::

        from bertviz import head_view, model_view

        sentence = snapshot.sentence(0)  # without padding
        head_view(to_bertviz(snapshot), sentence.tokens["input_ids"][0])

        encoder, decoder, cross = to_bertviz(snapshot)  # for an encoder–decoder
        texts = {"encoder_tokens": sentence.tokens["input_ids"][0], "decoder_tokens": sentence.tokens["decoder_input_ids"][0]}
        model_view(encoder_attention=encoder, decoder_attention=decoder, cross_attention=cross, **texts)

    CircuitsVis shows one layer (H, L, L), and no cross-attention: ``circuitsvis.attention.attention_heads(attention=
    to_bertviz(snapshot)[layer][0], tokens=sentence.tokens["input_ids"][0])``. This function needs neither package.

    Args:
        row: the row of the batch. Both viewers show one sentence.

    Returns:
        The layers in the model's order. With cross-attention, three such tuples: encoder, decoder and cross-attention. A kind
        that is not in the snapshot is None, as in BertViz.

    Raises:
        ValueError: the row does not exist.

    >>> import torch
    >>> from minitx.nn import MultiHeadAttention
    >>> from minitx.analysis import take_snapshot
    >>> snapshot = take_snapshot(MultiHeadAttention(6, 2), {"query": torch.randn(3, 5, 6)})
    >>> [tuple(layer.shape) for layer in to_bertviz(snapshot, row=2)]
    [(1, 2, 5, 5)]
    """
    maps = _of(snapshot, row).maps
    by_kind = {kind: tuple(layer.weights for layer in maps if layer.kind == kind) for kind in ("self", "causal", "cross")}
    if by_kind["cross"]:
        return by_kind["self"] or None, by_kind["causal"] or None, by_kind["cross"]
    return tuple(layer.weights for layer in maps)


def effects_figure(effects: HeadEffects) -> Figure:
    """Draw the effect of each head, with the mean and its interval in each cell. Layers run from top to bottom.

    Args:
        effects: the result of ``knock_out_heads`` or ``patch_heads``.

    >>> import torch
    >>> from minitx.analysis import HeadEffects
    >>> mean = torch.tensor([[0.5, 0.0]])
    >>> effects = HeadEffects(("blocks.0.attention.core",), mean, mean - 0.1, mean + 0.1, 7, "change of loss")
    >>> [text.get_text() for text in effects_figure(effects).axes[0].texts]
    ['0.50\\n0.40 to 0.60', '0.00\\n-0.10 to 0.10']
    """
    layers, heads = effects.mean.shape
    figure, ((ax,),) = panels(1, 1, width=max(5.0, 1.2 * heads + 2.5), height=max(2.2, 0.7 * layers + 1.2))
    ax.grid(False)
    top = max(float(effects.mean.nan_to_num().abs().max()), 1e-12)
    image = ax.imshow(effects.mean.numpy(), cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
    for layer, head in (~effects.mean.isnan()).nonzero().tolist():
        mean, low, high = (float(values[layer, head]) for values in (effects.mean, effects.low, effects.high))
        color = "#FFFFFF" if abs(mean) > 0.6 * top else INK
        ax.text(head, layer, f"{mean:.2f}\n{low:.2f} to {high:.2f}", ha="center", va="center", fontsize=8, color=color)
    ax.set_xticks(range(heads))
    ax.set_yticks(range(layers), [short_name(name) for name in effects.names])
    label(ax, f"{effects.what} ({effects.rows} rows, 95 %)", "head", "layer")
    figure.colorbar(image, ax=ax)
    return figure
