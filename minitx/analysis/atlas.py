"""The head atlas: what each attention head does, in scores with intervals, and the class that they add up to.

Every score is compared with what uniform attention over the visible keys would score in the same rows, so that neither
short rows nor a mask make a head look local or global.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minitx.analysis.agreement import MARGIN, MIN_SENTENCES, Agreement, Candidate, Rule, agreement_of, judge
from minitx.analysis.intervals import Interval, mean_interval
from minitx.analysis.patterns import BEST, SEARCHED, Ids, sentence_scores
from minitx.analysis.snapshot import AttentionMap, Snapshot, take_snapshot
from minitx.analysis.structure import Structure, shuffle_words

THRESHOLD = 0.5
"""A head has a class if the lower end of its score is above this: it does more than half of what it could."""
NEAR = 0.8
"""The same for nearness: a mean distance below a fifth of uniform attention's."""
HINT = 0.2
"""A head without a class is ``mixed`` if some score is above this, else ``none``."""

NARROW = ("previous", "next", "duplicate", "induction", "offset", "shifted")
NUM_OTHERS = 4
"""Scores that compare tokens look at so many other sentences, see ``patterns.sentence_scores``."""
CLASSES = (*NARROW, "syntactic", "global", "local", "mixed", "none")


@dataclass(frozen=True)
class Score:
    """Excess over uniform attention with its interval over sentences, and the means behind it.

    Attributes:
        excess: 0 is uniform attention, 1 nothing else than this; may be negative. See ``patterns.sentence_scores``.
        value, uniform: of the quantity itself, for the head and for uniform attention: a share of the weight, a distance
            in tokens (``nearness``) or an entropy (``focus``).
        at: for ``offset`` and ``shifted``, the distance in tokens: chosen on the even sentences, judged on the odd ones.
    """

    excess: Interval
    value: float
    uniform: float
    at: int | None = None


@dataclass(frozen=True)
class HeadScores:
    """One head: where it is, its scores by name, and its agreement with the relations of a structure, the chosen one first."""

    layer: str
    kind: str
    head: int
    scores: Mapping[str, Score]
    relations: tuple[Agreement, ...] = ()

    @property
    def agreement(self) -> Agreement | None:
        """With the relation and direction that the head was judged by."""
        return self.relations[0] if self.relations else None

    @property
    def label(self) -> str:
        """See ``classify``."""
        return classify(self)

    @property
    def leading(self) -> str:
        """The score that stands for the class; without one, that (``focus`` apart) with the highest lower end."""
        label = self.label
        own = {"global": ("first", "column"), "local": ("diagonal", "nearness")}
        names = (label,) if label in BEST else own.get(label, tuple(name for name in BEST if name != "focus"))
        return max(names, key=self._low)

    def _low(self, name: str) -> float:
        """The lower end of a score; nothing is claimed of fewer than ``MIN_SENTENCES``."""
        excess = self.scores[name].excess
        return -math.inf if math.isnan(excess.low) or excess.sentences < MIN_SENTENCES else excess.low


def classify(head: HeadScores) -> str:
    """The class of a head: the first of these that holds, judged by the lower ends (low) of the 95 % intervals.

    A score that fewer than five sentences have (``MIN_SENTENCES``) does not count.

    ============= ==========================================================================================
    ``previous``  low(previous) > ½; then ``next``, ``duplicate``, ``induction``, ``offset`` and ``shifted`` likewise
    ``syntactic`` agreement above the positional baseline, and gone with shuffled words; see ``Agreement``
    ``global``    low(first) > ½ or low(column) > ½
    ``local``     low(diagonal) > ½ or low(nearness) > 0.8
    ``mixed``     low > 0.2 in any of these
    ``none``      nothing of all this
    ============= ==========================================================================================

    Narrow rules come first. A previous-token head is local, too, and often agrees with syntax; a head that looks for
    duplicates or prefixes rests on the first token where there are none, and is global there. Of the first six, two hold
    at once only where their keys coincide, because each takes more than half of the weight.
    """
    low = head._low
    for name in NARROW:
        if low(name) > THRESHOLD:
            return name
    if head.agreement is not None and head.agreement.verdict == "syntactic":
        return "syntactic"
    if max(low("first"), low("column")) > THRESHOLD:
        return "global"
    if low("diagonal") > THRESHOLD or low("nearness") > NEAR:
        return "local"
    return "mixed" if max(low(name) for name in BEST if name != "focus") > HINT else "none"


