"""Decode a text while its tokens are still being generated."""

from __future__ import annotations

from collections.abc import Callable

from minitx.data.tokenizers import REPLACEMENT


class TextStream:
    """Take ids one at a time and return the text that they add, never a part of a character.

    A token of a byte-level BPE may end inside a character. ``decode`` then shows U+FFFD at the end, and the stream holds
    it back until the next token or ``flush``. (``tokenizers.decoders.DecodeStream`` has no ``flush`` and loses it.)

    Args:
        decode: ids -> text, for example ``Tokenizer.decode``.

    >>> stream = TextStream(lambda ids: bytes(ids).decode("utf-8", "replace"))
    >>> [stream.push(byte) for byte in "né".encode()], stream.flush()
    (['n', '', 'é'], '')
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # decoders differ in what they do at the beginning of a text, so the last whole characters are decoded again
        self._context: list[int] = []
        self._open: list[int] = []
        self._sent = 0

    def push(self, id: int) -> str:
        """Return the text that is complete with ``id``, maybe none."""
        self._open.append(id)
        text = self._decode(self._context + self._open)
        whole = len(text) - text.endswith(REPLACEMENT)
        new, self._sent = text[self._sent : whole], max(self._sent, whole)
        if whole == len(text):
            self._context, self._open = self._open, []
            self._sent = len(self._decode(self._context))
        return new

    def flush(self) -> str:
        """Return what is still held back, a broken character as U+FFFD. The next ``push`` begins a new text."""
        rest = self._decode(self._context + self._open)[self._sent :]
        self._context, self._open, self._sent = [], [], 0
        return rest
