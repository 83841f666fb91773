"""Sequence to sequence: pairs of texts in one vocabulary, from a table or two files, or dates to ISO 8601 (Babel's CLDR data)."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from minitx.config import ConfigError
from minitx.config.packages import package
from minitx.config.schema import Count, Fraction, require
from minitx.data.seeding import VALIDATION_SEED, generator
from minitx.data.tables import checksum_of, hold_out, load_table, share_of, texts_of
from minitx.data.task import Task, VocabSize
from minitx.data.tokenizer import Tokenizer, count_unknown, require_marks
from minitx.data.tokenizer_choice import find_or_train_tokenizer

PAIR_MARKS = ("pad", "bos", "eos")
LONGEST_DATE = 64
"""A limit that no date reaches, in tokens."""

WIDTHS = ("short", "medium", "long", "full")
SKELETONS = ("yMd", "yMEd", "yMMMd", "yMMMEd")
LOCALES = (
    *("en", "en_GB", "de", "fr", "es", "it", "pt", "nl", "sv", "da"),
    *("pl", "ru", "cs", "fi", "tr", "el", "hu", "ja", "zh", "ko"),
)
Pairs = list[tuple[str, str]]
PairsBySplit = dict[str, Pairs]
"""The pairs by split: train, val, and test if there is one."""

LeftOut = dict[str, list[str]]
"""See ``Task.left_out``."""


def pairs(
    *,
    path: str,
    target_path: str | None = None,
    val_path: str | None = None,
    val_target_path: str | None = None,
    test_path: str | None = None,
    test_target_path: str | None = None,
    subset: str | None = None,
    split: str = "train",
    val_split: str | None = None,
    val_fraction: Fraction = 0.1,
    source_column: str | None = None,
    target_column: str | None = None,
    tokenizer: str | Tokenizer = "bpe",
    bpe_vocab_size: VocabSize = 4096,
    max_source_len: Count = 128,
    max_target_len: Count = 128,
    bucket: bool = True,
) -> Task:
    """Sequence to sequence, from a table with two columns or from two text files. Both sides share one vocabulary.

    For a source s_1 … s_n and a target t_1 … t_m a row is

        input_ids          s_1 … s_n                key_mask          True where real
        decoder_input_ids  bos t_1 … t_m            decoder_key_mask  True where real
        labels             t_1 … t_m eos            −100 after the end

    Args:
        path, val_path, subset, split, val_split: see ``load_tables``.
        target_path: a text file with the targets of ``path``, line by line, without a carriage return in a line; ``null``:
            ``path`` has two columns.
        val_target_path: the targets of ``val_path``.
        test_path: pairs of the test split; ``null``: no test split.
        test_target_path: the targets of ``test_path``.
        val_fraction: share of the distinct sources for validation.
        source_column: the column of sources; ``null``: the first, and a csv or tsv file has no header.
        target_column: the column of targets; ``null``: the second.
        tokenizer, bpe_vocab_size: see ``find_or_train_tokenizer``.
        max_source_len: longest source in tokens. Longer pairs are left out of training; in validation, the source is truncated.
        max_target_len: longest target in tokens, with its end mark. Longer pairs are left out of training. In validation, the
            loss covers the first tokens, and answers are compared with the whole target.
        bucket: put rows of similar length into the same batch.

    Raises:
        ConfigError: a file has no pairs, a split has no pairs, or columns and files do not fit each other.
    """
    files = {"val": (val_path, val_target_path), "test": (test_path, test_target_path)}
    _check_files_and_columns(target_path, files, source_column, target_column)
    columns = None if source_column is None else (source_column, str(target_column))
    read_pairs = partial(_read_pairs, columns=columns, subset=subset)
    splits = {"train": read_pairs("", path, target_path, split=split)}
    if val_path is not None:
        splits["val"] = read_pairs("val_", val_path, val_target_path, split=val_split or "train", split_key="val_split")
    elif val_split is not None:
        splits["val"] = read_pairs("", path, target_path, split=val_split, split_key="val_split")
    else:
        chosen = zip(("train", "val"), hold_out([source for source, _ in splits["train"]], val_fraction), strict=True)
        splits = {name: [splits["train"][i] for i in rows] for name, rows in chosen}
    if test_path is not None:
        splits["test"] = read_pairs("test_", test_path, test_target_path)
    pairs_of, blank = {}, {}
    for name, rows in splits.items():
        pairs_of[name] = [(source, target) for source, target in rows if source and target]
        require(bool(pairs_of[name]), f"data.path={path} has no pair without a blank side in the {name} split")
        blank[name] = share_of(len(rows) - len(pairs_of[name]), len(rows), "pairs are left out: a side is blank")
    longest = max_source_len, max_target_len
    task = _task(f"data.path={path}", pairs_of, blank, tokenizer, bpe_vocab_size, longest, bucket)
    return replace(task, checksum=checksum_of(*pairs_of.values()))


def _check_files_and_columns(
    target_path: str | None,
    files: Mapping[str, tuple[str | None, str | None]],
    source_column: str | None,
    target_column: str | None,
) -> None:
    """Refuse paths and columns of ``pairs`` that do not fit. ``files`` has the paths of sources and targets of further splits."""
    for name, (source, target) in files.items():
        require(
            (source is not None and target_path is not None) == (target is not None),
            f"data.{name}_target_path={target} must be set exactly if {name}_path and target_path are set",
        )
    require(
        (source_column is None) == (target_column is None),
        f"data.source_column={source_column} and data.target_column={target_column} must be set together",
    )
    require(
        target_path is None or source_column is None,
        f"data.source_column={source_column} is for tables, but data.target_path={target_path} is for files of lines: set one of them",
    )


def dates(
    *,
    locales: tuple[str, ...] = LOCALES,
    first_year: int = 1900,
    last_year: int = 2099,
    train_size: Count = 100_000,
    val_size: Count = 2000,
    bucket: bool = True,
    tokenizer: Literal["char"] | Tokenizer = "char",
) -> Task:
    """Sequence to sequence: dates in the formats of many languages (Babel) to ISO 8601, in characters. Rows are as in ``pairs``.

    Args:
        locales: languages. Each source begins with its locale.
        first_year: the first year.
        last_year: the last year.
        train_size: training examples, each a day, a locale and a pattern.
        val_size: validation examples, of days that do not occur in training.
        bucket: put rows of similar length into the same batch.
        tokenizer: ``char``, learned from the training split.

    Raises:
        ConfigError: Babel does not know a locale, or the years or sizes do not fit each other.
    """
    require(len(locales) > 0, "data.locales=[] must name at least one locale")
    require(
        1000 <= first_year <= last_year <= 9999,
        f"data.first_year={first_year} and data.last_year={last_year} must be years of four digits in this order",
    )
    days = 365 * (last_year - first_year + 1)
    require(val_size < days, f"data.val_size={val_size} must be smaller than the number of days, about {days}")
    train, val = date_pairs(locales, (first_year, last_year), train_size, val_size)
    return _task("data=dates", {"train": train, "val": val}, {}, tokenizer, 0, (LONGEST_DATE, LONGEST_DATE), bucket)


def _task(
    name: str,
    pairs_of: PairsBySplit,
    blank: LeftOut,
    tokenizer: str | Tokenizer,
    bpe_vocab_size: int,
    longest: tuple[int, int],
    bucket: bool,
) -> Task:
    tokenizer = find_or_train_tokenizer(tokenizer, bpe_vocab_size, chain.from_iterable(pairs_of["train"]), PAIR_MARKS)
    pad_id, bos_id, eos_id = require_marks(tokenizer, *PAIR_MARKS)
    rows, kept, left_out = dict[str, Any](), dict[str, Pairs](), LeftOut()
    for split, of_split in pairs_of.items():
        kept[split], rows[split], dropped = _pair_rows(of_split, tokenizer, longest, name, cut=split != "train")
        left_out[split] = [*blank.get(split, ()), *dropped]
    count_unknown(tokenizer, (row[key] for row in rows["train"] for key in ("input_ids", "labels")), name)
    fields = {"vocab_size": tokenizer.vocab_size, "pad_id": pad_id, "bos_id": bos_id, "eos_id": eos_id}
    for side, key in (("max_source_len", "input_ids"), ("max_target_len", "labels")):
        fields[side] = max(len(row[key]) for row in chain.from_iterable(rows.values()))
    return Task(
        name=name,
        kind="seq2seq",
        **rows,
        longest=max(longest),
        pad={"input_ids": pad_id, "decoder_input_ids": pad_id},
        bucket=bucket,
        tokenizer=tokenizer,
        model_fields=fields,
        left_out=left_out,
        val_examples=kept["val"],
        test_examples=kept.get("test", []),
    )


def _pair_rows(
    pairs: Pairs, tokenizer: Tokenizer, longest: tuple[int, int], name: str, *, cut: bool
) -> tuple[Pairs, list[dict[str, np.ndarray]], list[str]]:
    """Return the pairs with tokens on both sides, as texts and as rows, and sentences for ``Task.left_out``.

    Pairs longer than ``longest`` are cut, or left out if ``cut`` is False.
    """
    bos, eos = ([tokenizer.mark_ids[mark]] for mark in ("bos", "eos"))
    most_source, most_target = longest
    kept, rows, empty, long = [], [], 0, 0
    sides = [tokenizer.encode_batch([pair[side] for pair in pairs]) for side in (0, 1)]
    for pair, s, t in zip(pairs, *sides, strict=True):
        is_empty = not (len(s) and len(t))
        is_long = len(s) > most_source or len(t) >= most_target
        empty, long = empty + is_empty, long + (is_long and not is_empty)
        if not is_empty and (cut or not is_long):
            kept.append(pair)
            targets = {"decoder_input_ids": np.append(bos, t), "labels": np.append(t, eos)}
            rows.append({"input_ids": s[:most_source], **{key: ids[:most_target] for key, ids in targets.items()}})
    limits = f"data.max_source_len={most_source} and data.max_target_len={most_target}"
    require(bool(kept), f"{limits} leave none of the {len(pairs)} pairs of a split of {name}")
    left_out = share_of(empty, len(pairs), "pairs are left out: a side has no token")
    left_out += share_of(long, len(pairs), f"pairs are {'cut: they are' if cut else 'left out:'} longer than {limits} allow")
    return kept, rows, left_out


def _read_pairs(key: str, path: str, target: str | None, *, columns: tuple[str, str] | None, **options: Any) -> Pairs:
    """The pairs of two columns of a table, or of two text files, line by line. The names of their options begin with ``key``."""
    if target is not None:
        files = {f"{key}path": path, f"{key}target_path": target}
        sides = [texts_of(load_table(file, name, kind="text", **options), "text", name) for name, file in files.items()]
        require(
            len(sides[0]) == len(sides[1]),
            f"data.{key}target_path={target} has {len(sides[1])} lines, but data.{key}path has {len(sides[0])}: line n belongs to line n",
        )
        return list(zip(*sides, strict=True))
    options |= {"texts": columns or (0, 1), "header": columns is not None}
    table = load_table(path, f"{key}path", kind="csv" if Path(path).suffix.lower() == ".txt" else None, **options)
    names = columns or table.column_names[:2]
    require(
        len(names) > 1,
        f"data.{key}path={path} has one column, but two are needed, separated by tabs (in .csv by commas); or set "
        f"data.{key}target_path=FILE with the targets",
    )
    sides = [texts_of(table, name, f"{side}_column") for name, side in zip(names, ("source", "target"), strict=True)]
    return list(zip(*sides, strict=True))


# --- dates


def date_patterns(locale: Any) -> list[str]:
    """Return the different patterns (CLDR's notation) of complete dates in a Babel locale.

    Years are always written in full, because two digits would be ambiguous.
    """
    patterns = [locale.date_formats[width].pattern for width in WIDTHS]
    patterns += [locale.datetime_skeletons[name].pattern for name in SKELETONS if name in locale.datetime_skeletons]
    return sorted({pattern if "yyyy" in pattern else pattern.replace("yy", "y") for pattern in patterns})


def write_date(day: datetime.date, tag: str, locale: Any, pattern: str) -> str:
    """Return a date with day and month in the order of its locale.

    >>> from babel import Locale
    >>> write_date(datetime.date(1999, 3, 7), "de", Locale.parse("de"), "d. MMMM y")
    'de: 7. März 1999'
    """
    from babel.dates import format_date

    return f"{tag}: {format_date(day, pattern, locale)}"


def date_pairs(locales: Sequence[str], years: tuple[int, int], train_size: int, val_size: int) -> tuple[Pairs, Pairs]:
    """Return (source, ISO 8601) pairs of both splits. The days of validation never occur in training.

    Days, locales and patterns are drawn with a constant seed. All training days are about equally frequent.

    Raises:
        ConfigError: Babel does not know a locale.
    """
    formats = [(tag, locale, date_patterns(locale)) for tag, locale in zip(locales, map(babel_locale, locales), strict=True)]
    first = datetime.date(years[0], 1, 1).toordinal()
    count = datetime.date(years[1], 12, 31).toordinal() + 1 - first
    random = generator(VALIDATION_SEED, "dates")
    days = random.permutation(count) + first
    val, train = days[:val_size], days[val_size:]
    drawn = np.concatenate([random.permutation(train) for _ in range(-(-train_size // len(train)))])

    def write(ordinal: int) -> tuple[str, str]:
        tag, locale, patterns = formats[random.integers(len(formats))]
        day = datetime.date.fromordinal(ordinal)
        return write_date(day, tag, locale, patterns[random.integers(len(patterns))]), day.isoformat()

    val_pairs = [write(day) for day in val.tolist()]
    return [write(day) for day in drawn[:train_size].tolist()], val_pairs


def babel_locale(tag: str) -> Any:
    """Return Babel's locale ``tag``.

    Raises:
        ConfigError: Babel is missing or does not know the locale.
    """
    babel = package("babel", "data=dates")
    try:
        return babel.Locale.parse(tag)
    except (babel.UnknownLocaleError, ValueError):
        raise ConfigError(f"data.locales={tag} is not a locale that Babel knows, such as en_GB or pt") from None
