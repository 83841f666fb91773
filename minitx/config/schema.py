"""Read plain data by type hints, as the fields of a dataclass or as the arguments of a function or class.

Every error message is one sentence that begins with the full key and the value. This file imports only the standard library.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from minitx.config.failures import ConfigError
from minitx.config.signatures import by_keyword, hints_of, parameters_of

T = TypeVar("T")
UNIONS = (typing.Union, types.UnionType)
PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", tuple: "a list", Mapping: "a mapping"}
"""Python types, as messages describe them."""

_FIELDS_OF = "__config_class__"


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError`` with ``message`` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class Bound:
    """A condition on a value, in words and as a function, to use in hints: ``Annotated[int, Bound(...)]``."""

    words: str
    holds: Callable[[Any], bool]


# named functions, because a config is pickled for other processes


def _is_positive(number: float) -> bool:
    return 0 < number < math.inf


def _is_not_negative(number: float) -> bool:
    return 0 <= number < math.inf


def _is_share(number: float) -> bool:
    return 0 <= number < 1


def _is_fraction(number: float) -> bool:
    return 0 < number < 1


_POSITIVE = Bound("be positive and finite", _is_positive)
_NOT_NEGATIVE = Bound("be zero or more, and finite", _is_not_negative)

Count = Annotated[int, _POSITIVE]
Positive = Annotated[float, _POSITIVE]
Natural = Annotated[int, _NOT_NEGATIVE]
NotNegative = Annotated[float, _NOT_NEGATIVE]
Finite = Annotated[float, Bound("be finite", math.isfinite)]
Share = Annotated[float, Bound("lie in [0, 1)", _is_share)]
Fraction = Annotated[float, Bound("lie in (0, 1)", _is_fraction)]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The base class of configs. It reads its fields by their hints, sets the fields in ``derived``, and then calls ``check``."""

    def __post_init__(self) -> None:
        hints = hints_of(type(self))  # type: ignore[arg-type]  # a class is hashable
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, read(hints[field.name], getattr(self, field.name), field.name))
        for name, value in self.derived().items():
            object.__setattr__(self, name, value)
        self.check()

    def derived(self) -> Mapping[str, Any]:
        """Return the values of fields that the other fields determine, by name. ``check`` sees these values."""
        return {}

    def check(self) -> None:
        """Raise a ConfigError if fields contradict each other."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {}
    """Messages for keys under which other projects know a field. ``{path}`` becomes the beginning of the key."""


class FromPlain:
    """The base class of ``Part``, which imports this file: a type with ``from_plain(value, key, *annotations)`` and ``plain()``."""


def takes_fields_of(cls: type) -> Callable[[T], T]:
    """Decorate a function whose first argument is the dataclass ``cls``, so that the keys of its node are the fields of ``cls``."""

    def decorate(function: T) -> T:
        setattr(function, _FIELDS_OF, cls)
        return function

    return decorate


def config_class_of(target: Any) -> type | None:
    """Return the dataclass whose fields are the keys of a node with this target; None if the keys are the target's arguments."""
    return getattr(target, _FIELDS_OF, None)


