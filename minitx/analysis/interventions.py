"""Change what attention does while a model runs: knock out heads, patch activations, force a pattern.

``intervene`` uses the same names as ``capture``. Any activation that ``capture`` records can be replaced by a number, a tensor, a
function of the old value, or a record of another run.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from minitx.analysis.recorder import (
    OUTPUTS,
    Hook,
    Indices,
    Layers,
    before_calls,
    chosen_modules,
    layer_of,
    places_of,
    rows_of_blocks,
    warn_of_silence,
    warning_of_padding,
)
from minitx.analysis.token_places import innermost, length_before, modules_with_caches
from minitx.nn.attention import DotProductAttention
from minitx.nn.blocks import is_recomputing
from minitx.nn.functional import AttentionCall, attention_weights, scores_of

Change = float | Tensor | Callable[[Tensor], Tensor] | Mapping[str, Sequence[Tensor]]
RECOMPUTED = "activation checkpointing computes the layer again"
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
    changes of the contexts around it, and so does ``capture``. Activation checkpointing computes a layer again in the backward pass,
    which must therefore also run inside the context. Outside, it is an error.

    Args:
        to: a number or a tensor to broadcast to the chosen part; a function of the chosen part; or the result of
            ``capture``. The n-th call then uses the n-th record, and later calls the last record.
        layers: as in ``capture``. Default: all.
        heads: the query heads. Default: all. Not for ``feedforward`` and ``residual``.
        positions: the queries; for ``values`` the keys; for ``feedforward`` and ``residual`` the tokens. They are columns of the
            whole text, padding included: with a cache, position 0 is in the first call, and later calls stay unchanged. A record of
            a text of another length is read at the same positions. Negative positions count from the end of a call's input. They
            are an error if a cache continues a text, because the text has no end yet. Default: all.

    Raises:
        ValueError: an unknown ``what``, layer, head or position; a shape that does not fit; a core whose weights are not the
            softmax of its scores; a replacement of scores inside a context that replaces the weights. RuntimeError: a module is
            compiled; or activation checkpointing computes a layer again without its change, or would need several records for it.

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
        backward, changes = _Backward(), dict[str, _Change]()
        hooks.callback(setattr, backward, "is_after_context", True)
        for around in {""} | {name[:end] for name in modules for end, letter in enumerate(name) if letter == "."}:
            hooks.enter_context(model.get_submodule(around).register_forward_hook(Hook(backward.watch)))
        for name, module in modules.items():
            place = _Place(name, what, heads, positions, rows, before)
            change: _Change
            if isinstance(to, Mapping):
                change = _ChangeToRecords(place, backward, to[name])
            else:
                change = _ChangeToValue(place, backward, to)
            changes[name] = change
            if what in OUTPUTS:
                hooks.enter_context(module.register_forward_hook(Hook(change.leave)))
                continue
            if what != "values" and not isinstance(module, DotProductAttention):
                raise ValueError(f"{name} is a {type(module).__name__}: {what} can be replaced in DotProductAttention only")
            hooks.enter_context(module.register_forward_pre_hook(Hook(change.enter)))
        yield
    warn_of_silence(model, {name: change.has_changed or change.has_passed for name, change in changes.items()})
    if missed := [name for name, change in changes.items() if change.has_passed and not change.has_changed]:
        warnings.warn(
            f"positions={positions} changed nothing in {', '.join(missed)}: they were in a cache before the context was open",
            stacklevel=3,
        )


@dataclass
class _Place:
    """The chosen part of an activation in one layer.

    Attributes:
        name: the name of the module. what: the kind of activation.
        heads, positions: as in ``intervene``.
        rows: B and L of each block that is running, by name.
        before: the number of positions that each module with a cache has read, by name.
    """

    name: str
    what: str
    heads: Indices
    positions: Indices
    rows: Mapping[str, tuple[int, int]]
    before: Mapping[str, int]

    def start(self) -> int:
        """Return the position in the text of the first position of a call."""
        return 0 if self.positions is None else innermost(self.name, self.before)

    def numbers(self) -> Sequence[int]:
        """Return the positions as the caller's numbers; empty if all are chosen."""
        return () if self.positions is None else [self.positions] if isinstance(self.positions, int) else self.positions

    def head_index(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return the index of the rows and of the chosen heads, if ``tensor`` has heads."""
        if tensor.dim() < 4:
            return (slice(None),)
        return slice(None), places_of("heads", self.heads, tensor.shape[1], tensor.device)[:, None]

    def chosen_positions(self, size: int, start: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the numbers of the chosen positions that lie in a call of ``size`` positions from ``start`` on, and their places in it."""
        if self.positions is None:
            every = torch.arange(size, device=device)
            return every, every
        if start and self.what != "values" and any(number < 0 for number in self.numbers()):
            raise ValueError(
                f"positions={self.positions} count from the end, but a text that a cache continues has no end yet: count from its start"
            )
        places = places_of("positions", self.positions, start + size, device) - start
        (kept,) = (places >= 0).nonzero(as_tuple=True)
        return kept, places[kept]


@dataclass
class _Change:
    """The hooks that change one layer.

    Attributes:
        has_changed: whether a call had a chosen position.
        has_passed: whether a call had none.
    """

    place: _Place
    backward: _Backward
    has_changed: bool = field(default=False, init=False)
    has_passed: bool = field(default=False, init=False)

    def enter(self, core: nn.Module, args: tuple[AttentionCall]) -> tuple[AttentionCall]:
        (call,) = args
        start, what = self.place.start(), self.place.what
        if what == "values":  # with a window, a cache returns only the last keys
            start = max(0, start + call.shape[2] - call.shape[3]) if start and not call.is_cross else 0
            group = call.query.shape[1] // call.value.shape[1]
            key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (call.key, call.value))
            return (replace(call, key=key, value=self.changed(value, start)),)
        if what == "weights":
            return (replace(call, weights=self.changed(attention_weights(call), start)),)
        if call.weights is not None:
            raise ValueError(f"{self.place.name}: a context around this one replaces the weights, so scores have no effect")
        return (replace(call, scores=self.changed(scores_of(call)[0], start)),)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        start = self.place.start()
        if isinstance(output, tuple):  # with weights
            return (self.changed(output[0], start), *output[1:])
        return self.changed(output, start)

    def changed(self, tensor: Tensor, start: int) -> Tensor:
        """Replace the chosen part of ``tensor``. Its first position is position ``start`` of the text."""
        place = self.place
        if tensor.dim() == 2:
            rows = place.rows[layer_of(place.name, place.rows)]
            return self.changed(tensor.unflatten(0, rows), start).flatten(0, 1)
        kept, positions = place.chosen_positions(tensor.shape[-2], start, tensor.device)
        heads = place.head_index(tensor)
        self.begin_call(tensor, positions + start)
        if not len(positions):
            self.has_passed = True
            return tensor
        self.has_changed = True
        if is_recomputing() and not self.backward.recomputes:
            raise RuntimeError(f"{place.name}: {RECOMPUTED} with the change of intervene, but it ran before without it")
        self.backward.recomputes |= _is_checkpointed()
        index = (*heads, positions)
        old = tensor[index]
        new = self.replacement(tensor, old, index, (*heads, positions + start), kept).to(tensor)
        new = self.expanded(new, old, old.shape[-2])
        if old.shape == tensor.shape and place.heads is None and place.positions is None:
            return new.clone()  # the model may change it in place
        out = tensor.clone()
        out[index] = new
        return out

    def begin_call(self, tensor: Tensor, places: Tensor) -> None:
        """Note a call that replaces ``tensor`` at these ``places`` of the text, if any."""

    def replacement(self, tensor: Tensor, old: Tensor, index: Any, index_in_text: Any, kept: Tensor) -> Tensor:
        """Return the replacement of ``old`` (``tensor[index]``): the ``kept`` ones of the chosen positions."""
        raise NotImplementedError

    def expanded(self, new: Tensor, old: Tensor, length: int) -> Tensor:
        """Expand ``new`` to the shape of ``old`` with ``length`` positions."""
        try:
            return new.expand(*old.shape[:-2], length, old.shape[-1])
        except RuntimeError:
            shapes = f"must fit the shape {tuple(old.shape)}, got {tuple(new.shape)}"
            raise ValueError(f"{self.place.name}: the replacement of {self.place.what} {shapes}") from None


