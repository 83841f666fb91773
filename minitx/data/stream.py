"""Decode a text while its tokens are still being generated."""

from __future__ import annotations

from collections.abc import Callable

from minitx.data.tokenizers import REPLACEMENT


class TextStream:
    """Decode ids one at a time. Each call returns the new text, without incomplete characters.

    A token of byte-level BPE may end inside a character. ``decode`` then ends with U+FFFD, and the stream waits for the next
    token or ``flush``. (``tokenizers.decoders.DecodeStream`` has no ``flush`` and loses the character.)

    Args:
        decode: a function from ids to text, for example ``Tokenizer.decode``.

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
        """Return the text that ``id`` completes. It may be empty."""
        self._open.append(id)
        text = self._decode(self._context + self._open)
        whole = len(text) - text.endswith(REPLACEMENT)
        new, self._sent = text[self._sent : whole], max(self._sent, whole)
        if whole == len(text):
            self._context, self._open = self._open, []
            self._sent = len(self._decode(self._context))
        return new

    def flush(self) -> str:
        """Return the remaining text, with U+FFFD for an incomplete character. The next ``push`` begins a new text."""
        rest = self._decode(self._context + self._open)[self._sent :]
        self._context, self._open, self._sent = [], [], 0
        return rest
