"""Masks and biases as text and tensors, the only arguments that a ``torch.library`` operator takes for them.

A rule is a frozen dataclass whose fields are tensors, numbers, strings, None, tuples of those, or rules. ``pack`` writes it in
postfix order, one token per line, and puts its tensors into a list. ``unpack`` builds it again, with the same or other tensors.
In a compiled graph the text is a constant, and the tensors are inputs.

    >>> import torch
    >>> from minitx.nn.masks import Causal, Padding
    >>> program, tensors = pack(Causal() & Padding(torch.ones(2, 3, dtype=torch.bool)))
    >>> program.split()
    ['minitx.nn.masks.Causal:0', '@', 'minitx.nn.masks.Padding:1', ':2', 'minitx.nn.masks.And:1']
    >>> unpack(program, tensors)
    Causal() & Padding(key_mask=tensor([[True, True, True],
            [True, True, True]]))
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from minitx.nn.bias import Bias
from minitx.nn.masks import Mask


def pack(rule: Any) -> tuple[str, list[Tensor]]:
    """Return the program of a rule, and its tensors in the order in which the program uses them.

    Raises:
        TypeError: the rule is not a dataclass, or a field is none of the kinds above.
    """
    tokens: list[str] = []
    tensors: list[Tensor] = []
    _write(rule, tokens, tensors)
    return "\n".join(tokens), tensors


def _write(item: Any, tokens: list[str], tensors: list[Tensor]) -> None:
    if isinstance(item, Tensor):
        tensors.append(item)
        tokens.append("@")
    elif item is None or isinstance(item, bool | int | float | str):
        tokens.append(repr(item))
    elif isinstance(item, tuple):
        for member in item:
            _write(member, tokens, tensors)
        tokens.append(f":{len(item)}")
    elif isinstance(item, Mask | Bias) and is_dataclass(item):
        names = [field.name for field in fields(item)]
        for name in names:
            _write(getattr(item, name), tokens, tensors)
        tokens.append(f"{_name(type(item))}:{len(names)}")
    else:
        raise TypeError(
            f"{type(item).__name__} cannot be taken apart: a mask or bias must be a frozen dataclass "
            "of tensors, numbers, words and rules"
        )


def unpack(program: str, tensors: Sequence[Tensor]) -> Any:
    """Return the rule of a program, with these tensors."""
    stack: list[Any] = []
    supply = iter(tensors)
    for token in program.split("\n"):
        if token == "@":
            stack.append(next(supply))
        elif ":" not in token or token[0] in "'\"":
            stack.append(literal_eval(token))
        else:
            name, _, count = token.rpartition(":")
            split = len(stack) - int(count)
            members, stack = stack[split:], stack[:split]
            stack.append(_class(name)(*members) if name else tuple(members))
    (rule,) = stack
    return rule


def can_pack(rule: Any) -> bool:
    """Return whether ``pack`` can translate the rule."""
    if isinstance(rule, tuple):
        return all(can_pack(member) for member in rule)
    if isinstance(rule, Mask | Bias):
        return is_dataclass(rule) and all(can_pack(getattr(rule, field.name)) for field in fields(rule))
    return rule is None or isinstance(rule, Tensor | bool | int | float | str)


def cannot_pack(rule: Any) -> str | None:
    """Return why ``pack`` would raise an error, or None."""
    try:
        pack(rule)
    except TypeError as error:
        return str(error)
    return None


def tensors_of(rule: Any) -> list[Tensor]:
    """Return the tensors in a rule. For a tensor, return it alone. For a rule that ``pack`` cannot translate, return none."""
    return pack(rule)[1] if can_pack(rule) else []


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _class(name: str) -> type:
    """The mask or bias class of that name; of two with one name (a notebook cell run twice) the later one."""
    known: list[type] = [*_descendants(Mask), *_descendants(Bias)]
    return [cls for cls in known if _name(cls) == name][-1]


def _descendants(base: type) -> Iterator[type]:
    cls: type
    for cls in base.__subclasses__():
        yield cls
        yield from _descendants(cls)
