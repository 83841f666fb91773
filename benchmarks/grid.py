"""P12 and P14: wall time of the quick grid with its report, and of the tests.

python benchmarks/grid.py                # runs experiment=scaling_ablation in a temporary folder, then the tests
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from harness import ROOT, Row, exact, measure, parser, row, seconds_of


def seconds(*words: str) -> float:
    """Wall seconds of a Python process that ends well."""
    return seconds_of(lambda: subprocess.run([sys.executable, *words], cwd=ROOT, check=True))


def grid() -> list[Row]:
    """P12."""
    with tempfile.TemporaryDirectory() as name:
        wall = seconds("scripts/train.py", "experiment=scaling_ablation", f"output_dir={name}/grid")
    return [row("P12", "minutes of the quick grid with its report", "quick", exact(wall / 60), "<= 5")]


def tests() -> list[Row]:
    """P14."""
    wall = seconds("-m", "pytest", "-n", str(len(os.sched_getaffinity(0))), "--dist", "worksteal")
    return [row("P14", "seconds of the tests", "what make test runs", exact(wall), "<= 150")]


def main() -> None:
    measure("grid", parser(__doc__, ("P12", "P14")).parse_args(), {"P12": grid, "P14": tests})


if __name__ == "__main__":
    main()
