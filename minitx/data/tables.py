"""Read tables with ``datasets``: local files and folders, and names on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from glob import escape, glob
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from minitx.config import ConfigError
from minitx.config.packages import package
from minitx.config.schema import Fraction, first_line, read, require
from minitx.data.seeding import VALIDATION_SEED, generator

log = logging.getLogger(__name__)
READERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}


def load_tables(
    path: str, val_path: str | None, subset: str | None, split: str, val_split: str | None, **options: Any
) -> list[Any]:
    """Return the training table and, if there is one, the validation table.

    Args:
        path: a file (.txt, .csv, .tsv, .json, .jsonl, .parquet), several (``data/*.jsonl``), a folder, or a name on the Hugging
            Face hub. A line of a text file (ending with ``\\n``, ``\\r\\n`` or ``\\r``) is a row with the column ``text``.
        val_path: the table of validation rows; ``null``: see ``val_split``.
        subset: a data set of ``path`` on the hub, if it has several.
        split: the training split, or a slice such as ``train[:10%]``. A local file has one, ``train``.
        val_split: the validation split; ``null``: ``val_path``, or else ``val_fraction`` of the rows.
        options: further arguments of ``load_table``.
    """
    tables = [load_table(path, subset=subset, split=split, **options)]
    if val_path is not None or val_split is not None:
        path, key = (path, "path") if val_path is None else (val_path, "val_path")
        options |= {"subset": subset, "split": val_split or "train", "split_key": "val_split"}
        tables.append(load_table(path, key, **options))
    return tables


def divided(tables: list[Any], divide: Callable[[Any], tuple[np.ndarray, np.ndarray]]) -> tuple[Any, Any]:
    """Return both tables. If there is only one, ``divide(table)`` returns its rows of training and of validation."""
    train, val = tables if len(tables) == 2 else map(tables[0].select, divide(tables[0]))
    return train, val


def num_held_out(count: int, fraction: float) -> int:
    """Return the number of ``count`` groups to hold out for validation: the fraction, but at least one, and never all."""
    return min(max(1, round(fraction * count)), count - 1)


def hold_out(groups: Sequence[Any], fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split rows by group. The result does not depend on the run's seed.

    Args:
        groups: the group of every row. All rows of a group are in the same split.
        fraction: the fraction of groups for validation; see ``num_held_out``.

    Returns:
        The rows of training, in order, and of validation. Validation rows are shuffled, so that the first rows represent all.

    Raises:
        ConfigError: there are fewer than two groups, or ``fraction`` is not in (0, 1).

    >>> train, val = hold_out(["a", "b", "a", "c"], 0.3)
    >>> sorted([*train.tolist(), *val.tolist()])
    [0, 1, 2, 3]
    """
    fraction = read(Fraction, fraction, "data.val_fraction")
    distinct = sorted(set(groups))
    require(len(distinct) > 1, f"data.val_fraction={fraction} leaves a split of {len(distinct)} different rows empty")
    random = generator(VALIDATION_SEED, "hold_out")
    chosen = {distinct[i] for i in random.permutation(len(distinct))[: num_held_out(len(distinct), fraction)]}
    validates = np.array([group in chosen for group in groups])
    return np.flatnonzero(~validates), random.permutation(np.flatnonzero(validates))


def load_table(
    path: str,
    key: str = "path",
    *,
    subset: str | None = None,
    split: str = "train",
    split_key: str = "split",
    streaming: bool = False,
    **reader: Any,
) -> Any:
    """Load a split as ``datasets.Dataset``, or with ``streaming`` as ``IterableDataset``.

    Args:
        path, subset, split: see ``load_tables``.
        key, split_key: the keys of path and split, for messages.
        streaming: read rows only when they are needed.
        reader: options for reading files. ``texts``: columns of csv and tsv files to read as text, even if they look like numbers.
            ``header`` (default true): whether csv and tsv files begin with the names of columns. Otherwise columns are numbered
            from 0. ``kind``: ``csv`` or ``text`` (one row per line), for any suffix.

    Raises:
        ConfigError: the path or the split does not exist, the hub cannot be reached, or the files cannot be read.
    """
    option = f"data.{key}={path}"
    local = Path(path).expanduser()
    datasets = package("datasets", option)
    files, local_options = _local_files(path, option, **reader)
    options: dict[str, Any] = {"path": path, "name": subset, "split": split, "streaming": streaming, **local_options}
    with _quiet() if local_options else contextlib.nullcontext():  # errors of local files are reported below
        try:
            if local.is_dir():
                files, folder_options = _options_of_folder(local, subset, option, **reader)
                options |= folder_options
            table = datasets.load_dataset(**options)
            # datasets gives columns of row names such names; in a stream they are not known yet
            may_move = streaming or any(name.startswith("__index_level_") for name in table.column_names)
            if "sep" in options and may_move:  # csv and tsv files
                _check_header(files, option, **{key: options[key] for key in ("sep", "quoting", "header") if key in options})
            return table
        except ConfigError:
            raise
        except Exception as error:  # datasets raises many kinds
            error = error.__cause__ if isinstance(error.__cause__, Exception) else error
            # the hub and files have classes of their own, and a config of a data set may be called anything
            is_split = (
                type(error) is ValueError and "split" in str(error).lower() and not str(error).startswith("BuilderConfig")
            )
            option = f"data.{split_key}={split}" if is_split else option
            raise ConfigError(f"{option} cannot be read: {first_line(error)}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars and logs of ``datasets``."""
    import datasets

    level = datasets.logging.get_verbosity()
    has_bars = not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if has_bars:
            datasets.enable_progress_bars()


def _local_files(path: str, option: str, **reader: Any) -> tuple[list[str], dict[str, Any]]:
    """Local files matching ``path``, and the load_dataset options for them; ([], {}) for a name on the hub."""
    local = Path(path).expanduser()
    is_pattern = any(sign in path for sign in "*?[") and not local.exists()  # else it names a file such as "reviews [1].csv"
    files = sorted(glob(str(local), recursive=True)) if is_pattern else [str(local)]
    if local.is_dir():
        if set("*?[") & set(str(local.absolute())):  # datasets would read the folders that match the pattern
            raise ConfigError(
                f"{option}: a folder with * ? or [ in its path cannot be read: name a file in it, or rename the folder"
            )
        return files, {"path": str(local)}
    if files and Path(files[0]).is_file():
        named = {"train": [escape(os.path.abspath(file)) for file in files]}
        return files, {"name": None, "data_files": named, **_options_of_files(files, option, **reader)}
    if not files or local.suffix.lower() in READERS or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError(f"{option} does not exist; it must be a file, a folder or a name on the Hugging Face hub")
    return files, {}


def _options_of_files(
    files: Sequence[str], option: str, *, texts: Sequence[str | int] = (), header: bool = True, kind: str | None = None
) -> dict[str, Any]:
    """The reader of ``datasets`` for these files, and its options."""
    suffixes = sorted({Path(file).suffix.lower() for file in files})
    if kind is None and (len(suffixes) > 1 or suffixes[0] not in READERS):
        raise ConfigError(f"{option} must have one of the suffixes {', '.join(READERS)}, got {', '.join(suffixes)}")
    require(any(Path(file).stat().st_size for file in files), f"{option} is empty")
    if kind == "text":  # line n of one file belongs to line n of another
        for file in files:
            content = Path(file).read_bytes()
            if within := re.search(rb"\r(?!\n)", content):
                raise ConfigError(
                    f"{option} has a carriage return within line {content.count(bytes([10]), 0, within.start()) + 1}, which would end the "
                    "line here, but not in other programs, so lines would not belong together: remove it (tr -d '\\r')"
                )
    kind = kind or READERS[suffixes[0]]
    return {"path": kind, **_reader_options(kind, "," if suffixes == [".csv"] else "\t", texts, header)}


def _options_of_folder(
    folder: Path, subset: str | None, option: str, *, texts: Sequence[str | int] = (), header: bool = True, **_: Any
) -> tuple[list[str], dict[str, Any]]:
    """The files in a folder that ``datasets`` reads, and the load_dataset options for them. A warning lists files that are not read."""
    import datasets

    builder = datasets.load_dataset_builder(str(folder), subset)
    by_split = {str(split): [*map(str, files)] for split, files in (builder.config.data_files or {}).items()}
    files = [*chain.from_iterable(by_split.values())]
    kind = str(builder.name)
    if kind not in READERS.values():
        return files, {}
    taken = {Path(file).resolve() for file in files}
    left = [
        file.name for file in sorted(folder.glob("[!.]*.*")) if file.suffix.lower() in READERS and file.resolve() not in taken
    ]
    if left:
        log.warning("%s: %d files are read, and %d are not: %s", option, len(taken), len(left), ", ".join(left[:3]))
    reading = _reader_options(kind, getattr(builder.config, "sep", ","), texts, header)
    if "header" in reading:  # for a folder, datasets does not pass on a None
        reading |= {"path": kind, "name": None, "data_files": {split: [*map(escape, of)] for split, of in by_split.items()}}
    return files, reading


def _reader_options(kind: str, sep: str, texts: Sequence[str | int], header: bool) -> dict[str, Any]:
    """The options of the reader ``kind`` of ``datasets``."""
    if kind != "csv":
        return {"encoding": "utf-8-sig"} if kind == "text" else {}
    quotes = {"quoting": 3} if sep == "\t" else {}  # in tsv files, a quote is text
    names = {} if header else {"header": None}
    return {"keep_default_na": False, "converters": dict.fromkeys(texts, str), "sep": sep, **quotes, **names}


def _check_header(files: Sequence[str], option: str, **options: Any) -> None:
    """Refuse files whose rows have more fields than the first line has names.

    pandas would take the first fields as row names, and each column would have the values of the column before.
    """
    import pandas

    for file in files:
        table = pandas.read_csv(file, nrows=1, **options)
        if not isinstance(table.index, pandas.RangeIndex):
            names = ", ".join(map(str, table.columns))
            raise ConfigError(f"{option} has rows with more fields than its first line has names: {names}")


def share_of(part: int, count: int, what: str) -> list[str]:
    """Return a sentence about ``part`` of ``count`` rows that are left out or cut (``Task.left_out``), or none if ``part`` is 0.

    >>> share_of(3, 1000, "rows are left out: without text")
    ['3 of 1,000 rows are left out: without text']
    """
    return [f"{part:,} of {count:,} {what}"] if part else []


def checksum_of(*columns: Iterable[Any]) -> str:
    """Return a checksum of the texts and numbers in columns (``Task.checksum``).

    >>> checksum_of(["a", "b"], [1, 2]) == checksum_of(["a"], ["b", 1, 2])
    False
    """
    digest = hashlib.sha256()
    for column in columns:
        for value in column:
            digest.update(json.dumps(value).encode() + b"\n")
        digest.update(b"\n")
    return digest.hexdigest()


def column_names(table: Any) -> list[str]:
    """Return the columns of a table. For some streams, the first row must be read."""
    return table.column_names or list(next(iter(table), {}))


def column_of(table: Any, column: str, key: str) -> str:
    """Return ``column`` if ``table`` has it.

    Raises:
        ConfigError: the table does not have this column. The message lists the columns.
    """
    names = column_names(table)
    require(column in names, f"data.{key}={column} is not a column of the data: the columns are {', '.join(map(str, names))}")
    return column


def as_texts(values: Iterable[Any], option: str) -> Iterator[str]:
    """Yield the texts, with an empty text for ``null``.

    Raises:
        ConfigError: a value is not a text. The message begins with ``option`` (``data.KEY=VALUE``).
    """
    for value in values:
        if not isinstance(value, str | None):
            raise ConfigError(f"{option} must have texts, got {type(value).__name__}")
        yield value or ""


def texts_of(table: Any, column: str, key: str) -> list[str]:
    """Return the texts of a column, without white space around them.

    Raises:
        ConfigError: the table does not have this column, or the column contains values that are not texts.
    """
    return [text.strip() for text in as_texts(table[column_of(table, column, key)], f"data.{key}={column}")]


def labels_of(tables: Sequence[Any], column: str) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Return the labels (N,) int64 of a column in each table, and the names of all labels.

    Raises:
        ConfigError: a table does not have this column, or a row has no label.
    """
    columns: list[list[Any]] = []
    names = None
    for table in tables:
        values = [
            value.strip() if isinstance(value, str) else value for value in table[column_of(table, column, "label_column")]
        ]
        values = _numbers_of(values) if table.info.builder_name == "csv" else values
        class_names = getattr(table.features[column], "names", None)  # if there are any, values are indices into them
        nothing = (None, "", -1) if class_names else (None, "")
        without = sum(value in nothing or value != value for value in values)  # NaN is not equal to itself
        require(not without, f"data.label_column={column} has {without} of {len(values)} rows without a label: remove them")
        other = next((value for value in values if not isinstance(value, int | str)), None)
        require(
            other is None,
            f"data.label_column={column} must have words or whole numbers, got {type(other).__name__} ({other!r:.20}): a label is the "
            "name of a class",
        )
        names = names or class_names
        columns.append([class_names[value] for value in values] if class_names else values)
    seen = {value for values in columns for value in values}
    unknown = seen - set(names or seen)
    if unknown or len({type(value) for value in seen}) > 1:
        more = f"{', '.join(map(str, unknown))} in one split only" if unknown else "words and numbers"
        raise ConfigError(f"data.label_column={column} must have the same labels in both splits, got {more}")
    names = names or sorted(seen)
    number = {name: i for i, name in enumerate(names)}
    return [np.array([number[value] for value in values]) for values in columns], tuple(map(str, names))


def _numbers_of(texts: list[Any]) -> list[Any]:
    """The numbers or truth values of a column of texts, if all are, or the texts. Two texts of one whole number (01 and 1) stay texts."""
    import pandas

    different = [*{*texts}]
    if {str(text).lower() for text in different} <= {"true", "false"}:
        return [str(text).lower() == "true" for text in texts]
    try:
        numbers = dict(zip(different, pandas.to_numeric(pandas.Series(different)).tolist(), strict=True))
    except ValueError:
        return texts
    is_unclear = all(type(number) is int for number in numbers.values()) and len({*numbers.values()}) < len(numbers)
    return texts if is_unclear else [numbers[text] for text in texts]
