"""What every config checks with: one error, and one line for each usual condition."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """A config that cannot be used. The message starts with ``key=value``, so that a caller can put the path before it."""


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


def to_dict(config: Any) -> Any:
    """A config as plain data (dicts, lists, strings, numbers): what YAML files and checkpoints hold."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(key): to_dict(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(value) for value in config]
    return config