@dataclass
class _ChangeToValue(_Change):
    """A replacement by a number, a tensor or a function."""

    to: float | Tensor | Callable[[Tensor], Tensor]

    def replacement(self, tensor: Tensor, old: Tensor, index: Any, index_in_text: Any, kept: Tensor) -> Tensor:
        if isinstance(self.to, int | float):
            return old.new_full((), self.to)  # created on the device: a copy would wait for it
        if not callable(self.to):
            new, chosen = torch.as_tensor(self.to), len(self.place.numbers())
            return new if len(kept) >= chosen else self.expanded(new, old, chosen)[..., kept, :]
        if not isinstance(new := self.to(old), Tensor):
            requirement = f"the function that replaces {self.place.what} must return a tensor"
            raise ValueError(f"{self.place.name}: {requirement}, got {type(new).__name__}")
        return new


@dataclass
class _ChangeToRecords(_Change):
    """A replacement by the records of another run, one for each call.

    Attributes:
        records: the records of the layer.
        number: the number of the record of the running call.
    """

    records: Sequence[Tensor]
    number: int = field(default=-1, init=False)

    def begin_call(self, tensor: Tensor, places: Tensor) -> None:
        """Find the record of the call. Its text may have another length if it contains the chosen ``places``."""
        name = self.place.name
        if not self.records:
            raise ValueError(f"{name}: nothing was recorded; run the model inside of capture first")
        if is_recomputing() and len(self.records) > 1:
            raise RuntimeError(
                f"{name}: {RECOMPUTED}, and its {len(self.records)} records do not say which one replaces its {self.place.what}"
            )
        self.number = min(self.number + 1, len(self.records) - 1)
        record = self.records[self.number]
        widths = [(*values.shape[1:-2], values.shape[-1]) for values in (record, tensor)]
        counted = self.place.positions is not None and all(number >= 0 for number in self.place.numbers())
        is_long = counted and bool((places < record.shape[-2]).all())
        if widths[0] != widths[1] or not (record.shape[-2] == tensor.shape[-2] or is_long):
            raise ValueError(f"{name}: the record has shape {tuple(record.shape)}, but {tuple(tensor.shape)} is replaced")

    def replacement(self, tensor: Tensor, old: Tensor, index: Any, index_in_text: Any, kept: Tensor) -> Tensor:
        record = self.records[self.number].to(tensor)
        return record[index if record.shape[-2] == tensor.shape[-2] else index_in_text]


@dataclass
class _Backward:
    """Refuses a backward pass after the context if activation checkpointing computes a changed call again in it."""

    recomputes: bool = False
    is_after_context: bool = False

    def watch(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Watch the gradients of a module around changed calls."""
        if self.recomputes:
            outputs = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
            for tensor in outputs:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self.check)

    def check(self, grad: Tensor) -> None:
        if self.is_after_context:
            raise RuntimeError(f"{RECOMPUTED} without the change: call backward() inside of `with intervene(...)`")


def _is_checkpointed() -> bool:
    """Whether a call runs inside of ``torch.utils.checkpoint``."""
    if torch.is_grad_enabled():
        try:
            with disable_saved_tensors_hooks(""):  # raises if there are hooks
                return False
        except RuntimeError:
            return True
    frame = inspect.currentframe()  # the reentrant form runs its function without gradients
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None
