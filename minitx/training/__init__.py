"""Training. This file imports only the standard library."""

from __future__ import annotations

import os


def rank() -> int:
    """Return the rank of this process in the run, from the environment. It is 0 for a single process."""
    return int(next((os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ), "0"))
