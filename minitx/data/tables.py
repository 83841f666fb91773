"""Tables through ``datasets``: local files and folders, and names on the Hugging Face hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np

from minitx.config import ConfigError
from minitx.config.checks import first_line
from minitx.config.data import TableDataConfig
from minitx.data.task import hold_out

KINDS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
SECONDS_TO_ANSWER = 5.0


def load_tables(config: TableDataConfig, **options: Any) -> tuple[Any, Any | None]:
    """The training table of ``config`` and, where the config names one, that of validation; ``options`` as in ``load_table``.

    Raises:
        ConfigError: see ``load_table``.
    """
    table = load_table(str(config.path), split=config.split, subset=config.subset, **options)
    if config.val_path is None and config.val_split is None:
        return table, None
    options |= {"key": "path" if config.val_path is None else "val_path", "split_key": "val_split", "subset": config.subset}
    return table, load_table(str(config.val_path or config.path), split=config.val_split or "train", **options)


def load_table(
    path: str,
    *,
    split: str = "train",
    subset: str | None = None,
    key: str = "path",
    split_key: str = "split",
    texts: Sequence[str | int] = (),
    header: bool = True,
    kind: str | None = None,
    streaming: bool = False,
) -> Any:
    """The ``datasets.Dataset`` (``streaming``: ``IterableDataset``) of a split.

    Args:
        path: a file, several (``*.csv``), a folder, or a name on the hub; the value of ``data.KEY``.
        split: the value of ``data.SPLIT_KEY``.
        subset: which of several sets at ``path``.
        texts: columns of csv and tsv files that are texts, whatever they look like.
        header: the first row of csv and tsv files has the names of the columns; else they are numbered from 0.
        kind: how a file is read (``text``: a row for each line; ``csv``); ``None``: as its suffix says.

    Raises:
        ConfigError: nothing is there, the hub cannot be reached, there is no such split, or the files cannot be read.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"data.{key}={path} needs the package datasets: pip install datasets") from None
    options: dict[str, Any] = {"path": path, "name": subset, "split": split, "streaming": streaming}
    local = Path(path).expanduser()
    files = sorted(glob(str(local), recursive=True)) if any(sign in path for sign in "*?[") else [str(local)]
    if local.is_dir():
        options["path"] = str(local)
    elif files and Path(files[0]).is_file():
        options |= {"name": None, "data_files": {"train": files}, **_reader(files, f"data.{key}={path}", kind, texts, header)}
    elif not files or local.suffix.lower() in KINDS or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError(f"data.{key}={path} does not exist; a file, a folder or a name on the Hugging Face hub is wanted")
    else:
        _check_hub(path, key)
    try:
        with _quiet(datasets) if local.exists() or "data_files" in options else contextlib.nullcontext():
            return datasets.load_dataset(**options)
    except Exception as error:  # datasets raises many kinds, some of them long
        raise _explained(error, f"data.{key}={path}", f"data.{split_key}={split}") from None


def _reader(files: Sequence[str], said: str, kind: str | None, texts: Sequence[str | int], header: bool) -> dict[str, Any]:
    """Which of the readers of ``datasets`` reads these files, and how."""
    suffixes = sorted({Path(file).suffix.lower() for file in files})
    if kind is None and (len(suffixes) > 1 or suffixes[0] not in KINDS):
        raise ConfigError(f"{said} must be of one of the kinds {', '.join(KINDS)}, got {', '.join(suffixes)}")
    if all(Path(file).stat().st_size == 0 for file in files):
        raise ConfigError(f"{said} is empty")
    kind = kind or KINDS[suffixes[0]]
    if kind != "csv":
        return {"path": kind, **({"encoding": "utf-8-sig"} if kind == "text" else {})}
    commas = {} if suffixes == [".csv"] else {"sep": "\t", "quoting": 3}  # behind tabs, a quote is text
    names = {} if header else {"header": None}
    return {"path": kind, "keep_default_na": False, "converters": dict.fromkeys(texts, str), **commas, **names}


