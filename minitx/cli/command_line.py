"""Read the command line of a program, and run the program."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from minitx.cli.compose import explaining, find_own_modules, plain
from minitx.cli.exit_codes import exit_code, is_traceback
from minitx.cli.flags import Flags
from minitx.cli.overrides import is_parsed, readable
from minitx.config import ConfigError, from_dict
from minitx.config.part import defaults
from minitx.config.schema import UNIONS, Config, require
from minitx.config.signatures import hints_of

if TYPE_CHECKING:
    from minitx.data.tokenizer import Tokenizer
    from minitx.training.checkpoints import Stored


Options = TypeVar("Options")

FilePath = Annotated[str, "a path: a leading ~ is expanded"]
"""The type of a key of a program whose value is a path."""


class ProgramConfig(Config):
    """The keys of a program."""

    @property
    def changed_keys(self) -> set[str]:
        """The keys whose values are not the defaults."""
        return {name for name, default in defaults(type(self)).items() if getattr(self, name) != default}

    def refuse_together(self, key: str, *others: str) -> None:
        """Raise a ConfigError if ``key`` and one of ``others`` are set."""
        for other in others:
            require(not {key, other} <= self.changed_keys, f"{key} and {other} cannot be combined: remove one of them")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredConfig(ProgramConfig):
    """The keys of every program that reads a checkpoint.

    Attributes:
        ckpt_path: checkpoint of a run, such as runs/char_lm/.../checkpoints/last.ckpt, or the run's folder.
        device: cpu, cuda, cuda:1, mps ...; auto: the device that training uses, a GPU if there is one.
        trust: build any class that the checkpoint names. This can run arbitrary code.
    """

    ckpt_path: FilePath
    device: str = "auto"
    trust: bool = False

    @property
    def checkpoint(self) -> str:
        """The file that ``ckpt_path`` names."""
        return checkpoint_of(self.ckpt_path)


def checkpoint_of(path: str) -> str:
    """Return the last checkpoint in the folder of a run, or any other path unchanged."""
    last = os.path.join(path, "checkpoints", "last.ckpt")
    return last if os.path.isfile(last) else path  # False even for a list that is too long for a path


def open_stored(path: str, *, trust: bool = False, changes: Mapping[str, Any] | None = None) -> Stored:
    """Load the checkpoint ``path``. Modules of the user can be in the current folder.

    Args:
        trust, changes: see ``load_stored``.

    Raises:
        ConfigError: see ``load_stored``.
    """
    from minitx.training.checkpoints import load_stored

    find_own_modules()
    return load_stored(path, trust=trust, changes=changes)


def run_program(
    cls: type[Options], usage: str, program: Callable[[Options], None], *, arguments: Sequence[str] | None = None
) -> int:
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
            program(compose_program(cls, [word for word in flags.overrides if not is_traceback(word)]))

    return exit_code(read_and_run)


def compose_program(cls: type[Options], words: Iterable[str]) -> Options:
    """Return the config of a program other than ``train.py``: a ``cls``, whose fields are the keys.

    The value of a text key is taken literally (``prompt=Hello, world!``), unless it is ``null`` or in quotes.

    Raises:
        ConfigError: an override is not ``key=value``, a key is unknown (the message suggests a similar one), or a value has the
            wrong type.
    """
    hints: dict[str, Any] = hints_of(cls)  # type: ignore[arg-type]  # a class is hashable
    kinds = {name: {hint, *(get_args(hint) if get_origin(hint) in UNIONS else ())} for name, hint in hints.items()}
    config, texts = OmegaConf.create({}), dict[str, Any]()
    with explaining():
        for word in words:
            name, is_pair, value = word.partition("=")
            is_quoted = value[:1] in ("'", '"') and is_parsed(word)
            if is_pair and kinds.get(name, set()) & {str, FilePath} and value != "null" and not is_quoted:
                texts[name] = value
                continue
            (override,) = OverridesParser.create().parse_overrides([readable(word)])
            require(not override.is_sweep_override(), f"{word} has several values: write '{name}=[...]' for a list")
            OmegaConf.update(config, name.lstrip("+"), override.value())
            texts.pop(name, None)
        values = {**plain(config), **texts}
    for name, value in values.items():
        if FilePath in kinds.get(name, set()) and isinstance(value, str):
            values[name] = os.path.expanduser(value)
    return from_dict(cls, values)


def help_text(cls: type, usage: str) -> str:
    """Return the text of ``--help``: usage, and keys with their defaults and meanings."""
    lines, known = [usage, ""], meanings(cls)
    for field in dataclasses.fields(cls):
        default = "" if field.default is dataclasses.MISSING else json.dumps(field.default).strip('"')
        lines.append(f"  {f'{field.name}={default}':<24}{known[field.name]}")
    return "\n".join([*lines, "", "  traceback=true shows where an error came from", ""])


def meanings(cls: type) -> dict[str, str]:
    """Return what the docstrings of a dataclass and of its base classes say about its fields, under ``Attributes``."""
    known = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        for name, meaning in re.findall(r"^ {4}(\w+): (.*(?:\n {8,}.*)*)", text, flags=re.MULTILINE):
            known[name] = re.sub(r"\s+", " ", meaning).rstrip(".")
    return known


def check_output(path: str, *endings: str) -> None:
    """Check that ``path``, the value of ``output``, can be written and has one of ``endings`` (if any are passed).

    Raises:
        ConfigError: its folder does not exist, it is a folder itself, or it has another ending.
    """
    require(Path(path).absolute().parent.is_dir(), f"output={path} is in a folder that does not exist")
    require(not os.path.isdir(path), f"output={path} is a folder, but must name a file")
    if endings and Path(path).suffix.lower() not in endings:
        raise ConfigError(f"output={path} must end in {' or '.join(endings)}")


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


def write_page(page: str, output: str, summary: str = "") -> None:
    """Write an HTML page to ``output``, and ``summary``, path and size to stdout."""
    with writing(output):
        Path(output).write_text(page, encoding="utf-8")
    write(f"{summary}{output}  {len(page.encode()) / 1e6:.2f} MB\n")


def write(text: str) -> None:
    """Write ``text`` to stdout and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()


def encode_text(tokenizer: Tokenizer, text: str, name: str) -> list[int]:
    """Return the ids of ``text``, the value of the key ``name``.

    Raises:
        ConfigError: the text is not UTF-8, or contains a character that is not in the vocabulary.
    """
    from minitx.data.tokenizer import encode_known

    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: character {error.start + 1} cannot be read") from None
    return encode_known(tokenizer, text, name)
