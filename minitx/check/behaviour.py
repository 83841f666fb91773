"""Checks of a model's behaviour: evaluation, registered weights, sizes, train mode, half precision and compilation."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from minitx.check.called_model import WithoutDropout, keep_mask, limit_of
from minitx.check.calling import fault_text, is_refusal, parts_of
from minitx.check.copying import copied
from minitx.check.examination import Examination
from minitx.check.properties import compare, rounding
from minitx.check.results import FRAGILE, NOTE, WRONG, Finding

PAST_256 = 320
"""The number of tokens for half precision: bfloat16 has no odd numbers above 256."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def determinism(exam: Examination) -> None:
    """Two calls in evaluation mode are equal. ``measure`` stops the check if they differ."""
    exam.passed("determinism")


def weights(exam: Examination) -> None:
    """Modules in plain lists have no other parameters, and tied weights are one tensor."""
    model = exam.called.model
    registered = {id(parameter) for parameter in model.parameters()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            inner = [part for part in parts_of(value) if isinstance(part, nn.Module) and not name.startswith("_")]
            if any(id(parameter) not in registered for part in inner for parameter in part.parameters()):
                place = f"{path}.{name}".lstrip(".")
                fault = f"modules in the plain list or dict {place} are not part of the model: not trained, saved or moved"
                finding = Finding("unregistered-modules", WRONG, fault, "Use nn.ModuleList or nn.ModuleDict.")
                exam.failed("weights/registered", finding)
                return
    exam.passed("weights/registered")
    head = table = None
    with suppress(AttributeError, NotImplementedError):
        head, table = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    is_tied = getattr(exam.called.config, "tie_word_embeddings", None)
    if head is None or table is None or not isinstance(is_tied, bool) or not hasattr(head, "weight"):
        return
    if (head.weight is table.weight) != is_tied:
        actual = "share one weight" if head.weight is table.weight else "have separate weights"
        fault = f"config.tie_word_embeddings={is_tied}, but head and table {actual}"
        exam.failed("weights/tied", Finding("tied-otherwise", FRAGILE, fault, "Call tie_weights()."))
    else:
        exam.passed("weights/tied")


# --- sizes


def sizes(exam: Examination) -> None:
    """Sizes that crash."""
    called = exam.called
    if not called.streams:
        exam.skip("sizes", "it reads no tokens")
        return
    name, limit = called.stream.name, limit_of(called.model)
    most = min(limit or 40, 40)
    drawn = torch.randint(1, most + 1, (4,), generator=called.generator).tolist()
    for length in dict.fromkeys([1, 2, *drawn]):
        exam.attempt("sizes/lengths", partial(_length, exam, name=name, length=length))
    if limit is not None and limit <= 2048:
        exam.attempt("sizes/limit", partial(_limit, exam, name=name, limit=limit))
    if called.stream.width is None:
        exam.attempt("sizes/ids", partial(_ids, exam, name=name))


def _length(exam: Examination, id: str, name: str, length: int) -> None:
    called = exam.called
    inputs = called.draw(2, {name: length})
    try:
        output = called.answer(inputs)
    except Exception as error:
        if is_refusal(error):
            exam.skip(f"sizes/length-{length}", f"it raises {fault_text(error)}")
        else:
            fault = f"{length} token{'s' * (length > 1)} crash"
            exam.failed(id, Finding("crashes-at-a-length", FRAGILE, fault, witness=fault_text(error)))
        return
    if not output.isfinite().all():
        exam.failed(id, Finding("nan-at-a-length", WRONG, f"NaN for {length} tokens"))
    elif called.has_positions and output.shape[:2] != (2, length):
        fault = f"{length} tokens give an output of shape {tuple(output.shape)}"
        exam.failed(id, Finding("loses-axis", FRAGILE, fault, "squeeze() needs its axis."))
    elif not any(check.id == id for check in exam.checks):
        exam.passed(id)


def _limit(exam: Examination, id: str, name: str, limit: int) -> None:
    called = exam.called
    for length in (limit, limit + 1):
        try:
            output = called.answer(called.draw(1, {name: length}))
        except Exception as error:
            if length > limit:
                exam.passed(id)
            else:
                fault = f"{limit} tokens, its limit, crash"
                exam.failed(id, Finding("crashes-at-its-limit", FRAGILE, fault, witness=fault_text(error)))
            return
        if not output.isfinite().all():
            exam.failed(id, Finding("nan-at-its-limit", WRONG, f"NaN for {length} tokens; its limit is {limit}"))
            return
    exam.note(Finding("beyond-its-limit", NOTE, f"{limit + 1} tokens, one more than its limit, raise no error"))
    exam.passed(id)


def _ids(exam: Examination, id: str, name: str) -> None:
    called = exam.called
    for token in (called.vocabulary - 1, called.vocabulary, -1):
        inputs = called.draw(1)
        inputs[name][0, 1] = token
        try:
            called.answer(inputs)
        except Exception as error:
            if token == called.vocabulary - 1:
                fault = f"the last id, {token} of {called.vocabulary}, crashes"
                exam.failed(id, Finding("last-id-crashes", FRAGILE, fault, witness=fault_text(error)))
                return
            continue
        if token != called.vocabulary - 1:
            text = f"id {token} is outside of the table of {called.vocabulary} ids, but raises no error"
            exam.note(Finding("ids-outside", NOTE, text))
    exam.passed(id)


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
    if called.why_without_positions or not exam.is_causal:
        exam.skip(id, called.why_without_positions or "the model is bidirectional")
        return
    last = exam.places == called.stream.length - 1
    outputs = []
    with WithoutDropout():
        for inputs in (exam.inputs, exam.inputs, called.others(exam.inputs, called.stream.name, last)):
            torch.manual_seed(exam.seed)
            outputs.append(called.answer(inputs))
    if outputs[0].shape != exam.base.shape or not exam.gap(outputs[1], outputs[0]).is_rounding:
        exam.skip(id, "without dropout, two calls in train mode differ")
        return
    fault = "in train mode, later tokens change earlier outputs"
    witness = "changing the last token moves the output of row {gap.place[0]}, token {gap.place[1]}, by {gap.size:.2g}"
    advice = "Batch norm takes its mean over all positions: use LayerNorm or RMSNorm."
    finding = Finding("not-causal-in-training", exam.severity, fault, advice, witness)
    exam.judge(id, exam.gap(outputs[2], outputs[0], ~last), finding, explained_by="causality" * exam.sees_later)


def _as_in_evaluation(exam: Examination, id: str) -> None:
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        outputs.append(exam.called.answer(exam.inputs))
    if outputs[0].shape != exam.base.shape:
        exam.skip(id, "it returns another shape in train mode")
        return
    first = exam.gap(outputs[0], exam.base)
    is_random = not exam.gap(outputs[0], outputs[1]).is_rounding
    if not is_random and not first.is_rounding:
        fault, witness = "train mode differs from evaluation without randomness", "the output differs by {gap.size:.2g}"
        exam.judge(id, first, Finding("train-mode-differs", FRAGILE, fault, "Look for self.training.", witness))
        return
    if is_random and not sum(m.p for m in exam.called.model.modules() if isinstance(m, DROPOUTS)):
        exam.note(Finding("random-training", NOTE, "it is random in train mode, though no nn.Dropout has p > 0"))
    exam.passed(id)


SWITCHES = r"(output|return|need)_\w+"
"""Names of arguments that ask for more results, such as ``output_attentions``."""


def switches(exam: Examination) -> None:
    """Asking for more results, such as weights, changes nothing."""
    called = exam.called
    names = [name for name in called.names if re.fullmatch(SWITCHES, name)]
    if hasattr(called.config, "output_attentions") and "output_attentions" not in names:
        names.append("output_attentions")  # transformers reads it from **kwargs
    if not names:
        exam.skip("switches", "no argument for further results was found")
    for name in names:
        exam.attempt("switches", partial(_switch, exam, name=name))


def _switch(exam: Examination, id: str, name: str) -> None:
    called, keep = exam.called, dict[str, Tensor]()
    if called.streams and called.stream.form is not None:
        keep = {called.stream.name: keep_mask(exam.inputs[called.stream.name], slice(-2, None))}
    expected = called.answer(exam.inputs, keep)
    try:
        output = called.answer(exam.inputs, keep, **{name: True})
    except Exception as error:
        exam.skip(f"{id}/{name}", f"it raises {fault_text(error)}")
        return
    if output.shape != expected.shape:
        exam.skip(f"{id}/{name}", "the first result has another shape")
        return
    where = keep[called.stream.name] if keep and called.has_positions else None
    witness = "the output of row {gap.place[0]} differs by {gap.size:.2g} (a visible token moves it by {exam.typical:.2g})"
    advice = "Look for a second path of the attention: it needs the same mask and scale."
    finding = Finding(f"changes-with-{name.replace('_', '-')}", WRONG, f"{name}=True changes the output", advice, witness)
    exam.judge(f"{id}/{name}", exam.gap(output, expected, where), finding)


def bfloat16(exam: Examination) -> None:
    """In bfloat16 the model differs from float32 by rounding in bfloat16."""
    called = exam.called
    if called.floats() != torch.float32:
        exam.skip("bfloat16", f"the model is in {str(called.floats()).removeprefix('torch.')}")
        return
    lengths = {}
    if called.has_positions and len(called.streams) == 1:
        lengths = {called.stream.name: min(limit_of(called.model) or PAST_256, PAST_256)}
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
    if not output.isfinite().all():
        exam.failed("bfloat16", Finding("bfloat16-not-finite", WRONG, "NaN or infinity in bfloat16"))
        return
    gap = compare(output, expected, noise)
    if gap.is_rounding:
        exam.passed("bfloat16")
        return
    share = gap.size / expected.abs().max().item()
    witness = f"the output differs by {gap.size:.2g}, {share:.0%} of the largest output; rounding explains {gap.allowed:.2g}"
    fault = "bfloat16 differs from float32 by more than rounding"
    advice = "Keep positions, angles, norms and the softmax in float32."
    exam.failed("bfloat16", Finding("bfloat16-differs", FRAGILE, fault, advice, witness), gap)


def compiled(exam: Examination) -> None:
    """``torch.compile`` changes nothing."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)  # a graph break is no fault
    try:
        with exam.called.using(torch.compile(exam.called.model, backend="aot_eager", dynamic=False)):  # type: ignore[arg-type]
            output = exam.called.answer(exam.inputs)
    except Exception as error:
        exam.failed("compile", Finding("compile-raises", FRAGILE, "torch.compile raises", witness=fault_text(error)))
        return
    finally:
        torch.compiler.reset()
        logger.setLevel(level)
    finding = Finding("compile-differs", WRONG, "the compiled model differs", "", "the output differs by {gap.size:.2g}")
    exam.judge("compile", exam.gap(output, exam.base), finding)
