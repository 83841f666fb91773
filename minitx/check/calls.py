"""``check_attention`` compares an attention function or layer with the definition, and names the mistake.

>>> def attention(q, k, v):
...     return (q @ k.mT).softmax(-1) @ v
>>> report = check_attention(attention)
>>> report.mend_first.fault, report.mend_first.advice
('no scale', 'Divide the scores by √d_k.')
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from minitx.check import strict as kernels
from minitx.check.copying import copied
from minitx.check.experiments import BLIND, BLIND_MOVED, DRAWS, EXPERIMENTS, HALF, OTHERS, SIMPLE, Experiment, Operands, Outcome
from minitx.check.mutants import MUTANTS, Mutant
from minitx.check.reference import dtype_name, naive_attention, tolerance
from minitx.check.results import Check, Finding, Report, Severity, Status
from minitx.check.search import (
    Diagnosis,
    Expected,
    Judge,
    Mistakes,
    Tried,
    are_close,
    diagnose,
    further_mistakes,
    is_moved,
    passes,
    trials,
    with_draws,
)
from minitx.check.signatures import chosen_forms, instance_of, read_signature
from minitx.check.subjects import RETURNS, AttentionLayer, DoesNotApplyError, Function, Subject, Way

EXERCISE_STAGES = (1, 2, 3, 4, 5)
"""The stages of a graded exercise: plain; masks; queries without a visible key; wide values and causal; half precision and large scores."""

BLIND_GRADIENT = "gradients-where-a-query-sees-nothing"


def check_attention(
    function: Any,
    *,
    strict: bool = False,
    stage: int | None = None,
    mask: Literal["keep", "hide"] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> Report:
    """Find mistakes in a function or layer that computes attention.

    The way to call it is found by trying: the roles and the order of the arguments, the order of axes, the form of the mask, and the
    form of the result. The results are compared with the definition in float64. A mistake is named if one or two mutants of
    ``minitx.check.mutants`` give the same numbers.

    Args:
        function: a function of queries, keys and values, a module with projections, or a class of such objects.
        strict: check a kernel with the parameters of ``scaled_dot_product_attention`` in every case of ``minitx.check.strict``.
        stage: grade one stage of the exercise, from 1 to 5. A check that cannot be tried earns no point.
        mask: the meaning of True in the mask, "keep" or "hide". Default: the meaning that fits the results.
        seed: the seed of the random inputs. ``strict`` always draws the same inputs.
        device: the device of the inputs. dtype: the dtype of the inputs, float64 or float32.

    Returns:
        A report. Its ``exit_code`` is 1 if something is wrong.

    Raises:
        ValueError, TypeError: an argument is out of range, or ``function`` does not compute attention.
    """
    if stage is not None and stage not in EXERCISE_STAGES:
        raise ValueError(f"stage={stage} must be one of {', '.join(map(str, EXERCISE_STAGES))}")
    if mask not in (None, "keep", "hide"):
        raise ValueError(f"mask={mask} must be keep or hide")
    if strict and stage is not None:
        raise ValueError("strict and stage cannot be combined: strict checks all cases")
    name = getattr(function, "__name__", type(function).__name__)
    if strict:
        checks = kernels.check_cases(function, device=device)
        return Report(name, f"{name}(query, key, value, ...)", seed, tuple(checks), tuple(kernels.findings_of(checks)))
    made = ""
    if inspect.isclass(function):
        function, made = instance_of(function)
    subject = make_subject(function, device, dtype, seed)
    report = _Examination(subject, mask, stage, name, made).report()
    if dtype == torch.float64 and (not report.called_as or _has_infinity(report)):  # it may create float32 tensors
        narrow = _Examination(make_subject(function, device, torch.float32, seed), mask, stage, name, made).report()
        is_better = len(narrow.with_status(Status.FAILED)) < len(report.with_status(Status.FAILED))
        return narrow if narrow.called_as and (is_better or not report.called_as) else report
    return report


def _has_infinity(report: Report) -> bool:
    return any(check.size == torch.inf for check in report.with_status(Status.FAILED))


def make_subject(function: Any, device: torch.device | str, dtype: torch.dtype, seed: int) -> Subject:
    """Return the function or layer with its arguments read.

    Raises:
        ValueError, TypeError: ``function`` does not compute attention. The message explains why.
    """
    kind = type(function).__name__
    if isinstance(function, nn.Module):
        embedding = next((name for name, module in function.named_modules() if isinstance(module, nn.Embedding)), None)
        if embedding is not None:
            raise ValueError(
                f"{kind} is a model with the embedding {embedding}, but check_attention takes a function or a layer: use check_model"
            )
        if not callable(getattr(function, "forward", None)):
            raise ValueError(f"{kind} has no forward")
    elif not callable(function):
        raise TypeError(f"check_attention needs a function, a class or a module, got {kind}")
    signature = read_signature(function)
    if not any(True for _ in signature.orders()):
        names = ", ".join(signature.names) or "none"
        raise ValueError(f"{kind} has no arguments that look like query, key and value, or x; its arguments: {names}")
    if isinstance(function, nn.Module) and any(p.ndim > 1 for p in function.parameters()):
        return AttentionLayer(function, dtype, device, seed)
    called = copied(function).eval() if isinstance(function, nn.Module) else function
    if next(signature.orders()).keys() == {"x"}:
        raise ValueError(f"{kind} takes one input and has no projections, so its queries, keys and values cannot be seen")
    return Function(called, dtype, device, seed)


@dataclass(frozen=True, eq=False)
class _Examination:
    """One check of one function or layer."""

    subject: Subject
    mask: str | None
    stage: int | None
    name: str
    made: str

    def report(self) -> Report:
        """Try all experiments, compare the results, and name the mistakes."""
        if (way := self._random_way()) is not None:
            fault = "two calls with the same inputs differ"
            is_module = isinstance(self.subject.function, nn.Module)
            argument = "training=self.training" if is_module else "training=False, or an argument of your function for it"
            advice = f"Without dropout, two calls are equal. In evaluation, F.dropout needs {argument}."
            return self._made(Tried(way, {}, {}), self._untried(fault), [Finding("random", Severity.WRONG, fault, advice)])
        judge, faults = Judge(self.subject.dtype), dict[str, None]()
        diagnosis = diagnose(judge, trials(self.subject, judge, chosen_forms(self.mask), faults))
        if diagnosis is None:
            return self._uncalled(list(faults))
        verdicts = _Verdicts(self.subject, judge, diagnosis, self.mask)
        if self.stage is None:
            verdicts.trial = with_draws(self.subject, diagnosis.trial)
        tried = EXPERIMENTS if self.stage else (*EXPERIMENTS, *DRAWS)
        checks = [check for experiment in tried for check in verdicts.checks(experiment)]
        findings = [*verdicts.findings()]
        if self.stage is None:
            checks += self._arguments(diagnosis.trial)
        else:
            checks, findings = self._graded(diagnosis.trial, checks, findings)
        return self._made(diagnosis.trial, checks, [finding for finding, _ in findings])

    def _made(self, trial: Tried, checks: list[Check], findings: list[Finding]) -> Report:
        called = self.subject.describe(trial.way) + (", causal by default" if trial.is_causal else "")
        called = f"{self.made}; {called}" if self.made else called
        if self.subject.dtype != torch.float64:
            called += f", {str(self.subject.dtype).removeprefix('torch.')}"
        return Report(self.name, called, self.subject.seed, tuple(checks), tuple(findings), self.stage)

    def _arguments(self, trial: Tried) -> list[Check]:
        """The arguments that no experiment uses."""
        signature, used = self.subject.signature, self.subject.arguments(trial.way)
        reasons = {name: f"it raises {fault}" for name, fault in self.subject.refused.items()}
        unused = [name for name in signature.names if name not in used]
        return [Check(f"argument {name}", Status.NOT_TRIED, reasons.get(name, "no experiment uses it")) for name in unused]

    def _uncalled(self, faults: list[str]) -> Report:
        fault, severity = "no way to call it was found", Severity.FRAGILE
        advice = "Check a function of queries, keys and values, an attention layer alone, or the whole model."
        if faults and all(reason.startswith(f"{RETURNS} NoneType") for reason in faults):
            fault, advice, faults = "it returns None", "Is the return statement missing?", []
            severity = Severity.WRONG
        elif isinstance(self.subject, Function) and len(faults) == 1 and not faults[0].startswith(RETURNS):
            fault, advice, severity = "it raises the same error in every call", "", Severity.WRONG
        finding = Finding("cannot-be-called", severity, fault, advice, "; ".join(faults[:3]))
        checks = self._untried(fault)
        return Report(self.name, "", self.subject.seed, tuple(checks), (finding,), self.stage)

    def _untried(self, reason: str) -> list[Check]:
        chosen = [e for e in EXPERIMENTS if self.stage in (None, e.stage)]
        return [Check(e.id, Status.NOT_TRIED, reason) for e in chosen]

    def _random_way(self) -> Way | None:
        """The first way of calling that works, if two of its calls differ."""
        for way in self.subject.ways():
            first = self.subject.outcome(way, SIMPLE).output
            if first is not None:
                self.subject.forget()
                second = self.subject.outcome(way, SIMPLE).output
                return way if second is None or not are_close(second, first.double()) else None
        return None

    def _graded(self, trial: Tried, checks: list[Check], findings: list[Placed]) -> tuple[list[Check], list[Placed]]:
        """The checks and findings of the stage. In a stage, all findings are wrong, and so is a check that cannot be tried."""
        ids = {e.id for e in EXPERIMENTS if e.stage == self.stage} | ({BLIND_GRADIENT} if self.stage == BLIND.stage else set())
        ids -= {e.id for e, reason in trial.not_tried.items() if isinstance(reason, DoesNotApplyError)}
        checks = [check for check in checks if check.id in ids]
        graded: list[Placed] = []
        for finding, places in findings:
            is_note = finding.severity == Severity.NOTE
            if places & ids:
                graded.append((finding if is_note else replace(finding, severity=Severity.WRONG), places))
            elif not places:
                graded.append((finding, places))
        untried = [check for check in checks if check.status == Status.NOT_TRIED]
        for check in untried:
            fault = f"{check.id} could not be tried: {check.reason}"
            graded.append((Finding(f"untried-{check.id}", Severity.WRONG, fault, f"Stage {self.stage} needs it."), {check.id}))
        return checks, graded


Placed = tuple[Finding, set[str]]
"""A finding, and the ids of the checks that show it."""


class _Verdicts:
    """The checks and findings of a trial."""

    def __init__(self, subject: Subject, judge: Judge, diagnosis: Diagnosis, mask: str | None) -> None:
        self.subject, self.judge, self.trial, self.mask = subject, judge, diagnosis.trial, mask
        self.others, self.wide = diagnosis.others, diagnosis.wide
        self.mistakes: Mistakes | None = diagnosis.mistakes
        self.beyond = "" if self.mistakes == () else subject.beyond(diagnosis.trial.way, is_named=self.mistakes is not None)
        if self.beyond:
            self.mistakes = None
        elif diagnosis.mistakes is not None:
            self.mistakes = diagnosis.mistakes + further_mistakes(judge, diagnosis.trial, diagnosis.mistakes)

    # --- checks

    def checks(self, experiment: Experiment) -> Iterator[Check]:
        """Yield the checks of one experiment."""
        if experiment not in self.trial.outcomes:
            yield Check(experiment.id, Status.NOT_TRIED, str(self.trial.not_tried[experiment]))
        elif experiment in HALF:
            yield self._half(self.trial.outcomes[experiment])
        elif experiment is BLIND_MOVED:
            yield self._moved()
        else:
            yield self._compared(self.trial.outcomes[experiment])
        if experiment is BLIND_MOVED:
            yield self._blind_gradient()

    def _compared(self, outcome: Outcome) -> Check:
        name = outcome.experiment.id
        if outcome.output is None:
            return Check(name, Status.FAILED, f"it raises {outcome.fault}")
        if outcome.experiment is BLIND:
            is_finite = bool(outcome.output.isfinite().all())
            return Check(name, Status.PASSED if is_finite else Status.FAILED, "" if is_finite else "the output is NaN")
        is_right = passes(self.judge, self.trial, outcome)
        size = self._difference(outcome)
        if self.beyond and not is_right:
            return Check(name, Status.NOT_TRIED, self.beyond, size)
        return Check(
            name, Status.PASSED if is_right else Status.FAILED, "" if is_right else "the output or a gradient differs", size
        )

    def _difference(self, outcome: Outcome) -> float | None:
        expected = self.judge.answer(outcome.inputs, (), self.trial.is_causal).output
        if outcome.output is None or expected is None or outcome.output.shape != expected.shape:
            return None
        return (outcome.output.double() - expected).abs().nan_to_num(torch.inf).max().item()

    def _moved(self) -> Check:
        output = self.trial.outcomes[BLIND_MOVED].output
        if output is None or not output.isfinite().all():
            return Check(BLIND_MOVED.id, Status.FAILED, "the output is NaN")
        moved = is_moved(self.trial)
        return Check(
            BLIND_MOVED.id, Status.FAILED if moved else Status.PASSED, "hidden values move the output" if moved else ""
        )

    def _blind_gradient(self) -> Check:
        outcome = self.trial.outcomes.get(BLIND)
        if outcome is None:
            return Check(BLIND_GRADIENT, Status.NOT_TRIED, str(self.trial.not_tried[BLIND]))
        if not outcome.gradients:
            return Check(BLIND_GRADIENT, Status.NOT_TRIED, "there are no gradients")
        is_finite = all(bool(gradient.isfinite().all()) for gradient in outcome.gradients)
        return Check(BLIND_GRADIENT, Status.PASSED if is_finite else Status.FAILED, "" if is_finite else "a gradient is NaN")

    def _half(self, outcome: Outcome) -> Check:
        """Half precision: at most twice the error of the reference in the same dtype."""
        name, dtype = outcome.experiment.id, outcome.experiment.dtype
        assert dtype is not None
        if outcome.output is None:
            return Check(name, Status.FAILED, f"it raises {outcome.fault}")
        if outcome.output.dtype != dtype:
            return Check(name, Status.FAILED, f"the output is {dtype_name(outcome.output.dtype)}")
        expected, allowed = _in_half(outcome.inputs, dtype, self.trial.is_causal)
        if outcome.output.shape != expected.shape:
            return Check(name, Status.FAILED, "the output has another shape")
        size = (outcome.output.double() - expected).abs().nan_to_num(torch.inf).max().item()
        return Check(
            name, Status.PASSED if size <= allowed else Status.FAILED, "" if size <= allowed else "it is inexact", size, allowed
        )

    # --- findings

    def findings(self) -> Iterator[Placed]:
        """Yield the findings. The finding to mend first comes first."""
        failed = [
            o
            for e, o in self.trial.outcomes.items()
            if e.dtype is None and e is not BLIND_MOVED and not passes(self.judge, self.trial, o)
        ]
        if self.mistakes is not None:
            yield from self._named([o for o in failed if o.output is not None or self.judge.fits(o, self.mistakes)])
            failed = [o for o in failed if not self.judge.fits(o, self.mistakes, self.trial.is_causal)]
        yield from self._unexplained(failed)
        yield from self._gradient_of_blind()
        yield from self._half_findings()
        yield from self._polarity()
        yield from self._weights()
        yield from self._unmasked()
        yield from self._few_axes()
        yield from self._changes()
        if isinstance(self.subject, AttentionLayer) and (idle := self.subject.idle_parameters(self.trial.way)):
            yield Finding("idle-parameters", Severity.WRONG, f"unused parameters: {', '.join(idle)}"), {SIMPLE.id}

    def _changes(self) -> Iterator[Placed]:
        """Yield arguments that are changed in place. A changed mask is wrong, because the next layer gets it."""
        mask = self.subject.signature.mask
        changed: dict[str | None, str] = {}
        for outcome in self.trial.outcomes.values():
            for name in outcome.changed:
                changed.setdefault(name, outcome.experiment.id)
        if changed.keys() - {mask}:
            advice = "Write q = q * scale instead of q *= scale."
            yield Finding("changes-its-arguments", Severity.FRAGILE, "it changes its arguments in place", advice), {SIMPLE.id}
        if mask in changed:
            fault = f"it changes {mask} in place, so the next layer gets another mask"
            yield Finding("changes-the-mask", Severity.WRONG, fault, f"Copy {mask} before you change it."), {changed[mask]}

    def _named(self, failed: list[Outcome]) -> Iterator[Placed]:
        """Yield the named mistakes, those that show in the simplest experiment first."""
        assert self.mistakes is not None
        shown = {mutant: self._shown(mutant, failed) for mutant in self.mistakes}
        order = {e: place for place, e in enumerate((*EXPERIMENTS, *DRAWS))}
        ranked = sorted(shown, key=lambda mutant: min((order[o.experiment] for o in shown[mutant]), default=len(order)))
        for mutant in ranked:
            outcomes = shown[mutant]
            names = [self._seen_in(outcome) for outcome in outcomes]
            names = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} others"]
            severity = Severity.FRAGILE if self._is_documented(mutant) else mutant.severity
            finding = Finding(
                mutant.id, severity, mutant.name, mutant.advice, f"seen in: {', '.join(names)}{self._by(outcomes)}"
            )
            places = {outcome.experiment.id for outcome in outcomes}
            yield finding, places | ({BLIND_MOVED.id} if BLIND.id in places else set())
        same = [mistakes for mistakes in self.others if len(mistakes) == len(self.mistakes)]
        others = sorted({" with ".join(m.name for m in mistakes if m not in shown) for mistakes in same})
        replaced = {mutant for mistakes in same for mutant in shown if mutant not in mistakes}
        if others and len(self.others) <= 4:
            places = {outcome.experiment.id for mutant in replaced for outcome in shown[mutant]}
            yield Finding("same-numbers", Severity.NOTE, f"the same numbers come from: {', '.join(others)}"), places

    def _is_documented(self, mutant: Mutant) -> bool:
        """Return whether the function's documentation states where its causal mask begins."""
        text = inspect.getdoc(self.subject.function) or ""
        return mutant.id == "causal-mask-from-the-upper-left" and bool(
            re.search(r"(upper|top)[- ]left|tril\(diagonal=0\)", text)
        )

    @staticmethod
    def _seen_in(outcome: Outcome) -> str:
        """The name of the experiment that shows a mistake. A finite output where a query sees nothing is right until it moves."""
        is_finite = outcome.output is not None and bool(outcome.output.isfinite().all())
        return BLIND_MOVED.name if outcome.experiment is BLIND and is_finite else outcome.experiment.name

    def _shown(self, mutant: Mutant, failed: list[Outcome]) -> list[Outcome]:
        """The failed outcomes that this mistake alone makes wrong, or all if it shows only with another mistake."""
        shown = []
        for outcome in failed:
            alone = self.judge.answer(outcome.inputs, (mutant,), self.trial.is_causal)
            right = self.judge.answer(outcome.inputs, (), self.trial.is_causal)
            if _differ(alone, right):
                shown.append(outcome)
        return shown or failed

    def _by(self, outcomes: list[Outcome]) -> str:
        size = self._difference(outcomes[0]) if outcomes else None
        return "" if size is None or size == torch.inf else f" (the output differs by {size:.2g})"

    def _unexplained(self, failed: list[Outcome]) -> Iterator[Placed]:
        """Yield a finding for outcomes that no mutant explains."""
        raised = [outcome for outcome in failed if outcome.output is None]
        for outcome in raised:
            fault = f"it raises in: {outcome.experiment.name}"
            yield (
                Finding(f"raises-{outcome.experiment.id}", Severity.FRAGILE, fault, witness=outcome.fault),
                {outcome.experiment.id},
            )
        failed = [outcome for outcome in failed if outcome.output is not None]
        if not failed:
            return
        misshapen = [o for o in failed if o.output is not None and o.output.shape != self._right_shape(o)]
        if misshapen:
            first = misshapen[0]
            assert first.output is not None
            fault = f"the output has the shape {tuple(first.output.shape)}, not {tuple(self._right_shape(first))}"
            advice = "The output is weights @ value: it has the width of the values."
            yield Finding("other-shape", Severity.WRONG, fault, advice), {outcome.experiment.id for outcome in misshapen}
            return
        if self.beyond:
            text = f"{self.beyond}, so it is not compared with the definition"
            yield Finding("more-than-the-definition", Severity.NOTE, text), set()
            return
        is_mild = all(outcome.experiment.is_extreme for outcome in failed)
        sizes = [(outcome.experiment.name, self._difference(outcome)) for outcome in failed]
        names = ", ".join(name if size is None else f"{name} by {size:.2g}" for name, size in sizes)
        severity = Severity.FRAGILE if is_mild else Severity.WRONG
        witness = "; ".join([names, *([] if is_mild else _dependences(self.subject, self.trial))])
        fault = "it differs from the definition, and no known mistake explains it"
        places = {outcome.experiment.id for outcome in failed}
        yield Finding("differs", severity, fault, witness=witness), places | ({BLIND_MOVED.id} if BLIND.id in places else set())

    def _gradient_of_blind(self) -> Iterator[Placed]:
        outcome = self.trial.outcomes.get(BLIND)
        if outcome is None or outcome.output is None or not outcome.output.isfinite().all():
            return
        if self._blind_gradient().status == Status.FAILED:
            advice = "Hide with a finite number, and multiply the weights by the mask after the softmax."
            fault = "NaN in the gradient where a query sees nothing"
            yield Finding("nan-gradient-where-a-query-sees-nothing", Severity.FRAGILE, fault, advice), {BLIND_GRADIENT}

    def _half_findings(self) -> Iterator[Placed]:
        """Yield one finding for each reason in half precision. If float64 is wrong, half precision is not judged."""
        if any(not passes(self.judge, self.trial, outcome) for outcome in self.trial.ordinary):
            return
        reasons: dict[str, list[Check]] = {}
        for experiment in HALF:
            if experiment in self.trial.outcomes:
                check = self._half(self.trial.outcomes[experiment])
                if check.status == Status.FAILED:
                    reasons.setdefault(check.reason, []).append(check)
        for reason, checks in reasons.items():
            names = ", ".join(check.id for check in checks)
            advice = "Compute scores and softmax in float32, and use torch.finfo(dtype).min or -inf for what is hidden."
            yield (
                Finding(f"half-{checks[0].id}", Severity.FRAGILE, f"in {names}: {reason}", advice),
                {check.id for check in checks},
            )

    def _polarity(self) -> Iterator[Placed]:
        form, name = self.trial.way.form, self.subject.signature.mask or ""
        if form is None or self.mask is not None:
            return
        is_padding = "padding" in name
        if form.polarity == "hide" and not is_padding:
            fault = f"in {name}, True = hide. If True should mean keep: mask inverted"
            yield Finding("mask-hides", Severity.FRAGILE, fault, "Set mask=keep or mask=hide to choose."), {"mask-hides"}
        if form.polarity == "keep" and is_padding:
            fault = f"{name} is True where a key is kept. In torch, an argument with this name is True where there is padding"
            yield (
                Finding("padding-mask-keeps", Severity.FRAGILE, fault, "Set mask=keep or mask=hide to choose."),
                {"mask-hides"},
            )

    def _weights(self) -> Iterator[Placed]:
        """Yield a finding if the returned weights did not produce the output."""
        if not self.judge.fits_all(self.trial.ordinary, (), self.trial.is_causal):
            return
        for outcome in self.trial.ordinary:
            right = _weights_of(outcome.inputs, self.trial.is_causal or outcome.inputs.is_causal)
            if outcome.weights is None or outcome.weights.numel() != right.numel():
                continue
            got = outcome.weights.reshape(right.shape).double()
            if not are_close(got, right, is_loose=True):
                fault = "the returned weights differ from the weights that give the output"
                witness = f"seen in: {outcome.experiment.name} (by {(got - right).abs().max().item():.2g})"
                yield Finding("other-weights", Severity.WRONG, fault, witness=witness), {outcome.experiment.id}
                return

    def _right_shape(self, outcome: Outcome) -> torch.Size:
        """The shape of the right output, (B, H, L, Dv)."""
        return torch.Size((*outcome.inputs.query.shape[:3], outcome.inputs.value.shape[-1]))

    def _few_axes(self) -> Iterator[Placed]:
        """Yield a finding if it also computes something for (B, H, L, D), but is right only without heads."""
        if self.wide is None:
            return
        few, many = self.trial.way.layout.name, self.wide.way.layout.name
        plain = [o for e, o in self.wide.outcomes.items() if not (e.is_extreme or e.mask or e.is_causal or e.kv_heads)]
        names = [m.name for m in MUTANTS if self.judge.fits_all(plain, (m,), self.wide.is_causal)]
        fault = f"checked with {few}: with {many}, it runs and gives another result"
        advice = "Count axes from the end: softmax(dim=-1) and transpose(-2, -1)."
        witness = f"with {many}: {names[0]}" if names else ""
        yield Finding("few-axes", Severity.FRAGILE, fault, advice, witness), set()

    def _unmasked(self) -> Iterator[Placed]:
        if not self.trial.is_masked:
            fault = f"{self.subject.signature.mask} accepts none of the forms of mask that were tried"
            yield Finding("mask-not-accepted", Severity.FRAGILE, fault), {e.id for e in EXPERIMENTS if e.mask}


