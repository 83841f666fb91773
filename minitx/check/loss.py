"""Check of a model's loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from minitx.check.calling import parts_of
from minitx.check.examination import Examination
from minitx.check.results import FRAGILE, WRONG, Finding

NO_LABEL = -100
"""torch's label of a token that isn't a target."""

EXACT = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""The largest relative difference from the mean by rounding, by the dtype of the logits."""


def loss(exam: Examination) -> None:
    """The loss is the mean over its own targets, and labels are shifted once."""
    called, L = exam.called, exam.base.shape[-2]
    name = next((name for name in ("labels", "targets") if name in called.names), None)
    is_of_ids = called.has_positions and len(called.streams) == 1 and called.stream.width is None
    if name is None or not is_of_ids or exam.base.shape[-1] < called.vocabulary:
        exam.skip("loss", "no argument for labels of tokens was found")
        return
    labels = called.draw()[called.stream.name]
    shift = min((1, 0, 2), key=lambda shift: _difference(exam, name, labels, shift))  # random labels tell shifts apart
    exact = EXACT.get(exam.base.dtype, 1e-2)
    if _difference(exam, name, labels, shift) > exact:
        exam.skip("loss", "it is not the mean cross-entropy of the logits")
        return
    if shift == 2:
        fault = "labels are shifted twice: the loss is of the token after the next"
        exam.failed("loss/shift", Finding("labels-shifted-twice", WRONG, fault, "Shift in the data or in the model."))
        return
    exam.passed("loss/shift")
    labels[0, : L // 2] = labels[1, L - 2 :] = NO_LABEL
    for rows, what in ((slice(None), "a batch"), (slice(1), "one row")):
        try:
            is_mean = _difference(exam, name, labels[rows], shift) <= exact
        except IndexError:
            exam.skip("loss/hidden", f"the label {NO_LABEL} raises")
            return
        if not is_mean:
            fault = f"the loss of {what} is not the mean over the labels that are not {NO_LABEL}"
            exam.failed("loss/hidden", Finding("loss-of-hidden-targets", FRAGILE, fault, "Divide by their number."))
            return
    exam.passed("loss/hidden")


def _difference(exam: Examination, name: str, labels: Tensor, shift: int) -> float:
    """The relative difference of the loss from the mean cross-entropy of output i and label i + ``shift``. inf: no loss."""
    inputs = {stream: tokens[: len(labels)] for stream, tokens in exam.inputs.items()}
    options: dict[str, Any] = {name: labels}
    result = exam.called.run(inputs, **options)
    losses = [part for part in (result, *parts_of(result)) if isinstance(part, Tensor) and part.numel() == 1]
    logits = exam.base[: len(labels), : labels.shape[1] - shift].flatten(0, 1).float()
    mean = cross_entropy(logits, labels[:, shift:].flatten(), ignore_index=NO_LABEL)
    return min((abs(loss.item() / mean.item() - 1) for loss in losses), default=torch.inf)
