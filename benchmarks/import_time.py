"""What ``import minitx.nn`` costs where torch is imported already, in fresh processes. Target: at most 0.1 s.

Timed inside of each process, because the difference of two whole processes drowns in the two seconds of ``import torch``. With
bytecode, as an installed package has it: PYTHONDONTWRITEBYTECODE is left out of the processes' environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from measure import judged, median_interval, table, write

WANTED = "<= 0.1"
TIMED = "import time, torch; t = time.perf_counter(); import minitx.nn; print(time.perf_counter() - t)"
ENVIRONMENT = {name: setting for name, setting in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds() -> float:
    """Wall seconds of ``import minitx.nn`` in a fresh interpreter that has torch."""
    done = subprocess.run([sys.executable, "-c", TIMED], check=True, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="processes")
    times = parser.parse_args().times
    seconds()  # bytecode, and files into the page cache
    row = judged("seconds of import minitx.nn after import torch", median_interval([seconds() for _ in range(times)]), WANTED)
    print(table([row]))
    print(write("import_time", {"target": "P10", "title": "What importing a block costs", "rows": [row], "times": times}))


if __name__ == "__main__":
    main()
