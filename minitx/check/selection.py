"""Arguments that choose the keys of a query: a window, or the number of its largest scores. Their meaning is found by trying.

A value is tried in two plain rows. If keys are hidden as a rule says, the rule is the definition in all other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from minitx.check.cases import Case, Outcome
from minitx.check.findings import finding
from minitx.check.results import FAILED, FRAGILE, NOT_TRIED, PASSED, WRONG, Check, Finding
from minitx.check.search import Judge, Trial, dependences

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


def check_selection(judge: Judge, trial: Trial, name: str) -> tuple[Check, str, Finding | None]:
    """Check one argument of a trial that is right without it. Return its check, its meaning in words, and a finding, if any."""
    id, reason = f"argument {name}", "no case uses it"
    for is_pair, is_causal in product((False, True), (False, True)):
        rows = [(n, replace(case, is_causal=case.is_causal or is_causal)) for n, case in ROWS]
        plain = [_outcome(trial, name, (n, 1) if is_pair else n, case) for n, case in rows[:2]]
        if any(outcome.output is None for outcome in plain) or judge.fits_all(plain):
            continue  # this value raises, or has no effect
        ((_, value),) = plain[0].case.options.items()
        with_value = f"with {name}={value}, "
        if mixed := dependences(trial, plain[0].case.options):
            return Check(id, FAILED, mixed[0]), "", finding("other-selection", WRONG, fault=with_value + mixed[0], witness="")
        meanings = set.intersection(*(_meanings(judge, outcome) for outcome in plain))
        if not meanings:
            reason = with_value + "it hides keys neither as a window nor as top-k do"
            continue
        others = [_outcome(trial, name, (n, 1) if is_pair else n, case) for n, case in rows[2:]]
        others = [outcome for outcome in others if outcome.output is not None]
        fitting = [_meanings(judge, outcome) for outcome in others]
        meaning = max(sorted(meanings), key=lambda rule: sum(rule in rules for rules in fitting))
        text = f"{with_value}a query sees {_rules(value, torch.ones(1, 1, 7, 7))[meaning][0]}"
        failed = [outcome.case for outcome, rules in zip(others, fitting, strict=True) if meaning not in rules]
        if not failed:
            return Check(id, PASSED), text, None
        severity = FRAGILE if all(case.rows != case.keys for case in failed) else WRONG
        witness = f"seen in: {', '.join(case.name for case in failed)}"
        return (
            Check(id, FAILED, witness),
            text,
            finding("other-selection", severity, fault=f"{text}, but not always", witness=witness),
        )
    return Check(id, NOT_TRIED, reason), "", None


def _outcome(trial: Trial, name: str, value: Any, case: Case) -> Outcome:
    return trial.outcome(replace(case, name=f"{case.name}, {name}={value}", options={name: value}))


def _meanings(judge: Judge, outcome: Outcome) -> set[int]:
    """The places of the rules that give this outcome."""
    inputs, ((_, value),) = outcome.inputs, outcome.case.options.items()
    masks = [
        seen if inputs.allowed is None else seen & inputs.allowed for _, seen in _rules(value, judge.answer(inputs).weights)
    ]
    return {n for n, allowed in enumerate(masks) if judge.fits(replace(outcome, inputs=replace(inputs, allowed=allowed)))}


def _rules(value: int | Sequence[int], weights: Tensor) -> list[tuple[str, Tensor]]:
    """What the value may mean: words, and the keys that a query sees, bool, for weights (B, H, L, S) without the value."""
    L, S = weights.shape[-2:]
    distance = torch.arange(S - L, S)[:, None] - torch.arange(S)
    if isinstance(value, int):
        befores = (value - 1, value, value - 2)
        windows = [(before, after) for before in befores for after in (0, S, before)] + [(value // 2, value // 2)]
        largest = [(f"the {value} keys with its largest scores", weights >= weights.topk(min(value, S)).values[..., -1:])]
    else:
        windows, largest = [(value[0] + more, value[1] + more) for more in (0, -1, 1)], []
    words = (f"its own key, {before} before it and {'all' if after == S else after} after it" for before, after in windows)
    return [*((text, (distance <= n) & (distance >= -m)) for text, (n, m) in zip(words, windows, strict=True)), *largest]
