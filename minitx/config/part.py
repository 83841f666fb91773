"""A part of a run: a target that a config names with ``_target_``, and its arguments.

The reader makes a ``Part`` of a node where a type hint names ``Part``, and of each node inside of its arguments. The target is looked
up and the arguments are read by its signature there, once. Only the standard library is imported here; a target has its own imports.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from minitx.config.schema import (
    ConfigError,
    Readable,
    config_class_of,
    defaults,
    first_line,
    hints_of,
    is_node,
    nearest,
    read,
    read_call,
    require,
    shown,
    to_dict,
)

FROM_THE_RUN = ("seed", "batch_size", "num_workers", "max_steps", "tokenizer", "head_dim")
"""Arguments that a run offers to any target that names them."""

KEYS_OF_NODES = ("_target_", "_args_", "_partial_")
"""The keys of a node that are not arguments by name."""

GIVEN = "given to train() from Python"
"""The name of a part that was an object. Nothing can be built from it later."""


@dataclass(frozen=True, eq=False)
class Takes:
    """What a run adds to a part, as an annotation: ``Annotated[Part, Takes(first=1)]``.

    Attributes:
        first: number of first arguments that the run passes by position.
        offers: names of arguments that the run may pass; None: any, so that a missing one is noticed only when the part is built.
        beside: keys of the node that the run reads by itself, as name: (hint, default).
        completes: whether files show the defaults of the target. False where something else than the config may decide them.
        wanted: what ``_target_`` names, for the message about a group without it; ``{name}`` is the last word of its key.
        keys: keys next to the part. A similar key is suggested instead of ``wanted``.
        passed_on: names of targets, and the function that gets the keys that a target does not name. With it, a key that
            ``**kwargs`` would swallow is compared with the names of both. None: it is not.
    """

    first: int = 0
    offers: Collection[str] | None = ()
    beside: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    completes: bool = True
    wanted: str = "a function or class"
    keys: tuple[str, ...] = ()
    passed_on: Mapping[str, str] | None = None


@dataclass(frozen=True, eq=False)
class Part(Readable):
    """A function or class with arguments for it.

    ``node(target, ...)`` makes one in Python. Its arguments are read where a config takes it. Two parts are equal if their nodes with
    all defaults are.

    Attributes:
        path: the key in the config, for messages; empty: not in a config yet.
        name: the text after ``_target_``.
        target: the function or class.
        arguments: arguments by name. A node among them is a Part.
        args: the first arguments, by position.
        is_partial: whether building it returns a ``functools.partial`` (``_partial_: true``).
        beside: the keys that the run reads by itself.
        takes: the run's additions.
    """

    path: str
    name: str
    target: Callable[..., Any] = field(repr=False)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    is_partial: bool = False
    beside: Mapping[str, Any] = field(default_factory=dict)
    takes: Takes = field(default=Takes(), repr=False)

    # --- making one

    @classmethod
    def of(cls, values: Mapping[str, Any], path: str, takes: Takes = Takes()) -> Part:
        """Return the part of a node: look up its target, and read its arguments by the signature. Nothing is called.

        Raises:
            ConfigError: the target does not exist, or an argument is unknown, of another type or missing.
        """
        args, name = values.get("_args_", ()), str(values["_target_"])
        require(isinstance(args, list | tuple), f"{path}._args_={args} must be a list")
        arguments = {str(key): value for key, value in values.items() if key not in KEYS_OF_NODES}
        unread = cls(path, name, find_target(name, path), arguments, tuple(args), bool(values.get("_partial_")))
        return unread._read(takes)

    @classmethod
    def given(cls, thing: Any, path: str, **beside: Any) -> Part:
        """Return the part for an object that exists already."""
        return cls(path, GIVEN, lambda: thing, beside=beside)

    @classmethod
    def read(cls, value: Any, key: str, *annotations: Any) -> Part:
        """Return ``value``, a node or a part, as the part at ``key``. See ``schema.read``."""
        takes = next((one for one in annotations if isinstance(one, Takes)), Takes())
        if isinstance(value, Part):
            return value if value.path else dataclasses.replace(value, path=key)._read(takes)
        require(isinstance(value, Mapping), f"{key}={shown(value)!s:.60} must be a group of keys")
        if not is_node(value):
            group, _, name = key.rpartition(".")
            near = nearest(name, takes.keys, f"{group}.")
            raise ConfigError(
                f"{key} has no _target_, which names {f'a class{near}' if near else takes.wanted.format(name=name)}"
            )
        return cls.of(value, key, takes)

    def _read(self, takes: Takes) -> Part:
        """This part with its arguments read."""
        has_fields = config_class_of(self.target) is not None
        require(
            not (self.args and has_fields), f"{self.path}._args_={list(self.args)}: the arguments of {self.name} have names"
        )
        own, names = dict(self.arguments), self.names
        beside = {
            key: read(hint, own.get(key, default) if key in names else own.pop(key, default), f"{self.path}.{key}")
            for key, (hint, default) in takes.beside.items()
        }
        offers = None if self.is_partial else takes.offers
        own = read_call(self.target, own, f"{self.path}.", offers, takes.first + len(self.args), [*takes.beside])
        if takes.passed_on is not None:
            self._check_passed_on(own, takes.passed_on)
        own = {key: _with_parts(value, f"{self.path}.{key}") for key, value in own.items()}
        args = tuple(_with_parts(value, f"{self.path}._args_[{i}]") for i, value in enumerate(self.args))
        return dataclasses.replace(self, arguments=own, args=args, beside=beside, takes=takes)

    def _check_passed_on(self, own: Mapping[str, Any], passed_on: Mapping[str, str]) -> None:
        """Refuse a key for ``**kwargs`` that resembles a parameter, or that the function which gets ``**kwargs`` does not have."""
        others = [key for key in own if self.names and key not in self.names]
        function = passed_on.get(getattr(self.target, "__name__", "")) if others else None
        known: set[str] = set()
        if function is not None:
            with suppress(ConfigError):  # its package is not installed
                known = parameter_names(find_target(function, self.path))
        for key in others:
            near = nearest(key, {*self.names, *known}, f"{self.path}.")
            require(key in known or not (near or known), f"{self.path}.{key} is not a key{near}")

    # --- asking it

    def __eq__(self, other: object) -> bool:
        return self.plain() == other.plain() if isinstance(other, Part) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # its arguments are a mapping

    @property
    def is_given(self) -> bool:
        """Whether it was an object."""
        return self.name == GIVEN

    @property
    def names(self) -> set[str]:
        """The parameters of the target that can be given by name."""
        return parameter_names(self.target)

    @property
    def fields(self) -> Any:
        """The dataclass whose fields are the keys of this part, as with our models, or None."""
        cls, value = config_class_of(self.target), next(iter(self.arguments.values()), None)
        return value if cls is not None and isinstance(value, cls) else None

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument, or the default of the target, or else ``default``."""
        return {**usual(self.target), **self._own()}.get(name, default)

    def _own(self) -> dict[str, Any]:
        """What the config sets, by key."""
        fields = (
            {} if self.fields is None else {one.name: getattr(self.fields, one.name) for one in dataclasses.fields(self.fields)}
        )
        return {**(fields or self.arguments), **self.beside}

    def plain(self) -> dict[str, Any]:
        """Return the node of this part, with the defaults of its target, as plain data."""
        more = {"_args_": to_dict(self.args)} if self.args else {}
        more |= {"_partial_": True} if self.is_partial else {}
        return {"_target_": self.name, **more, **self._defaults(), **to_dict(self._own())}

    def _defaults(self) -> dict[str, Any]:
        return usual(self.target) if self.takes.completes and not self.is_given else {}

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """Return the keys whose values differ between a stored node and this part, with both values. A key that is not stored has its default."""
        saved = {**(self._defaults() if stored.get("_target_") == self.name else {}), **stored}
        return differences(saved, self.plain(), self.path)

    # --- changing and building it

    def with_(self, **arguments: Any) -> Part:
        """Return this part with other arguments or keys of ``beside``."""
        changed = dataclasses.replace(self, arguments={**self._own(), **arguments})
        return changed._read(self.takes) if self.path else changed  # one that is in no config yet is read there

    def with_fields(self, fields: Any) -> Part:
        """Return this part with another dataclass as its ``fields``."""
        return dataclasses.replace(self, arguments=dict.fromkeys(self.arguments, fields))

    def at(self, path: str) -> Part:
        """Return this part with another path."""
        return dataclasses.replace(self, path=path)

    def build(self, *first: Any, **offered: Any) -> Any:
        """Call the target. Parts among the arguments are built before.

        Args:
            first: the first arguments, by position.
            offered: further arguments, each passed if the target names it and the config does not set it. ``**kwargs`` does not count.

        Raises:
            ConfigError: an argument is missing, or the target raises an error. The message begins with the path.
        """
        if not self.path:  # made in Python, and in no config
            return dataclasses.replace(self, path=self.name)._read(Takes(len(first), offered)).build(*first, **offered)
        args, own = self._built()
        more = {name: value for name, value in offered.items() if name in self.names and name not in own}
        missing = [name for name in required(self.target, len(first) + len(args)) if name not in {**own, **more}]
        require(self.is_partial or not missing, f"{self.path}.{''.join(missing[:1])} is missing")
        try:
            call = functools.partial(self.target, *first, *args, **own, **more)
            return call if self.is_partial else call()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.path}._target_={self.name} cannot be built: {reason(error)}") from error

    def build_function(self, count: int) -> Any:
        """Like ``build``, but a function that still needs ``count`` arguments is returned and not called."""
        if inspect.isfunction(self.target):
            by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            parameters = inspect.signature(self.target).parameters.values()
            needed = [one for one in parameters if one.kind in by_position and one.default is one.empty]
            if len([one for one in needed if one.name not in self.arguments]) - len(self.args) == count:
                args, own = self._built()
                return functools.partial(self.target, *args, **own)
        return self.build()

    def _built(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with their parts built. They must fit the hints, too."""
        hints = hints_of(self.target)
        own = {name: _built(value) for name, value in self.arguments.items()}
        own = {name: read(hints.get(name, Any), value, f"{self.path}.{name}") for name, value in own.items()}
        return [_built(value) for value in self.args], own


def node(target: Callable[..., Any], **arguments: Any) -> Part:
    """Return the part that calls ``target`` with ``arguments``, for a config that is made in Python.

    It names the shortest module that has the target. The arguments are read where a config takes the part.

    >>> node(require, condition=True, message="").name
    'minitx.config.schema.require'
    """
    parts = target.__module__.split(".")
    modules = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
    public = [name for name in modules if getattr(sys.modules.get(name), target.__name__, None) is target]
    return Part("", f"{[*public, modules[-1]][0]}.{target.__qualname__}", target, arguments)


def _with_parts(value: Any, path: str) -> Any:
    """A value with a part for each node inside of it."""
    if is_node(value):
        return Part.of(value, path)
    if isinstance(value, Part):
        return value if value.path else Part.read(value, path)
    if isinstance(value, Mapping):
        return {name: _with_parts(entry, f"{path}.{name}") for name, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_parts(entry, f"{path}[{i}]") for i, entry in enumerate(value))
    return value


def _built(value: Any) -> Any:
    """A value with the parts inside of it built."""
    if isinstance(value, Part):
        return value.build()
    if isinstance(value, Mapping):
        return {name: _built(entry) for name, entry in value.items()}
    return type(value)(map(_built, value)) if type(value) in (list, tuple) else value


# --- targets


def find_target(name: str, path: str) -> Any:
    """Return the function or class with a dotted name. ``path`` is the key of its node, for messages.

    Raises:
        ConfigError: it does not exist, or its module raises an error.
    """
    first, *rest = name.split(".")
    try:
        thing, module = importlib.import_module(first), first
        for word in rest:
            module = f"{module}.{word}"
            try:
                thing = getattr(thing, word)
            except AttributeError:
                if not inspect.ismodule(thing):
                    raise
                thing = importlib.import_module(module)
        require(callable(thing), f"{name} is not a function or class")
        return thing
    except Exception as error:
        raise ConfigError(f"{path}._target_={name} cannot be built: {reason(error)}{_similar(name)}") from error


def _similar(name: str) -> str:
    """A similar name in the module of a target that does not exist."""
    module, _, last = name.rpartition(".")
    known = vars(sys.modules[module]) if module in sys.modules else {}
    return "" if last in known else nearest(last, known, f"{module}.")


def import_modules(names: Iterable[str]) -> None:
    """Import the modules of ``imports``, for example one that registers a backend.

    Raises:
        ConfigError: the module does not exist, or raises an error.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ConfigError(f"imports={name} cannot be imported: {type(error).__name__}: {first_line(error)}") from error


def _parameters(function: Any) -> list[inspect.Parameter]:
    """The parameters of a function or class; none of one without a signature, as some have that are written in C."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return []


def parameter_names(function: Any) -> set[str]:
    """Return the parameters of a function or class that can be given by name, without ``*args`` and ``**kwargs``."""
    return {one.name for one in _parameters(function) if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}


def required(function: Any, positional: int = 0) -> list[str]:
    """Return the parameters without a default, after the first ``positional`` ones."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in _parameters(function)[positional:] if one.kind in kinds and one.default is one.empty]


def usual(target: Any) -> dict[str, Any]:
    """Return the defaults of a target that are plain data, without the arguments that the run passes."""
    try:
        known = defaults(target).items()
    except (TypeError, ValueError):  # without a signature
        return {}
    of_run = {name for name, value in known if name in FROM_THE_RUN and not isinstance(value, str)}
    return {name: value for name, value in known if name not in of_run and value != "???" and _is_plain(value)}


def unknown_keys(values: Mapping[str, Any], path: str) -> list[str]:
    """Return the keys of a node that its target does not know. Empty if it takes any."""
    target = find_target(str(values["_target_"]), path)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in _parameters(target))
    known = {*(defaults(target) if _parameters(target) else ()), *KEYS_OF_NODES}
    return [] if takes_any or not _parameters(target) else [name for name in values if name not in known]


