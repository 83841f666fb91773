"""The method of every benchmark here: both sides in turn (A B B A), per-pair differences, a bootstrap interval, A against A."""

from __future__ import annotations

import datetime
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import minitx  # its version stands in the package, so that a checkout on the path is enough

RESULTS = Path(__file__).parent / "results"


def in_pairs(a: Callable[[], float], b: Callable[[], float], pairs: int) -> tuple[list[float], list[float]]:
    """Measure ``a`` and ``b`` alternately, A B B A …, ``pairs`` times each."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for index in range(pairs):
        for side in (0, 1) if index % 2 == 0 else (1, 0):
            seconds[side].append((a, b)[side]())
    return seconds


def seconds_of(work: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(
    a: Callable[[], object], b: Callable[[], object], *, pairs: int = 20, block: float = 0.5, warm: int = 2
) -> dict[str, Any]:
    """How many times as fast ``b`` is as ``a``: both in blocks of ``block`` seconds at least, in the order A B B A.

    ``pairs`` of neighbours A and B give ``ratio`` (seconds of A over seconds of B, median with its 95 % interval, made on the
    logarithm); the two blocks of A in every A B B A, which is first and which last by turns, give ``control``, whose interval must
    hold 1 (``control_holds``). ``pairs`` is an even number.
    """
    for work in (a, b):
        for _ in range(warm):
            work()
    repeats = [max(1, math.ceil(block / seconds_of(work))) for work in (a, b)]

    def timed(side: int) -> float:
        return seconds_of(lambda: [(a, b)[side]() for _ in range(repeats[side])]) / repeats[side]

    return compared([(side, timed(side)) for side in turns(pairs)])


def turns(pairs: int) -> list[int]:
    """Whose block is next, 0 for A and 1 for B: A B B A, B A A B, …; ``pairs`` (even) of neighbours.

    >>> turns(4)
    [0, 1, 1, 0, 1, 0, 0, 1]
    """
    return [side for index in range(pairs // 2) for side in ((0, 1, 1, 0) if index % 2 == 0 else (1, 0, 0, 1))]


def compared(blocks: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """What ``compare`` returns, from the (side, seconds) of blocks that were measured in the order of ``turns``."""
    ratios, controls, seconds = [], [], ([], [])  # type: ignore[var-annotated]
    for index, first in enumerate(range(0, len(blocks), 4)):
        four = blocks[first : first + 4]
        for side, value in four:
            seconds[side].append(value)
        for (side, one), (_, other) in (four[:2], four[2:]):
            ratios.append(one / other if side == 0 else other / one)
        own = [value for side, value in four if side == 0]
        controls.append(own[0] / own[1] if index % 4 < 2 else own[1] / own[0])
    control = ratio_interval(controls)
    return {
        "ratio": ratio_interval(ratios),
        "control": control,
        "control_holds": control["low"] <= 1.0 <= control["high"],
        "a_seconds": median_interval(seconds[0])["median"],
        "b_seconds": median_interval(seconds[1])["median"],
        "pairs": len(ratios),
    }


def judged(name: str, interval: dict[str, float], wanted: str | None, **more: Any) -> dict[str, Any]:
    """A row of ``rows`` in a result: what was measured, and whether the whole interval meets ``wanted`` (``>= 1.2``, ``<= 1.02``).

    ``wanted=None`` is a number that no target speaks of. ``more`` are further columns.

    >>> judged("speed", {"median": 1.4, "low": 1.3, "high": 1.5}, ">= 1.2")["met"]
    True
    """
    row = {"name": name, **interval, "wanted": wanted}
    if wanted is not None:
        sign, bound = wanted.split()
        row["met"] = {">=": interval["low"] >= float(bound), "<=": interval["high"] <= float(bound)}[sign]
    return {**row, **more}


def inverse(interval: dict[str, float]) -> dict[str, float]:
    """1 / a ratio and its interval: A over B as B over A."""
    return {"median": 1.0 / interval["median"], "low": 1.0 / interval["high"], "high": 1.0 / interval["low"]}


def row(name: str, found: dict[str, Any], wanted: str | None, **more: Any) -> dict[str, Any]:
    """``judged`` of what ``compare`` returned. ``wanted`` with ``<=`` speaks of B's time over A's, with ``>=`` of how many
    times as fast B is as A."""
    ratio = inverse(found["ratio"]) if wanted is not None and wanted.startswith("<=") else found["ratio"]
    return judged(name, ratio, wanted, **{key: value for key, value in found.items() if key != "ratio"}, **more)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """``rows`` of a result as a Markdown table."""
    lines = ["| measured | median | 95 % | wanted | | A, s | B, s | A against A |", "|---|---|---|---|---|---|---|---|"]
    for one in rows:
        interval = "" if one["low"] == one["high"] else f"{number(one['low'])} to {number(one['high'])}"
        seconds = [number(one[key]) if key in one else "" for key in ("a_seconds", "b_seconds")]
        control = one.get("control")
        own = f"{number(control['low'])} to {number(control['high'])}" if control else ""
        told = own if one.get("control_holds", True) else f"{own}, does not hold 1"
        cells = (one["name"], number(one["median"]), interval, wish(one), verdict(one), *seconds, told)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def number(value: float) -> str:
    """Three digits that count, four from 1 on.

    >>> [number(x) for x in (0.000123456, 0.5, 1.02345, 1234.5)]
    ['0.000123', '0.500', '1.023', '1234']
    """
    return f"{value:.3g}" if 0 < abs(value) < 0.01 else f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


def wish(one: dict[str, Any]) -> str:
    """What a row was to be."""
    return one["wanted"] or ""


def verdict(one: dict[str, Any]) -> str:
    """Whether a row is what it was to be, where that was said."""
    return "" if one["wanted"] is None else "met" if one["met"] else "missed"


def ratio_interval(ratios: Sequence[float]) -> dict[str, float]:
    """Median of ratios with the 95 % bootstrap interval of its logarithm."""
    return {name: math.exp(value) for name, value in median_interval([math.log(ratio) for ratio in ratios]).items()}


def median_interval(values: Sequence[float], *, draws: int = 10_000) -> dict[str, float]:
    """Median with its 95 % bootstrap interval."""
    found = torch.tensor(values, dtype=torch.float64, device="cpu")
    chosen = torch.randint(len(found), (draws, len(found)), generator=torch.Generator().manual_seed(0), device="cpu")
    low, high = found[chosen].quantile(0.5, dim=1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64, device="cpu"))
    return {"median": float(found.quantile(0.5)), "low": float(low), "high": float(high)}


def reached(loss: float, points: dict[int, float]) -> float:
    """How many tokens (or steps) have ``loss``, on the line through (ln tokens, loss) of the shortest and the longest run."""
    (x0, y0), (x1, y1) = ((math.log(tokens), points[tokens]) for tokens in (min(points), max(points)))
    return math.exp(x0 + (y0 - loss) * (x1 - x0) / (y0 - y1))


def write(name: str, results: dict[str, Any]) -> Path:
    """Write ``results/<name>.json`` with machine, versions, date and command."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    words = [
        Path(word).name if word.startswith("/") else word for word in sys.argv[1:]
    ]  # where a file lies here is nobody's concern
    about = {
        "hardware": f"{_processor()}, {len(_cores())} cores, {torch.backends.cpu.get_cpu_capability()}",
        "versions": {"python": platform.python_version(), "torch": version("torch"), "minitx": minitx.__version__},
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(["benchmarks/" + Path(sys.argv[0]).name, *words]),
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
