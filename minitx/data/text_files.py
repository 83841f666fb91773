"""Texts: a UTF-8 file or the King James text, in pieces and in lines that are encoded separately."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path

import numpy as np

from minitx.config import ConfigError
from minitx.config.schema import require
from minitx.data.tokenizer import Tokenizer

PIECE = 1 << 22
"""The number of characters of a file that are in memory at once."""


def read_text(path: str | None, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Yield the characters ``start`` to ``stop - 1`` of a file (None: the King James text) in pieces.

    A byte-order mark is dropped, and every line end becomes ``\\n``. A file is read a few megabytes at a time, so memory does not grow
    with its size.

    Raises:
        ConfigError: the package of the King James text has another version, or the user's file is not UTF-8.
    """
    for piece in _pieces_of_file(path):
        yield piece[max(start, 0) : stop]
        start, stop = start - len(piece), None if stop is None else max(stop - len(piece), 0)
        if stop == 0:
            return


def _pieces_of_file(path: str | None) -> Iterator[str]:
    if path is None:
        from minitx.data.king_james import kjv_text  # a text of your own needs none

        yield kjv_text()
        return
    with Path(path).expanduser().open("rb") as raw, TextIOWrapper(raw, encoding="utf-8-sig") as file:
        try:  # a TextIOWrapper makes every line end "\n"
            while piece := file.read(PIECE):
                require("\0" not in piece, f"data.path={path} has a NUL character, as UTF-16 files do; convert it to UTF-8")
                yield piece
        except UnicodeDecodeError as error:
            byte = raw.tell() - len(error.object) + error.start
            raise ConfigError(f"data.path={path} is not UTF-8 at byte {byte}; convert it to UTF-8") from None


def lines_of(pieces: Iterable[str]) -> Iterator[str]:
    """Yield the text of ``pieces`` in parts that give the same tokens if they are encoded separately (``encoder_of_lines``).

    A part ends at a newline between two lines that are not blank, because byte-level BPE never merges across it.

    >>> list(lines_of(["one\\ntw", "o\\n\\nthree"]))
    ['one\\n', 'two\\n\\nthree']
    """
    unfinished: list[str] = []  # the beginning of a part
    for piece in pieces:
        unfinished.append(piece)
        if "\n" in piece:
            *whole, rest = _cut_between_lines("".join(unfinished))
            yield from whole
            unfinished = [rest]
    yield from filter(None, _cut_between_lines("".join(unfinished)))


def encoder_of_lines(tokenizer: Tokenizer) -> Callable[[Sequence[str]], list[np.ndarray]]:
    """Return a function that encodes the parts of ``lines_of``.

    Tokenizers such as Llama's begin each text with a space. With these, the end of another part is put before each part, and its tokens
    are dropped.
    """
    before, together = tokenizer.encode("a\n"), tokenizer.encode("a\na")
    if np.array_equal(together, np.concatenate([before, tokenizer.encode("a")])):
        return tokenizer.encode_batch

    def encode(parts: Sequence[str]) -> list[np.ndarray]:
        encoded = tokenizer.encode_batch([f"a\n{part}" for part in parts])
        stays = [np.array_equal(ids[: len(before)], before) for ids in encoded]  # else a token spans both
        return [
            ids[len(before) :] if ok else tokenizer.encode(part) for part, ids, ok in zip(parts, encoded, stays, strict=True)
        ]

    return encode


def _cut_between_lines(text: str) -> list[str]:
    # the pattern begins with the newline, because a search for a fixed character is fast
    ends = [match.end() for match in re.finditer(r"\n(?<=\S\n)(?=\S)", text)]
    return [text[start:end] for start, end in pairwise([0, *ends, len(text)])]
