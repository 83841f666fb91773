"""Scores that show what each attention head does, with controls and 95 % intervals.

Every score is computed in each sentence and then averaged over sentences. It is compared with uniform attention over the
visible keys of the same rows. If position alone could explain it, it is also compared with the best fixed position, chosen on
the other half of the sentences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minitx.analysis.recorder import layer_numbers
from minitx.analysis.snapshot import AttentionMap, Snapshot
from minitx.canvas import GREY, INK, PALETTE, label, legend, panels, short_name
from minitx.estimates import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THRESHOLD, MARGIN, BROAD = 0.5, 0.1, 0.9
DISTANCES = range(-8, 9)
PATTERNS = ("previous", "duplicate", "induction", "offset", "global", "local")
"""The patterns, in the order that ``Head.label`` tries them: narrow patterns come first."""


@dataclass(frozen=True)
class PatternScore:
    """How much a head follows a pattern.

    Attributes:
        value, uniform: the weight of the head, and of uniform attention in the same rows, on the pattern's keys.
        excess: (value − uniform) / (1 − uniform): 0 is uniform attention, 1 is all weight on the pattern.
        position: the value that the best fixed position would give. It is chosen on the even sentences and evaluated on the odd
            sentences. For ``previous`` and ``local`` it is the head's weight at one distance, for the others the share of rows in
            which a fixed position hits the pattern.
        gain: value − position, paired by sentence.
        at: for ``offset``, the distance.
    """

    value: float
    uniform: float
    excess: Interval
    position: float
    gain: Interval
    at: str = ""


@dataclass(frozen=True)
class Head:
    """One head: its layer, the kind of attention (``self``, ``causal``, ``cross``), its scores and its normalised entropy."""

    layer: str
    kind: str
    head: int
    scores: Mapping[str, PatternScore]
    entropy: Interval

    @property
    def label(self) -> str:
        """The first of ``PATTERNS`` that the head follows. If there is none: ``broad`` for a normalised entropy above 0.9, else ``none``.

        A head follows a pattern if its excess is above ½. ``duplicate`` and ``induction`` must also gain 0.1 over position.
        Both must hold for the lower ends of the intervals, and at least five sentences must have the score.
        """
        for name, score in self.scores.items():
            if score.excess.above(THRESHOLD) and (score.gain.above(MARGIN) or name not in ("duplicate", "induction")):
                return name
        return "broad" if self.entropy.above(BROAD) else "none"

    @property
    def leading(self) -> str:
        """The score of the label. Without a label, the highest score."""
        means = {name: score.excess.mean for name, score in self.scores.items()}
        return self.label if self.label in means else max(means, key=lambda name: (not math.isnan(means[name]), means[name]))


@dataclass(frozen=True)
class LayerSummary:
    """One layer, averaged over its heads: normalised entropy, and the mean distance from query to key in tokens, of the heads
    and of uniform attention. Cross-attention has no distance."""

    name: str
    kind: str
    entropy: Interval
    distance: Interval
    uniform_distance: float


@dataclass(frozen=True)
class Heads:
    """All heads of a model and its layers, in the model's order."""

    heads: tuple[Head, ...]
    layers: tuple[LayerSummary, ...]

    def lines(self) -> list[str]:
        """Return one line per head: its label, the excess of its leading score with the interval, and the excess of every score."""
        lines = [f"{'layer':18} head label                     95 %       " + "".join(f"{name[:6]:>7}" for name in PATTERNS)]
        for head in self.heads:
            score = head.scores[head.leading]
            words = f"{head.label} {score.at}" if head.label == head.leading else head.label
            cells = "".join(f"{head.scores[name].excess.mean if name in head.scores else math.nan:7.2f}" for name in PATTERNS)
            interval = f"{score.excess.low:.2f} to {score.excess.high:.2f}"
            line = f"{short_name(head.layer):18} {head.head:4} {words:21.21} {interval:>14} {cells}"
            lines.append(line.replace("nan", "  -"))
        return lines


# --- one sentence


class Measured(NamedTuple):
    """The result for one sentence: the values of each head and of uniform attention, (H,) each, and the hit rate of each fixed position."""

    value: Tensor
    uniform: Tensor
    rules: Mapping[tuple[str, int], float] = {}


