"""Checks of tokens that a row must not see: its padding, and other documents."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minitx.check.called_model import Stream, keep_mask
from minitx.check.calling import need
from minitx.check.examination import Examination
from minitx.check.properties import Gap
from minitx.check.results import FRAGILE, NOTE, WRONG


def padding(exam: Examination) -> None:
    """Hidden tokens change nothing."""
    need(exam.called.streams, "it reads no tokens")
    for stream in exam.called.streams:
        checks = _Padding(exam, stream)
        if stream.form is None:
            exam.skip(checks.prefix, stream.why_unmasked)
            continue
        is_stated = exam.called.call is not None or "attention_mask" in (stream.mask or "")
        if stream.name in exam.turned and is_stated:
            exam.failed(f"{checks.prefix}/meaning", "{source}mask-inverted", **checks.words)
        exam.attempt(f"{checks.prefix}/mask-of-ones", checks.ones)
        for side in ("left", "right", "inside"):
            exam.attempt(f"{checks.prefix}/{side}", partial(checks.side, side=side))


class _Padding:
    """The checks of padding in one stream."""

    def __init__(self, exam: Examination, stream: Stream) -> None:
        self.exam, self.stream = exam, stream
        is_last = stream is exam.called.stream
        self.is_output, self.prefix = is_last and exam.called.has_positions, "padding" if is_last else "padding/source"
        self.words: dict[str, Any] = {"source": "" if is_last else "source-", "mask": stream.mask}

    def _answer(self, keep: Tensor, inputs: dict[str, Tensor] | None = None, **options: Any) -> Tensor:
        return self.exam.called.answer(inputs or self.exam.inputs, {self.stream.name: keep}, **options)

    def _still(self, keep: Tensor) -> Tensor:
        """The positions or rows at which the output must not move."""
        return keep if self.is_output else self.exam.whole

    def ones(self, id: str) -> None:
        """A mask that hides nothing changes nothing."""
        exam, keep = self.exam, keep_mask(self.exam.inputs[self.stream.name])
        calls = exam.answers(exam.inputs), exam.answers(exam.inputs, {self.stream.name: keep})
        gap = exam.gap(self._answer(keep), exam.base)
        exam.judge(id, gap, "{source}mask-of-ones-changes", *calls, exam.whole, **self.words)

    def side(self, id: str, side: str) -> None:
        """Padding on one side changes nothing."""
        exam, L = self.exam, self.stream.length
        third = max(1, L // 3)
        places = {"left": slice(third), "right": slice(L - third, L), "inside": slice(third, third + max(1, third // 2))}
        keep = keep_mask(exam.inputs[self.stream.name], places[side])
        changed = exam.called.others(exam.inputs, self.stream.name, ~keep)
        still, expected = self._still(keep), self._answer(keep)
        where = "inside" if side == "inside" else f"on the {side}"
        exam.demand(expected[still].isfinite().all(), "{source}nan-{side}", side=side, where=where, **self.words)
        if not expected.isfinite().all():
            exam.failed(f"{id}/finite", "{source}nan-at-padding", **self.words)
        gap = exam.gap(self._answer(keep, changed), expected, still)
        if not gap.is_rounding:
            excuse = self._excuse(keep, side)
            need(not excuse, excuse)
            is_ignored = exam.gap(self._answer(keep), exam.base).is_rounding
            calls = (exam.answers(tokens, {self.stream.name: keep}) for tokens in (exam.inputs, changed))
            padded = torch.arange(len(keep)) == 1  # its real tokens, and its tokens in the other stream, must not move
            stills = [keep & padded[:, None], *[(still.T & padded).T] * (still is not keep)]
            token = f", token {gap.place[1]}," if self.is_output else ""
            key = "{source}mask-ignored" if is_ignored else "{source}padding-leaks"
            exam.judge(id, gap, key, *calls, *stills, where=where, token=token, **self.words)
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
            exam.failed(f"{id}/other-rows", "{source}padding-changes-rows", between, **self.words)
        if exam.are_rows_apart:
            row = {key: value[1:2] for key, value in exam.inputs.items()}
            gap = exam.gap(self._answer(keep[1:2], row), expected[1:2], still[1:2])
            exam.judge(f"{id}/one-row", gap, "{source}mask-in-a-batch-of-one", **self.words)

    def _excuse(self, keep: Tensor, side: str) -> str:
        """Return the text of a note, if the model may let hidden tokens of this kind move the output, or an empty string.

        It knows padding by its id, it reads one output at the outermost token, or it hides tokens only with another mask, too.
        """
        exam, name, words = self.exam, self.stream.name, self.words
        assert self.stream.form is not None
        if exam.called.pad is not None and self.stream.width is None:
            tokens = exam.inputs[name].masked_fill(~keep.to(exam.called.device), exam.called.pad)
            if self._gap_alone(keep, {**exam.inputs, name: tokens}, **exam.called.counted(keep)).is_rounding:
                return exam.note("{source}padding-by-id", pad=exam.called.pad, **words)
        if not self.is_output and side != "inside":
            inner, edge = ~keep, 0 if side == "left" else -1
            inner[:, edge] = False
            if not self._moved(keep, inner):
                return exam.note("{source}reads-{side}-edge", side=side, edge="last" if edge else "first", **words)
        taken = {stream.mask for stream in exam.called.streams}
        for other in (other for other in exam.called.names if "mask" in other and other not in taken):
            with suppress(Exception):  # this argument takes another form
                if not self._moved(keep, ~keep, **{other: self.stream.form.write(keep.to(exam.called.device))}):
                    return exam.note("{source}needs-another-mask", other=other, **words)
        return ""

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

    def _alone(self, id: str, side: str, keep: Tensor) -> None:
        """A padded row equals the same row alone."""
        exam, gap = self.exam, self._gap_alone(keep, self.exam.inputs)
        if side == "right":
            exam.judge(id, gap, "{source}padded-row-differs", **self.words)
            return
        advice = "Count positions from the first real token: mask.cumsum(-1) - 1."
        severity = WRONG if "relative" in exam.expect else NOTE
        if not gap.is_rounding and "position_ids" in exam.called.names:
            severity, advice = FRAGILE, "position_ids do not fix it."
            with suppress(Exception):
                if self._gap_alone(keep, exam.inputs, **exam.called.counted(keep)).is_rounding:
                    severity, advice = NOTE, "With position_ids = mask.cumsum(-1) - 1 it is right."
        exam.judge(id, gap, "{source}positions-of-left-padding", severity=severity, advice=advice, **self.words)


# --- documents


def documents(exam: Examination) -> None:
    """The second of two documents in one row gives the same output as alone."""
    called = exam.called
    names = [name for name in ("document_ids", "position_ids", "seq_idx") if name in called.names]
    is_plain = not called.why_without_positions and len(called.streams) == 1
    need(is_plain and names, "no argument for documents was found")
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
        exam.failed(id, "mask-joins-documents", mask=stream.mask)
    elif exam.is_causal and alone is False and "document_ids" not in names:
        exam.note("positions-join-documents")


def _packed(exam: Examination, id: str, options: Any, keep: Mapping[str, Tensor] | None, apart: dict[str, bool]) -> None:
    """Check one way to mark where documents begin."""
    called, name = exam.called, exam.called.stream.name
    half = called.stream.length // 2
    packed = called.answer(exam.inputs, keep, **options)
    changed = called.others(exam.inputs, name, exam.places == 1)
    gap = exam.gap(called.answer(changed, keep, **options), packed, exam.places >= half)
    apart[id] = gap.is_rounding
    need(gap.is_rounding or "position_ids" not in options, "position_ids that restart are not read as documents")
    alone = called.answer({**exam.inputs, name: exam.inputs[name][:, half:].contiguous()})
    difference = exam.gap(packed[:, half:], alone)
    if gap.is_rounding and not difference.is_rounding:
        exam.failed(id, "document-differs", difference)
    else:
        exam.judge(id, gap, "documents-leak")
