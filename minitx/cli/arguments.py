"""Programs with plain ``key=value`` arguments: a dataclass says what they take, and ``--help`` says what it means."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from minitx.cli.errors import JobErrors, exit_code, take_traceback
from minitx.cli.schema import from_dict
from minitx.config import ConfigError
from minitx.config.checks import require

T = TypeVar("T")


def key(default: Any, meaning: str) -> Any:
    """A field with its line of ``--help``; ``dataclasses.MISSING`` is no default."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


def run_program(cls: type[T], usage: str, program: Callable[[T], None]) -> int:
    """``program(config)`` with ``cls`` from the command line, errors as one sentence; returns the exit code."""
    arguments = take_traceback(sys.argv[1:])
    if {"--help", "-h"} & set(arguments):
        return exit_code(lambda job: write(help_text(cls, usage)), program)
    return exit_code(partial(_parse_and_run, cls, arguments), program)


def _parse_and_run(cls: type[T], arguments: Iterable[str], job: JobErrors) -> None:
    job(parse(cls, arguments))
    for error in job.errors:
        if isinstance(error, BrokenPipeError):  # `generate.py ... | head`: the reader has seen enough
            raise error


def parse(cls: type[T], arguments: Iterable[str]) -> T:
    """``key=value`` arguments as a ``cls``: text as it stands, everything else as YAML; lists as ``a,b`` or ``[a,b]``.

    Raises:
        ConfigError: no ``key=value``, an unknown key (with the nearest known one), a value of another type.
    """
    import yaml

    kinds = {field.name: str(field.type) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for argument in arguments:
        name, is_pair, value = argument.partition("=")
        if not is_pair:
            raise ConfigError(f"{argument} is not key=value; --help shows the keys")
        if name == "traceback":
            raise ConfigError(f"{argument} must be true or false")
        if name in values:
            raise ConfigError(f"{name} is given twice")
        if kinds.get(name, "").startswith("tuple") and value not in ("", "null") and not value.startswith("["):
            value = f"[{value}]"
        try:
            values[name] = value if kinds.get(name, "str").startswith("str") else yaml.safe_load(value)
        except yaml.YAMLError:
            values[name] = value
    return from_dict(cls, values)


def help_text(cls: type[Any], usage: str) -> str:
    """The keys with their defaults and meaning."""
    lines = [usage, ""]
    for field in dataclasses.fields(cls):
        lines.append(f"  {f'{field.name}={_typed(field.default)}':<24}{field.metadata['meaning']}")
    return "\n".join([*lines, "", "  traceback=true shows where an error came from", ""])


def _typed(default: Any) -> str:
    """A default as somebody would type it."""
    if default is dataclasses.MISSING:
        return ""
    if isinstance(default, tuple):
        return ",".join(map(_typed, default))
    return {"None": "null", "True": "true", "False": "false"}.get(str(default), str(default))


def check_output(path: str, wanted: Literal["file", "folder"]) -> None:
    """Refuse an ``output`` in a folder that does not exist, or one that is there and not what is ``wanted``.

    Raises:
        ConfigError: the message names the path.
    """
    there = Path(path)
    require(there.absolute().parent.is_dir(), f"output={path} is in a folder that does not exist")
    require(wanted != "file" or not there.is_dir(), f"output={path} is a folder, but must name a file")
    require(wanted != "folder" or not there.is_file(), f"output={path} is a file, but must name a folder")


@contextmanager
def writing(name: str, path: str | Path) -> Iterator[None]:
    """A context that writes to ``path``, which the key ``name`` names: one sentence where that fails.

    Raises:
        ConfigError: the message names key and path.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{name}={path} cannot be written: {error.strerror}") from None


def write(text: str) -> None:
    """``text`` to stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