def pattern_keys(behind: Tensor, ids: Tensor | None, window: int) -> dict[str, Tensor]:
    """Return the keys (L, L) of each pattern of self-attention, by name. ``behind`` is j − i.

    >>> behind = torch.arange(5) - torch.arange(5)[:, None]
    >>> pattern_keys(behind, torch.tensor([7, 8, 9, 7, 8]), window=1)["induction"].nonzero().tolist()  # after an equal token
    [[0, 4], [3, 1], [4, 2]]
    """
    keys = {"previous": behind == -1, "local": behind.abs() <= window}
    if ids is not None:
        keys["duplicate"] = (ids == ids[:, None]) & (behind != 0)
        keys["induction"] = torch.nn.functional.pad(keys["duplicate"][:, :-1], (1, 0)) & (behind != 0)
    return keys


def measure(layer: AttentionMap, ids: Tensor | None, window: int) -> dict[str, Measured]:
    """Measure every pattern, the entropy and the distance in one sentence (B = 1, no padding)."""
    p, visible = layer.weights[0].double(), layer.visible[0]
    uniform = visible / visible.sum(-1, keepdim=True).clamp(min=1).double()
    chooses = visible.sum(-1) > 1  # (H, L)

    def mass(keys: Tensor, rules: bool = False) -> Measured:
        """The weight on ``keys``: the mean over rows that see some of them and also other keys."""
        hits = keys & visible
        rows = chooses & hits.any(-1) & (hits != visible).any(-1)
        value, chance = (((w * hits).sum(-1) * rows).sum(-1) / rows.sum(-1) for w in (p, uniform))
        return Measured(value, chance, offset_rules((hits & rows[..., None]).any(0)) if rules else {})

    nothing = torch.full((len(p),), math.nan, dtype=torch.float64)
    results = {"global": mass(_favourite_key(p, visible)), "distance": Measured(nothing, nothing)}
    results["entropy"] = Measured(layer.entropy()[0].nanmean(-1), torch.ones_like(nothing))
    if layer.queries == layer.keys:
        place = torch.arange(p.shape[-1])
        behind = place - place[:, None]  # j − i
        for name, keys in pattern_keys(behind, ids, window).items():
            results[name] = mass(keys, rules=name in ("duplicate", "induction"))
        results["offset"] = Measured(*_stacked([mass(behind == k) for k in DISTANCES]))  # (K, H)
        value, chance = (((w * behind.abs()).sum(-1) * chooses).sum(-1) / chooses.sum(-1) for w in (p, uniform))
        results["distance"] = Measured(value, chance)
    return results


def _stacked(results: Sequence[Measured]) -> tuple[Tensor, Tensor]:
    """Stack the values of several results, and the values of uniform attention."""
    return torch.stack([result.value for result in results]), torch.stack([result.uniform for result in results])


def _favourite_key(p: Tensor, visible: Tensor) -> Tensor:
    """The one key with the most weight, (H, L, S): chosen on the even rows for the odd rows, and vice versa."""
    if not p.shape[2]:  # a row of padding alone
        return torch.zeros_like(p, dtype=torch.bool)
    even = torch.arange(p.shape[1]) % 2 == 0
    best = [(p[:, half].sum(1) / visible[:, half].sum(1).clamp(min=1)).argmax(-1) for half in (even, ~even)]
    key = torch.where(even, best[1][:, None], best[0][:, None])  # (H, L)
    return torch.arange(p.shape[2]) == key[..., None]


def offset_rules(keys: Tensor) -> dict[tuple[str, int], float]:
    """Return the hit rate on ``keys`` (Q, K) of each guess from position alone: a key at a fixed offset or at a fixed place."""
    pairs = keys.nonzero().tolist()
    total = max(1, int(keys.any(-1).sum()))
    hits = Counter(rule for query, key in pairs for rule in (("offset", key - query), ("place", key)))
    return {rule: count / total for rule, count in hits.items()}


# --- all sentences