@dataclass(frozen=True)
class Atlas:
    """All heads of a model in its order, and the step of training that it was taken at, if any."""

    heads: tuple[HeadScores, ...]
    step: int | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Plain data for a table, one row a head and score (and agreement), None where nothing is known."""
        return [{**place, **row} for head in self.heads for place, row in _rows_of(head, self.step)]

    def lines(self) -> list[str]:
        """For people: a line a head with its class, the interval of its leading score and the excess of every score; a
        line more for agreement that is better than position."""
        width = max(len(head.layer) for head in self.heads)
        out = [f"{'layer':{width}} head class      leading score       95 %        " + " ".join(f"{n[:5]:>5}" for n in BEST)]
        for head in self.heads:
            name, cells = head.leading, " ".join(_cell(head.scores[name].excess.mean) for name in BEST)
            lead, at = head.scores[name].excess, head.scores[name].at
            interval = "" if math.isnan(lead.low) else f"{lead.low:.2f} to {lead.high:.2f}"
            named = name if at is None else f"{name} {at:+}"
            out.append(f"{head.layer:{width}} {head.head:4} {head.label:10} {named:10} {interval:>15}  {cells}")
            if head.agreement is not None and head.agreement.excess.low > MARGIN:
                out.append(" " * (width + 6) + _agreement_line(head.agreement))
        tested = [head.agreement for head in self.heads if head.agreement is not None]
        if tested:
            poor = sum(not found.excess.low > MARGIN for found in tested)
            out.append(f"{poor} of {len(tested)} heads agree with the structure no better than position alone")
        return out


def _cell(mean: float) -> str:
    return f"{'-':>5}" if math.isnan(mean) else f"{mean:5.2f}"


def _agreement_line(found: Agreement) -> str:
    rule = f"{found.rule[0]} {found.rule[1]:+}" if "offset" in found.rule[0] else f"word {found.rule[1]} {found.rule[0]}"
    shuffled = "no control" if math.isnan(found.shuffled) else f"shuffled {found.shuffled:.2f}"
    return (
        f"{found.verdict}: {found.relation} {found.direction} {found.share:.2f}, position ({rule}) {found.baseline:.2f}, "
        f"excess {found.excess.low:.2f} to {found.excess.high:.2f} of {found.excess.sentences} sentences, {shuffled}"
    )


def _rows_of(head: HeadScores, step: int | None) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    place = {"step": step, "layer": head.layer, "kind": head.kind, "head": head.head, "class": head.label}
    for name, score in head.scores.items():
        yield place, {**_row(name, score.excess, score.value, score.uniform), "at": score.at}
    for a in head.relations:
        rule = f"{a.rule[0]} {a.rule[1]}"
        about = {
            "relation": a.relation,
            "direction": a.direction,
            "rule": rule,
            "verdict": a.verdict,
            "chosen": a is head.agreement,
        }
        yield place, {**_row("agreement", a.excess, a.share, a.baseline), **about}
        if not math.isnan(a.shuffled):
            yield place, {**_row("agreement_lost_by_shuffling", a.lost, a.share, a.shuffled), **about}
            yield place, {**_row("agreement_left_when_shuffled", a.left, a.shuffled, a.baseline), **about}


def _row(name: str, excess: Interval, value: float, baseline: float) -> dict[str, Any]:
    numbers = {"excess": excess.mean, "low": excess.low, "high": excess.high, "value": value, "baseline": baseline}
    known = {key: None if math.isnan(number) else number for key, number in numbers.items()}
    return {"score": name, **known, "sentences": excess.sentences}


# --- from sentences to the table

_Shares = dict[Candidate, Tensor]
_Rules = dict[Candidate, dict[Rule, float]]


@dataclass(frozen=True)
class _Sentence:
    """Its ids, and of each attention map, by name and kind: its scores, shares and rules of its agreement, and shares of the
    control."""

    ids: Ids
    maps: dict[tuple[str, str], tuple[dict[str, Tensor], _Shares, _Rules, _Shares]]


def _measure(
    snapshot: Snapshot,
    structure: Structure | None,
    control: tuple[Snapshot, Structure] | None,
    before: Sequence[Ids] = (),
) -> list[_Sentence]:
    """All rows. The tokens of each are compared with those of ``NUM_OTHERS`` others: the rows before it, ``before`` among
    them, and where these are too few the rows after it."""
    if structure is not None and len(structure.rows) != snapshot.num_rows:
        raise ValueError(f"structure has {len(structure.rows)} rows, but the snapshot has {snapshot.num_rows}")
    ids: list[Ids] = [
        {axis: tensor[row : row + 1, snapshot.real[axis][row]] for axis, tensor in snapshot.ids.items()}
        for row in range(snapshot.num_rows)
    ]
    found = []
    for row in range(snapshot.num_rows):
        earlier = [*before, *ids[:row]][-NUM_OTHERS:]
        others = [*earlier, *ids[row + 1 : row + 1 + NUM_OTHERS - len(earlier)]]
        sentence = snapshot.sentence(row)
        shuffled, moved = (sentence, None) if control is None else (control[0].sentence(row), control[1])
        maps = {}
        for layer, again in zip(sentence.maps, shuffled.maps, strict=True):
            scores, (agreed, rules) = sentence_scores(layer, ids[row], others), _agreement(layer, structure, row)
            maps[layer.name, layer.kind] = scores, agreed, rules, _agreement(again, moved, row)[0]
        found.append(_Sentence(ids[row], maps))
    return found


def _agreement(layer: AttentionMap, structure: Structure | None, row: int) -> tuple[_Shares, _Rules]:
    if structure is None or (layer.queries, layer.keys) != (structure.queries, structure.keys):
        return {}, {}
    return agreement_of(layer, structure.rows[row])


def _table(sentences: Sequence[_Sentence], step: int | None) -> Atlas:
    heads: list[HeadScores] = []
    for layer, kind in sentences[0].maps:
        found, *agreement = zip(*(sentence.maps[layer, kind] for sentence in sentences), strict=True)
        scores = {name: _scores(torch.stack([of[name] for of in found], 1), name) for name in BEST}
        agreed = judge(*agreement)
        for h, own in enumerate(zip(*scores.values(), strict=True)):
            heads.append(HeadScores(layer, kind, h, dict(zip(BEST, own, strict=True)), tuple(agreed[h]) if agreed else ()))
    return Atlas(tuple(heads), step)


def _scores(measured: Tensor, name: str) -> list[Score]:
    """The scores of all heads from what ``sentence_scores`` gave for n sentences: (3, n, H), or (3, n, H, C)."""
    at: list[int | None] = [None] * measured.shape[2]
    if name in SEARCHED:  # a distance is chosen on the even sentences
        best = mean_interval(measured[2, 0::2])[1].nan_to_num(nan=-math.inf).argmax(-1)  # (H,)
        at = [SEARCHED[name][c] for c in best.tolist()]
        measured = measured[:, 1::2, torch.arange(len(best)), best]
    value, uniform, excess = measured  # (n, H) each
    columns = [column.tolist() for column in (*mean_interval(excess), value.nanmean(0), uniform.nanmean(0))]
    return [Score(Interval(*numbers), v, u, k) for *numbers, v, u, k in zip(*columns, at, strict=True)]


def head_scores(
    snapshot: Snapshot, structure: Structure | None = None, *, control: tuple[Snapshot, Structure] | None = None
) -> Atlas:
    """The atlas of one snapshot: every head's scores, as means over sentences (its rows) with 95 % intervals.

    Scores that compare tokens need other sentences, four of them (``patterns.sentence_scores``).

    Args:
        structure: of the rows; heads of maps between its axes get an ``agreement``.
        control: a snapshot of the same model on ``shuffle_words(inputs, structure)``, and the structure that gives.
            Without it no head is called syntactic.

    Raises:
        ValueError: a structure with another number of rows.

    >>> weights = torch.eye(5).roll(1, 1).expand(7, 2, 5, 5)  # seven sentences, two heads that look at the next token
    >>> layer = AttentionMap("core", "self", "x", "x", weights, torch.ones_like(weights).bool(), weights.amax(-1))
    >>> snapshot = Snapshot((layer,), {"x": [["a"] * 5] * 7}, {}, {"x": torch.ones(7, 5).bool()})
    >>> [head.label for head in head_scores(snapshot).heads]
    ['next', 'next']
    """
    return _table(_measure(snapshot, structure, control), snapshot.step)


def head_atlas(
    attend: nn.Module | Callable[[Mapping[str, Tensor]], Snapshot],
    batches: Iterable[tuple[Mapping[str, Tensor], Structure | None]],
    *,
    seed: int = 0,
) -> Atlas:
    """The atlas of a model over many batches of sentences, with the shuffled-token control where there is a structure.

    Args:
        attend: a model of ours, or inputs -> ``Snapshot``.
        batches: inputs as ``take_snapshot`` takes them, each with the structure of its rows or None. One batch's weights
            are held at a time, twice where there is a structure.
        seed: of the shuffling.

    Raises:
        ValueError: no batch; and as in ``head_scores`` and ``take_snapshot``.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=1))
    >>> atlas = head_atlas(model, [({"input_ids": torch.randint(11, (7, 13))}, None)])
    >>> [(head.layer, head.head, head.label) for head in atlas.heads][1:]  # an untrained model
    [('blocks.0.attention.core', 1, 'none'), ('blocks.0.attention.core', 2, 'none')]
    """
    look = (lambda inputs: take_snapshot(attend, inputs)) if isinstance(attend, nn.Module) else attend
    sentences: list[_Sentence] = []
    for number, (inputs, structure) in enumerate(batches):
        control = None
        if structure is not None:
            shuffled, moved = shuffle_words(inputs, structure, seed=seed + number)
            control = look(shuffled), moved
        sentences += _measure(look(inputs), structure, control, [s.ids for s in sentences[-NUM_OTHERS:]])
    if not sentences:
        raise ValueError("batches must hold at least one batch of sentences")
    return _table(sentences, None)


def atlas_over_steps(snapshots: Sequence[Snapshot], structure: Structure | None = None) -> list[Atlas]:
    """``head_scores`` of the snapshots of a run, which all show the same sentences; see ``read_snapshots``.

    A recorded snapshot has no shuffled control, so that agreement is given but no head is called syntactic.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention, rows = MultiHeadAttention(6, 2), {"query": torch.randn(7, 5, 6)}
    >>> atlases = atlas_over_steps([take_snapshot(attention, rows, step=step) for step in (0, 50)])
    >>> [(atlas.step, len(atlas.heads)) for atlas in atlases]
    [(0, 2), (50, 2)]
    """
    return [head_scores(snapshot, structure) for snapshot in snapshots]


def turning_points(atlases: Sequence[Atlas]) -> list[tuple[HeadScores, int | None]]:
    """Each head of the last atlas with the first step from which on it has had its class to the end."""
    found = []
    for column in zip(*(atlas.heads for atlas in atlases), strict=True):
        labels = [head.label for head in column]
        start = next(i for i in range(len(labels)) if set(labels[i:]) == {labels[-1]})
        found.append((column[-1], atlases[start].step))
    return found
