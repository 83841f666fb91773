"""Checks of what training needs: the loss is the mean over its targets, and every parameter gets the gradient of the slope."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from minitx.check.calling import NotTriedError, copied, fault_text, need, parts_of
from minitx.check.model_examination import Examination
from minitx.check.model_interface import CalledModel
from minitx.check.properties import Gap, compare, rounding

# --- gradients


Parameters = Mapping[str, Tensor]

TRIED_ALONE = 8
"""The number of parameters without a gradient that are changed, one at a time."""

LARGE, GROUPS, WIDTH, SLOPE = 200_000_000, 24, 1e-4, 0.05
"""Limits of the comparison with finite differences: parameters, groups of parameters, step width, and relative error."""

FAR = 16.0
"""The difference from float64 that counts, as a multiple of the difference that rounding explains."""


def gradient(exam: Examination) -> None:
    """Every parameter that changes the output gets a finite gradient."""
    parameters = _trained(exam.called)
    need(parameters, "no parameter requires a gradient")
    _, grads = _gradients(exam.called, exam.inputs, parameters)
    exam.demand(grads, "no-gradient")
    broken = [name for name, grad in grads.items() if not grad.isfinite().all()]
    exam.demand(not broken, "gradient-not-finite", names=", ".join(broken[:3]))
    silent = [name for name, grad in grads.items() if not grad.any()]
    tried = silent[:TRIED_ALONE]
    moving = {name: gap for name in tried if (gap := _moved_by(exam, name, parameters[name])) is not None}
    name, gap = next(iter(moving.items()), ("", None))
    exam.demand(not moving, "parameter-without-gradient", gap, name=name, count=len(moving), tried=len(tried))
    if silent:
        names = ", ".join(silent[:3]) + (" ..." if len(silent) > 3 else "")
        exam.note("unused-parameters", count=len(silent), all=len(parameters), names=names)
    exam.passed("gradient/all")
    exam.attempt("gradient/differences", partial(_finite_differences, exam))


def _trained(called: CalledModel) -> dict[str, Tensor]:
    return {name: p for name, p in called.model.named_parameters() if p.requires_grad and p.numel()}


def _gradients(called: CalledModel, inputs: Mapping[str, Tensor], parameters: Parameters) -> tuple[Tensor, dict[str, Tensor]]:
    """The weights of a random sum of the output, and the gradients of the sum. No gradients: the output has none."""
    with torch.enable_grad():
        out = called.answer(inputs)
        if not out.requires_grad:
            return out, {}
        weights = torch.randn(out.shape, generator=called.generator).to(out)
        values = list(parameters.values())
        grads = torch.autograd.grad((out * weights).sum(), values, allow_unused=True, materialize_grads=True)
    return weights, dict(zip(parameters, grads, strict=True))


def _moved_by(exam: Examination, name: str, parameter: Tensor) -> Gap | None:
    """The gap in the output if a parameter changes. None: rounding explains it."""
    size = 1e-3 * (0.1 + parameter.abs().max().item())  # so small that a router chooses the same experts
    gaps = []
    for _ in range(2):
        step = torch.randn(parameter.shape, generator=exam.called.generator).to(parameter)
        gaps.append(exam.gap(_moved_by_training(exam.answers(exam.inputs), {name: parameter}, {name: step}, size), exam.base))
    return None if any(gap.is_rounding for gap in gaps) else gaps[0]


def _moved_by_training(call: Callable[[], Tensor], parameters: Parameters, steps: Parameters, width: float) -> Tensor:
    """The result of a call with parameters that are moved along ``steps``."""
    kept = {name: parameters[name].detach().clone() for name in steps}
    for name, step in steps.items():
        parameters[name].add_(step, alpha=width)
    result = call()
    for name, value in kept.items():
        parameters[name].copy_(value)
    return result


# --- gradients against differences


def _finite_differences(exam: Examination, id: str) -> None:
    """Gradients equal finite differences of the output, in float64."""
    called = exam.called
    is_small = sum(p.numel() for p in called.model.parameters()) <= LARGE
    need(is_small and called.floats() == torch.float32, f"it is for float32 and at most {LARGE // 10**6} million parameters")
    with called.using(copied(called.model).to(torch.float64)):
        try:
            exact = called.answer(exam.inputs)
            gap = compare(exam.base, exact, rounding(called.answer, called.model, exam.inputs, exact))
        except Exception as error:  # parts of some models compute in a fixed dtype
            raise NotTriedError(f"in float64 it raises {fault_text(error)}") from error
        share, of_slope = max(_slopes(exam))
    if gap.size > FAR * gap.allowed:
        exam.failed("gradient/precision", "precision-lost", gap)
    exam.demand(share <= SLOPE, "gradient-differs", witness=of_slope)
    exam.passed(id)


def _slopes(exam: Examination) -> Iterator[tuple[float, str]]:
    """Yield, for each group of parameters, the relative difference of their gradient from the measured slope, and a witness."""
    called, parameters = exam.called, _trained(exam.called)
    inputs = {name: value[:1] for name, value in exam.inputs.items()}
    weights, gradients = _gradients(called, inputs, parameters)

    def total() -> Tensor:
        return (called.answer(inputs) * weights).sum()

    def slope(steps: Parameters, width: float) -> float:
        ends = [_moved_by_training(total, parameters, steps, length).item() for length in (width, -width)]
        return (ends[0] - ends[1]) / (2 * width)

    least, count = max(1e-4 * abs(total().item()), 1e-9), -(-len(parameters) // GROUPS)
    for start in range(0, len(parameters), count):
        names, steps = list(parameters)[start : start + count], dict[str, Tensor]()
        for name in names:
            size = max(parameters[name].detach().abs().mean().item(), 1e-2)
            steps[name] = size * torch.randn(parameters[name].shape, generator=called.generator).to(parameters[name])
        parts = [gradients[name] * step for name, step in steps.items()]
        expected = sum(part.sum().item() for part in parts)
        measured = slope(steps, WIDTH)
        size = max(sum(part.norm().item() ** 2 for part in parts) ** 0.5, abs(measured), abs(expected), least)
        difference = abs(measured - expected)
        if difference > SLOPE * size:  # a wider step estimates the error of the finite difference
            difference = max(0.0, difference - 4 * abs(measured - slope(steps, 8 * WIDTH)))
        group = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        yield difference / size, f"along a random step of {group}: gradient {expected:.3g}, slope {measured:.3g}"


# --- the loss


NO_LABEL = -100
"""torch's label of a token that isn't a target."""

EXACT = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""The largest relative difference from the mean by rounding, by the dtype of the logits."""


