"""The base of masks and biases: a rule over indices, the tensors in it, and what masks remember.

A rule computes an entry of query ``row`` and key ``key``. ``dense`` computes all of them, or a tile. A mask remembers the forms that
kernels need, so that the layers of a model share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from minitx.nn.tracing import transforms_around

Built = TypeVar("Built")
MASKS_PAGE = "see docs/attention.md, Masks"
"""Ends every message about a mask. The page has a table of the masks of other libraries."""


class Rule:
    """The base of masks and biases: a function of a query and a key, computed for all of them or for a tile.

    A rule (a mask or a bias) is a frozen dataclass whose fields are tensors, numbers, strings, None, tuples of these, or other rules.
    """

    def entries(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        """Return the entries of the rule at these broadcastable indices. Query ``row`` has position ``row + offset``."""
        raise NotImplementedError(f"{type(self).__name__} must define entries()")

    def check(self, batch_size: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        """Raise a ValueError if the rule does not fit a call of this shape."""

    def dense(
        self,
        num_queries: int,
        num_keys: int,
        *,
        batch_size: int = 1,
        num_heads: int = 1,
        device: torch.device | str | None = None,
        rows: slice = slice(None),
        keys: slice = slice(None),
    ) -> Tensor:
        """Return the rule as a tensor that broadcasts to (B, H, L, S). ``rows`` and ``keys`` select a tile.

        An axis that the rule does not depend on has size 1. A padding mask, for example, has shape (B, 1, 1, S).
        """
        batch = torch.arange(batch_size, device=device).view(-1, 1, 1, 1)
        head = torch.arange(num_heads, device=device).view(1, -1, 1, 1)
        row = torch.arange(num_queries, device=device)[rows].view(1, 1, -1, 1)
        key = torch.arange(num_keys, device=device)[keys].view(1, 1, 1, -1)
        return self.entries(batch, head, row, key, num_keys - num_queries)


@dataclass(frozen=True, eq=False)
class TensorRule(Rule):
    """A rule given as a tensor of shape (L, S), or 4-D and broadcastable to (B, H, L, S)."""

    tensor: Tensor

    @property
    def four(self) -> Tensor:
        """Return the tensor with four axes."""
        return self.tensor if self.tensor.dim() == 4 else self.tensor[None, None]

    def entries(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        places = zip((batch, head, row, key), self.four.shape, strict=True)
        return self.four[tuple(index if size > 1 else torch.zeros_like(index) for index, size in places)]

    def dense(
        self, num_queries: int, num_keys: int, *, rows: slice = slice(None), keys: slice = slice(None), **axes: object
    ) -> Tensor:
        """Return the tensor or a tile of it. Axes of size 1 are kept."""
        four = self.four[:, :, rows] if self.four.shape[2] > 1 else self.four
        return four[..., keys] if four.shape[3] > 1 else four

    def broadcasts_to(self, shape: tuple[int, int, int, int]) -> bool:
        """Return whether the tensor broadcasts to ``shape``."""
        return all(size in (1, target) for size, target in zip(self.tensor.shape[::-1], shape[::-1], strict=False))


def _members(rule: Any) -> tuple[Any, ...] | None:
    if isinstance(rule, tuple):
        return rule
    return tuple(getattr(rule, field.name) for field in fields(rule)) if is_dataclass(rule) else None


def leaves_of(rule: Any) -> list[Any]:
    """Return the tensors and all other values in a rule, except rules and tuples."""
    members = _members(rule)
    return [rule] if members is None else [leaf for member in members for leaf in leaves_of(member)]


def tensors_of(rule: Any) -> list[Tensor]:
    """Return the tensors in a rule. For a tensor, return it alone."""
    return [leaf for leaf in leaves_of(rule) if isinstance(leaf, Tensor)]


def unknown_in(rule: Any) -> list[Any]:
    """Return the values in a rule that are not tensors, numbers, strings or None. They may hide tensors."""
    return [leaf for leaf in leaves_of(rule) if not (leaf is None or isinstance(leaf, Tensor | bool | int | float | str))]


def builder_of(rule: Any) -> Callable[[Iterator[Tensor]], Any]:
    """Return a function that builds the rule with other tensors, in the order of ``tensors_of``. The function keeps no tensor."""
    if isinstance(rule, Tensor):
        return next
    members = _members(rule)
    if members is None:
        return lambda supply: rule
    builders = [builder_of(member) for member in members]
    make = type(rule)
    if isinstance(rule, tuple):
        return lambda supply: tuple(build(supply) for build in builders)
    names = [field.name for field in fields(rule)]
    return lambda supply: make(**{name: build(supply) for name, build in zip(names, builders, strict=True)})


class Memory(NamedTuple):
    """What a mask remembers: its tensors, None if their changes cannot be detected, and by kind the latest key and result."""

    tensors: list[Tensor] | None
    results: dict[str, tuple[tuple[object, ...], Any]]


class Remembering(Rule):
    """The base of masks: a rule that keeps what is computed from it."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave computed forms out of copies and pickles."""
        return {name: kept for name, kept in vars(self).items() if name != "_memory"}

    def remember(self, kind: str, key: tuple[object, ...], build: Callable[..., Built], *arguments: Any) -> Built:
        """Return ``build(*arguments)``. Calls with the same ``kind`` and ``key`` compute it once.

        The layers of a model share a mask and the results computed from it. For each kind, only the latest result is kept,
        until a tensor of the mask is changed in place. Nothing is kept in compiled graphs, inside of torch.func, and of a mask
        whose changes cannot be detected.
        """
        if torch.compiler.is_compiling():  # a key with symbolic lengths would bind the graph to one length
            return build(*arguments)
        if transforms_around():  # the tensors of a result end with the transform
            return build(*arguments)
        memory = self.__dict__.get("_memory")
        if memory is None:
            tensors = tensors_of(self)
            # an unknown field may hide a tensor, and an inference tensor does not count its changes
            has_versions = not unknown_in(self) and not any(tensor.is_inference() for tensor in tensors)
            memory = self.__dict__["_memory"] = Memory(tensors if has_versions else None, {})
        if memory.tensors is None:
            return build(*arguments)
        # torch has no public count of changes in place; a result from inference mode cannot be saved for a backward pass
        key = (*key, [tensor._version for tensor in memory.tensors], torch.is_inference_mode_enabled())
        if kind in memory.results:
            kept_key, kept = memory.results[kind]
            if kept_key == key:
                return kept
        built = build(*arguments)
        if type(torch.empty(0)) is Tensor:  # under a FakeTensorMode, a result has no values
            memory.results[kind] = (key, built)
        return built
