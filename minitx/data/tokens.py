"""Tokenised text on disk: a memory-mapped file of ids, with a JSON file that describes it.

The name of a cache contains the checksum of the text, the tokenizer and the split. The JSON file has the checksum of the ids,
so that a damaged cache is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from minitx.config import ConfigError, CorpusConfig
from minitx.data.baselines import ngram_floors
from minitx.data.corpus import corpus_stem, lines_of, read_text, replacing, sha256_of
from minitx.data.task import name_of, tokenizer_of
from minitx.data.tokenizers import Tokenizer, find_tokenizer, fingerprint, from_dict

logger = logging.getLogger(__name__)

FORMAT = 3
TEXTS_AT_ONCE = 1000
CHARACTERS_TO_LEARN_FROM = 1 << 26
"""The most characters that ``bpe`` learns from, in pieces spread evenly over a longer text."""


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
        """The ids of a slice with step 1, read into memory of their own. Of a mapped file each page that was read stays resident."""
        start, stop, _ = part.indices(len(self))
        offset = (self.start + start) * np.dtype(self.dtype).itemsize
        return np.fromfile(self.path, self.dtype, max(stop - start, 0), offset=offset)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}


def tokenised(
    config: CorpusConfig, folder: Path, tokenizer: Tokenizer | None = None, marks: Sequence[str] = ()
) -> tuple[TokenArray, TokenArray, Tokenizer, dict[str, Any]]:
    """Return the tokens of the text of ``config``, from the cache in ``folder`` if there is one.

    The last ``val_fraction`` of the characters is the validation split, whatever the tokenizer. Files:
    ``<text>-<tokenizer>-val<val_fraction>.bin`` and ``.json``.

    Args:
        config: the text, the tokenizer and the split.
        folder: the folder for caches.
        tokenizer: a tokenizer to use instead of that of ``config``, for example that of a checkpoint.
        marks: the marks of a tokenizer that is learned.

    Returns:
        The ids of training and of validation, the tokenizer, and the record in the JSON file. ``record["splits"][split]`` has
        the numbers of ``tokens``, ``characters``, ``bytes`` (UTF-8) and ``unknown`` characters. ``record["floors"]`` is
        ``ngram_floors`` of the splits.

    Raises:
        ConfigError: the text is missing, not UTF-8, or too short to be split.
    """
    stem, said = corpus_stem(config), name_of(config)
    tokenizer = tokenizer or find_tokenizer(config.tokenizer)
    learned = "-".join(["char" if config.tokenizer == "char" else f"bpe{config.bpe_vocab_size}", *marks])
    path = folder / f"{stem}-{fingerprint(tokenizer)[:16] if tokenizer else learned}-val{config.val_fraction!r}.bin"

    def build() -> dict[str, Any]:
        length, blank = 0, True
        for piece in read_text(config):
            length, blank = length + len(piece), blank and not piece.strip()
        if blank:
            raise ConfigError(f"{said} has no text: {length} characters, none of them but white space")
        cut = int(length * (1 - config.val_fraction))
        if not 0 < cut < length:
            raise ConfigError(f"{said} has {length} characters, too few for a training and a validation split")
        every = -(-cut // CHARACTERS_TO_LEARN_FROM) if config.tokenizer == "bpe" else 1
        made_by = tokenizer_of(config, tokenizer, lines_of(islice(read_text(config, 0, cut), 0, None, every)), marks)
        splits = {"train": lines_of(read_text(config, 0, cut)), "val": lines_of(read_text(config, cut))}
        record = write_ids(path, made_by, splits, made_by.encode_batch)
        if corpus_stem(config) != stem:
            raise ConfigError(f"{said} changed while it was read; start again")
        return {**record, "floors": ngram_floors(*token_arrays(path, record), made_by.vocab_size)}

    return cached(path, said, build)


def cached(
    path: Path, source: str, build: Callable[[], dict[str, Any]]
) -> tuple[TokenArray, TokenArray, Tokenizer, dict[str, Any]]:
    """Return the ids of training and of validation at ``path``, the tokenizer, and the record in the JSON file.

    If the files are missing, damaged or do not fit each other, ``build`` writes them again. ``source`` is the name of the text
    in the log, which warns of characters that the tokenizer does not know.
    """
    found, beside = None, path.with_suffix(".json")
    try:
        record = json.loads(beside.read_text(encoding="utf-8"))
        if record["format"] == FORMAT and record["tokens_sha256"] == sha256_of(path):
            found = (*token_arrays(path, record), from_dict(record["tokenizer"]), record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    if found is None:
        logger.info("tokenising %s", source)
        record = build()
        with replacing(beside) as file:
            file.write(json.dumps(record).encode())
        found = (*token_arrays(path, record), from_dict(record["tokenizer"]), record)
    if unknown := record["splits"]["train"].get("unknown"):
        share = f"{unknown / record['splits']['train']['characters']:.2g}"
        logger.warning("a share of %s of the characters of %s is not in the tokenizer: each becomes <unk>", share, source)
    return found


def token_arrays(path: Path, record: Mapping[str, Any]) -> tuple[TokenArray, TokenArray]:
    """Return the ids of training and of validation. They follow each other in the file at ``path``."""
    cut, rest = (record["splits"][split]["tokens"] for split in ("train", "val"))
    return TokenArray(path, record["dtype"], 0, cut), TokenArray(path, record["dtype"], cut, cut + rest)


def write_ids(
    path: Path,
    tokenizer: Tokenizer,
    splits: Mapping[str, Iterable[str]],
    encode: Callable[[Sequence[str]], Iterable[np.ndarray]],
) -> dict[str, Any]:
    """Write the ids of the texts of ``train`` and then of ``val`` to ``path``. Return the record of them."""
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    counts = {split: {"tokens": 0, "characters": 0, "bytes": 0, "unknown": 0} for split in ("train", "val")}
    knows_all = tokenizer.characters is None
    digest = hashlib.sha256()
    with replacing(path) as file:
        for split, counted in counts.items():
            texts = iter(splits[split])
            while batch := list(islice(texts, TEXTS_AT_ONCE)):
                written = np.concatenate(list(encode(batch))).astype(dtype)
                counted["tokens"] += len(written)
                counted["characters"] += sum(map(len, batch))
                counted["bytes"] += sum(len(text.encode()) for text in batch)
                counted["unknown"] += 0 if knows_all else int(np.count_nonzero(written == 0))
                digest.update(written.tobytes())
                file.write(written.tobytes())
    about = {"format": FORMAT, "tokenizer": tokenizer.to_dict(), "tokens_sha256": digest.hexdigest()}
    return {**about, "dtype": dtype, "splits": counts}


def bits_per(targets: int, counted: Mapping[str, int]) -> dict[str, float]:
    """Return factors from nats per token to bits per ``byte`` and per ``character``, for a split with these counts."""
    return {unit: targets / counted[f"{unit}s"] / math.log(2) for unit in ("byte", "character")}