def from_dict(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build the dataclass ``cls`` from plain data.

    Raises:
        ConfigError: a key is unknown (the message suggests a similar one), a value has the wrong type, or the dataclass does
            not allow a combination of values. The message begins with the full key.
    """
    hints = hints_of(cls)  # type: ignore[arg-type]
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        require(
            not is_node(values.get(field.name)) or not _is_closed(hints[field.name]),
            f"{path}{field.name} has a _target_, but nothing is built there: give only its keys or its value",
        )
    arguments = read_call(cls, values, path)
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{path}{error}") from None


def _is_closed(hint: Any) -> bool:
    """Whether a hint allows only plain values and dataclasses, and therefore no node."""
    if _is_part(hint):
        return False
    parts = [part for part in get_args(hint) if not isinstance(part, Bound)]
    if get_origin(hint) in (Annotated, tuple, *UNIONS):
        return all(map(_is_closed, parts))
    is_plain = hint in (int, float, bool, str, types.NoneType, Ellipsis) or get_origin(hint) is Literal
    return is_plain or dataclasses.is_dataclass(hint)


def read_call(
    target: Callable[..., Any],
    values: Mapping[str, Any],
    path: str = "",
    offers: Collection[str] | None = (),
    positional: int = 0,
    other_keys: Sequence[str] = (),
) -> dict[str, Any]:
    """Read ``values`` as arguments of ``target``, a function or class, by its signature.

    A parameter without a hint takes any value. A node (``_target_``) becomes a part where the hint names ``Part``, and stays
    unchanged elsewhere. If the target is decorated with ``takes_fields_of``, ``values`` become one argument, its dataclass.

    Args:
        path: the beginning of keys in messages.
        offers: names of arguments that the caller adds later; None: any name.
        positional: number of leading arguments that the caller passes by position.
        other_keys: further keys that are allowed here, for messages.

    Raises:
        ConfigError: a key is unknown (the message suggests a similar one) or missing, or a value has the wrong type.
    """
    parameters = parameters_of(target)
    if parameters is None:
        return dict(values)
    if (cls := config_class_of(target)) is not None:
        return {parameters[positional].name: from_dict(cls, values, path)}
    hints = hints_of(target)
    named = by_keyword(parameters[positional:])
    takes_any = any(param.kind is param.VAR_KEYWORD for param in parameters)
    for key in () if takes_any else values:
        if key not in named:
            from minitx.config.unknown_keys import unknown_argument  # only errors need it

            names = [*(name for name, param in named.items() if not _is_passed(param, offers)), *other_keys]
            raise unknown_argument(path, key, names, getattr(target, "OTHER_NAMES", {}))
    for name, param in named.items():
        if offers is not None and param.default is param.empty and name not in {*values, *offers}:
            raise ConfigError(f"{path}{name} is missing")
    # nodes last: they may import torch, and mistakes in plain values are reported sooner
    names = sorted(values, key=lambda name: _has_node(values[name]))
    return {name: read(hints.get(name, Any), values[name], f"{path}{name}") for name in names}


def _is_passed(param: inspect.Parameter, offers: Collection[str] | None) -> bool:
    """Whether the caller adds this argument, so that messages do not list it. A string default is a choice of the user."""
    return param.name in (offers or ()) and not isinstance(param.default, str)


def read(hint: Any, value: Any, key: str) -> Any:
    """Convert ``value`` to the type ``hint``, or raise a ConfigError that names ``key``. Unsupported hints accept any value."""
    origin, parts = get_origin(hint), get_args(hint)
    if _is_part(hint):
        cls, *annotations = parts if origin is Annotated else (hint,)
        return cls.from_plain(value, key, *annotations)
    if origin is Annotated:
        return _read_bounded(parts[0], parts[1], value, key)
    if origin in UNIONS:
        return _read_union(parts, value, key)
    if origin is Literal:
        check_choice(key, value, parts)
        return value
    if _is_part(value) or (is_node(value) and origin is not Mapping) or hint is Any:  # nested nodes are built later
        return value
    if hint is tuple or origin is tuple:
        return _read_tuple(parts or (Any, ...), value, key)
    if origin is Mapping:
        require(isinstance(value, Mapping), f"{key}={shown(value)!s:.60} must be a group of keys")
        names = [*map(str, value)]  # YAML reads 0.001 and "0.001" as two names
        twice = next((name for name in names if names.count(name) > 1), None)
        require(twice is None, f"{key} has {twice} twice")
        return {str(name): read(parts[1], entry, f"{key}.{name}") for name, entry in value.items()}
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast(type, hint)):
            return value
        require(isinstance(value, Mapping), f"{key}={shown(value)!s:.60} must be a group of keys")
        return from_dict(typing.cast(type, hint), value, f"{key}.")
    return _read_plain(hint, value, key)


def _read_bounded(hint: Any, bound: Any, value: Any, key: str) -> Any:
    if not isinstance(bound, Bound):  # an annotation of another library
        return read(hint, value, key)
    try:
        value = read(hint, value, key)
        holds = bound.holds(value)
    except ConfigError:
        if get_origin(hint) not in UNIONS:  # for a union, the message of the bound names all allowed values
            raise
        holds = False
    require(holds, f"{key}={shown(value)} must {bound.words}")
    return value


SCIENTIFIC = r"[+-]?\d+(\.\d*)?[eE][+-]?\d+"  # a number that YAML 1.1 reads as a string


def _read_union(parts: Sequence[Any], value: Any, key: str) -> Any:
    """Read ``value`` as null, as a group of keys, as text, or as the first other type that accepts it, in this order.

    Text that is a number in scientific notation is read as text only if no other type accepts it.

    >>> [_read_union((str, float, types.NoneType), value, "lr") for value in (3, "1e-3", "head_dim^-1", None)]
    [3.0, 0.001, 'head_dim^-1', None]
    """
    if value is None and types.NoneType in parts:
        return None
    nodes = [hint for hint in parts if _is_part(hint) or get_origin(hint) is Mapping]
    groups = [hint for hint in parts if dataclasses.is_dataclass(hint)]
    others = [hint for hint in parts if hint not in (*nodes, *groups, str, types.NoneType)] + [str] * (str in parts)
    if any(isinstance(value, typing.cast(type, group)) for group in groups):
        return value
    of_groups = nodes if is_node(value) or _is_part(value) else groups if isinstance(value, Mapping) else []
    if options := of_groups or (not others and (groups or nodes)):
        return read(options[0], value, key)
    if isinstance(value, str) and str in parts and not re.fullmatch(SCIENTIFIC, value):
        return value
    for hint in others:
        with suppress(ConfigError):
            return read(hint, value, key)
    words = [word for hint in others if get_origin(hint) is Literal for word in get_args(hint)]
    if words and all(get_origin(hint) is Literal or hint is bool for hint in others):
        check_choice(key, value, words)
    if len(others) == 1:
        return read(others[0], value, key)
    raise _wrong([*others, *groups], value, key)


def _read_tuple(parts: tuple[Any, ...], value: Any, key: str) -> tuple[Any, ...]:
    require(isinstance(value, list | tuple), f"{key}={shown(value)} must be a list")
    hints = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
    require(len(value) == len(hints), f"{key}={shown(value)} must have {len(hints)} entries")
    return tuple(read(hint, entry, f"{key}[{i}]") for i, (hint, entry) in enumerate(zip(hints, value, strict=True)))


def _read_plain(hint: Any, value: Any, key: str) -> Any:
    is_bool = isinstance(value, bool)
    if hint in (int, float) and isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", value):
        value = float(value) if set(value) & set(".eE") else int(value)  # from the environment, or 1e-3, a string in YAML 1.1
    if hint is float and isinstance(value, Real) and not is_bool:
        return float(value)
    if hint is int and (isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())) and not is_bool:
        return int(value)
    if hint not in PLAIN or (hint not in (int, float) and isinstance(value, hint)):
        return value
    raise _wrong([hint], value, key)


def _wrong(options: Iterable[Any], value: Any, key: str) -> ConfigError:
    bare = [get_args(option)[0] if get_origin(option) is Annotated else option for option in options]
    kinds = dict.fromkeys(PLAIN.get(get_origin(kind) or kind, "") for kind in bare)
    fix = f"must be {' or '.join(filter(None, kinds)) or 'another'}"
    if value is None:
        return ConfigError(f"{key}=null is not allowed: it {fix}")
    return ConfigError(f"{key}={shown(value)!s:.60} {fix}, got {type(value).__name__}")


def shown(value: Any) -> Any:
    """Return a value as YAML spells it, for messages."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return list(value) if isinstance(value, tuple) else value


def check_choice(key: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise a ConfigError unless ``value`` is in ``allowed``. The message suggests a similar entry."""
    choices = [*allowed]
    if value not in choices:
        from minitx.config.unknown_keys import nearest  # only errors need it

        raise ConfigError(f"{key}={value} is not allowed: one of {', '.join(map(str, choices))}{nearest(value, choices)}")


def stated(config: Any, name: str, kind: type = object) -> Any:
    """Return the value under ``name`` in the config of a model from any library, or None.

    Such a config is an object or a mapping, and may return None for unknown names. Therefore None, a missing name and a value
    that is not an instance of ``kind`` are treated alike.

    >>> stated({"vocab_size": 99}, "vocab_size", int), stated({"vocab_size": "many"}, "vocab_size", int), stated(None, "vocab_size")
    (99, None, None)
    """
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    fits = isinstance(value, kind) and (kind is not int or not isinstance(value, bool))
    return value if fits else None


def first_line(error: BaseException) -> str:
    """Return the message of an error in one line, at most 300 letters."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    text = " ".join(line.strip() for line in lines[:2])  # torch names the tensors in the second line
    return text if len(text) <= 300 else text[:298].rsplit(" ", 1)[0] + " …"


def is_node(value: Any) -> bool:
    """Return whether a value is a node: a mapping with ``_target_``."""
    return isinstance(value, Mapping) and "_target_" in value


def _has_node(value: Any) -> bool:
    """Whether a value is a node or contains one."""
    if isinstance(value, Mapping):
        return "_target_" in value or any(map(_has_node, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_node, value))


def _is_part(value: Any) -> bool:
    """Whether a value is a ``Part`` or a hint for one."""
    inner = get_args(value)[0] if get_origin(value) is Annotated else value
    return isinstance(inner, FromPlain) or (isinstance(inner, type) and issubclass(inner, FromPlain))


def to_dict(config: Any) -> Any:
    """Return a config as plain data (dicts, lists, strings, numbers), as in YAML files and checkpoints."""
    if _is_part(config):
        return config.plain()
    if dataclasses.is_dataclass(config):
        return {field.name: to_dict(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(name): to_dict(value) for name, value in config.items()}
    return [to_dict(value) for value in config] if isinstance(config, list | tuple) else config
