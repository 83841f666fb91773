"""Find where a change first shows: the first module, in the order of calls, whose output moves although its input does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

TINY = 64.0
"""The tolerance as a multiple of one rounding error. It can be small, because rows of one call are computed alike."""


@dataclass
class ModuleCall:
    """One call of a module: its floating-point tensors."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)


def first_moved(model: nn.Module, calm: Callable[[], Any], moved: Callable[[], Any], *stills: Tensor) -> str:
    """Return the name and class of the first module that moves where it must not, or an empty string.

    Args:
        calm, moved: two calls of the model.
        stills: bool (B, L), the rows and positions that must not move, for each length L; or bool (B,), rows.
    """
    with _recorded_calls(model) as first:
        calm()
    with _recorded_calls(model) as second:
        moved()
    fallback = ""
    for before, after in zip(first, second, strict=False):
        if before.name != after.name:
            return fallback
        if before.name and _moves(before.outputs, after.outputs, stills):
            if not _moves(before.inputs, after.inputs, stills):
                return _with_class(model, before.name)
            fallback = fallback or _with_class(model, before.name)
    return fallback


@contextmanager
def _recorded_calls(model: nn.Module) -> Iterator[list[ModuleCall]]:
    """The calls of all modules, ordered by when they end."""
    calls: list[ModuleCall] = []
    handles = []
    for name, module in model.named_modules():

        def end(module: nn.Module, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
            calls.append(ModuleCall(name, list(_float_tensors((args, kwargs))), list(_float_tensors(result))))

        handles.append(module.register_forward_hook(end, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _float_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dim() >= 2:
            yield value.detach().clone()
    else:
        parts: Any = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        for part in parts:
            yield from _float_tensors(part)


def _moves(before: list[Tensor], after: list[Tensor], stills: Sequence[Tensor]) -> bool:
    return any(_moved(x, y, still) for x, y in zip(before, after, strict=False) for still in stills)


def _moved(x: Tensor, y: Tensor, still: Tensor) -> bool:
    x_still, y_still = _still_part(x, still), _still_part(y, still)
    if x_still is None or y_still is None or x_still.shape != y_still.shape or not x_still.numel():
        return False
    size = x.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    gap = (x_still - y_still).abs().nan_to_num(0.0).max().item()
    return gap > TINY * torch.finfo(x.dtype).eps * size


def _still_part(x: Tensor, still: Tensor) -> Tensor | None:
    """The rows and positions of (B, L, ...) or (B, H, L, ...)."""
    still = still.to(x.device)
    if x.shape[0] != still.shape[0]:
        return None
    if still.dim() == 1:
        return x[still]
    if x.shape[1] == still.shape[1]:
        return x[still]
    if x.dim() >= 4 and x.shape[2] == still.shape[1]:
        return x.transpose(1, 2)[still]
    return None


def _with_class(model: nn.Module, name: str) -> str:
    return f"{name} ({type(model.get_submodule(name)).__name__})"
