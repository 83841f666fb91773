"""Activation checkpointing runs changed calls again in the backward pass: the second run must have the change, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from minitx.analysis.recorder import Hook, before_calls
from minitx.nn.blocks import is_recomputing


@dataclass
class Reruns:
    """Whether a backward pass after the context would run changed calls again, without the change.

    ``number`` counts the changed calls inside of activation checkpointing, and ``before`` has the count at the start of each module
    around them.
    """

    is_over: bool = False
    number: int = 0
    before: dict[str, int] = field(default_factory=dict)

    def note_changed(self) -> None:
        """Count a changed call. A call that runs again does not count."""
        if not is_recomputing():
            self.number += _is_checkpointed()

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note the count before a module around changed calls."""
        self.before[name] = self.number

    def leave(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Watch the gradients of a module with changed calls."""
        if self.number > self.before[name]:
            outputs = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
            for tensor in outputs:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self.check)

    def check(self, grad: Tensor) -> None:
        """Raise an error if the context has ended."""
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
def watch_reruns(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[Reruns]:
    """Watch the modules around ``modules``, whose calls are changed while the context is open."""
    reruns = Reruns()
    names = {""} | {name[:end] for name in modules for end, letter in enumerate(name) if letter == "."}
    around = {name: model.get_submodule(name) for name in names}
    with before_calls(around, reruns.enter), ExitStack() as hooks:
        for name, module in around.items():
            hooks.enter_context(module.register_forward_hook(Hook(partial(reruns.leave, name))))
        try:
            yield reruns
        finally:
            reruns.is_over = True
