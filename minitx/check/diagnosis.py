"""Search for the way of calling and the mistakes that explain the results of an attention function or layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import combinations, product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from minitx.check.calling import QKV, NotTriedError
from minitx.check.cases import BLIND, BLIND_MOVED, CASES, CAUSAL, OTHERS, SIMPLE, Case, Operands, Outcome, results_of
from minitx.check.layers_and_functions import AXES_2, AXES_3, HEADS_FIRST, Subject, Way
from minitx.check.mutants import DEFINITION, MUTANTS, Mutant, attention_in_steps

Mistakes = tuple[Mutant, ...]

LOOSE = 1e-4
"""The tolerance of extreme cases, and of float32, relative to the largest number."""

TIGHT = 2e-6
"""The tolerance of ordinary cases in float64."""

NO_SCORES = Case("other queries and keys", low=0.0)

NONE = 1e-9
"""The weight, as a share of the largest of its query, of a key that is hidden."""

CHANGED_VALUES = (
    "its weights are those of the definition, but it multiplies or changes each value or output by itself, as a gate does"
)

MANY = 6
"""The number of ways of calling that are searched for two mistakes at once."""


class Trial:
    """The cases in one way of calling, and the mistakes that explain their outcomes.

    Attributes:
        is_causal: whether the attention is taken to hide later keys without a causal option.
        is_masked: whether a mask was passed, or there is no argument for one.
        outcomes: the outcomes of the cases that were run. not_tried: the reasons why others were not run.
        mistakes: () if everything is right. None: no known mistakes explain the outcomes, or none were searched for.
        others: other mistakes that give the same numbers.
        wide: a trial with heads that was wrong, if the attention is right only for inputs with fewer axes.
    """

    def __init__(self, subject: Subject, way: Way, is_causal: bool = False, is_masked: bool = True) -> None:
        self.subject, self.way, self.is_causal, self.is_masked = subject, way, is_causal, is_masked
        self.outcomes: dict[Case, Outcome] = {}
        self.not_tried: dict[Case, NotTriedError] = {}
        self.mistakes: Mistakes | None = None
        self.others: list[Mistakes] = []
        self.wide: Trial | None = None
        self.run(CASES)

    def run(self, cases: Iterable[Case]) -> None:
        """Run cases."""
        for case in cases:
            outcome = self.outcome(case)
            refusal = outcome.refusal
            is_optional = not case.stage and (case.batch > 1 or case.rows > SIMPLE.rows)  # in no stage, and not small
            if outcome.output is None and is_optional and refusal is None:
                refusal = NotTriedError(f"it raises {outcome.fault}")
            if refusal is None:
                self.outcomes[case] = outcome
            else:
                self.not_tried[case] = refusal

    def outcome(self, case: Case) -> Outcome:
        """Run one case in this way."""
        outcome = self.subject.outcome(self.way, case, is_always_causal=self.is_causal)
        return replace(outcome, case=case, inputs=outcome.inputs.always_causal if self.is_causal else outcome.inputs)

    @property
    def ordinary(self) -> list[Outcome]:
        """Return the outcomes that any function gets right if it is correct in theory."""
        return [outcome for case, outcome in self.outcomes.items() if not case.is_extreme]

    @property
    def extreme(self) -> list[Outcome]:
        """Return the outcomes with large or low numbers, or with a query that sees nothing. Half precision is judged elsewhere."""
        return [o for case, o in self.outcomes.items() if case.is_extreme and not case.dtypes and case is not BLIND_MOVED]

    @property
    def is_right(self) -> bool:
        """Return whether all ordinary outcomes are those of the definition."""
        return fits_all(self.ordinary)

    @property
    def oddity(self) -> tuple[bool, bool, int, int]:
        """Return a sort key: usual ways of calling, and ways that raise no error, come first."""
        is_hiding = self.way.form is not None and self.way.form.hides
        raising = sum(outcome.output is None for outcome in self.outcomes.values())
        return is_hiding, self.is_causal, raising, -len(self.outcomes)

    def passes(self, outcome: Outcome) -> bool:
        """Return whether an outcome is right. A query that sees nothing may get any finite output that hidden values do not change."""
        return outcome.is_finite and not self.is_moved if outcome.case is BLIND else fits(outcome)

    @property
    def is_moved(self) -> bool:
        """Return whether hidden values change the output of a query that sees nothing."""
        outcomes = [self.outcomes[case] for case in (BLIND, BLIND_MOVED) if case in self.outcomes]
        pair = [(outcome.output, outcome.inputs.allowed) for outcome in outcomes]
        parts = [x.transpose(1, 2)[~allowed.any(-1)[:, 0]] for x, allowed in pair if x is not None and allowed is not None]
        return len(parts) == 2 and not are_close(parts[1], parts[0].double(), is_loose=True)


class Expected:
    """Attention with mistakes: its output (None if it raises) and its gradients, computed when needed."""

    def __init__(self, inputs: Operands, mistakes: Mistakes = ()) -> None:
        steps = replace(DEFINITION, **{name: step for mutant in mistakes for name, step in mutant.instead.items()})
        self._attention = partial(attention_in_steps, allowed=inputs.allowed, is_causal=inputs.is_causal, steps=steps)
        self._inputs = inputs
        self.output: Tensor | None = None
        self.weights = torch.empty(0)
        with suppress(RuntimeError), torch.no_grad():
            self.output, self.weights = self._attention(*(tensor.double() for tensor in inputs.heads))

    @cached_property
    def gradients(self) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value for the cotangent."""
        leaves = {role: x.detach().double().clone().requires_grad_() for role, x in zip(QKV, self._inputs.heads, strict=True)}
        results = {} if self.output is None else results_of(self._attention(*leaves.values()), leaves, self._inputs.cotangent)
        return tuple(results.get(f"gradient of {role}", torch.zeros_like(leaf)) for role, leaf in leaves.items())


