"""How a model runs: evaluation, registered weights, sizes, train mode, half precision and compilation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from minitx.check.called_model import is_refusal, limit_of, said
from minitx.check.examination import Examination
from minitx.check.properties import compare, rounding
from minitx.check.results import Severity

LONG = 320
"""Tokens for half precision: bfloat16 has no odd numbers above 256."""


def determinism(exam: Examination) -> None:
    """Two calls in evaluation mode are equal. A difference has stopped the check before."""
    exam.passed("determinism")


def weights(exam: Examination) -> None:
    """Parts in plain lists have no parameters, and tied tables are one."""
    model = exam.called.model
    hidden = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and any(isinstance(part, nn.Module) and _has_own(part, model) for part in _items(value))
    ]
    if hidden:
        fault = f"modules in the plain list or dict {hidden[0]} are not part of the model: they are not trained, saved or moved"
        exam.failed("weights/registered", "unregistered-modules", Severity.WRONG, fault, "Use nn.ModuleList or nn.ModuleDict.")
    else:
        exam.passed("weights/registered")
    try:
        head, table = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        head = table = None
    wanted = getattr(exam.called.config, "tie_word_embeddings", None)
    if head is None or table is None or not isinstance(wanted, bool) or not hasattr(head, "weight"):
        return
    if (head.weight is table.weight) != wanted:
        is_one = "one" if head.weight is table.weight else "two"
        fault = f"config.tie_word_embeddings={wanted}, and head and table are {is_one}"
        exam.failed("weights/tied", "tied-otherwise", Severity.FRAGILE, fault, "Call tie_weights().")
    else:
        exam.passed("weights/tied")


def _items(value: Any) -> Sequence[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


def _has_own(part: nn.Module, model: nn.Module) -> bool:
    mine = {id(p) for p in model.parameters()}
    return any(id(p) not in mine for p in part.parameters())


# --- sizes


def sizes(exam: Examination) -> None:
    """Sizes that crash."""
    called = exam.called
    if not called.streams:
        exam.attempt("sizes/rows", partial(_one_row, exam))
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


def _one_row(exam: Examination, id: str) -> None:
    found = exam.called.answer({name: value[:1] for name, value in exam.inputs.items()})
    if found.shape[:1] == (1,):
        exam.passed(id)
    else:
        fault = f"one row gives an output of shape {tuple(found.shape)}"
        exam.failed(id, "loses-axis", Severity.FRAGILE, fault, "squeeze() needs its axis.")


def _length(exam: Examination, id: str, name: str, length: int) -> None:
    called = exam.called
    inputs = called.draw(2, {name: length})
    try:
        found = called.answer(inputs)
    except Exception as error:
        if is_refusal(error):
            exam.skip(f"sizes/length-{length}", f"it raises {said(error)}")
        else:
            fault = f"{length} token{'s' * (length > 1)} crash"
            exam.failed(id, "crashes-at-a-length", Severity.FRAGILE, fault, witness=said(error))
        return
    if not found.isfinite().all():
        exam.failed(id, "nan-at-a-length", Severity.WRONG, f"NaN for {length} tokens")
    elif called.has_positions and found.shape[:2] != (2, length):
        fault = f"{length} tokens give an output of shape {tuple(found.shape)}"
        exam.failed(id, "loses-axis", Severity.FRAGILE, fault, "squeeze() needs its axis.")
    elif not any(check.id == id for check in exam.checks):
        exam.passed(id)


def _limit(exam: Examination, id: str, name: str, limit: int) -> None:
    called = exam.called
    for length in (limit, limit + 1):
        try:
            found = called.answer(called.draw(1, {name: length}))
        except Exception as error:
            if length == limit:
                exam.failed(
                    id, "crashes-at-its-limit", Severity.FRAGILE, f"{limit} tokens, its limit, crash", witness=said(error)
                )
                return
            exam.passed(id)
            return
        if not found.isfinite().all():
            exam.failed(id, "nan-at-its-limit", Severity.WRONG, f"NaN for {length} tokens; its limit is {limit}")
            return
    exam.note("beyond-its-limit", f"{limit + 1} tokens, one more than its limit, raise no error")
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
                exam.failed(id, "last-id-crashes", Severity.FRAGILE, fault, witness=said(error))
                return
            continue
        if token in (called.vocabulary, -1):
            exam.note("ids-outside", f"id {token}, outside of the table of {called.vocabulary}, raises no error")
    exam.passed(id)


# --- modes


def train_mode(exam: Examination) -> None:
    """In train mode the model differs by randomness alone."""
    called, model = exam.called, exam.called.model
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        exam.skip("train-mode", "batch norm uses the batch in train mode")
        return
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    try:
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            found.append(called.answer(exam.inputs))
    finally:
        model.eval()
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
    if found[0].shape != exam.base.shape:
        exam.skip("train-mode", "it returns another shape in train mode")
        return
    first, second = exam.gap(found[0], exam.base), exam.gap(found[0], found[1])
    rates = sum(m.p for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd))
    if second.is_rounding and not first.is_rounding:
        fault = "train mode differs from evaluation without randomness"
        exam.failed(
            "train-mode",
            "train-mode-differs",
            Severity.FRAGILE,
            fault,
            "Look for self.training.",
            f"by {first.size:.2g}",
            first,
        )
        return
    if not second.is_rounding and not rates:
        exam.note("random-training", "it is random in train mode, though no nn.Dropout has p > 0")
    exam.passed("train-mode")


def bfloat16(exam: Examination) -> None:
    """In bfloat16 the model differs from float32 by rounding in bfloat16."""
    called = exam.called
    if called.floats() != torch.float32:
        exam.skip("bfloat16", f"the model is of {str(called.floats()).removeprefix('torch.')}")
        return
    limit = limit_of(called.model)
    lengths = {}
    if called.streams and called.has_positions and len(called.streams) == 1:
        lengths = {called.stream.name: LONG if limit is None else min(limit, LONG)}
    inputs = called.draw(1, lengths)
    try:
        wanted = called.answer(inputs)
    except Exception:  # its limit is smaller than its config says
        inputs = called.draw(1)
        wanted = called.answer(inputs)
    model = called.model
    try:
        low = copy.deepcopy(model).to(torch.bfloat16)
        called.model = low
        rounded = {name: v.to(torch.bfloat16) if v.is_floating_point() else v for name, v in inputs.items()}
        found = called.answer(rounded)
        noise = max(rounding(called.answer, low, rounded, found, seed=seed) for seed in range(2))
    finally:
        called.model = model
    if not found.isfinite().all():
        exam.failed("bfloat16", "bfloat16-not-finite", Severity.WRONG, "NaN or infinity in bfloat16")
        return
    gap = compare(found, wanted, noise)
    if gap.is_rounding:
        exam.passed("bfloat16")
        return
    share = gap.size / wanted.abs().max().item()
    witness = f"by {gap.size:.2g}, {share:.0%} of the largest output; rounding explains {gap.allowed:.2g}"
    fault = "bfloat16 differs from float32 by more than rounding"
    advice = "Keep positions, angles, norms and the softmax in float32."
    exam.failed("bfloat16", "bfloat16-differs", Severity.FRAGILE, fault, advice, witness, gap)


def compiled(exam: Examination) -> None:
    """``torch.compile`` changes nothing."""
    called, model = exam.called, exam.called.model
    try:
        called.model = torch.compile(model, backend="aot_eager", dynamic=False)  # type: ignore[assignment]
        found = called.answer(exam.inputs)
    except Exception as error:
        exam.failed("compile", "compile-raises", Severity.FRAGILE, "torch.compile raises", witness=said(error))
        return
    finally:
        called.model = model
        torch.compiler.reset()
    gap = exam.gap(found, exam.base)
    if gap.is_rounding:
        exam.passed("compile", gap)
    else:
        exam.failed(
            "compile", "compile-differs", Severity.WRONG, "the compiled model differs", witness=f"by {gap.size:.2g}", gap=gap
        )