def differences(stored: Mapping[str, Any], now: Mapping[str, Any], path: str) -> list[str]:
    """Return the keys whose values differ between two nodes, with both values."""
    names = {**now, **stored}
    return [f"{path}.{name} {stored.get(name)} != {now.get(name)}" for name in names if stored.get(name) != now.get(name)]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, str)


# --- why something cannot be built

DISTRIBUTIONS = {"sklearn": "scikit-learn", "babel": "Babel"}
"""Packages whose modules have another name."""


def reason(error: BaseException) -> str:
    """Return in one line why something could not be built: the message of the first exception in the chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    kind = type(error).__name__
    if isinstance(error, ModuleNotFoundError) and (extra := _extra_with(module := str(error.name).partition(".")[0])):
        return f"the package {DISTRIBUTIONS.get(module, module)} is missing, install minitx with the extra {extra}"
    return first_line(error) if kind in ("ValueError", "ConfigError") else f"{kind}: {first_line(error)}"


def _extra_with(module: str) -> str:
    """The extra of minitx that installs a module, or an empty text."""
    for wanted in metadata.requires("minitx") or ():
        matched = re.match(r"([\w.-]+).*extra == ['\"](\w+)['\"]", wanted)
        if matched and matched[2] != "dev" and matched[1].lower() == DISTRIBUTIONS.get(module, module).lower():
            return matched[2]
    return ""