answer = lru_cache(maxsize=8192)(Expected)
"""``Expected``, remembered also between checks: a drawn input is the same object in all of them."""


def fits(outcome: Outcome, mistakes: Mistakes = ()) -> bool:
    """Return whether attention with these mistakes gives this outcome."""
    return fits_output(outcome, mistakes) and _fits_gradients(outcome, mistakes)


def fits_output(outcome: Outcome, mistakes: Mistakes = ()) -> bool:
    """Return whether attention with these mistakes gives this output, whatever the gradients are."""
    expected = answer(outcome.inputs, mistakes)
    if outcome.output is None or expected.output is None:
        return outcome.output is None and expected.output is None and outcome.fault.startswith("RuntimeError")
    return are_close(outcome.output, expected.output, outcome.is_loose)


def _fits_gradients(outcome: Outcome, mistakes: Mistakes) -> bool:
    if outcome.output is None or not outcome.has_inner_gradients or outcome.case.is_extreme or outcome.output.isnan().any():
        return True
    pairs = zip(outcome.gradients, answer(outcome.inputs, mistakes).gradients, strict=True)
    return all(are_close(got, want, outcome.is_loose) for got, want in pairs)


def fits_all(outcomes: Iterable[Outcome], mistakes: Mistakes = ()) -> bool:
    """Return whether attention with these mistakes gives all outcomes."""
    return all(fits(outcome, mistakes) for outcome in outcomes)


def are_close(got: Tensor, want: Tensor, is_loose: bool = False) -> bool:
    """Return whether two results are equal up to rounding, relative to the largest number of ``want``. NaN equals NaN."""
    if got.shape != want.shape or not want.numel():
        return got.shape == want.shape
    share = LOOSE if is_loose else TIGHT
    size = want.nan_to_num(posinf=0.0, neginf=0.0).abs().max().item()
    return torch.allclose(got.double(), want, rtol=share, atol=size * share, equal_nan=True)


# --- ways of calling


def trials(subject: Subject, meaning: str | None, faults: dict[str, None]) -> Iterator[Trial]:
    """Yield a trial for each way of calling that works. ``faults`` collects the reasons why others do not.

    If the plain case is right in one way, other orders of arguments and axes are not tried. A way with guesses must be right.
    """
    for way in subject.ways():
        plain = subject.outcome(way, SIMPLE)
        is_right = any(fits(replace(plain, inputs=inputs)) for inputs in (plain.inputs, plain.inputs.always_causal))
        if plain.output is None or (way.guessed and not is_right):
            faults[plain.fault or f"no value is known for {', '.join(way.guessed)}: add a default"] = None
            continue
        way = _with_causal(subject, way)
        masked = list(_masked(subject, way, meaning, faults))
        is_masked = bool(masked) or way.mask is None
        for chosen in masked or [way]:
            yield Trial(subject, chosen, is_masked=is_masked)
            if chosen.causal is None:
                yield Trial(subject, chosen, is_causal=True, is_masked=is_masked)
        if is_right:
            return


