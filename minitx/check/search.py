"""Search for the way of calling and the mistakes that explain the results of an attention function or layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import combinations, product

import torch
from torch import Tensor

from minitx.check.experiments import BLIND, BLIND_MOVED, CAUSAL, DRAWS, EXPERIMENTS, SIMPLE, Experiment, Operands, Outcome
from minitx.check.mutants import DEFINITION, MUTANTS, Mutant, attention_in_steps, unchanged
from minitx.check.signatures import AXES_2, AXES_3, HEADS_FIRST, MaskForm
from minitx.check.subjects import NotTriedError, Subject, Way

Mistakes = tuple[Mutant, ...]

LOOSE = 1e-4
"""The tolerance of extreme experiments, and of float32, relative to the largest number."""

TIGHT = 2e-6
"""The tolerance of ordinary experiments in float64."""

MANY = 6
"""The number of ways of calling that are searched for two mistakes at once."""


@dataclass(frozen=True, eq=False)
class Tried:
    """All experiments in one way of calling.

    Attributes:
        outcomes: the outcomes of the experiments that were run.
        not_tried: the reasons why the other experiments were not run.
        is_causal: whether the attention hides later keys without a causal option.
        is_masked: whether a mask was passed, or there is no argument for one.
    """

    way: Way
    outcomes: dict[Experiment, Outcome]
    not_tried: dict[Experiment, NotTriedError]
    is_causal: bool = False
    is_masked: bool = True

    @property
    def ordinary(self) -> list[Outcome]:
        """Return the outcomes that any function gets right if it is correct in theory."""
        return [outcome for experiment, outcome in self.outcomes.items() if not experiment.is_extreme]

    @property
    def extreme(self) -> list[Outcome]:
        """Return the outcomes with large or low numbers, or with a query that sees nothing. Half precision is judged elsewhere."""
        chosen = (e for e in self.outcomes if e.is_extreme and e.dtype is None and e is not BLIND_MOVED)
        return [self.outcomes[experiment] for experiment in chosen]

    @property
    def oddity(self) -> tuple[bool, bool, int, int]:
        """Return a sort key: usual ways of calling, and ways in which nothing raises, come first."""
        is_hiding = self.way.form is not None and self.way.form.polarity == "hide"
        raising = sum(outcome.output is None for outcome in self.outcomes.values())
        return is_hiding, self.is_causal, raising, -len(self.outcomes)


class Expected:
    """Attention with mistakes: its output (None if it raises) and its gradients, which are computed when needed."""

    def __init__(self, inputs: Operands, mistakes: Mistakes, is_causal: bool) -> None:
        steps = replace(DEFINITION, **{name: step for mutant in mistakes for name, step in mutant.instead.items()})
        self._attention = partial(attention_in_steps, allowed=inputs.allowed, is_causal=is_causal, steps=steps)
        self._inputs = inputs
        self.output: Tensor | None = None
        with suppress(RuntimeError), torch.no_grad():
            self.output, _ = self._attention(*(tensor.double() for tensor in inputs.heads))

    @cached_property
    def gradients(self) -> tuple[Tensor, ...]:
        """Return the gradients of the sum of the squared output for query, key and value."""
        leaves = [tensor.detach().double().clone().requires_grad_() for tensor in self._inputs.heads]
        if self.output is not None:
            output, _ = self._attention(*leaves)
            if output.requires_grad:
                return torch.autograd.grad(output.square().sum(), leaves, allow_unused=True, materialize_grads=True)
        return tuple(torch.zeros_like(leaf) for leaf in leaves)

    @cached_property
    def size(self) -> float:
        """Return the largest number of the output."""
        return 1.0 if self.output is None else _largest(self.output)


_expected = lru_cache(maxsize=8192)(Expected)
"""``Expected``, remembered also between checks: a drawn input is the same object in all of them."""


@dataclass
class Judge:
    """Compares outcomes with ``attention_in_steps``, and remembers what fits."""

    dtype: torch.dtype
    known: dict[tuple[Outcome, Mistakes, bool], bool] = field(default_factory=dict)

    def answer(self, inputs: Operands, mistakes: Mistakes = (), is_causal: bool = False) -> Expected:
        """Return the result of attention with these mistakes."""
        is_causal = is_causal or inputs.is_causal
        return _expected(inputs, tuple(mutant for mutant in mistakes if _matters(mutant, inputs, is_causal)), is_causal)

    def fits(self, outcome: Outcome, mistakes: Mistakes = (), is_causal: bool = False) -> bool:
        """Return whether attention with these mistakes gives this outcome."""
        key = outcome, mistakes, is_causal
        if key not in self.known:
            self.known[key] = self._fits(*key)
        return self.known[key]

    def _is_loose(self, outcome: Outcome) -> bool:
        return outcome.experiment.is_extreme or self.dtype != torch.float64

    def fits_output(self, outcome: Outcome, mistakes: Mistakes = (), is_causal: bool = False) -> bool:
        """Return whether attention with these mistakes gives this output, whatever the gradients are."""
        expected = self.answer(outcome.inputs, mistakes, is_causal)
        if outcome.output is None or expected.output is None:
            return outcome.output is None and expected.output is None and outcome.fault.startswith("RuntimeError")
        return are_close(outcome.output, expected.output, self._is_loose(outcome), expected.size)

    def _fits(self, outcome: Outcome, mistakes: Mistakes, is_causal: bool) -> bool:
        if not self.fits_output(outcome, mistakes, is_causal):
            return False
        expected, is_loose = self.answer(outcome.inputs, mistakes, is_causal), self._is_loose(outcome)
        if (
            outcome.output is None
            or not outcome.has_inner_gradients
            or outcome.experiment.is_extreme
            or outcome.output.isnan().any()
        ):
            return True
        return all(are_close(got, want, is_loose) for got, want in zip(outcome.gradients, expected.gradients, strict=True))

    def fits_all(self, outcomes: Iterable[Outcome], mistakes: Mistakes = (), is_causal: bool = False) -> bool:
        """Return whether attention with these mistakes gives all outcomes."""
        return all(self.fits(outcome, mistakes, is_causal) for outcome in outcomes)

    def share(self, trial: Tried) -> tuple[float, float]:
        """Return the share of ordinary outcomes that are right, and the share whose output is, whatever the gradients are."""
        right = sum(self.fits(outcome, (), trial.is_causal) for outcome in trial.ordinary)
        outputs = sum(self.fits_output(outcome, (), trial.is_causal) for outcome in trial.ordinary)
        return right / len(trial.ordinary), outputs / len(trial.ordinary)


def _matters(mutant: Mutant, inputs: Operands, is_causal: bool) -> bool:
    """Whether a mistake can show with such inputs."""
    idle = set() if inputs.key.shape[1] < inputs.query.shape[1] else {"group"}
    idle |= set() if is_causal else {"causal"}
    idle |= set() if inputs.allowed is not None else {"mask"}
    if not is_causal and inputs.allowed is None:
        idle |= {"hide"} | ({"after"} if mutant.instead.get("after") is unchanged else set())
    return not set(mutant.instead) <= idle


def are_close(got: Tensor, want: Tensor, is_loose: bool = False, size: float | None = None) -> bool:
    """Return whether two results are equal up to rounding. NaN equals NaN. ``size`` is the largest number of ``want``."""
    if got.shape != want.shape:
        return False
    share = LOOSE if is_loose else TIGHT
    size = _largest(want) if size is None else size
    return torch.allclose(got.double(), want, rtol=share, atol=size * share, equal_nan=True)


def _largest(tensor: Tensor) -> float:
    return tensor.nan_to_num(posinf=0.0, neginf=0.0).abs().max().item() if tensor.numel() else 1.0


# --- ways of calling


def trials(subject: Subject, judge: Judge, forms: Sequence[MaskForm], faults: dict[str, None]) -> Iterator[Tried]:
    """Yield a trial for each way of calling that works. ``faults`` collects the reasons why others do not.

    If the plain experiment is right in one way, other orders of arguments and axes are not tried.
    """
    if unknown := subject.signature.unknown():
        faults[f"no value is known for {', '.join(unknown)}: add a default, or use a known name, such as mask"] = None
    for named in subject.ways():
        way = named
        unmasked = _tried(subject, way, [e for e in EXPERIMENTS if not e.mask])
        plain = unmasked.outcomes.get(SIMPLE)
        if plain is None or plain.output is None:
            faults[str(unmasked.not_tried[SIMPLE]) if plain is None else plain.fault] = None
            continue
        if (causal := subject.causal(way)) and unmasked.outcomes[CAUSAL].output is None:
            subject.refused[causal] = unmasked.outcomes[CAUSAL].fault
            way = replace(way, gives_causal=False)
            unmasked = _tried(subject, way, [e for e in EXPERIMENTS if not e.mask])
        masked = [] if subject.signature.mask is None else list(_masked(subject, way, unmasked, forms, faults))
        if not masked:
            hidden = _tried(subject, way, [e for e in EXPERIMENTS if e.mask])
            masked = [replace(_joined(way, unmasked, hidden), is_masked=subject.signature.mask is None)]
        for trial in masked:
            yield from _maybe_causal(subject, trial)
        if any(judge.fits(plain, (), is_causal) for is_causal in (False, True)):
            return


def _masked(subject: Subject, way: Way, unmasked: Tried, forms: Sequence[MaskForm], faults: dict[str, None]) -> Iterator[Tried]:
    """Yield a trial for each kind of mask that is accepted."""
    is_full = False  # a mask for each query of each sequence is accepted
    for masked_way in subject.mask_ways(way, tuple(forms)):
        if is_full and masked_way.mask_kind != "cells":
            return
        masked = _tried(subject, masked_way, [e for e in EXPERIMENTS if e.mask])
        ordinary = [outcome for e, outcome in masked.outcomes.items() if not e.is_extreme and not e.is_causal]
        faults.update({outcome.fault: None for outcome in ordinary if outcome.fault})
        if (
            ordinary
            and all(outcome.output is not None for outcome in ordinary)
            and _means_the_same(subject, masked_way, ordinary[0])
        ):
            causal = _tried(subject, masked_way, [e for e in EXPERIMENTS if not e.mask and e in unmasked.not_tried])
            is_full |= masked_way.mask_kind == "cells"
            yield _joined(masked_way, unmasked, causal, masked)


def _means_the_same(subject: Subject, way: Way, outcome: Outcome) -> bool:
    """Whether both masks of the form give the same output. A mask of 0 and -inf may hide by accident, as in (1 - mask) · 1e-9."""
    if way.form is None or way.form.again is None or outcome.output is None:
        return True
    other = subject.run(replace(way, form=replace(way.form, make=way.form.again)), outcome.experiment).output
    return other is not None and are_close(other, outcome.output.double())


def _tried(subject: Subject, way: Way, experiments: Iterable[Experiment]) -> Tried:
    outcomes: dict[Experiment, Outcome] = {}
    not_tried: dict[Experiment, NotTriedError] = {}
    for experiment in experiments:
        try:
            outcomes[experiment] = subject.run(way, experiment)
        except NotTriedError as reason:
            not_tried[experiment] = reason
    return Tried(way, outcomes, not_tried)


def _joined(way: Way, *parts: Tried) -> Tried:
    """Join the parts of one trial, in the order of the experiments. An optional experiment that raises counts as not tried."""
    outcomes = {e: part.outcomes[e] for e in EXPERIMENTS for part in parts if e in part.outcomes}
    not_tried = {e: reason for part in parts for e, reason in part.not_tried.items() if e not in outcomes}
    for experiment in [e for e in outcomes if e.stage == 0 and outcomes[e].output is None]:
        not_tried[experiment] = NotTriedError(f"it raises {outcomes.pop(experiment).fault}")
    return Tried(way, outcomes, not_tried)


def _maybe_causal(subject: Subject, trial: Tried) -> Iterator[Tried]:
    """Yield the trial, and a trial that assumes that the attention is always causal."""
    yield trial
    if subject.causal(trial.way) is None:
        always = _always_causal(subject, trial.way, [e for e in EXPERIMENTS if e.is_causal])
        yield replace(_joined(trial.way, trial, always), is_masked=trial.is_masked, is_causal=True)


def _always_causal(subject: Subject, way: Way, experiments: Iterable[Experiment]) -> Tried:
    """Run causal experiments without the causal option."""
    plain = {replace(e, is_causal=False): e for e in experiments}
    always = _tried(subject, way, plain)
    outcomes = {plain[e]: replace(outcome, experiment=plain[e]) for e, outcome in always.outcomes.items()}
    return Tried(way, outcomes, {plain[e]: reason for e, reason in always.not_tried.items()})


def with_draws(subject: Subject, trial: Tried) -> Tried:
    """Return the trial with other sizes and numbers."""
    run = _always_causal if trial.is_causal else _tried
    draws = run(subject, trial.way, DRAWS)
    for experiment in [e for e in DRAWS if e.batch > 1 or e.rows > SIMPLE.rows]:  # a refusal of this size
        if experiment in draws.outcomes and draws.outcomes[experiment].output is None:
            draws.not_tried[experiment] = NotTriedError(f"it raises {draws.outcomes.pop(experiment).fault}")
    return replace(trial, outcomes=trial.outcomes | draws.outcomes, not_tried=trial.not_tried | draws.not_tried)


# --- mistakes


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The way of calling, and the mistakes that explain all ordinary outcomes.

    Attributes:
        mistakes: () if everything is right. None: no known mistakes explain the outcomes.
        others: other mistakes that give the same numbers.
        wide: a trial with heads that was wrong, if the attention is right only for inputs with fewer axes.
    """

    trial: Tried
    mistakes: Mistakes | None
    others: tuple[Mistakes, ...] = ()
    wide: Tried | None = None


