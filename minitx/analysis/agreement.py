"""Does a head follow a given structure, more than position alone and word identity alone explain?

The favourite of a word is the word with its largest weight; agreement is the share of words whose favourite is one that
the structure names (Clark et al. 2019, "What Does BERT Look At?", arXiv:1906.04341, §4). What is chosen (relation,
direction, best positional rule) is chosen on the even sentences and judged on the odd ones.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minitx.analysis.intervals import UNKNOWN, Interval, as_interval, mean_interval
from minitx.analysis.snapshot import AttentionMap
from minitx.analysis.structure import Arc, Links, Span

ALL = "all"
MARGIN = 0.1
"""Agreement must exceed a baseline by this much, at the lower end of its interval."""
MIN_SENTENCES = 5
"""A relation is looked at if so many sentences of each half have it."""

Candidate = tuple[str, str]
"""Relation and direction: ``forward`` asks where the first word of an arc looks, ``backward`` the second."""
Rule = tuple[str, int]
"""A guess from position alone: the key word at an ``offset`` from the query word (``offset from the end``: both counted
from their ends), or the same one for all queries, ``from the start`` or ``from the end``."""


@dataclass(frozen=True)
class Agreement:
    """How far a head follows one relation of a structure, on the judged half of the sentences.

    Attributes:
        relation, direction: of the arcs. rule: the best guess from position alone on the other half.
        share: agreement. baseline: that of the rule. excess: agreement − baseline, paired by sentence.
        shuffled: agreement when the words are shuffled. lost: agreement − shuffled, left: shuffled − baseline, paired; all
            NaN without the control.
    """

    relation: str
    direction: str
    rule: Rule
    share: float
    baseline: float
    excess: Interval
    shuffled: float = math.nan
    lost: Interval = UNKNOWN
    left: Interval = UNKNOWN

    @property
    def verdict(self) -> str:
        """``syntactic``, or why not, the first that holds:

        * ``no better than position``: the lower end of ``excess`` is not above ``MARGIN``;
        * ``no control``: nothing was shuffled;
        * ``by word identity``: shuffling does not take it away (the lower end of ``lost`` is not above ``MARGIN``), or not
          down to the baseline (the lower end of ``left`` is above ``MARGIN``).
        """
        if not self.excess.low > MARGIN:
            return "no better than position"
        if math.isnan(self.lost.low):
            return "no control"
        return "syntactic" if self.lost.low > MARGIN and not self.left.low > MARGIN else "by word identity"


# --- one sentence


def word_attention(weights: Tensor, query_words: Sequence[Span], key_words: Sequence[Span]) -> Tensor:
    """Weights between words (H, Q, K) from those between tokens (H, L, S).

    Summed over the tokens of the key word, averaged over those of the query word (Clark et al. 2019, §4.1).
    """
    queries = _pool(query_words, weights.shape[1], mean=True)
    return queries @ weights.double() @ _pool(key_words, weights.shape[2]).T


def _pool(words: Sequence[Span], length: int, *, mean: bool = False) -> Tensor:
    """(words, length): 1 at the tokens of each word, or 1 / their number."""
    place, spans = torch.arange(length), torch.tensor(words).view(-1, 2)
    inside = ((place >= spans[:, :1]) & (place < spans[:, 1:])).double()
    return inside / inside.sum(-1, keepdim=True).clamp(min=1) if mean else inside


def agreement_of(layer: AttentionMap, links: Links) -> tuple[dict[Candidate, Tensor], dict[Candidate, dict[Rule, float]]]:
    """Of one sentence (B = 1, no padding): each head's agreement (H,), and that of every positional rule that ever hits.

    A query word counts where the structure names some of the visible key words, but not all. A word is never its own
    favourite. Heads that like several words equally agree by the share of those that are named.
    """
    if not links.arcs:
        return {}, {}
    is_self = layer.queries == layer.keys
    other = torch.ones(len(links.query_words), len(links.key_words), dtype=torch.bool)
    if is_self:
        other.fill_diagonal_(False)
    visible = word_attention(layer.visible[0].all(0, keepdim=True), links.query_words, links.key_words)[0] > 0
    seen = visible & other  # (Q, K)
    weights = word_attention(layer.weights[0], links.query_words, links.key_words).masked_fill(~seen, -1.0)
    best = (weights >= weights.amax(-1, keepdim=True) * (1 - 1e-6)) & seen  # (H, Q, K); ties are shared
    named = {candidate: seen & pairs for candidate, pairs in _candidates(links.arcs, seen, both_ways=is_self).items()}
    counted = {c: pairs.any(-1) & (pairs.sum(-1) < seen.sum(-1)) for c, pairs in named.items()}
    kept = {c: named[c] & counted[c][:, None] for c in named if counted[c].any()}
    if not kept:
        return {}, {}
    shared = best / best.sum(-1, keepdim=True).clamp(min=1).double()
    hits = torch.einsum("hqk,cqk->ch", shared, torch.stack(list(kept.values())).double())
    shares = {c: hit / counted[c].sum() for c, hit in zip(kept, hits, strict=True)}
    return shares, {c: _rules(pairs, int(counted[c].sum())) for c, pairs in kept.items()}


def _candidates(arcs: Sequence[Arc], like: Tensor, *, both_ways: bool) -> dict[Candidate, Tensor]:
    """bool (Q, K), as ``like``: what every relation, and all together, name in each direction."""
    pairs: defaultdict[Candidate, list[Span]] = defaultdict(list)
    for query, key, relation in arcs:
        for name in (ALL, relation):
            pairs[name, "forward"].append((query, key))
            if both_ways:
                pairs[name, "backward"].append((key, query))
    return {c: torch.zeros_like(like).index_put(tuple(torch.tensor(p).T), torch.tensor(True)) for c, p in pairs.items()}


def _rules(named: Tensor, total: int) -> dict[Rule, float]:
    """The share of ``total`` query words for which each positional rule gives one of the ``named`` (Q, K)."""
    Q, K = named.shape
    hits: Counter[Rule] = Counter()
    for query, key in named.nonzero().tolist():
        hits["offset", key - query] += 1
        hits["from the start", key] += 1
        hits["from the end", K - 1 - key] += 1
        if Q != K:
            hits["offset from the end", (key - K) - (query - Q)] += 1
    return {rule: count / total for rule, count in hits.items()}


# --- all sentences


def judge(
    shares: Sequence[Mapping[Candidate, Tensor]],
    rules: Sequence[Mapping[Candidate, Mapping[Rule, float]]],
    shuffled: Sequence[Mapping[Candidate, Tensor]],
) -> list[list[Agreement]]:
    """Each head's agreement with every relation and direction, the chosen one first; [] where the sentences are too few.

    On the even sentences, each relation and direction gets the positional rule that agrees most, and each head chooses the
    relation and direction whose excess has the highest lower end. On the odd ones all are judged.

    Args:
        shares, rules: of each sentence, as ``agreement_of`` gives them. shuffled: the shares with shuffled words; {} where
            none were shuffled.
    """
    halves, seen = (shares[0::2], shares[1::2]), dict.fromkeys(c for found in shares for c in found)
    candidates = [c for c in seen if all(sum(c in found for found in half) >= MIN_SENTENCES for half in halves)]
    if not candidates:
        return []
    best = {c: _best_rule(rules[0::2], c) for c in candidates}
    H = next(len(share) for found in shares for share in found.values())
    agreed, control = _stack(shares, candidates, H), _stack(shuffled, candidates, H)  # (n, H, C)
    guessed = [[found[c].get(best[c], 0.0) if c in found else math.nan for c in candidates] for found in rules]
    baseline = torch.tensor(guessed, dtype=torch.float64)  # (n, C)
    chosen = mean_interval((agreed - baseline[:, None])[0::2])[1].nan_to_num(nan=-math.inf).argmax(-1)  # (H,)
    out = []
    for head, best_one in enumerate(chosen.tolist()):
        own: list[Agreement] = []
        for c in sorted(range(len(candidates)), key=lambda c: (c != best_one, c)):
            share, guess, left = agreed[1::2, head, c], baseline[1::2, c], control[1::2, head, c]
            found = Agreement(
                relation=candidates[c][0],
                direction=candidates[c][1],
                rule=best[candidates[c]],
                share=float(share.nanmean()),
                baseline=float(guess.nanmean()),
                excess=as_interval(share - guess),
                shuffled=float(left.nanmean()),
                lost=as_interval(share - left),
                left=as_interval(left - guess),
            )
            own.append(found)
        out.append(own)
    return out


def _best_rule(rules: Sequence[Mapping[Candidate, Mapping[Rule, float]]], candidate: Candidate) -> Rule:
    """The rule that agrees most over these sentences; of several, the nearest."""
    total: dict[Rule, float] = {}
    for found in rules:
        for rule, share in found.get(candidate, {}).items():
            total[rule] = total.get(rule, 0.0) + share
    return max(total, key=lambda rule: (total[rule], -abs(rule[1])))


def _stack(shares: Sequence[Mapping[Candidate, Tensor]], candidates: Sequence[Candidate], H: int) -> Tensor:
    """(n, H, C), NaN where a sentence has no such relation."""
    nothing = torch.full((H,), math.nan, dtype=torch.float64)
    return torch.stack([torch.stack([found.get(c, nothing) for c in candidates], -1) for found in shares])
