"""Copies of modules, so that a check never changes the caller's module."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)

_REGISTRIES = ("_parameters", "_buffers", "_modules")


def copied(module: Module) -> Module:
    """Return a deep copy. An attribute that cannot be copied, such as a lock or a tensor with a graph, is shared with the original.

    >>> layer = nn.Linear(2, 3)
    >>> layer.last = layer.weight * 2  # copy.deepcopy(layer) raises RuntimeError
    >>> twin = copied(layer)
    >>> twin.weight is layer.weight, twin.last is layer.last
    (False, True)
    """
    with suppress(Exception):
        return copy.deepcopy(module)
    shared = {id(part): part for part in (*module.modules(), *module.parameters(), *module.buffers())}
    values = [value for part in module.modules() for name, value in vars(part).items() if name not in _REGISTRIES]
    return copy.deepcopy(module, {id(value): value for value in values if not _can_be_copied(value, shared)})


def _can_be_copied(value: Any, shared: dict[int, Any]) -> bool:
    with suppress(Exception):
        copy.deepcopy(value, dict(shared))
        return True
    return False
