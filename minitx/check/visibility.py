"""Checks of the tokens that a token may see: those of its row and its document, no padding, and in a causal model no later tokens."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minitx.check.calling import need
from minitx.check.model_examination import SHARE, Examination
from minitx.check.model_interface import Stream, keep_mask
from minitx.check.properties import Gap
from minitx.check.results import FAILED, FRAGILE, NOTE, WRONG

FAR_LESS = 1e-12
"""A gradient below this share of the largest gradient counts as zero."""

CAUSAL_ADVICE = (
    "Hide the keys after each query: is_causal=True, or scores.masked_fill(~ones(L, S).tril(S - L), -inf) before the softmax. "
    "If they are hidden, look for heads that are split or merged without transpose(1, 2)."
)


def rows(exam: Examination) -> None:
    """Rows of a batch do not know each other."""
    gap, changed = exam.other_row()
    exam.are_rows_apart = gap.is_rounding
    calls = exam.answers(exam.inputs), exam.answers(changed), torch.tensor([True, False, True])
    if exam.judge("rows/others", gap, "rows-mixed", *calls):
        parts = [{name: value[row : row + 1] for name, value in exam.inputs.items()} for row in range(len(exam.base))]
        alone = torch.cat([exam.called.answer(part) for part in parts])
        exam.judge("rows/alone", exam.gap(alone, exam.base), "row-alone-differs")


# --- causality


def causality(exam: Examination) -> None:
    """In a causal model, later tokens change nothing."""
    checks = {"values": _token_values, "prefix": _prefix, "with-a-mask": _with_mask, "long": _long, "gradient": _gradient_flow}
    if exam.called.why_without_positions:
        for kind in checks:
            exam.skip(f"causality/{kind}", exam.called.why_without_positions)
        return
    exam.look()
    word, _, width = exam.intention[0].partition(":")
    if word == "bidirectional" and not exam.sees_later:
        exam.failed("causality/declared", "not-bidirectional")
    for kind, check in checks.items():
        if exam.is_causal or check is _gradient_flow:
            exam.attempt(f"causality/{kind}", partial(check, exam))
        else:
            exam.skip(f"causality/{kind}", "the model is bidirectional; set expect=causal if it must not be")
    if width:
        exam.attempt("causality/window", partial(_window, exam, width=int(width)))


def _window(exam: Examination, id: str, width: int) -> None:
    """The output of a token depends on exactly the last ``width`` tokens."""
    seen = exam.influence > exam.allowed
    band = torch.ones_like(seen).tril().triu(1 - width)
    wrong = (seen.tril() != band).nonzero().tolist()
    i, j = wrong[-1] if wrong else (0, 0)
    depends = "depends" if seen[i, j] else "does not depend"
    exam.demand(not wrong, "other-window", i=i, j=j, depends=depends, distance=i - j, width=width, count=len(wrong))


def _token_values(exam: Examination, id: str) -> None:
    future = exam.influence.triu(1)
    if not exam.sees_later:
        exam.passed(id, Gap(future.max().item(), exam.allowed, ()))
        return
    name, L = exam.called.stream.name, len(future)
    i, j = divmod(int(future.argmax()), L)
    changed = exam.called.others(exam.inputs, name, exam.places == j)
    at = exam.where(exam.answers(exam.inputs), exam.answers(changed), exam.places < j)
    pairs = int((future > exam.allowed).sum())
    fault, advice = "later tokens change earlier outputs", CAUSAL_ADVICE
    if not (exam.influence.tril(-1) > exam.allowed).any() and pairs > L:
        fault = "each token sees the later tokens, but not the earlier tokens"
        advice = "The causal mask is inverted: hide where ~tril."
    elif max(b - a for a, b in (future > exam.allowed).nonzero().tolist()) <= L // 4:  # each layer may add one
        advice = "The mask is too wide: use tril(diagonal=S - L) without an extra 1. Or a convolution needs padding on the left only."
    if not exam.intention[0]:
        advice = f"If it must be causal: {advice[0].lower()}{advice[1:]} expect=causal or expect=bidirectional declares it."
    words: dict[str, Any] = {"i": i, "j": j, "size": future.max().item(), "count": pairs, "s": "s" * (pairs > 1)}
    exam.failed(id, "not-causal", at=at, fault=fault, advice=advice, **words)


def _prefix(exam: Examination, id: str) -> None:
    """Without the last tokens, the outputs of the other tokens are the same."""
    called, name = exam.called, exam.called.stream.name
    L = exam.inputs[name].shape[1]
    count = max(1, L - 3)
    short = {**exam.inputs, name: exam.inputs[name][:, :count].contiguous()}
    gap = exam.gap(called.answer(short), exam.base[:, :count])
    exam.judge(id, gap, "prefix-differs", explained_by="causality" * exam.sees_later, short=count, length=L)


def _with_mask(exam: Examination, id: str) -> None:
    """A padding mask does not switch off the causal mask."""
    stream = exam.called.stream
    need(stream.form, stream.why_unmasked)
    L = stream.length
    last = exam.places >= max(1, L - 3)
    words: dict[str, Any] = {"explained_by": "causality" * exam.sees_later, "mask": stream.mask}
    for hidden in (0, 2):
        keep = keep_mask(exam.inputs[stream.name], slice(L - hidden, L))
        changed = exam.called.others(exam.inputs, stream.name, last)
        before, after = (exam.answers(tokens, {stream.name: keep}) for tokens in (exam.inputs, changed))
        gap = exam.gap(after(), before(), keep & ~last)
        if hidden or not gap.is_rounding:
            exam.judge(id, gap, "not-causal-with-a-mask", before, after, keep & ~last, **words)
            return


def _long(exam: Examination, id: str) -> None:
    """In a long row, the tokens after a multiple of a block change nothing before it."""
    (inputs, base, noise), name = exam.long, exam.called.stream.name
    if exam.sees_later:
        exam.record(id, FAILED, "see causality")
        return
    places = torch.arange(base.shape[1]).unsqueeze(0)
    for cut in (cut for cut in (16, 32, 64, 65, 128) if cut < base.shape[1]):
        changed = exam.called.others(inputs, name, places >= cut)
        gap = exam.gap(exam.called.answer(changed), base, places < cut, noise)
        if not gap.is_rounding:
            calls, last = (exam.answers(inputs), exam.answers(changed)), base.shape[1] - 1
            exam.judge(id, gap, "not-causal-in-a-long-row", *calls, places < cut, cut=cut, last=last)
            return


def _gradient_flow(exam: Examination, id: str) -> None:
    """A token gets a gradient exactly if its value has an effect."""
    grads, influence = _token_gradients(exam), exam.influence
    zero = grads <= FAR_LESS * grads.max()
    cut = (influence > max(exam.allowed, 0.05 * exam.typical)) & zero
    seen = influence > exam.allowed
    if cut.any():
        i, j = cut.nonzero()[-1].tolist()
        witness = f"changing token {j} moves the output of token {i} by {influence[i, j]:.2g}, but its gradient is 0; {int(cut.sum())} such pairs"
        half = 0.5 * int(seen.sum()) - int(seen.diagonal().sum())  # half of the effects, less each token's effect on itself
        exam.demand(not 0 < half < int(cut.sum()), "gradient-cut", witness=witness)
        exam.note("gradient-cut-in-part", witness=witness)
    late = grads.triu(1) > 1e-6 * grads.max() if exam.is_causal else torch.zeros_like(zero)
    if late.any() and exam.sees_later:
        exam.record(id, FAILED, "see causality")
    elif late.any():
        i, j = late.nonzero()[0].tolist()
        exam.failed(id, "gradient-leaks", i=i, j=j, count=int(late.sum()))


def _token_gradients(exam: Examination) -> Tensor:
    """(L, L): the gradient of the output of token i for the input of token j."""
    called, name = exam.called, exam.called.stream.name
    inputs = {key: value[:1].clone() for key, value in exam.inputs.items()}
    leaves: list[Tensor] = []

    def leaf(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        is_alike = bool(args) and isinstance(args[0], Tensor) and args[0].shape == inputs[name].shape
        if not is_alike or not args[0].to(inputs[name].device).equal(inputs[name]) or module.num_embeddings < called.vocabulary:
            return None
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # a model may change it in place

    with ExitStack() as hooks, torch.enable_grad():
        if called.stream.width is not None:
            leaves.append(inputs[name].requires_grad_())
        for module in (module for module in called.model.modules() if isinstance(module, nn.Embedding) and not leaves):
            hooks.enter_context(module.register_forward_hook(leaf))
        out = called.answer(inputs)[0]
    need(len(leaves) == 1, "the table of the tokens was not found")
    need(out.requires_grad, "the output has no gradient")
    weights = torch.randn(out.shape[1:], generator=called.generator).to(out)
    slope = partial(torch.autograd.grad, retain_graph=True, allow_unused=True, materialize_grads=True)
    with torch.enable_grad():
        grads = [slope((position * weights).sum(), leaves)[0][0] for position in out]
    return torch.stack([grad.abs().flatten(1).amax(-1).float().cpu() for grad in grads])


def reach(exam: Examination) -> None:
    """A token sees other tokens, and their order matters."""
    need(not exam.called.why_without_positions, exam.called.why_without_positions)
    seen = exam.look()
    exam.demand(len(seen) == 1 or (seen & ~torch.eye(len(seen), dtype=torch.bool)).any(), "sees-no-other")
    need(exam.allowed <= SHARE * exam.typical, "rounding moves the output about as much as a token")
    name = exam.called.stream.name
    length = exam.inputs[name].shape[1]
    has_order = True
    if length > 4 and seen[-1].all():
        swapped = {**exam.inputs, name: exam.inputs[name][:, [0, 3, 2, 1, *range(4, length)]]}
        has_order = not exam.gap(exam.called.answer(swapped)[:, -1], exam.base[:, -1]).is_rounding
    if not has_order:
        exam.note("no-order")
    elif "position_ids" in exam.called.arguments.names:
        exam.attempt("reach/positions", partial(_positions, exam))
    elif "relative" in exam.expect:
        judged = "padding on the left judges it" if exam.called.stream.form else "it takes no mask"
        exam.skip("reach/positions", f"it takes no position_ids; {judged}")
    exam.passed("reach")


def _positions(exam: Examination, id: str) -> None:
    """Describe how the output depends on ``position_ids``. Declared relative, adding a number to all of them changes nothing."""
    (B, L), called = exam.base.shape[:2], exam.called
    places = torch.arange(L, device=called.device).expand(B, L)
    mixed = places[:, torch.randperm(L, generator=called.generator)]
    base, shifted, moved = (called.answer(exam.inputs, position_ids=ids) for ids in (places, places + 3, mixed))
    exam.demand(not exam.gap(moved, base).is_rounding, "position-ids-ignored")
    gap = exam.gap(shifted, base)
    exam.demand(gap.is_rounding or "relative" not in exam.expect, "positions-not-relative", gap)
    exam.describe(f"positions are {'relative' if gap.is_rounding else 'absolute'}")


# --- padding


def padding(exam: Examination) -> None:
    """Hidden tokens change nothing."""
    need(exam.called.streams, "it reads no tokens")
    for stream in exam.called.streams:
        checks = _Padding(exam, stream)
        if stream.form is None:
            exam.skip(checks.prefix, stream.why_unmasked)
            continue
        is_stated = exam.called.call is not None or "attention_mask" in str(stream.mask)
        if stream.name in exam.turned and is_stated:
            exam.failed(f"{checks.prefix}/meaning", "{source}mask-inverted", **checks.words)
        elif stream.name in exam.turned:
            advice = "An adapter declares it, call=: in its mask, True = a real token."
            exam.note("padding-mask-keeps" if "pad" in str(stream.mask) else "mask-hides", mask=stream.mask, advice=advice)
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
        still, expected = exam.still(self.stream, keep), self._answer(keep)
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
        exam, still = self.exam, self.exam.still(self.stream, keep)
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
            if exam.unseen(self.stream, keep, inner)[1].is_rounding:
                return exam.note("{source}reads-{side}-edge", side=side, edge="last" if edge else "first", **words)
        taken = {stream.mask for stream in exam.called.streams}
        for other in (other for other in exam.called.arguments.names if "mask" in other and other not in taken):
            with suppress(Exception):  # this argument takes another form
                options = {other: self.stream.form.write(keep.to(exam.called.device))}
                if exam.unseen(self.stream, keep, ~keep, **options)[1].is_rounding:
                    return exam.note("{source}needs-another-mask", other=other, **words)
        return ""

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
        if not gap.is_rounding and "position_ids" in exam.called.arguments.names:
            severity, advice = FRAGILE, "position_ids do not fix it."
            with suppress(Exception):
                if self._gap_alone(keep, exam.inputs, **exam.called.counted(keep)).is_rounding:
                    severity, advice = NOTE, "With position_ids = mask.cumsum(-1) - 1 it is right."
        exam.judge(id, gap, "{source}positions-of-left-padding", severity=severity, advice=advice, **self.words)


# --- documents


def documents(exam: Examination) -> None:
    """The second of two documents in one row gives the same output as alone."""
    called = exam.called
    names = [name for name in ("document_ids", "position_ids", "seq_idx") if name in called.arguments.names]
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
