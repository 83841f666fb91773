"""Files that a crash or a full disk does not damage, because they are replaced as a whole."""

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
