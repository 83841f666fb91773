"""The words of a command line: overrides such as ``model.num_layers=3``, and ``--config-dir=FOLDER``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from minitx.config import CONFIG_DIR, RunConfig
from minitx.config.part import defaults
from minitx.config.shipped import shipped_configs

FIRST_NAMES = (*defaults(RunConfig), "ablation", "debug")
"""The groups and keys that every run has."""


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


def for_hydra(words: Collection[str]) -> list[str]:
    """Return the overrides among ``words`` in the form that Hydra accepts.

    A key whose first name no run has is added to the config (``++``): a config file of the user may have it, and otherwise
    ``check_names`` refuses it with a suggestion.
    """
    roots, overrides = roots_of(words), []
    for word in words:
        name, is_pair, _ = word.partition("=")
        is_known = name.partition(".")[0] in (*FIRST_NAMES, "hydra") or any((root / name).is_dir() for root in roots)
        is_new = is_pair and not is_known and re.fullmatch(r"\w[\w.]*", name)
        overrides += [] if word.startswith(CONFIG_DIR) else [f"++{readable(word)}" if is_new else readable(word)]
    return overrides
