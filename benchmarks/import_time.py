"""What ``import minitx.nn`` costs over ``import torch``, in fresh processes. Target: at most 0.1 s.

With bytecode, as an installed package has it: PYTHONDONTWRITEBYTECODE is left out of the processes' environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from measure import in_pairs, median_interval, write

TARGET = 0.1
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
    met = extra["high"] <= TARGET
    path = write(
        "import_time",
        {
            "target_seconds": TARGET,
            "pairs": pairs,
            "import_torch_seconds": median_interval(torch),
            "extra_seconds": extra,
            "control_torch_minus_torch_seconds": control,
            "met": met,
        },
    )
    print(f"import torch {as_text(median_interval(torch))}; minitx.nn on top {as_text(extra)}; control {as_text(control)}")
    print(f"target {TARGET} s {'met' if met else 'missed'}; {path}")


def as_text(interval: dict[str, float]) -> str:
    """Median and interval as text."""
    return f"{interval['median']:.3f} s ({interval['low']:.3f} to {interval['high']:.3f})"


if __name__ == "__main__":
    main()
