"""The method of every benchmark here, and its result files.

Both sides run in one process by turns, A B B A, in blocks of at least half a second. Each pair of neighbours gives a ratio. A row holds
the median ratio with a 95 % bootstrap interval of its logarithm, and the control: the same ratio between blocks of A alone, whose
interval must hold 1. A row meets its target when the whole interval does.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a checkout is enough
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the processes started here keep their bytecode, as a user's do
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler counts bytes here, and says so otherwise

import torch  # noqa: E402

import minitx  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
Interval = dict[str, float]
Row = dict[str, Any]


def parser(text: str | None, targets: Sequence[str] = (), pairs: int = 20) -> argparse.ArgumentParser:
    """A parser with the arguments of all programs: the pairs of blocks, and the ``targets`` to measure, if there are any."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--pairs", type=int, default=pairs, help="pairs of blocks of a row, an even number")
    if targets:
        made.add_argument("--only", nargs="+", default=targets, choices=targets, help="to measure; default: %(default)s")
    return made


def measure(topic: str, given: argparse.Namespace, parts: Mapping[str, Callable[[], Iterable[Row]]]) -> None:
    """Write the rows of the targets that were asked for."""
    torch.manual_seed(0)
    write(topic, [one for target in given.only for one in parts[target]()])


def now() -> float:
    """The clock, after a GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(work: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    started = now()
    work()
    return now() - started


def peak(work: Callable[[], object]) -> int:
    """The most bytes at once of those that ``work`` allocates."""
    if not torch.cuda.is_available():
        from minitx.nn.counting import allocations

        return allocations(work)[1]
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


def turns(pairs: int) -> list[int]:
    """Whose block is next, 0 for A and 1 for B; ``pairs`` (even) of neighbours.

    >>> turns(4)
    [0, 1, 1, 0, 1, 0, 0, 1]
    """
    return [side for index in range(pairs // 2) for side in ((0, 1, 1, 0) if index % 2 == 0 else (1, 0, 0, 1))]


def compare(a: Callable[[], object], b: Callable[[], object], *, pairs: int = 20, block: float = 0.5, warm: int = 2) -> Row:
    """How many times as fast ``b`` is as ``a``: see ``compared``."""
    repeats = [max(1, math.ceil(block / min(seconds_of(work) for _ in range(warm + 1)))) for work in (a, b)]

    def timed(side: int) -> float:
        return seconds_of(lambda: [(a, b)[side]() for _ in range(repeats[side])]) / repeats[side]

    return compared([(side, timed(side)) for side in turns(pairs)])


def compared(blocks: Sequence[tuple[int, float]]) -> Row:
    """``ratio`` (seconds of A over seconds of B), ``control`` and ``seconds`` of (side, seconds) measured in the order of ``turns``."""
    ratios, controls, seconds = [], [], ([], [])  # type: ignore[var-annotated]
    for index, first in enumerate(range(0, len(blocks), 4)):
        four = blocks[first : first + 4]
        for side, value in four:
            seconds[side].append(value)
        for (side, one), (_, other) in (four[:2], four[2:]):
            ratios.append(one / other if side == 0 else other / one)
        own = [value for side, value in four if side == 0]
        controls.append(own[0] / own[1] if index % 4 < 2 else own[1] / own[0])
    medians = [median_interval(values)["median"] for values in seconds]
    return {"ratio": ratio_interval(ratios), "control": ratio_interval(controls), "seconds": medians, "pairs": len(ratios)}


def median_interval(values: Sequence[float], *, draws: int = 10_000) -> Interval:
    """Median with its 95 % bootstrap interval."""
    found = torch.tensor(values, dtype=torch.float64, device="cpu")
    chosen = torch.randint(len(found), (draws, len(found)), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    low, high = found[chosen].quantile(0.5, dim=1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64, device="cpu"))
    return {"median": float(found.quantile(0.5)), "low": float(low), "high": float(high)}


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """Median of ratios with the 95 % bootstrap interval of its logarithm."""
    return {name: math.exp(value) for name, value in median_interval([math.log(ratio) for ratio in ratios]).items()}


def exact(value: float) -> Interval:
    """A number that was counted."""
    return dict.fromkeys(("median", "low", "high"), value)


def over(value: float, interval: Interval) -> Interval:
    """``value`` over a number with an interval.

    >>> over(1.0, {"median": 2.0, "low": 1.0, "high": 4.0})
    {'median': 0.5, 'low': 0.25, 'high': 1.0}
    """
    return {name: value / interval[other] for name, other in (("median", "median"), ("low", "high"), ("high", "low"))}


def row(target: str, what: str, label: str, found: Row, wanted: str | None, better: str = "higher", **more: Any) -> Row:
    """A row of a result file, printed.

    Args:
        target: such as P4. what: the sides. label: the setting, machine apart.
        found: an interval, or what ``compared`` returned; of that, B's time over A's where less is better.
        wanted: ``>= 1.2`` or ``<= 1.03``; its sign tells which numbers are better. None: no target.
        more: further entries.
    """
    if wanted is not None:
        better = "higher" if wanted.startswith(">=") else "lower"
    interval = found
    if "ratio" in found:
        interval = found["ratio"] if better == "higher" else over(1.0, found["ratio"])
        more = {name: found[name] for name in ("control", "seconds", "pairs")} | more
    made = {"target": target, "what": what, "label": label, **interval, "wanted": wanted, "better": better, **more}
    if "control" in made:
        made["control_holds"] = made["control"]["low"] <= 1.0 <= made["control"]["high"]
    print(f"{target}  {what}, {label}: {spread(made)}  {wanted or ''} {verdict(made)}", flush=True)
    return made


def verdict(one: Row) -> str:
    """``met`` or ``missed`` by the whole interval; nothing where nothing was wanted."""
    if one["wanted"] is None:
        return ""
    sign, bound = one["wanted"].split()
    good = one["low"] >= float(bound) if sign == ">=" else one["high"] <= float(bound)
    return "met" if good else "missed"


def spread(one: Row) -> str:
    """Median and interval as people read them."""
    return number(one["median"]) + ("" if one["low"] == one["high"] else f" ({number(one['low'])}–{number(one['high'])})")


def number(value: float) -> str:
    """Three digits that count, four from 1 on.

    >>> [number(x) for x in (0.000123456, 0.5, 1.02345, 1234.5)]
    ['0.000123', '0.500', '1.023', '1234']
    """
    return f"{value:.3g}" if 0 < abs(value) < 0.01 else f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


def about() -> Row:
    """Machine, versions, commit, date and command of this process."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # where a file lies here is nobody's concern
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    program = Path(sys.argv[0]).resolve()
    name = str(program.relative_to(ROOT)) if program.is_relative_to(ROOT) else program.name
    return {
        "hardware": f"{processor}, {cores} cores, {torch.backends.cpu.get_cpu_capability()}",
        "versions": {"python": platform.python_version(), "torch": version("torch"), "minitx": minitx.__version__},
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", name, *words]),
        "threads": torch.get_num_threads(),
    }


def commit() -> str:
    """The commit that is measured, with a + where the code differs from it; empty outside of a checkout."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)

    try:
        head = git("rev-parse", "--short=10", "HEAD")
        changed = git("diff", "--quiet", "HEAD", "--", "minitx", "configs", "scripts", ":(glob)benchmarks/*.py")
    except OSError:
        return ""
    return head.stdout.strip() + "+" * changed.returncode if head.returncode == 0 else ""


def write(topic: str, rows: Sequence[Row], **more: Any) -> Path:
    """Add a run to ``results/TOPIC.json``. It takes the place of older rows with the same target, sides and setting."""
    path = RESULTS / f"{topic}.json"
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    new = {(one["target"], one["what"], one["label"]) for one in rows}
    for run in runs:
        run["rows"] = [one for one in run["rows"] if (one["target"], one["what"], one["label"]) not in new]
    runs = [*(run for run in runs if run["rows"]), {**about(), **more, "rows": list(rows)}]
    return save(topic, {"topic": topic, "runs": runs})


def save(name: str, content: Row) -> Path:
    """Write ``results/NAME.json`` and say where."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(path.relative_to(ROOT))
    return path