def _with_causal(subject: Subject, way: Way) -> Way:
    """The way without a causal option that raises, or with an option that is causal, though its name does not show it."""
    if way.causal is not None:
        outcome = subject.outcome(way, CAUSAL)
        if outcome.output is None:
            subject.refused[way.causal] = outcome.fault
        return way if outcome.output is not None else replace(way, causal=None)
    options = [name for name in subject.without_role() if subject.arguments.defaults[name] is False]
    causal = (replace(way, causal=name) for name in options)
    return next((other for other in causal if fits(subject.outcome(other, CAUSAL))), way)


def _masked(subject: Subject, way: Way, meaning: str | None, faults: dict[str, None]) -> Iterator[Way]:
    """Yield a way for each form of a mask that is accepted. A mask whose name does not show it must be right."""
    is_full = False  # a mask for each query of each sequence is accepted
    ordinary = [case for case in CASES if case.mask and not case.is_extreme and not case.is_causal]
    for masked in subject.mask_ways(way, meaning):
        if is_full and masked.kind != "cells":
            return
        outcomes = [outcome for case in ordinary if (outcome := subject.outcome(masked, case)).refusal is None]
        raised = {outcome.fault: None for outcome in outcomes if outcome.output is None}
        faults.update(raised if subject.mask else {})
        is_accepted = bool(outcomes) and not raised and _means_the_same(subject, masked, outcomes[0])
        if is_accepted and (masked.mask == subject.mask or fits_all(outcomes)):
            is_full |= masked.kind == "cells"
            yield masked


def _means_the_same(subject: Subject, way: Way, outcome: Outcome) -> bool:
    """Whether -1e9 instead of -inf gives the same output. A mask of 0 and -inf may hide by accident, as in (1 - mask) · 1e-9."""
    if way.form is None or way.form.added is None or outcome.output is None:
        return True
    other = subject.outcome(replace(way, form=replace(way.form, added=-1e9)), outcome.case).output
    return other is not None and are_close(other, outcome.output.double())


# --- mistakes


def diagnose(trials: Iterable[Trial]) -> Trial | None:
    """Return the trial with the fewest mistakes, or None without trials."""
    tried: list[Trial] = []
    for trial in trials:
        tried.append(trial)
        if trial.is_masked and trial.is_right:
            trial.mistakes = ()
            break
    else:
        if not tried:
            return None
        trial = _best(tried)
    has_few_axes = trial.way.layout in (AXES_2, AXES_3)
    trial.wide = next((t for t in tried if has_few_axes and t.way.layout is HEADS_FIRST), None)
    return trial


def _best(tried: list[Trial]) -> Trial:
    """The trial with the fewest mistakes, if none is right."""

    def share(trial: Trial, is_right: Callable[[Outcome], bool]) -> float:
        return sum(map(is_right, trial.ordinary)) / len(trial.ordinary)

    tried = [trial for trial in tried if trial.is_masked] or tried
    tried = sorted(tried, key=lambda t: (-share(t, fits), -share(t, fits_output), t.oddity))
    if tried[0].is_right:
        tried[0].mistakes = ()
        return tried[0]
    for count, is_strict in product((1, 2), (True, False)):
        candidates, possible = tried[: MANY if count > 1 else None], _of_different_steps(MUTANTS, count)
        explained = [(trial, m) for trial in candidates for m in _explaining(possible, trial, is_strict)]
        if explained:
            hits = {entry: sum(fits(o, entry[1]) for o in entry[0].extreme) for entry in explained}
            best = min(explained, key=lambda entry: (entry[0].oddity, -hits[entry], sum(not m.is_extreme for m in entry[1])))
            equal = [mistakes for trial, mistakes in explained if trial is best[0] and hits[trial, mistakes] == hits[best]]
            best[0].mistakes = best[1]
            best[0].others = [mistakes for mistakes in equal if mistakes is not best[1]]
            return best[0]
    return tried[0]


def _of_different_steps(mutants: Sequence[Mutant], count: int) -> list[Mistakes]:
    """Mistakes, or pairs of mistakes, in different steps, in the order of ``MUTANTS``."""
    chosen = combinations(mutants, count)
    return [several for several in chosen if count == 1 or not set(several[0].instead) & set(several[1].instead)]


