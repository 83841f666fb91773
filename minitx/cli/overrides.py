"""The words of a command line: overrides such as ``model.num_layers=3``, and ``--config-dir=FOLDER``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from minitx.config import CONFIG_DIR, RunConfig
from minitx.config.schema import defaults
from minitx.config.shipped import shipped_configs

FIRST_NAMES = (*defaults(RunConfig), "ablation", "debug")
"""The groups and keys that every run has."""


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


def roots_of(words: Iterable[str]) -> list[Path]:
    """Return the folders of configs: minitx's own, and those of ``--config-dir``."""
    own = (word.removeprefix(CONFIG_DIR) for word in words if word.startswith(CONFIG_DIR))
    return [shipped_configs(), *(Path(folder).absolute() for folder in own)]


def for_hydra(words: Iterable[str]) -> list[str]:
    """Return overrides for Hydra, which refuses a key that the config does not have, in a message without a suggestion.

    Such a key is therefore added (``++key=value``): it can be a variable of the user's configs, and otherwise ``check_names``
    refuses it.
    """
    words = list(words)
    roots = roots_of(words)

    def is_new(word: str) -> bool:
        name, is_pair, _ = word.partition("=")
        is_plain = is_pair and re.fullmatch(r"\w+(\.[\w-]+)*", name) and name.partition(".")[0] not in (*FIRST_NAMES, "hydra")
        return bool(is_plain) and not any((root / name).is_dir() for root in roots)

    return [f"++{word}" if is_new(word) else word for word in words if not word.startswith(CONFIG_DIR)]
