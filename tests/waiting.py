"""How tests wait: for a condition, never for a measured time. A busy machine makes a test slow and never makes it fail."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

PATIENCE = 600.0
"""Seconds after which a test gives up on something that hangs."""


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Return as soon as ``condition()`` is true.

    Args:
        process: what makes it true; when this process ends first, nothing is left to wait for.

    Raises:
        AssertionError: ``process`` ended first, or ``PATIENCE`` has passed.
    """
    end = time.monotonic() + PATIENCE
    while not condition():
        if process is not None and process.poll() is not None:
            assert condition(), f"the process ended first, with exit code {process.returncode}"
            return
        assert time.monotonic() < end, f"the condition was not true after {PATIENCE:.0f} s"
        time.sleep(0.02)
