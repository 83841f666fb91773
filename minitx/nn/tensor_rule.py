"""The tensors in masks and biases, and the common base of the mask ``Dense`` and the bias ``TensorBias``.

A rule (a mask or a bias) is a frozen dataclass whose fields are tensors, numbers, strings, None, tuples of these, or other rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TensorRule:
    """A rule given as a tensor of shape (L, S), or 4-D and broadcastable to (B, H, L, S)."""

    tensor: Tensor

    @property
    def four(self) -> Tensor:
        """Return the tensor with four axes."""
        return self.tensor if self.tensor.dim() == 4 else self.tensor[None, None]

    def at(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        """Return the entries at these indices, which broadcast."""
        places = zip((batch, head, row, key), self.four.shape, strict=True)
        return self.four[tuple(index if size > 1 else torch.zeros_like(index) for index, size in places)]

    def dense(
        self, num_queries: int, num_keys: int, *, rows: slice = slice(None), keys: slice = slice(None), **axes: object
    ) -> Tensor:
        """Return the tensor or a tile of it. Axes of size 1 are kept."""
        four = self.four[:, :, rows] if self.four.shape[2] > 1 else self.four
        return four[..., keys] if four.shape[3] > 1 else four

    def broadcasts_to(self, wanted: tuple[int, int, int, int]) -> bool:
        """Return whether the tensor broadcasts to the shape ``wanted``."""
        return all(have in (1, want) for have, want in zip(self.tensor.shape[::-1], wanted[::-1], strict=False))


def _members(rule: Any) -> tuple[Any, ...] | None:
    if isinstance(rule, tuple):
        return rule
    return tuple(getattr(rule, field.name) for field in fields(rule)) if is_dataclass(rule) else None


def leaves_of(rule: Any) -> list[Any]:
    """Return the tensors and all other values in a rule that are no rules and no tuples."""
    members = _members(rule)
    return [rule] if members is None else [leaf for member in members for leaf in leaves_of(member)]


def tensors_of(rule: Any) -> list[Tensor]:
    """Return the tensors in a rule. For a tensor, return it alone."""
    return [leaf for leaf in leaves_of(rule) if isinstance(leaf, Tensor)]


def unknown_in(rule: Any) -> list[Any]:
    """Return what is in a rule and is no tensor, number, string or None. It may hide tensors."""
    return [leaf for leaf in leaves_of(rule) if not (leaf is None or isinstance(leaf, Tensor | bool | int | float | str))]


def builder_of(rule: Any) -> Callable[[Iterator[Tensor]], Any]:
    """Return a function that builds the rule with other tensors, in the order of ``tensors_of``. The function keeps no tensor."""
    if isinstance(rule, Tensor):
        return next
    members = _members(rule)
    if members is None:
        return lambda supply: rule
    builders, make = [builder_of(member) for member in members], type(rule)
    if isinstance(rule, tuple):
        return lambda supply: tuple(build(supply) for build in builders)
    names = [field.name for field in fields(rule)]
    return lambda supply: make(**{name: build(supply) for name, build in zip(names, builders, strict=True)})
