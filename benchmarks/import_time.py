"""What ``import minitx.nn`` costs over ``import torch``, in fresh processes. Target: at most 0.1 s.

With bytecode, as an installed package has it: PYTHONDONTWRITEBYTECODE is left out of the processes' environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from measure import in_pairs, judged, median_interval, number, table, write

WANTED = "<= 0.1"
ENVIRONMENT = {name: setting for name, setting in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds_of(statement: str) -> float:
    """Wall seconds of a fresh interpreter that runs ``statement``."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, env=ENVIRONMENT)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    for statement in ("import torch", "import minitx.nn"):
        seconds_of(statement)  # files into the page cache
    torch, ours = in_pairs(lambda: seconds_of("import torch"), lambda: seconds_of("import minitx.nn"), pairs)
    first, second = in_pairs(lambda: seconds_of("import torch"), lambda: seconds_of("import torch"), pairs)
    extra = median_interval([b - a for a, b in zip(torch, ours, strict=True)])
    control = median_interval([b - a for a, b in zip(first, second, strict=True)])
    seconds = {"a_seconds": median_interval(torch)["median"], "b_seconds": median_interval(ours)["median"], "pairs": pairs}
    holds = control["low"] <= 0.0 <= control["high"]
    row = judged("seconds of import minitx.nn over import torch", extra, WANTED, **seconds)
    print(table([row]))
    print(
        f"control, torch - torch: {number(control['low'])} to {number(control['high'])} s{'' if holds else ', does not hold 0'}"
    )
    print(
        write(
            "import_time", {"target": "P10", "title": "What importing a block costs", "rows": [row], "control_seconds": control}
        )
    )


if __name__ == "__main__":
    main()
