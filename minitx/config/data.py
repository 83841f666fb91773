"""The configs of data sets: one dataclass for each kind of ``data``.

Every config has ``name``, ``batch_size``, ``num_workers`` and ``max_tokens``, the length of its longest row (``None`` for
images). Defaults are defined here only. The files in ``configs/data`` contain what differs from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from minitx.config.checks import Count, Fraction, Natural, require
from minitx.config.data_bases import BaseDataConfig, CorpusConfig, DocumentsDataConfig, TableDataConfig, TokenizedDataConfig


@dataclass(frozen=True, kw_only=True)
class TextDataConfig(CorpusConfig):
    """Language modelling: ``kjv`` (the King James text) or ``text`` (the file at ``path``)."""

    name: Literal["kjv", "text"] = "kjv"

    def check(self) -> None:
        require(self.name != "text" or self.path is not None, "path=null must name a text file with data=text")
        require(self.name != "kjv" or self.path is None, f"path={self.path} belongs to data=text, not to data=kjv")


@dataclass(frozen=True, kw_only=True)
class MaskedDataConfig(CorpusConfig):
    """Masked-token prediction on the King James text, or on the file at ``path``.

    Attributes:
        mask_fraction: the part of a row's tokens to predict. Of these, 80 % are masked, 10 % replaced by another token, 10 %
            unchanged.
    """

    name: Literal["masked"] = "masked"
    mask_fraction: Fraction = 0.15


@dataclass(frozen=True, kw_only=True)
class RecallDataConfig(BaseDataConfig):
    """A synthetic task: each row contains the answer.

    Attributes:
        val_size: number of validation examples. They are the same for every seed.
    """

    val_size: Count = 1024
    type_vocab_size: ClassVar[Any] = 0  # number of token types; 0 means none
    vocab_size: ClassVar[Any]
    chance: ClassVar[Any]


@dataclass(frozen=True, kw_only=True)
class LookupConfig(RecallDataConfig):
    """The common base of T1 and T2: distinct keys, each with a value, and questions for values.

    Attributes:
        num_keys: number of different keys.
        num_values: number of different values. A guess is right with probability 1 / num_values.
        num_pairs: key-value pairs in an example.
    """

    num_keys: Count = 64
    num_values: Count = 16
    num_pairs: Count = 16

    def check(self) -> None:
        fits = self.num_pairs <= self.num_keys
        require(
            fits, f"num_pairs={self.num_pairs} must not exceed num_keys={self.num_keys}: the keys of an example are distinct"
        )

    @property
    def vocab_size(self) -> int:
        """The number of keys and values. Each is a token."""
        return self.num_keys + self.num_values

    @property
    def chance(self) -> float:
        """The accuracy of a guess."""
        return 1 / self.num_values


@dataclass(frozen=True, kw_only=True)
class KeyValueDataConfig(LookupConfig):
    """T1, kv-lookup: each position shows a key with its value; the last position shows a key and asks for its value."""

    name: Literal["kv_lookup"] = "kv_lookup"

    @property
    def max_tokens(self) -> int:
        """The number of tokens of every row."""
        return self.num_pairs + 1

    @property
    def type_vocab_size(self) -> int:
        """The number of token types: one for each value, and one for the question."""
        return self.num_values + 1


@dataclass(frozen=True, kw_only=True)
class MultiQueryDataConfig(LookupConfig):
    """T2, multi-query recall: keys and values are separate tokens; some of the keys are asked for.

    Attributes:
        num_queries: number of keys that are asked for, each once, in random order.
    """

    name: Literal["multi_query_recall"] = "multi_query_recall"
    num_queries: Count = 16

    def check(self) -> None:
        super().check()
        fits = self.num_queries <= self.num_pairs
        require(fits, f"num_queries={self.num_queries} must not exceed num_pairs={self.num_pairs}: a key is asked for once")

    @property
    def max_tokens(self) -> int:
        """The number of tokens of every row."""
        return 2 * self.num_pairs + self.num_queries


@dataclass(frozen=True, kw_only=True)
class InductionDataConfig(RecallDataConfig):
    """T3, induction: a random segment appears twice, with other tokens between; the second copy must be predicted.

    Attributes:
        num_tokens: number of different tokens. A guess is right with probability 1 / num_tokens. Apart from the copy, the
            tokens of an example are distinct.
        segment_len: tokens in the segment.
        max_gap: number of tokens that appear once. 0 to max_gap of them (uniform) are between the copies, the rest before the
            first copy.
    """

    name: Literal["induction"] = "induction"
    num_tokens: Count = 64
    segment_len: Count = 12
    max_gap: Natural = 16

    def check(self) -> None:
        require(self.segment_len > 1, f"segment_len={self.segment_len} must be at least 2: its first token is not asked for")
        drawn = self.segment_len + self.max_gap
        require(drawn <= self.num_tokens, f"num_tokens={self.num_tokens} must be at least segment_len + max_gap = {drawn}")

    @property
    def max_tokens(self) -> int:
        """The number of tokens of every row."""
        return 2 * self.segment_len + self.max_gap - 1

    @property
    def vocab_size(self) -> int:
        """The number of different tokens."""
        return self.num_tokens

    @property
    def chance(self) -> float:
        """The accuracy of a guess."""
        return 1 / self.num_tokens


@dataclass(frozen=True, kw_only=True)
class DatesDataConfig(BaseDataConfig):
    """Sequence to sequence: dates as people write them (Babel) to ISO 8601, in characters.

    Attributes:
        locales: languages of the dates. Each source begins with its locale.
        first_year: first year of the dates.
        last_year: last year of the dates.
        train_size: number of training examples. Each is a day, a locale and a pattern.
        val_size: number of validation examples, with days that training never sees.
        bucket: put rows of similar length into the same batch.
    """

    name: Literal["dates"] = "dates"
    locales: tuple[str, ...] = (
        *("en", "en_GB", "de", "fr", "es", "it", "pt", "nl", "sv", "da"),
        *("pl", "ru", "cs", "fi", "tr", "el", "hu", "ja", "zh", "ko"),
    )  # fmt: skip
    first_year: int = 1900
    last_year: int = 2099
    train_size: Count = 100_000
    val_size: Count = 2000
    bucket: bool = True

    def check(self) -> None:
        require(len(self.locales) > 0, "locales=[] must name at least one locale")
        first, last = self.first_year, self.last_year
        ordered = 1000 <= first <= last <= 9999
        require(ordered, f"first_year={first} and last_year={last} must be years of four digits in this order")
        days = 365 * (last - first + 1)
        require(self.val_size < days, f"val_size={self.val_size} must be smaller than the number of days, about {days}")

    @property
    def max_tokens(self) -> int:
        """More tokens than any date has."""
        return 64


@dataclass(frozen=True, kw_only=True)
class PairsDataConfig(TokenizedDataConfig, TableDataConfig):
    """Sequence to sequence on a table of two columns, or on two text files. One vocabulary for both sides.

    Attributes:
        target_path: a text file with the targets of ``path``, line by line; ``null`` if ``path`` has two columns.
        val_target_path: the targets of ``val_path``.
        source_column: the column of sources; ``null``: the first column, in csv and tsv files without a row of names.
        target_column: the column of targets; ``null``: the second column.
        val_fraction: the part of the different sources that is held out for validation.
        max_source_len: longest source, in tokens. Longer pairs are left out.
        max_target_len: longest target, in tokens, with the end mark. Longer pairs are left out.
        bucket: put rows of similar length into the same batch.
    """

    name: Literal["pairs"] = "pairs"
    target_path: str | None = None
    val_target_path: str | None = None
    source_column: str | None = None
    target_column: str | None = None
    max_source_len: Count = 128
    max_target_len: Count = 128
    bucket: bool = True

    @property
    def max_tokens(self) -> int:
        """The number of tokens of the longest row."""
        return max(self.max_source_len, self.max_target_len)

    def check(self) -> None:
        wanted = self.val_path is not None and self.target_path is not None
        said = f"val_target_path={self.val_target_path} must be given where val_path and target_path are, and only there"
        require(wanted == (self.val_target_path is not None), said)
        one, other = self.source_column, self.target_column
        require((one is None) == (other is None), f"source_column={one} and target_column={other} must be given together")
        lines = self.target_path is None or one is None
        require(lines, f"source_column={one} belongs to a table, and target_path={self.target_path} to a file of lines")


@dataclass(frozen=True, kw_only=True)
class ClassifyDataConfig(TokenizedDataConfig, TableDataConfig):
    """Classification of the texts of a table.

    Attributes:
        text_column: the column of texts.
        second_column: a column of second texts. They follow the first text and another class token; ``null``: none.
        label_column: the column of labels, which are numbers or words.
        val_fraction: the part of the different texts that is held out for validation.
        max_len: longest row, in tokens, with the class token. Longer texts are cut.
        bucket: put rows of similar length into the same batch.
    """

    name: Literal["classify"] = "classify"
    text_column: str = "text"
    second_column: str | None = None
    label_column: str = "label"
    max_len: Count = 128
    bucket: bool = True


@dataclass(frozen=True, kw_only=True)
class DigitsDataConfig(BaseDataConfig):
    """Classification of images: scikit-learn's digits, 8×8.

    Attributes:
        val_fraction: the part of every class that is held out for validation.
        shift: move each training image by a random number of pixels, up to this one, in every step; 0: do not move it.
    """

    name: Literal["digits"] = "digits"
    val_fraction: Fraction = 0.2
    shift: Natural = 1


@dataclass(frozen=True, kw_only=True)
class ImageDataConfig(DigitsDataConfig, TableDataConfig):
    """Classification of images: a folder with one folder per label, or a table. Images are decoded when they are needed.

    Attributes:
        image_column: the column of images.
        label_column: the column of labels, which are numbers or words.
        image_size: resize images to a square with sides of this many pixels; ``null``: do not resize.
    """

    name: Literal["images"] = "images"  # type: ignore[assignment]
    image_column: str = "image"
    label_column: str = "label"
    image_size: Count | None = None


@dataclass(frozen=True, kw_only=True)
class HubDataConfig(DocumentsDataConfig):
    """Language modelling on documents: a row of the table is a document.

    Attributes:
        text_column: the column of documents; ``null``: ``text``, or the only column.
        streaming: read the training documents during training instead of preparing them first. Every row is full. Checkpoints
            store the position in the stream, so a run must resume with the same number of processes and workers. Without
            packing, the documents of a row see each other.
        val_rows: with streaming: number of validation documents, from ``val_path`` or ``val_split``, else the first ones of
            ``split``.
    """

    name: Literal["hf"] = "hf"
    text_column: str | None = None
    streaming: bool = False
    val_rows: Count = 1000


@dataclass(frozen=True, kw_only=True)
class ChatDataConfig(DocumentsDataConfig):
    """Fine-tuning on conversations, with the loss on the answers only.

    Attributes:
        messages_column: the column of conversations, which are lists of messages with ``role`` and ``content``.
        template: a chat template (jinja2), as on the Hugging Face hub; ``null``: that of the tokenizer's folder, else ours.
    """

    name: Literal["chat"] = "chat"
    messages_column: str = "messages"
    template: str | None = None


DataConfig = (
    TextDataConfig
    | KeyValueDataConfig
    | MultiQueryDataConfig
    | InductionDataConfig
    | MaskedDataConfig
    | DatesDataConfig
    | PairsDataConfig
    | ClassifyDataConfig
    | DigitsDataConfig
    | ImageDataConfig
    | HubDataConfig
    | ChatDataConfig
)
