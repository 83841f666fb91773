"""The words of a command line, as Hydra's grammar reads them: overrides such as ``model.num_layers=3``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString
from hydra.errors import HydraException

from minitx.config import CONFIG_DIR, ConfigError, RunConfig
from minitx.config.schema import defaults, require, shown
from minitx.config.shipped import shipped_configs

FIRST_NAMES = (*defaults(RunConfig), "ablation", "debug")
"""The groups and keys that every run has."""

GLOBAL = "# @package _global_"
"""The first line of a file in ``experiment/`` and ``debug/``."""


def by_key(words: Iterable[str]) -> dict[str, str]:
    """Return overrides by the key that they set or delete. The last override of a key applies."""
    return {word.lstrip("+~").partition("=")[0]: word for word in words}


def readable(word: str) -> str:
    """Return an override, with its value in quotes if Hydra's grammar cannot read it (``data.path=小说.txt``).

    A value with a comma, a bracket or a quote is not quoted.
    """
    name, is_pair, value = word.partition("=")
    if not is_pair or set(value) & set("'\"\\,()[]{}") or is_parsed(word):
        return word
    quoted = f"{name}={QuotedString(value, Quote.double).with_quotes()}"
    return quoted if is_parsed(quoted) else word


def is_parsed(word: str) -> bool:
    """Return whether Hydra's grammar can read an override."""
    with suppress(HydraException):
        return OverridesParser.create().parse_override(word) is not None
    return False


def parsed(word: str) -> Override:
    """Return an override as Hydra reads it.

    Raises:
        ConfigError: Hydra's grammar cannot read the word.
    """
    name, is_pair, _ = word.partition("=")
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        if not is_pair:
            raise ConfigError(f"{word} is not of the form key=value; --help shows the keys") from None
        if not re.fullmatch(r"[+~]*\w([.]?[\w@:/$-])*", name):  # not +data.path, ~model/attention@other or hydra:job
            raise ConfigError(f"{word} cannot be read: {name!r} is not a valid key; --help shows the keys") from None
        quotes = "put a value with one of =,:()[]{}^~#&;!<>` or a quote into two pairs of quotes: 'key=\"value\"'"
        raise ConfigError(f"{word} cannot be read: {quotes}") from None


def roots_of(words: Iterable[str]) -> list[Path]:
    """Return the folders of configs: minitx's own, and those of ``--config-dir``."""
    own = (word.removeprefix(CONFIG_DIR) for word in words if word.startswith(CONFIG_DIR))
    return [shipped_configs(), *(Path(folder).absolute() for folder in own)]


def for_hydra(words: Sequence[str]) -> list[str]:
    """Return the overrides of a run for Hydra, and check those that choose an option.

    Hydra refuses a key that the config does not have, in a message without a suggestion. Such a key is therefore added
    (``++key=value``): it can be a variable of the user's configs, and otherwise ``check_names`` refuses it.

    Args:
        words: overrides, and ``--config-dir=FOLDER``, which is left out.

    Raises:
        ConfigError: a word cannot be read, or does not name an option.
    """
    ready, roots = [], roots_of(words)
    for word in words:
        if word.startswith(CONFIG_DIR):
            continue
        override = parsed(word)
        name = override.key_or_group
        is_change = not (override.is_delete() or override.is_add() or override.is_force_add() or override.package)
        if "/" in name or any((root / name).is_dir() for root in roots):
            if not override.is_delete():
                _check_option(name, override.value(), roots)
        elif is_change and name.partition(".")[0] not in (*FIRST_NAMES, "hydra"):
            word = f"++{word}"
        ready.append(word)
    return ready


def _check_option(group: str, value: Any, roots: Sequence[Path]) -> None:
    """Refuse a value that is not the name of an option, and an experiment without its first line."""
    for option in _options(value):
        is_name = not (option is None or isinstance(option, bool | int | float | dict))
        none = "logger=[] and callbacks=[] mean none, ~GROUP removes another group, in a file '- override /GROUP: null'"
        require(is_name, f"{group}={shown(option)} must name an option: {none}")
        for path in [root / group / f"{option}.yaml" for root in roots if group in ("experiment", "debug")]:
            require(
                not path.is_file() or GLOBAL in path.read_text(encoding="utf-8", errors="replace"),
                f"{group}={option}: {os.path.relpath(path)} must begin with the line '{GLOBAL}'",
            )


def _options(value: Any) -> Iterator[Any]:
    """Yield the options that the value of a group names: one, several, or a sweep's."""
    if isinstance(value, ChoiceSweep | list):
        for entry in value.list if isinstance(value, ChoiceSweep) else value:
            yield from _options(entry)
    else:
        yield value.text if isinstance(value, QuotedString) else value
