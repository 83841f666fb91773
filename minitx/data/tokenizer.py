"""Tokenizers: characters, byte-level BPE, and any ``tokenizer.json``, all through the package ``tokenizers``.

A checkpoint stores its tokenizer as plain data (``to_dict``). ``char`` and ``bpe`` are learned from the training split only.
A mark is a token that no text contains: ``pad``, ``bos``, ``eos``, ``mask`` or ``cls``.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from minitx.config import ConfigError
from minitx.config.schema import first_line, require

log = logging.getLogger(__name__)
END_OF_TEXT = "<|endoftext|>"
REPLACEMENT = "\ufffd"
UNKNOWN_TOKEN = "<unk>"
LONGEST_WORD = 100_000
LEARNED = ("char", "bpe")
"""The kinds of tokenizers that ``train_tokenizer`` learns from a text."""

# for marks that a tokenizer's folder does not name. The first name is ours; the others are common in published models
NAMES_OF_MARKS = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
    "bos": ("<bos>", "<s>", "<|begin_of_text|>"),
    "eos": ("<eos>", "</s>", END_OF_TEXT, "<|end_of_text|>", "[SEP]"),
    "mask": ("<mask>", "[MASK]"),
    "cls": ("<cls>", "[CLS]", "<s>"),
}


class Tokenizer:
    """A ``tokenizer.json``. A text never becomes a mark or another special token.

    The names of special tokens in a text are read as plain characters. If the vocabulary has such a name as a word, as T5's has
    ``</s>``, a text with this name is an error. The file's padding, truncation and special tokens around a text are not
    applied. Batches are encoded on all cores. A character model (``train_tokenizer("char", ...)``) looks its ids up in a table.

    Args:
        serialized: the content of a ``tokenizer.json`` with any model.
        chat_template: a chat template, or None.
        special_tokens: the texts of special tokens by role, such as ``pad_token``. They are the marks; other marks are found by name.

    Raises:
        ValueError: ``tokenizers`` cannot read ``serialized``.

    Attributes:
        vocab_size: V, the largest id plus one.
        mark_ids: the ids of the marks that this tokenizer has. Without ``eos_token``, ``sep_token`` is the end mark.
        characters: the characters that a character model knows, sorted; None for other models.
        chat_template: the chat template in the tokenizer's folder, or None.
        special_tokens: the texts of special tokens by role, from ``tokenizer_config.json`` and ``special_tokens_map.json`` in that folder.
    """

    def __init__(
        self, serialized: str, chat_template: str | None = None, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self._model = _read_model(serialized)
        self.chat_template, self.special_tokens = chat_template, dict(special_tokens or {})
        vocab = self._model.get_vocab()
        self.vocab_size = max(vocab.values(), default=-1) + 1
        unknown = {UNKNOWN_TOKEN, "[UNK]", getattr(self._model.model, "unk_token", None)}
        added = {token.content for token in self._model.get_added_tokens_decoder().values()}
        stated = {mark: text for mark, text in marks_named(self.special_tokens).items() if text in vocab}
        # words of the vocabulary
        self._model.add_special_tokens([text for text in stated.values() if text not in added | unknown])
        tokens = self._model.get_added_tokens_decoder()
        self.mark_ids = _ids_of_marks({token.content: i for i, token in tokens.items()}, stated)
        marks = self.mark_ids.values()
        self._never = np.zeros(self.vocab_size, dtype=bool)  # True for ids that no text may become
        self._never[[i for i, token in tokens.items() if (token.special or i in marks) and token.content not in unknown]] = True
        self.characters = _characters_of(self._model)
        if self.characters is not None:
            codepoints = [ord(character) for character in self.characters]
            self._table = np.zeros(max(codepoints, default=0) + 2, dtype=np.uint32)  # the last entry is for unknown characters
            self._table[codepoints] = np.arange(1, len(codepoints) + 1, dtype=np.uint32)

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[str, str | None, dict[str, str]]]:
        # a pickled tokenizers.Tokenizer would lose encode_special_tokens
        return type(self), (self._model.to_str(), self.chat_template, self.special_tokens)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of ``text``, shape (number of tokens,), uint32. An unknown character of a character model is 0.

        Raises:
            ConfigError: the text contains the name of a special token, and the vocabulary has this name as a word.
        """
        if self.characters is None:
            return self.encode_batch([text])[0]
        codepoints = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        return self._table[np.minimum(codepoints, len(self._table) - 1)]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return ``encode`` of every text."""
        if self.characters is not None:
            return [self.encode(text) for text in texts]
        encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        encoded = [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        for text, ids in zip(texts, encoded, strict=True):
            if self._never[ids].any():
                name = self._model.id_to_token(int(ids[self._never[ids]][0]))
                raise ConfigError(
                    f"data.tokenizer would read its special token {name} in the text {text!r:.60}, because its vocabulary has {name} as a "
                    "word: remove it from the text, or use another tokenizer"
                )
        return encoded

    def encode_sections(self, sections: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids (N,) of texts with special tokens between them, and the characters (start, end) of each id, (N, 2).

        Characters are counted in the joined sections. The joined text is encoded at once, so a tokenizer that begins a text with a space
        adds only one. If a text contains the name of a special token, or a form that the normaliser turns into one (``</S>``), each
        section is encoded separately and the name stays text.

        Args:
            sections: text, special token, text, and so on to the last text. A text may be "".

        Raises:
            ConfigError: see ``encode``.
        """
        special = [self._model.token_to_id(name) for name in sections[1::2]]
        return self._encode_joined(sections, special) or self._encode_each(sections, special)

    def _encode_joined(self, sections: Sequence[str], special: Sequence[int | None]) -> tuple[np.ndarray, np.ndarray] | None:
        """Encode the joined sections at once; None if a text would become a special token."""
        if self.characters is not None or any(name in text for text in sections[::2] for name in self._special):
            return None
        encoding = self._of_whole.encode("".join(sections), add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.uint32)
        spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        marks = self._never[ids]
        spans[marks, 1] = spans[marks, 0] + 1  # without white space after it that belongs to the token (rstrip)
        return (ids, spans) if ids[marks].tolist() == [id for id in special if self._never[id]] else None

    def _encode_each(self, sections: Sequence[str], special: Sequence[int | None]) -> tuple[np.ndarray, np.ndarray]:
        """Encode every section separately."""
        ids, spans, before = list[np.ndarray](), list[np.ndarray](), 0
        for i, section in enumerate(sections):
            each: Any = np.arange(len(section))[:, None] + (0, 1)
            if i % 2:
                each = [(0, len(section))]
            elif self.characters is None:
                each = self._model.encode(section, add_special_tokens=False).offsets
            ids.append(np.array(special[i // 2 : i // 2 + 1]) if i % 2 else self.encode(section))
            spans.append(before + np.array(each, dtype=np.int64).reshape(-1, 2))
            before += len(section)
        return np.concatenate(ids).astype(np.uint32), np.concatenate(spans)

    @functools.cached_property
    def _special(self) -> list[str]:
        """The names of the special tokens."""
        return [token.content for token in self._model.get_added_tokens_decoder().values() if token.special]

    @functools.cached_property
    def _of_whole(self) -> tokenizers.Tokenizer:
        """The tokenizer that reads the name of a special token in a text as this token."""
        return tokenizers.Tokenizer.from_str(self._model.to_str())

    def decode(self, ids: Iterable[int], *, skip_marks: bool = False) -> str:
        """Return the text of ``ids``.

        Bytes that are not UTF-8, and the unknown character of a character model, become U+FFFD. A mark becomes its name,
        or nothing with ``skip_marks``. An id without a token, as a model with a padded vocabulary may generate, becomes nothing.

        Raises:
            ValueError: a negative id.
        """
        return self._model.decode(_not_negative(ids), skip_special_tokens=skip_marks)

    def token_bytes(self, ids: Iterable[int]) -> list[bytes]:
        """Return the UTF-8 bytes of each of ``ids``. A mark gives the bytes of its name.

        If the vocabulary is not byte-level, the bytes are the text of the piece, with a space for ``▁`` and the byte itself for
        ``<0xE4>``. An id without a token, such as 7, gives ``<7>``.

        Raises:
            ValueError: a negative id.
        """
        marks = {i: token.content for i, token in self._model.get_added_tokens_decoder().items()}
        letters = _bytes_of_letters() if "ByteLevel" in self._decoder else {}

        def piece(id: int) -> bytes:
            text = marks.get(id) or self._model.id_to_token(id) or f"<{id}>"
            if id not in marks and letters.keys() >= set(text):
                return bytes(letters[letter] for letter in text)
            if "ByteFallback" in self._decoder and re.fullmatch("<0x[0-9A-F]{2}>", text):
                return bytes.fromhex(text[3:5])
            return (text.replace("▁", " ") if "▁" in self._decoder else text).encode()

        return [piece(id) for id in _not_negative(ids)]

    @functools.cached_property
    def unknown_id(self) -> int | None:
        """The id of characters that the tokenizer does not know, or None if it knows all."""
        model = json.loads(self._model.to_str())["model"]
        name = model.get("unk_token")
        unknown = model.get("unk_id") if name is None else self._model.token_to_id(name)
        return None if unknown in self.mark_ids.values() else unknown  # GPT-2 names its end mark, but every byte is known

    @functools.cached_property
    def _decoder(self) -> str:
        """The settings of the decoder in the JSON."""
        return str(json.loads(self._model.to_str())["decoder"])

    def save(self, path: str | Path) -> None:
        """Write a ``tokenizer.json`` that ``load_tokenizer`` and ``tokenizers.Tokenizer.from_file`` read."""
        self._model.save(str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Tokenizer:
        """Make a tokenizer from the result of ``to_dict``.

        Raises:
            ValueError: ``values`` is not a result of ``to_dict``.
        """
        if values.get("kind") != "tokenizers":
            raise ValueError(f"tokenizer kind={values.get('kind')} must be tokenizers")
        return cls(values["json"], values.get("chat_template"), values.get("special_tokens"))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that ``from_dict`` turns into an equal tokenizer."""
        optional = {"chat_template": self.chat_template, "special_tokens": self.special_tokens}
        present = {name: value for name, value in optional.items() if value}
        return {"kind": "tokenizers", "json": self._model.to_str(), **present}


def _read_model(serialized: str) -> tokenizers.Tokenizer:
    try:
        model = tokenizers.Tokenizer.from_str(serialized)
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"tokenizers cannot read the file: {first_line(error)}") from None
    model.no_padding()
    model.no_truncation()
    model.encode_special_tokens = True  # read special tokens in a text as text; the JSON does not store it
    return model


def _ids_of_marks(ids_of: Mapping[str, int], stated: Mapping[str, str]) -> dict[str, int]:
    """The ids of the marks, from the ids of special tokens by their texts. ``stated`` has the texts of some marks."""
    names_of = NAMES_OF_MARKS | {mark: (text,) for mark, text in stated.items()}
    candidates = {mark: [ids_of[name] for name in names if name in ids_of] for mark, names in names_of.items()}
    return {mark: ids[0] for mark, ids in candidates.items() if ids}


def marks_named(special_tokens: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of marks from the texts of special tokens by role.

    >>> marks_named({"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"})
    {'eos': '[SEP]', 'cls': '[CLS]'}
    """
    texts = {mark: special_tokens.get(f"{mark}_token") for mark in NAMES_OF_MARKS}
    texts["eos"] = texts["eos"] or special_tokens.get("sep_token")
    return {mark: text for mark, text in texts.items() if text}


def warn_of_unknown(unknown: int, tokens: int, source: str) -> None:
    """Log the share of training tokens that stand for characters unknown to the tokenizer."""
    if unknown:
        share = f"{unknown / tokens:.2g}"
        log.warning("a share of %s of the tokens of %s is <unk>: the tokenizer does not know these characters", share, source)


def count_unknown(tokenizer: Tokenizer, rows: Iterable[Any], source: str) -> None:
    """Call ``warn_of_unknown`` for rows of ids."""
    if tokenizer.unknown_id is not None:
        ids = np.concatenate([np.asarray(row) for row in rows])
        warn_of_unknown(int(np.count_nonzero(ids == tokenizer.unknown_id)), len(ids), source)


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of the tokenizer's plain data. Equal fingerprints mean equal ids."""
    ids = {name: value for name, value in tokenizer.to_dict().items() if name in ("kind", "json")}
    return hashlib.sha256(json.dumps(ids, sort_keys=True).encode()).hexdigest()


def train_tokenizer(kind: str, chunks: Iterable[str], *, vocab_size: int = 0, marks: Sequence[str] = ()) -> Tokenizer:
    """Learn a tokenizer from a text.

    ``char`` has one id per character: 0 for unknown characters, then the sorted characters, then the marks. ``bpe`` is byte-level
    BPE (Radford et al. 2019, GPT-2, section 2.2). It starts from the 256 bytes, so every text can be encoded and decoded exactly. It
    also has the mark ``<|endoftext|>``.

    Args:
        kind: ``char`` or ``bpe``.
        chunks: the text in parts. ``bpe`` never merges across two chunks.
        vocab_size: the number of ids of ``bpe``. It is smaller if no further pair occurs twice in the text. ``char`` ignores it.
        marks: the marks to add, of ``pad``, ``bos``, ``eos``, ``mask``, ``cls``.

    Raises:
        ConfigError: ``bpe`` would take hours for a word, because the text has no white space.
        ValueError: another kind, or a ``vocab_size`` of ``bpe`` too small for the 256 bytes and the marks.
        KeyError: an unknown mark.

    >>> tokenizer = train_tokenizer("char", ["hello"], marks=["eos"])
    >>> tokenizer.encode("hole?").tolist(), tokenizer.mark_ids
    ([2, 4, 3, 1, 0], {'eos': 5})
    >>> tokenizer.decode([2, 1, 3, 3, 4, 5], skip_marks=True)
    'hello'
    """
    if kind not in LEARNED:
        raise ValueError(f"kind={kind} must be {' or '.join(LEARNED)}")
    names = [NAMES_OF_MARKS[mark][0] for mark in marks]
    if kind == "bpe":
        return Tokenizer(_byte_pairs(_with_spaces(chunks), vocab_size, [END_OF_TEXT, *names]).to_str())
    return Tokenizer(_character_model(set(itertools.chain.from_iterable(chunks)), names).to_str())


def _with_spaces(chunks: Iterable[str]) -> Iterator[str]:
    """Yield ``chunks``. Refuse a word so long that BPE, which merges within words, would take hours."""
    for chunk in chunks:
        longest = max(map(len, chunk.split()), default=0)
        if longest > LONGEST_WORD:
            raise ConfigError(
                f"data.tokenizer=bpe cannot learn from a word of more than {LONGEST_WORD} characters, got {longest} without white space: "
                "use data.tokenizer=char"
            )
        yield chunk


def _byte_pairs(chunks: Iterable[str], vocab_size: int, special: list[str]) -> tokenizers.Tokenizer:
    least = 256 + len(special)
    require(vocab_size >= least, f"vocab_size={vocab_size} must be at least {least}: 256 bytes and {' '.join(special)}")
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    model.train_from_iterator(chunks, trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=2, **options))
    return model


def _character_model(characters: Iterable[str], special: Sequence[str]) -> tokenizers.Tokenizer:
    """A model of whole words; every character is a word."""
    words = [UNKNOWN_TOKEN, *sorted(characters), *special]
    model = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN_TOKEN))
    model.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    model.decoder = decoders.Replace(UNKNOWN_TOKEN, REPLACEMENT)
    model.add_special_tokens(list(special))
    return model


def _characters_of(model: tokenizers.Tokenizer) -> str | None:
    """The sorted characters if ``_character_model`` makes exactly this model from them, else None."""
    if not isinstance(model.model, models.WordLevel):
        return None
    characters = "".join(sorted(word for word in model.get_vocab() if len(word) == 1))
    special = [token.content for _, token in sorted(model.get_added_tokens_decoder().items())]
    return characters if _character_model(characters, special).to_str() == model.to_str() else None


def require_marks(tokenizer: Tokenizer, *names: str) -> list[int]:
    """Return the ids of these marks.

    Raises:
        ConfigError: the tokenizer does not have a mark that is needed.
    """
    missing = [name for name in names if name not in tokenizer.mark_ids]
    if missing:
        has = ", ".join(tokenizer.mark_ids) or "none"
        raise ConfigError(f"data.tokenizer has no {missing[0]} token, but this data needs it; the tokenizer has: {has}")
    return [tokenizer.mark_ids[name] for name in names]


def encode_known(tokenizer: Tokenizer, text: str, name: str) -> list[int]:
    """Return the ids of ``text``, the value of the key ``name``.

    Raises:
        ConfigError: a tokenizer of characters does not know a character; see also ``Tokenizer.encode``.
    """
    known: str = tokenizer.characters or text
    for character in text:
        require(
            character in known,
            f"{name} has the character {character!r} (U+{ord(character):04X}), which is not among the {len(known)} of the tokenizer",
        )
    return tokenizer.encode(text).tolist()


def _not_negative(ids: Iterable[int]) -> list[int]:
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
    require(not (array < 0).any(), f"ids must not be negative, got {array.min(initial=0)}")
    return array.tolist()


def _bytes_of_letters() -> dict[str, int]:
    """The letters for bytes in a byte-level vocabulary (GPT-2). A printable byte is its own letter, the n-th other byte is chr(256 + n)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class TextStream:
    """Decode ids one at a time. Each call returns the new text, without incomplete characters.

    A token of byte-level BPE, or a byte of Llama's vocabulary, may end inside a character. The result of ``decode`` then ends with one
    or several U+FFFD, and the stream waits for the next token or ``flush``. (``tokenizers.decoders.DecodeStream`` has no ``flush`` and
    loses the character.)

    Args:
        decode: a function from ids to text, for example ``Tokenizer.decode``.

    >>> stream = TextStream(lambda ids: bytes(ids).decode("utf-8", "replace"))
    >>> [stream.push(byte) for byte in "né".encode()], stream.flush()
    (['n', '', 'é'], '')
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # decoders treat the beginning of a text differently, so the last complete ids are decoded again as context
        self._context: list[int] = []
        self._open: list[int] = []
        self._sent = 0

    def push(self, id: int) -> str:
        """Return the text that ``id`` completes. It may be empty."""
        self._open.append(id)
        text = self._decode(self._context + self._open)
        whole = len(text.rstrip(REPLACEMENT))
        new, self._sent = text[self._sent : whole], max(self._sent, whole)
        if new and whole == len(text):  # without text, an id gives the next one no context
            self._context, self._open = self._open, []
            self._sent = len(self._decode(self._context))
        return new

    def flush(self) -> str:
        """Return the remaining text, with U+FFFD for an incomplete character. The next ``push`` begins a new text."""
        rest = self._decode(self._context + self._open)[self._sent :]
        self._context, self._open, self._sent = [], [], 0
        return rest
