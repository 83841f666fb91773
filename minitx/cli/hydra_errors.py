"""Messages of Hydra and OmegaConf in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationKeyError, OmegaConfBaseException

from minitx.cli.keys import all_keys
from minitx.cli.overrides import FIRST_NAMES, for_hydra, is_parsed, roots_of
from minitx.config.schema import shown
from minitx.config.unknown_keys import nearest, similar_key

GLOBAL = "# @package _global_"
"""The first line of a file in ``experiment/`` and ``debug/``."""

OF_HYDRA = (HydraException, OmegaConfBaseException)
"""The types of errors of Hydra and OmegaConf. Other errors that they let through are known only where they are called."""


def explained(error: BaseException, words: Sequence[str], *, sweeps: bool, config: DictConfig | None) -> str:
    """Return one line for an error of Hydra or OmegaConf, with a suggestion for a misspelled option or interpolation.

    Args:
        words: overrides, and ``--config-dir=FOLDER``.
        sweeps: whether ``a=1,2`` is a sweep (``-m``).
        config: the composed config, if Hydra has composed one.
    """
    if isinstance(error, OverrideParseException):
        return unreadable(error.override.removeprefix("++"))
    roots = roots_of(words)
    overrides = OverridesParser.create().parse_overrides([*filter(is_parsed, for_hydra(words))])
    advice = next(filter(None, (_advice(override, roots, sweeps) for override in overrides)), "")
    if isinstance(error, MissingConfigException):
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        options = error.options or [path.stem for root in roots for path in sorted((root / group).glob("*.yaml"))]
        advice = nearest(option, options) or f"; {group} must be one of: {', '.join(options)}" * bool(options)
    if isinstance(error, InterpolationKeyError) and config is not None and (missing := re.search("'(.+)'", str(error))):
        advice = similar_key(missing[1], FIRST_NAMES, all_keys(config))
    if advice:
        return f"{message_of(error).rstrip('.')}{advice}"
    return message_of(error, whole=type(error) is ConfigCompositionException)  # its other lines are Hydra's advice


def unreadable(word: str) -> str:
    """Return a message for an override that cannot be parsed."""
    name, is_pair, _ = word.partition("=")
    if not is_pair:
        return f"{word} is not of the form key=value; --help shows the keys"
    if not re.fullmatch(r"[+~]*\w([.]?[\w@:/$-])*", name):  # not +data.path, ~model/attention@other or hydra:job
        return f"{word} cannot be read: {name!r} is not a valid key; --help shows the keys"
    quotes = "put a value with one of =,:()[]{}^~#&;!<>` or a quote into two pairs of quotes: 'key=\"value\"'"
    return f"{word} cannot be read: {quotes}"


def _advice(override: Override, roots: Sequence[Path], sweeps: bool) -> str:
    """Return the end of a message about an override that Hydra's message does not explain in one line; else an empty string."""
    name = override.key_or_group
    if override.is_sweep_override() and not sweeps:
        return f"; add -m to run every value, or write '{name}=[...]' for a list"
    if override.is_add() and name in FIRST_NAMES:
        return f"; {name} already exists: remove the +"
    is_group = any((root / name).is_dir() for root in roots) and not override.is_delete()
    for option in _options(override.value()) if is_group else ():
        if option is None or isinstance(option, bool | int | float):
            none = "logger=[] and callbacks=[] mean none, ~GROUP removes another group, in a file '- override /GROUP: null'"
            return f"; {name}={shown(option)} must name an option: {none}"
        for path in [root / name / f"{option}.yaml" for root in roots if name in ("experiment", "debug")]:
            if path.is_file() and GLOBAL not in path.read_text(encoding="utf-8", errors="replace"):
                return f"; {os.path.relpath(path)} must begin with the line '{GLOBAL}'"
    return ""


def _options(value: Any) -> Iterator[Any]:
    """Yield the options that the value of a group names: one, several, or a sweep's."""
    if isinstance(value, ChoiceSweep | list):
        for entry in value.list if isinstance(value, ChoiceSweep) else value:
            yield from _options(entry)
    else:
        yield value.text if isinstance(value, QuotedString) else value


def message_of(error: BaseException, *, whole: bool = False) -> str:
    """Return the first line of a message, or all lines in one (``whole``), with the key and the cause if they are missing in it."""
    mark = getattr(error, "problem_mark", None)  # of PyYAML
    if mark is not None:
        return f"{os.path.relpath(mark.name)}, line {mark.line + 1}: {error.problem}"  # type: ignore[attr-defined]
    cause = error.__cause__
    if not str(error).strip() and cause is not None:
        return message_of(cause)
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    if whole or first.endswith(":"):
        first = " ".join([first, *(more if whole else more[:1])])
    if isinstance(cause, OmegaConfBaseException) and not isinstance(cause, ConfigAttributeError | ConfigKeyError):
        first = f"{first}: {message_of(cause)}"
    key = getattr(error, "full_key", None)
    return " ".join((f"{key}: {first}" if key and key not in first else first).split())
