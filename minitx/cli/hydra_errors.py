"""Messages for a command line that Hydra cannot compose: the first line of Hydra's message, and a suggestion."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationKeyError, OmegaConfBaseException

from minitx.cli.keys import similar_key
from minitx.cli.overrides import FIRST_NAMES, roots_of
from minitx.config.schema import nearest, shown

GLOBAL = "# @package _global_"
"""The first line of a file in ``experiment/`` and ``debug/``."""


def is_of_hydra(error: BaseException) -> bool:
    """Return whether Hydra or OmegaConf raised ``error``."""
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [name for name in names if name.partition(".")[0] not in ("os", "pathlib")]  # Hydra creates folders with these
    raised_in = names[-1] if names else ""
    return isinstance(error, HydraException | OmegaConfBaseException) or raised_in.startswith(("hydra.", "omegaconf."))


def explained(error: BaseException, words: Sequence[str], *, sweeps: bool, config: DictConfig | None) -> str:
    """Return one line for an error of Hydra or OmegaConf, with advice on the option or the override that it is about.

    Args:
        words: overrides, and ``--config-dir=FOLDER``.
        sweeps: whether ``a=1,2`` is a sweep (``-m``).
        config: the composed config, if Hydra has composed one.
    """
    if isinstance(error, OverrideParseException):
        return unreadable(error.override)
    roots = roots_of(words)
    advice = next(filter(None, (_advice(override, roots, sweeps) for override in _parsed(words))), "")
    if isinstance(error, MissingConfigException):
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        options = error.options or [path.stem for root in roots for path in sorted((root / group).glob("*.yaml"))]
        others = f"; {group} must be one of: {', '.join(options)}" if options else ""
        advice = advice or nearest(option, options) or others
    if isinstance(error, InterpolationKeyError) and config is not None and (missing := re.search("'(.+)'", str(error))):
        advice = similar_key(missing[1], config)
    return f"{message_of(error).rstrip('.')}{advice}" if advice else message_of(error)


def with_new_keys(words: Sequence[str]) -> list[str]:
    """Return words that add each key whose first name no run has (``++key=null``), so that Hydra composes; [] without such a key.

    Hydra refuses such a key in a message without a suggestion, ``check_names`` with one. Values that are sweeps are left out.
    """
    overrides = [override for override in _parsed(words) if "/" not in override.key_or_group and not override.package]
    plain = [each for each in overrides if not (each.is_add() or each.is_force_add() or each.is_delete())]
    new = {each.key_or_group for each in plain if each.key_or_group.partition(".")[0] not in (*FIRST_NAMES, "hydra")}
    sweeps = {override.input_line for override in overrides if override.is_sweep_override()}
    kept = [word for word in words if word not in sweeps and word.lstrip("+").partition("=")[0] not in new]
    return [*kept, *(f"++{name}=null" for name in sorted(new))] if new else []


def unreadable(word: str) -> str:
    """Return a message for an override that cannot be parsed."""
    name, is_pair, _ = word.partition("=")
    if not is_pair:
        return f"{word} is not of the form key=value; --help shows the keys"
    if not re.fullmatch(r"[+~]*\w([.]?[\w@:/$-])*", name):  # not +data.path, ~model/attention@other or hydra:job
        return f"{word} cannot be read: {name!r} is not a valid key; --help shows the keys"
    quotes = "put a value with one of =,:()[]{}^~#&;!<>` or a quote into two pairs of quotes: 'key=\"value\"'"
    return f"{word} cannot be read: {quotes}"


def _parsed(words: Sequence[str]) -> Iterator[Override]:
    """Yield the overrides that Hydra can parse."""
    for word in words:
        with suppress(HydraException):
            yield from OverridesParser.create().parse_overrides([word] if not word.startswith("-") else [])


def _advice(override: Override, roots: Sequence[Path], sweeps: bool) -> str:
    """Return the end of a message that is about the form of an override; an empty text if nothing is wrong with it."""
    name = override.key_or_group
    is_known = "/" in name or name.partition(".")[0] in (*FIRST_NAMES, "hydra")
    if override.is_sweep_override() and not sweeps:
        return f"; add -m to run every value, or write '{name}=[...]' for a list"
    if override.is_delete():
        return "; --help shows the keys" if not is_known else ""
    if override.is_add():
        return f"; {name} already exists: remove the +" if is_known and "." not in name else ""
    if override.package:
        return f" (did you mean {name}?)"
    if any((root / name).is_dir() for root in roots):
        advice = "" if is_known else f" (did you mean +{name}?)"  # a group of the user's that no run has
        return next(filter(None, (_of_option(name, option, roots) for option in _options(override.value()))), advice)
    return ""


def _of_option(group: str, option: Any, roots: Sequence[Path]) -> str:
    if option is None or isinstance(option, bool | int | float | dict):
        none = "logger=[] and callbacks=[] mean none, ~GROUP removes another group, in a file '- override /GROUP: null'"
        return f"; {group}={shown(option)} must name an option: {none}"
    for path in [root / group / f"{option}.yaml" for root in roots if group in ("experiment", "debug")]:
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


def message_of(error: BaseException) -> str:
    """Return the first line of a message, with the key and the cause if they are missing in it."""
    mark = getattr(error, "problem_mark", None)  # of PyYAML
    if mark is not None:
        return f"{os.path.relpath(mark.name)}, line {mark.line + 1}: {error.problem}"  # type: ignore[attr-defined]
    cause = error.__cause__
    if not str(error).strip() and cause is not None:
        return message_of(cause)
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    if first.endswith(":"):
        first = " ".join([first, *more[:1]])
    if isinstance(cause, OmegaConfBaseException) and not isinstance(cause, ConfigAttributeError | ConfigKeyError):
        first = f"{first}: {message_of(cause)}"
    key = getattr(error, "full_key", None)
    return " ".join((f"{key}: {first}" if key and key not in first else first).split())