@lru_cache(maxsize=256)
def _weights_of(inputs: Operands, is_causal: bool) -> Tensor:
    query, key, value = (tensor.double() for tensor in inputs.heads)
    return naive_attention(query, key, value, inputs.allowed, is_causal=is_causal)[1]


@lru_cache(maxsize=256)
def _in_half(inputs: Operands, dtype: torch.dtype, is_causal: bool) -> tuple[Tensor, float]:
    """The exact output for inputs that are rounded to ``dtype``, and the error that an output in ``dtype`` may have."""
    query, key, value = (tensor.to(dtype) for tensor in inputs.heads)
    definition = partial(naive_attention, attn_mask=inputs.allowed, is_causal=is_causal)
    expected, _ = definition(query.double(), key.double(), value.double())
    low, _ = definition(query, key, value)
    return expected, 2 * tolerance(expected, low, dtype)  # weights and scores are rounded once more in plain torch


def _differ(got: Expected, want: Expected) -> bool:
    """Whether a mistake shows in the output or a gradient."""
    if got.output is None or want.output is None or not are_close(got.output, want.output, is_loose=True):
        return True
    return not all(are_close(a, b, is_loose=True) for a, b in zip(got.gradients, want.gradients, strict=True))


def _dependences(subject: Subject, trial: Tried) -> list[str]:
    """Sentences about forbidden dependences of the output, for a mistake without a name."""
    first, sentences = trial.outcomes[SIMPLE].output, []
    if first is None or not isinstance(subject, Function):
        return []
    for part, others, rest in (("sequence", "the first sequence", 0), ("head", "the other heads", (slice(None), slice(-1)))):
        again = subject.outcome(trial.way, OTHERS[part]).output
        if again is not None and not are_close(again[rest], first[rest].double(), is_loose=True):
            sentences.append(f"the {OTHERS[part].name} changes the output of {others}")
    return sentences
