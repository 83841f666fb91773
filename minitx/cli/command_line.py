"""Read the command line of a program, and run the program."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from minitx import __version__
from minitx.cli.exit_codes import exit_code
from minitx.cli.hydra_errors import unreadable
from minitx.config import CONFIG_DIR, ConfigError, from_dict
from minitx.config.schema import Config, require

T = TypeVar("T")


class Flags(argparse.ArgumentParser):
    """Parser for the flags of a program. All other words are ``overrides``. An unknown flag is a ConfigError."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("overrides", nargs="*")
        self.add_argument("--version", action="version", version=f"minitx {__version__}")
        self.add_argument("--help", "-h", action="store_true")

    def error(self, message: str) -> NoReturn:
        dashed = message.partition("unrecognized arguments: --")[2]
        advice = f"keys have no dashes: use {dashed}" if "=" in dashed else "--help shows the keys and flags"
        raise ConfigError(f"{message}; {advice}")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Separate flags from overrides.

        Raises:
            ConfigError: a flag is unknown, a word is not UTF-8 text in the locale of this process, or an override has no key.
        """
        for word in words:
            is_text = word == word.encode(errors="ignore").decode()
            require(is_text, f"{word!a} is not UTF-8 text; in a locale without UTF-8, set PYTHONUTF8=1")
            require(not word.startswith("="), f"{word} has no key; --help shows the keys")
        return self.parse_intermixed_args(list(words))


class HydraFlags(Flags):
    """Parser for the flags of ``train.py``: Hydra's flags, except ``--experimental-rerun``, which reads a pickle.

    They are checked here because Hydra prints a page of usage for an unknown flag.
    """

    def __init__(self) -> None:
        super().__init__()
        for names in ("--hydra-help", "--multirun -m", "--run -r", "--resolve", "--shell-completion -sc"):
            self.add_argument(*names.split(), action="store_true")
        self.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
        topics = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
        self.add_argument("--info", "-i", nargs="?", choices=topics)
        for names in ("--package -p", "--config-path -cp", "--config-name -cn", "--config-dir -cd"):
            self.add_argument(*names.split())


def check_flags(arguments: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Check the command line of ``train.py``.

    Returns:
        The arguments with all flags at the end, where Hydra expects them; the words for ``compose.composed``; and whether the
            config of
        ``train`` is printed (``--help`` or ``--cfg job``).

    Raises:
        ConfigError: see ``Flags.read``.
    """
    flags_read = HydraFlags().read(arguments)
    flags = [word for word in arguments if word not in flags_read.overrides]
    overrides = [quoted(word) for word in flags_read.overrides]
    words = [f"{CONFIG_DIR}{flags_read.config_dir}", *overrides] if flags_read.config_dir else overrides
    return [*overrides, *flags], words, flags_read.config_name is None and (flags_read.help or flags_read.cfg == "job")


def quoted(word: str) -> str:
    """Return an override, with its value in quotes if Hydra's grammar cannot read one of its letters (``data.path=小说.txt``).

    A value with special characters of the grammar is not quoted.
    """
    name, _, value = word.partition("=")
    return word if value.isascii() or set(value) & set("'\"\\,()[]{}") else f'{name}="{value}"'


def key(default: Any, meaning: str, *, is_path: bool = False) -> Any:
    """Return a dataclass field for a key.

    Args:
        default: the default value; for a mutable default, a function that returns it.
        meaning: a line for ``--help``.
        is_path: whether to expand a leading ``~``. Not every shell does.
    """
    metadata = {"meaning": meaning, "is_path": is_path}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredConfig(Config):
    """The keys of every program that reads a checkpoint."""

    ckpt_path: str = key(
        dataclasses.MISSING,
        "checkpoint of a run, such as runs/char_lm/.../checkpoints/last.ckpt, or the run's folder",
        is_path=True,
    )
    device: str = key("auto", "cpu, cuda, cuda:1, mps ...; auto: the device that training uses, a GPU if there is one")
    trust: bool = key(False, "build any class that the checkpoint names. This can run arbitrary code")

    @property
    def checkpoint(self) -> str:
        """The file that ``ckpt_path`` names."""
        return checkpoint_of(self.ckpt_path)


