"""Tables of rows through ``datasets``: hub names and local files, with an answer at once where there is no network."""

from __future__ import annotations

import contextlib
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minitx.config import ConfigError

KINDS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
SECONDS_TO_ANSWER = 3.0


def load_table(path: str, *, split: str, subset: str | None = None, key: str = "split") -> Any:
    """The ``datasets.Dataset`` of a split: a local file or folder, else a name on the Hugging Face hub.

    A file of text has a row for each line, in a column ``text``. A local file is one split, ``train``.

    Args:
        path: ``data.path``. split: ``data.key``. subset: which of several sets at ``path``.

    Raises:
        ConfigError: nothing is there, the hub cannot be reached and has not been before, or there is no such split.
    """
    local = Path(path).expanduser()
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"data.path={path} needs the package datasets: pip install datasets") from None
    reached = True
    options: dict[str, Any] = {"path": path, "name": subset, "split": split}
    if local.is_file():
        if local.stat().st_size == 0:
            raise ConfigError(f"data.path={path} is empty; a file of documents is wanted")
        if local.suffix.lower() not in KINDS:
            raise ConfigError(f"data.path={path} is of no kind that is read here: {', '.join(KINDS)}, or a folder of them")
        options |= {"path": KINDS[local.suffix.lower()], "name": None, "data_files": {"train": str(local)}}
        options |= {"sep": "\t"} if local.suffix.lower() == ".tsv" else {}
    elif local.is_dir():
        options["path"] = str(local)
    elif local.suffix.lower() in KINDS or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError(f"data.path={path} does not exist; a file, a folder or a name on the Hugging Face hub is wanted")
    try:
        with _quiet(datasets) if local.exists() else _hub(datasets) as reached:
            return datasets.load_dataset(**options)
    except Exception as error:  # datasets raises many kinds, some of them long
        raise _explained(error, path, split, key, reached) from None


def _explained(error: Exception, path: str, split: str, key: str, reached: bool) -> ConfigError:
    """One sentence for what ``datasets`` raised."""
    said = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    if "Unknown split" in said or ("split" in said.lower() and "not found" in said.lower()):
        return ConfigError(f"data.{key}={split} is no split of {path}: {said}")
    if not reached:
        return ConfigError(
            f"data.path={path} is not in the cache and the Hugging Face hub cannot be reached; fetch it once where there is "
            f"a network, or read a file or folder of your own: data.path=FILE"
        )
    cause = error.__cause__ or error.__context__
    if type(error).__name__ == "DatasetGenerationError" and cause:
        said = str(cause).strip().splitlines()[0][:300]
    return ConfigError(f"data.path={path} cannot be read: {said}")


@contextlib.contextmanager
def _hub(datasets: Any) -> Iterator[bool]:
    """Whether the hub answers; where it does not, ``datasets`` is told to look into its cache alone, without retries."""
    was_offline = datasets.config.HF_HUB_OFFLINE
    reached = not was_offline and answers(datasets.config.HF_ENDPOINT, SECONDS_TO_ANSWER)
    datasets.config.HF_HUB_OFFLINE = not reached
    try:
        yield reached
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[bool]:
    """Local files are read without bars, and what is wrong with them is said by us."""
    level, shows_bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield True
    finally:
        datasets.logging.set_verbosity(level)
        if shows_bars:
            datasets.enable_progress_bars()


def answers(url: str, seconds: float) -> bool:
    """Whether a server answers (anything) within ``seconds``; looking up its name, which has no limit of its own, counts."""
    found = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds).close()
            found.append(True)
        except urllib.error.HTTPError:
            found.append(True)
        except (OSError, ValueError):
            pass

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return bool(found)


def column_of(table: Any, wanted: str, key: str) -> str:
    """``wanted`` if it is a column of ``table``.

    Raises:
        ConfigError: it is none; the message lists those that are.
    """
    if wanted not in table.column_names:
        raise ConfigError(f"data.{key}={wanted} is no column of the data, which has: {', '.join(table.column_names)}")
    return wanted
