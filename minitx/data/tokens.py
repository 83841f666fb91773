"""Tokenised text on disk: a memory-mapped file of ids with a JSON record beside it.

The name of a cache says what it was made from: checksum of the text, tokenizer, split. The record has the checksum of the ids,
so a damaged cache is made again. Text is streamed, so it may be larger than memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from minitx.config import ConfigError, CorpusConfig
from minitx.data.baselines import ngram_floors
from minitx.data.corpus import Corpus, find_corpus, replacing, sha256_of
from minitx.data.task import tokenizer_of
from minitx.data.tokenizers import Tokenizer, find_tokenizer, fingerprint, from_dict

logger = logging.getLogger(__name__)

FORMAT = 2
Pieces = Iterable[tuple[str, str]]
"""(split, text)"""


class TokenArray:
    """A stretch [``start``, ``stop``) of a token file, mapped into memory on first use.

    Only the path and the numbers are pickled; a pickled ``np.memmap`` would hold the tokens themselves.
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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}


def corpus_name(config: CorpusConfig) -> str:
    """What messages call the text."""
    return f"data={config.name}" if config.path is None else f"data.path={config.path}"


def tokenised(
    config: CorpusConfig, folder: Path, tokenizer: Tokenizer | None = None, marks: Sequence[str] = ()
) -> tuple[TokenArray, TokenArray, Tokenizer, dict[str, Any]]:
    """The tokens of the text that ``config`` names, from the cache in ``folder`` or made anew.

    The last ``val_fraction`` of the characters is the validation split, whatever the tokenizer. Files:
    ``<text>-<tokenizer>-val<val_fraction>.bin`` and ``.json``.

    Args:
        config: which text, tokenizer and split.
        folder: where caches are kept.
        tokenizer: use this one (a checkpoint's, say) instead of that of ``config``.
        marks: of a tokenizer that is learned.

    Returns:
        The ids of training and of validation, their tokenizer, and the record beside them. ``record["splits"][split]`` counts
        ``tokens``, ``characters`` and ``bytes`` (of UTF-8); ``record["floors"]`` is ``ngram_floors`` of the splits.

    Raises:
        ConfigError: the text is missing, not UTF-8, or too short to be split.
    """
    corpus = find_corpus(config)
    tokenizer = tokenizer or find_tokenizer(config.tokenizer)
    learned = "-".join(["char" if config.tokenizer == "char" else f"bpe{config.bpe_vocab_size}", *marks])
    name = fingerprint(tokenizer)[:16] if tokenizer else learned
    path = folder / f"{corpus.stem}-{name}-val{config.val_fraction!r}.bin"
    record, made_by = cached(path, corpus_name(config), lambda: _build(path, corpus, config, tokenizer, marks))
    cut, end = (sum(record["splits"][split]["tokens"] for split in splits) for splits in (("train",), ("train", "val")))
    train, val = (TokenArray(path, record["dtype"], *part) for part in ((0, cut), (cut, end)))
    return train, val, made_by, record


def cached(path: Path, source: str, build: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], Tokenizer]:
    """The record beside the ids at ``path``, and its tokenizer.

    A record that is missing, damaged or of other ids is made again by ``build``, which writes the ids. ``source`` is what the
    log calls them.
    """
    beside = path.with_suffix(".json")
    try:
        record = json.loads(beside.read_text(encoding="utf-8"))
        if record["format"] == FORMAT and record["tokens_sha256"] == sha256_of(path):
            return record, from_dict(record["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    logger.info("tokenising %s", source)
    record = build()
    with replacing(beside) as file:
        file.write(json.dumps(record).encode())
    return record, from_dict(record["tokenizer"])


def _build(
    path: Path, corpus: Corpus, config: CorpusConfig, tokenizer: Tokenizer | None, marks: Sequence[str]
) -> dict[str, Any]:
    said, sizes = corpus_name(config), [(len(chunk), chunk.isspace()) for chunk in corpus.chunks()]
    characters = sum(size for size, _ in sizes)
    if all(blank for _, blank in sizes):
        raise ConfigError(f"{said} has no text: {characters} characters, none of them but white space")
    cut = int(characters * (1 - config.val_fraction))
    if not 0 < cut < characters:
        raise ConfigError(f"{said} has {characters} characters, too few for a training and a validation split")
    training = (chunk for split, chunk in split_chunks(corpus, cut) if split == "train")
    tokenizer = tokenizer_of(config, tokenizer, training, marks)
    record = write_ids(path, tokenizer, encoded(tokenizer, split_chunks(corpus, cut), at_once=16))
    if corpus.source and sha256_of(corpus.source) != corpus.checksum:
        raise ConfigError(f"{said} changed while it was read; start again")
    ids, first = np.memmap(path, dtype=record["dtype"], mode="r"), record["splits"]["train"]["tokens"]
    return {**record, "floors": ngram_floors(np.asarray(ids)[:first], np.asarray(ids)[first:], tokenizer.vocab_size)}


def split_chunks(corpus: Corpus, cut: int) -> Iterator[tuple[str, str]]:
    """The chunks of a text with the split that each belongs to; character ``cut`` begins the validation split."""
    seen = 0
    for chunk in corpus.chunks():
        place, seen = max(0, cut - seen), seen + len(chunk)
        yield from ((split, text) for split, text in (("train", chunk[:place]), ("val", chunk[place:])) if text)


def encoded(tokenizer: Tokenizer, pieces: Pieces, at_once: int) -> Iterator[tuple[str, str, np.ndarray]]:
    """(split, text, ids) of each piece; ``at_once`` of them are encoded together."""
    pieces = iter(pieces)
    while batch := list(islice(pieces, at_once)):
        ids = tokenizer.encode_batch([text for _, text in batch])
        yield from ((split, text, own) for (split, text), own in zip(batch, ids, strict=True))


def write_ids(path: Path, tokenizer: Tokenizer, pieces: Iterable[tuple[str, str, np.ndarray]]) -> dict[str, Any]:
    """Write the ids of ``pieces`` (split, text, ids) to ``path``; returns the record of them."""
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    splits = {split: {"tokens": 0, "characters": 0, "bytes": 0} for split in ("train", "val")}
    digest = hashlib.sha256()
    with replacing(path) as file:
        for split, text, ids in pieces:
            written = ids.astype(dtype).tobytes()
            for unit, count in (("tokens", len(ids)), ("characters", len(text)), ("bytes", len(text.encode()))):
                splits[split][unit] += count
            digest.update(written)
            file.write(written)
    about = {"format": FORMAT, "tokenizer": tokenizer.to_dict(), "tokens_sha256": digest.hexdigest()}
    return {**about, "dtype": dtype, "splits": splits}


def bits_per(targets: int, counted: Mapping[str, int]) -> dict[str, float]:
    """Factors from nats per token to bits per ``byte`` and ``character`` of a split with so many ``targets`` and counts."""
    return {unit: targets / counted[f"{unit}s"] / math.log(2) for unit in ("byte", "character")}
