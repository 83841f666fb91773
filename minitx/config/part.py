"""A part of a run: the function or class that a config names with ``_target_``, and its arguments.

Reading a config turns a node into a ``Part`` wherever a type hint names ``Part``, and also turns every node nested in its
arguments into one. The target is looked up once, at that point, and its signature determines how the arguments are read. This
file imports only the standard library; looking up a target imports the target's module.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from minitx.config.failures import ConfigError
from minitx.config.schema import (
    FromPlain,
    config_class_of,
    first_line,
    is_node,
    read,
    read_call,
    require,
    shown,
    to_dict,
)
from minitx.config.signatures import by_keyword, hints_of, parameter_names, parameters_of, required

FROM_THE_RUN = ("seed", "batch_size", "num_workers", "max_steps", "tokenizer", "head_dim")
"""Arguments that a run passes to any target with a parameter of that name."""

KEYS_OF_NODES = ("_target_", "_args_", "_partial_")
"""Keys of a node that are not keyword arguments."""

FROM_PYTHON = "given to train() from Python"
"""``_target_`` of an object that was passed from Python. A checkpoint cannot rebuild it."""


@dataclass(frozen=True, eq=False)
class Takes:
    """How the run completes a part, as an annotation: ``Annotated[Part, Takes(first=1)]``.

    Attributes:
        first: number of leading arguments that the run passes by position.
        offers: names of arguments that the run may pass. None: any name, and a missing argument is reported only when the part
            is built.
        run_keys: keys of the node that the run reads itself, as ``name: (hint, default)``.
        completes: whether saved configs include the target's defaults. False if something other than the config may set them.
        expects: what ``_target_`` should name, for the message about a group without one; ``{name}`` is the last word of the
            group's key.
        known: nodes by the last word of a part's key. A value without ``_target_`` completes the node; ``true`` is the node itself,
            and ``false`` no part.
        passed_on: for a target with ``**kwargs``, the function that receives them, by the target's name. A key that neither
            signature contains is refused if it resembles one of their parameters. None: ``**kwargs`` are not checked.
    """

    first: int = 0
    offers: Collection[str] | None = ()
    run_keys: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    completes: bool = True
    expects: str = "a function or class"
    known: Mapping[str, Any] = field(default_factory=dict)
    passed_on: Mapping[str, str] | None = None


@dataclass(frozen=True, eq=False)
class Part(FromPlain):
    """A function or class, and the arguments to call it with.

    ``node(target, ...)`` creates a part in Python; its arguments are read when a config takes it. Two parts are equal if their
    nodes are equal after all defaults are filled in.

    Attributes:
        path: the key in the config, for messages; empty: not in a config yet.
        name: the value of ``_target_``.
        target: the function or class.
        arguments: keyword arguments. Nested nodes are parts.
        args: positional arguments.
        is_partial: whether building returns a ``functools.partial`` (``_partial_: true``).
        run_values: values of ``takes.run_keys``.
        takes: how the run completes this part.
    """

    path: str
    name: str
    target: Callable[..., Any] = field(repr=False)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    is_partial: bool = False
    run_values: Mapping[str, Any] = field(default_factory=dict)
    takes: Takes = field(default=Takes(), repr=False)

    # --- creating a part

    @classmethod
    def of(cls, values: Mapping[str, Any], path: str, takes: Takes = Takes()) -> Part:
        """Return the part for a node: look up its target and read its arguments by the target's signature. The target is not called.

        Raises:
            ConfigError: the target does not exist, or an argument is unknown, missing or of the wrong type.
        """
        args = values.get("_args_", ())
        name = str(values["_target_"])
        require(isinstance(args, list | tuple), f"{path}._args_={args} must be a list")
        arguments = {str(key): value for key, value in values.items() if key not in KEYS_OF_NODES}
        part = cls(path, name, find_target(name, path), arguments, tuple(args), bool(values.get("_partial_")))
        return part._resolved(takes)

    @classmethod
    def of_object(cls, value: Any, path: str, **run_values: Any) -> Part:
        """Return a part whose ``build`` returns an existing object."""
        return cls(path, FROM_PYTHON, lambda: value, run_values=run_values)

    @classmethod
    def from_plain(cls, value: Any, key: str, *annotations: Any) -> Part | None:
        """Return a node or a part as the part at ``key``, or raise a ConfigError. ``annotations`` come from ``Annotated``.

        A part in ``takes.known`` is None if its value is ``false``, or if it has ``every: 0``.
        """
        takes = next((annotation for annotation in annotations if isinstance(annotation, Takes)), Takes())
        if isinstance(value, Part):
            return value if value.path else dataclasses.replace(value, path=key)._resolved(takes)
        is_known = key.rpartition(".")[2] in takes.known
        if is_known and value is False:
            return None
        values = _completed_node({} if is_known and value is True else value, key, takes)
        is_off = is_known and values.get("every") == 0
        if is_off and set(values) <= {"_target_", "every"}:
            return None  # without importing it
        part = cls.of(values, key, takes)
        return None if is_off else part

    def _resolved(self, takes: Takes) -> Part:
        """Return this part with its arguments read by the signature of its target."""
        if self.args and config_class_of(self.target) is not None:
            raise ConfigError(f"{self.path}._args_={list(self.args)}: the arguments of {self.name} have names")
        arguments = dict(self.arguments)
        names = self.names
        run_values = {
            key: read(hint, arguments.get(key, default) if key in names else arguments.pop(key, default), f"{self.path}.{key}")
            for key, (hint, default) in takes.run_keys.items()
        }
        offers = None if self.is_partial else takes.offers
        arguments = read_call(self.target, arguments, f"{self.path}.", offers, takes.first + len(self.args), [*takes.run_keys])
        if takes.passed_on is not None:
            self._check_passed_on(arguments, takes.passed_on)
        arguments = _replaced(arguments, Part.from_plain, self.path)
        args = _replaced(self.args, Part.from_plain, f"{self.path}._args_")
        return dataclasses.replace(self, arguments=arguments, args=args, run_values=run_values, takes=takes)

    def _check_passed_on(self, arguments: Mapping[str, Any], passed_on: Mapping[str, str]) -> None:
        """Refuse keys for ``**kwargs`` that resemble a parameter, or that the receiver of ``**kwargs`` does not accept."""
        others = [key for key in arguments if self.names and key not in self.names]
        function = passed_on.get(getattr(self.target, "__name__", "")) if others else None
        known: set[str] = set()
        if function is not None:
            with suppress(ConfigError):  # its package is not installed
                known = parameter_names(find_target(function, self.path))
        for key in others:
            from minitx.config.unknown_keys import UnknownKeyError, nearest  # few targets need it

            near = nearest(key, {*self.names, *known}, f"{self.path}.")
            if key not in known and (near or known):
                raise UnknownKeyError(f"{self.path}.{key}", near)

    # --- comparing and reading

    def __eq__(self, other: object) -> bool:
        return self.plain() == other.plain() if isinstance(other, Part) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # its arguments are a mapping

    @property
    def is_object(self) -> bool:
        """Whether the part holds an existing object."""
        return self.name == FROM_PYTHON

    @property
    def names(self) -> set[str]:
        """The names of the target's parameters that can be passed by keyword."""
        return parameter_names(self.target)

    @property
    def fields(self) -> Any:
        """The dataclass whose fields are the keys of this part, such as the ``TransformerConfig`` of our models; else None."""
        cls = config_class_of(self.target)
        value = next(iter(self.arguments.values()), None)
        return value if cls is not None and isinstance(value, cls) else None

    def get(self, name: str, default: Any = None) -> Any:
        """Return the argument ``name``, the target's default for it, or else ``default``."""
        return {**plain_defaults(self.target), **self._values()}.get(name, default)

    def _values(self) -> dict[str, Any]:
        """The values that the config sets, by key."""
        fields = self.fields
        if fields is None:
            return {**self.arguments, **self.run_values}
        return {**{entry.name: getattr(fields, entry.name) for entry in dataclasses.fields(fields)}, **self.run_values}

    def plain(self) -> dict[str, Any]:
        """Return the node of this part as plain data, including the target's defaults."""
        more = {"_args_": to_dict(self.args)} if self.args else {}
        more |= {"_partial_": True} if self.is_partial else {}
        return {"_target_": self.name, **more, **self._saved_defaults(), **to_dict(self._values())}

    def _saved_defaults(self) -> dict[str, Any]:
        return plain_defaults(self.target) if self.takes.completes and not self.is_object else {}

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """Return each key that differs between a stored node and this part, with both values. A missing stored key has its default."""
        saved = {**(self._saved_defaults() if stored.get("_target_") == self.name else {}), **stored}
        return differing_keys(saved, self.plain(), self.path)

    # --- changing and building it

    def with_(self, **arguments: Any) -> Part:
        """Return this part with some arguments or ``run_values`` replaced."""
        changed = dataclasses.replace(self, arguments={**self._values(), **arguments})
        return changed._resolved(self.takes) if self.path else changed  # a part outside a config is read when a config takes it

    def with_fields(self, fields: Any) -> Part:
        """Return this part with ``fields`` replaced."""
        return dataclasses.replace(self, arguments=dict.fromkeys(self.arguments, fields))

    def at(self, path: str) -> Part:
        """Return this part with ``path`` as its path."""
        return dataclasses.replace(self, path=path)

    def build(self, *first: Any, **offered: Any) -> Any:
        """Call the target, after building the parts among its arguments.

        Args:
            first: leading positional arguments.
            offered: further arguments. Each is passed if the target has a parameter of that name and the config does not set
                it; ``**kwargs`` does not count as one.

        Raises:
            ConfigError: an argument is missing, or the target raises an error. The message begins with ``path``.
        """
        if not self.path:  # created in Python, outside a config
            return dataclasses.replace(self, path=self.name)._resolved(Takes(len(first), offered)).build(*first, **offered)
        args, arguments = self._built_arguments()
        more = {name: value for name, value in offered.items() if name in self.names and name not in arguments}
        missing = [name for name in required(self.target, len(first) + len(args)) if name not in {**arguments, **more}]
        if missing and not self.is_partial:
            raise ConfigError(f"{self.path}.{missing[0]} is missing")
        try:
            call = functools.partial(self.target, *first, *args, **arguments, **more)
            return call if self.is_partial else call()
        except ConfigError:
            raise
        except Exception as error:
            is_of_arguments = isinstance(error, ValueError | TypeError | OSError | ImportError)
            where = "" if is_of_arguments else " (traceback=true shows where)"  # else perhaps a bug of the target
            raise ConfigError(f"{self.path}._target_={self.name} cannot be built: {reason(error)}{where}") from error

    def build_function(self, count: int) -> Any:
        """Like ``build``, but return a function that still needs ``count`` arguments instead of calling it."""
        if inspect.isfunction(self.target):
            by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            parameters = parameters_of(self.target) or []
            needed = [param for param in parameters if param.kind in by_position and param.default is param.empty]
            if len([param for param in needed if param.name not in self.arguments]) - len(self.args) == count:
                args, arguments = self._built_arguments()
                return functools.partial(self.target, *args, **arguments)
        return self.build()

    def _built_arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Build the parts among the arguments, and check the results against the type hints."""
        hints = hints_of(self.target)
        args, arguments = _replaced(([*self.args], dict(self.arguments)), lambda part, _: part.build())
        return args, {name: read(hints.get(name, Any), value, f"{self.path}.{name}") for name, value in arguments.items()}


def node(target: Callable[..., Any], **arguments: Any) -> Part:
    """Return the part that calls ``target`` with ``arguments``, for a config written in Python.

    The name of the part uses the shortest module path of ``target``. The arguments are read when a config takes the part.

    >>> node(require, condition=True, message="").name
    'minitx.config.schema.require'
    """
    parts = target.__module__.split(".")
    modules = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
    public = [name for name in modules if getattr(sys.modules.get(name), target.__name__, None) is target]
    return Part("", f"{[*public, modules[-1]][0]}.{target.__qualname__}", target, arguments)


def _completed_node(value: Any, key: str, takes: Takes) -> Mapping[str, Any]:
    """Return the node at ``key``, with the keys of ``takes.known`` if ``value`` has no ``_target_``, or raise a ConfigError."""
    group, _, name = key.rpartition(".")
    if isinstance(value, Mapping) and not is_node(value):
        value = {**takes.known.get(name, {}), **value}
    require(isinstance(value, Mapping), f"{key}={shown(value)!s:.60} must be a group of keys")
    if not is_node(value):
        from minitx.config.unknown_keys import nearest  # only errors need it

        near = nearest(name, takes.known, f"{group}.")
        raise ConfigError(f"{key} has no _target_ to name {f'a class{near}' if near else takes.expects.format(name=name)}")
    return value  # type: ignore[no-any-return]


def _replaced(value: Any, change: Callable[[Any, str], Any], path: str = "") -> Any:
    """Return ``value`` with ``change(entry, its path)`` in place of each nested node or part."""
    if is_node(value) or isinstance(value, Part):
        return change(value, path)
    if isinstance(value, Mapping):
        return {name: _replaced(entry, change, f"{path}.{name}") for name, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(entry, change, f"{path}[{i}]") for i, entry in enumerate(value))
    return value


# --- targets


def find_target(name: str, path: str) -> Any:
    """Return the function or class with a dotted name. ``path`` is the key of its node, for messages.

    Raises:
        ConfigError: the name does not exist, or importing its module raises an error.
    """
    first, *rest = name.split(".")
    try:
        target, module = importlib.import_module(first), first
        for word in rest:
            module = f"{module}.{word}"
            try:
                target = getattr(target, word)
            except AttributeError:
                if not inspect.ismodule(target):
                    raise
                target = importlib.import_module(module)
        require(callable(target), f"{name} is not a function or class")
        return target
    except Exception as error:
        raise ConfigError(
            f"{path}._target_={name} cannot be built: {reason(error)}{_similar(name)}{_advice_on_module(name, error)}"
        ) from error


def _similar(name: str) -> str:
    """Return a similar name from the module of a missing target, as text for the message."""
    module, _, last = name.rpartition(".")
    from minitx.config.unknown_keys import nearest  # only errors need it

    known = vars(sys.modules[module]) if module in sys.modules else {}
    return "" if last in known else nearest(last, known, f"{module}.")


def _advice_on_module(name: str, error: Exception) -> str:
    """Return the advice for a target whose first module does not exist, as text for the message."""
    first, dot, _ = name.partition(".")
    if not isinstance(error, ModuleNotFoundError) or error.name != first:
        return ""
    return f"; go to the folder that contains {first}.py or {first}/" if dot else "; write MODULE.NAME, such as mine.Net"


def import_modules(names: Iterable[str]) -> None:
    """Import the modules of the key ``imports``, for example a module that registers a backend.

    Raises:
        ConfigError: a module does not exist, or raises an error.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ConfigError(f"imports={name} cannot be imported: {type(error).__name__}: {first_line(error)}") from error


