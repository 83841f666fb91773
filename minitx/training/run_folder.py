"""The folder of a run, with the log of each process."""

from __future__ import annotations

import errno
import fcntl
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from minitx.config import ConfigError
from minitx.crash_safe import replacing
from minitx.training import rank
from minitx.training.checkpoint_files import clean_up
from minitx.training.metrics_csv import read_metrics


@contextmanager
def run_folder(folder: Path, files: Mapping[str, str]) -> Iterator[None]:
    """A context that creates the run's folder and its text files, and copies the log of each process to ``logs/rank_N.log``.

    If an error occurs before the first step, a new folder is removed. The traceback of an error is written only to the log
    file. While the context lasts, no other process can enter it for the same folder and rank.

    Raises:
        ConfigError: the folder cannot be created or written, or another process trains in it.
    """
    path = folder / "logs" / f"rank_{rank()}.log"
    try:
        new_folders = [place for place in (folder, *folder.parents) if not place.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"output_dir={folder} cannot be written: {error.strerror}") from None
    with closing(handler), _locked(handler, folder):
        try:
            with _log_to(handler):
                if not rank():
                    _write(folder, files)
                yield
        except ConfigError:
            if not rank() and (not (folder / "metrics.csv").exists() or not read_metrics(folder / "metrics.csv")):
                for new_folder in new_folders:
                    with suppress(OSError):  # others already use a parent folder
                        shutil.rmtree(new_folder) if new_folder == folder else new_folder.rmdir()
            raise


@contextmanager
def _locked(handler: logging.FileHandler, folder: Path) -> Iterator[None]:
    """A context that locks the log of this process. The lock ends with the process, and its children do not have it."""
    assert handler.stream is not None
    try:
        fcntl.lockf(handler.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):  # others: a file system without locks
            raise ConfigError(f"output_dir={folder}: another process is training in this folder") from None
    yield


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write the text files of a run, and remove files that a killed run left."""
    try:
        clean_up(folder / "checkpoints")
        for name, text in files.items():
            with replacing(folder / name) as new:
                new.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output_dir={folder} cannot be written: {error.strerror}") from None


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignore a full disk here: the run stops when a metric or a checkpoint cannot be written."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def _log_to(handler: logging.FileHandler) -> Iterator[None]:
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    except Exception as error:
        handler.emit(logging.makeLogRecord({"msg": error, "exc_info": (type(error), error, error.__traceback__)}))
        raise
    finally:
        root.removeHandler(handler)