def diagnose(judge: Judge, trials: Iterable[Tried]) -> Diagnosis | None:
    """Return the diagnosis with the fewest mistakes, or None without trials."""
    tried: list[Tried] = []
    for trial in trials:
        tried.append(trial)
        if trial.is_masked and judge.fits_all(trial.ordinary, (), trial.is_causal):
            return Diagnosis(trial, (), wide=_with_heads(trial, tried))
    if not tried:
        return None
    diagnosis = _best(judge, tried)
    return replace(diagnosis, wide=_with_heads(diagnosis.trial, tried))


def _with_heads(chosen: Tried, tried: Sequence[Tried]) -> Tried | None:
    """The trial with an axis of heads, if the chosen one has none."""
    if chosen.way.layout not in (AXES_2, AXES_3):
        return None
    return next((trial for trial in tried if trial.way.layout is HEADS_FIRST), None)


def _best(judge: Judge, tried: list[Tried]) -> Diagnosis:
    """The diagnosis with the fewest mistakes, if no trial is right."""
    if any(trial.is_masked for trial in tried):
        tried = [trial for trial in tried if trial.is_masked]
    tried.sort(key=lambda trial: (*(-share for share in judge.share(trial)), trial.oddity))
    if judge.fits_all(tried[0].ordinary, (), tried[0].is_causal):
        return Diagnosis(tried[0], ())
    searches = ((tried, _single()), (tried[:MANY], _pairs()))
    for (candidates, possible), is_strict in product(searches, (True, False)):
        explained = [(trial, m) for trial in candidates for m in _explaining(judge, possible, trial, is_strict)]
        if explained:
            best = min(explained, key=lambda entry: (entry[0].oddity, -_hits(judge, entry[1], entry[0]), _gravity(entry[1])))
            hits = _hits(judge, best[1], best[0])
            rest = [mistakes for trial, mistakes in explained if trial is best[0] and mistakes is not best[1]]
            others = tuple(mistakes for mistakes in rest if _hits(judge, mistakes, best[0]) == hits)
            return Diagnosis(*best, others)
    return Diagnosis(tried[0], None)


