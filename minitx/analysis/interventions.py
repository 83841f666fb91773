"""Change what attention does while a model runs: knock out heads, patch activations, force a pattern.

``intervene`` uses the same names as ``capture``. Any activation that ``capture`` records can be replaced by a number, a tensor, a
function of the old value, or a record of another run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from minitx.analysis.answers import AnswerRows, Asked, logits_of, read_answers
from minitx.analysis.heads import NO_INTERVAL, Interval
from minitx.analysis.recorder import (
    OUTPUTS,
    Hook,
    Indices,
    Layers,
    before_calls,
    capture,
    chosen_modules,
    layer_of,
    modules_of,
    places_of,
    rows_of_blocks,
    stream_of,
    warn_of_silence,
    warning_of_padding,
)
from minitx.analysis.snapshot import Snapshot
from minitx.analysis.token_places import home_of, innermost, length_before, modules_with_caches, with_positions
from minitx.nn.attention import DotProductAttention
from minitx.nn.blocks import is_block, is_recomputing
from minitx.nn.functional import AttentionCall, attention_weights, scores_of
from minitx.nn.modes import evaluating
from minitx.nn.precision import full_precision, widest_float
from minitx.nn.transfer import to_host

Change = float | Tensor | Callable[[Tensor], Tensor] | Mapping[str, Sequence[Tensor]]
CHANGEABLE = ("scores", "weights", "values", *OUTPUTS)


@contextmanager
def intervene(
    model: nn.Module,
    what: str,
    to: Change,
    *,
    layers: Layers = None,
    heads: Indices = None,
    positions: Indices = None,
) -> Iterator[None]:
    """Replace an activation in every forward pass while the context is open.

    =============== =============== ==================================================================================
    ``what``        shape           effect
    =============== =============== ==================================================================================
    ``scores``      (B, H, L, S)    scaled, soft-capped and with bias; mask and softmax follow
    ``weights``     (B, H, L, S)    after mask and softmax, before dropout. Neither mask nor softmax is applied again
    ``values``      (B, H, S, Dv)   the values as each query head gets them
    ``heads``       (B, H, L, Dv)   the output of each head before ``out_proj``; 0 knocks a head out
    ``feedforward`` (B, L, E)       the output of a block's feed-forward part
    ``residual``    (B, L, E)       the residual stream after a block
    =============== =============== ==================================================================================

    Knock a head out: ``intervene(model, "heads", 0.0, layers=[1], heads=[2])``. Sharpen with temperature T:
    ``intervene(model, "scores", lambda z: z / T)``. Patch from another run: ``intervene(model, "values", seen)`` with the
    result of ``capture(other, what="values")``. For ``scores`` and ``weights``, the changed layers use the backend ``math``;
    all others keep their kernel. Gradients flow through the changed computation. Contexts can be nested: each one sees the
    changes of the contexts around it, and so does ``capture``. With activation checkpointing, the backward pass must also run inside
    the context, because the recomputation outside of it would not have the change. Outside, it is an error.

    Args:
        to: a number or a tensor to broadcast to the chosen part; a function of the chosen part; or the result of
            ``capture``. The n-th call then uses the n-th record, and later calls the last record. A call that activation
            checkpointing runs again gets the same record again.
        layers: as in ``capture``. Default: all.
        heads: the query heads. Default: all. Not for ``feedforward`` and ``residual``.
        positions: the queries; for ``values`` the keys; for ``feedforward`` and ``residual`` the tokens. They are columns of the
            whole text, padding included: with a cache, position 0 is in the first call, and later calls stay unchanged. A record of
            a text of another length is read at the same positions. Negative positions count from the end of a call's input. They
            are an error if a cache continues a text, because the text has no end yet. Default: all.

    Raises:
        ValueError: an unknown ``what``, layer, head or position; a shape that does not fit; a core whose weights are not the
            softmax of its scores; a replacement of scores inside a context that replaces the weights. RuntimeError: a module is
            compiled; activation checkpointing runs a call again that cannot be distinguished from another call; or, at the backward
            pass, the context has ended although activation checkpointing has to run a changed call again.

    Warns:
        UserWarning: no call reads a chosen position, because it is already in a cache; or, as in ``capture``, a chosen layer did not
            run, or padding on the left is counted as tokens.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention, x = MultiHeadAttention(6, 2), torch.randn(1, 3, 6)
    >>> with torch.no_grad(), intervene(attention, "heads", 0.0):
    ...     out = attention(x)
    >>> bool(torch.allclose(out, attention.out_proj.bias.expand(1, 3, 6)))
    True
    """
    if to is None:
        raise TypeError("to must be a number, a tensor, a function or records of capture, got None")
    if what not in CHANGEABLE:
        raise ValueError(f"what={what!r} must be one of {', '.join(CHANGEABLE)}")
    modules = chosen_modules(model, what, layers, heads)
    if isinstance(to, Mapping):
        if (recorded := getattr(to, "what", None)) not in (None, what):
            raise ValueError(f"what={what!r} cannot be replaced by records of {recorded!r}: use capture(what={what!r})")
        if not (both := modules.keys() & to.keys()):
            raise ValueError(f"the records have none of the layers {', '.join(modules)}")
        modules = {name: module for name, module in modules.items() if name in both}
    before: dict[str, int] = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        before[name] = length_before(module, args, options)

    with warning_of_padding(model), rows_of_blocks(model) as rows, ExitStack() as hooks:
        hooks.enter_context(before_calls({} if positions is None else modules_with_caches(model), note))
        reruns = hooks.enter_context(_watch_reruns(model, modules))
        parts = {name: _Part(name, what, to, heads, positions, rows, before, reruns) for name in modules}
        for name, module in modules.items():
            if what in OUTPUTS:
                hooks.enter_context(module.register_forward_hook(Hook(parts[name].leave)))
                continue
            if what != "values" and not isinstance(module, DotProductAttention):
                raise ValueError(f"{name} is a {type(module).__name__}: {what} can be replaced in DotProductAttention only")
            hooks.enter_context(module.register_forward_pre_hook(Hook(parts[name].enter)))
        yield
    warn_of_silence(model, {name: part.ran for name, part in parts.items()})
    if missed := [name for name, part in parts.items() if part.passed and not part.has_changed]:
        warnings.warn(
            f"positions={positions} changed nothing in {', '.join(missed)}: they were in a cache before the context was open",
            stacklevel=3,
        )


@dataclass
class _Reruns:
    """Whether a backward pass after the context would run changed calls again, without the change.

    ``number`` counts the changed calls inside of activation checkpointing, and ``before`` has the count at the start of each module
    around them.
    """

    is_over: bool = False
    number: int = 0
    before: dict[str, int] = field(default_factory=dict)

    def note_changed(self) -> None:
        if not is_recomputing():
            self.number += _is_checkpointed()

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.before[name] = self.number

    def leave(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.number > self.before[name]:
            outputs = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
            for tensor in outputs:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self.check)

    def check(self, grad: Tensor) -> None:
        if self.is_over:
            raise RuntimeError(
                "the backward pass runs after the context of intervene, and activation checkpointing would run the model again without "
                "the change: call backward() inside of `with intervene(...)`"
            )


def _is_checkpointed() -> bool:
    """Return whether a forward pass keeps no activations: it runs without gradients (reentrant), or there are hooks for saved tensors."""
    try:
        with disable_saved_tensors_hooks(""):  # raises if there are hooks
            return not torch.is_grad_enabled()
    except RuntimeError:
        return True


@contextmanager
def _watch_reruns(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[_Reruns]:
    reruns = _Reruns()
    names = {""} | {name[:end] for name in modules for end, letter in enumerate(name) if letter == "."}
    around = {name: model.get_submodule(name) for name in names}
    with before_calls(around, reruns.enter), ExitStack() as hooks:
        for name, module in around.items():
            hooks.enter_context(module.register_forward_hook(Hook(partial(reruns.leave, name))))
        try:
            yield reruns
        finally:
            reruns.is_over = True


@dataclass
class _Part:
    """The change in one layer."""

    name: str
    what: str
    to: Change
    heads: Indices
    positions: Indices
    rows: Mapping[str, tuple[int, int]]
    before: Mapping[str, int]
    reruns: _Reruns
    ran: bool = False
    has_changed: bool = False
    passed: bool = False
    norms: list[Tensor] = field(default_factory=list)

    def enter(self, core: nn.Module, args: tuple[AttentionCall]) -> tuple[AttentionCall]:
        (call,) = args
        start = 0 if self.positions is None else innermost(self.name, self.before)
        if self.what == "values":  # with a window, a cache returns only the last keys
            start = max(0, start + call.shape[2] - call.shape[3]) if start and not call.is_cross else 0
            group = call.query.shape[1] // call.value.shape[1]
            key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (call.key, call.value))
            return (replace(call, key=key, value=self.changed(value, start)),)
        if self.what == "weights":
            return (replace(call, weights=self.changed(attention_weights(call), start)),)
        if call.weights is not None:
            raise ValueError(f"{self.name}: a context around this one replaces the weights, so scores have no effect")
        return (replace(call, scores=self.changed(scores_of(call)[0], start)),)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        start = 0 if self.positions is None else innermost(self.name, self.before)
        if isinstance(output, tuple):  # with weights
            return (self.changed(output[0], start), *output[1:])
        return self.changed(output, start)

    def changed(self, tensor: Tensor, start: int) -> Tensor:
        """Replace the chosen part of ``tensor``. Its first position is position ``start`` of the text."""
        self.ran = True
        if tensor.dim() == 2:
            rows = self.rows[layer_of(self.name, self.rows)]
            return self.changed(tensor.unflatten(0, rows), start).flatten(0, 1)
        kept, positions = self.chosen_positions(tensor.shape[-2], start, tensor.device)
        heads = [places_of("heads", self.heads, tensor.shape[1], tensor.device)[:, None]] if tensor.dim() == 4 else []
        record = self.record(tensor, positions + start) if isinstance(self.to, Mapping) else None  # a record for every call
        if not len(positions):
            self.passed = True
            return tensor
        self.has_changed = True
        self.reruns.note_changed()
        rows_and_heads: tuple[Any, ...] = (slice(None), *heads)
        index = (*rows_and_heads, positions)
        old = tensor[index]
        if record is not None:
            is_alike = record.shape[-2] == tensor.shape[-2]
            new = record[index if is_alike else (*rows_and_heads, positions + start)]
        else:
            new = self.replacement(old)
        try:
            if record is None and not callable(self.to) and len(kept) < (chosen := len(self.position_numbers())):
                new = new.expand(*old.shape[:-2], chosen, old.shape[-1])[..., kept, :]
            new = new.to(tensor).expand_as(old)
        except RuntimeError:
            shapes = f"must fit the shape {tuple(old.shape)}, got {tuple(new.shape)}"
            raise ValueError(f"{self.name}: the replacement of {self.what} {shapes}") from None
        if old.shape == tensor.shape and self.heads is None and self.positions is None:
            return new.clone()  # the model may change it in place
        out = tensor.clone()
        out[index] = new
        return out

    def position_numbers(self) -> Sequence[int]:
        """The positions as the caller's numbers; empty if all are chosen."""
        return () if self.positions is None else [self.positions] if isinstance(self.positions, int) else self.positions

    def chosen_positions(self, size: int, start: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The numbers of the chosen positions that lie in a call of ``size`` positions from ``start`` on, and their places in it."""
        if self.positions is None:
            return (every := torch.arange(size, device=device)), every
        if start and self.what != "values" and any(number < 0 for number in self.position_numbers()):
            raise ValueError(
                f"positions={self.positions} count from the end, but a text that a cache continues has no end yet: count from its start"
            )
        places = places_of("positions", self.positions, start + size, device) - start
        (kept,) = (places >= 0).nonzero(as_tuple=True)
        return kept, places[kept]

    def record(self, tensor: Tensor, places: Tensor) -> Tensor:
        """The record that replaces ``tensor``. Its text may have another length if it contains the chosen ``places``."""
        records = self.to[self.name]  # type: ignore[call-overload, index]
        if not records:
            raise ValueError(f"{self.name}: nothing was recorded; run the model inside of capture first")
        record: Tensor = records[self.number(tensor.detach(), len(records))].to(tensor)
        widths = [(*values.shape[1:-2], values.shape[-1]) for values in (record, tensor)]
        counted = self.positions is not None and all(number >= 0 for number in self.position_numbers())
        is_long = counted and bool((places < record.shape[-2]).all())
        if widths[0] != widths[1] or not (record.shape[-2] == tensor.shape[-2] or is_long):
            raise ValueError(f"{self.name}: the record has shape {tuple(record.shape)}, but {tuple(tensor.shape)} is replaced")
        return record

    def replacement(self, old: Tensor) -> Tensor:
        if isinstance(self.to, int | float):
            return old.new_full((), self.to)  # created on the device: a copy would wait for it
        if not callable(self.to):
            return torch.as_tensor(self.to)
        if not isinstance(new := self.to(old), Tensor):
            requirement = f"the function that replaces {self.what} must return a tensor"
            raise ValueError(f"{self.name}: {requirement}, got {type(new).__name__}")
        return new

    def number(self, tensor: Tensor, num_records: int) -> int:
        """The number of the record of this call. A recomputed call is recognised by the values of its ``tensor``."""
        if num_records == 1:
            return 0
        norm = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
        if not is_recomputing():
            self.norms.append(norm)
            return min(len(self.norms), num_records) - 1
        candidates = {min(number, num_records - 1) for number, other in enumerate(self.norms) if torch.equal(norm, other)}
        if len(candidates) != 1:
            raise RuntimeError(
                f"{self.name}: activation checkpointing runs a layer again, and {len(candidates)} of its calls have the same "
                f"{self.what}: the record that replaces them is not known"
            )
        return candidates.pop()


# --- common experiments


@dataclass(frozen=True)
class HeadEffects:
    """The effect of changing one head: a mean over the rows, or the ratio of two, with Student's 95 % interval.

    Attributes:
        names: the names of the layers' cores. mean, low, high: (layers, H). rows: the number of rows.
        what: the meaning of the numbers, in words.

    >>> mean = torch.zeros(1, 2)
    >>> HeadEffects(("core",), mean, mean - 1, mean + 1, 7, "change of loss").low.tolist()
    [[-1.0, -1.0]]
    """

    names: tuple[str, ...]
    mean: Tensor
    low: Tensor
    high: Tensor
    rows: int
    what: str


@torch.no_grad()
def knock_out_heads(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> HeadEffects:
    """Measure which heads matter: the loss with one head's output set to 0, minus the loss of the whole model.

    The model runs in evaluation mode, once for each head. Other heads may do the same work, so a small change does not show
    that a head does nothing (Michel et al. 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650; McGrath et al.
    2023, "The Hydra Effect", arXiv:2307.15771).

    Args:
        loss: a function of the model that returns the loss of each row, (n,). It must always use the same rows. Rows in which
            the whole model's loss is NaN do not count. If another row's loss becomes NaN without a head, the effect of this head is NaN.

    Raises:
        ValueError: no attention of minitx ran, or the loss is not (n,): the interval needs a loss per row.

    >>> from minitx.nn import MultiHeadAttention
    >>> x, model = torch.randn(7, 3, 6), MultiHeadAttention(6, 2)
    >>> knock_out_heads(model, lambda model: model(x).square().mean((1, 2))).mean.shape
    torch.Size([1, 2])
    """
    with evaluating(model):
        with _count_heads(model) as num_heads:
            whole = _one_per_row(loss(model), "loss")
        without = _each_head(model, num_heads, "heads", 0.0, loss)
    without = {name: [_one_per_row(losses, "loss") for losses in heads] for name, heads in without.items()}
    whole, without = to_host((whole, without))
    known = ~whole.isnan()
    return _effects(without, lambda losses: (losses - whole)[known], "change of loss without the head")


@torch.no_grad()
def patch_heads(
    model: nn.Module,
    clean: Mapping[str, Tensor],
    corrupted: Mapping[str, Tensor],
    score: Callable[[Tensor], Tensor],
    *,
    what: str = "values",
) -> HeadEffects:
    """Measure which heads carry the answer: give one head of the corrupted run its activation from the clean run.

    The effect of a head is mean (score patched - score corrupted) / mean (score clean - score corrupted): 1 if this head alone
    restores the clean score, 0 if it restores nothing (Vig et al. 2020, arXiv:2004.12265; Heimersheim and Nanda 2024, "How to
    use and interpret activation patching", arXiv:2404.15255). The interval is a linearised interval of a ratio of means.

    Args:
        clean, corrupted: two batches of the same shape. They differ in the tokens that the answer depends on.
        score: a function from the logits (for a Hugging Face model, the ``logits`` of its output) to one number per row, (n,), for
            example the logit of the clean answer minus the logit of the corrupted answer.
        what: ``values`` (the head's input), ``heads`` (its output), ``weights`` or ``scores`` (its attention).

    Raises:
        ValueError: the clean and the corrupted run have the same mean score, a score is NaN or not (n,), or ``what`` is unknown.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> clean, corrupted = ({"input_ids": torch.tensor([[first, 2, 3], [first, 5, 3]])} for first in (1, 7))
    >>> patch_heads(model, clean, corrupted, lambda logits: logits[:, -1, 4]).mean.shape
    torch.Size([2, 3])
    """
    if what not in (kinds := ("values", "heads", "weights", "scores")):
        raise ValueError(f"what={what!r} must be one of {', '.join(kinds)}")
    clean, corrupted = (with_positions(model, batch) for batch in (clean, corrupted))
    with evaluating(model):
        with capture(model, what=what) as seen:
            right = _one_per_row(score(logits_of(model(**clean))), "score")
        wrong = _one_per_row(score(logits_of(model(**corrupted))), "score")
        if not (whole := right - wrong).mean().abs() > 0:
            raise ValueError("clean and corrupted run have the same mean score, or one is NaN: there is nothing to restore")
        num_heads = {name: records[0].shape[1] if records else 0 for name, records in seen.items()}
        patched = _each_head(model, num_heads, what, seen, lambda model: score(logits_of(model(**corrupted))))

    patched = {name: [_one_per_row(scores, "score") for scores in heads] for name, heads in patched.items()}
    whole, wrong, patched = to_host((whole, wrong, patched))

    def linearised(scores: Tensor) -> Tensor:
        share = (gain := scores - wrong).mean() / whole.mean()
        return share + (gain - share * whole) / whole.mean()

    return _effects(patched, linearised, "share of the clean score that the head restores")


@torch.no_grad()
def answers_without_heads(
    model: nn.Module, inputs: Mapping[str, Any], asked: Asked, *, layers: Layers = None
) -> dict[str, list[AnswerRows]]:
    """Return the answers with the output of one head set to 0, for every head of each layer.

    The model reads several copies of the batch at once. In each copy, a different head of the layer is silent. The work is one forward
    pass for each head.

    Args:
        layers: as in ``capture``.

    Raises:
        ValueError: the output has no logits for these questions, or no attention ran.

    >>> from minitx.analysis.answers import Question
    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> asked = Asked("input_ids", [[Question("What follows?", 2, right=5)]], 11, str)
    >>> without = answers_without_heads(model, {"input_ids": torch.tensor([[1, 2, 3]])}, asked)
    >>> [len(heads) for heads in without.values()], without["blocks.0.attention.core"][2][0][0].right
    ([3, 3], '5')
    """
    inputs = with_positions(model, inputs)
    B = len(asked.rows)
    answers = dict[str, list[AnswerRows]]()
    length = inputs[asked.axis].shape[1] if asked.axis in inputs else 1
    at_once = max(1, COPIED_TOKENS // (B * length))
    with evaluating(model), full_precision(next(iter(inputs.values())).device):
        with _count_heads(model) as num_heads:
            model(**inputs)
        for name in chosen_modules(model, "heads", layers):
            answers[name] = []
            for heads in torch.eye(num_heads[name], dtype=torch.bool).split(at_once):
                n, at = len(heads), heads.repeat_interleave(B, 0)[:, :, None, None]  # (n · B, H, 1, 1)
                copies = {key: x.repeat(n, *[1] * (x.dim() - 1)) if _has_rows(x, B) else x for key, x in inputs.items()}

                def silence(x: Tensor, at: Tensor = at) -> Tensor:
                    return x.masked_fill(at.to(x.device), 0.0)

                with intervene(model, "heads", silence, layers=[name]):
                    rows = read_answers(model(**copies), replace(asked, rows=[*asked.rows] * n))
                if rows is None:
                    raise ValueError(
                        f"{type(model).__name__} returns no logits over {asked.size} answers, so the effect of a head is not known"
                    )
                answers[name] += [rows[i * B : (i + 1) * B] for i in range(n)]
    return answers


def with_knock_outs(snapshot: Snapshot, model: nn.Module, inputs: Mapping[str, Any], asked: Asked | None) -> Snapshot:
    """Return a snapshot with the answers without each head of its layers (``answers_without_heads``).

    Args:
        snapshot: the snapshot of ``model`` on ``inputs``, taken with ``asked``.

    Raises:
        ValueError: the snapshot has no answers.
    """
    if snapshot.answers is None or asked is None:
        raise ValueError(
            f"knock_out=true: {type(model).__name__} gives no answer on this input that could change (logits of the next token or of "
            "a label)"
        )
    without = answers_without_heads(model, inputs, asked, layers=[layer.name for layer in snapshot.maps])
    return replace(snapshot, answers=replace(snapshot.answers, without=without))


COPIED_TOKENS = 512
"""The number of tokens that the model reads at once in ``answers_without_heads``, at least one batch."""


def _has_rows(x: Any, B: int) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and len(x) == B


@contextmanager
def _count_heads(model: nn.Module) -> Iterator[dict[str, int]]:
    """Count the heads of each attention core, by name: 0 if the core does not run."""
    cores = chosen_modules(model, "heads", None)  # raises if there are none
    num_heads = dict.fromkeys(cores, 0)

    def enter(name: str, core: nn.Module, args: tuple[AttentionCall], kwargs: dict[str, Any]) -> None:
        num_heads[name] = args[0].query.shape[1]

    with before_calls(cores, enter):
        yield num_heads


def _each_head(
    model: nn.Module, num_heads: Mapping[str, int], what: str, to: Change, loss: Callable[[nn.Module], Tensor]
) -> dict[str, list[Tensor]]:
    """``loss(model)`` with the change in one head, for every head of each core."""
    if not any(num_heads.values()):
        raise ValueError(f"none of the {len(num_heads)} attention cores of the model ran")
    losses: dict[str, list[Tensor]] = {}
    for name, number in num_heads.items():
        for head in range(number):
            with intervene(model, what, to, layers=[name], heads=[head]):
                losses.setdefault(name, []).append(loss(model))
    return losses


def _one_per_row(numbers: Any, what: str) -> Tensor:
    """Return the numbers of a user's function, in the widest type of their device."""
    if not isinstance(numbers, Tensor) or numbers.dim() != 1:
        got = tuple(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
        raise ValueError(f"{what} must return one number for each row, (n,), got {got}")
    return numbers.to(widest_float(numbers.device))


def _effects(by_core: dict[str, list[Tensor]], compare: Callable[[Tensor], Tensor], what: str) -> HeadEffects:
    compared = [[compare(numbers).double() for numbers in heads] for heads in by_core.values()]
    intervals = [[NO_INTERVAL if effect.isnan().any() else Interval.of(effect) for effect in heads] for heads in compared]
    width = max(map(len, intervals))
    rows = [[*heads, *[NO_INTERVAL] * (width - len(heads))] for heads in intervals]
    numbers = torch.tensor([[(cell.mean, cell.low, cell.high) for cell in row] for row in rows], dtype=torch.float64)
    mean, low, high = numbers.unbind(-1)
    return HeadEffects(tuple(by_core), mean, low, high, len(compared[0][0]), what)


@torch.no_grad()
def logit_lens(model: nn.Module, **inputs: Tensor) -> Tensor:
    """Return the logits that the model would give if it ended after each block: (blocks, B, L, V).

    The output of the last block is replaced by the output of each earlier block, so the final norm and the head are applied to the
    residual stream after each block (nostalgebraist 2020, "interpreting GPT: the logit lens"). A block that is applied several
    times counts each time. Blocks may be nested in other modules. Blocks whose residual stream is not the last block's are left out:
    the encoder of an encoder–decoder, and a separate vision model.

    Raises:
        ValueError: the model has no block, no block runs, or the residual stream changes its shape between blocks; the model has no
            head and therefore returns no logits; or a layer that isn't marked as a block follows the last block.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> ids = torch.tensor([[1, 2, 3, 5]])
    >>> logits = logit_lens(model, input_ids=ids)
    >>> logits.shape, bool(torch.equal(logits[-1], model(ids)))
    (torch.Size([2, 1, 4, 11]), True)
    """
    inputs = dict(with_positions(model, inputs))
    with evaluating(model):
        with capture(model, what="residual") as seen:
            calls = _block_calls(model, inputs)
        if not calls:
            raise ValueError(f"no block of {type(model).__name__} ran")
        with intervene(model, "residual", lambda x: x.flip(-1)):
            changed = _block_calls(model, inputs)
        # A stream starts at a block whose input does not depend on the outputs of the earlier blocks.
        pairs = zip(calls, changed, strict=True)
        start = max((i for i, ((_, x), (_, y)) in enumerate(pairs) if torch.equal(x, y)), default=0)
        records = {name: iter(of_block) for name, of_block in seen.items()}
        after = [next(records[name]) for name, _ in calls]
        last = calls[-1][0]
        out = []
        _refuse_layers_after(model, last)
        for record in after[start:]:
            with intervene(model, "residual", {last: [*seen[last][:-1], record]}):
                out.append(logits_of(model(**inputs)))
    if not isinstance(out[0], Tensor):
        raise ValueError(f"{type(model).__name__} returns a {type(out[0]).__name__}, not logits: use the model with its head")
    return torch.stack(out)


def _refuse_layers_after(model: nn.Module, last: str) -> None:
    """Raise an error if a layer that isn't a block follows the block ``last`` in its list: the lens would include that layer."""
    path, _, number = last.rpartition(".")
    layers = model.get_submodule(path)
    if isinstance(layers, nn.ModuleList) and not all(map(is_block, layers[int(number) + 1 :])):
        raise ValueError(
            f"a layer of {path} that isn't marked as a block follows the last block, {last}, so the lens would include it: mark its "
            "class with is_block = True"
        )


def _block_calls(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The name and the input of each block that ``model(**inputs)`` calls, in order, of the innermost model around the last block."""
    calls: list[tuple[str, Tensor]] = []

    def enter(name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((name, stream_of(args, kwargs).clone()))

    with before_calls(modules_of(model, "residual"), enter):
        model(**inputs)
    homes = [home_of(model, name) for name, _ in calls]
    return [call for call, home in zip(calls, homes, strict=True) if home == homes[-1]]
