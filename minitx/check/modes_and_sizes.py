"""Checks of a model's behaviour: evaluation, registered weights, sizes, train mode, half precision and compilation."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minitx.check.calling import NotTriedError, copied, fault_text, is_refusal, need, parts_of
from minitx.check.model_examination import Examination
from minitx.check.model_interface import WithoutDropout, keep_mask
from minitx.check.properties import compare, rounding

PAST_256 = 320
"""The number of tokens for half precision: bfloat16 has no odd numbers above 256."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def determinism(exam: Examination) -> None:
    """Two calls in evaluation mode are equal. ``measure`` stops the check if they differ."""


def weights(exam: Examination) -> None:
    """Modules in plain lists have no other parameters, and tied weights are one tensor."""
    model = exam.called.model
    registered = {id(parameter) for parameter in model.parameters()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            inner = [part for part in parts_of(value) if isinstance(part, nn.Module) and not name.startswith("_")]
            if any(id(parameter) not in registered for part in inner for parameter in part.parameters()):
                exam.failed("weights/registered", "unregistered-modules", place=f"{path}.{name}".lstrip("."))
                return
    exam.passed("weights/registered")
    head = table = None
    with suppress(AttributeError, NotImplementedError):
        head, table = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    is_tied = getattr(exam.called.config, "tie_word_embeddings", None)
    if head is not None and table is not None and isinstance(is_tied, bool) and hasattr(head, "weight"):
        exam.attempt("weights/tied", partial(_tied, exam, is_shared=head.weight is table.weight, is_tied=is_tied))


def _tied(exam: Examination, id: str, is_shared: bool, is_tied: bool) -> None:
    actual = "share one weight" if is_shared else "have separate weights"
    exam.demand(is_shared == is_tied, "tied-otherwise", is_tied=is_tied, actual=actual)


# --- sizes


def sizes(exam: Examination) -> None:
    """Sizes that crash."""
    called = exam.called
    need(called.streams, "it reads no tokens")
    limit = called.limit
    drawn = torch.randint(1, min(limit or 40, 40) + 1, (4,), generator=called.generator).tolist()
    refused = dict[int, str]()
    for length in dict.fromkeys([1, 2, *drawn]):
        exam.attempt("sizes/lengths", partial(_length, exam, length=length, refused=refused))
    if refused:
        words: dict[str, Any] = {"lengths": ", ".join(map(str, sorted(refused))), "error": next(iter(refused.values()))}
        if limit is None:
            exam.describe("rows of {lengths} tokens are refused".format(**words))
        else:
            exam.failed("sizes/refused", "refuses-lengths", limit=limit, **words)
    if limit is not None and limit <= 2048:
        exam.attempt("sizes/limit", partial(_limit, exam, limit=limit))
    if called.stream.width is None:
        exam.attempt("sizes/ids", partial(_ids, exam))


def _tried(exam: Examination, inputs: dict[str, Tensor]) -> tuple[Tensor, Exception | None]:
    """The output, or an empty one and the error."""
    try:
        return exam.called.answer(inputs), None
    except Exception as error:
        return torch.empty(0), error


def _length(exam: Examination, id: str, length: int, refused: dict[int, str]) -> None:
    output, error = _tried(exam, exam.called.draw(2, {exam.called.stream.name: length}))
    words: dict[str, Any] = {"length": length, "s": "s" * (length > 1), "shape": tuple(output.shape)}
    if error is not None and is_refusal(error):
        refused[length] = fault_text(error)
        exam.skip(f"sizes/length-{length}", f"it raises {refused[length]}")
        return
    exam.demand(error is None, "crashes-at-a-length", error=error and fault_text(error), **words)
    exam.demand(output.isfinite().all(), "nan-at-a-length", **words)
    exam.demand(not exam.called.has_positions or output.shape[:2] == (2, length), "loses-axis", **words)


def _limit(exam: Examination, id: str, limit: int) -> None:
    for length in (limit, limit + 1):
        output, error = _tried(exam, exam.called.draw(1, {exam.called.stream.name: length}))
        is_beyond = length > limit
        exam.demand(is_beyond or error is None, "crashes-at-its-limit", length=limit, error=error and fault_text(error))
        exam.demand(output.isfinite().all(), "nan-at-its-limit", length=length, limit=limit)
        if is_beyond and error is None:
            exam.note("beyond-its-limit", length=length)


def _ids(exam: Examination, id: str) -> None:
    last = exam.called.vocabulary - 1
    for token in (last, last + 1, -1):
        inputs = exam.called.draw(1)
        inputs[exam.called.stream.name][0, 1] = token
        _, error = _tried(exam, inputs)
        is_inside = token == last
        words: dict[str, Any] = {"token": token, "count": last + 1}
        exam.demand(not (is_inside and error), "last-id-crashes", error=error and fault_text(error), **words)
        if not (is_inside or error):
            exam.note("ids-outside", **words)


# --- modes


def train_mode(exam: Examination) -> None:
    """In train mode only randomness changes the output, and a causal model remains causal."""
    with exam.called.using(copied(exam.called.model).train()):
        exam.attempt("train-mode/causality", partial(_causal_in_training, exam))
        if any(isinstance(m, BATCH_NORMS) for m in exam.called.model.modules()):
            exam.skip("train-mode", "batch norm uses the batch in train mode")
        else:
            exam.attempt("train-mode", partial(_as_in_evaluation, exam))


def _causal_in_training(exam: Examination, id: str) -> None:
    called = exam.called
    need(not called.why_without_positions, called.why_without_positions)
    need(exam.is_causal, "the model is bidirectional")
    last = exam.places == called.stream.length - 1
    outputs = []
    with WithoutDropout():
        for inputs in (exam.inputs, exam.inputs, called.others(exam.inputs, called.stream.name, last)):
            torch.manual_seed(exam.seed)
            outputs.append(called.answer(inputs))
    is_repeated = outputs[0].shape == exam.base.shape and exam.gap(outputs[1], outputs[0]).is_rounding
    need(is_repeated, "without dropout, two calls in train mode differ")
    gap = exam.gap(outputs[2], outputs[0], ~last)
    exam.judge(id, gap, "not-causal-in-training", explained_by="causality" * exam.sees_later)


def _as_in_evaluation(exam: Examination, id: str) -> None:
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        outputs.append(exam.called.answer(exam.inputs))
    need(outputs[0].shape == exam.base.shape, "it returns another shape in train mode")
    gap = exam.gap(outputs[0], exam.base)
    is_random = not exam.gap(outputs[0], outputs[1]).is_rounding
    exam.demand(is_random or gap.is_rounding, "train-mode-differs", gap)
    if is_random and not sum(m.p for m in exam.called.model.modules() if isinstance(m, DROPOUTS)):
        exam.note("random-training")


SWITCHES = r"(output|return|need)_\w+"
"""Names of arguments that ask for more results, such as ``output_attentions``."""


def switches(exam: Examination) -> None:
    """Asking for more results, such as weights, changes nothing."""
    called = exam.called
    names = [name for name in called.arguments.names if re.fullmatch(SWITCHES, name)]
    if hasattr(called.config, "output_attentions") and "output_attentions" not in names:
        names.append("output_attentions")  # transformers reads it from **kwargs
    need(names, "no argument for further results was found")
    for name in names:
        exam.attempt(f"switches/{name}", partial(_switch, exam, name=name))


def _switch(exam: Examination, id: str, name: str) -> None:
    called, keep = exam.called, dict[str, Tensor]()
    if called.streams and called.stream.form is not None:
        keep = {called.stream.name: keep_mask(exam.inputs[called.stream.name], slice(-2, None))}
    expected = called.answer(exam.inputs, keep)
    try:
        output = called.answer(exam.inputs, keep, **{name: True})
    except Exception as error:
        raise NotTriedError(f"it raises {fault_text(error)}") from error
    need(output.shape == expected.shape, "the first result has another shape")
    where = keep[called.stream.name] if keep and called.has_positions else None
    gap, argument = exam.gap(output, expected, where), name.replace("_", "-")
    exam.judge(id, gap, "changes-with-{argument}", argument=argument, name=name)


def bfloat16(exam: Examination) -> None:
    """In bfloat16 the model differs from float32 by rounding in bfloat16."""
    called = exam.called
    need(called.floats() == torch.float32, f"the model is in {str(called.floats()).removeprefix('torch.')}")
    lengths = {}
    if called.has_positions and len(called.streams) == 1:
        lengths = {called.stream.name: min(called.limit or PAST_256, PAST_256)}
    inputs = called.draw(1, lengths)
    try:
        expected = called.answer(inputs)
    except Exception:  # the limit is smaller than in the config
        inputs = called.draw(1)
        expected = called.answer(inputs)
    low = copied(called.model).to(torch.bfloat16)
    with called.using(low):
        output = called.answer(inputs)
        noise = max(rounding(called.answer, low, inputs, output, seed=seed) for seed in range(2))
    exam.demand(output.isfinite().all(), "bfloat16-not-finite")
    gap = compare(output, expected, noise)
    exam.demand(gap.is_rounding, "bfloat16-differs", gap, share=gap.size / expected.abs().max().item())


def compiled(exam: Examination) -> None:
    """``torch.compile`` changes nothing."""
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch.__trace")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)  # a graph break is no fault, and a trace hides the report of a test
    try:
        with exam.called.using(torch.compile(exam.called.model, backend="aot_eager", dynamic=False)):  # type: ignore[arg-type]
            output = exam.called.answer(exam.inputs)
    except Exception as error:
        exam.failed("compile", "compile-raises", error=fault_text(error))
        return
    finally:
        torch.compiler.reset()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    exam.judge("compile", exam.gap(output, exam.base), "compile-differs")
