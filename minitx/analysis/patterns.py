"""Attention patterns in numbers: how much of a head's weight in one sentence lies where each pattern would put it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minitx.analysis.snapshot import AttentionMap

BAND = 2
"""Keys at most so far from the diagonal make up the diagonal mass."""
SHIFTS = tuple(range(-8, 9))
"""Distances that are looked at, in tokens."""
SEARCHED: Mapping[str, tuple[int, ...]] = {
    "offset": tuple(k for k in SHIFTS if k not in (-1, 0, 1)),
    "shifted": tuple(k for k in SHIFTS if k not in (0, 1)),
}
"""Scores that have a distance to be chosen: one value for each of these."""
CONTENT = ("duplicate", "induction", "shifted")
"""Scores that compare tokens: they have to beat position, too."""
BEST: Mapping[str, float] = {
    **dict.fromkeys(("previous", "next", "offset", "duplicate", "induction", "shifted"), 1.0),
    **dict.fromkeys(("first", "column", "diagonal"), 1.0),
    **dict.fromkeys(("nearness", "focus"), 0.0),
}
"""The scores, and what the quantity behind each is for a head that does nothing else."""

Pair = tuple[Tensor, Tensor]
"""A quantity for each head, and the same for uniform attention."""
Ids = Mapping[str, Tensor]


def sentence_scores(layer: AttentionMap, ids: Ids, others: Sequence[Ids] = ()) -> dict[str, Tensor]:
    """(value, uniform, excess) of every score for each head, (3, H) in float64, of one sentence without padding (B = 1).

    With p the weights, V_i the keys that query i sees, and u_ij = 1/|V_i| for uniform attention. Rows with fewer than two
    visible keys are left out, and a mass is the mean over the rows that see a key of the named set:

    ============= ============================================================================================
    ``previous``  p_{i, i−1}: mass on the token before; ``next`` on the one after (Voita et al. 2019)
    ``offset``    the same for other fixed distances, p_{i, i+k}, k = ±2 … ±8: (3, H, 14), see ``SEARCHED``
    ``duplicate`` mass on other visible keys with the query's token (Wang et al. 2022, arXiv:2211.00593)
    ``induction`` mass on keys behind another visible key with the query's token: prefix matching (Olsson et al. 2022)
    ``shifted``   the same for keys k behind it, k = −8 … −1 and 2 … 8: (3, H, 15)
    ``first``     mass on the first key
    ``column``    mass, over all rows, on the one key with the most; the key is chosen on the even rows and its mass
                  taken on the odd ones, and the other way round
    ``diagonal``  mass on keys with \\|j − π_i\\| ≤ 2
    ``nearness``  the mean distance Σ_j p_ij \\|j − π_i\\| / Σ_j p_ij in tokens (Vig & Belinkov 2019); best is 0
    ``focus``     the entropy −Σ p ln p / ln \\|V_i\\|; best is 0. It tells a broad head from an undecided one
    ============= ============================================================================================

    π_i is the query's own position. In cross-attention it is i (S−1)/(L−1), the diagonal stretched to both lengths, and
    fixed distances do not exist there; tokens can be compared, since both sides share a vocabulary. A query's own position
    is never one of "other" keys. What does not exist is NaN.

    The excess is (value − uniform) / (best − uniform): 0 for uniform attention, 1 for a head that does nothing else.
    ``duplicate``, ``induction`` and ``shifted`` compare tokens, but equal tokens often stand at usual distances. Their excess
    is less by what it is, on average, with the tokens of other sentences in place of this one's: what position alone
    explains.

    Args:
        ids: of the sentence, by axis; without them these three do not exist. others: of other sentences, for that comparison;
            without any these three have no excess.

    Source: Voita et al. 2019 (arXiv:1905.09418, positional heads), Vig & Belinkov 2019 (arXiv:1906.04284, attention
    distance), Olsson et al. 2022 (arXiv:2209.11895), Clark et al. 2019 (arXiv:1906.04341, §3).
    """
    p, visible = layer.weights[0].double(), layer.visible[0]  # (H, L, S)
    if (visible == visible[:1]).all():
        visible = visible[:1]
    uniform = visible / visible.sum(-1, keepdim=True).clamp(min=1).double()
    rows = visible.sum(-1) > 1
    L, S = p.shape[-2:]
    query, key = torch.arange(L)[:, None], torch.arange(S)
    is_self = layer.queries == layer.keys
    here = query if is_self else query * ((S - 1) / max(L - 1, 1))  # π
    itself = (key == here) & is_self
    found = {
        "first": _mass(p, uniform, rows, (key == 0) & visible),
        "column": _column(p, uniform, rows),
        "diagonal": _mass(p, uniform, rows, ((key - here).abs() <= BAND) & visible),
    }
    found["nearness"] = _mean(rows, *(_distance(w, (key - here).abs()) for w in (p, uniform)))
    entropy = layer.entropy()[0]
    found["focus"] = _mean(rows, entropy, torch.ones_like(entropy))
    if is_self:
        found |= _at_shifts(p, uniform, rows, itself, itself, {"previous": -1, "next": 1}, "offset")
    found |= _by_token(p, uniform, rows, visible, itself, layer, ids)
    elsewhere = [_by_token(p, uniform, rows, visible, itself, layer, other) for other in others]
    out = {}
    for name in BEST:
        own = torch.stack(found.get(name) or _nothing(len(p), name))
        excess = _excess(own, BEST[name])
        if name in CONTENT:
            there = [_excess(torch.stack(other[name]), BEST[name]) for other in elsewhere if name in other]
            excess = excess - (torch.stack(there).nanmean(0) if there else torch.nan)
        out[name] = torch.cat([own, excess[None]])
    return out


def _excess(pair: Tensor, best: float) -> Tensor:
    room = best - pair[1]
    return torch.where(room.abs() > 1e-9, (pair[0] - pair[1]) / room, torch.nan)


def _by_token(
    p: Tensor, uniform: Tensor, rows: Tensor, visible: Tensor, itself: Tensor, layer: AttentionMap, ids: Ids
) -> dict[str, Pair]:
    """The scores of ``CONTENT`` with these ids, which may be of another sentence: cut or filled up with what equals nothing."""
    if layer.queries not in ids or layer.keys not in ids:
        return {}
    L, S = itself.shape
    queries, keys = (
        torch.nn.functional.pad(ids[axis][0][:n], (0, max(0, n - ids[axis].shape[1])), value=filler)
        for axis, n, filler in ((layer.queries, L, -1), (layer.keys, S, -2))
    )
    same = (queries[:, None] == keys) & visible.any(0) & ~itself
    return _at_shifts(p, uniform, rows, same, itself, {"duplicate": 0, "induction": 1}, "shifted")


def _nothing(H: int, name: str) -> Pair:
    nan = torch.full((H, len(SEARCHED[name])) if name in SEARCHED else (H,), math.nan, dtype=torch.float64)
    return nan, nan


def _distance(weights: Tensor, distance: Tensor) -> Tensor:
    return (weights * distance).sum(-1) / weights.sum(-1).clamp(min=1e-30)  # with sinks, a row sums to less than 1


def _mass(p: Tensor, uniform: Tensor, rows: Tensor, keys: Tensor) -> Pair:
    """Mean weight on ``keys`` (1 or H, L, S) over the rows that have one, of p and of uniform attention."""
    return _mean(rows & keys.any(-1), (p * keys).sum(-1), (uniform * keys).sum(-1))


def _mean(rows: Tensor, value: Tensor, uniform: Tensor) -> Pair:
    """Means of ``value`` (..., H, L) and ``uniform`` over ``rows``, both of a shape that expands to it, (..., H) each; NaN
    where there is no row."""
    rows = rows.expand_as(value)
    a, b = (v.expand_as(value).masked_fill(~rows, 0.0).sum(-1) / rows.sum(-1) for v in (value, uniform))
    return a, b


def _column(p: Tensor, uniform: Tensor, rows: Tensor) -> Pair:
    """Weight on the favourite column; chosen and measured on different rows, so that noise does not look like one."""
    even = torch.arange(p.shape[1]) % 2 == 0
    weight = p.masked_fill(~rows[..., None], 0.0)
    of_even, of_odd = (weight[:, half].sum(1).argmax(-1, keepdim=True) for half in (even, ~even))  # (H, 1)
    index = torch.where(even, of_odd, of_even)[..., None]  # (H, L, 1)
    return _mean(rows, p.gather(-1, index)[..., 0], uniform.expand_as(p).gather(-1, index)[..., 0])


def _at_shifts(
    p: Tensor, uniform: Tensor, rows: Tensor, anchors: Tensor, itself: Tensor, named: Mapping[str, int], searched: str
) -> dict[str, Pair]:
    """Mass on the keys k behind each row's ``anchors`` (L, S), the query itself left out, by name and for all of ``searched``."""
    L, S = anchors.shape
    query, anchor = anchors.nonzero(as_tuple=True)  # (P,)
    key = anchor + torch.tensor(SHIFTS)[:, None]  # (K, P)
    inside = (key >= 0) & (key < S)
    key = key.clamp(0, S - 1)
    inside &= ~itself[query, key]

    def mass(weights: Tensor) -> Tensor:
        picked = weights[:, query, key] * inside  # (H, K, P)
        return picked.new_zeros(*picked.shape[:2], L).index_add(2, query, picked).transpose(0, 1)  # (K, H, L)

    value, chance = mass(p), mass(uniform)
    value, chance = _mean(rows & (chance > 0), value, chance)  # (K, H)
    found = {name: (value[SHIFTS.index(k)], chance[SHIFTS.index(k)]) for name, k in named.items()}
    wanted = [SHIFTS.index(k) for k in SEARCHED[searched]]
    return {**found, searched: (value[wanted].T, chance[wanted].T)}
