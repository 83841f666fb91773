"""Parts of the user's own: nodes of a config with ``_target_``. Hydra builds them. A checkpoint may name only trusted ones."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from minitx.config import ConfigError, Part, TransformerConfig, is_part
from minitx.config.checks import first_line, nearest

OURS = (
    *("minitx.config.TransformerConfig", "minitx.nn.DecoderLM", "minitx.nn.Encoder", "minitx.nn.EncoderDecoder"),
    *("minitx.nn.VisionTransformer", "minitx.nn.MultiHeadAttention", "minitx.training.objectives.CrossEntropy"),
)
"""Classes of this package that a checkpoint may name."""

GIVEN = "given to train() from Python"
"""The ``_target_`` in a checkpoint for data and objectives that were objects. Nothing can be built from it."""


def factory(node: Part, key: str) -> partial[Any]:
    """Return the target of ``node`` with its arguments, as a partial function (Hydra's ``instantiate``).

    Nested nodes are built. Lists and mappings are plain Python objects.

    Args:
        node: ``_target_`` with arguments and options of Hydra. key: the path of the node, for messages.

    Raises:
        ConfigError: the target does not exist, or a nested one cannot be built.
    """
    from hydra.utils import instantiate

    try:
        return instantiate({"_convert_": "all", **node, "_partial_": True})
    except Exception as error:
        raise ConfigError(f"{key}._target_={node['_target_']} cannot be built: {reason(error)}{_near(node)}") from error


def _near(node: Part) -> str:
    """A similar name in the module of a target that does not exist."""
    module, _, name = str(node["_target_"]).rpartition(".")
    known = vars(sys.modules[module]) if module in sys.modules else {}
    return "" if name in known else nearest(name, known, f"{module}.")


def build(node: Part, key: str, given: Mapping[str, Any] | None = None) -> Any:
    """Call the target of ``node``.

    Args:
        given: further arguments. They are passed if the target has a parameter of that name and ``node`` does not set it.
            ``**kwargs`` does not count.

    Raises:
        ConfigError: the target does not exist, or raises an error. The message begins with the key.
    """
    made = factory(node, key)
    names = parameter_names(made.func)
    fitting = {name: value for name, value in (given or {}).items() if name in names and name not in made.keywords}
    return call(made, key, node, **fitting)


def build_callable(node: Part, key: str, arguments: int) -> Any:
    """Like ``build``, but a function that still needs ``arguments`` arguments is returned and not called."""
    made = factory(node, key)
    if inspect.isfunction(made.func):
        parameters = inspect.signature(made).parameters.values()
        needed = [
            one
            for one in parameters
            if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
        if len(needed) == arguments:
            return made
    return build(node, key)


def core_of(config: TransformerConfig) -> Callable[[], Any] | None:
    """Return a function that builds attention cores if ``attention`` is a part of the user's own, or None if it is one of ours."""
    if not is_part(config.attention):
        return None
    sizes = {"head_dim": config.width_per_head, "num_heads": config.num_heads, "max_len": config.max_len}
    return lambda: build(config.attention, "model.attention", sizes)  # type: ignore[arg-type]


def call(made: Callable[..., Any], key: str, node: Part, *args: Any, **kwargs: Any) -> Any:
    """Call ``made``. An exception becomes a ConfigError of one sentence."""
    try:
        return made(*args, **kwargs)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{key}._target_={node['_target_']} cannot be built: {reason(error)}") from error


def build_all(group: Mapping[str, Part | None], key: str, given: Mapping[str, Any] | None = None) -> list[Any]:
    """Build every entry of a group of callbacks or loggers that is not null."""
    return [build(node, f"{key}.{name}", given) for name, node in group.items() if node is not None]


def parameter_names(function: Any) -> set[str]:
    """Return the parameters of a function or class that can be given by name, without ``*args`` and ``**kwargs``."""
    try:
        found = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some written in C have no signature
        return set()
    return {one.name for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}


def named_by(node: Part, key: str) -> set[str]:
    """Return the parameters of the target of ``node``."""
    return parameter_names(factory({"_target_": node["_target_"]}, key).func)


def reason(error: BaseException) -> str:
    """Return in one line why something could not be built: the message of the first exception in the chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    kind = type(error).__name__
    return first_line(error) if kind in ("ValueError", "ConfigError") else f"{kind}: {first_line(error)}"


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


def check_trusted(node: Any, key: str) -> None:
    """Raise a ConfigError if a stored node could run untrusted code.

    Every ``_target_`` in it, also a nested one, must be a class defined in ``torch.nn`` or ``torch.optim``, or one of ``OURS``.
    The outermost one must be a ``torch.nn.Module``. Only torch and this package are imported for the check.

    Raises:
        ConfigError: the node has another target, or a text with ``${``, which Hydra would resolve.
    """
    if is_part(node) and not issubclass(_trusted_class(str(node["_target_"]), key), nn.Module):
        raise ConfigError(f"{key}._target_={node['_target_']} in the checkpoint is no torch.nn.Module; {_ADVICE}")
    _check_nested(node, key)


_ADVICE = "with trust=true it is built all the same, which runs its code"


def _check_nested(node: Any, key: str) -> None:
    if isinstance(node, str) and "${" in node:
        raise ConfigError(f"{key}={node} in the checkpoint is an interpolation, which could name any code; {_ADVICE}")
    if isinstance(node, Mapping):
        if "_target_" in node:
            _trusted_class(str(node["_target_"]), key)
        for name, value in node.items():
            _check_nested(str(name), key)
            _check_nested(value, f"{key}.{name}")
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            _check_nested(value, f"{key}[{index}]")


def _trusted_class(target: str, key: str) -> type:
    """The class that ``target`` names, if a checkpoint may name it."""
    module, _, name = target.rpartition(".")
    if target in OURS:
        importlib.import_module(module)
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if isinstance(found, type):
        home = found.__module__
        of_torch = home.startswith(("torch.nn.", "torch.optim.")) and getattr(sys.modules[home], found.__name__, None) is found
        if of_torch or target in OURS:
            return found
    raise ConfigError(f"{key}._target_={target} in the checkpoint is none of the classes that a checkpoint may name; {_ADVICE}")
