"""From plain data to config dataclasses: one sentence for what does not fit.

The sentence names the full key, the value that was got, and what is allowed. Standard library only.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from minitx.config.checks import ConfigError, is_part, require
from minitx.config.model import SCALE_WORDS

T = TypeVar("T")


def from_dict(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build the dataclass ``cls`` from plain data.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a value of another type, or a combination that the
            dataclass refuses; the message begins with the full key.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    rest = next((name for name, field in fields.items() if field.metadata.get("rest")), None)
    if rest is not None and rest not in values:  # a field that takes every further key
        further = {key: value for key, value in values.items() if key not in fields}
        values = {**{key: value for key, value in values.items() if key in fields}, rest: further}
    for key in values:
        if key not in fields:
            raise ConfigError(_no_key(f"{path}{key}", str(key), path, fields))
    paths = {key: path.rstrip(".") if key == rest else f"{path}{key}" for key in values}
    converted = {key: _convert(hints[key], value, paths[key]) for key, value in values.items()}
    required = [n for n, f in fields.items() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    missing = [n for n in required if n not in values]
    require(not missing, f"{path}{''.join(missing[:1])} is missing")
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
        require(
            value in arguments,
            f"{key}={value} is not allowed: one of {', '.join(map(str, arguments))}{_nearest(value, arguments)}",
        )
        return value
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, Mapping), f"{key}={_shown(value)} must be a group of keys")
        return from_dict(typing.cast(type, hint), value, f"{key}.")
    if origin is tuple:
        return _convert_tuple(arguments, value, key)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        require(isinstance(value, Mapping), f"{key}={_shown(value)} must be a mapping")
        return {str(k): _convert(arguments[1], v, f"{key}.{k}") for k, v in value.items()}
    return _convert_plain(hint, value, key)


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) is Mapping


def _shown(value: Any) -> Any:
    return "null" if value is None else value


def _nearest(value: Any, allowed: Sequence[Any]) -> str:
    near = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _convert_union(arguments: tuple[Any, ...], value: Any, key: str) -> Any:
    if value is None:
        require(type(None) in arguments, f"{key}=null is not allowed: {_wanted(arguments, key)}")
        return None
    options = [a for a in arguments if a is not type(None)]
    if is_part(value) and any(_is_mapping(option) for option in options):
        return value
    options = [option for option in options if not _is_mapping(option)] or options
    kinds = [o for o in options if dataclasses.is_dataclass(o)]
    if len(kinds) > 1:  # told apart by their field `name`
        require(isinstance(value, Mapping), f"{key}={_shown(value)} must be a group of keys")
        names = {n: kind for kind in kinds for n in typing.get_args(typing.get_type_hints(kind)["name"])}
        name = value.get("name")
        require(name in names, f"{key}.name={name} is not allowed: one of {', '.join(names)}{_nearest(name, list(names))}")
        return _convert(names[name], value, key)
    if len(options) == 1:
        return _convert(options[0], value, key)
    for option in sorted(options, key=lambda o: o is str):  # a number that fits stays a number
        try:
            return _convert(option, value, key)
        except ConfigError:
            continue
    raise ConfigError(f"{key}={value} must be {_wanted(options, key)}, got {type(value).__name__}")


def _wanted(options: Sequence[Any], key: str) -> str:
    if key.endswith(".scale"):
        return f"one of {', '.join(SCALE_WORDS)}, head_dim^p, or a number; 'unscaled' is no scaling, 'inv_sqrt' is 1/sqrt(head_dim)"
    return " or ".join(_PLAIN.get(option, getattr(option, "__name__", str(option))) for option in options)


_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


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


def _no_key(key: str, name: str, path: str, fields: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, fields, n=1)
    hint = f"did you mean {path}{near[0]}? " if near else ""
    return f"{key} is not a key; {hint}allowed here: {', '.join(fields)}"


def unknown_key(cls: type, key: str) -> str:
    """The sentence for a dotted ``key`` that ``cls`` does not have: the nearest one, and what is allowed there.

    >>> from minitx.config import RunConfig
    >>> unknown_key(RunConfig, "trainer.max_step").split(";")[0]
    'trainer.max_step is not a key'
    """
    path, names, optional = "", key.split("."), False
    for name, following in zip(names, [*names[1:], ""], strict=True):
        if not dataclasses.is_dataclass(cls):
            return f"{key} is not a key: {path.rstrip('.')} has no keys of its own"
        fields = [f.name for f in dataclasses.fields(cls)]
        if name not in fields:
            return _no_key(key, name, path, fields)
        path += f"{name}."
        hint = typing.get_type_hints(cls)[name]
        optional = type(None) in typing.get_args(hint) if following else optional
        kinds = [kind for kind in typing.get_args(hint) or (hint,) if dataclasses.is_dataclass(kind)]
        fitting = [kind for kind in kinds if following in {f.name for f in dataclasses.fields(kind)}]
        cls = typing.cast(type, [*fitting, *kinds, object][0])
    group, _, last = key.rpartition(".")
    if optional and "." in group:
        return f"{key} cannot be set, because {group} is null: give {group}={{{last}: VALUE}}"
    return f"{key} is not a key of this choice of options; --help shows the keys"
