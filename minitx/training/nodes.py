"""Build nodes of a config: ``_target_`` names a function or class, and the other keys are its arguments.

Ours and the user's are built in the same way. A node is read by the signature of its target (``read_call``) before anything in it
is built. Hydra finds targets and builds nested nodes, except in the fields of a dataclass (``takes_fields_of``).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from typing import Any

from minitx.config import RunConfig
from minitx.config.schema import ConfigError, Part, config_class_of, defaults, first_line, nearest, read_call, require
from minitx.config.training import NODES

FROM_THE_RUN = ("seed", "batch_size", "num_workers", "max_steps", "tokenizer", "head_dim")
"""Arguments that a run passes to any target that names them."""

BY_POSITION = {"optimizer": 1, "schedule": 1}
"""How many first arguments a run passes to the target of a node."""


LOADING = {"batch_size": 32, "num_workers": 0}
"""Keys of ``data`` that belong to every data set, and their defaults. The trainer reads them."""


OF_HYDRA = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
"""Keys of a node that are no arguments by name."""


def target_of(node: Part, key: str) -> Any:
    """Return the function or class that ``node`` names. ``key`` is the path of the node, for messages.

    Raises:
        ConfigError: it does not exist.
    """
    from hydra.utils import instantiate  # its get_object also writes an error to the log

    try:
        return instantiate({"_target_": node["_target_"], "_partial_": True}).func
    except Exception as error:
        raise ConfigError(f"{key}._target_={node['_target_']} cannot be built: {reason(error)}{_near(node)}") from error


def _near(node: Part) -> str:
    """A similar name in the module of a target that does not exist."""
    module, _, name = str(node["_target_"]).rpartition(".")
    known = vars(sys.modules[module]) if module in sys.modules else {}
    return "" if name in known else nearest(name, known, f"{module}.")


def arguments_of(node: Part) -> dict[str, Any]:
    """Return the keys of a node that are arguments, without ``_target_`` and other keys of Hydra."""
    return {str(name): value for name, value in node.items() if name not in OF_HYDRA}


def without_loading(node: Part) -> dict[str, Any]:
    """Return the node of ``data`` without ``batch_size`` and ``num_workers``, unless its target names them."""
    names = named_by(node, "data")
    return {name: value for name, value in node.items() if name in names or name not in LOADING}


def check_nodes(config: RunConfig) -> None:
    """Read the arguments of every part of a run, and build nothing. See ``check_node``."""
    check_data(config.data)
    for name in NODES:
        if name != "data":  # what the data decide of a model, and the arguments of an objective, come later
            given = FROM_THE_RUN if name in BY_POSITION else None
            check_node(getattr(config, name), name, given, BY_POSITION.get(name, 0))


def check_data(node: Part) -> None:
    """Read the node of ``data``. See ``check_node``."""
    check_node(without_loading(node), "data", FROM_THE_RUN, beside=[*LOADING])


def foreign_keys(node: Part, key: str) -> list[str]:
    """Return the keys of a node that its target does not know. Empty if it takes any."""
    target = target_of(node, key)
    try:
        takes_any = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(target).parameters.values())
        known = defaults(target)
    except (TypeError, ValueError):  # without a signature
        return []
    return [] if takes_any else [name for name in arguments_of(node) if name not in known]


def check_node(
    node: Part, key: str, given: Collection[str] | None = (), positional: int = 0, beside: Sequence[str] = ()
) -> None:
    """Read the arguments of a node, and build nothing. Further arguments are those of ``read_call``.

    Raises:
        ConfigError: the target does not exist, or an argument is unknown, of another type or missing.
    """
    target, more = target_of(node, key), node.get("_args_", ())
    require(isinstance(more, list | tuple), f"{key}._args_={more} must be a list")
    require(not more or config_class_of(target) is None, f"{key}._args_={more}: the arguments of {node['_target_']} have names")
    read_call(target, arguments_of(node), f"{key}.", given, positional + len(more), beside)


PASSED_ON = {"WandbLogger": "wandb.init"}
"""Loggers that pass the keys that they do not name to a function."""


def check_parts(group: Mapping[str, Part | None], key: str) -> None:
    """Read the arguments of every logger or callback of a group, and build nothing.

    ``**kwargs`` of a target would take any key, and a mistyped one would end the run after its start. A key that is similar to a
    parameter is refused, and so is one that the function behind the ``**kwargs`` does not have.

    Raises:
        ConfigError: see ``check_node``.
    """
    for name, node in group.items():
        if node is None:
            continue
        path = f"{key}.{name}"
        check_node(node, path, None)
        target = target_of(node, path)
        named = parameter_names(target)
        others = [other for other in arguments_of(node) if named and other not in named]
        known = _passed_on(target) if others else set()
        for other in others:
            near = nearest(other, {*named, *known}, f"{path}.")
            require(other in known or not (near or known), f"{path}.{other} is not a key{near}")


def _passed_on(target: Any) -> set[str]:
    """The parameters of the function that gets the ``**kwargs`` of a target. Empty if it is unknown or not installed."""
    name = PASSED_ON.get(getattr(target, "__name__", ""))
    with suppress(ConfigError):
        return named_by({"_target_": name}, "logger") if name else set()
    return set()


def completed(node: Part, key: str) -> dict[str, Any]:
    """Return a node with the defaults of its target, as plain data. A key of ``data`` that must be given is ``???``.

    A model of the user's stays as it is, because the data may decide what has a default.
    """
    try:
        target = target_of(node, key)
        known = defaults(target) if key != "model" or config_class_of(target) else {}
    except (ConfigError, TypeError, ValueError):  # without a target or a signature
        return dict(node)
    plain = {name: value for name, value in known.items() if name not in FROM_THE_RUN or isinstance(value, str)}
    if key == "data":
        plain |= LOADING
    else:  # the others come from the run
        plain = {name: value for name, value in plain.items() if value != "???"}
    return {**node, **{name: value for name, value in plain.items() if name not in node and _is_plain(value)}}


def with_defaults(config: RunConfig) -> RunConfig:
    """Return a config whose parts have every key of their targets."""
    parts: dict[str, Any] = {name: completed(getattr(config, name), name) for name in NODES}
    return dataclasses.replace(config, **parts)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, str)


def factory(node: Part, key: str, given: Collection[str] | None = (), positional: int = 0) -> partial[Any]:
    """Return the target of ``node`` with its arguments, as a partial function. Nested nodes are built.

    Args:
        node: ``_target_`` with arguments and options of Hydra.
        key: the path of the node, for messages.
        given, positional: see ``read_call``.

    Raises:
        ConfigError: see ``check_node``; or a nested node cannot be built.
    """
    from hydra.utils import instantiate

    check_node(node, key, given, positional)
    if config_class_of(target := target_of(node, key)) is not None:
        return partial(target, **read_call(target, arguments_of(node), f"{key}."))
    try:
        made = instantiate({"_convert_": "all", **node, "_partial_": True})
    except Exception as error:
        of_hydra, _, nested = str(error).rpartition("\nfull_key: ")
        said = f"{key}.{nested}" if of_hydra else f"{key}._target_={node['_target_']}"
        raise ConfigError(f"{said} cannot be built: {reason(error)}{_near(node)}") from error
    return partial(made.func, *made.args, **read_call(made.func, made.keywords, f"{key}.", given, positional + len(made.args)))


def build(node: Part, key: str, given: Mapping[str, Any] | None = None, *args: Any) -> Any:
    """Call the target of ``node``.

    Args:
        given: further arguments. They are passed if the target has a parameter of that name and ``node`` does not set it.
            ``**kwargs`` does not count.
        args: the first arguments, by position.

    Raises:
        ConfigError: see ``factory``; or the target raises an error. The message begins with the key.
    """
    made = factory(node, key, given or (), len(args))
    names = parameter_names(made.func)
    fitting = {name: value for name, value in (given or {}).items() if name in names and name not in made.keywords}
    try:
        return made(*args, **fitting)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{key}._target_={node['_target_']} cannot be built: {reason(error)}") from error


def build_callable(node: Part, key: str, arguments: int) -> Any:
    """Like ``build``, but a function that still needs ``arguments`` arguments is returned and not called."""
    target, taken = target_of(node, key), arguments_of(node)
    if inspect.isfunction(target):
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(target).parameters.values()
        needed = [one for one in parameters if one.kind in by_position and one.default is one.empty and one.name not in taken]
        if len(needed) - len(node.get("_args_", ())) == arguments:
            return factory(node, key, positional=arguments)
    return build(node, key)


def build_all(group: Mapping[str, Part | None], key: str, kind: type, given: Mapping[str, Any] | None = None) -> list[Any]:
    """Build every entry of a group of callbacks or loggers that is not null.

    Raises:
        ConfigError: see ``build``; or an entry is not of this ``kind``.
    """
    found = []
    for name, node in group.items():
        if node is not None:
            found.append(build(node, f"{key}.{name}", given))
            made = type(found[-1])
            said = f"{key}.{name}._target_={node['_target_']} must give a {kind.__name__} of the package lightning"
            require(isinstance(found[-1], kind), f"{said}, got {made.__module__}.{made.__qualname__}")
    return found


def parameter_names(function: Any) -> set[str]:
    """Return the parameters of a function or class that can be given by name, without ``*args`` and ``**kwargs``."""
    try:
        found = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some written in C have no signature
        return set()
    return {one.name for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}


def named_by(node: Part, key: str) -> set[str]:
    """Return the parameters of the target of ``node``."""
    return parameter_names(target_of(node, key))


def reason(error: BaseException) -> str:
    """Return in one line why something could not be built: the message of the first exception in the chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    kind = type(error).__name__
    if isinstance(error, ModuleNotFoundError) and (extra := _extra_with(module := str(error.name).partition(".")[0])):
        return f"the package {DISTRIBUTIONS.get(module, module)} is missing, install minitx with the extra {extra}"
    return first_line(error) if kind in ("ValueError", "ConfigError") else f"{kind}: {first_line(error)}"


DISTRIBUTIONS = {"sklearn": "scikit-learn", "babel": "Babel"}
"""Packages whose modules have another name."""


def _extra_with(module: str) -> str:
    """The extra of minitx that installs a module, or an empty text."""
    for wanted in metadata.requires("minitx") or ():
        found = re.match(r"([\w.-]+).*extra == ['\"](\w+)['\"]", wanted)
        if found and found[2] != "dev" and found[1].lower() == DISTRIBUTIONS.get(module, module).lower():
            return found[2]
    return ""