def _check_hub(path: str, key: str) -> None:
    """Ask the hub for the data set once, because ``datasets`` itself tries again for a minute or more."""
    import datasets
    from huggingface_hub import dataset_info
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        if not datasets.config.HF_HUB_OFFLINE:  # else what was fetched before is read from the cache
            dataset_info(path, timeout=SECONDS_TO_ANSWER)
    except OfflineModeIsEnabled:
        return
    except RepositoryNotFoundError:
        raise ConfigError(f"data.{key}={path} is no data set of the Hugging Face hub, or a private one") from None
    except Exception as error:  # of several packages for HTTP
        raise ConfigError(
            f"data.{key}={path}: the Hugging Face hub cannot be reached ({first_line(error)}); HF_HUB_OFFLINE=1 reads what was "
            "fetched before, and data.path=FILE a file of yours"
        ) from None


def _explained(error: Exception, said: str, split: str) -> ConfigError:
    """One sentence for what ``datasets`` raised."""
    cause = error.__cause__ or error.__context__
    if type(error).__name__ == "DatasetGenerationError" and isinstance(cause, Exception):
        error = cause
    text = first_line(error)
    if "split" in text.lower() and ("unknown" in text.lower() or "not found" in text.lower()):
        return ConfigError(f"{split} is no split of {said}: {text}")
    if isinstance(error, ConnectionError):
        return ConfigError(
            f"{said} was not fetched before, and the Hugging Face hub cannot be reached; fetch it once where there is a network, "
            "or read a file or folder of yours: data.path=FILE"
        )
    return ConfigError(f"{said} cannot be read: {text}")


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """No bars and no logs of ``datasets`` for local files; its errors are reported by us."""
    level, shows_bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shows_bars:
            datasets.enable_progress_bars()


def column_of(table: Any, wanted: str, key: str) -> str:
    """``wanted`` if it is a column of ``table``.

    Raises:
        ConfigError: it is none; the message lists those that are.
    """
    names = table.column_names or list(next(iter(table), {}))  # a stream may not know its columns
    if wanted not in names:
        raise ConfigError(f"data.{key}={wanted} is no column of the data, which has: {', '.join(map(str, names))}")
    return wanted


def texts_of(table: Any, column: str, key: str) -> list[str]:
    """The texts of a column; ``null`` is an empty text.

    Raises:
        ConfigError: there is no such column, or it has something else than texts.
    """
    texts = list(table[column_of(table, column, key)])
    other = next((text for text in texts if not isinstance(text, str | None)), None)
    if other is not None:
        raise ConfigError(f"data.{key}={column} must have texts, got {type(other).__name__}")
    return [text or "" for text in texts]


def labels_of(table: Any, column: str, known: Sequence[str] | None = None) -> tuple[np.ndarray, tuple[str, ...]]:
    """The labels (N,) int64 of a column, and the names of all labels.

    Args:
        known: the names that training knows; ``None``: those of the column, sorted.

    Raises:
        ConfigError: no such column, no label in a row, or one that training does not know.
    """
    values = list(table[column_of(table, column, "label_column")])
    names = getattr(table.features[column], "names", None)  # values are numbers of these, if there are any
    if not values or not all(isinstance(value, int | str) for value in values):
        raise ConfigError(f"data.label_column={column} does not have a label in each row")
    if names is not None:
        if min(values) < 0:
            raise ConfigError(f"data.label_column={column} has rows without a label (-1)")
        values = [names[value] for value in values]
    found = [str(value) for value in sorted(set(values))] if names is None else list(map(str, names))
    known = tuple(known or found)
    number = {name: i for i, name in enumerate(known)}
    other = next((value for value in values if str(value) not in number), None)
    if other is not None:
        raise ConfigError(f"data.label_column={column} has the label {other} in validation, which training has not")
    return np.array([number[str(value)] for value in values]), known


def held_out(groups: Sequence[Any], fraction: float, name: str) -> tuple[np.ndarray, np.ndarray]:
    """``hold_out`` of rows that came from outside.

    Raises:
        ConfigError: too few groups.
    """
    try:
        return hold_out(groups, fraction)
    except ValueError:
        raise ConfigError(
            f"{name} has {len(set(groups))} rows that differ, too few for a training and a validation split"
        ) from None
