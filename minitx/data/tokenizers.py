"""Tokenizers: characters, and byte-level BPE.

Both are plain data (``to_dict``), so that a checkpoint carries its own, and both learn from the training split alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What both tokenizers can do."""

    @property
    def vocab_size(self) -> int:
        """V, the number of ids."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``, shape (number of tokens,), uint32."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data from which ``from_dict`` makes an equal tokenizer."""


def from_dict(values: Mapping[str, Any]) -> CharTokenizer | BPETokenizer:
    """The tokenizer that ``to_dict`` wrote.

    Raises:
        ValueError: ``kind`` is neither ``char`` nor ``bpe``.
    """
    if values.get("kind") == "char":
        return CharTokenizer(values["characters"])
    if values.get("kind") == "bpe":
        return BPETokenizer(values["json"])
    raise ValueError(f"tokenizer kind={values.get('kind')} is not known: one of char, bpe")


def fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 of the tokenizer's plain data: equal fingerprints mean equal ids."""
    return hashlib.sha256(json.dumps(tokenizer.to_dict(), sort_keys=True).encode()).hexdigest()


def _checked(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
    if array.size and not (array.min() >= 0 and array.max() < vocab_size):
        raise ValueError(f"ids must lie in [0, {vocab_size}), got {array.min()} … {array.max()}")
    return array


class CharTokenizer:
    """One id a character: id 0 is the unknown character, 1 … V−1 are the sorted distinct ``characters``.

    An unknown character decodes to U+FFFD.

    >>> tokenizer = CharTokenizer("hello")
    >>> tokenizer.encode("hole?").tolist()
    [2, 4, 3, 1, 0]
    >>> tokenizer.decode([2, 1, 3, 3, 4])
    'hello'
    """

    unk_id = 0

    def __init__(self, characters: str) -> None:
        self.characters = "".join(sorted(set(characters)))
        codepoints = [ord(c) for c in self.characters]
        self._table = np.zeros(max(codepoints, default=0) + 2, dtype=np.uint32)  # the last entry stays unknown
        self._table[codepoints] = np.arange(1, self.vocab_size, dtype=np.uint32)
        self._characters = np.array([REPLACEMENT, *self.characters], dtype=object)  # a string array loses U+0000

    @classmethod
    def train(cls, chunks: Iterable[str]) -> CharTokenizer:
        """Collect the characters of a text given in chunks."""
        found: set[str] = set()
        for chunk in chunks:
            found.update(chunk)
        return cls("".join(found))

    @property
    def vocab_size(self) -> int:
        """Number of ids: the characters and the unknown one."""
        return len(self.characters) + 1

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``, one a character, uint32: a look-up by code point."""
        codepoints = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        return self._table[np.minimum(codepoints, len(self._table) - 1)]

    def decode(self, ids: Iterable[int]) -> str:
        """The characters of ``ids``.

        Raises:
            ValueError: an id outside [0, vocab_size).
        """
        return "".join(self._characters[_checked(ids, self.vocab_size)].tolist())

    def fingerprint(self) -> str:
        """See ``minitx.data.tokenizers.fingerprint``."""
        return fingerprint(self)

    def to_dict(self) -> dict[str, Any]:
        """``{"kind": "char", "characters": ...}``."""
        return {"kind": "char", "characters": self.characters}


class BPETokenizer:
    """Byte-level BPE (Radford et al. 2019, GPT-2 §2.2): every string has ids and comes back exactly.

    The 256 bytes are always in the vocabulary, so nothing is unknown. ``end_id`` is the id of ``<|endoftext|>``, which
    ``encode`` never gives: the same characters in a text are ordinary bytes.

    Args:
        serialized: the ``tokenizer.json`` of Hugging Face's ``tokenizers``.
    """

    def __init__(self, serialized: str) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_str(serialized)
        self._tokenizer.encode_special_tokens = True  # read special tokens in a text as text; not part of the JSON
        self.end_id = self._tokenizer.token_to_id(END_OF_TEXT)

    @classmethod
    def train(cls, chunks: Iterable[str], vocab_size: int) -> BPETokenizer:
        """Learn merges from a text given in chunks, up to ``vocab_size`` ids (fewer where the text has no more pairs).

        Raises:
            ValueError: ``vocab_size`` has no room for 256 bytes and the end mark.
        """
        if vocab_size < 257:
            raise ValueError(f"vocab_size={vocab_size} must be at least 257: 256 bytes and {END_OF_TEXT}")
        tokenizer = _untrained()
        with _one_thread():
            tokenizer.train_from_iterator(chunks, trainer=_trainer(vocab_size))
        return cls(tokenizer.to_str())

    @property
    def vocab_size(self) -> int:
        """Number of ids: 256 bytes, the merges and the end mark."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``, uint32; never ``end_id``."""
        with _one_thread():
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD, ``end_id`` its name.

        Raises:
            ValueError: an id outside [0, vocab_size).
        """
        return self._tokenizer.decode(_checked(ids, self.vocab_size).tolist(), skip_special_tokens=False)

    def fingerprint(self) -> str:
        """See ``minitx.data.tokenizers.fingerprint``."""
        return fingerprint(self)

    def to_dict(self) -> dict[str, Any]:
        """``{"kind": "bpe", "json": tokenizer.json}``."""
        return {"kind": "bpe", "json": self._tokenizer.to_str()}


def _untrained() -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _trainer(vocab_size: int) -> tokenizers.trainers.BpeTrainer:
    from tokenizers import pre_tokenizers, trainers

    return trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Keep ``tokenizers`` from starting threads, after which it warns at every fork (of a loader's worker, say)."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