def _explaining(possible: Iterable[Mistakes], trial: Trial, is_strict: bool) -> list[Mistakes]:
    """The mistakes that give all ordinary outcomes, or all but those that raise, if ``is_strict`` is False and one raises.

    Wrong outcomes are compared first, because they exclude most mistakes.
    """
    chosen = trial.ordinary if is_strict else [outcome for outcome in trial.ordinary if outcome.output is not None]
    if not is_strict and (len(chosen) == len(trial.ordinary) or fits_all(chosen)):
        return []
    ordered = sorted(chosen, key=fits)
    # attention that is taken to be causal ignores no option, and a layer may have its own norm
    norms = ["cosine of query and key", "cosine without scale"]
    senseless = [*["causal ignored"] * trial.is_causal, *norms * trial.subject.is_layer]
    sensible = (m for m in possible if not any(mutant.name in senseless for mutant in m))
    return [mistakes for mistakes in sensible if fits_all(ordered, mistakes)]


def further_mistakes(trial: Trial, mistakes: Mistakes) -> Mistakes:
    """Return the mistakes in other steps that explain the extreme outcomes, or as many of them as possible."""
    failed = [o for o in trial.extreme if not trial.passes(o) and not fits(o, mistakes)]
    taken = {step for mutant in mistakes for step in mutant.instead}
    mild = [mutant for mutant in MUTANTS if mutant.is_extreme and not taken & set(mutant.instead)] if failed else []
    best, chosen = (0, 0), Mistakes()
    for more in _of_different_steps(mild, 1) + _of_different_steps(mild, 2):
        hits = (sum(fits(o, mistakes + more) for o in failed), sum(fits(o, mistakes + more) for o in trial.extreme))
        if hits[0] and hits > best and fits_all(trial.ordinary, mistakes + more):
            best, chosen = hits, more
    return chosen


# --- more than the definition


def beyond(trial: Trial) -> str:
    """Return what the attention does beyond the definition, or an empty string: nothing that its weights show, or a mistake.

    The weights are computed from the outputs and the values. They show more than the definition if the output of a query is a mean of
    its own values, and neither the definition nor scores times a factor give these weights. If the plain case is right,
    they can show a window.
    """
    plain = [o for o in trial.ordinary if not (o.case.mask or o.case.is_causal)]
    failed = next((outcome for outcome in plain if not fits(outcome)), None)
    if failed is None or dependences(trial):
        return ""
    failed = _determined(trial, failed)
    case, weights, right = failed.case, _weights(failed), answer(failed.inputs).weights
    if weights is None and failed.case.id == SIMPLE.id and _changes_values(trial):
        return CHANGED_VALUES
    if weights is None or are_close(weights, right) or weights[right == 0].abs().gt(TIGHT).any():
        return ""
    totals, visible = weights.sum(-1, keepdim=True), (weights.abs() > NONE * weights.abs().amax(-1, keepdim=True)) & (right > 0)
    square = visible[0, ..., case.keys - case.rows :]
    is_window = bool((visible == visible[0]).all() and square.diagonal(0, -2, -1).all())  # each query sees its own key
    is_window &= not square.triu(1).any() or torch.equal(square, square.mT)
    count, hidden = visible.sum(-1), right.masked_fill(visible, 0.0)
    is_top_k = bool((count == (right > 0).sum(-1).clamp(max=count.max())).all())
    is_top_k &= bool((hidden.amax(-1) < right.where(visible, 1.0).amin(-1)).all())
    if (is_window or is_top_k) and are_close(weights, right * visible / (right * visible).sum(-1, keepdim=True)):
        return f"before the softmax, it hides keys by itself, as {'a window' if is_window else 'top-k'} does"
    if failed.case.id != SIMPLE.id or not (weights.abs().sum(-1) > LOOSE).all():
        return ""
    if (weights[visible] < 0).any() or not (are_close(totals, torch.ones_like(totals)) or are_close(weights, right * totals)):
        return "its outputs are not softmax weights times its values: weights do not add up to 1 or are negative, or it changes the values"
    if are_close(weights, right * totals):
        is_sink = bool((totals < 1).all())
        return (
            "its softmax has a sink: its weights add up to less than 1" if is_sink else CHANGED_VALUES * _changes_values(trial)
        )
    logits, expected = (_centred(x.log(), visible) for x in (weights, right))
    if are_close(logits, expected * (logits * expected).sum() / expected.square().sum()):
        return ""
    if are_close(logits - expected, (logits - expected)[:1].expand_as(logits)):
        return "before the softmax, it adds a number that depends on the places, as ALiBi does"
    return "before the softmax, it changes queries, keys or scores, as a norm, positions or a soft-cap do"


