"""The method of every benchmark here: both sides in turn (A B B A), per-pair differences, a bootstrap interval, A against A."""

from __future__ import annotations

import datetime
import json
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import minitx  # its version stands in the package, so that a checkout on the path is enough

RESULTS = Path(__file__).parent / "results"


def in_pairs(a: Callable[[], float], b: Callable[[], float], pairs: int) -> tuple[list[float], list[float]]:
    """Measure ``a`` and ``b`` alternately, A B B A …, ``pairs`` times each."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for index in range(pairs):
        for side in (0, 1) if index % 2 == 0 else (1, 0):
            seconds[side].append((a, b)[side]())
    return seconds


def median_interval(values: Sequence[float], *, draws: int = 10_000) -> dict[str, float]:
    """Median with its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(np.asarray(values), size=(draws, len(values))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return {"median": float(np.median(values)), "low": float(low), "high": float(high)}


def write(name: str, results: dict[str, Any]) -> Path:
    """Write ``results/<name>.json`` with machine, versions, date and command."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    about = {
        "hardware": f"{_processor()}, {len(_cores())} cores",
        "versions": {"python": platform.python_version(), "torch": version("torch"), "minitx": minitx.__version__},
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(["benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    path.write_text(json.dumps({**about, **results}, indent=1) + "\n", encoding="utf-8")
    return path


def _cores() -> set[int]:
    import os

    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
