"""The folder of a run: its text files, and the log of each process."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from minitx.config import ConfigError
from minitx.training.checkpoint import clean_up
from minitx.training.metrics import read_metrics
from minitx.training.ranks import rank


def check_free(folder: Path, ckpt_path: str | None) -> None:
    """Check, in the first process, that a new run replaces no other.

    Raises:
        ConfigError: the folder holds a run, and ``ckpt_path`` is None.
    """
    if ckpt_path is None and (folder / "metrics.csv").exists() and not rank():
        raise ConfigError(f"output_dir={folder} holds a run already; continue it with ckpt_path=last, or choose another folder")


@contextmanager
def run_folder(folder: Path, files: Mapping[str, str]) -> Iterator[None]:
    """A context that makes the run's folder with its text files, and copies the log of each process to ``logs/rank_N.log``.

    An error before the first step removes the new folder. The traceback of an error is written to the log file only.

    Raises:
        ConfigError: the folder cannot be created or written.
    """
    made = [] if rank() else _make(folder, files)
    try:
        with _log_to(folder / "logs" / f"rank_{rank()}.log"):
            yield
    except ConfigError:
        if not (folder / "metrics.csv").exists() or not read_metrics(folder / "metrics.csv"):
            for each in made:
                with suppress(OSError):  # a folder above that others use by now
                    shutil.rmtree(each) if each == folder else each.rmdir()
        raise


def _make(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Make the folder and its files; the folders that were not there, the innermost first."""
    try:
        made = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        clean_up(folder / "checkpoints")
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output_dir={folder} cannot be written: {error.strerror}") from None
    return made


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Say nothing of a full disk here: the run stops when a metric or a checkpoint cannot be written."""


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    except Exception as error:
        kind = type(error), error, error.__traceback__
        handler.emit(logging.LogRecord(__name__, logging.ERROR, __file__, 0, "%s", (error,), kind))
        raise
    finally:
        root.removeHandler(handler)
        with suppress(OSError):
            handler.close()
