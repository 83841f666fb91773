"""Tokenised text on disk: a memory-mapped file of ids with a JSON record beside it.

The record says what the ids were made from (checksum of the source, fingerprint of the tokenizer), so that a cache
that does not fit is made again. Text is streamed, so a corpus may be larger than memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minitx.config import ConfigError, CorpusConfig
from minitx.data.addressing import Split
from minitx.data.corpus import Corpus, chunks_of, find_corpus, replacing, sha256_of
from minitx.data.floors import ngram_floors
from minitx.data.tokenizers import Tokenizer, fingerprint, from_dict, train_tokenizer

logger = logging.getLogger(__name__)

FORMAT = 1


class TokenArray:
    """A stretch [``start``, ``stop``) of a token file, mapped into memory on first use.

    Travels to another process as path and numbers; a pickled ``np.memmap`` would carry the tokens themselves.
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


@dataclass(frozen=True)
class TokenisedText:
    """What ``tokenised`` gives: the ids of both splits, the tokenizer that made them, and the record beside them.

    ``record["splits"][split]`` counts ``tokens``, ``characters`` and ``bytes`` (of UTF-8); ``record["floors"]`` is
    ``ngram_floors`` of the splits.
    """

    train: TokenArray
    val: TokenArray
    tokenizer: Tokenizer
    record: dict[str, Any]


def tokenised(
    config: CorpusConfig, folder: Path, tokenizer: Tokenizer | None = None, marks: Sequence[str] = ()
) -> TokenisedText:
    """The tokenised text that ``config`` names, from the cache in ``folder`` or made anew.

    The last ``val_fraction`` of the characters is the validation split, whatever the tokenizer. Files:
    ``<text>-<tokenizer>-val<val_fraction>.bin`` and ``.json``. A cache is made again if its source has another checksum,
    its tokenizer another fingerprint, or its ids another checksum than the record says.

    Args:
        config: which text, tokenizer and split.
        folder: where caches are kept.
        tokenizer: use this one (a checkpoint's, say) instead of learning one from the training split.
        marks: of the tokenizer that is learnt.

    Raises:
        ConfigError: the text is missing, no UTF-8, or too short to be split.
    """
    corpus = find_corpus(config)
    word = "char" if config.tokenizer == "char" else f"bpe{config.bpe_vocab_size}"
    word = "-".join([word, *marks])
    name = word if tokenizer is None else fingerprint(tokenizer)[:16]
    path = folder / f"{corpus.stem}-{name}-val{config.val_fraction!r}.bin"

    def fits(record: dict[str, Any]) -> bool:
        made_by = from_dict(record["tokenizer"])
        same_tokenizer = record["tokenizer_fingerprint"] == fingerprint(tokenizer or made_by) == fingerprint(made_by)
        return record["format"] == FORMAT and record["source_sha256"] == corpus.checksum and same_tokenizer

    record = cached(path, str(config.path or config.name), fits, lambda: _build(path, corpus, config, tokenizer, marks))
    splits, dtype = record["splits"], record["dtype"]
    cut, end = splits["train"]["tokens"], splits["train"]["tokens"] + splits["val"]["tokens"]
    return TokenisedText(
        TokenArray(path, dtype, 0, cut), TokenArray(path, dtype, cut, end), from_dict(record["tokenizer"]), record
    )


def cached(
    path: Path, source: str, fits: Callable[[dict[str, Any]], bool], build: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """The record beside the ids at ``path``: the one that is there, where it ``fits`` and the ids are those that it speaks of, else
    that of ``build``, which writes the ids. ``source`` is what the log calls them."""
    beside = path.with_suffix(".json")
    try:
        record = json.loads(beside.read_text(encoding="utf-8"))
        if fits(record) and record["tokens_sha256"] == sha256_of(path):
            return record
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # missing, cut short or not ours: all of them mean "make it again"
    logger.info("tokenising %s", source)
    record = build()
    with replacing(beside) as file:
        file.write(json.dumps(record).encode())
    return record


def _build(
    path: Path, corpus: Corpus, config: CorpusConfig, tokenizer: Tokenizer | None, marks: Sequence[str]
) -> dict[str, Any]:
    text = corpus.normalised(path.parent)
    characters = sum(map(len, chunks_of(text)))
    if all(chunk.isspace() for chunk in chunks_of(text)):
        raise ConfigError(f"data.path={config.path} has no text: {characters} characters, none of them but white space")
    cut = int(characters * (1 - config.val_fraction))
    if not 0 < cut < characters:
        raise ConfigError(f"data.path={config.path} has {characters} characters, too few for a training and a validation split")
    if tokenizer is None:
        training = (chunk for split, chunk in split_chunks(text, cut) if split == "train")
        tokenizer = train_tokenizer(config.tokenizer, training, vocab_size=config.bpe_vocab_size, marks=marks)
    record = {
        "format": FORMAT,
        "source_sha256": corpus.checksum,
        "tokenizer_fingerprint": fingerprint(tokenizer),
        "tokenizer": tokenizer.to_dict(),
        **write_ids(path, tokenizer, ((split, chunk, tokenizer.encode(chunk)) for split, chunk in split_chunks(text, cut))),
    }
    ids, first = np.memmap(path, dtype=record["dtype"], mode="r"), record["splits"]["train"]["tokens"]
    return {**record, "floors": ngram_floors(np.asarray(ids)[:first], np.asarray(ids)[first:], tokenizer.vocab_size)}


def split_chunks(text: Path, cut: int) -> Iterator[tuple[Split, str]]:
    """The chunks of a text with the split that each belongs to; character ``cut`` begins the validation split."""
    seen = 0
    for chunk in chunks_of(text):
        train, val = chunk[: max(0, cut - seen)], chunk[max(0, cut - seen) :]
        seen += len(chunk)
        if train:
            yield "train", train
        if val:
            yield "val", val


def write_ids(path: Path, tokenizer: Tokenizer, pieces: Iterable[tuple[str, str, np.ndarray]]) -> dict[str, Any]:
    """Write the ids of ``pieces`` (split, text, its ids) to ``path``; returns the part of the record that describes them."""
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    splits = {split: {"tokens": 0, "characters": 0, "bytes": 0} for split in ("train", "val")}
    digest = hashlib.sha256()
    with replacing(path) as file:
        for split, text, ids in pieces:
            written = ids.astype(dtype).tobytes()
            counted = {"tokens": len(ids), "characters": len(text), "bytes": len(text.encode())}
            splits[split] = {unit: splits[split][unit] + counted[unit] for unit in counted}
            digest.update(written)
            file.write(written)
    return {"dtype": dtype, "splits": splits, "tokens_sha256": digest.hexdigest()}


def bits_per(targets: int, counted: Mapping[str, int]) -> dict[str, float]:
    """Factors from nats per token to bits per ``byte`` and ``character`` of a split with so many ``targets`` and counts."""
    return {unit: targets / counted[f"{unit}s"] / math.log(2) for unit in ("byte", "character")}