def _single() -> list[Mistakes]:
    return [(mutant,) for mutant in MUTANTS]


def _pairs() -> list[Mistakes]:
    """Pairs of mistakes in different steps, in the order of ``MUTANTS``."""
    return [pair for pair in combinations(MUTANTS, 2) if not set(pair[0].instead) & set(pair[1].instead)]


def _explaining(judge: Judge, possible: Iterable[Mistakes], trial: Tried, is_strict: bool) -> list[Mistakes]:
    """The mistakes that give all ordinary outcomes, or all but those that raise, if ``is_strict`` is False and one raises.

    Wrong outcomes are compared first, because they exclude most mistakes.
    """
    chosen = trial.ordinary if is_strict else [outcome for outcome in trial.ordinary if outcome.output is not None]
    if not is_strict and (len(chosen) == len(trial.ordinary) or judge.fits_all(chosen, (), trial.is_causal)):
        return []
    ordered = sorted(chosen, key=lambda outcome: judge.fits(outcome, (), trial.is_causal))
    sensible = (m for m in possible if not (trial.is_causal and any(mutant.name == "causal ignored" for mutant in m)))
    return [mistakes for mistakes in sensible if judge.fits_all(ordered, mistakes, trial.is_causal)]


def _gravity(mistakes: Mistakes) -> int:
    return sum(not mutant.is_extreme for mutant in mistakes)


