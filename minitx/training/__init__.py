"""Training. This file imports only the standard library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def rank() -> int:
    """Return the rank of this process in the run, from the environment. It is 0 for a single process."""
    return int(next((os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ), "0"))


@contextmanager
def kept_environment(*names: str) -> Iterator[None]:
    """A context that restores these environment variables."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
