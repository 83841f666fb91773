"""Checks of the tokens that a token may see: only its row, and in a causal model no later tokens."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minitx.check.called_model import keep_mask
from minitx.check.calling import need
from minitx.check.examination import SHARE, Examination
from minitx.check.properties import Gap
from minitx.check.results import FAILED

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
    short = {**exam.inputs, name: exam.inputs[name][:, : L - 3].contiguous()}
    gap = exam.gap(called.answer(short), exam.base[:, : L - 3])
    exam.judge(id, gap, "prefix-differs", explained_by="causality" * exam.sees_later, short=L - 3, length=L)


def _with_mask(exam: Examination, id: str) -> None:
    """A padding mask does not switch off the causal mask."""
    stream = exam.called.stream
    need(stream.form, stream.why_unmasked)
    L = stream.length
    last = exam.places >= L - 3
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
    elif "position_ids" in exam.called.names:
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
    exam.describe(f"positions are {'relative' if gap.is_rounding else 'absolute'}{_count_of_padding(exam, places)}")


def _count_of_padding(exam: Examination, places: Tensor) -> str:
    """Return the end of a sentence: whether padding on the left counts if ``position_ids`` are not passed."""
    stream = exam.called.stream
    if stream.form is None:
        return ""
    keep = keep_mask(places, slice(3))
    positions = [{}, {"position_ids": places}, exam.called.counted(keep)]
    plain, with_padding, without = (exam.called.answer(exam.inputs, {stream.name: keep}, **given) for given in positions)
    is_counted = torch.equal(plain[1], with_padding[1]) and not torch.equal(plain[1], without[1])
    return " and count padding on the left" if is_counted else ""
