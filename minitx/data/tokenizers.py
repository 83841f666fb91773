"""Tokenizers: characters, byte-level BPE, and those of others from their ``tokenizer.json``.

All are plain data (``to_dict``), so that a checkpoint carries its own, and ours learn from the training split alone.
Marks are tokens that no text contains: ``pad``, ``bos``, ``eos``, ``mask`` and ``cls``, for the tasks that need them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from minitx.config import ConfigError
from minitx.config.checks import first_line

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
REPLACEMENT = "\ufffd"
UNKNOWN = "<unk>"
LONGEST_WORD = 100_000
ONE_CHARACTER = r"[\s\S]"
# ours first, then what the usual models call them
NAMES_OF_MARKS = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
    "bos": ("<bos>", "<s>", "<|begin_of_text|>"),
    "eos": ("<eos>", "</s>", END_OF_TEXT, "<|end_of_text|>", "[SEP]"),
    "mask": ("<mask>", "[MASK]"),
    "cls": ("<cls>", "[CLS]", "<s>"),
}


class Tokenizer(Protocol):
    """What every tokenizer can do.

    ``mark_ids`` maps the marks that it has (of ``pad``, ``bos``, ``eos``, ``mask``, ``cls``) to their ids.
    """

    mark_ids: dict[str, int]

    @property
    def vocab_size(self) -> int:
        """V, the number of ids."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``, shape (number of tokens,), uint32."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """``encode`` of every text."""

    def decode(self, ids: Iterable[int], *, skip_marks: bool = False) -> str:
        """The text of ``ids``, marks by their names or left out."""

    def token_bytes(self, ids: Iterable[int]) -> list[bytes]:
        """The UTF-8 bytes that each of ``ids`` stands for, marks by their names; see ``token_texts``."""

    def save(self, path: str | Path) -> None:
        """Write a ``tokenizer.json`` that ``load_tokenizer`` and ``tokenizers.Tokenizer.from_file`` read."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data from which ``from_dict`` makes an equal tokenizer."""


def from_dict(values: Mapping[str, Any]) -> CharTokenizer | BPETokenizer:
    """The tokenizer that ``to_dict`` wrote.

    Raises:
        ValueError: ``kind`` is neither ``char`` nor ``bpe``.
    """
    if values.get("kind") == "char":
        return CharTokenizer(values["characters"], values.get("marks", ()))
    if values.get("kind") == "bpe":
        return BPETokenizer(values["json"])
    raise ValueError(f"tokenizer kind={values.get('kind')} is not known: one of char, bpe")


def fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 of the tokenizer's plain data: equal fingerprints mean equal ids."""
    return hashlib.sha256(json.dumps(tokenizer.to_dict(), sort_keys=True).encode()).hexdigest()


def train_tokenizer(
    kind: Literal["char", "bpe"], chunks: Iterable[str], *, vocab_size: int, marks: Sequence[str] = ()
) -> CharTokenizer | BPETokenizer:
    """A tokenizer of ``kind`` learnt from a text given in chunks; ``vocab_size`` bounds ``bpe``.

    Raises:
        ConfigError: a word that ``bpe`` would take hours over.
    """
    if kind == "char":
        return CharTokenizer.train(chunks, marks)
    return BPETokenizer.train(_with_spaces(chunks), vocab_size, marks)


def _with_spaces(chunks: Iterable[str]) -> Iterator[str]:
    """``chunks`` as they are, as long as byte-level BPE, which learns inside of words, does not take hours over one."""
    for chunk in chunks:
        longest = max(map(len, chunk.split()), default=0)
        if longest > LONGEST_WORD:
            raise ConfigError(
                f"data.tokenizer=bpe cannot learn from a word of {longest} characters, above {LONGEST_WORD}: the text has no "
                "white space there; take data.tokenizer=char"
            )
        yield chunk


def load_tokenizer(path: str | Path) -> CharTokenizer | BPETokenizer:
    """The tokenizer of a ``tokenizer.json``, ours or anyone's (``path`` is the file, or the folder that holds it).

    Raises:
        ConfigError: there is no such file, or ``tokenizers`` cannot read it.
    """
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        serialized = file.read_text(encoding="utf-8")
        return _characters_of(json.loads(serialized)) or BPETokenizer(serialized)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; a tokenizer.json is wanted") from None
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"{file} is no tokenizer.json: {first_line(error)}") from None


