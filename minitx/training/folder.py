"""The folder of a run: its text files, and the log of each process."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from minitx.config import ConfigError
from minitx.training.checkpoint import clean_up


def make_folder(folder: Path, files: Mapping[str, str]) -> Callable[[], None]:
    """Make the run's folder with its text files. Only the first process does.

    Returns:
        A function that removes the folder again, and those above it, if they were made here.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    if _rank():
        return lambda: None
    try:
        new = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        clean_up(folder / "checkpoints")
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output_dir={folder} cannot be written: {error.strerror}") from None

    def undo() -> None:
        for made in new:
            with suppress(OSError):  # a folder above that others use by now
                shutil.rmtree(made) if made == folder else made.rmdir()

    return undo


def _rank() -> int:
    return getattr(rank_zero_only, "rank", 0)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Say nothing of a full disk here: the run stops when a metric or a checkpoint cannot be written."""


@contextmanager
def rank_log(folder: Path) -> Iterator[None]:
    """Copy this process's log to ``logs/rank_N.log``. The traceback of an error goes to that file only."""
    path = folder / "logs" / f"rank_{_rank()}.log"
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
