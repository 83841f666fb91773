"""Checks of tokens that a row must not see: its padding, and other documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minitx.check.called_model import Stream
from minitx.check.examination import Examination
from minitx.check.properties import Gap
from minitx.check.results import Severity


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
        exam.attempt(f"{prefix}/meaning", checks.meaning)
        exam.attempt(f"{prefix}/mask-of-ones", checks.ones)
        for side in ("left", "right", "inside"):
            exam.attempt(f"{prefix}/{side}", partial(checks.side, side=side))


class _Padding:
    """The checks of padding in one stream."""

    def __init__(self, exam: Examination, stream: Stream, prefix: str) -> None:
        self.exam, self.stream, self.prefix = exam, stream, prefix
        self.is_output = stream is exam.called.stream and exam.called.has_positions
        self.B, self.L = exam.inputs[stream.name].shape[:2]

    def _keep(self, side: str) -> Tensor:
        keep = torch.ones(self.B, self.L, dtype=torch.bool)
        third = max(1, self.L // 3)
        places = {
            "left": slice(0, third),
            "right": slice(self.L - third, None),
            "inside": slice(third, third + max(1, third // 2)),
        }
        keep[1, places[side]] = False
        return keep

    def _calls(self, keep: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """A call, and the same call with other hidden tokens."""
        changed = self.exam.called.others(self.exam.inputs, self.stream.name, ~keep)
        masks = {self.stream.name: keep}
        return self.exam.answers(self.exam.inputs, masks), self.exam.answers(changed, masks)

    def _still(self, keep: Tensor) -> Tensor:
        """The positions or rows at which the output must not move."""
        return keep if self.is_output else self.exam.whole

    def meaning(self, id: str) -> None:
        """The mask has the meaning of its name."""
        mask = self.stream.mask or ""
        if self.stream.name in self.exam.turned and "attention_mask" in mask:
            advice = "In attention_mask, 1 is a real token: masked_fill(mask == 0, -inf)."
            self.exam.failed(id, self._id("mask-inverted"), Severity.WRONG, f"{mask} is inverted: 1 hides a token", advice)

    def ones(self, id: str) -> None:
        """A mask that hides nothing changes nothing."""
        exam = self.exam
        keep = torch.ones(self.B, self.L, dtype=torch.bool)
        gap = exam.gap(exam.called.answer(exam.inputs, {self.stream.name: keep}), exam.base)
        if gap.is_rounding:
            exam.passed(id, gap)
            return
        at = exam.where(exam.answers(exam.inputs), exam.answers(exam.inputs, {self.stream.name: keep}), exam.whole)
        witness = f"a mask that hides nothing moves the output by {gap.size:.2g}{at}"
        fault = f"{self.stream.mask} changes the output, although it hides nothing"
        exam.failed(
            id, self._id("mask-of-ones-changes"), Severity.WRONG, fault, "Does the mask replace the causal mask?", witness, gap
        )

    def side(self, id: str, side: str) -> None:
        """Padding on one side changes nothing."""
        exam, keep = self.exam, self._keep(side)
        calm, moved = self._calls(keep)
        still, expected = self._still(keep), calm()
        if not expected[still].isfinite().all():
            fault = f"NaN at real tokens with padding {_where(side)}"
            exam.failed(
                id, self._id(f"nan-{side}"), Severity.WRONG, fault, "Hide with a finite number, or clear rows that see nothing."
            )
            return
        if not expected.isfinite().all():
            text = "NaN at the padding itself, so the sum of all losses is NaN"
            exam.failed(f"{id}/finite", self._id("nan-at-padding"), Severity.FRAGILE, text, "Clear rows that see nothing.")
        gap = exam.gap(moved(), expected, still)
        if not gap.is_rounding:
            if excuse := self._excuse(keep, side):
                exam.note(self._id(excuse[0]), *excuse[1:])
                exam.skip(id, excuse[1])
            else:
                self._leaks(id, side, keep, gap, exam.where(calm, moved, *self._stills(keep)))
            return
        exam.passed(id, gap)
        others = torch.ones_like(still)
        others[1] = False
        between = exam.gap(expected, exam.base, others)
        if not between.is_rounding:
            fault = "padding of a row changes other rows"
            witness = f"padding of row 1 moves the output of row {between.place[0]} by {between.size:.2g}"
            exam.failed(
                f"{id}/other-rows", self._id("padding-changes-rows"), Severity.WRONG, fault, witness=witness, gap=between
            )
        if exam.are_rows_apart:
            self._one_row(f"{id}/one-row", keep, expected)
        if side != "inside":
            self._alone(f"{id}/alone", side, keep, expected)

    def _stills(self, keep: Tensor) -> list[Tensor]:
        """Positions at which modules must not move: the real tokens of the padded row, and its tokens in the other stream."""
        stills = [keep] if self._still(keep) is keep else [keep, self.exam.whole]
        rows = torch.arange(self.B) == 1
        return [still & (rows if still.dim() == 1 else rows[:, None]) for still in stills]

    def _excuse(self, keep: Tensor, side: str) -> tuple[str, str, str] | None:
        """Return an id, a sentence and advice if the model may let hidden tokens of this kind move the output.

        It knows padding by its id, it reads one output at the outermost token, or it hides tokens only with another mask, too.
        """
        exam, name, mask = self.exam, self.stream.name, self.stream.mask
        assert self.stream.form is not None
        if exam.called.pad is not None and self.stream.width is None:
            tokens = exam.inputs[name].masked_fill(~keep.to(exam.called.device), exam.called.pad)
            if self._with_positions({**exam.inputs, name: tokens}, keep).is_rounding:
                return (
                    "padding-by-id",
                    f"padding is recognised by the id {exam.called.pad}, not by {mask}",
                    "Hide tokens with this id.",
                )
        if not self.is_output and side != "inside":
            inner, edge = ~keep, "first" if side == "left" else "last"
            inner[:, 0 if side == "left" else -1] = False
            if not self._moved(keep, inner):
                return (
                    f"reads-{side}-edge",
                    f"the output is read at the {edge} token, also if {mask} hides it",
                    f"Do not pad on the {side}.",
                )
        taken = {stream.mask for stream in exam.called.streams}
        for other in (other for other in exam.called.names if "mask" in other and other not in taken):
            with suppress(Exception):  # this argument takes another form
                if not self._moved(keep, ~keep, **{other: self.stream.form.write(keep.to(exam.called.device))}):
                    return (
                        "needs-another-mask",
                        f"{mask} hides tokens only together with {other}",
                        f"Pass the mask as {other}, too.",
                    )
        return None

    def _moved(self, keep: Tensor, changed: Tensor, **options: Any) -> bool:
        """Return whether other tokens at ``changed`` move the output."""
        called, inputs, masks = self.exam.called, self.exam.inputs, {self.stream.name: keep}
        twins = inputs, called.others(inputs, self.stream.name, changed)
        first, second = (called.answer(tokens, masks, **options) for tokens in twins)
        return not self.exam.gap(second, first, self._still(keep)).is_rounding

    def _with_positions(self, inputs: dict[str, Tensor], keep: Tensor) -> Gap:
        """The gap between a padded row and the same row alone, with equal position_ids if the model takes them."""
        exam, name, real = self.exam, self.stream.name, keep[1]
        positions: dict[str, Tensor] = {}
        if "position_ids" in exam.called.names:
            positions = {"position_ids": (keep.long().cumsum(-1) - 1).clamp(min=0).to(exam.called.device)}
        alone = {key: value[1:2] for key, value in inputs.items()} | {name: inputs[name][1:2, real].contiguous()}
        padded = exam.called.answer(inputs, {name: keep}, **positions)[1:2]
        of_alone: dict[str, Any] = {key: value[1:2, real] for key, value in positions.items()}
        expected = exam.called.answer(alone, **of_alone)
        return exam.gap(padded[:, real] if self.is_output else padded, expected)

    def _leaks(self, id: str, side: str, keep: Tensor, gap: Gap, at: str) -> None:
        exam, mask = self.exam, self.stream.mask
        plain = exam.gap(exam.called.answer(exam.inputs, {self.stream.name: keep}), exam.base)
        witness = f"other tokens at hidden places {_where(side)} move the output of row {gap.place[0]}"
        witness += f", token {gap.place[1]}," if self.is_output else ""
        witness += f" by {gap.size:.2g} (a visible token: {exam.typical:.2g}){at}"
        if plain.is_rounding:
            fault, advice, name = f"{mask} is ignored", "Pass it on to the attention of every layer.", "mask-ignored"
        else:
            fault, advice, name = (
                f"hidden tokens leak through {mask}",
                "Hide their keys in every layer, and clear their values in other modules that mix positions.",
                "padding-leaks",
            )
            if self.prefix != "padding":
                advice = "Hide their keys in every layer of the encoder, and in cross-attention: it needs the mask of the source, too."
        exam.failed(id, self._id(name), Severity.WRONG, fault, advice, witness, gap)

    def _one_row(self, id: str, keep: Tensor, padded: Tensor) -> None:
        """A padded row gives the same output in a batch and as the only row."""
        exam = self.exam
        row = {key: value[1:2] for key, value in exam.inputs.items()}
        gap = exam.gap(exam.called.answer(row, {self.stream.name: keep[1:2]}), padded[1:2], self._still(keep)[1:2])
        if gap.is_rounding:
            exam.passed(id, gap)
            return
        fault = f"in a batch of one, {self.stream.mask} has another effect"
        witness = f"the output of the padded row differs by {gap.size:.2g} (a visible token moves it by {exam.typical:.2g})"
        name = self._id("mask-in-a-batch-of-one")
        exam.failed(id, name, Severity.WRONG, fault, "Look for conditions on the batch size.", witness, gap)

    def _alone(self, id: str, side: str, keep: Tensor, padded: Tensor) -> None:
        """A padded row equals the same row alone."""
        exam, name, real = self.exam, self.stream.name, keep[1]
        alone = {key: value[1:2] for key, value in exam.inputs.items()}
        alone[name] = alone[name][:, real].contiguous()
        try:
            expected = exam.called.answer(alone)
        except Exception as error:
            exam.raised(id, error)
            return
        output = padded[1:2][:, real] if self.is_output else padded[1:2]
        gap = exam.gap(output, expected)
        if gap.is_rounding:
            exam.passed(id, gap)
            return
        witness = f"the output of the row differs by {gap.size:.2g} (a visible token moves it by {exam.typical:.2g})"
        if side == "right":
            fault, advice = (
                "a row with padding on the right differs from the same row alone",
                "Look for a mean, a norm or a last token over the whole length.",
            )
            exam.failed(id, self._id("padded-row-differs"), Severity.FRAGILE, fault, advice, witness, gap)
            return
        fault, advice = (
            "with padding on the left, positions are counted from the padding",
            "Count positions from the first real token: mask.cumsum(-1) - 1.",
        )
        severity = Severity.NOTE
        if "position_ids" in exam.called.names:
            try:
                is_cured = self._with_positions(exam.inputs, keep).is_rounding
            except Exception:
                is_cured = False
            severity = Severity.NOTE if is_cured else Severity.FRAGILE
            advice = "With position_ids = mask.cumsum(-1) - 1 it is right." if is_cured else "position_ids do not fix it."
        elif exam.expects_relative:
            severity = Severity.WRONG
        exam.failed(id, self._id("positions-of-left-padding"), severity, fault, advice, witness, gap)

    def _id(self, name: str) -> str:
        return name if self.prefix == "padding" else f"source-{name}"


def _where(side: str) -> str:
    return "inside" if side == "inside" else f"on the {side}"


# --- documents


def documents(exam: Examination) -> None:
    """The second of two documents in one row gives the same output as alone."""
    called = exam.called
    names = [name for name in ("document_ids", "position_ids", "seq_idx") if name in called.names]
    if not called.streams or not called.has_positions or len(called.streams) > 1 or not names:
        exam.skip("documents", "no argument for documents was found")
        return
    stream, (B, L) = called.stream, exam.inputs[called.stream.name].shape[:2]
    cut = L // 2
    restarting = torch.cat((torch.arange(cut), torch.arange(L - cut))).expand(B, L).contiguous().to(called.device)
    numbers = (torch.arange(L) >= cut).long().expand(B, L).contiguous().to(called.device)
    keep = {stream.name: torch.ones(B, L, dtype=torch.bool)}
    apart: dict[str, bool] = {}
    for name in names:
        if name == "position_ids" and not exam.is_causal:
            exam.skip("documents/position_ids", "the model is bidirectional")
            continue
        options: dict[str, Tensor] = {name: restarting if name == "position_ids" else numbers}
        exam.attempt(f"documents/{name}", partial(_packed, exam, options=options, keep=None, apart=apart))
        if stream.form is not None:
            exam.attempt(f"documents/{name}-and-a-mask", partial(_packed, exam, options=options, keep=keep, apart=apart))
    alone, masked = (apart.get(f"documents/{name}") for name in ("position_ids", "position_ids-and-a-mask"))
    if exam.is_causal and alone and masked is False:
        id = "documents/position_ids-and-a-mask"
        exam.checks = [check for check in exam.checks if check.id != id]
        fault = f"position_ids that restart isolate documents, but not together with {stream.mask}"
        exam.failed(id, "mask-joins-documents", Severity.FRAGILE, fault, f"Do not pass {stream.mask} with packed documents.")
    elif exam.is_causal and alone is False and "document_ids" not in names:
        exam.note("positions-join-documents", "position_ids that restart do not isolate packed documents")


def _packed(
    exam: Examination,
    id: str,
    options: Mapping[str, Tensor],
    keep: Mapping[str, Tensor] | None,
    apart: dict[str, bool],
) -> None:
    """Check one way to mark where documents begin."""
    called, name = exam.called, exam.called.stream.name
    B, L = exam.inputs[name].shape[:2]
    early, second = torch.zeros(B, L, dtype=torch.bool), torch.zeros(B, L, dtype=torch.bool)
    early[:, 1], second[:, L // 2 :] = True, True
    packed = called.answer(exam.inputs, keep, **options)
    gap = exam.gap(called.answer(called.others(exam.inputs, name, early), keep, **options), packed, second)
    apart[id] = gap.is_rounding
    if not gap.is_rounding:
        if "position_ids" in options:
            exam.skip(id, "position_ids that restart are not read as documents")
            return
        witness = f"a token of the first document moves token {gap.place[1]} of the second by {gap.size:.2g}"
        exam.failed(id, "documents-leak", Severity.WRONG, "documents of a row see each other", "", witness, gap)
        return
    alone = called.answer({**exam.inputs, name: exam.inputs[name][:, L // 2 :].contiguous()})
    difference = exam.gap(packed[:, L // 2 :], alone)
    if difference.is_rounding:
        exam.passed(id, gap)
        return
    fault = "the second document of a row is isolated, but differs from the same document alone"
    witness = f"the output of the second document differs by {difference.size:.2g}"
    exam.failed(id, "document-differs", Severity.FRAGILE, fault, "Count positions in each document.", witness, difference)
