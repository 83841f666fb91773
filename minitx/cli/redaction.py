"""Secrets: handed to the loggers and callbacks that need them, and to nothing that is written.

What is one: the value of a key that looks like one (``api_key``, ``token``, ``password`` …), the value of a variable of the
environment with such a name, and the login in an address (``https://name:password@host``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from minitx.config import ConfigError, RunConfig, to_dict

REDACTED = "<redacted>"
SHORTEST = 8
"""Characters from which on a value of the environment is looked for in texts: shorter ones are found in plain words."""

_WORDS = "(?:api|access|private|secret)_?key|(?<!per_)token(?!i[sz]|s(?![a-z]))|secret|passw(?:or)?d|passphrase|credential|authorization"
_SECRET = re.compile(rf"{_WORDS}|(?:^|_)key$", re.IGNORECASE)
_ENTRY = re.compile(r"(?<![\w.-])['\"]?([\w.-]+)['\"]?\s*:\s*")  # a key of a mapping that was typed
_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def redact(value: Any) -> Any:
    """Plain data without its secrets.

    >>> redact({"logger": {"api_key": "abc", "base_url": "https://me:abc@host"}})
    {'logger': {'api_key': '<redacted>', 'base_url': 'https://<redacted>@host'}}
    """
    if isinstance(value, Mapping):
        return {
            hide(k) if isinstance(k, str) else k: REDACTED if _is_secret(str(k), v) else redact(v) for k, v in value.items()
        }
    if isinstance(value, str):
        return hide(value)
    return [redact(item) for item in value] if isinstance(value, list | tuple) else value


def redact_overrides(overrides: Sequence[str]) -> list[str]:
    """Command-line overrides without their secrets.

    >>> redact_overrides(["seed=3", "+logger.x.api_key=abc", "+logger.x={token: [a, b], project: p}"])
    ['seed=3', '+logger.x.api_key=<redacted>', '+logger.x={token: <redacted>, project: p}']
    """
    return [_redact_override(*text.partition("=")) for text in overrides]


def hide(text: str) -> str:
    """``text`` without the secrets of the environment and without logins in addresses."""
    for secret in _of_environment():
        text = text.replace(secret, REDACTED)
    return _LOGIN.sub(REDACTED, text)


def refuse_secrets(config: RunConfig, overrides: Sequence[str]) -> None:
    """Refuse a secret where it would be kept: a run needs the value, and its folder holds the whole config.

    One may stand under a key that says what it is (``api_key``, ``token`` …) of a logger or a callback. A grid keeps its
    overrides, from which every cell is run, so that none may stand there.

    Raises:
        ConfigError: one stands elsewhere; the message names the key and not the secret.
    """
    values = to_dict(config)
    for path, text in _texts({name: value for name, value in values.items() if name != "ablation"}, ""):
        if hide(text) != text:
            raise ConfigError(
                f"{path} holds a secret (a value of the environment with such a name, or a login in an address), and the "
                f"run's folder would keep it: give it to a logger or a callback, under a key such as api_key"
            )
    if config.ablation is None:
        return
    grid = {name: value for name, value in values["ablation"].items() if name != "launcher_options"}  # not kept
    typed = [text for text in overrides if not text.lstrip("+~").startswith("ablation.launcher_options")]
    for path, text in (*_texts(grid, "ablation."), *((text.partition("=")[0], text) for text in typed)):
        if redact_overrides([text]) != [text]:
            raise ConfigError(
                f"{path} holds a secret, and the records of a grid would keep it: give it to the grid's processes by the "
                f"environment (WANDB_API_KEY) or a file of theirs (wandb login)"
            )


def _texts(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text of plain data with its key, but for those under a key that says that they are secrets."""
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield path.rstrip("."), str(name)
            if not _is_secret(str(name), child):
                yield from _texts(child, f"{path}{hide(str(name))}.")
    elif isinstance(node, list | tuple):
        for i, child in enumerate(node):
            yield from _texts(child, f"{path.rstrip('.')}[{i}].")
    elif isinstance(node, str):
        yield path.rstrip("."), node


def _of_environment() -> list[str]:
    """Values of secret-looking variables, the longest first, so that one that holds another is taken out whole."""
    values = {value for name, value in os.environ.items() if _sounds_secret(name) and len(value) >= SHORTEST}
    return sorted(values, key=len, reverse=True)


@cache  # every text of a config is held against every variable of the environment
def _sounds_secret(name: str) -> bool:
    return bool(_SECRET.search(name))


def _is_secret(key: str, value: Any) -> bool:
    return _sounds_secret(key) and value is not None and value != "" and not isinstance(value, bool)


def _redact_override(key: str, sign: str, value: str) -> str:
    if any(_is_secret(part, value) for part in re.split(r"[.@+~:/]", key)):
        return f"{hide(key)}={REDACTED}"
    shown, start = "", 0
    for entry in _ENTRY.finditer(value):
        if start <= entry.start() and entry.end() < len(value) and _is_secret(entry[1], value):
            shown += value[start : entry.end()] + REDACTED
            start = _end_of_value(value, entry.end())
    return hide(key + sign + shown + value[start:])


def _end_of_value(text: str, start: int) -> int:
    """Where the value that begins at ``start`` ends, in Hydra's grammar: at a comma or bracket that is not its own."""
    depth, quote, at = 0, "", start
    while at < len(text):
        character = text[at]
        if quote:
            at += character == "\\"
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})" or (character == "," and not depth):
            depth -= 1
            if depth < 0:
                return at
        at += 1
    return min(at, len(text))
