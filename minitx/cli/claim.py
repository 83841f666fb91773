"""A folder belongs to one run at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from minitx.cli.launch import FOLDER, rank
from minitx.config import ConfigError

LOCK = ".lock"
STARTED = ("metrics.csv", "checkpoints", "cells.jsonl")


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make ``folder`` and keep other processes from running in it; the kernel lets go when this process dies.

    Of several processes of one run the first one claims, or the program that started them. A folder that was made here goes
    again where the run found a mistake before it began.

    Raises:
        ConfigError: another run is going on in it, or it cannot be made or written.
    """
    if rank() or FOLDER in os.environ:
        yield
        return
    made = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / LOCK).open("a"))
        except OSError as error:
            _remove_empty(made)
            reason = "a symbolic link that leads nowhere" if folder.is_symlink() else error.strerror
            raise ConfigError(f"output_dir={folder} cannot be written: {reason}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"output_dir={folder} belongs to a run that is going on; wait for its end, or choose another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        except ConfigError:
            if made and not any((folder / name).exists() for name in STARTED):
                for name in ("config.yaml", "command.txt"):
                    (folder / name).unlink(missing_ok=True)
            raise
        finally:
            (folder / LOCK).unlink(missing_ok=True)
            _remove_empty(made)


def _remove_empty(folders: list[Path]) -> None:
    """Remove the folders, the deepest one first, as long as nothing is in them."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
