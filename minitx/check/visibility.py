"""What a token may see: rows of a batch, later tokens, padding and other documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minitx.check.examination import Examination
from minitx.check.model_inputs import Stream
from minitx.check.properties import Gap
from minitx.check.results import Severity

FAR_LESS = 1e-12
"""A gradient below this share of the largest one is zero."""

CAUSAL_ADVICE = (
    "Hide the keys after each query: is_causal=True, or scores.masked_fill(~ones(L, S).tril(S - L), -inf) before the softmax."
)


def rows(exam: Examination) -> None:
    """Rows of a batch do not know each other."""
    called, inputs, base = exam.called, exam.inputs, exam.base
    others = called.draw()
    changed = {name: torch.cat((value[:1], others[name][1:2], value[2:])) for name, value in inputs.items()}
    still = exam.whole.clone()
    still[1] = False
    gap = exam.gap(called.answer(changed), base, still)
    advice = "Look for a view that mixes axes, a mean over axis 0, or batch_first."
    if _attends_over_rows(called.model):
        advice = "nn.MultiheadAttention and its layers take (L, B, E) unless batch_first=True."
    if not gap.is_rounding:
        exam.are_rows_apart = False
        at = exam.where(exam.answers(inputs), exam.answers(changed), torch.tensor([True, False, True]))
        witness = f"another row 1 moves the output of row {gap.place[0]} by {gap.size:.2g}{at}"
        exam.failed("rows/others", "rows-mixed", Severity.WRONG, "rows of a batch change each other", advice, witness, gap)
        return
    exam.passed("rows/others", gap)
    alone = torch.cat(
        [called.answer({name: value[row : row + 1] for name, value in inputs.items()}) for row in range(len(base))]
    )
    gap = exam.gap(alone, base)
    if gap.is_rounding:
        exam.passed("rows/alone", gap)
    else:
        witness = f"row {gap.place[0]} alone and in its batch differ by {gap.size:.2g}"
        exam.failed("rows/alone", "row-alone-differs", Severity.WRONG, "a row alone has another output", advice, witness, gap)


def _attends_over_rows(model: nn.Module) -> bool:
    kinds = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase)
    return any(
        getattr(getattr(m, "self_attn", m), "batch_first", True) is False for m in model.modules() if isinstance(m, kinds)
    )


# --- causality


def causality(exam: Examination) -> None:
    """In a causal model, later tokens change nothing."""
    ids = [f"causality/{kind}" for kind in ("values", "prefix", "with-a-mask", "gradient")]
    if not exam.called.streams or not exam.called.has_positions:
        reason = "the output has no positions" if exam.called.streams else "it reads no tokens"
        for id in ids:
            exam.skip(id, reason)
        return
    if not exam.is_causal:
        for id in ids[:3]:
            exam.skip(id, "the model is bidirectional; causal=true says that it must not be")
    else:
        for id, check in zip(ids, (_values, _prefix, _with_mask), strict=False):
            exam.attempt(id, partial(check, exam))
    exam.attempt(ids[3], partial(_gradients, exam))


def _values(exam: Examination, id: str) -> None:
    future = exam.influence.triu(1)
    if not (future > exam.allowed).any():
        exam.passed(id, Gap(future.max().item(), exam.allowed, ()))
        return
    name, L = exam.called.stream.name, len(future)
    i, j = divmod(int(future.argmax()), L)
    column = torch.zeros(exam.inputs[name].shape[:2], dtype=torch.bool)
    column[:, j] = True
    changed = exam.called.others(exam.inputs, name, column)
    still = torch.zeros_like(column)
    still[:, :j] = True
    at = exam.where(exam.answers(exam.inputs), exam.answers(changed), still)
    pairs = int((future > exam.allowed).sum())
    witness = (
        f"changing token {j} moves the output of token {i} by {future.max():.2g} (a token that it may see: {exam.typical:.2g}); "
        f"{pairs} such pair{'s' * (pairs > 1)}{at}"
    )
    fault, advice = "later tokens change earlier outputs", CAUSAL_ADVICE
    earlier = exam.influence.tril(-1)
    if not (earlier > exam.allowed).any() and pairs > L:
        fault, advice = (
            "each token sees the later tokens and not the earlier ones",
            "The causal mask is inverted: hide where ~tril.",
        )
    elif max(b - a for a, b in (future > exam.allowed).nonzero().tolist()) <= L // 4:  # one more in each layer
        advice = "The mask is too wide: tril(diagonal=S - L), with no 1 more; or a convolution needs padding on its left alone."
    exam.failed(id, "not-causal", Severity.WRONG, fault, advice, witness)


def _prefix(exam: Examination, id: str) -> None:
    """Without the last tokens, the outputs of the others are the same."""
    called, name = exam.called, exam.called.stream.name
    L = exam.inputs[name].shape[1]
    short = {**exam.inputs, name: exam.inputs[name][:, : L - 3].contiguous()}
    try:
        found = called.answer(short)
    except Exception as error:
        exam.raised(id, error)
        return
    gap = exam.gap(found, exam.base[:, : L - 3])
    if gap.is_rounding:
        exam.passed(id, gap)
    elif (exam.influence.triu(1) > exam.allowed).any():
        exam.explained(id, "causality", gap)
    else:
        witness = f"{L - 3} of {L} tokens alone: the output of token {gap.place[1]} differs by {gap.size:.2g}"
        fault = "the outputs of a prefix depend on how many tokens follow"
        exam.failed(id, "prefix-differs", Severity.WRONG, fault, "Look for a mean or a norm over the length.", witness, gap)


def _with_mask(exam: Examination, id: str) -> None:
    """A mask of padding does not switch the causal mask off."""
    called, stream = exam.called, exam.called.stream
    if stream.form is None:
        exam.skip(id, _no_mask(stream))
        return
    B, L = exam.inputs[stream.name].shape[:2]
    for hidden in (0, 2):
        keep = torch.ones(B, L, dtype=torch.bool)
        keep[1, L - hidden :] = False
        last = torch.zeros_like(keep)
        last[:, -3:] = True
        changed = called.others(exam.inputs, stream.name, last)
        one, two = (exam.answers(tokens, {stream.name: keep}) for tokens in (exam.inputs, changed))
        still = keep & ~last
        gap = exam.gap(two(), one(), still)
        if not gap.is_rounding:
            witness = f"with {stream.mask}, the last 3 tokens move the output of token {gap.place[1]} by {gap.size:.2g}"
            if (exam.influence.triu(1) > exam.allowed).any():
                exam.explained(id, "causality", gap)
                return
            fault, advice = f"with {stream.mask}, the model is not causal", "Combine the two masks: causal & padding."
            exam.failed(id, "not-causal-with-a-mask", Severity.WRONG, fault, advice, witness + exam.where(one, two, still), gap)
            return
    exam.passed(id, gap)


def _gradients(exam: Examination, id: str) -> None:
    """Gradients go where values go."""
    grads = _token_gradients(exam)
    if isinstance(grads, str):
        exam.skip(id, grads)
        return
    influence = exam.influence
    zero = grads <= FAR_LESS * grads.max()
    cut = (influence > max(exam.allowed, 0.05 * exam.typical)) & zero
    seen = influence > exam.allowed
    if cut.any():
        i, j = cut.nonzero()[-1].tolist()
        witness = f"changing token {j} moves the output of token {i} by {influence[i, j]:.2g}, and its gradient is 0; {int(cut.sum())} such pairs"
        if int(cut.sum()) > 0.5 * int(seen.sum()) - int(seen.diagonal().sum()) > 0:
            fault = "outputs depend on tokens to which no gradient goes"
            advice = "Look for detach(), no_grad, .data or a copy through numpy."
            exam.failed(id, "gradient-cut", Severity.WRONG, fault, advice, witness)
            return
        exam.note(
            "gradient-cut-in-part",
            f"some outputs depend on tokens to which no gradient goes, as a choice by argmax does: {witness}",
        )
    late = grads.triu(1) > 1e-6 * grads.max() if exam.is_causal else torch.zeros_like(zero)
    if late.any() and not (influence.triu(1) > exam.allowed).any():
        i, j = late.nonzero()[0].tolist()
        witness = f"the output of token {i} sends a gradient to token {j}; {int(late.sum())} such pairs"
        fault = "gradients reach later tokens, whose values change nothing"
        exam.failed(id, "gradient-leaks", Severity.WRONG, fault, "Mask before the softmax, not after.", witness)
        return
    if late.any():
        exam.explained(id, "causality")
        return
    exam.passed(id)


def _token_gradients(exam: Examination) -> Tensor | str:
    """(L, L): the gradient of the output of token i for the input of token j; or why there is none."""
    called, name = exam.called, exam.called.stream.name
    inputs = {key: value[:1].clone() for key, value in exam.inputs.items()}
    leaves: list[Tensor] = []

    def leaf(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        same = args and args[0].shape == inputs[name].shape and torch.equal(args[0].to(inputs[name].device), inputs[name])
        if not same or module.num_embeddings < called.vocabulary:
            return None
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # a model may change it in place

    handles = []
    if called.stream.width is None:
        handles = [m.register_forward_hook(leaf) for m in called.model.modules() if isinstance(m, nn.Embedding)]
    else:
        inputs[name].requires_grad_()
        leaves.append(inputs[name])
    try:
        with torch.enable_grad():
            out = called.answer(inputs)[0]
    finally:
        for handle in handles:
            handle.remove()
    if len(leaves) != 1:
        return "the table of the tokens was not found"
    if not out.requires_grad:
        return "its output has no gradient"
    weights = torch.randn(out.shape[1:], generator=called.generator).to(out)
    result = []
    with torch.enable_grad():
        for position in out:
            (grad,) = torch.autograd.grad(
                (position * weights).sum(), leaves, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            result.append(grad[0].abs().flatten(1).amax(-1).float().cpu())
    return torch.stack(result)


def reach(exam: Examination) -> None:
    """Which tokens are seen, and whether their order matters. These are notes."""
    if not exam.called.streams or not exam.called.has_positions:
        exam.skip("reach", "the output has no positions")
        return
    influence, L = exam.influence > exam.allowed, len(exam.influence)
    if L > 1 and not (influence & ~torch.eye(L, dtype=torch.bool)).any():
        advice = "If it has attention, nothing comes through it: look at its output projection, its mask and its kernel."
        exam.failed("reach", "sees-no-other", Severity.FRAGILE, "no token sees any other token", advice)
        return
    blind = [(i, j) for i in range(L) for j in range(i if exam.is_causal else L) if i != j and not influence[i, j]]
    kind = "causal" if exam.is_causal else "bidirectional"
    if exam.is_weak:
        exam.skip("reach", "rounding moves the output about as much as a token")
        return
    if blind:
        i, j = max(blind, key=lambda pair: abs(pair[0] - pair[1]))
        exam.note("window", f"{kind}; token {i} does not see token {j}, one of {len(blind)} such pairs; a window does that")
    elif not exam.is_causal:
        exam.note("bidirectional", "bidirectional: every token sees every other; causal=true says that it must not")
    name = exam.called.stream.name
    if exam.inputs[name].shape[1] > 4 and not blind:
        order = list(range(exam.inputs[name].shape[1]))
        order[1], order[3] = order[3], order[1]
        swapped = {**exam.inputs, name: exam.inputs[name][:, order]}
        if exam.gap(exam.called.answer(swapped)[:, -1], exam.base[:, -1]).is_rounding:
            exam.note("no-order", "the last token does not notice when two earlier tokens are swapped", "Are there positions?")
    exam.passed("reach")


# --- padding


def padding(exam: Examination) -> None:
    """Hidden tokens change nothing."""
    if not exam.called.streams:
        exam.skip("padding", "it reads no tokens")
    for stream in exam.called.streams:
        prefix = "padding" if stream is exam.called.stream else "padding/source"
        if stream.form is None:
            exam.skip(prefix, _no_mask(stream))
            continue
        found = _Padding(exam, stream, prefix)
        exam.attempt(f"{prefix}/meaning", found.meaning)
        exam.attempt(f"{prefix}/mask-of-ones", found.ones)
        for side in ("left", "right", "inside"):
            exam.attempt(f"{prefix}/{side}", partial(found.side, side=side))


def _no_mask(stream: Stream) -> str:
    if stream.mask is None:
        return "no argument for a mask was found, so rows of one batch must have one length"
    return f"no form of {stream.mask} was accepted: {stream.refused}"


class _Padding:
    """Padding of one stream."""

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
        """A call, and one with other hidden tokens."""
        changed = self.exam.called.others(self.exam.inputs, self.stream.name, ~keep)
        given = {self.stream.name: keep}
        return self.exam.answers(self.exam.inputs, given), self.exam.answers(changed, given)

    def _still(self, keep: Tensor) -> Tensor:
        """Where the output must not move."""
        return keep if self.is_output else self.exam.whole

    def meaning(self, id: str) -> None:
        """Whether the mask means what its name says."""
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
        fault = f"{self.stream.mask} changes the output though it hides nothing"
        exam.failed(
            id, self._id("mask-of-ones-changes"), Severity.WRONG, fault, "Does the mask replace the causal one?", witness, gap
        )

    def side(self, id: str, side: str) -> None:
        """Padding on one side."""
        exam, keep = self.exam, self._keep(side)
        one, two = self._calls(keep)
        still, wanted = self._still(keep), one()
        if not wanted[still].isfinite().all():
            fault = f"NaN at real tokens with padding {_where(side)}"
            exam.failed(
                id, self._id(f"nan-{side}"), Severity.WRONG, fault, "Hide with a finite number, or clear rows that see nothing."
            )
            return
        if not wanted.isfinite().all():
            text = "NaN at the padding itself, so the sum of all losses is NaN"
            exam.failed(f"{id}/finite", self._id("nan-at-padding"), Severity.FRAGILE, text, "Clear rows that see nothing.")
        gap = exam.gap(two(), wanted, still)
        if not gap.is_rounding:
            self._leaks(id, side, keep, gap, exam.where(one, two, *self._stills(keep)))
            return
        exam.passed(id, gap)
        others = torch.ones_like(still)
        others[1] = False
        between = exam.gap(wanted, exam.base, others)
        if not between.is_rounding:
            fault = "padding of a row changes other rows"
            witness = f"padding of row 1 moves the output of row {between.place[0]} by {between.size:.2g}"
            exam.failed(
                f"{id}/other-rows", self._id("padding-changes-rows"), Severity.WRONG, fault, witness=witness, gap=between
            )
        if side != "inside":
            self._alone(f"{id}/alone", side, keep, wanted)

    def _stills(self, keep: Tensor) -> list[Tensor]:
        """Where modules must not move in the padded row: at its real tokens, and at all tokens of the other stream."""
        stills = [keep] if self._still(keep) is keep else [keep, self.exam.whole]
        rows = torch.arange(self.B) == 1
        return [still & (rows if still.dim() == 1 else rows[:, None]) for still in stills]

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
                "Hide their keys in every layer, and clear their values in what mixes positions otherwise.",
                "padding-leaks",
            )
            if self.prefix != "padding":
                advice = "Hide their keys in every layer of the encoder, and in cross-attention, which needs the mask of the source, too."
        exam.failed(id, self._id(name), Severity.WRONG, fault, advice, witness, gap)

    def _alone(self, id: str, side: str, keep: Tensor, padded: Tensor) -> None:
        """A padded row equals the same row alone."""
        exam, name, real = self.exam, self.stream.name, keep[1]
        alone = {key: value[1:2] for key, value in exam.inputs.items()}
        alone[name] = alone[name][:, real].contiguous()
        try:
            wanted = exam.called.answer(alone)
        except Exception as error:
            exam.raised(id, error)
            return
        found = padded[1:2][:, real] if self.is_output else padded[1:2]
        gap = exam.gap(found, wanted)
        if gap.is_rounding:
            exam.passed(id, gap)
            return
        witness = f"by {gap.size:.2g} (a visible token: {exam.typical:.2g})"
        if side == "right":
            fault, advice = (
                "a row with padding on the right differs from the same row alone",
                "Look for a mean, a norm or a last token over the whole length.",
            )
            exam.failed(id, self._id("padded-row-differs"), Severity.FRAGILE, fault, advice, witness, gap)
            return
        fault, advice = (
            "with padding on the left, positions are counted from the padding",
            "Count them from the first real token: mask.cumsum(-1) - 1.",
        )
        severity = Severity.FRAGILE
        if "position_ids" in exam.called.names:
            positions = (keep.long().cumsum(-1) - 1).clamp(min=0).to(exam.called.device)
            try:
                cured = exam.called.answer(exam.inputs, {name: keep}, position_ids=positions)[1:2]
                cured = cured[:, real] if self.is_output else cured
                if exam.gap(cured, wanted).is_rounding:
                    severity, advice = Severity.NOTE, "With position_ids = mask.cumsum(-1) - 1 it is right."
                else:
                    advice = "position_ids do not cure it."
            except Exception:
                advice = "position_ids do not cure it."
        exam.failed(id, self._id("positions-of-left-padding"), severity, fault, advice, witness, gap)

    def _id(self, name: str) -> str:
        return name if self.prefix == "padding" else f"source-{name}"


def _where(side: str) -> str:
    return "inside" if side == "inside" else f"on the {side}"


# --- documents


def documents(exam: Examination) -> None:
    """Two documents in one row: the second is as if it were alone."""
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
        fault = f"position_ids that restart isolate documents, but no longer once {stream.mask} is given"
        exam.failed(id, "mask-joins-documents", Severity.FRAGILE, fault, f"Give no {stream.mask} with packed documents.")
    elif exam.is_causal and alone is False and "document_ids" not in names:
        exam.note("positions-join-documents", "position_ids that restart do not isolate packed documents")


def _packed(
    exam: Examination,
    id: str,
    options: Mapping[str, Tensor],
    keep: Mapping[str, Tensor] | None,
    apart: dict[str, bool],
) -> None:
    """One way to say where documents begin."""
    called, name = exam.called, exam.called.stream.name
    B, L = exam.inputs[name].shape[:2]
    early, second = torch.zeros(B, L, dtype=torch.bool), torch.zeros(B, L, dtype=torch.bool)
    early[:, 1], second[:, L // 2 :] = True, True
    found = called.answer(exam.inputs, keep, **options)
    gap = exam.gap(called.answer(called.others(exam.inputs, name, early), keep, **options), found, second)
    apart[id] = gap.is_rounding
    if not gap.is_rounding:
        if "position_ids" in options:
            exam.skip(id, "position_ids that restart are not read as documents")
            return
        witness = f"a token of the first document moves token {gap.place[1]} of the second by {gap.size:.2g}"
        exam.failed(id, "documents-leak", Severity.WRONG, "documents of a row see each other", "", witness, gap)
        return
    alone = called.answer({**exam.inputs, name: exam.inputs[name][:, L // 2 :].contiguous()})
    own = exam.gap(found[:, L // 2 :], alone)
    if own.is_rounding:
        exam.passed(id, gap)
        return
    fault = "the second document of a row is isolated, and differs from the same alone"
    exam.failed(id, "document-differs", Severity.FRAGILE, fault, "Count positions in each document.", f"by {own.size:.2g}", own)