def _hits(judge: Judge, mistakes: Mistakes, trial: Tried) -> int:
    """The number of extreme outcomes that the mistakes also explain."""
    return sum(judge.fits(outcome, mistakes, trial.is_causal) for outcome in trial.extreme)


def further_mistakes(judge: Judge, trial: Tried, mistakes: Mistakes) -> Mistakes:
    """Return the mistakes in other steps that explain the extreme outcomes, or as many of them as possible."""
    failed = [o for o in trial.extreme if not passes(judge, trial, o) and not judge.fits(o, mistakes, trial.is_causal)]
    if not failed:
        return ()
    taken = {step for mutant in mistakes for step in mutant.instead}
    mild = [mutant for mutant in MUTANTS if mutant.is_extreme and not taken & set(mutant.instead)]
    more: list[Mistakes] = [(mutant,) for mutant in mild]
    more += [pair for pair in combinations(mild, 2) if not set(pair[0].instead) & set(pair[1].instead)]
    more = [m for m in more if judge.fits_all(trial.ordinary, mistakes + m, trial.is_causal)]
    hits = [sum(judge.fits(o, mistakes + m, trial.is_causal) for o in failed) for m in more]
    kept = [sum(judge.fits(o, mistakes + m, trial.is_causal) for o in trial.extreme) for m in more]
    best = max(zip(hits, kept, strict=True), default=(0, 0))
    return more[list(zip(hits, kept, strict=True)).index(best)] if best[0] else ()


def passes(judge: Judge, trial: Tried, outcome: Outcome) -> bool:
    """Return whether an outcome is right. A query that sees nothing may get any finite output that hidden values do not change."""
    if outcome.experiment is BLIND:
        return outcome.output is not None and bool(outcome.output.isfinite().all()) and not is_moved(trial)
    return judge.fits(outcome, (), trial.is_causal)


def is_moved(trial: Tried) -> bool:
    """Return whether hidden values change the output of a query that sees nothing."""
    pair = [trial.outcomes[e].output if e in trial.outcomes else None for e in (BLIND, BLIND_MOVED)]
    allowed = trial.outcomes[BLIND].inputs.allowed if BLIND in trial.outcomes else None
    if pair[0] is None or pair[1] is None or allowed is None:
        return False
    blind = ~allowed.any(-1)[:, 0]  # (B, L)
    still, moved = (output.transpose(1, 2)[blind] for output in pair if output is not None)
    return not are_close(moved, still.double(), is_loose=True)
