"""P10, cold start: ``scripts/train.py`` to the end of its first step, over bare scripts with the same model, data and optimizer.

Every start is a fresh process, with bytecode, as an installed package has it (see ``import_time.py``), and with files in the page
cache. The clock stops when the first update is made: the bare scripts (``bare.py``) say so, ``train.py`` has then written the
first row of ``metrics.csv``, for which the benchmark looks every millisecond; what comes after it (validation, the result) is not
counted and the process is ended. All read the token file of the King James text, which is there beforehand; ``train.py``
checks it, composes its config and makes its folder, which is part of what is measured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from import_time import ENVIRONMENT
from inside_fit import ready, run_config
from measure import compared, inverse, row, table, turns, write

WANTED = "<= 1.2"
ROOT = Path(__file__).parents[1]
RUN = ("trainer.max_steps=2", "trainer.accelerator=cpu", "trainer.val_every=0", "trainer.val_batches=1", "trainer.ckpt_every=0")


def until_first_step() -> float:
    """Wall seconds of ``scripts/train.py`` to the first row of its ``metrics.csv``."""
    with tempfile.TemporaryDirectory() as name:
        metrics = Path(name) / "run" / "metrics.csv"
        started = time.perf_counter()
        command = [sys.executable, str(ROOT / "scripts" / "train.py"), *RUN, f"output_dir={metrics.parent}"]
        with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            while not (metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") > 1):
                if process.poll() is not None and not metrics.exists():
                    raise SystemExit(f"error: {' '.join(command)}: {process.stderr.read().decode()}")  # type: ignore[union-attr]
                time.sleep(0.001)
            seconds = time.perf_counter() - started
            process.kill()
        return seconds


def until_said(kind: str, tokens: Path) -> float:
    """Wall seconds of ``bare.py`` to the line that it prints after its first step."""
    started = time.perf_counter()
    command = [sys.executable, str(Path(__file__).parent / "bare.py"), kind, str(tokens)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        said = any(line.strip() == "step" for line in process.stdout)
        seconds = time.perf_counter() - started
        process.kill()
    if not said:
        raise SystemExit(f"error: {' '.join(command)} made no step")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--torch", action="store_true", help="beside bare torch, too; nothing is wanted of that ratio")
    given = parser.parse_args()
    _, data = ready(run_config(12, 1))  # makes the token file
    tokens = data.task.train.tokens.path
    rows = []
    bare: tuple[tuple[str, str | None, Callable[[], float]], ...] = (
        ("bare Lightning", WANTED, lambda: until_said("lightning", tokens)),
        ("bare torch", None, lambda: until_said("torch", tokens)),
    )
    for name, wanted, start in bare[: 1 + given.torch]:
        sides = (start, until_first_step)
        for side in sides:
            side()  # bytecode and the page cache
        found = compared([(side, sides[side]()) for side in turns(given.pairs)])
        if wanted is None:  # as the other row has it: our time over theirs
            found["ratio"] = inverse(found["ratio"])
        rows.append(row(f"train.py / {name}", found, wanted))
    print(table(rows))
    title = "Cold start to the end of the first step, fresh processes"
    print(write("cold_start", {"target": "P10", "title": title, "threads": torch.get_num_threads(), "rows": rows}))


if __name__ == "__main__":
    main()
