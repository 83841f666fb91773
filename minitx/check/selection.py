"""Arguments that choose the keys of a query: a window, or the number of its largest scores. Their meaning is found by trying.

A value is tried in two plain rows. If keys are hidden as a rule says, the rule is the definition in all other rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from minitx.check.cases import Case, Outcome
from minitx.check.diagnosis import Trial, answer, dependences, fits, fits_all
from minitx.check.results import FAILED, FRAGILE, NOT_TRIED, PASSED, WRONG, Check, Finding, finding

SEVEN, LONG = Case("seven tokens", rows=7, keys=7, batch=1), Case("130 tokens", rows=130, keys=130, batch=1)

ROWS = (
    (3, SEVEN),
    (5, SEVEN),
    (4, Case("as many tokens", rows=4, keys=4)),
    (3, replace(SEVEN, name="two sequences", batch=2)),
    (3, Case("more keys than queries", rows=5, keys=9)),
    (5, replace(SEVEN, name="mask", batch=2, mask="keys")),  # with 5, each query sees a key
    (3, replace(SEVEN, name="causal", is_causal=True)),
    (5, replace(SEVEN, name="mask and causal", batch=2, mask="keys", is_causal=True)),
    (3, LONG),
    (65, LONG),
)
"""Values with rows. The first two find the meaning."""


def check_selection(trial: Trial, name: str) -> tuple[Check, list[Finding]]:
    """Check one argument of a trial that is right without it. If it passes, the reason is the meaning in words."""
    id, reason = f"argument {name}", "no case uses it"
    for is_pair, is_causal in product((False, True), (False, True)):
        plain, others = _outcomes(trial, name, is_pair, is_causal)
        if any(outcome.output is None for outcome in plain) or fits_all(plain):
            continue  # this value raises, or has no effect
        options = plain[0].case.options
        text = f"with {name}={options[name]}, "
        for mixed in (each for each in dependences(trial, options) if "sequence" in each):  # heads may choose keys together
            return Check(id, FAILED, mixed), [finding("other-selection", WRONG, fault=text + mixed, witness="")]
        first, second, *rest = map(_meanings, [*plain, *others])
        if not first.keys() & second.keys():
            reason = f"{text}it hides keys neither like a window nor like top-k"
            continue
        meaning = max(sorted(first.keys() & second.keys()), key=lambda rule: sum(rule in rules for rules in rest))
        text += f"a query sees {first[meaning]}"
        if failed := [outcome.case for outcome, rules in zip(others, rest, strict=True) if meaning not in rules]:
            severity = FRAGILE if all(case.rows != case.keys for case in failed) else WRONG
            words = {"fault": f"{text}, but not always", "witness": f"seen in: {'; '.join(case.name for case in failed)}"}
            return Check(id, FAILED, words["witness"]), [finding("other-selection", severity, **words)]
        return Check(id, PASSED, text), []
    return Check(id, NOT_TRIED, reason), []


def _outcomes(trial: Trial, name: str, is_pair: bool, is_causal: bool) -> tuple[list[Outcome], list[Outcome]]:
    """The outcomes of the rows that find the meaning, and those of the other rows that do not raise."""
    outcomes = []
    for number, case in ROWS:
        options = {name: (number, 1) if is_pair else number}
        text = f"{case.name}, {name}={options[name]}"
        outcomes.append(trial.outcome(replace(case, name=text, options=options, is_causal=is_causal or case.is_causal)))
    return outcomes[:2], [outcome for outcome in outcomes[2:] if outcome.output is not None]


def _meanings(outcome: Outcome) -> dict[int, str]:
    """The rules that give this outcome: their places, and their words."""
    inputs, (value,) = outcome.inputs, outcome.case.options.values()
    fitting = {}
    for place, (words, seen) in enumerate(_rules(value, answer(inputs).weights, outcome.case.is_causal)):
        allowed = seen if inputs.allowed is None else seen & inputs.allowed
        if fits(replace(outcome, inputs=replace(inputs, allowed=allowed))):
            fitting[place] = words
    return fitting


def _rules(value: int | Sequence[int], weights: Tensor, is_causal: bool) -> Iterator[tuple[str, Tensor]]:
    """What the value may mean: words, and the keys that a query sees, bool, for weights (B, H, L, S) without the value."""
    L, S = weights.shape[-2:]
    distance = torch.arange(S - L, S)[:, None] - torch.arange(S)
    if isinstance(value, int):
        windows = [(before, after) for before in (value - 1, value, value - 2) for after in (0, S, before)]
        windows += [(before, 0) if is_causal else (value // 2, value // 2) for before in (value // 2, value - 1, value)]
        yield f"the {value} keys with its largest scores", weights >= weights.topk(min(value, S)).values[..., -1:]
    else:
        windows = [(value[0] + more, value[1] + more) for more in (0, -1, 1)]
    for before, after in windows:
        words = f"its own key, {before} before it and {'all' if after == S else after} after it"
        yield words, (distance <= before) & (distance >= -after)
