"""Scores that show what each attention head does, with controls and 95 % intervals. Some use sentences with a known structure.

Every score is computed in each sentence and then averaged over sentences. It is compared with uniform attention over the
visible keys of the same rows. If position alone could explain it, it is also compared with the best fixed position, chosen on
the other half of the sentences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minitx.analysis.capture import layer_numbers
from minitx.analysis.snapshot import SOURCE, AttentionMap, Snapshot
from minitx.canvas import GREY, INK, PALETTE, label, legend, panels, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THRESHOLD, MARGIN, BROAD = 0.5, 0.1, 0.9
MIN_SENTENCES = 5
OFFSETS = range(-8, 9)
PATTERNS = ("previous", "duplicate", "induction", "syntactic", "offset", "global", "local")
"""The patterns, in the order that ``Head.label`` tries them: narrow patterns come first."""


@dataclass(frozen=True)
class Interval:
    """A mean over n sentences with Student's 95 % interval. Unknown numbers are NaN."""

    mean: float
    low: float
    high: float
    n: int

    def above(self, value: float) -> bool:
        """Return whether the lower end is above ``value``. False for fewer than ``MIN_SENTENCES`` sentences."""
        return self.n >= MIN_SENTENCES and self.low > value


def mean_interval(values: Tensor) -> Interval:
    """Return x̄ ± t_{n−1} · s/√n of ``values`` (n,). NaN is left out. A single value has no interval.

    >>> mean_interval(torch.tensor([1.0, 2.0, 3.0, torch.nan]))
    Interval(mean=2.0, low=-0.4841..., high=4.4841..., n=3)
    """
    from scipy import stats

    known = values[~values.isnan()].double()
    n, mean = len(known), float(known.mean())
    reach = float(stats.t.ppf(0.975, n - 1) * known.std() / math.sqrt(n)) if n > 1 else math.nan
    return Interval(mean, mean - reach, mean + reach, n)


UNKNOWN = Interval(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True)
class Score:
    """How much a head follows a pattern.

    Attributes:
        value, uniform: the weight of the head, and of uniform attention in the same rows, on the pattern's keys. For
            ``syntactic``, the share of words with an arc to their favourite word.
        excess: (value − uniform) / (1 − uniform): 0 is uniform attention, 1 is all weight on the pattern.
        position: the value that the best fixed position would give. It is chosen on the even sentences and evaluated on the odd
            sentences. For ``previous`` and ``local`` it is the head's weight at one distance, for the others the share of rows in
            which a fixed position hits the pattern.
        gain: value − position, paired by sentence.
        shuffled, lost: for ``syntactic``, the value with shuffled words, and value − shuffled, paired by sentence.
        at: for ``offset`` the distance, for ``syntactic`` the relation and direction.
    """

    value: float
    uniform: float
    excess: Interval
    position: float = math.nan
    gain: Interval = UNKNOWN
    shuffled: float = math.nan
    lost: Interval = UNKNOWN
    at: str = ""


@dataclass(frozen=True)
class Head:
    """One head: its layer, the kind of attention (``self``, ``causal``, ``cross``), its scores and its normalised entropy."""

    layer: str
    kind: str
    head: int
    scores: Mapping[str, Score]
    entropy: Interval

    @property
    def label(self) -> str:
        """The first of ``PATTERNS`` that the head follows. If there is none: ``broad`` for a normalised entropy above 0.9, else ``none``.

        A head follows a pattern if its excess is above ½. ``duplicate`` and ``induction`` must also gain 0.1 over position.
        ``syntactic`` does not need ½, but must gain 0.1 over position and lose 0.1 when the words are shuffled. All of this
        must hold for the lower ends of the intervals, and at least five sentences must have the score.
        """
        for name, score in self.scores.items():
            gains = score.gain.above(MARGIN)
            if name == "syntactic":
                if gains and score.lost.above(MARGIN):
                    return name
            elif score.excess.above(THRESHOLD) and (gains or name not in ("duplicate", "induction")):
                return name
        return "broad" if self.entropy.above(BROAD) else "none"

    @property
    def leading(self) -> str:
        """The score of the label. Without a label, the highest score."""
        means = {name: score.excess.mean for name, score in self.scores.items()}
        return self.label if self.label in means else max(means, key=lambda name: (not math.isnan(means[name]), means[name]))


