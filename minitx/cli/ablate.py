"""The lab from the command line: cells are composed and run here, because only this room knows hydra."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from minitx.ablation.grid import Cell, cells
from minitx.ablation.report import write_report
from minitx.ablation.runner import Pool, open_pool, project, projected_seconds, read_records, run_cells
from minitx.cli.errors import CellsFailedError, GridStoppedError
from minitx.config import AblationConfig, RunConfig

log = logging.getLogger("minitx")

# of the grid itself; every other override on the command line reaches every cell
_NOT_FOR_CELLS = ("experiment=", "ablation=", "ablation.", "output_dir=", "hydra.", "hydra/", "seed=")


def run_ablation(config: RunConfig, folder: Path, overrides: Sequence[str], command: str) -> None:
    """Run the grid in ``folder``, write the report, print the table and the verdict.

    Raises:
        ConfigError: a grid that cannot be run. CellsFailedError: cells failed; the report is written all the same.
    """
    assert config.ablation is not None
    grid = config.ablation.chosen()
    started = time.perf_counter()
    common = [text for text in overrides if not text.lstrip("+~").startswith(_NOT_FOR_CELLS)]
    common += ["callbacks.progress=false", "trainer.threads=1"]
    for cell in cells(grid, common=common):  # refuses what cannot be run before anything is written
        cell.steps()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "command.txt").write_text(command + "\n", encoding="utf-8")
    with stop_on_signals(), open_pool(grid.workers or available_cores(), run_cell) as pool:
        chosen, expected_seconds = plan(pool, grid, common, folder)
        records = run_cells(pool, chosen, folder, expected_seconds=expected_seconds)
    seconds = time.perf_counter() - started
    report = write_report(records, grid, [cell.describe() for cell in chosen], folder, meta=describe_run(command, seconds))
    log.info("\n%s\n\n%s\n\n%s", report.table_text, report.headline, folder / "report.html")
    log.info("%.0f s in all", time.perf_counter() - started)
    failed = [record for record in records if record["status"] == "failed"]
    if failed:
        raise CellsFailedError(
            f"{len(failed)} of {len(records)} cells failed; the first: {failed[0]['error']} ({failed[0]['command']})"
        )


def plan(pool: Pool, grid: AblationConfig, common: Sequence[str], folder: Path) -> tuple[list[Cell], float | None]:
    """The cells to run, trimmed where the projection exceeds the time limit, and the seconds that are projected.

    The decision is kept in ``plan.json``: a grid that goes on after a stop runs the same cells.
    """
    path = folder / "plan.json"
    chosen = cells(grid, common=common, trimmed=json.loads(path.read_text())["trimmed"] if path.exists() else False)
    done = {record["cell"] for record in read_records(folder / "cells.jsonl") if record["status"] == "done"}
    todo = [cell for cell in chosen if cell.hash not in done]
    if not todo:
        return chosen, None
    costs = project(pool, todo, folder)
    shutil.rmtree(folder / "projection", ignore_errors=True)
    seconds = projected_seconds(todo, costs, pool.workers)
    trimmed = False
    if not path.exists():
        if grid.time_limit is not None and seconds > grid.time_limit and grid.trim:
            log.info("projection: %.0f s, over the limit of %.0f s: the runs are shortened", seconds, grid.time_limit)
            trimmed = True
            todo = chosen = cells(grid, common=common, trimmed=True)
            seconds = projected_seconds(chosen, costs, pool.workers)
        path.write_text(json.dumps({"trimmed": trimmed}) + "\n", encoding="utf-8")
    log.info("projection: about %.0f s for %d cells on %d workers", seconds, len(todo), pool.workers)
    return chosen, seconds


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into ``GridStoppedError``, so that the workers end with the grid."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise GridStoppedError(number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_cell(overrides: Sequence[str], folder: str) -> dict[str, Any]:
    """One cell, an ordinary training run; called in a worker process."""
    from minitx.cli.train import compose_config, run_training

    shutil.rmtree(folder, ignore_errors=True)  # what a killed run left
    command = shlex.join(["python", "scripts/train.py", *overrides])
    return run_training(compose_config(overrides), Path(folder), command)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_run(command: str, seconds: float) -> dict[str, Any]:
    """What a reader needs to repeat the run: commit, versions, machine, date, command."""
    packages = ("minitx", "torch", "lightning", "hydra-core", "numpy", "scipy")
    return {
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "wall_seconds": seconds,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{_processor()}, {available_cores()} cores",
    }


def _commit() -> str:
    """The checkout's commit, marked where files differ from it."""
    here = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return described.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
