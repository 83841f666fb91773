"""Messages for a command line that Hydra cannot compose: the first line of Hydra's message, and a suggestion.

The suggestion is computed from the command line, the folders of configs and the composed config.
"""

from __future__ import annotations

import difflib
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from minitx.config import CONFIG_DIR, RunConfig
from minitx.config.schema import defaults, nearest
from minitx.config.shipped import shipped_configs

GLOBAL = "# @package _global_"
"""The first line of a file in ``experiment/`` and ``debug/``."""


def is_of_hydra(error: BaseException) -> bool:
    """Return whether Hydra or OmegaConf raised ``error``."""
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [name for name in names if name.partition(".")[0] not in ("os", "pathlib")]  # Hydra creates folders with these
    raised_in = names[-1] if names else ""
    return isinstance(error, HydraException | OmegaConfBaseException) or raised_in.startswith(("hydra.", "omegaconf."))


def explained(error: BaseException, line: CommandLine) -> str:
    """Return one line for an error of Hydra or OmegaConf, with advice from the command line that it is about."""
    if isinstance(error, OverrideParseException):
        return unreadable(error.override)
    advice = line.advice() or line.advice_on_option(getattr(error, "missing_cfg_file", None) or "")
    return f"{message_of(error).rstrip('.')}{advice}" if advice else message_of(error)


def unreadable(word: str) -> str:
    """Return a message for an override that cannot be parsed."""
    name, is_pair, _ = word.partition("=")
    if not is_pair:
        return f"{word} is not of the form key=value; --help shows the keys"
    if not re.fullmatch(r"[+~]*\w([.]?[\w@:/$-])*", name):  # not +data.path, ~model/attention@other or hydra:job
        return f"{word} cannot be read: {name!r} is not a valid key; --help shows the keys"
    quotes = "put a value with one of =,:()[]{}^~#&;!<>` or a quote into two pairs of quotes: 'key=\"value\"'"
    return f"{word} cannot be read: {quotes}"


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