@dataclass(frozen=True)
class Layer:
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
    layers: tuple[Layer, ...]

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
        results["offset"] = Measured(*_stacked([mass(behind == k) for k in OFFSETS]))  # (K, H)
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
    pairs, total = keys.nonzero().tolist(), max(1, int(keys.any(-1).sum()))
    hits = Counter(rule for query, key in pairs for rule in (("offset", key - query), ("place", key)))
    return {rule: count / total for rule, count in hits.items()}


# --- all sentences


def head_scores(
    snapshots: Snapshot | Iterable[Snapshot], *, window: int = 4, syntax: Mapping[tuple[str, int], Score] | None = None
) -> Heads:
    """Score every head on the sentences of the snapshots. Each row is a sentence.

    ============= =====================================================================================================
    ``previous``  weight on the token before (Voita et al. 2019, arXiv:1905.09418)
    ``local``     weight on keys at most ``window`` tokens away
    ``global``    weight on one key that all queries share; the key is chosen on half of the queries (Clark et al. 2019, §3)
    ``duplicate`` weight on other keys with the query's token (Wang et al. 2022, arXiv:2211.00593)
    ``induction`` weight on keys after another key with the query's token (Olsson et al. 2022, arXiv:2209.11895)
    ``offset``    weight at one distance of −8 to 8, chosen on the even sentences, evaluated on the odd sentences
    ``syntactic`` see ``syntax_scores``
    ============= =====================================================================================================

    Rows that see none of a pattern's keys, or only such keys, do not count. Cross-attention has only ``global``. If tokens repeat at
    one distance only, no head is called an induction head: let the distance vary, as ``data=induction`` does.

    Args:
        snapshots: the results of ``take_snapshot``. Intervals need at least two rows, the choice of a position at least ten.
        window: the distance for ``local``, in tokens. syntax: the result of ``syntax_scores``.

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
            by_pattern = {pattern: per_head[head] for pattern, per_head in scores.items()}
            by_pattern |= {"syntactic": syntax[name, head]} if syntax and (name, head) in syntax else {}
            ordered = {pattern: by_pattern[pattern] for pattern in PATTERNS if pattern in by_pattern}
            heads.append(Head(name, kinds[name], head, ordered, mean_interval(entropy[:, head])))
        by_depth = mean_interval(entropy.mean(1)), mean_interval(far.mean(1)), float(uniform.nanmean())
        layers.append(Layer(name, kinds[name], *by_depth))
    return Heads(tuple(heads), tuple(layers))


def pattern_scores(results: Sequence[Mapping[str, Measured]]) -> dict[str, list[Score]]:
    """Return the scores of each head, by pattern, from the results of ``measure`` for each sentence."""
    out: dict[str, list[Score]] = {}
    for name in sorted(set(PATTERNS) & set(results[0]), key=lambda name: name != "offset"):
        value, chance = _stacked([result[name] for result in results])
        if name == "global":
            position = torch.full_like(value, math.nan)
        elif name == "offset":  # (n, K, H)
            best = excess_of(value, chance)[0::2].nanmean(0).nan_to_num(nan=-math.inf).argmax(0)  # (H,)
            at_best, chance = (values[:, best, torch.arange(len(best))] for values in (value, chance))
            scores = _scores(at_best[1::2], chance[1::2])
            out[name] = [replace(score, at=f"{OFFSETS[k]:+}") for score, k in zip(scores, best, strict=True)]
            continue
        elif name in ("previous", "local"):
            position = at_best.clone()
        else:
            position = hits_of_best_rule([result[name].rules for result in results])[:, None].repeat(1, value.shape[1])
        position[0::2] = math.nan
        out[name] = _scores(value, chance, position)
    return out


def excess_of(value: Tensor, uniform: Tensor) -> Tensor:
    """Return (value − uniform) / (1 − uniform), or NaN if uniform attention already has all the weight there."""
    return torch.where(uniform < 1 - 1e-9, (value - uniform) / (1 - uniform), math.nan)


def _scores(value: Tensor, uniform: Tensor, position: Tensor | None = None, shuffled: Tensor | None = None) -> list[Score]:
    """One score per head, from tensors (n, H). ``position`` is NaN in the sentences on which the position was chosen."""
    nothing = torch.full_like(value, math.nan)
    columns = [(nothing if values is None else values).T for values in (value, uniform, position, shuffled)]
    out = []
    for v, u, p, s in zip(*columns, strict=True):
        means = [float(x.nanmean()) for x in (v, u, p, s)]
        excess, gain, lost = mean_interval(excess_of(v, u)), mean_interval(v - p), mean_interval(v - s)
        out.append(Score(means[0], means[1], excess, means[2], gain, means[3], lost))
    return out


def hits_of_best_rule(rules: Sequence[Mapping[tuple[str, int], float]]) -> Tensor:
    """Return the hit rate in each sentence, (n,), of the rule with the most hits in the even sentences. NaN if there is nothing to hit."""
    total: Counter[tuple[str, int]] = Counter()
    for hits in rules[0::2]:
        total.update(hits)  # type: ignore[arg-type]
    best = max(total, key=lambda rule: (total[rule], -abs(rule[1])), default=("offset", 0))
    return torch.tensor([hits.get(best, 0.0) if hits else math.nan for hits in rules], dtype=torch.float64)


# --- sentences with a known structure


@dataclass(frozen=True)
class Sentence:
    """A sentence whose structure is known.

    Attributes:
        words: the texts. arcs: (word, word, relation); in a treebank, from each word to its head.
        spaced: whether there is a space before each word. Default: no spaces.

    >>> sentence = Sentence(("The", "cat", "slept"), ((0, 1, "det"), (1, 2, "nsubj")), (False, True, True))
    >>> sentence.shuffled(np.random.default_rng(0)).words
    ('slept', 'The', 'cat')
    """

    words: tuple[str, ...]
    arcs: tuple[tuple[int, int, str], ...] = ()
    spaced: tuple[bool, ...] = ()

    def shuffled(self, random: np.random.Generator) -> Sentence:
        """Return the words in random order, with arcs between the same words."""
        order = random.permutation(len(self.words))  # the old place of each new word
        place = np.argsort(order)
        words = tuple(self.words[i] for i in order)
        return replace(self, words=words, arcs=tuple((int(place[i]), int(place[j]), name) for i, j, name in self.arcs))

    def encode(
        self, encode: Callable[[str], Sequence[int]], before: Sequence[int] = ()
    ) -> tuple[Tensor, list[tuple[int, int]]]:
        """Return ids (1, L), and the tokens [start, stop) of each word. Each word is encoded separately, with the space before it.

        Args:
            before: ids to put before the sentence, such as a class token.

        >>> Sentence(("ab", "c"), spaced=(False, True)).encode(lambda text: [ord(character) for character in text])
        (tensor([[97, 98, 32, 99]]), [(0, 2), (2, 4)])
        """
        ids, spans = list(before), []
        for i, word in enumerate(self.words):
            pieces = encode(" " * (bool(self.spaced) and self.spaced[i]) + word)
            spans.append((len(ids), len(ids) + len(pieces)))
            ids += pieces
        return torch.tensor([ids]), spans


def read_conllu(path: str | Path) -> list[Sentence]:
    """Read the sentences of a CoNLL-U file, with an arc from each word to its head. It needs the package ``conllu``.

    A multiword token is one word with the arcs of its parts. Empty nodes and the arc of the root are left out.
    ``SpaceAfter=No`` is respected. Source: https://universaldependencies.org/format.html.

    Raises:
        ValueError: the file is not CoNLL-U. ModuleNotFoundError: ``conllu`` is missing (``pip install "minitx[syntax]"``).

    >>> import tempfile
    >>> lines = ["1 The the DET _ _ 2 det _ _", "2 cat cat NOUN _ _ 3 nsubj _ _", "3 slept sleep VERB _ _ 0 root _ _", "", ""]
    >>> file = Path(tempfile.mkdtemp()) / "one.conllu"
    >>> _ = file.write_text("\\n".join(lines).replace(" ", "\\t"))
    >>> read_conllu(file)[0].arcs
    ((0, 1, 'det'), (1, 2, 'nsubj'))
    """
    import conllu

    try:
        parsed = conllu.parse(Path(path).read_text(encoding="utf-8-sig"))
        sentences = [_sentence(tokens) for tokens in parsed if len(tokens)]
    except (OSError, UnicodeDecodeError, conllu.exceptions.ParseException, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a CoNLL-U file: {' '.join(str(error).split())[:150]}") from None
    if not sentences:
        raise ValueError(f"{path} contains no sentence")
    return sentences


def _sentence(tokens: Sequence[Mapping[str, Any]]) -> Sentence:
    words: list[str] = []
    spaced: list[bool] = []
    word_of, space = {0: -1}, False
    for token in tokens:
        number = token["id"]
        if number in word_of or (not isinstance(number, int) and number[1] == "."):
            continue  # a part of a multiword token, or an empty node
        parts = [number] if isinstance(number, int) else range(number[0], number[2] + 1)
        word_of |= dict.fromkeys(parts, len(words))
        words.append(token["form"])
        spaced.append(space)
        space = (token["misc"] or {}).get("SpaceAfter") != "No"
    heads = [(token["id"], token["head"], token["deprel"]) for token in tokens if isinstance(token["id"], int)]
    pairs = [(word_of[number], word_of[head], relation) for number, head, relation in heads]
    return Sentence(tuple(words), tuple(pair for pair in pairs if pair[1] not in (-1, pair[0])), tuple(spaced))


def agreement(layer: AttentionMap, spans: Sequence[tuple[int, int]], sentence: Sentence) -> dict[str, Measured]:
    """Return the share of words with an arc to their favourite word, by relation and direction (``nsubj →``).

    Source: Clark et al. 2019, §4. Weights between words are summed over the tokens of the key word and averaged over the tokens
    of the query word. A word is never its own favourite. Words with equal weights share the count. A word counts only if it has
    arcs to some, but not all, of the words that it sees.
    """
    place, (start, stop) = torch.arange(layer.weights.shape[-1]), torch.tensor(spans).T[..., None]
    inside = ((place >= start) & (place < stop)).double()  # (W, L)
    visible = (inside @ layer.visible[0].all(0).double() @ inside.T > 0).fill_diagonal_(False)
    weights = (inside / inside.sum(-1, keepdim=True).clamp(min=1)) @ layer.weights[0].double() @ inside.T
    weights = weights.masked_fill(~visible, -1.0)
    best = (weights >= weights.amax(-1, keepdim=True) * (1 - 1e-6)) & visible  # (H, W, W)
    favourite = best / best.sum(-1, keepdim=True).clamp(min=1).double()
    results = {}
    for relation in dict.fromkeys(name for *_, name in sentence.arcs):
        pairs = torch.zeros_like(visible)
        pairs[tuple(torch.tensor([(i, j) for i, j, name in sentence.arcs if name == relation]).T)] = True
        for candidate, keys in ((f"{relation} →", pairs & visible), (f"{relation} ←", pairs.T & visible)):
            rows = keys.any(-1) & (keys != visible).any(-1)
            if rows.any():
                keys = keys & rows[:, None]
                chance = (keys.sum(-1) / visible.sum(-1).clamp(min=1))[rows].mean().double()
                shares = (favourite * keys).sum(dim=(1, 2)) / rows.sum()
                results[candidate] = Measured(shares, chance.expand(len(shares)), offset_rules(keys))
    return results


def syntax_scores(
    attend: Callable[[Tensor], Snapshot],
    sentences: Iterable[Sentence],
    encode: Callable[[str], Sequence[int]],
    *,
    before: Sequence[int] = (),
    seed: int = 0,
) -> dict[tuple[str, int], Score]:
    """Score how far each self-attention head follows the arcs of the sentences, compared with controls. Keys: (layer, head).

    The model reads each sentence twice, the second time with its words shuffled. For each head, the relation and direction with
    the largest gain over position is chosen on the even sentences. Value, controls and intervals come from the odd sentences.

    Args:
        attend: a function from ids (1, L) to a ``Snapshot``, such as ``lambda ids: take_snapshot(model, {"input_ids": ids})``.
        sentences: sentences with arcs. A relation needs five sentences in each half.
        encode, before: see ``Sentence.encode``. seed: the seed of the shuffling.

    >>> from minitx.analysis import take_snapshot
    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=128, embed_dim=12, num_heads=3, num_layers=1))
    >>> sentences = [Sentence(("a", "b", "cd", "e"), ((2, 0, "of"), (3, 1, "of")))] * 20
    >>> scores = syntax_scores(lambda ids: take_snapshot(model, {"input_ids": ids}), sentences, lambda text: list(text.encode()))
    >>> scores["blocks.0.attention.core", 0].at, scores["blocks.0.attention.core", 0].position
    ('of →', 1.0)
    """
    random, read = np.random.default_rng(seed), []
    for sentence in sentences:
        for variant in (sentence, sentence.shuffled(random)):
            ids, spans = variant.encode(encode, before)
            layers = [layer for layer in attend(ids).maps if (layer.queries, layer.keys) == (SOURCE, SOURCE)]
            read.append({layer.name: agreement(layer, spans, variant) for layer in layers})
    plain, control = read[0::2], read[1::2]
    scores: dict[tuple[str, int], Score] = {}
    for name in plain[0] if plain else ():
        results, controls = [layers[name] for layers in plain], [layers[name] for layers in control]
        halves = [Counter(c for result in results[half::2] for c in result) for half in (0, 1)]
        judged = {c: _judged(c, results, controls) for c in halves[0] if min(half[c] for half in halves) >= MIN_SENTENCES}
        for h in range(len(next(iter(judged.values()))[1]) if judged else 0):
            best = max(judged, key=lambda c: float(judged[c][0][h]))
            scores[name, h] = replace(judged[best][1][h], at=best)
    return scores


def _judged(candidate: str, plain: Sequence[Mapping[str, Measured]], control: Sequence[Any]) -> tuple[Tensor, list[Score]]:
    """The mean gain over position on the even sentences, (H,), and each head's score on the odd sentences."""
    heads = next(result[candidate].value for result in plain if candidate in result)
    nothing = Measured(torch.full_like(heads, math.nan), torch.full_like(heads, math.nan))
    results, controls = ([result.get(candidate, nothing) for result in half] for half in (plain, control))
    (value, uniform), (shuffled, _) = _stacked(results), _stacked(controls)
    position = hits_of_best_rule([result.rules for result in results])[:, None].expand_as(value)
    return (value - position)[0::2].nanmean(0), _scores(value[1::2], uniform[1::2], position[1::2], shuffled[1::2])


# --- the figure


def heads_figure(heads: Heads) -> Figure:
    """Draw one row for each kind of attention: a map of layers × heads, then entropy and distance by depth.

    A cell shows the head's label (for ``none`` and ``broad`` also the highest score), the value of its leading score, and in
    brackets the largest control: uniform attention (u), the best fixed position (p) or shuffled words (s). Its colour is the
    excess: white is 0, dark blue is 1. In the plots by depth, a dot is the mean over a layer's heads with its interval.
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
    cell = "value (control: u uniform, p position, s shuffled); colour: excess", "#084488", "s", ""
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
        controls = {"u": score.uniform, "p": position, "s": score.shuffled}
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
    reach = [
        [interval.mean - interval.low for interval in intervals],
        [interval.high - interval.mean for interval in intervals],
    ]
    ax.errorbar(range(len(intervals)), means, yerr=reach, fmt="o", color=PALETTE[0][0], markersize=4, capsize=3)
    ax.plot(range(len(intervals)), uniform, "--", color=GREY, linewidth=1.2)
    ax.set_xticks(range(len(intervals)), numbers)
    ax.set_ylim(0, 1.06 * ax.get_ylim()[1])
