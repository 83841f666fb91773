"""Writing files: a crash or a full disk leaves the old file or the new one, and the error names the file."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PART = ".part"
"""The ending of an incomplete file."""


@contextmanager
def replacing(path: Path, *, is_shared: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file, and rename the file to ``path`` at the end. After an error, ``path`` is unchanged.

    Args:
        is_shared: whether several processes may write ``path`` at once. The last process wins, and the file is always complete.
    """
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PART}" if is_shared else f"{path.name}{PART}")
    try:
        yield part
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A context that adds ``path`` to an ``OSError`` without a file name, such as the error of a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from None
