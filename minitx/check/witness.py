"""Find where a change first shows: the first module, in the order of calls, whose output moves although its input does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from minitx.check.calling import tensors_of

TINY = 64.0
"""The tolerance as a multiple of one rounding error. It can be small, because rows of one call are computed alike."""


ModuleCall = tuple[str, list[Tensor], list[Tensor]]
"""One call of a module: its name, and its floating-point inputs and outputs."""


def first_moved(model: nn.Module, calm: Callable[[], Any], moved: Callable[[], Any], *stills: Tensor) -> str:
    """Return the name and class of the first module that moves where it must not, or an empty string.

    Args:
        calm, moved: two calls of the model.
        stills: bool (B, L), the rows and positions that must not move, for each length L; or bool (B,), rows.
    """
    fallback = ""
    for (name, inputs, outputs), (other, *after) in zip(_calls(model, calm), _calls(model, moved), strict=False):
        if name != other:
            return fallback
        if name and _moves(outputs, after[1], stills):
            described = f"{name} ({type(model.get_submodule(name)).__name__})"
            if not _moves(inputs, after[0], stills):
                return described
            fallback = fallback or described
    return fallback


def _calls(model: nn.Module, call: Callable[[], Any]) -> list[ModuleCall]:
    """The calls of all modules, ordered by when they end."""
    calls: list[ModuleCall] = []
    with ExitStack() as hooks:
        for name, module in model.named_modules():

            def end(module: nn.Module, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
                calls.append((name, _float_tensors((args, kwargs)), _float_tensors(result)))

            hooks.enter_context(module.register_forward_hook(end, with_kwargs=True))
        call()
    return calls


def _float_tensors(value: Any) -> list[Tensor]:
    return [x.detach().clone() for x in tensors_of(value) if x.is_floating_point() and x.dim() >= 2]


def _moves(before: list[Tensor], after: list[Tensor], stills: Sequence[Tensor]) -> bool:
    return any(_moved(x, y, still) for x, y in zip(before, after, strict=False) for still in stills)


def _moved(x: Tensor, y: Tensor, still: Tensor) -> bool:
    x_still, y_still = _still_part(x, still), _still_part(y, still)
    if x_still.shape != y_still.shape or not x_still.numel():
        return False
    size = x.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    gap = (x_still - y_still).abs().nan_to_num(0.0).max().item()
    return gap > TINY * torch.finfo(x.dtype).eps * size


def _still_part(x: Tensor, still: Tensor) -> Tensor:
    """The rows and positions of (B, L, ...) or (B, H, L, ...), and nothing of other shapes."""
    if still.dim() > 1 and x.dim() >= 4 and x.shape[1] != still.shape[1]:
        x = x.transpose(1, 2)
    return x[still.to(x.device)] if x.shape[: still.dim()] == still.shape else x[:0]
