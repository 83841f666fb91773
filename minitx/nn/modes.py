"""Context managers that restore a model: its mode, or its whole state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode (no dropout), and restore the mode of each submodule afterwards.

    ``model.train()`` would not be enough: it would also change submodules that were in evaluation mode before.

    >>> model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5).eval())
    >>> with evaluating(model):
    ...     model[0].training
    False
    >>> model.training, model[0].training, model[1].training
    (True, True, False)
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            if module.training != training:
                module.train(training)  # not only the flag: a module may override train()
        for module, training in modes.items():  # train() has also changed submodules
            module.training = training


@contextmanager
def restored(*owners: object, numbers: bool = True) -> Iterator[None]:
    """Restore the attributes of modules, of their submodules, and of other objects at the end of the context.

    Added attributes are removed, and dicts, sets, lists and tensors among the attributes get their content back.

    Args:
        numbers: restore the numbers of parameters and buffers, too, from a copy of all of them.

    >>> layer = nn.Linear(2, 3)
    >>> with restored(layer):
    ...     layer.calls, layer.weight = 1, nn.Parameter(torch.zeros(3, 2))
    >>> hasattr(layer, "calls"), bool(layer.weight.any())
    (False, True)
    """
    with ExitStack() as stack:
        for owner in owners:
            for part in owner.modules() if isinstance(owner, nn.Module) else [owner] if hasattr(owner, "__dict__") else ():
                tensors: Iterable[Tensor] = ()
                if numbers and isinstance(part, nn.Module):
                    tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
                stack.callback(_saved(vars(part), tensors))
        yield


def _saved(attributes: dict[str, Any], tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Return a function that restores the attributes of an object, and then the numbers of ``tensors``, its parameters and buffers."""
    before = {name: (value, _copied(value)) for name, value in attributes.items()}
    clones = [(tensor, tensor.detach().clone(), tensor.requires_grad) for tensor in tensors]

    @torch.no_grad()
    def restore() -> None:
        attributes.clear()
        for name, (value, content) in before.items():
            attributes[name] = value
            if isinstance(value, Tensor):
                value.copy_(content)
            elif isinstance(value, dict | set):
                value.clear()
                value.update(content)
            elif isinstance(value, list):
                value[:] = content
        for tensor, numbers, requires_grad in clones:
            tensor.requires_grad_(requires_grad)
            tensor.grad = None
            if tensor.dtype == numbers.dtype:
                tensor.copy_(numbers)
            else:  # with bf16-true, restore the unrounded weights, because an average starts from them
                tensor.data = numbers.to(tensor.device)

    return restore


def _copied(value: Any) -> Any:
    """Return a copy of an attribute that can change in place, or None."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, dict | set | list) else None