@dataclass(frozen=True)
class CommandLine:
    """A command line, and the groups, options and keys that exist.

    Attributes:
        words: overrides, and ``--config-dir=FOLDER``.
        keys_of: a function from valid words to all keys of their config, as ``group.key``.
        sweeps: whether ``a=1,2`` is a sweep (``-m``).
        of_run: whether it is a command line of ``train.py``, the only program with files of options.
    """

    words: Sequence[str]
    keys_of: Callable[[Sequence[str]], Sequence[str]]
    sweeps: bool = False
    of_run: bool = True

    @cached_property
    def folders(self) -> list[str]:
        """The words that name folders of configs."""
        return [word for word in self.words if word.startswith(CONFIG_DIR)]

    @cached_property
    def overrides(self) -> list[Override]:
        """The overrides that Hydra can parse."""
        parsed: list[Override] = []
        for word in self.words:
            with suppress(HydraException):
                parsed += OverridesParser.create().parse_overrides([word] if word not in self.folders else [])
        return parsed

    @cached_property
    def first_names(self) -> set[str]:
        """The groups and keys that every config of the program has."""
        return {*defaults(RunConfig), "ablation", "debug"} if self.of_run else {*self.keys}

    @cached_property
    def groups(self) -> dict[str, dict[str, Path]]:
        """The files of options, by group."""
        files: dict[str, dict[str, Path]] = {}
        if not self.of_run:
            return files
        for root in (shipped_configs(), *(Path(word.removeprefix(CONFIG_DIR)) for word in self.folders)):
            for path in sorted(root.glob("*/**/*.yaml")):
                files.setdefault(path.parent.relative_to(root).as_posix(), {})[path.stem] = path
        for group in ("hydra/launcher", "hydra/sweeper"):  # options of installed plugins
            files[group] = {name.removesuffix(".yaml"): Path(name) for name in ConfigStore.instance().list(group)}
        return files

    @cached_property
    def keys(self) -> Sequence[str]:
        """All keys of the config with the typed options. For a run, this imports torch."""
        chosen = [override.input_line or "" for override in self.overrides if self._is_choice(override)]
        with suppress(Exception):
            return self.keys_of([*self.folders, *chosen])
        return []

    def _is_choice(self, override: Override) -> bool:
        is_plain = not (override.is_add() or override.is_force_add() or override.is_delete() or override.package)
        value = override.value()
        return is_plain and isinstance(value, str) and value in self.groups.get(override.key_or_group, {})

    def advice(self) -> str:
        """Return the end of a message: a similar key, option or interpolation, or a correction of the override."""
        with suppress(OSError):  # a config file cannot be read
            return next(filter(None, map(self._of_word, self.overrides)), "")
        return ""

    def advice_on_option(self, path: str) -> str:
        """Return the end of a message on a missing option ``GROUP/OPTION`` that a file names: a similar option."""
        group, _, option = path.rpartition("/")
        with suppress(OSError):
            return nearest(option, self.groups.get(group, {}))
        return ""

    def _of_word(self, override: Override) -> str:
        name, value, is_group = override.key_or_group, override.value(), override.key_or_group in self.groups
        if override.is_sweep_override() and not self.sweeps:
            run_all = "add -m to run every value, or " if self.of_run else ""
            return f"; {run_all}write '{name}=[...]' for a list"
        if override.is_add() and (name in self.first_names or name in self.keys):
            return f"; {name} already exists: remove the +"
        if is_group and not override.is_delete():
            return self._of_option(name, value) or self._of_group(override)
        if not is_group and not name.startswith("hydra") and name.partition(".")[0] not in {*self.first_names, *self.groups}:
            return self._of_key(name)
        for reference in re.findall(r"\$\{([\w.]+)\}", str(value)):  # data.path in ${data.path}
            if reference == name:
                return f"; {name} refers to itself"
            if reference not in self.keys:
                return nearest(reference, self.keys)
        return ""

    def _of_option(self, group: str, value: Any) -> str:
        options = self.groups[group]
        for choice in _choices(value):
            if choice is None or isinstance(choice, bool | int | float | dict):
                none = "logger=[] and callbacks=[] mean none, ~GROUP removes another group"
                return f"; {group} must name an option: {none}, in a file '- override /GROUP: null'"
            if not isinstance(choice, str):  # a range or a glob
                continue
            if choice not in options:
                return nearest(choice, options) or f"; {group} must be one of: {', '.join(options)}"
            if group in ("experiment", "debug") and GLOBAL not in options[choice].read_text(errors="replace"):
                return f"; {os.path.relpath(options[choice])} must begin with the line '{GLOBAL}'"
        return ""

    def _of_group(self, override: Override) -> str:
        if override.is_add():
            return ""
        if override.package:
            return f" (did you mean {override.key_or_group}?)"
        is_new = not override.is_hydra_override() and override.key_or_group not in self.first_names
        return f" (did you mean +{override.key_or_group}?)" if is_new else ""

    def _of_key(self, name: str) -> str:
        if "." not in name and (near_first := difflib.get_close_matches(name, self.first_names, n=1, cutoff=0.8)):
            return f" (did you mean {near_first[0]}?)"  # found without importing torch
        in_groups = [key for key in self.keys if key.rpartition(".")[2] == name]  # such as lr without its group
        near = f" (did you mean {in_groups[0]}?)" if len(in_groups) == 1 else nearest(name, self.keys)
        return near or "; --help shows the keys"


def _choices(value: Any) -> list[Any]:
    """Return the options that the value of a group names: one, several, or a sweep's."""
    if isinstance(value, ChoiceSweep):
        return [choice for entry in value.list for choice in _choices(entry)]
    if isinstance(value, list):
        return [choice for entry in value for choice in _choices(entry)]
    return [value.text if isinstance(value, QuotedString) else value]


def names_of(node: Any, path: str = "") -> Iterator[str]:
    """Yield the keys of a config at all levels, as ``group.key``."""
    for name, value in node.items() if isinstance(node, Mapping) else ():
        if not str(name).startswith("_"):
            yield f"{path}{name}"
            yield from names_of(value, f"{path}{name}.")