def checkpoint_of(path: str) -> str:
    """Return the last checkpoint in the folder of a run, or any other path unchanged."""
    last = os.path.join(path, "checkpoints", "last.ckpt")
    return last if os.path.isfile(last) else path  # False even for a list that is too long for a path


def run_program(cls: type[T], usage: str, program: Callable[[T], None], *, arguments: Sequence[str] | None = None) -> int:
    """Run ``program`` with a config of class ``cls`` from the command line, and return the exit code. Errors are printed as a sentence.

    Args:
        arguments: the command line. Default: ``sys.argv[1:]``.
    """
    words = sys.argv[1:] if arguments is None else arguments

    def read_and_run() -> None:
        flags = Flags().read(words)
        if flags.help:
            write(help_text(cls, usage))
        else:
            program(parse(cls, [word for word in flags.overrides if word not in ("traceback=true", "traceback=false")]))

    return exit_code(read_and_run)


def parse(cls: type[T], overrides: Iterable[str]) -> T:
    """Parse ``key=value`` overrides in Hydra's syntax as a ``cls``. ``a.b=1`` sets an entry of the mapping ``a``.

    If Hydra's grammar cannot read the value of a string key (``prompt=Hello, world!``), the value is taken literally.

    Raises:
        ConfigError: an override is not ``key=value``, a key is unknown (the message suggests a similar one), or a value has the
            wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    read: set[str] = set()
    for override in overrides:
        name, is_pair, _ = override.lstrip("+").partition("=")
        require(bool(is_pair), unreadable(override))
        require(name not in read, f"{name} is set twice")
        read.add(name)
        first, *nested = name.split(".")
        field = fields.get(first)
        value = _value(override, is_text=field is None or str(field.type).startswith("str"))
        if field is not None and field.metadata["is_path"] and isinstance(value, str):
            value = os.path.expanduser(value)
        for part in reversed(nested):
            value = {part: value}
        earlier = values.get(first, {})
        require(not nested or isinstance(earlier, dict), f"{first} is set twice")
        values[first] = {**earlier, **value} if nested else value
    return from_dict(cls, values)


def _value(override: str, *, is_text: bool) -> Any:
    """Return the value of an override as ``train.py`` reads it."""
    name, _, text = override.partition("=")
    if is_text and text[:1] not in ("'", '"') and text != "null":
        return text
    try:
        parsed = OverridesParser.create().parse_override(quoted(override))
    except HydraException:
        if is_text:
            return text
        raise ConfigError(unreadable(override)) from None
    require(not parsed.is_sweep_override(), f"{override} has several values: write '{name}=[...]' for a list")
    value = parsed.value()
    return getattr(value, "text", value)  # a string in quotes is an object with the attribute text


def help_text(cls: type[Any], usage: str) -> str:
    """Return the text of ``--help``: usage, and keys with their defaults and meanings."""
    lines = [usage, ""]
    for field in dataclasses.fields(cls):
        default = "" if field.default is dataclasses.MISSING else json.dumps(field.default).strip('"')
        lines.append(f"  {f'{field.name}={default}':<24}{field.metadata['meaning']}")
    return "\n".join([*lines, "", "  traceback=true shows where an error came from", ""])


def check_output(path: str, *endings: str) -> None:
    """Check that ``path``, the value of ``output``, can be written and has one of ``endings`` (if any are passed).

    Raises:
        ConfigError: its folder does not exist, it is a folder itself, or it has another ending.
    """
    require(Path(path).absolute().parent.is_dir(), f"output={path} is in a folder that does not exist")
    require(not os.path.isdir(path), f"output={path} is a folder, but must name a file")
    fits = not endings or Path(path).suffix.lower() in endings
    require(fits, f"output={path} must end in {' or '.join(endings)}")


@contextmanager
def refusing(prefix: str = "", kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """A context that turns errors of these types into a ConfigError whose message begins with ``prefix``."""
    try:
        yield
    except kinds as error:
        raise ConfigError(f"{prefix}{getattr(error, 'strerror', None) or error}") from error


def writing(path: str | Path, *kinds: type[Exception]) -> AbstractContextManager[None]:
    """A context for writing to ``path``, the value of ``output``. It turns ``OSError`` and errors of ``kinds`` into ConfigErrors."""
    return refusing(f"output={path} cannot be written: ", (OSError, *kinds))


def write(text: str) -> None:
    """Write ``text`` to stdout and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()