def loss(exam: Examination) -> None:
    """The loss is the mean over its own targets, and labels are shifted once."""
    called = exam.called
    name = next((name for name in ("labels", "targets") if name in called.arguments.names), "")
    is_of_ids = called.has_positions and len(called.streams) == 1 and called.stream.width is None
    need(name and is_of_ids and exam.base.shape[-1] >= called.vocabulary, "no argument for labels of tokens was found")
    labels = called.draw()[called.stream.name]
    shift = min((1, 0, 2), key=lambda shift: _difference(exam, name, labels, shift))  # random labels tell shifts apart
    exact = EXACT.get(exam.base.dtype, 1e-2)
    need(_difference(exam, name, labels, shift) <= exact, "it is not the mean cross-entropy of the logits")
    if shift == 2:
        exam.failed("loss/shift", "labels-shifted-twice")
        return
    exam.passed("loss/shift")
    labels[0, : labels.shape[1] // 2] = labels[1, -2:] = NO_LABEL
    exam.attempt("loss/hidden", partial(_hidden, exam, name=name, labels=labels, shift=shift, exact=exact))


def _hidden(exam: Examination, id: str, name: str, labels: Tensor, shift: int, exact: float) -> None:
    for rows, what in ((labels, "a batch"), (labels[:1], "one row")):
        try:
            is_mean = _difference(exam, name, rows, shift) <= exact
        except IndexError as error:
            raise NotTriedError(f"the label {NO_LABEL} raises") from error
        exam.demand(is_mean, "loss-of-hidden-targets", what=what, label=NO_LABEL)


def _difference(exam: Examination, name: str, labels: Tensor, shift: int) -> float:
    """The relative difference of the loss from the mean cross-entropy of output i and label i + ``shift``. inf: no loss."""
    inputs = {stream: tokens[: len(labels)] for stream, tokens in exam.inputs.items()}
    result = exam.called.run(inputs, None, **{name: labels})
    losses = [part for part in (result, *parts_of(result)) if isinstance(part, Tensor) and part.numel() == 1]
    logits = exam.base[: len(labels), : labels.shape[1] - shift].flatten(0, 1).float()
    mean = cross_entropy(logits, labels[:, shift:].flatten(), ignore_index=NO_LABEL)
    return min((abs(loss.item() / mean.item() - 1) for loss in losses), default=torch.inf)