def head_scores(snapshots: Snapshot | Iterable[Snapshot], *, window: int = 4) -> Heads:
    """Score every head on the sentences of the snapshots. Each row is a sentence.

    ============= =====================================================================================================
    ``previous``  weight on the token before (Voita et al. 2019, arXiv:1905.09418)
    ``local``     weight on keys at most ``window`` tokens away
    ``global``    weight on one key that all queries share; the key is chosen on half of the queries (Clark et al. 2019, §3)
    ``duplicate`` weight on other keys with the query's token (Wang et al. 2022, arXiv:2211.00593)
    ``induction`` weight on keys after another key with the query's token (Olsson et al. 2022, arXiv:2209.11895)
    ``offset``    weight at one distance of −8 to 8, chosen on the even sentences, evaluated on the odd sentences
    ============= =====================================================================================================

    Rows that see none of a pattern's keys, or only such keys, do not count. Cross-attention has only ``global``. If tokens repeat at
    one distance only, no head is called an induction head: let the distance vary, as ``data=induction`` does.

    Args:
        snapshots: the results of ``take_snapshot``. Intervals need at least two rows, the choice of a position at least ten.
        window: the distance for ``local``, in tokens.

    Raises:
        ValueError: no snapshot.

    >>> weights = torch.eye(7).roll(-1, 1).tril().index_fill(0, torch.tensor(0), 1.0).tril()  # each looks at the token before
    >>> visible = torch.ones(7, 7).tril().bool().expand(11, 2, 7, 7)
    >>> layer = AttentionMap("core", "causal", "x", "x", weights.expand(11, 2, 7, 7), visible, torch.zeros(11, 2, 7))
    >>> scores = head_scores(Snapshot((layer,), {"x": [["a"] * 7] * 11}, {}, {"x": torch.ones(11, 7).bool()}))
    >>> scores.heads[0].label, scores.heads[0].scores["previous"].excess.mean
    ('previous', 1.0)
    """
    kinds: dict[str, str] = {}
    sentences: dict[str, list[dict[str, Measured]]] = {}
    for snapshot in [snapshots] if isinstance(snapshots, Snapshot) else snapshots:
        for sentence in map(snapshot.sentence, range(snapshot.num_rows)):
            for layer in sentence.maps:
                ids = sentence.ids[layer.keys][0] if layer.keys in sentence.ids else None
                sentences.setdefault(layer.name, []).append(measure(layer, ids, window))
                kinds[layer.name] = layer.kind
    if not sentences:
        raise ValueError("snapshots must contain at least one sentence")
    heads, layers = [], []
    for name, results in sentences.items():
        scores = pattern_scores(results)
        far, uniform = _stacked([result["distance"] for result in results])
        entropy = torch.stack([result["entropy"].value for result in results])  # (n, H)
        for head in range(entropy.shape[1]):
            ordered = {pattern: scores[pattern][head] for pattern in PATTERNS if pattern in scores}
            heads.append(Head(name, kinds[name], head, ordered, Interval.of(entropy[:, head])))
        by_depth = Interval.of(entropy.mean(1)), Interval.of(far.mean(1)), float(uniform.nanmean())
        layers.append(LayerSummary(name, kinds[name], *by_depth))
    return Heads(tuple(heads), tuple(layers))


def pattern_scores(results: Sequence[Mapping[str, Measured]]) -> dict[str, list[PatternScore]]:
    """Return the scores of each head, by pattern, from the results of ``measure`` for each sentence."""
    out: dict[str, list[PatternScore]] = {}
    for name in sorted(set(PATTERNS) & set(results[0]), key=lambda name: name != "offset"):
        value, chance = _stacked([result[name] for result in results])
        if name == "global":
            position = torch.full_like(value, math.nan)
        elif name == "offset":  # (n, K, H)
            best = excess_of(value, chance)[0::2].nanmean(0).nan_to_num(nan=-math.inf).argmax(0)  # (H,)
            at_best, chance = (values[:, best, torch.arange(len(best))] for values in (value, chance))
            scores = _by_head(at_best[1::2], chance[1::2])
            out[name] = [replace(score, at=f"{DISTANCES[k]:+}") for score, k in zip(scores, best, strict=True)]
            continue
        elif name in ("previous", "local"):
            position = at_best.clone()
        else:
            position = hits_of_best_rule([result[name].rules for result in results])[:, None].repeat(1, value.shape[1])
        position[0::2] = math.nan
        out[name] = _by_head(value, chance, position)
    return out


def excess_of(value: Tensor, uniform: Tensor) -> Tensor:
    """Return (value − uniform) / (1 − uniform), or NaN if uniform attention already has all the weight there."""
    return torch.where(uniform < 1 - 1e-9, (value - uniform) / (1 - uniform), math.nan)


def _by_head(value: Tensor, uniform: Tensor, position: Tensor | None = None) -> list[PatternScore]:
    """One score per head, from tensors (n, H). ``position`` is NaN in the sentences that chose the position."""
    position = torch.full_like(value, math.nan) if position is None else position
    out = []
    for v, u, p in zip(value.T, uniform.T, position.T, strict=True):
        means = [float(x.nanmean()) for x in (v, u, p)]
        out.append(PatternScore(means[0], means[1], Interval.of(excess_of(v, u)), means[2], Interval.of(v - p)))
    return out


