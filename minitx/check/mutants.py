"""Attention in twelve steps, and common mistakes in each step.

``attention_in_steps(query, key, value, allowed)`` is the definition. With another function for one or two steps it is a mutant. The
table ``MUTANTS`` serves to name mistakes, to seed faults for the tests of the checker, and to make puzzles.

    >>> broken = mutant("no scale")
    >>> query = torch.full((1, 1, 1, 4), 2.0)
    >>> key = torch.stack((query[..., 0, :], -query[..., 0, :]), dim=-2)
    >>> broken(query, key, key)[0][..., 0].item() > 1.9999  # right is 1.9987
    True
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from minitx.check.results import Severity, stable_id

Step = Callable[..., Any]
AttentionFunction = Callable[..., tuple[Tensor, Tensor]]


# --- the definition


def _triangle(rows: int, keys: int, shift: int = 0) -> Tensor:
    """A query sees the keys up to its position. The last query sees all keys."""
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows + shift)


@dataclass(frozen=True)
class Steps:
    """The steps of attention, in order. By default they are the definition.

    Attributes:
        roles: (query, key, value) -> the tensors that are used as query, key and value.
        split: heads (B, H, L, D) of query, key or value -> the heads that are used.
        group: (heads of key or value, number of query heads) -> that number of heads.
        dot: (query, key) -> scores (B, H, L, S).
        scale: (scores, query, key, value) -> scores.
        causal: (rows, keys) -> bool (L, S), True = may attend.
        mask: (the mask argument, the causal mask) -> bool (B, H, L, S). Without ``is_causal`` the causal mask is all True.
        hide: (scores, allowed) -> scores.
        softmax: scores -> weights.
        after: (weights, allowed, query) -> weights. Hidden weights are 0, even if a query sees no key and its softmax is NaN.
        mix: (weights, query, key, value) -> output (B, H, L, Dv).
        merge: (output, query) -> output.
    """

    roles: Step = lambda query, key, value: (query, key, value)
    split: Step = lambda heads: heads
    group: Step = lambda heads, count: heads.repeat_interleave(count // heads.shape[1], dim=1)
    dot: Step = lambda query, key: query @ key.mT
    scale: Step = lambda scores, query, key, value: scores * query.shape[-1] ** -0.5
    causal: Step = _triangle
    mask: Step = torch.logical_and
    hide: Step = lambda scores, allowed: scores.masked_fill(~allowed, -torch.inf)
    softmax: Step = lambda scores: scores.softmax(-1)
    after: Step = lambda weights, allowed, query: weights.masked_fill(~allowed, 0.0)
    mix: Step = lambda weights, query, key, value: weights @ value
    merge: Step = lambda output, query: output


DEFINITION = Steps()


def attention_in_steps(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None = None,
    *,
    is_causal: bool = False,
    steps: Steps = DEFINITION,
) -> tuple[Tensor, Tensor]:
    """Compute attention step by step.

    Args:
        query, key, value: (B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv).
        allowed: a bool tensor that broadcasts to (B, H, L, S), True = may attend. Default: nothing is hidden.
        is_causal: hide later keys. The last query sees all keys.
        steps: the steps to use.

    Returns:
        ``(output (B, H, L, Dv), weights (B, H, L, S))``.
    """
    heads, rows, keys = query.shape[1], query.shape[2], key.shape[2]
    query, key, value = steps.roles(query, key, value)
    query = steps.split(query)
    key, value = (steps.split(steps.group(tensor, heads)) for tensor in (key, value))
    scores = steps.scale(steps.dot(query, key), query, key, value)
    everything = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    visible = everything if allowed is None else everything & allowed
    triangle = steps.causal(rows, keys).to(scores.device) if is_causal else everything
    seen = triangle if allowed is None else steps.mask(visible, triangle).expand(scores.shape)
    if not seen.all():  # without hidden keys, functions skip this step
        scores = steps.hide(scores, seen)
    weights = steps.after(steps.softmax(scores), seen, query)
    return steps.merge(steps.mix(weights, query, key, value), query), weights


# --- common mistakes


def _scaled(factor: Callable[[int, int, int, int], float]) -> Step:
    """A scale that depends on (d_k, number of heads, number of keys, d_v)."""
    return lambda scores, query, key, value: scores * factor(query.shape[-1], query.shape[1], key.shape[2], value.shape[-1])


def _filled(number: float | None) -> Step:
    """Set hidden scores to a number. None: the lowest number of the dtype."""
    return lambda s, allowed: s.masked_fill(~allowed, torch.finfo(s.dtype).min if number is None else number)


def _added(number: float) -> Step:
    return lambda scores, allowed: scores + number * (~allowed).to(scores.dtype)


def unchanged(x: Tensor, *rest: Any) -> Tensor:
    """Return scores or weights unchanged, as if the step were left out."""
    return x


def _from_the_left(name: str) -> Step:
    """A mask that begins at the upper left: ``tril`` or ``triu``, with a shift."""
    function, shift = name.split()
    return lambda L, S: getattr(torch.ones(L, S, dtype=torch.bool), function)(int(shift))


def _exponentials(scores: Tensor, epsilon: float = 0.0) -> Tensor:
    return scores.exp() / (scores.exp().sum(-1, keepdim=True) + epsilon)


def _cosine(query: Tensor, key: Tensor) -> Tensor:
    return normalize(query, dim=-1) @ normalize(key, dim=-1).mT


def _if_alike(dot: Step) -> Step:
    """A mistake that shows only for as many keys as queries."""
    return lambda query, key: dot(query, key) if query.shape == key.shape else query @ key.mT


def _is_square(weights: Tensor) -> bool:
    return weights.shape[-1] == weights.shape[-2]


@dataclass(frozen=True, eq=False)
class Mutant:
    """A mistake.

    Attributes:
        name: the mistake in plain words.
        advice: what to write instead.
        instead: the replaced steps, one or two.
        severity: FRAGILE if only some numbers or shapes show it.
    """

    name: str
    advice: str
    instead: Mapping[str, Step]
    severity: Severity = Severity.WRONG

    @property
    def id(self) -> str:
        """Return the stable id."""
        return stable_id(self.name)

    @property
    def is_extreme(self) -> bool:
        """Return whether ordinary numbers do not reveal the mistake."""
        return self.severity == Severity.FRAGILE


def _fault(name: str, advice: str, severity: Severity = Severity.WRONG, **instead: Step) -> Mutant:
    return Mutant(name, advice, instead, severity)


_fragile = partial(_fault, severity=Severity.FRAGILE)


_BLIND = "With hidden = True where a key is hidden: scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0)."


def _number_for_hidden(name: str, hide: Step) -> Mutant:
    return _fragile(name, f"A query that sees nothing gets a mean of hidden values. {_BLIND}", hide=hide, after=unchanged)


_OF_KEYS = "Use softmax(dim=-1), one softmax for each query."
_EXTREME = "Large or low scores overflow: use torch.softmax, which subtracts the largest score of each row."
_ALIGNED = "Use tril(diagonal=0) to keep, or triu(diagonal=1) to hide."

MUTANTS: tuple[Mutant, ...] = (
    _fault("no scale", "Divide the scores by √d_k.", scale=unchanged),
    _fault("scale by d_k", "Divide by the root, d_k ** 0.5.", scale=_scaled(lambda d_k, H, S, d_v: 1 / d_k)),
    _fault("scores multiplied by √d_k", "Divide the scores by √d_k.", scale=_scaled(lambda d_k, H, S, d_v: d_k**0.5)),
    _fault("scale by embed_dim", "d_k is embed_dim // num_heads.", scale=_scaled(lambda d_k, H, S, d_v: (d_k * H) ** -0.5)),
    _fault("scale by the number of heads", "d_k is the width of a head.", scale=_scaled(lambda d_k, H, S, d_v: H**-0.5)),
    _fault("scale by the number of keys", "d_k is size(-1), not size(-2).", scale=_scaled(lambda d_k, H, S, d_v: S**-0.5)),
    _fault("scale by d_v", "d_k is the width of the keys.", scale=_scaled(lambda d_k, H, S, d_v: d_v**-0.5)),
    _fault("fourth root of d_k", "Scale query and key, or divide by √d_k.", scale=_scaled(lambda d_k, H, S, d_v: d_k**-0.25)),
    _fault("cosine of query and key", "Remove the normalization, or the scale.", dot=_cosine),
    _fault("cosine without scale", "This is not dot-product attention: remove the normalization.", dot=_cosine, scale=unchanged),
    _fault("query unused", "Compute query @ key.mT.", dot=_if_alike(lambda q, k: k @ k.mT)),
    _fault("key unused", "Compute query @ key.mT.", dot=_if_alike(lambda q, k: q @ q.mT)),
    _fault("scores transposed", "Compute query @ key.mT.", dot=_if_alike(lambda q, k: k @ q.mT)),
    _fault("key reshaped, not transposed", "Use key.transpose(-2, -1).", dot=lambda q, k: q @ k.reshape(k.mT.shape)),
    _fault("causal mask hides the token itself", _ALIGNED, causal=partial(_triangle, shift=-1)),
    _fault("causal mask shows one later token", _ALIGNED, causal=partial(_triangle, shift=1)),
    _fault("causal mask from the upper left", "With a cache, the last query sees all keys: tril(diagonal=S - L).", causal=_from_the_left("tril 0")),
    _fault("causal mask upside down", "Queries see later keys: use tril, not triu.", causal=lambda L, S: _triangle(L, S).flip(0, 1)),
    _fault("causal ignored", "The causal option has no effect.", causal=lambda L, S: torch.ones(L, S, dtype=torch.bool)),
    _fault("mask inverted", "True means keep: masked_fill(~mask, -inf).", mask=lambda a, c: ~a & c),
    _fault("mask ignored", "The mask has no effect: masked_fill returns a new tensor, and adding -1e-9 hides nothing.", mask=lambda a, c: c),
    _fault("mask ignored when causal", "Use both masks: allowed & causal.", mask=lambda a, c: a if c.all() else c),
    _fault("causal ignored beside a mask", "Use both masks: allowed & causal.", mask=lambda a, c: a),
    _fault("mask or causal", "A key is visible if both masks allow it: use & instead of |.", mask=lambda a, c: a if c.all() else a | c),
    _fault("padding mask on the queries", "Padding hides keys: mask[:, None, None, :].", mask=lambda a, c: (a[..., :1, :].mT if _is_square(a) else a) & c),
    _fault("mask transposed", "Rows are queries, and columns are keys.", mask=lambda a, c: (a.mT if _is_square(a) else a) & c),
    _fault("first mask for the whole batch", "Remove the index or squeeze of the batch.", mask=lambda a, c: a[:1] & c),
    _fault("hidden scores of 0", "A score of 0, or of 1e-9, is not hidden: masked_fill(~mask, -inf).", hide=lambda s, a: s * a, after=unchanged),
    _fault("hidden scores of −1", "Use -inf for hidden scores.", hide=_filled(-1.0), after=unchanged),
    _fault("mask added as 0 and 1", "A mask that is added needs 0 and -inf.", hide=lambda s, a: s + a, after=unchanged),
    _fragile("NaN where a query sees nothing", _BLIND, after=unchanged),
    _number_for_hidden("padding mask of −1e9 averages hidden values", _filled(-1e9)),
    _number_for_hidden("hidden scores of −1e4", _filled(-1e4)),
    _number_for_hidden("lowest finite number for hidden scores", _filled(None)),
    _number_for_hidden("−1e9 added to hidden scores", _added(-1e9)),
    _number_for_hidden("−1e4 added to hidden scores", _added(-1e4)),
    _fault("softmax over the queries", _OF_KEYS, softmax=lambda s: s.softmax(-2)),
    _fault("softmax over the heads", _OF_KEYS, softmax=lambda s: s.softmax(1)),
    _fault("softmax over the batch", _OF_KEYS, softmax=lambda s: s.softmax(0)),
    _fault("softmax over all scores", _OF_KEYS, softmax=lambda s: s.flatten(-2).softmax(-1).view(s.shape)),
    _fault("softmax twice", "Hidden keys get weight from the second softmax.", softmax=lambda s: s.softmax(-1).softmax(-1), after=unchanged),
    _fault("no softmax", "Use softmax(dim=-1).", softmax=unchanged),
    _fault("log-softmax", "Use softmax instead of log_softmax.", softmax=lambda s: s.log_softmax(-1)),
    _fault("sigmoid", "Use softmax(dim=-1).", softmax=torch.sigmoid),
    _fragile("exp without the maximum", _EXTREME, softmax=_exponentials),
    _fragile("eps in the denominator", "Low scores lose weight: use torch.softmax.", softmax=partial(_exponentials, epsilon=1e-6)),
    _fragile("one maximum for all rows", _EXTREME, softmax=lambda s: _exponentials(s - s.max())),
    _fault("scale after the softmax", "Scale the scores, not the weights.", scale=unchanged, after=lambda w, a, q: w * q.shape[-1] ** -0.5),
    _fault("scale before and after the softmax", "Scale once, before the softmax.", after=lambda w, a, q: w * q.shape[-1] ** -0.5),
    _fault("mask after the softmax", "Mask the scores: these weights do not add up to 1.", hide=unchanged, after=lambda w, a, q: w * a),
    _fragile("eps after the softmax", "Hidden keys get the weight eps.", after=lambda w, a, q: (w + 1e-8) / (w + 1e-8).sum(-1, keepdim=True)),
    _fault("weights without gradient", "Remove detach, no_grad or torch.tensor(scores): query and key do not learn.", after=lambda w, a, q: w.masked_fill(~a, 0.0).detach()),
    _fault("weights transposed", "Compute weights @ value.", mix=lambda w, q, k, v: (w.mT if _is_square(w) else w) @ v),
    _fault("keys mixed", "Compute weights @ value.", mix=lambda w, q, k, v: w @ k),
    _fault("queries mixed", "Compute weights @ value.", mix=lambda w, q, k, v: w @ (q if q.shape == v.shape else v)),
    _fault("query added to the output", "The residual connection is outside of attention.", mix=lambda w, q, k, v: w @ v + (q if q.shape[-1] == v.shape[-1] else 0)),
    _fault("grouped heads tiled", "Use repeat_interleave(H // Hkv, dim=1).", group=lambda x, H: x.repeat(1, H // x.shape[1], 1, 1)),
    _fault("first key head for all", "Use repeat_interleave(H // Hkv, dim=1).", group=lambda x, H: x[:, :1].expand(-1, H, -1, -1) if x.shape[1] < H else x),
    _fault("heads by view", "Use view(B, L, H, D).transpose(1, 2).", split=lambda x: x.transpose(1, 2).reshape(x.shape)),
    _fault("heads merged by view", "Use transpose(1, 2) before reshape(B, L, E).", merge=lambda o, q: o.reshape(o.transpose(1, 2).shape).transpose(1, 2)),
    _fragile("zeros_like(Q) for d_v ≠ d_k", "The output has the width of the values: new_zeros(*query.shape[:-1], value.shape[-1]).", merge=lambda o, q: torch.zeros_like(q).to(o.dtype).copy_(o)),
    _fault("causal mask from the upper left hides the token itself", _ALIGNED, causal=_from_the_left("tril -1")),
    _fault("causal mask shows later tokens alone", "Queries see earlier keys: use tril, not triu.", causal=_from_the_left("triu 1")),
    _fault("causal mask from the upper left shows one later token", _ALIGNED, causal=_from_the_left("tril 1")),
    _fault("heads not transposed", "Each token attends to its own heads: use view(B, L, H, D).transpose(1, 2).", split=lambda x: x.transpose(1, 2), merge=lambda o, q: o.transpose(1, 2)),
    _fault("weights unused", "Compute weights @ value.", mix=lambda w, q, k, v: v if _is_square(w) else w @ v),
    _fault("keys and values swapped", "Compute scores from the keys and the mean from the values.", roles=lambda q, k, v: (q, v, k)),
)  # fmt: skip
"""The mistakes. Mistakes with severity FRAGILE show only for some numbers or shapes."""


def mutant(name: str) -> AttentionFunction:
    """Return a broken attention function, as a puzzle.

    Args:
        name: the name of an entry of ``MUTANTS``.

    Returns:
        A function of query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv), ``mask`` (bool, True = may attend) and
        ``is_causal`` that returns (output, weights).

    Raises:
        ValueError: no mutant has this name. The message suggests similar names.
    """
    names = [entry.name for entry in MUTANTS]
    if name not in names:
        similar = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[:3]
        raise ValueError(f"no mutant is named {name!r}; similar names: {', '.join(similar)}")
    steps = replace(DEFINITION, **MUTANTS[names.index(name)].instead)

    def attention(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        return attention_in_steps(query, key, value, mask, is_causal=is_causal, steps=steps)

    return attention
