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
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from minitx.check import diagnosis
from minitx.check.calling import DoesNotApplyError
from minitx.check.cases import BLIND, BLIND_MOVED, CASES, DRAWS, HALF, SIMPLE, Case, Outcome, by_definition
from minitx.check.diagnosis import Expected, Mistakes, Trial, are_close, dependences
from minitx.check.layers_and_functions import AttentionLayer, Subject, Way, instance_of, make_subject
from minitx.check.mutants import MUTANTS, Mutant
from minitx.check.reference import dtype_name, tolerance
from minitx.check.results import FAILED, FRAGILE, NOT_TRIED, NOTE, PASSED, WRONG, Check, Finding, Report, finding
from minitx.check.selection import check_selection
from minitx.check.strict import check_cases, compared, findings_of

EXERCISE_STAGES = (1, 2, 3, 4, 5)
"""The stages of a graded exercise: plain; masks; queries without a visible key; wide values and causal; half precision and large scores."""

BLIND_GRADIENT = "gradients-where-a-query-sees-nothing"

SUMS = "sums-of-weights"

Placed = tuple[Finding, set[str]]
"""A finding, and the ids of the checks that show it."""


def check_attention(
    function: Any,
    *,
    strict: bool = False,
    stage: int | None = None,
    mask: Literal["keep", "hide"] | None = None,
    call: Callable[..., Any] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> Report:
    """Find mistakes in a function or layer that computes attention.

    The way to call it is found by trying: the roles and the order of the arguments, the order of axes, the form of the mask, and the
    form of the result. The results are compared with the definition in float64. A mistake is named if one or two mutants of
    ``minitx.check.mutants`` give the same numbers. Attention that is more than the definition is described. A layer with a further
    product, such as a gate, is checked by the properties of ``check_model``.

    Args:
        function: a function of queries, keys and values, a module with projections, or a class of such objects.
        strict: check a kernel with the parameters of ``scaled_dot_product_attention`` in every case of ``minitx.check.strict``.
        stage: grade one stage of the exercise, from 1 to 5. A check that cannot be tried earns no point.
        mask: the meaning of True in the mask, "keep" or "hide". Default: the meaning that fits the results.
        call: a function that calls ``function``: (function, query, key, value, mask) -> output, with (B, H, L, D) and a bool mask
            (B, 1, L, S), True = may attend. Without its last parameter, no mask is tried. Default: the way is found.
        seed: the seed of the random inputs. ``strict`` always draws the same inputs.
        device: the device of the inputs. dtype: the dtype of the inputs, float64 or float32.

    Returns:
        A report. Its ``exit_code`` is 1 if something is wrong.

    Raises:
        ValueError, TypeError: an argument is out of range, ``function`` does not compute attention, or ``call`` does not call it.
    """
    if stage is not None and stage not in EXERCISE_STAGES:
        raise ValueError(f"stage={stage} must be one of {', '.join(map(str, EXERCISE_STAGES))}")
    if mask not in (None, "keep", "hide"):
        raise ValueError(f"mask={mask} must be keep or hide")
    if strict and (stage is not None or call is not None):
        raise ValueError("strict and stage or call cannot be combined: strict checks all cases of one signature")
    name = getattr(function, "__name__", type(function).__name__)
    if strict:
        checks = check_cases(function, device=device)
        return Report(name, f"{name}(query, key, value, ...)", seed, tuple(checks), tuple(findings_of(checks)))
    made = ""
    if inspect.isclass(function):
        function, made = instance_of(function)

    def report_in(dtype: torch.dtype) -> Report:
        return _examined(make_subject(function, device, dtype, seed, call), mask, stage, name, made)

    report = report_in(dtype)
    has_infinity = any(check.size == torch.inf for check in report.with_status(FAILED))
    if dtype == torch.float64 and (not report.called_as or has_infinity):  # it may create float32 tensors
        narrow = report_in(torch.float32)
        is_better = len(narrow.with_status(FAILED)) < len(report.with_status(FAILED))
        report = narrow if narrow.called_as and (is_better or not report.called_as) else report
    if not report.called_as and call is None and isinstance(function, nn.Module) and (mask, stage) == (None, None):
        from minitx.check.model_checks import check_model

        as_model = check_model(function, seed=seed, device=device)  # more than the definition, such as a gate
        mixes = all(found.id != "sees-no-other" for found in as_model.findings)
        if as_model.called_as and mixes:
            reason = ": ".join(filter(None, (f"as attention, {report.findings[0].fault}", report.findings[0].witness)))
            taken_as = f"{as_model.taken_as}; not compared with the definition"
            report = replace(as_model, checks=(*as_model.checks, Check("definition", NOT_TRIED, reason)), taken_as=taken_as)
    if call is not None and not report.called_as:
        raise ValueError(f"call={call.__name__} does not call {name}: {report.findings[0].witness or report.findings[0].fault}")
    return report


def _examined(subject: Subject, mask: str | None, stage: int | None, name: str, made: str) -> Report:
    """Try all cases, compare the results, and name the mistakes."""

    def report(called_as: str, checks: list[Check], findings: list[Finding], taken_as: str = "") -> Report:
        called_as += "" if subject.dtype == torch.float64 or not called_as else f", {dtype_name(subject.dtype)}"
        called_as = f"{made}; {called_as}" if made and called_as else called_as
        return Report(name, called_as, subject.seed, tuple(checks), tuple(findings), stage, taken_as)

    def untried(found: Finding) -> list[Check]:
        return [Check(case.id, NOT_TRIED, found.fault) for case in CASES if stage in (None, case.stage)]

    way = next((way for way in subject.ways() if subject.outcome(way, SIMPLE).output is not None), None)
    if way is not None and not _is_repeated(subject, way):
        is_module = isinstance(subject.function, nn.Module)
        found = finding("random", training="training=self.training" if is_module else "training=False")
        return report(subject.describe(way), untried(found), [found])
    faults = dict[str, None]()
    trial = diagnosis.diagnose(diagnosis.trials(subject, mask, faults))
    if trial is None:
        found = _uncalled(subject, list(faults))
        return report("", untried(found), [found])
    if trial.mistakes is not None:
        trial.mistakes += diagnosis.further_mistakes(trial, trial.mistakes)
    cases = CASES if stage else (*CASES, *DRAWS)
    trial.run(cases[len(CASES) :])
    verdicts, taken_as = _Verdicts(trial, mask), ""
    checks, findings = [check for case in cases for check in verdicts.checks(case)], [*verdicts.findings()]
    if stage is None:
        reasons = {argument: f"it raises {fault}" for argument, fault in subject.refused.items()}
        limits = subject.limits(trial.way) if trial.is_right else []
        unused = [argument for argument in subject.arguments.names if argument not in (*subject.used(trial.way), *limits)]
        checks += [Check(f"argument {n}", NOT_TRIED, reasons.get(n, "no case uses it")) for n in unused]
        selections = [check_selection(trial, name) for name in limits]
        if selections:
            diagnosis.answer.cache_clear()  # the results of long rows are large
        checks += [check for check, _ in selections]
        findings += [(found, set[str]()) for _, several in selections for found in several]
        taken_as = "; ".join(check.reason for check, _ in selections if check.status == PASSED)
    else:
        checks, findings = _graded(stage, trial, checks, findings)
    called = subject.describe(trial.way) + (", causal by default" if trial.is_causal else "")
    return report(called, checks, [found for found, _ in findings], taken_as)


def _is_repeated(subject: Subject, way: Way) -> bool:
    """Whether a second call gives the same output."""
    first, second = (subject.outcome(way, case).output for case in (SIMPLE, replace(SIMPLE, name="plain again")))
    return first is not None and second is not None and are_close(second, first.double())


def _uncalled(subject: Subject, faults: list[str]) -> Finding:
    """The finding if no way to call it was found."""
    words: dict[str, Any] = {"severity": WRONG, "advice": "", "witness": "; ".join(faults[:3])}
    if faults and all(reason.startswith("it returns NoneType") for reason in faults):
        words |= {"fault": "it returns None", "advice": "Is the return statement missing?"}
    elif not subject.is_layer and len(faults) == 1 and not faults[0].startswith(("it returns", "no value is known")):
        words |= {"fault": "it raises the same error in every call"}
    else:
        advice = "Check a function of queries, keys and values, an attention layer alone, or the whole model, or write call=."
        words |= {"severity": FRAGILE, "fault": "no way to call it was found", "advice": advice}
    return finding("cannot-be-called", **words)


def _graded(stage: int, trial: Trial, checks: list[Check], findings: list[Placed]) -> tuple[list[Check], list[Placed]]:
    """The checks and findings of the stage. In a stage, all findings are wrong, and so is a check that cannot be tried."""
    ids = {case.id for case in CASES if case.stage == stage} | ({BLIND_GRADIENT} if stage == BLIND.stage else set())
    ids -= {case.id for case, reason in trial.not_tried.items() if isinstance(reason, DoesNotApplyError)}
    checks = [check for check in checks if check.id in ids]
    untried = [check for check in checks if check.status == NOT_TRIED]
    findings += [(finding("untried-{case}", case=c.id, reason=c.reason, stage=stage), {c.id}) for c in untried]
    findings = [(found, places) for found, places in findings if not places or places & ids]
    return checks, [(replace(f, severity=WRONG) if places and f.severity != NOTE else f, places) for f, places in findings]


class _Verdicts:
    """The checks and findings of a trial."""

    def __init__(self, trial: Trial, meaning: str | None) -> None:
        self.trial, self.meaning = trial, meaning
        self.subject, self.outcomes = trial.subject, trial.outcomes
        self.beyond = "" if trial.mistakes else diagnosis.beyond(trial)

    # --- checks

    def checks(self, case: Case) -> Iterator[Check]:
        """Yield the checks of one case."""
        check = self._check(case)
        if check.status == FAILED and self.beyond and ("differs" in check.reason or case in HALF):
            check = replace(check, status=NOT_TRIED, reason=self.beyond)
        yield check
        if case is BLIND_MOVED:
            yield self._blind_gradient()
        if case is SIMPLE and self.beyond:
            yield self._sums()

    def _sums(self) -> Check:
        """The check of the sums of the weights, which judges where the definition does not. A sink makes them less than 1."""
        totals, other = diagnosis.sums(self.trial)
        if totals is None:
            return Check(SUMS, NOT_TRIED, "the sums of the weights are unknown")
        text = f"they add up to {totals.min():.2g} to {totals.max():.2g}" + f", and to 1 over {other}" * bool(other)
        is_one, is_less = are_close(totals, torch.ones_like(totals).double()), totals.max() < 1 and not other
        return Check(SUMS, PASSED if is_one or is_less else FAILED, text, (totals - 1).abs().max().item())

    def _check(self, case: Case) -> Check:
        outcome = self.outcomes.get(case)
        if outcome is None:
            return Check(case.id, NOT_TRIED, str(self.trial.not_tried[case]))
        size = None
        if case is BLIND_MOVED or (case is BLIND and outcome.output is not None):
            moved = "hidden values move the output" * (case is BLIND_MOVED and self.trial.is_moved)
            reason = moved if outcome.is_finite else "the output is NaN"
        elif outcome.output is None:
            reason = f"it raises {outcome.fault}"
        elif case in HALF:  # plain torch rounds weights and scores once more than the reference
            (dtype,) = case.dtypes
            exact, low = (by_definition(outcome.inputs, dtype, precision)["output"] for precision in (torch.float64, dtype))
            check = compared(case.id, "the output", outcome.output, exact, 2 * tolerance(exact, low, dtype), dtype)
            return check if check.status == FAILED else replace(check, reason="")
        else:
            reason = "" if self.trial.passes(outcome) else "the output or a gradient differs"
            size = self._difference(outcome)
        return Check(case.id, FAILED if reason else PASSED, reason, size)

    def _difference(self, outcome: Outcome) -> float | None:
        expected = diagnosis.answer(outcome.inputs).output
        if outcome.output is None or expected is None or outcome.output.shape != expected.shape:
            return None
        return (outcome.output.double() - expected).abs().nan_to_num(torch.inf).max().item()

    def _blind_gradient(self) -> Check:
        outcome = self.outcomes.get(BLIND)
        if outcome is None or not outcome.gradients:
            reason = "there are no gradients" if outcome else str(self.trial.not_tried[BLIND])
            return Check(BLIND_GRADIENT, NOT_TRIED, reason)
        is_finite = all(gradient.isfinite().all() for gradient in outcome.gradients)
        return Check(BLIND_GRADIENT, *((PASSED, "") if is_finite else (FAILED, "a gradient is NaN")))

    # --- findings

    def findings(self) -> Iterator[Placed]:
        """Yield the findings. The finding to mend first comes first."""
        judged = [outcome for case, outcome in self.outcomes.items() if not case.dtypes and case is not BLIND_MOVED]
        failed = [outcome for outcome in judged if not self.trial.passes(outcome)]
        if (mistakes := self.trial.mistakes) is not None:
            explained = [o for o in failed if diagnosis.fits(o, mistakes)]
            yield from self._named([o for o in failed if o.output is not None or o in explained], mistakes)
            failed = [o for o in failed if o not in explained]
        yield from self._unexplained(failed)
        if BLIND in self.outcomes and self.outcomes[BLIND].is_finite and self._blind_gradient().status == FAILED:
            yield finding("nan-gradient-where-a-query-sees-nothing"), {BLIND_GRADIENT}
        if self.trial.is_right:
            yield from self._in_half_precision()
            yield from self._weights()
        yield from self._of_the_mask()
        yield from self._few_axes()
        for case, why in self.trial.not_tried.items():
            if case.rows > SIMPLE.rows and not case.mask and str(why).startswith("it raises"):
                yield finding("refuses-{case}", case=case.id, name=case.name, error=why), {case.id}
        mask, changed = self.trial.way.mask, {name: o.case.id for o in [*self.outcomes.values()][::-1] for name in o.changed}
        if changed.keys() - {mask}:
            yield finding("changes-its-arguments"), {SIMPLE.id}
        if mask in changed:
            yield finding("changes-the-mask", mask=mask), {changed[mask]}
        if isinstance(self.subject, AttentionLayer) and (idle := self.subject.idle_parameters()):
            yield finding("idle-parameters", names=", ".join(idle)), {SIMPLE.id}

    def _named(self, failed: list[Outcome], mistakes: Mistakes) -> Iterator[Placed]:
        """Yield the named mistakes, those that show in the simplest case first."""
        shown = {mutant: self._shown(mutant, failed) for mutant in mistakes}
        order = list(self.outcomes)
        for mutant in sorted(shown, key=lambda mutant: min((order.index(o.case) for o in shown[mutant]), default=len(order))):
            # a finite output where a query sees nothing is right until it moves
            cases = [BLIND_MOVED if o.case is BLIND and o.is_finite else o.case for o in shown[mutant]]
            names = [case.name for case in cases[: 3 if len(cases) > 4 else 4]]
            names += [f"{len(cases) - 3} others"] * (len(cases) > 4)
            size = self._difference(shown[mutant][0]) if cases else None
            by = "" if size is None or size == torch.inf else f" (the output differs by {size:.2g})"
            severity, seen = FRAGILE if self._is_documented(mutant) else mutant.severity, f"seen in: {', '.join(names)}{by}"
            yield Finding(mutant.id, severity, mutant.name, mutant.advice, seen), _differing_places(shown[mutant])
        same = [other for other in self.trial.others if len(other) == len(mistakes)]
        others = sorted({" with ".join(m.name for m in other if m not in shown) for other in same})
        if others and len(self.trial.others) <= 4:
            places = {o.case.id for other in same for mutant in shown if mutant not in other for o in shown[mutant]}
            yield finding("same-numbers", others=", ".join(others)), places

    def _is_documented(self, mutant: Mutant) -> bool:
        """Return whether the function's documentation states where its causal mask begins."""
        text, pattern = inspect.getdoc(self.subject.function) or "", r"(upper|top)[- ]left|tril\(diagonal=0\)"
        return mutant.id == "causal-mask-from-the-upper-left" and bool(re.search(pattern, text))

    def _shown(self, mutant: Mutant, failed: list[Outcome]) -> list[Outcome]:
        """The failed outcomes that this mistake alone makes wrong, or all if it shows only with another mistake."""
        return [o for o in failed if _differ(diagnosis.answer(o.inputs, (mutant,)), diagnosis.answer(o.inputs))] or failed

    def _unexplained(self, failed: list[Outcome]) -> Iterator[Placed]:
        """Yield a finding for outcomes that no mutant explains."""
        for outcome in (outcome for outcome in failed if outcome.output is None):
            case = outcome.case
            yield finding("raises-{part}", part=case.id, name=case.name, error=outcome.fault), {case.id}
        outputs = [(outcome, outcome.output) for outcome in failed if outcome.output is not None]
        for outcome, output in outputs:
            shape = *outcome.inputs.query.shape[:3], outcome.inputs.value.shape[-1]
            if output.shape != shape:
                yield finding("other-shape", shape=tuple(output.shape), expected=shape), {outcome.case.id}
                return
        if outputs and self.beyond:
            yield finding("more-than-the-definition", beyond=self.beyond), set()
            if (check := self._sums()).status == FAILED:
                yield finding(SUMS, WRONG if " over " in check.reason else FRAGILE, sums=check.reason), {SUMS}
        elif outputs:
            is_mild = all(outcome.case.is_extreme for outcome, _ in outputs)
            sizes = [(outcome.case.name, self._difference(outcome)) for outcome, _ in outputs]
            names = ", ".join(name if size is None else f"{name} by {size:.2g}" for name, size in sizes)
            witness = "; ".join([names, *([] if is_mild else dependences(self.trial))])
            yield finding("differs", FRAGILE if is_mild else WRONG, witness=witness), _differing_places([o for o, _ in outputs])

    def _in_half_precision(self) -> Iterator[Placed]:
        """Yield one finding for each reason in half precision."""
        faults = {check.id: check.reason for check in map(self._check, HALF) if check.status == FAILED}
        for reason in dict.fromkeys(faults.values()):
            ids = [id for id, fault in faults.items() if fault == reason]
            yield finding("half-{case}", case=ids[0], cases=", ".join(ids), reason=reason), set(ids)

    def _of_the_mask(self) -> Iterator[Placed]:
        """Yield findings about the meaning of the mask, and a mask that is not accepted."""
        form, name = self.trial.way.form, self.trial.way.mask or ""
        is_padding = "padding" in name
        if form is not None and self.meaning is None and form.added is None and form.hides != is_padding:
            advice = "Set mask=keep or mask=hide to choose."
            yield finding("padding-mask-keeps" if is_padding else "mask-hides", mask=name, advice=advice), {"mask-hides"}
        if not self.trial.is_masked:
            yield finding("mask-not-accepted", mask=name), {case.id for case in CASES if case.mask}

    def _weights(self) -> Iterator[Placed]:
        """Yield a finding if the returned weights did not produce the output."""
        for outcome in self.trial.ordinary:
            right = diagnosis.answer(outcome.inputs).weights
            if outcome.weights is None or outcome.weights.numel() != right.numel():
                continue
            got = outcome.weights.reshape(right.shape).double()
            if not are_close(got, right, is_loose=True):
                size = (got - right).abs().max().item()
                yield finding("other-weights", name=outcome.case.name, size=size), {outcome.case.id}
                return

    def _few_axes(self) -> Iterator[Placed]:
        """Yield a finding if it also computes something for (B, H, L, D), but is right only without heads."""
        if (wide := self.trial.wide) is not None:
            few, many = self.trial.way.layout.name, wide.way.layout.name
            plain = [o for c, o in wide.outcomes.items() if not (c.is_extreme or c.mask or c.is_causal or c.kv_heads)]
            names = [f"with {many}: {m.name}" for m in MUTANTS if diagnosis.fits_all(plain, (m,))]
            yield finding("few-axes", few=few, many=many, also="".join(names[:1])), set()


def _differing_places(outcomes: list[Outcome]) -> set[str]:
    """The ids of the checks that show these outcomes."""
    ids = {outcome.case.id for outcome in outcomes}
    return ids | ({BLIND_MOVED.id} if BLIND.id in ids else set())


def _differ(got: Expected, want: Expected) -> bool:
    """Whether a mistake shows in the output or a gradient."""
    if got.output is None or want.output is None or not are_close(got.output, want.output, is_loose=True):
        return True
    return not all(are_close(a, b, is_loose=True) for a, b in zip(got.gradients, want.gradients, strict=True))
