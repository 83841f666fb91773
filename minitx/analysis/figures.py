"""Figures of attention's statistics: entropy, logits, distances, saturation; the weights are drawn in ``heatmaps``.

Every function returns a matplotlib ``Figure`` that draws the numbers it is given, unsmoothed and unclipped. Nothing goes
through pyplot, so that no state is shared; ``save_figure`` writes it to a file. Readers who are colour-blind or have a
print can tell all apart: series differ by marker or line as well as by colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minitx.analysis.canvas import (
    GREY,
    PALETTE,
    dodge,
    label,
    legend,
    log_ticks,
    panels,
    png,
    step_axis,
    svg,
    wrapped_panels,
)
from minitx.analysis.capture import Seen
from minitx.analysis.lettering import short_name
from minitx.analysis.snapshot import AttentionMap, Snapshot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {"self": "self-attention", "causal": "causal self-attention", "cross": "cross-attention"}
LINES = ("-", "--", ":", "-.")
PROBED = {
    "saturation_99": "share of rows, max p > 0.99",
    "saturation_90": "share of rows, max p > 0.9",
    "entropy": "normalised entropy",
    "max_logit": "largest |logit|",
}

Record = Mapping[str, Any]


def entropy_over_layers(seen: Snapshot | Seen) -> Figure:
    """Normalised entropy H̄ = mean_i H_i / ln n_i of every head (a dot) and its mean over heads (the line) against the layer.

    n_i are the keys that query i sees: 1 is uniform attention, 0 is one key. Padded queries and those that see fewer than
    two keys do not count. Encoder, decoder and cross-attention are series of their own.

    Args:
        seen: a snapshot, or what ``capture(model, what="statistics")`` gave; several calls of a layer are averaged.

    Raises:
        ValueError: a layer that was not called. TypeError: neither a snapshot nor statistics.

    >>> from minitx.analysis import capture
    >>> from minitx.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(6, 2)
    >>> with capture(attention) as seen:
    ...     _ = attention(torch.randn(1, 5, 6), is_causal=True)
    >>> dots, mean = entropy_over_layers(seen).axes[0].lines
    >>> dots.get_ydata().tolist() == seen["core"][0]["entropy"].tolist()
    True
    """
    found: dict[str, list[Tensor]] = {}
    for kind, entropy in _entropies(seen):
        found.setdefault(kind, []).append(entropy)
    figure, axes = panels(1, 1, width=max(4.2, 1.2 + 0.35 * max(map(len, found.values()))), height=2.8)
    ax, entries = axes[0, 0], []
    for i, (kind, layers) in enumerate(found.items()):
        color, marker = PALETTE[i]
        x = torch.arange(len(layers)) + dodge(len(found), i, 0.12)
        heads = torch.tensor([len(entropy) for entropy in layers])
        dots = {"markersize": 5, "alpha": 0.55, "markeredgewidth": 0}
        ax.plot(x.repeat_interleave(heads).tolist(), torch.cat(layers).tolist(), marker, color=color, **dots)
        ax.plot(x.tolist(), [float(entropy.mean()) for entropy in layers], LINES[i], color=color, linewidth=1.6)
        entries.append((KINDS[kind], color, marker, LINES[i]))
    ax.set_xticks(range(max(map(len, found.values()))))
    ax.set_ylim(-0.03, 1.03)
    label(ax, "a dot a head, a line their mean", "layer", "normalised entropy")
    legend(figure, entries)
    return figure


def _entropies(seen: Snapshot | Seen) -> Iterator[tuple[str, Tensor]]:
    """Kind and normalised entropy (H,) of every layer."""
    if isinstance(seen, Snapshot):
        for layer in seen.maps:
            counts = (layer.visible.sum(-1) > 1) & seen.real[layer.queries][:, None]  # (B, H, L)
            total = layer.entropy().masked_fill(~counts, 0.0).sum(dim=(0, 2))
            yield layer.kind, total / counts.sum(dim=(0, 2)).clamp(min=1)
        return
    for name, calls in _calls(seen, "entropy_over_layers", "statistics", dict):
        yield seen.kinds[name], torch.stack([call["entropy"] for call in calls]).mean(0)


def _calls(seen: Any, function: str, what: str, kind: type) -> Iterator[tuple[str, list[Any]]]:
    """Names and records of a capture that recorded ``what``."""
    if not isinstance(seen, Seen):
        raise TypeError(f"{function} takes what capture(model, what={what!r}) gave, got {type(seen).__name__}")
    for name, calls in seen.items():
        if not calls:
            raise ValueError(f"{name} was not called while it was looked at")
        if not isinstance(calls[0], kind):
            raise TypeError(f"{function} needs capture(model, what={what!r}); {name} holds a {type(calls[0]).__name__}")
        yield name, calls


def logit_histograms(scores: Seen | Mapping[str, Seen], *, query_mask: Tensor | None = None, bins: int = 60) -> Figure:
    """How the scores that softmax gets are spread: a panel a layer, an outline a series, the area under each is 1.

    Only visible pairs count; the std of each series stands in its panel.

    Args:
        scores: what ``capture(model, what="scores")`` gave; or several by their label, such as
            ``{"scaled": seen, "unscaled": other}``, of models with the same layers.
        query_mask: bool (B, L), False leaves a padded query out; default all queries count.
        bins: of equal width, from the smallest to the largest score of a series in a layer.

    Raises:
        ValueError: series with different layers; a layer without a call or a visible score; scores that are not finite.
        TypeError: no scores.

    >>> from minitx.analysis import capture
    >>> from minitx.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(6, 2)
    >>> with capture(attention, what="scores") as seen:
    ...     _ = attention(torch.randn(1, 5, 6), is_causal=True)
    >>> panel = logit_histograms({"scaled": seen}, bins=7).axes[0]
    >>> panel.get_title(), len(panel.patches[0].get_data().values)
    ('core', 7)
    """
    import numpy as np

    series = {"": scores} if isinstance(scores, Seen) else dict(scores)
    found = {name: dict(_visible_scores(name, seen, query_mask)) for name, seen in series.items()}
    layers = [list(values) for values in found.values()]
    if not layers or any(names != layers[0] for names in layers):
        raise ValueError(f"scores must be series of the same layers, got {dict(zip(found, layers, strict=True))}")
    figure, axes = wrapped_panels(len(layers[0]), "density", width=2.7, height=2.2)
    for ax, layer in zip(axes, layers[0], strict=True):
        for i, values in enumerate(found.values()):
            color, line = PALETTE[i % len(PALETTE)][0], LINES[i % len(LINES)]
            density, edges = np.histogram(values[layer].numpy(), bins, density=True)
            ax.stairs(density, edges, color=color, linestyle=line, linewidth=1.4)
            spread = f"std {float(values[layer].std(correction=0)):.3g}"
            ax.text(0.98, 0.96 - 0.1 * i, spread, color=color, fontsize=8, ha="right", va="top", transform=ax.transAxes)
        label(ax, short_name(layer), "score")
    if len(found) > 1 or "" not in found:
        legend(figure, [(name, PALETTE[i % len(PALETTE)][0], "", LINES[i % len(LINES)]) for i, name in enumerate(found)])
    return figure


def _visible_scores(series: str, seen: Seen, query_mask: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """All scores of each layer that a query could see, in float64."""
    for name, calls in _calls(seen, "logit_histograms", "scores", Tensor):
        parts = []
        for call in calls:
            counts = call != -torch.inf
            if query_mask is not None:
                if query_mask.shape != (len(call), call.shape[2]):
                    raise ValueError(
                        f"query_mask is {tuple(query_mask.shape)}, {name} has (B, L) = {(len(call), call.shape[2])}"
                    )
                counts = counts & query_mask[:, None, :, None].to(call.device)
            parts.append(call[counts].double().cpu())
        values = torch.cat(parts)
        if not len(values) or not values.isfinite().all():
            wrong = "no visible score" if not len(values) else "scores that are not finite"
            raise ValueError(f"{name} has {wrong}" + (f" in {series!r}" if series else ""))
        yield name, values


def distance_profile(snapshot: Snapshot) -> Figure:
    """Mean weight against how far back the key is, a line a head, a panel a layer of self-attention.

    Query i stands at position i + S - L, so that distance 0 is the query's own position, 1 the previous one, and negative
    distances are keys to its right. The dashed line is what uniform attention over the visible keys, 1 / n_i, would give.
    All rows of the batch count, without their padding; more than nine heads are drawn alike, with their mean above.

    Raises:
        ValueError: no layer of self-attention.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> from minitx.analysis import take_snapshot
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> snapshot = take_snapshot(model, {"input_ids": torch.tensor([[1, 2]])})
    >>> *heads, uniform = distance_profile(snapshot).axes[0].lines
    >>> uniform.get_xydata().tolist()  # the first token sees itself alone, the second sees two
    [[0.0, 0.75], [1.0, 0.5]]
    """
    from matplotlib.ticker import MaxNLocator

    layers = [layer for layer in snapshot.maps if layer.kind != "cross"]
    if not layers:
        raise ValueError("snapshot has cross-attention alone, in which there is no distance from query to key")
    figure, axes = wrapped_panels(len(layers), "mean weight", width=2.7, height=2.3)
    few = max(layer.weights.shape[1] for layer in layers) <= len(PALETTE)
    for ax, layer in zip(axes, layers, strict=True):
        distances, means, uniform = _by_distance(layer, snapshot.real)
        step = max(1, len(distances) // 8)
        for head, values in enumerate(means.tolist()):
            color, marker = PALETTE[head] if few else (PALETTE[5][0], "")
            ax.plot(distances, values, marker=marker, color=color, markersize=4, linewidth=1.1, markevery=(head % step, step))
        if not few:
            ax.plot(distances, means.mean(0).tolist(), color=PALETTE[0][0], linewidth=1.8)
        ax.plot(distances, uniform.tolist(), "--", color="#000000", linewidth=1.2)
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, float(uniform.min()) / 1000), high)  # a thousandth of uniform is nothing
        log_ticks(ax)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        label(ax, short_name(layer.name), "positions back")
    heads = [(f"head {i}", *PALETTE[i], "-") for i in range(means.shape[0])] if few else []
    heads += [] if few else [("a head", PALETTE[5][0], "", "-"), ("mean of the heads", PALETTE[0][0], "", "-")]
    legend(figure, [*heads, ("uniform over visible keys", "#000000", "", "--")])
    return figure


def _by_distance(layer: AttentionMap, real: Mapping[str, Tensor]) -> tuple[list[int], Tensor, Tensor]:
    """Distances that occur (n), mean weights (H, n) and mean 1 / n_i (n) at each, in float64."""
    H, L, S = layer.weights.shape[1:]
    seen = layer.visible & real[layer.queries][:, None, :, None]
    place = (torch.arange(L)[:, None] + S - L - torch.arange(S) + S - 1).flatten()  # 0 is S - 1 to the right

    def total(values: Tensor) -> Tensor:  # (B, H, L, S) to (H, distances)
        summed = values.double().masked_fill(~seen, 0.0).sum(0).flatten(1)
        return torch.zeros(H, 2 * S - 1, dtype=torch.float64).index_add_(1, place, summed)

    count = total(seen)
    share = total((1.0 / layer.visible.sum(-1, keepdim=True).double()).expand_as(layer.weights))
    occurs = count.sum(0) > 0
    uniform = share.sum(0)[occurs] / count.sum(0)[occurs]
    return (occurs.nonzero().flatten() - (S - 1)).tolist(), total(layer.weights)[:, occurs] / count[:, occurs], uniform


def saturation_over_steps(probes: Mapping[str, Sequence[Record]] | Sequence[Record]) -> Figure:
    """Saturation, normalised entropy and the largest logit against the training step: a colour a run, a line a layer.

    Deeper layers are darker. Steps are on a logarithmic axis that starts at 0.

    Args:
        probes: what ``minitx.training.probes.read_probes`` gave, or several runs by their label. A record is
            ``{"step": int, "layers": [{"entropy": …, "max_logit": …, "saturation_90": …, "saturation_99": …}]}`` with one
            number a layer, or one a head, which are averaged.

    Raises:
        ValueError: no run, a run without records, or a record without one of these statistics.

    >>> layer = {"saturation_99": 0.0, "saturation_90": 0.1, "entropy": [0.8, 0.6], "max_logit": 2.5}
    >>> figure = saturation_over_steps({"scaled": [{"step": 0, "layers": [layer]}, {"step": 1, "layers": [layer]}]})
    >>> [ax.lines[0].get_ydata().tolist() for ax in figure.axes]
    [[0.0, 0.0], [0.1, 0.1], [0.7, 0.7], [2.5, 2.5]]
    """
    runs = dict(probes) if isinstance(probes, Mapping) else {"": probes}
    if not runs:
        raise ValueError("probes holds no run")
    for name, records in runs.items():
        _check_records(name, records)
    figure, axes = panels(1, len(PROBED), width=2.6, height=2.3)
    for ax, (statistic, words) in zip(axes.flat, PROBED.items(), strict=True):
        for i, records in enumerate(runs.values()):
            _draw_run(ax, sorted(records, key=lambda record: record["step"]), statistic, *PALETTE[i % len(PALETTE)])
        step_axis(ax, max(record["step"] for records in runs.values() for record in records))
        if statistic == "max_logit":
            log_ticks(ax)
        else:
            ax.set_ylim(-0.03, 1.03)
        label(ax, words, "step")
    deeper = [("deeper layers darker", GREY, "", "-")] if any(len(r["layers"]) > 1 for rs in runs.values() for r in rs) else []
    legend(figure, [(name, *PALETTE[i % len(PALETTE)], "-") for i, name in enumerate(runs) if name] + deeper)
    return figure


def _check_records(run: str, records: Sequence[Record]) -> None:
    where = f"probes of {run!r}" if run else "probes"
    if not records:
        raise ValueError(f"{where} holds no record; train with callbacks.probe.every=N")
    for record in records:
        missing = sorted({name for layer in record["layers"] for name in PROBED if name not in layer})
        if missing:
            raise ValueError(f"{where} has no {', '.join(missing)} at step {record['step']}")


def _draw_run(ax: Axes, records: Sequence[Record], statistic: str, color: str, marker: str) -> None:
    steps, layers = [record["step"] for record in records], len(records[0]["layers"])
    for i in range(layers):
        values = [_mean(record["layers"][i][statistic]) for record in records]
        alpha = 0.35 + 0.65 * (i + 1) / layers
        ax.plot(steps, values, "-", marker=marker, color=color, markersize=3, linewidth=1.0, alpha=alpha)


def _mean(value: float | Sequence[float]) -> float:
    return sum(value) / len(value) if isinstance(value, Sequence) else value


def save_figure(figure: Figure, path: Path | str) -> Path:
    """Write ``figure`` as PNG or SVG, whichever ``path`` ends in; equal figures give equal bytes. Returns the path.

    Nothing in the file tells the date; in an SVG, texts are curves, so that it needs no font where it is shown.

    Raises:
        ValueError: another ending; a folder that does not exist.

    >>> from matplotlib.figure import Figure
    >>> save_figure(Figure(), "attention.gif")
    Traceback (most recent call last):
    ValueError: path=attention.gif must end in .png or .svg
    """
    path = Path(path)
    writers = {".png": png, ".svg": svg}
    if path.suffix.lower() not in writers:
        raise ValueError(f"path={path} must end in .png or .svg")
    if not path.parent.is_dir():
        raise ValueError(f"path={path} is in a folder that does not exist")
    path.write_bytes(writers[path.suffix.lower()](figure))
    return path