def needs(config: Any, name: str, other: str, *values: str) -> None:
    """Raise a ConfigError if field ``name`` is not its default while field ``other`` has none of ``values``."""
    value, other_value = getattr(config, name), getattr(config, other)
    if value != type(config).__dataclass_fields__[name].default and other_value not in values:
        raise ConfigError(f"{name}={shown(value)} belongs to {other}={' or '.join(values)}, got {other}={shown(other_value)}")


def defaults(target: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass or of a function's parameters as plain data, with ``???`` for required keys.

    A target without a signature has none.
    """
    target = config_class_of(target) or target
    values = {name: param.default for name, param in by_keyword(parameters_of(target)).items()}
    for entry in dataclasses.fields(target) if dataclasses.is_dataclass(target) else ():
        if entry.default_factory is not dataclasses.MISSING:
            values[entry.name] = entry.default_factory()
    return {name: "???" if value is inspect.Parameter.empty else to_dict(value) for name, value in values.items()}


def plain_defaults(target: Any) -> dict[str, Any]:
    """Return those defaults of a target that are plain data, except for arguments that the run passes."""
    known = defaults(target).items()
    of_run = {name for name, value in known if name in FROM_THE_RUN and not isinstance(value, str)}
    return {name: value for name, value in known if name not in of_run and value != "???" and _is_plain(value)}


def differing_keys(stored: Mapping[str, Any], now: Mapping[str, Any], path: str) -> list[str]:
    """Return each key that differs between two nodes, with both values."""
    names = {**now, **stored}
    return [f"{path}.{name} {stored.get(name)} != {now.get(name)}" for name in names if stored.get(name) != now.get(name)]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, str)


def reason(error: BaseException) -> str:
    """Return in one line why a build failed: the message of the original exception."""
    while error.__cause__ is not None:
        error = error.__cause__
    kind = type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        from minitx.config.packages import package_of_extra  # only errors need it

        if advice := package_of_extra(str(error.name).partition(".")[0]):
            return f"it needs {advice}"
    return first_line(error) if kind in ("ValueError", "ConfigError") else f"{kind}: {first_line(error)}"
