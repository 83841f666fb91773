"""The checks of configs: one error class, bounds in the types of fields, and functions for common conditions."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any


class ConfigError(ValueError):
    """A config that cannot be used. The message begins with ``key=value``, so that a caller can put a path before it."""


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError`` with ``message`` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class Bound:
    """A condition on the numbers of a field, in words and as a function."""

    wanted: str
    holds: Callable[[Any], bool]


_POSITIVE = Bound("be positive and finite", lambda number: 0 < number < math.inf)
_NOT_NEGATIVE = Bound("be zero or more, and finite", lambda number: 0 <= number < math.inf)

Count = Annotated[int, _POSITIVE]
Positive = Annotated[float, _POSITIVE]
Natural = Annotated[int, _NOT_NEGATIVE]
NotNegative = Annotated[float, _NOT_NEGATIVE]
Finite = Annotated[float, Bound("be finite", math.isfinite)]
Share = Annotated[float, Bound("lie in [0, 1)", lambda number: 0 <= number < 1)]
Fraction = Annotated[float, Bound("lie in (0, 1)", lambda number: 0 < number < 1)]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The base of configs. It checks the types of its fields, the bounds in them (of a list, each entry; not None) and the words that they
    allow, and then calls ``check``.

    A field that takes any text is left to ``check``.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), list):  # of a JSON file
                object.__setattr__(self, field.name, tuple(value))
        for name, (kinds, words) in _kinds(type(self)).items():  # type: ignore[arg-type]  # a class is hashable
            if not isinstance(value := getattr(self, name), kinds):
                raise ConfigError(f"{name}={value!s:.60} must be {words}, got {type(value).__name__}")
        for name, bound in _bounds(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            entries = value if isinstance(value, tuple) else (value,)
            fits = all(one is None or (isinstance(one, numbers.Real) and bound.holds(one)) for one in entries)
            require(fits, f"{name}={_shown(value)} must {bound.wanted}")
        for name, (allowed, others) in _choices(type(self)).items():  # type: ignore[arg-type]
            if not isinstance(value := getattr(self, name), others):
                check_choice(name, value, allowed)
        self.check()

    def check(self) -> None:
        """Raise a ConfigError for fields that do not fit together."""


PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", tuple: "a list", Mapping: "a mapping"}
"""Python types in words."""

_ABSTRACT = {int: numbers.Integral, float: numbers.Real}  # numpy's too


@cache
def _kinds(cls: type) -> dict[str, tuple[tuple[type, ...], str]]:
    """The types of the fields of a config class that take no text, for ``isinstance`` and in words."""
    found, hints = {}, typing.get_type_hints(cls)
    for name in (field.name for field in dataclasses.fields(cls)):
        is_union = typing.get_origin(hints[name]) in (typing.Union, types.UnionType)
        kinds = [typing.get_origin(part) or part for part in (typing.get_args(hints[name]) if is_union else [hints[name]])]
        words = dict.fromkeys(PLAIN.get(kind, "a config of minitx") for kind in kinds if kind is not types.NoneType)
        if not {str, Any, typing.Literal} & set(kinds):
            found[name] = tuple(_ABSTRACT.get(kind, kind) for kind in kinds), " or ".join(words)
    return found


@cache
def _bounds(cls: type) -> dict[str, Bound]:
    """The bounds of the fields of a config class: ``Count``, ``Count | None`` and ``tuple[Count, ...]`` have one."""
    found = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        for part in (hint, *typing.get_args(hint)):
            if typing.get_origin(part) is Annotated:
                found[name] = part.__metadata__[0]
    return found


@cache
def _choices(cls: type) -> dict[str, tuple[tuple[Any, ...], tuple[type, ...]]]:
    """The words that the fields of a config class allow, and the types of what else they take: None, or a mapping."""
    found = {}
    for name, hint in typing.get_type_hints(cls).items():
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        parts = typing.get_args(hint) if is_union else (hint,)
        words = [word for part in parts if typing.get_origin(part) is typing.Literal for word in typing.get_args(part)]
        if words:
            others = (typing.get_origin(part) or part for part in parts)
            found[name] = tuple(words), tuple(kind for kind in others if kind is not typing.Literal)
    return found


def check_choice(key: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise a ConfigError unless ``value`` is one of ``allowed``. The message suggests a similar one."""
    words = ", ".join(map(str, allowed))
    require(value in allowed, f"{key}={value} is not allowed: one of {words}{nearest(value, allowed)}")


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def needs(config: Any, name: str, other: str, *values: str, verb: str = "needs") -> None:
    """Raise a ConfigError if the field ``name`` is not at its default although the field ``other`` is none of ``values``."""
    value, found = getattr(config, name), getattr(config, other)
    is_default = value == type(config).__dataclass_fields__[name].default
    require(is_default or found in values, f"{name}={value} {verb} {other}={' or '.join(values)}, got {other}={found}")


def nearest(value: Any, allowed: Iterable[Any], path: str = "") -> str:
    """Return `` (did you mean …?)`` if one of ``allowed`` is similar to ``value``, else an empty text. ``path`` is put before the name."""
    near = difflib.get_close_matches(str(value), [str(one) for one in allowed], n=1)
    return f" (did you mean {path}{near[0]}?)" if near else ""


def first_line(error: BaseException) -> str:
    """Return the message of an error in one line."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[:2])[:200]  # torch names the tensors in the second line


def is_part(value: Any) -> bool:
    """Return whether a node of a config is a part of the user's own: a mapping with ``_target_``."""
    return isinstance(value, Mapping) and "_target_" in value


def to_dict(config: Any) -> Any:
    """Return a config as plain data (dicts, lists, strings, numbers), as in YAML files and checkpoints."""
    if dataclasses.is_dataclass(config):
        found: dict[str, Any] = {}
        for field in dataclasses.fields(config):
            value = to_dict(getattr(config, field.name))
            found |= value if field.metadata.get("rest") else {field.name: value}
        return found
    if isinstance(config, Mapping):
        return {str(name): to_dict(value) for name, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(value) for value in config]
    return config


def defaults(cls: type) -> dict[str, Any]:
    """Return the defaults of a config class as plain data. A field that must be given is ``???``, as in Hydra."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            found |= {} if field.metadata.get("rest") else {field.name: to_dict(field.default_factory())}
        else:
            found[field.name] = "???" if field.default is dataclasses.MISSING else to_dict(field.default)
    return found
