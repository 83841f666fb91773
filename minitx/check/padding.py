"""Checks of tokens that a row must not see: its padding, and other documents."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minitx.check.called_model import Stream, keep_mask
from minitx.check.examination import Examination
from minitx.check.properties import Gap
from minitx.check.results import FRAGILE, NOTE, WRONG, Finding


def padding(exam: Examination) -> None:
    """Hidden tokens change nothing."""
    if not exam.called.streams:
        exam.skip("padding", "it reads no tokens")
    for stream in exam.called.streams:
        prefix = "padding" if stream is exam.called.stream else "padding/source"
        if stream.form is None:
            exam.skip(prefix, stream.why_unmasked)
            continue
        checks = _Padding(exam, stream, prefix)
        if stream.name in exam.turned and "attention_mask" in (stream.mask or ""):
            fault = f"{stream.mask} is inverted: 1 hides a token"
            advice = "In attention_mask, 1 is a real token: masked_fill(mask == 0, -inf)."
            exam.failed(f"{prefix}/meaning", checks.finding("mask-inverted", WRONG, fault, advice))
        exam.attempt(f"{prefix}/mask-of-ones", checks.ones)
        for side in ("left", "right", "inside"):
            exam.attempt(f"{prefix}/{side}", partial(checks.side, side=side))


class _Padding:
    """The checks of padding in one stream."""

    def __init__(self, exam: Examination, stream: Stream, prefix: str) -> None:
        self.exam, self.stream, self.prefix = exam, stream, prefix
        self.is_output = stream is exam.called.stream and exam.called.has_positions

    def finding(self, id: str, *parts: Any) -> Finding:
        """Return a finding. Its id names the source if the output belongs to another stream."""
        return Finding(id if self.prefix == "padding" else f"source-{id}", *parts)

    def _answer(self, keep: Tensor, inputs: dict[str, Tensor] | None = None, **options: Any) -> Tensor:
        return self.exam.called.answer(inputs or self.exam.inputs, {self.stream.name: keep}, **options)

    def _still(self, keep: Tensor) -> Tensor:
        """The positions or rows at which the output must not move."""
        return keep if self.is_output else self.exam.whole

    def ones(self, id: str) -> None:
        """A mask that hides nothing changes nothing."""
        exam, keep = self.exam, keep_mask(self.exam.inputs[self.stream.name])
        fault = f"{self.stream.mask} changes the output, although it hides nothing"
        advice = "Does the mask replace the causal mask?"
        witness = "a mask that hides nothing moves the output by {gap.size:.2g}"
        finding = self.finding("mask-of-ones-changes", WRONG, fault, advice, witness)
        calls = exam.answers(exam.inputs), exam.answers(exam.inputs, {self.stream.name: keep})
        exam.judge(id, exam.gap(self._answer(keep), exam.base), finding, *calls, exam.whole)

    def side(self, id: str, side: str) -> None:
        """Padding on one side changes nothing."""
        exam, L = self.exam, self.stream.length
        third = max(1, L // 3)
        places = {"left": slice(third), "right": slice(L - third, L), "inside": slice(third, third + max(1, third // 2))}
        keep = keep_mask(exam.inputs[self.stream.name], places[side])
        changed = exam.called.others(exam.inputs, self.stream.name, ~keep)
        still, expected = self._still(keep), self._answer(keep)
        where = "inside" if side == "inside" else f"on the {side}"
        if not expected[still].isfinite().all():
            fault = f"NaN at real tokens with padding {where}"
            advice = "Hide with a finite number, or clear rows that see nothing."
            exam.failed(id, self.finding(f"nan-{side}", WRONG, fault, advice))
            return
        if not expected.isfinite().all():
            text = "NaN at the padding itself, so the sum of all losses is NaN"
            exam.failed(f"{id}/finite", self.finding("nan-at-padding", FRAGILE, text, "Clear rows that see nothing."))
        gap = exam.gap(self._answer(keep, changed), expected, still)
        if not gap.is_rounding:
            if excuse := self._excuse(keep, side):
                exam.note(excuse)
                exam.skip(id, excuse.fault)
                return
            calls = (exam.answers(tokens, {self.stream.name: keep}) for tokens in (exam.inputs, changed))
            padded = torch.arange(len(keep)) == 1  # its real tokens, and its tokens in the other stream, must not move
            stills = [keep & padded[:, None], *[(still.T & padded).T] * (still is not keep)]
            exam.judge(id, gap, self._leak(where, keep), *calls, *stills)
            return
        exam.passed(id, gap)
        self._rows(id, keep, expected)
        if side != "inside":
            exam.attempt(f"{id}/alone", partial(self._alone, side=side, keep=keep))

    def _rows(self, id: str, keep: Tensor, expected: Tensor) -> None:
        """Padding of a row changes no other row, and has the same effect in a batch of one."""
        exam, still = self.exam, self._still(keep)
        others = torch.ones_like(still)
        others[1] = False
        between = exam.gap(expected, exam.base, others)
        if not between.is_rounding:
            witness = "padding of row 1 moves the output of row {gap.place[0]} by {gap.size:.2g}"
            finding = self.finding("padding-changes-rows", WRONG, "padding of a row changes other rows", "", witness)
            exam.judge(f"{id}/other-rows", between, finding)
        if exam.are_rows_apart:
            row = {key: value[1:2] for key, value in exam.inputs.items()}
            gap = exam.gap(self._answer(keep[1:2], row), expected[1:2], still[1:2])
            fault = f"in a batch of one, {self.stream.mask} has another effect"
            advice = "Look for conditions on the batch size."
            witness = "the output of the padded row differs by {gap.size:.2g} (a visible token moves it by {exam.typical:.2g})"
            exam.judge(f"{id}/one-row", gap, self.finding("mask-in-a-batch-of-one", WRONG, fault, advice, witness))

    def _excuse(self, keep: Tensor, side: str) -> Finding | None:
        """Return a note if the model may let hidden tokens of this kind move the output.

        It knows padding by its id, it reads one output at the outermost token, or it hides tokens only with another mask, too.
        """
        exam, name, mask = self.exam, self.stream.name, self.stream.mask
        assert self.stream.form is not None
        if exam.called.pad is not None and self.stream.width is None:
            tokens = exam.inputs[name].masked_fill(~keep.to(exam.called.device), exam.called.pad)
            if self._gap_alone(keep, {**exam.inputs, name: tokens}, **exam.called.counted(keep)).is_rounding:
                text = f"padding is recognised by the id {exam.called.pad}, not by {mask}"
                return self.finding("padding-by-id", NOTE, text, "Hide tokens with this id.")
        if not self.is_output and side != "inside":
            inner, edge = ~keep, "first" if side == "left" else "last"
            inner[:, 0 if side == "left" else -1] = False
            if not self._moved(keep, inner):
                text = f"the output is read at the {edge} token, also if {mask} hides it"
                return self.finding(f"reads-{side}-edge", NOTE, text, f"Do not pad on the {side}.")
        taken = {stream.mask for stream in exam.called.streams}
        for other in (other for other in exam.called.names if "mask" in other and other not in taken):
            with suppress(Exception):  # this argument takes another form
                if not self._moved(keep, ~keep, **{other: self.stream.form.write(keep.to(exam.called.device))}):
                    text = f"{mask} hides tokens only together with {other}"
                    return self.finding("needs-another-mask", NOTE, text, f"Pass the mask as {other}, too.")
        return None

    def _moved(self, keep: Tensor, changed: Tensor, **options: Any) -> bool:
        """Return whether other tokens at ``changed`` move the output."""
        twin = self.exam.called.others(self.exam.inputs, self.stream.name, changed)
        first, second = (self._answer(keep, tokens, **options) for tokens in (self.exam.inputs, twin))
        return not self.exam.gap(second, first, self._still(keep)).is_rounding

    def _gap_alone(self, keep: Tensor, inputs: dict[str, Tensor], **positions: Any) -> Gap:
        """The gap between a padded row and the same row alone, with the same positions."""
        exam, name, real = self.exam, self.stream.name, keep[1]
        alone = {key: value[1:2] for key, value in inputs.items()} | {name: inputs[name][1:2, real].contiguous()}
        padded = self._answer(keep, inputs, **positions)[1:2]
        expected = exam.called.answer(alone, **{key: value[1:2, real] for key, value in positions.items()})
        return exam.gap(padded[:, real] if self.is_output else padded, expected)

    def _leak(self, where: str, keep: Tensor) -> Finding:
        exam, mask = self.exam, self.stream.mask
        token = ", token {gap.place[1]}," if self.is_output else ""
        witness = f"other tokens at hidden places {where} move the output of row {{gap.place[0]}}{token}"
        witness += " by {gap.size:.2g} (a visible token: {exam.typical:.2g})"
        if exam.gap(self._answer(keep), exam.base).is_rounding:
            advice = "Pass it on to the attention of every layer."
            return self.finding("mask-ignored", WRONG, f"{mask} is ignored", advice, witness)
        advice = "Hide their keys in every layer, and clear their values in other modules that mix positions."
        if self.prefix != "padding":
            advice = "Hide their keys in every layer of the encoder, and in cross-attention, which needs the mask, too."
        return self.finding("padding-leaks", WRONG, f"hidden tokens leak through {mask}", advice, witness)

    def _alone(self, id: str, side: str, keep: Tensor) -> None:
        """A padded row equals the same row alone."""
        exam, gap = self.exam, self._gap_alone(keep, self.exam.inputs)
        witness = "the output of the row differs by {gap.size:.2g} (a visible token moves it by {exam.typical:.2g})"
        if side == "right":
            fault = "a row with padding on the right differs from the same row alone"
            advice = "Look for a mean, a norm or a last token over the whole length."
            exam.judge(id, gap, self.finding("padded-row-differs", FRAGILE, fault, advice, witness))
            return
        fault = "with padding on the left, positions are counted from the padding"
        advice = "Count positions from the first real token: mask.cumsum(-1) - 1."
        severity = WRONG if "relative" in exam.expect else NOTE
        if not gap.is_rounding and "position_ids" in exam.called.names:
            severity, advice = FRAGILE, "position_ids do not fix it."
            with suppress(Exception):
                if self._gap_alone(keep, exam.inputs, **exam.called.counted(keep)).is_rounding:
                    severity, advice = NOTE, "With position_ids = mask.cumsum(-1) - 1 it is right."
        exam.judge(id, gap, self.finding("positions-of-left-padding", severity, fault, advice, witness))


# --- documents


def documents(exam: Examination) -> None:
    """The second of two documents in one row gives the same output as alone."""
    called = exam.called
    names = [name for name in ("document_ids", "position_ids", "seq_idx") if name in called.names]
    if called.why_without_positions or len(called.streams) > 1 or not names:
        exam.skip("documents", "no argument for documents was found")
        return
    stream, places = called.stream, exam.places.to(called.device)
    second = places >= stream.length // 2
    keep = {stream.name: keep_mask(places)}
    apart: dict[str, bool] = {}
    for name in names:
        if name == "position_ids" and not exam.is_causal:
            exam.skip("documents/position_ids", "the model is bidirectional")
            continue
        options = {name: places - stream.length // 2 * second if name == "position_ids" else second.long()}
        for id, masks in ((f"documents/{name}", None), (f"documents/{name}-and-a-mask", keep)):
            if masks is None or stream.form is not None:
                exam.attempt(id, partial(_packed, exam, options=options, keep=masks, apart=apart))
    alone, masked = (apart.get(f"documents/{name}") for name in ("position_ids", "position_ids-and-a-mask"))
    if exam.is_causal and alone and masked is False:
        id = "documents/position_ids-and-a-mask"
        exam.checks = [check for check in exam.checks if check.id != id]
        fault = f"position_ids that restart isolate documents, but not together with {stream.mask}"
        advice = f"Do not pass {stream.mask} with packed documents."
        exam.failed(id, Finding("mask-joins-documents", FRAGILE, fault, advice))
    elif exam.is_causal and alone is False and "document_ids" not in names:
        text = "position_ids that restart do not isolate packed documents"
        exam.note(Finding("positions-join-documents", NOTE, text))


def _packed(exam: Examination, id: str, options: Any, keep: Mapping[str, Tensor] | None, apart: dict[str, bool]) -> None:
    """Check one way to mark where documents begin."""
    called, name = exam.called, exam.called.stream.name
    half = called.stream.length // 2
    packed = called.answer(exam.inputs, keep, **options)
    changed = called.others(exam.inputs, name, exam.places == 1)
    gap = exam.gap(called.answer(changed, keep, **options), packed, exam.places >= half)
    apart[id] = gap.is_rounding
    if not gap.is_rounding and "position_ids" in options:
        exam.skip(id, "position_ids that restart are not read as documents")
        return
    witness = "a token of the first document moves token {gap.place[1]} of the second by {gap.size:.2g}"
    finding = Finding("documents-leak", WRONG, "documents of a row see each other", "", witness)
    if gap.is_rounding:
        alone = called.answer({**exam.inputs, name: exam.inputs[name][:, half:].contiguous()})
        difference = exam.gap(packed[:, half:], alone)
        if not difference.is_rounding:
            gap, fault = difference, "the second document of a row is isolated, but differs from the same document alone"
            witness = "the output of the second document differs by {gap.size:.2g}"
            finding = Finding("document-differs", FRAGILE, fault, "Count positions in each document.", witness)
    exam.judge(id, gap, finding)