def _changes_values(trial: Trial) -> bool:
    """Whether the outputs are the definition's times a gate, or for other values. No other token moves the gate or value of a token.

    The other values of a function do not depend on queries and keys either.
    """

    def changed(case: Case) -> tuple[Tensor, Tensor]:
        """The gates and the other values."""
        outcome = trial.outcome(case)
        expected = answer(outcome.inputs)
        output, right = (torch.empty(0) if x is None else x.double() for x in (outcome.output, expected.output))
        return output / right, torch.linalg.solve(expected.weights, output)

    def are_equal(got: Tensor, want: Tensor, end: int | None = -1) -> bool:
        return are_close(got[..., :end, :], want[..., :end, :], is_loose=True)

    with suppress(RuntimeError):  # singular weights, or another shape
        (gates, values), (other_gates, other_values) = map(changed, (SIMPLE, OTHERS["token"]))
        is_own = are_equal(other_values, values) and not are_equal(other_values, values, None)
        is_own = is_own and (trial.subject.is_layer or are_equal(changed(NO_SCORES)[1], values, None))
        return is_own or are_equal(other_gates, gates)
    return False


def sums(trial: Trial) -> tuple[Tensor | None, str]:
    """Return the sum of the weights of each query, and over what else they add up to 1. None: the sums are unknown."""
    weights = _weights(_determined(trial, trial.outcomes[SIMPLE]))
    weights = answer(trial.outcomes[SIMPLE].inputs).weights if weights is None and _changes_values(trial) else weights
    over: dict[str, Any] = {"the queries": -2, "the heads": 1, "the batch": 0, "all scores": (-2, -1)}
    totals = {} if weights is None else {name: weights.sum(axis) for name, axis in over.items()}
    other = next((name for name, total in totals.items() if are_close(total, torch.ones_like(total))), "")
    if weights is None or trial.subject.is_layer:
        return None if weights is None else weights.sum(-1), other
    output = trial.outcome(replace(SIMPLE, name="values of 1", judged=("spread",))).output  # it may change other values
    is_sum = output is not None and are_close(output, output[..., :1].expand_as(output).double())
    return output if is_sum else None, other


def _determined(trial: Trial, outcome: Outcome) -> Outcome:
    """The outcome, or a similar one with as few keys as the values are wide: with more, the values do not determine the weights."""
    case, width = outcome.case, outcome.inputs.value.shape[-1]
    if case.keys <= width:
        return outcome
    return trial.outcome(
        replace(case, rows=width, keys=width) if trial.subject.is_layer else replace(case, value_width=case.keys)
    )


def _weights(outcome: Outcome) -> Tensor | None:
    """The weights (B, H, L, S) whose means of the values are the output, or None if there are none."""
    if outcome.output is None or outcome.output.shape[-1] != outcome.inputs.value.shape[-1]:
        return None
    value, output = outcome.inputs.value.double(), outcome.output.double()
    value = value.repeat_interleave(output.shape[1] // value.shape[1], dim=1)
    weights = output @ torch.linalg.pinv(value)
    return weights if are_close(weights @ value, output) else None


def dependences(trial: Trial, options: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """Return sentences about forbidden dependences of the output. ``options``: further arguments."""
    sentences = []
    for part, others, rest in (("sequence", "the first sequence", 0), ("head", "the other heads", (slice(None), slice(-1)))):
        cases = [replace(case, name=f"{case.name} {options}", options=options) for case in (SIMPLE, OTHERS[part])]
        first, again = (None if trial.subject.is_layer else trial.outcome(case).output for case in cases)
        if first is not None and again is not None and not are_close(again[rest], first[rest].double(), is_loose=True):
            sentences.append(f"the {OTHERS[part].name} changes the output of {others}")
    return sentences


def _centred(logits: Tensor, visible: Tensor) -> Tensor:
    """The logits less their mean in each row, and 0 where a key is hidden."""
    mean = logits.masked_fill(~visible, 0.0).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
    return (logits - mean).masked_fill(~visible, 0.0)
