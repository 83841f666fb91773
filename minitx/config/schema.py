"""Build config dataclasses from plain data. Errors are one sentence.

The sentence contains the full key, the value, and what is allowed. Only the standard library is used.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

from minitx.config.checks import PLAIN, ConfigError, check_choice, is_part, nearest, require
from minitx.config.model import SCALE_WORDS

T = TypeVar("T")


def from_dict(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build the dataclass ``cls`` from plain data.

    Raises:
        ConfigError: an unknown key (the message suggests a similar one), a value of another type, or a combination that the
            dataclass does not allow. The message begins with the full key.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    rest = [name for name, field in fields.items() if field.metadata.get("rest")]  # takes every further key
    converted: dict[str, Any] = {name: {} for name in rest}
    for key, value in values.items():
        if key in fields:
            converted[key] = _convert(hints[key], value, f"{path}{key}")
        elif rest:
            converted[rest[0]] |= _convert(hints[rest[0]], {key: value}, path.rstrip("."))
        else:
            raise ConfigError(f"{path}{key} is not a key{nearest(key, fields, path) or '; allowed here: ' + ', '.join(fields)}")
    for name, field in fields.items():
        if field.default is field.default_factory is dataclasses.MISSING:
            require(name in values, f"{path}{name} is missing")
    try:
        return cls(**converted)
    except ConfigError as error:
        raise ConfigError(f"{path}{error}") from None


def _convert(hint: Any, value: Any, key: str) -> Any:
    """``value`` as the type ``hint``, or a ConfigError that names ``key``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, key)
    if origin is Literal:
        check_choice(key, value, arguments)
        return value
    if origin is tuple:
        return _convert_tuple(arguments, value, key)
    if dataclasses.is_dataclass(hint) or origin is Mapping:
        require(isinstance(value, Mapping), f"{key}={_shown(value)} must be a group of keys")
        if origin is Mapping:
            return {str(name): _convert(arguments[1], one, f"{key}.{name}") for name, one in value.items()}
        return from_dict(typing.cast(type, hint), value, f"{key}.")
    return _convert_plain(hint, value, key)


def _shown(value: Any) -> Any:
    return "null" if value is None else value


def _convert_union(arguments: tuple[Any, ...], value: Any, key: str) -> Any:
    if value is None:
        require(type(None) in arguments, f"{key}=null is not allowed: {_wanted(arguments, key)}")
        return None
    parts = [option for option in arguments if typing.get_origin(option) is Mapping]
    if parts and is_part(value):
        return value
    options = [option for option in arguments if option not in (*parts, type(None))] or parts
    kinds = [option for option in options if dataclasses.is_dataclass(option)]
    if len(kinds) > 1:  # told apart by their field `name`
        require(isinstance(value, Mapping), f"{key}={value} must be a group of keys")
        names = {n: kind for kind in kinds for n in typing.get_args(typing.get_type_hints(kind)["name"])}
        name = value.get("name")
        require(name in names, f"{key}.name={name} is not allowed: one of {', '.join(names)}{nearest(name, names)}")
        return _convert(names[name], value, key)
    if len(options) == 1:
        return _convert(options[0], value, key)
    for option in sorted(options, key=lambda o: o is str):  # a number that fits stays a number
        with suppress(ConfigError):
            return _convert(option, value, key)
    raise ConfigError(f"{key}={value} must be {_wanted(options, key)}, got {type(value).__name__}")


def _wanted(options: Sequence[Any], key: str) -> str:
    if key.endswith(".scale"):
        return f"one of {', '.join(SCALE_WORDS)}, head_dim^p, or a number; 'unscaled' is no scaling, 'inv_sqrt' is 1/sqrt(head_dim)"
    return " or ".join(
        PLAIN.get(typing.get_origin(option) or option, str(option)) for option in options if option is not type(None)
    )


def _convert_tuple(arguments: tuple[Any, ...], value: Any, key: str) -> Any:
    require(isinstance(value, list | tuple), f"{key}={_shown(value)} must be a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_convert(arguments[0], v, f"{key}[{i}]") for i, v in enumerate(value))
    require(len(value) == len(arguments), f"{key}={value} must have {len(arguments)} entries")
    return tuple(_convert(a, v, f"{key}[{i}]") for i, (a, v) in enumerate(zip(arguments, value, strict=True)))


def _convert_plain(hint: Any, value: Any, key: str) -> Any:
    is_bool = isinstance(value, bool)
    if hint is float and isinstance(value, int | float) and not is_bool:
        return float(value)
    if hint is float and isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)  # YAML 1.1 reads 1e-3 as a string
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, hint) and not (is_bool and hint is not bool):
        return value
    require(value is not None, f"{key}=null is not allowed: it must be {_wanted([hint], key)}")
    raise ConfigError(f"{key}={value} must be {_wanted([hint], key)}, got {type(value).__name__}")


def unknown_key(cls: type, key: str, known: Iterable[str] = ()) -> str:
    """Return the error message for a dotted ``key`` that the config does not have.

    Args:
        known: the keys beside it, if the class does not decide them (those of ``data`` depend on the data set).

    >>> from minitx.config import RunConfig
    >>> unknown_key(RunConfig, "trainer.max_step")
    'trainer.max_step is not a key (did you mean trainer.max_steps?)'
    """
    values: Any = None
    for name in reversed(key.split(".")):
        values = {name: values}
    try:
        from_dict(cls, values)
    except ConfigError as error:
        named = str(error).partition(" ")[0]
        if f"{key}.".startswith(f"{named}."):
            return str(error)
    group, _, last = key.rpartition(".")
    advice = f"; where {group} is null, give {group}={{{last}: VALUE}}" if "." in group else nearest(last, known, f"{group}.")
    allowed = f"; allowed here: {', '.join(known)}" if known else "; --help shows the keys"
    return f"{key} is not a key of this choice of options{advice or allowed}"