def require_marks(tokenizer: Tokenizer, *names: str) -> list[int]:
    """The ids of these marks.

    Raises:
        ConfigError: the tokenizer (a checkpoint's, say) has no such mark.
    """
    missing = [name for name in names if name not in tokenizer.mark_ids]
    if missing:
        has = ", ".join(tokenizer.mark_ids) or "none"
        raise ConfigError(f"the tokenizer has no {missing[0]} token, which this data needs; it has: {has}")
    return [tokenizer.mark_ids[name] for name in names]


def token_texts(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """What each of ``ids`` contributes to their text, by its place among the text's bytes: for axes and lists of tokens.

    A token that holds a part of a character is shown as that character with its share of the bytes: ``你·1/3``, or
    ``你·2-3/3``. A byte that is no UTF-8 where it stands is ``⟨E4⟩``, an unknown character ``<unk>``, a mark its name.

    Raises:
        ValueError: an id outside [0, vocab_size).

    >>> bare = BPETokenizer.train([], 257)
    >>> token_texts(bare, bare.encode("né你"))
    ['n', 'é·1/2', 'é·2/2', '你·1/3', '你·2/3', '你·3/3']
    """
    pieces = tokenizer.token_bytes(ids)
    text = b"".join(pieces).decode("utf-8", "surrogateescape")  # a byte that is no UTF-8 becomes one lone surrogate
    places = []  # of every byte: its character, its number in it and how many it has
    for character in text:
        size = len(character.encode("utf-8", "surrogateescape"))
        places += [(character, i, size) for i in range(size)]
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    return [_share_of_text(places[end - len(piece) : end]) for piece, end in zip(pieces, ends, strict=True)]


def _share_of_text(places: Sequence[tuple[str, int, int]]) -> str:
    shown = ""
    for at, (character, first, size) in enumerate(places):
        if at and first:
            continue  # told with the byte before
        last = min(first + len(places) - at, size)
        if "\udc80" <= character <= "\udcff":
            shown += f"⟨{ord(character) - 0xDC00:02X}⟩"
        elif last - first == size:
            shown += character
        else:
            shown += f"{character}·{first + 1}/{size}" if last - first == 1 else f"{character}·{first + 1}-{last}/{size}"
    return shown


def _bytes_of_letters() -> dict[str, int]:
    """The letters for bytes in a byte-level vocabulary (GPT-2): a printable one is itself, the n-th other is chr(256 + n)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _characters_of(content: Any) -> CharTokenizer | None:
    """The CharTokenizer that saved ``content``, or ``None`` where it was none."""
    if not isinstance(content, dict) or (content.get("pre_tokenizer") or {}).get("pattern") != {"Regex": ONE_CHARACTER}:
        return None
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    marks = [token["content"].strip("<>") for token in content["added_tokens"]]
    return CharTokenizer("".join(tokens[1 : len(tokens) - len(marks)]), marks)


def _names_of(marks: Sequence[str]) -> list[str]:
    unknown = [mark for mark in marks if mark not in NAMES_OF_MARKS]
    if unknown:
        raise ValueError(f"marks={unknown} are not known: {', '.join(NAMES_OF_MARKS)}")
    return [NAMES_OF_MARKS[mark][0] for mark in marks]


def _checked(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
    if array.size and not (array.min() >= 0 and array.max() < vocab_size):
        raise ValueError(f"ids must lie in [0, {vocab_size}), got {array.min()} … {array.max()}")
    return array


class CharTokenizer:
    """One id a character: 0 is the unknown character, then the sorted distinct ``characters``, then the ``marks``.

    An unknown character decodes to U+FFFD.

    >>> tokenizer = CharTokenizer("hello")
    >>> tokenizer.encode("hole?").tolist()
    [2, 4, 3, 1, 0]
    >>> tokenizer.decode([2, 1, 3, 3, 4])
    'hello'
    """

    unk_id = 0

    def __init__(self, characters: str, marks: Sequence[str] = ()) -> None:
        self.characters = "".join(sorted(set(characters)))
        names, codepoints = _names_of(marks), [ord(c) for c in self.characters]
        self.mark_ids = {mark: len(codepoints) + 1 + i for i, mark in enumerate(marks)}
        self._table = np.zeros(max(codepoints, default=0) + 2, dtype=np.uint32)  # the last entry stays unknown
        self._table[codepoints] = np.arange(1, len(codepoints) + 1, dtype=np.uint32)
        self._texts = np.array([REPLACEMENT, *self.characters, *names], dtype=object)  # a string array loses U+0000

    @classmethod
    def train(cls, chunks: Iterable[str], marks: Sequence[str] = ()) -> CharTokenizer:
        """Collect the characters of a text given in chunks."""
        found: set[str] = set()
        for chunk in chunks:
            found.update(chunk)
        return cls("".join(found), marks)

    @property
    def vocab_size(self) -> int:
        """Number of ids: the unknown character, the characters and the marks."""
        return len(self._texts)

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``, one a character, uint32: a look-up by code point."""
        codepoints = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        return self._table[np.minimum(codepoints, len(self._table) - 1)]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """``encode`` of every text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int], *, skip_marks: bool = False) -> str:
        """The characters of ``ids``, marks by their names or left out.

        Raises:
            ValueError: an id outside [0, vocab_size).
        """
        known = _checked(ids, self.vocab_size)
        kept = known[known <= len(self.characters)] if skip_marks else known
        return "".join(self._texts[kept].tolist())

    def token_bytes(self, ids: Iterable[int]) -> list[bytes]:
        """The UTF-8 bytes of each id's character, marks and the unknown character (``<unk>``) by their names.

        Raises:
            ValueError: an id outside [0, vocab_size).
        """
        known = _checked(ids, self.vocab_size)
        texts = [UNKNOWN if id == self.unk_id else text for id, text in zip(known, self._texts[known], strict=True)]
        return [text.encode("utf-8", "surrogatepass") for text in texts]

    def fingerprint(self) -> str:
        """See ``minitx.data.tokenizers.fingerprint``."""
        return fingerprint(self)

    def to_dict(self) -> dict[str, Any]:
        """``{"kind": "char", "characters": ...}``, with ``marks`` where there are any."""
        marks = {"marks": list(self.mark_ids)} if self.mark_ids else {}
        return {"kind": "char", "characters": self.characters, **marks}

    def save(self, path: str | Path) -> None:
        """Write a ``tokenizer.json`` of the same ids (a WordLevel model over single characters)."""
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

        words = [UNKNOWN, *self._texts[1:].tolist()]
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(ONE_CHARACTER), "isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _names_of(list(self.mark_ids))])
        tokenizer.save(str(path))


class BPETokenizer:
    """Byte-level BPE (Radford et al. 2019, GPT-2 §2.2): every string has ids and comes back exactly.

    The 256 bytes are always in the vocabulary, so nothing is unknown. ``end_id`` is the id of ``<|endoftext|>``, which
    ``encode`` never gives: the same characters in a text are ordinary bytes. So are the marks.

    Args:
        serialized: the ``tokenizer.json`` of Hugging Face's ``tokenizers``; anyone's will do, whatever its model. What
            it says about padding, truncation and marks around a text is not followed.
    """

    def __init__(self, serialized: str) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_str(serialized)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # read special tokens in a text as text; not part of the JSON
        self.end_id = self._tokenizer.token_to_id(END_OF_TEXT)
        added = {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items()}
        found = {mark: [added[name] for name in names if name in added] for mark, names in NAMES_OF_MARKS.items()}
        self.mark_ids = {mark: ids[0] for mark, ids in found.items() if ids}
        self._vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1  # ids may have gaps
        self._reader = _without_marks(self._tokenizer, set(self.mark_ids.values()))

    def __reduce__(self) -> tuple[type[BPETokenizer], tuple[str]]:
        return type(self), (self._tokenizer.to_str(),)  # a copy of theirs would read special tokens in a text again

    @classmethod
    def train(cls, chunks: Iterable[str], vocab_size: int, marks: Sequence[str] = ()) -> BPETokenizer:
        """Learn merges from a text given in chunks, up to ``vocab_size`` ids (fewer where the text has no more pairs).

        Raises:
            ValueError: ``vocab_size`` has no room for 256 bytes, the end mark and ``marks``.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        special = [END_OF_TEXT, *_names_of(marks)]
        if vocab_size < 256 + len(special):
            raise ValueError(
                f"vocab_size={vocab_size} must be at least {256 + len(special)}: 256 bytes and {' '.join(special)}"
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            show_progress=False,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        with _one_thread():
            tokenizer.train_from_iterator(chunks, trainer=trainer)
        return cls(tokenizer.to_str())

    @property
    def vocab_size(self) -> int:
        """Number of ids: 256 bytes, the merges and the marks (of others: the largest id and one)."""
        return self._vocab_size

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``, uint32; never a mark."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """``encode`` of every text."""
        with _one_thread():
            encodings = self._reader.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int], *, skip_marks: bool = False) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD, marks their names (or nothing).

        Raises:
            ValueError: an id outside [0, vocab_size).
        """
        return self._tokenizer.decode(_checked(ids, self.vocab_size).tolist(), skip_special_tokens=skip_marks)

    def token_bytes(self, ids: Iterable[int]) -> list[bytes]:
        """The UTF-8 bytes of each id, marks by their names.

        Of a vocabulary that is not byte-level, the piece as it stands, with spaces for ``▁`` and ``<0xE4>`` as its byte;
        an id that is in a gap of the vocabulary is ``<7>``.

        Raises:
            ValueError: an id outside [0, vocab_size).
        """
        decoder = json.loads(self._tokenizer.to_str())["decoder"] or {}
        kinds = {part["type"] for part in (decoder, *decoder.get("decoders", ())) if "type" in part}
        marks = {i: token.content for i, token in self._tokenizer.get_added_tokens_decoder().items()}
        letters = _bytes_of_letters() if "ByteLevel" in kinds else {}
        single = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if "ByteFallback" in kinds else {}

        def piece(id: int) -> bytes:
            text = marks.get(id) or self._tokenizer.id_to_token(id) or f"<{id}>"
            if id not in marks and letters.keys() >= set(text):
                return bytes(letters[letter] for letter in text)
            return single.get(text) or text.replace("▁", " ").encode()

        return [piece(id) for id in _checked(ids, self.vocab_size).tolist()]

    def fingerprint(self) -> str:
        """See ``minitx.data.tokenizers.fingerprint``."""
        return fingerprint(self)

    def to_dict(self) -> dict[str, Any]:
        """``{"kind": "bpe", "json": tokenizer.json}``."""
        return {"kind": "bpe", "json": self._tokenizer.to_str()}

    def save(self, path: str | Path) -> None:
        """Write the ``tokenizer.json``."""
        self._tokenizer.save(str(path))


def _without_marks(tokenizer: tokenizers.Tokenizer, marks: set[int]) -> tokenizers.Tokenizer:
    """``tokenizer``, or a copy of it that finds no special token and none of ``marks`` in a text.

    ``encode_special_tokens`` keeps out those that are added and special. A mark may also be added as an ordinary token, and
    a vocabulary of whole pieces (Unigram, WordLevel) may itself hold ``</s>``: in the copy its entry has a name that nobody
    can guess.
    """
    added = tokenizer.get_added_tokens_decoder()
    names = {token.content: i for i, token in added.items() if token.special or i in marks}
    read = [tokenizer.encode(text, add_special_tokens=False).ids for name in names for text in (name, f" {name} a")]
    if not {i for ids in read for i in ids} & set(names.values()):
        return tokenizer
    content = json.loads(tokenizer.to_str())
    model = content["model"]
    unknown = model.get("unk_token")
    hidden = {name: uuid.uuid4().hex for name in names if name != unknown}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(name, name): i for name, i in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden.get(name, name), score] for name, score in model["vocab"]]
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in names]
    content["post_processor"] = None
    reader = type(tokenizer).from_str(json.dumps(content))
    reader.encode_special_tokens = True
    return reader


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