def hits_of_best_rule(rules: Sequence[Mapping[tuple[str, int], float]]) -> Tensor:
    """Return the hit rate in each sentence, (n,), of the rule with the most hits in the even sentences. NaN if there is nothing to hit."""
    total: Counter[tuple[str, int]] = Counter()
    for hits in rules[0::2]:
        total.update(hits)  # type: ignore[arg-type]
    best = max(total, key=lambda rule: (total[rule], -abs(rule[1])), default=("offset", 0))
    return torch.tensor([hits.get(best, 0.0) if hits else math.nan for hits in rules], dtype=torch.float64)


# --- the figure


def heads_figure(heads: Heads) -> Figure:
    """Draw one row for each kind of attention: a map of layers × heads, then entropy and distance by depth.

    A cell shows the head's label (for ``none`` and ``broad`` also the highest score), the value of its leading score, and in
    brackets the larger control: uniform attention (u) or the best fixed position (p). Its colour is the excess: white is 0, dark
    blue is 1. In the plots by depth, a dot is the mean over a layer's heads with its interval.
    According to textbooks, low layers look near and high layers far.

    >>> from minitx.analysis import take_snapshot
    >>> from minitx.nn import MultiHeadAttention
    >>> heads = head_scores(take_snapshot(MultiHeadAttention(6, 2), {"query": torch.randn(11, 7, 6)}))
    >>> len(heads_figure(heads).axes)
    3
    """
    kinds = {head.kind: [layer for layer in heads.layers if layer.kind == head.kind] for head in heads.heads}
    most = max(head.head for head in heads.heads) + 1
    sizes: dict[str, Any] = {"width_ratios": [max(1.05 * most + 0.4, 3.2), 2.6, 2.6]}
    width = (sum(sizes["width_ratios"]) + 0.8) / 3
    figure, axes = panels(len(kinds), 3, width=width, height=max(0.62 * max(map(len, kinds.values())) + 0.9, 2.2), **sizes)
    for (cells, *depth), (kind, layers) in zip(axes, kinds.items(), strict=True):
        _cells(cells, [head for head in heads.heads if head.kind == kind], most)
        label(cells, f"{kind} attention", "head", "layer")
        numbers = layer_numbers([layer.name for layer in layers])
        _by_depth(depth[0], numbers, [layer.entropy for layer in layers], [1.0] * len(layers))
        label(depth[0], "entropy (textbook: rises)", "layer", "normalised entropy")
        if kind == "cross":
            depth[1].remove()
            continue
        _by_depth(depth[1], numbers, [layer.distance for layer in layers], [layer.uniform_distance for layer in layers])
        label(depth[1], "distance (textbook: rises)", "layer", "mean distance, tokens")
    cell = "value (control: u uniform, p position); colour: excess", "#084488", "s", ""
    legend(figure, [cell, ("mean of a layer's heads, 95 %", PALETTE[0][0], "o", ""), ("uniform attention", GREY, "", "--")])
    return figure


def _cells(ax: Axes, heads: Sequence[Head], most: int) -> None:
    names = list(dict.fromkeys(head.layer for head in heads))
    values = np.full((len(names), most), math.nan)
    for head in heads:
        x, y, score = head.head, names.index(head.layer), head.scores[head.leading]
        values[y, x] = score.excess.mean
        # for ``previous`` and ``local``, the position is a part of the value
        position = math.nan if head.leading in ("previous", "local") else score.position
        controls = {"u": score.uniform, "p": position}
        sign = max(controls, key=lambda key: (controls[key] == controls[key], controls[key]))
        words = head.label if head.label == head.leading else f"{head.label} ({head.leading})"
        text = f"{words}\n{score.at}\n{score.value:.2f} ({sign} {controls[sign]:.2f})".replace("\n\n", "\n")
        ink = "#FFFFFF" if score.excess.mean > 0.55 else INK
        ax.text(x, y, text, ha="center", va="center", fontsize=7, color=ink, parse_math=False)
    ax.imshow(values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    ax.grid(False)
    ax.set_xticks(range(most))
    ax.set_yticks(range(len(names)), layer_numbers(names))


def _by_depth(ax: Axes, numbers: Sequence[str], intervals: Sequence[Interval], uniform: Sequence[float]) -> None:
    means = [interval.mean for interval in intervals]
    reach = [[each.mean - each.low for each in intervals], [each.high - each.mean for each in intervals]]
    ax.errorbar(range(len(intervals)), means, yerr=reach, fmt="o", color=PALETTE[0][0], markersize=4, capsize=3)
    ax.plot(range(len(intervals)), uniform, "--", color=GREY, linewidth=1.2)
    ax.set_xticks(range(len(intervals)), numbers)
    ax.set_ylim(0, 1.06 * ax.get_ylim()[1])
