"""The place of this process among those of a run, from the environment. Only the standard library is imported."""

from __future__ import annotations

import os


def rank() -> int:
    """Return the rank of this process in the run. It is 0 for a single process."""
    return int(next((os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ), "0"))
