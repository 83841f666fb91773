"""P12 and P14: wall time of the quick grid with its report, and of the tests.

python benchmarks/grid.py                # runs experiment=scaling_ablation in a temporary folder, then the tests
python benchmarks/grid.py --only P12 --folder runs/scaling_ablation/quick     # the records of a grid that ran
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import ROOT, Row, exact, parser, row, seconds_of, write


def grid(folder: Path | None, words: list[str]) -> Row:
    """P12."""
    if folder is None:
        with tempfile.TemporaryDirectory() as name:
            place = f"output_dir={name}/grid"
            command = [sys.executable, "scripts/train.py", "experiment=scaling_ablation", place, *words]
            wall, label = seconds_of(lambda: subprocess.run(command, cwd=ROOT, check=True)), " ".join(words) or "quick"
    else:
        (launches,) = folder.rglob("launches.json")
        wall = sum(launch["wall_seconds"] for launch in json.loads(launches.read_text(encoding="utf-8")))
        label = launches.parent.name
    return row("P12", "minutes of the quick grid with its report", label, exact(wall / 60), "<= 5")


def tests() -> Row:
    """P14."""
    command = [sys.executable, "-m", "pytest", "-n", str(len(os.sched_getaffinity(0))), "--dist", "worksteal"]
    seconds = seconds_of(lambda: subprocess.run(command, cwd=ROOT, check=True))
    return row("P14", "seconds of the tests", "what make test runs", exact(seconds), "<= 150")


def main() -> None:
    parse = parser(__doc__, ("P12", "P14"))
    parse.add_argument("--folder", type=Path, help="of a grid that ran")
    parse.add_argument("words", nargs="*", help="further words for train.py, such as ablation=smoke")
    given = parse.parse_args()
    if given.folder is not None and not given.folder.is_dir():
        raise SystemExit(f"error: {given.folder} is no folder; make ablation runs the quick grid")
    parts = {"P12": lambda: grid(given.folder, given.words), "P14": tests}
    write("grid", [parts[target]() for target in given.only])


if __name__ == "__main__":
    main()
