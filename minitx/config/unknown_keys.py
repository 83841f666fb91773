"""The message about a key that does not exist: its name, and what to type instead."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from minitx.config.failures import ConfigError


class UnknownKeyError(ConfigError):
    """A config has a key, ``key``, that does not exist. ``ending`` completes the message."""

    def __init__(self, key: str, ending: str) -> None:
        super().__init__(key, ending)  # unchanged arguments, so that the error can be pickled
        self.key = key

    def __str__(self) -> str:
        return f"{self.key} is not a key{self.args[1]}"


def unknown_argument(path: str, key: str, known: Sequence[str], other_names: Mapping[str, str]) -> UnknownKeyError:
    """Return the error about ``key`` in a group.

    Args:
        path: the beginning of the keys of the group.
        known: the keys of the group.
        other_names: ``Config.OTHER_NAMES`` of the group.
    """
    if key in other_names:
        return UnknownKeyError(f"{path}{key}", f": {other_names[key].format(path=path)}")
    return UnknownKeyError(f"{path}{key}", nearest(key, known, path) or f"; allowed here: {', '.join(known)}")


def unknown_name(key: str, groups: Collection[str], keys: Iterable[str]) -> UnknownKeyError:
    """Return the error about ``key``, whose first word no run has.

    Args:
        groups: the first words of all keys.
        keys: all keys, with their groups. They are read only if the groups give no suggestion.
    """
    return UnknownKeyError(key, similar_key(key, groups, keys) or "; --help shows the keys")


def similar_key(key: str, groups: Collection[str], keys: Iterable[str]) -> str:
    """Return the end of the message about ``key``, as for ``unknown_name``; an empty string if no key is similar."""
    if "." not in key and (near := difflib.get_close_matches(key, groups, n=1, cutoff=0.8)):
        return f" (did you mean {near[0]}?)"
    known = list(keys)
    in_groups = [name for name in known if name.rpartition(".")[2] == key]  # such as lr without its group
    return f" (did you mean {in_groups[0]}?)" if len(in_groups) == 1 else nearest(key, known)


def set_by_a_file(error: ConfigError, typed: Collection[str], groups: Collection[str]) -> ConfigError:
    """Return ``error``; if a config file sets a key of a part for another target, with the ways to remove the key.

    Args:
        typed: the keys on the command line.
        groups: the names of the parts.
    """
    if not isinstance(error, UnknownKeyError) or error.key in typed:
        return error
    group, *names = error.key.split(".")
    if group not in groups or len(names) > 1:
        return error
    advice = f"; a config file sets it: add ~{error.key}, or '- override /{group}: null' to the defaults of your file"
    return UnknownKeyError(error.key, f"{error.args[1]}{advice}")


def nearest(value: Any, allowed: Iterable[Any], path: str = "") -> str:
    """Return `` (did you mean …?)`` with the entry of ``allowed`` closest to ``value``, after ``path``; an empty string if none is close."""
    near = difflib.get_close_matches(str(value), [str(name) for name in allowed], n=1)
    return f" (did you mean {path}{near[0]}?)" if near else ""
