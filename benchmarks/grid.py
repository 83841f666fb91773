"""P12 and P14: wall time of the quick grid with its report, and of the tests.

    python benchmarks/grid.py                # runs experiment=scaling_ablation in a temporary folder
    python benchmarks/grid.py --folder runs/scaling_ablation/quick     # the records of a grid that ran; without the second row
    python benchmarks/grid.py --only P14     # runs the tests

While the grid runs, the ``seconds`` of every run's ``metrics.csv`` are read again and again: they count training steps alone. The
share outside of them is that of the time that the workers were busy with runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness import ROOT, Row, exact, parser, row, seconds_of, write

from minitx.training.loggers import read_metrics


def run_grid(folder: Path, words: list[str]) -> tuple[float, dict[Path, float]]:
    """Wall seconds of the grid, and the training seconds of each of its runs."""
    command = [sys.executable, str(ROOT / "scripts/train.py"), "experiment=scaling_ablation", f"output_dir={folder}", *words]
    training: dict[Path, float] = {}
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT) as process:
        while process.poll() is None:
            time.sleep(0.05)
            for path in [Path(place, "metrics.csv") for place, _, files in os.walk(folder) if "metrics.csv" in files]:
                try:
                    rows = [one["seconds"] for one in read_metrics(path) if one["seconds"] is not None]
                except (OSError, ValueError, KeyError):  # gone, or half written
                    continue
                training[path] = rows[-1] if rows else 0.0
    if process.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with {process.returncode}")
    return time.perf_counter() - began, training


def grid(folder: Path | None, words: list[str]) -> Iterator[Row]:
    """P12."""
    with tempfile.TemporaryDirectory() as name:
        training: dict[Path, float] = {}
        place = folder or Path(name) / "grid"
        if folder is None:
            wall, training = run_grid(place, words)
        (cells,) = place.rglob("cells.jsonl")
        if folder is not None:
            wall = sum(
                launch["wall_seconds"] for launch in json.loads(cells.with_name("launches.json").read_text(encoding="utf-8"))
            )
        records = [json.loads(line) for line in cells.read_text(encoding="utf-8").splitlines()]
    label = cells.parent.name if folder else " ".join(words) or "quick"
    yield row("P12", "minutes of the quick grid with its report", label, exact(wall / 60), "<= 5")
    if training:
        busy = sum(record["seconds"] for record in records)
        share = 1 - sum(seconds for path, seconds in training.items() if "projection" not in path.parts) / busy
        yield row("P12", "share of worker time outside of training steps", label, exact(share), "<= 0.15", busy_seconds=busy)


def tests() -> Row:
    """P14."""
    command = [sys.executable, "-m", "pytest", "-n", str(len(os.sched_getaffinity(0))), "--dist", "worksteal"]
    seconds = seconds_of(lambda: subprocess.run(command, cwd=ROOT, check=True))
    return row("P14", "seconds of the tests", "what make test runs", exact(seconds), "<= 150")


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--folder", type=Path, help="of a grid that ran")
    parse.add_argument("words", nargs="*", help="further words for train.py, such as ablation=smoke")
    given = parse.parse_args()
    if given.folder is not None and not given.folder.is_dir():
        raise SystemExit(f"error: {given.folder} is no folder; make ablation runs the quick grid")
    parts = {"P12": lambda: list(grid(given.folder, given.words)), "P14": lambda: [tests()]}
    write("grid", [one for target in given.only or ["P12"] for one in parts[target]()])


if __name__ == "__main__":
    main()
