"""The words of a command line: overrides such as ``model.num_layers=3``, and ``--config-dir=FOLDER``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
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


def roots_of(words: Iterable[str]) -> list[Path]:
    """Return the folders of configs: minitx's own, and those of ``--config-dir``."""
    own = (word.removeprefix(CONFIG_DIR) for word in words if word.startswith(CONFIG_DIR))
    return [shipped_configs(), *(Path(folder).absolute() for folder in own)]


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


def parsed(word: str, *, sweeps: bool = False, advice: str = "") -> Override:
    """Parse an override.

    Args:
        sweeps: whether it may have several values, as in ``a=1,2``.
        advice: the way to use several values, for the message.

    Raises:
        ConfigError: the grammar cannot read it, or it has several values.
    """
    name, is_pair, _ = word.partition("=")
    require(bool(is_pair) or word.startswith("~"), f"{word} is not of the form key=value; --help shows the keys")
    is_name = re.fullmatch(r"[+~]*\w([.]?[\w@:/$-])*", name)  # such as +data.path, ~model/attention@other or hydra:job
    require(is_name is not None, f"{word} cannot be read: {name!r} is not a valid key; --help shows the keys")
    try:
        override = OverridesParser.create().parse_override(readable(word))
    except HydraException:
        quotes = "put a value with one of =,:()[]{}^~#&;!<>` or a quote into two pairs of quotes: 'key=\"value\"'"
        raise ConfigError(f"{word} cannot be read: {quotes}") from None
    is_single = sweeps or not override.is_sweep_override()
    require(is_single, f"{word} has several values: {advice}write '{name}=[...]' for a list")
    return override


def for_hydra(words: Sequence[str], *, sweeps: bool = False) -> list[str]:
    """Return the overrides among ``words`` in the form that Hydra accepts.

    A key whose first name no run has is added to the config (``++``): a config file of the user may have it, and otherwise
    ``check_names`` refuses it with a suggestion.

    Raises:
        ConfigError: an override cannot be read, has several values although ``sweeps`` is False, or gives a group no option.
    """
    roots = roots_of(words)
    return [_for_hydra(word, roots, sweeps) for word in words if not word.startswith(CONFIG_DIR)]


def _for_hydra(word: str, roots: Sequence[Path], sweeps: bool) -> str:
    override = parsed(word, sweeps=sweeps, advice="add -m to run every value, or ")
    name = override.key_or_group
    require(not override.is_add() or name not in FIRST_NAMES, f"{word}: {name} already exists: remove the +")
    if any((root / name).is_dir() for root in roots):
        for option in [] if override.is_delete() else _options(override.value()):
            none = "logger=[] and callbacks=[] mean none, ~GROUP removes another group, in a file '- override /GROUP: null'"
            is_option = not isinstance(option, bool | int | float | None)
            require(is_option, f"{name}={shown(option)} must name an option: {none}")
            for path in [root / name / f"{option}.yaml" for root in roots if name in ("experiment", "debug")]:
                is_global = not path.is_file() or GLOBAL in path.read_text(encoding="utf-8", errors="replace")
                require(is_global, f"{os.path.relpath(path)} must begin with the line '{GLOBAL}'")
    elif not word.startswith(("+", "~")) and override.package is None and "/" not in name:
        is_known = name.partition(".")[0] in (*FIRST_NAMES, "hydra")
        return readable(word) if is_known else f"++{readable(word)}"
    return readable(word)


def _options(value: Any) -> list[Any]:
    """Return the options that the value of a group names: one, several, or those of a sweep."""
    if isinstance(value, ChoiceSweep | list):
        return [option for entry in (value.list if isinstance(value, ChoiceSweep) else value) for option in _options(entry)]
    return [value.text if isinstance(value, QuotedString) else value]
