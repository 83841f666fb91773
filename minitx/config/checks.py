"""What every config checks with: one error, and one line for each usual condition."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """A config that cannot be used. The message starts with ``key=value``, so that a caller can put the path before it."""


def key(default: Any, meaning: str) -> Any:
    """A dataclass field with a default and one line that says what it means, for ``--help`` and the documentation.

    A mutable default is given as a function without arguments (``dict``).
    """
    metadata = {"meaning": meaning}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError`` with ``message`` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def positive(config: Any, *names: str) -> None:
    """Refuse a field among ``names`` that is neither None nor finite and above zero."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value > 0, f"{name}={value} must be positive")
        require(value is None or value < math.inf, f"{name}={value} must be finite")


def not_negative(config: Any, *names: str) -> None:
    """Refuse a field among ``names`` that is neither None nor finite and zero or more."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value >= 0, f"{name}={value} must be zero or more")
        require(value is None or value < math.inf, f"{name}={value} must be finite")


def fraction(config: Any, *names: str) -> None:
    """Refuse a field among ``names`` outside of [0, 1)."""
    for name in names:
        value = getattr(config, name)
        require(0.0 <= value < 1.0, f"{name}={value} must lie in [0, 1)")


def needs(config: Any, name: str, other: str, *values: str, verb: str = "needs") -> None:
    """Refuse the field ``name``, unless it is at its default, where the field ``other`` is none of ``values``."""
    value, found = getattr(config, name), getattr(config, other)
    is_default = value == type(config).__dataclass_fields__[name].default
    require(is_default or found in values, f"{name}={value} {verb} {other}={' or '.join(values)}, got {other}={found}")


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[:2])[:200]  # torch names the tensors in the second line


def is_part(value: Any) -> bool:
    """Whether a node of a config names a part of the user's own: a mapping with ``_target_``."""
    return isinstance(value, Mapping) and "_target_" in value


def to_dict(config: Any) -> Any:
    """A config as plain data (dicts, lists, strings, numbers): what YAML files and checkpoints hold."""
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
    """The defaults of a config class as plain data; a field without one is left out."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            found[field.name] = to_dict(field.default)
        elif field.default_factory is not dataclasses.MISSING and not field.metadata.get("rest"):
            found[field.name] = to_dict(field.default_factory())
    return found
