"""The command lines of the other programs. A dataclass defines the keys, arguments have Hydra's syntax, and ``--help`` explains the keys."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from minitx import __version__
from minitx.cli.errors import exit_code
from minitx.config import ConfigError, from_dict
from minitx.config.checks import Config, require

T = TypeVar("T")


def key(default: Any, meaning: str) -> Any:
    """Return a field with a default (for a mutable one, a function without arguments) and a line about its meaning."""
    if callable(default):
        return dataclasses.field(default_factory=default, metadata={"meaning": meaning})
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredConfig(Config):
    """The keys of every program that reads a checkpoint."""

    ckpt_path: str = key(dataclasses.MISSING, "checkpoint of a run, such as runs/char_lm/.../checkpoints/last.ckpt")
    device: str = key("auto", "cpu, cuda, cuda:1 ...; auto uses a GPU if there is one")
    trust: bool = key(False, "build any class that the checkpoint names, which can run any code")


def run_program(cls: type[T], usage: str, program: Callable[[T], None]) -> int:
    """Run ``program`` with a config of class ``cls`` from the command line. Errors are printed as one sentence. Return the exit code."""
    arguments = [word for word in sys.argv[1:] if word not in ("traceback=true", "traceback=false")]
    if {"--help", "-h"} & set(arguments):
        return exit_code(lambda: write(help_text(cls, usage)))
    if "--version" in arguments:
        return exit_code(lambda: write(f"minitx {__version__}\n"))
    return exit_code(lambda: program(parse(cls, arguments)))


def parse(cls: type[T], arguments: Iterable[str]) -> T:
    """Parse ``key=value`` arguments in Hydra's syntax as a ``cls``. ``a.b=1`` sets an entry of the mapping ``a``.

    If Hydra's grammar cannot read the value of a text key (``prompt=Hello, world!``), it is used as it is.

    Raises:
        ConfigError: an argument is not ``key=value``, a key is unknown (the message suggests a similar one), or a value has
            another type.
    """
    kinds = {field.name: str(field.type) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for argument in arguments:
        name, is_pair, value = argument.lstrip("+").partition("=")
        if not is_pair:
            raise ConfigError(f"{argument} is not key=value; --help shows the keys")
        first, *nested = name.split(".")
        if first in values and not nested:
            raise ConfigError(f"{name} is given twice")
        kind = kinds.get(first, "str")
        if kind.startswith("tuple") and value not in ("", "null") and not value.startswith("["):
            value = f"[{value}]"
        found = _read(name, value, is_text=kind.startswith("str"))
        for part in reversed(nested):
            found = {part: found}
        values[first] = {**values.get(first, {}), **found} if nested else found
    return from_dict(cls, values)


def _read(name: str, value: str, *, is_text: bool) -> Any:
    """A value as Hydra reads it on the command line of ``train.py``."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if is_text and value[:1] not in ("'", '"') and value != "null":
        return value
    try:
        found = OverridesParser.create().parse_override(f"{name}={value}").value()
    except HydraException:
        if is_text:
            return value
        raise ConfigError(f"{name}={value} cannot be read: write it as on the command line of train.py") from None
    return getattr(found, "text", found)  # a text in quotes


def help_text(cls: type[Any], usage: str) -> str:
    """Return the keys with their defaults and meaning."""
    lines = [usage, ""]
    for field in dataclasses.fields(cls):
        default = "" if field.default is dataclasses.MISSING else json.dumps(field.default).strip('"')
        lines.append(f"  {f'{field.name}={default}':<24}{field.metadata['meaning']}")
    return "\n".join([*lines, "", "  traceback=true shows where an error came from", ""])


def check_output(path: str) -> None:
    """Check that the folder of ``output`` exists, and that ``output`` is not a folder.

    Raises:
        ConfigError: the message names the path.
    """
    require(Path(path).absolute().parent.is_dir(), f"output={path} is in a folder that does not exist")
    require(not Path(path).is_dir(), f"output={path} is a folder, but must name a file")


@contextmanager
def writing(name: str, path: str | Path) -> Iterator[None]:
    """A context for writing to ``path``, the value of the key ``name``. A failure becomes a ConfigError of one sentence.

    Raises:
        ConfigError: the message names key and path.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{name}={path} cannot be written: {error.strerror}") from None


def write(text: str) -> None:
    """Write ``text`` to stdout and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()
