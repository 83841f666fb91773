"""The lab from the command line: cells are composed and run here, because only this room knows hydra."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from minitx.ablation.grid import Cell, cells, code_fingerprint, command_of
from minitx.ablation.launchers import Launcher, devices_of, end_with, open_launcher
from minitx.ablation.progress import TerminalLine, log_lines
from minitx.ablation.records import CellKey, key_of
from minitx.ablation.report import write_report
from minitx.ablation.runner import Costs, project, projected_seconds, read_records, run_cells
from minitx.cli.compose import compose_config
from minitx.cli.errors import CellsFailedError
from minitx.cli.launch import ProgramStoppedError
from minitx.config import AblationConfig, ConfigError, RunConfig

log = logging.getLogger("minitx")

# of the grid itself; every other override on the command line reaches every cell
_NOT_FOR_CELLS = ("experiment=", "ablation=", "ablation.", "output_dir=", "hydra.", "hydra/", "seed=")

_PARENT = "MINITX_PARENT"


def run_ablation(config: RunConfig, folder: Path, overrides: Sequence[str], command: str) -> None:
    """Run the grid in ``folder``, write the report, print the table and the verdict.

    Raises:
        ConfigError: a grid that cannot be run. CellsFailedError: cells failed; the report is written all the same.
    """
    assert config.ablation is not None
    grid = config.ablation.chosen()
    common = [text for text in overrides if not text.lstrip("+~").startswith(_NOT_FOR_CELLS)]
    common += ["callbacks.progress=false", "trainer.threads=1"]
    if grid.report_only:
        report_again(grid, common, folder)
        return
    refuse_early(grid, common)
    clock = WallClock(folder / "meta.json", describe_run(command))
    in_place = sys.stdout.isatty()
    display = TerminalLine(sys.stdout) if in_place else log_lines
    with stop_on_signals(), launcher_of(grid, common, folder) as launcher:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "command.txt").write_text(command + "\n", encoding="utf-8")
        chosen, costs = plan(launcher, grid, common, folder, whole=config.ablation)
        every = 1.0 if in_place else 10.0
        records = run_cells(launcher, chosen, folder, costs=costs, display=display, every_seconds=every, after_cell=clock.keep)
    report(records, grid, chosen, folder, clock.meta())
    log.info("%.0f s in all", clock.seconds())
    failed = [record for record in records if record["status"] == "failed"]
    if failed:
        raise CellsFailedError(
            f"{len(failed)} of {len(records)} cells failed; the first: {failed[0]['error']} ({failed[0]['command']})"
        )


def refuse_early(grid: AblationConfig, common: Sequence[str]) -> None:
    """Refuse what cannot be run before anything is written.

    Raises:
        ConfigError: cells without a length.
    """
    for cell in cells(grid, common=common):
        cell.steps()


def report_again(grid: AblationConfig, common: Sequence[str], folder: Path) -> None:
    """Write the report from the records in ``folder``; cells without one count as missing.

    Records are matched by their place in the grid (study, arm, factors, seed), whatever code made them; of several the
    newest that finished counts, else the newest.

    Raises:
        ConfigError: ``folder`` holds no records.
    """
    path = folder / "cells.jsonl"
    if not path.exists():
        raise ConfigError(f"output_dir={folder} holds no cells.jsonl: run the grid first, without ablation.report_only=true")
    found: dict[CellKey, dict[str, Any]] = {}
    for record in read_records(path):
        key = key_of(record)
        if record["status"] == "done" or found.get(key, record)["status"] == "failed":
            found[key] = record
    expected = cells(grid, common=common, trimmed=was_trimmed(folder))
    wanted = {key_of(cell.describe()) for cell in expected}
    meta = read_meta(folder / "meta.json")
    here = _commit()
    if meta and here not in meta["commit"]:
        meta["commit"] += f", judged and written again by {here}"
    report([record for key, record in found.items() if key in wanted], grid, expected, folder, meta)


def report(
    records: Sequence[dict[str, Any]], grid: AblationConfig, expected: Sequence[Cell], folder: Path, meta: dict[str, Any]
) -> None:
    """Write the report and log its table and headline; how a grid is run (workers, launcher) is no part of its report."""
    judged = replace(grid, workers=None, launcher="local", launcher_options={}, report_only=False)
    written = write_report(records, judged, [cell.describe() for cell in expected], folder, meta=meta)
    log.info("\n%s\n\n%s\n\n%s", written.table_text, written.headline, folder / "report.html")


def launcher_of(grid: AblationConfig, common: Sequence[str], folder: Path) -> AbstractContextManager[Launcher]:
    """What runs the cells of ``grid``; on this machine one worker a core, or one a GPU where cells use them."""
    devices = gpus(cells(grid, common=common)) if grid.launcher == "local" else []
    workers = grid.workers or len(devices) or available_cores()
    return open_launcher(grid.launcher, workers, run_cell, folder, devices=devices, options=grid.launcher_options)


def gpus(chosen: Sequence[Cell]) -> list[str]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them, if a study of ``chosen`` trains on one."""
    import torch

    if not torch.cuda.is_available():
        return []

    one_a_study = {cell.study: cell for cell in chosen}.values()
    if all(compose_config(cell.overrides).trainer.accelerator == "cpu" for cell in one_a_study):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def plan(
    launcher: Launcher, grid: AblationConfig, common: Sequence[str], folder: Path, *, whole: AblationConfig
) -> tuple[list[Cell], Costs | None]:
    """The cells to run, and what was measured for the projection.

    Runs are trimmed where the projection of the ``whole`` grid exceeds its time limit, of which ``grid`` may be a part.
    The decision is kept in ``plan.json``: a grid that goes on after a stop, or part by part, runs the same cells.
    """
    path, trimmed = folder / "plan.json", was_trimmed(folder)
    chosen = cells(grid, common=common, trimmed=trimmed)
    done = {record["cell"] for record in read_records(folder / "cells.jsonl") if record["status"] == "done"}
    todo = [cell for cell in chosen if cell.hash not in done]
    if not todo:
        return chosen, None
    limit = None if path.exists() or not whole.trim else whole.time_limit
    everything = cells(replace(whole, only=()), common=common) if limit is not None else todo
    costs = project(launcher, everything, folder)
    shutil.rmtree(folder / "projection", ignore_errors=True)
    if limit is not None and (seconds := projected_seconds(everything, costs, launcher)) > limit:
        log.info("projection: %.0f s, over the limit of %.0f s: the runs are shortened", seconds, limit)
        trimmed = True
        todo = chosen = cells(grid, common=common, trimmed=True)
    if not path.exists():
        write_whole(path, json.dumps({"trimmed": trimmed}))
    seconds = projected_seconds(todo, costs, launcher)
    log.info("projection: about %.0f s for %d cells on %d workers", seconds, len(todo), launcher.workers)
    return chosen, costs


def was_trimmed(folder: Path) -> bool:
    """What ``plan`` decided in ``folder``; False where it has not yet."""
    path = folder / "plan.json"
    return bool(path.exists() and json.loads(path.read_text(encoding="utf-8"))["trimmed"])


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one go: a process killed while it writes leaves the old one."""
    beside = path.with_suffix(".new")
    beside.write_text(text + "\n", encoding="utf-8")
    os.replace(beside, path)


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into ``ProgramStoppedError``, so that the workers end with the grid."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise ProgramStoppedError(number, "the finished cells are kept: the same command goes on")

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_cell(overrides: Sequence[str], folder: str) -> dict[str, Any]:
    """One cell, an ordinary training run; called in a worker process.

    A cell of several devices is a program of its own, because Lightning starts the processes of the other devices.
    """
    shutil.rmtree(folder, ignore_errors=True)  # what a killed run left
    return run_in_new_process(overrides, Path(folder)) if devices_of(overrides) > 1 else run_here(overrides, Path(folder))


def run_here(overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """A training run in this process, and its result."""
    from minitx.cli.train import run_training

    return run_training(compose_config(overrides), folder, command_of(overrides))


def run_in_new_process(overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """A training run by ``python -m minitx.cli.ablate``, which leaves ``result.json``; what it says goes to ``output.txt``.

    Raises:
        RuntimeError: it failed; the last line that it said is the reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Lightning would take the variables of a Slurm job of one task for those of a launch of its own
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment[_PARENT] = str(os.getpid())
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        words = [sys.executable, "-m", "minitx.cli.ablate", str(folder), *overrides]
        code = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output).returncode
    result = folder / "result.json"
    if code != 0 or not result.exists():
        said = (folder / "output.txt").read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
        raise RuntimeError(f"the run on several devices ended with exit code {code}: {last}")
    return json.loads(result.read_text(encoding="utf-8"))


def main(arguments: Sequence[str]) -> None:
    """``FOLDER OVERRIDE ...``: a cell of several devices, in each of the processes that Lightning starts for them."""
    end_with(int(os.environ.pop(_PARENT, os.getppid())))  # the other processes of the run are children of the first
    folder, *overrides = arguments
    result = run_here(overrides, Path(folder))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        write_whole(Path(folder, "result.json"), json.dumps(result))


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WallClock:
    """Keeps in ``meta.json`` which launches made the cells of a grid, and the wall seconds of each.

    Launches that agree in everything else (commit, versions, machine, date, command) share one entry, and their seconds
    add up. A launch that runs no cell leaves no trace; a launch that is killed loses what passed since its last cell.
    """

    def __init__(self, path: Path, launch: dict[str, Any]) -> None:
        self.path, self.launch, self.started = path, launch, time.perf_counter()
        self.others = _read_launches(path)
        same = [other for other in self.others if {**other, "wall_seconds": None} == {**launch, "wall_seconds": None}]
        self.others = [other for other in self.others if other not in same]
        self.before = sum(other["wall_seconds"] for other in same)

    def seconds(self) -> float:
        """Since this launch began."""
        return time.perf_counter() - self.started

    def keep(self) -> None:
        """Note that this launch has made a cell, and how long it has taken so far."""
        launches = [*self.others, {**self.launch, "wall_seconds": round(self.before + self.seconds(), 3)}]
        write_whole(self.path, json.dumps({"launches": launches}, indent=1))

    def meta(self) -> dict[str, Any]:
        """What the report says of the launches with this code; of this one where none has made a cell that is on record."""
        return read_meta(self.path, code=self.launch["code"]) or {**self.launch, "wall_seconds": self.seconds()}


def _read_launches(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["launches"] if path.exists() else []


def read_meta(path: Path, *, code: str | None = None) -> dict[str, Any]:
    """``meta.json`` as the report wants it: seconds added up, versions of the last launch, whatever else differs listed.

    ``code`` leaves out the launches of other code, whose cells were run again; ``None`` keeps all.
    """
    launches = [launch for launch in _read_launches(path) if code in (None, launch.get("code"))]
    if not launches:
        return {}
    listed = {
        name: "; ".join(dict.fromkeys(launch[name] for launch in launches))
        for name in ("commit", "command", "date", "hardware")
    }
    seconds = sum(launch["wall_seconds"] for launch in launches)
    return {**listed, "versions": launches[-1]["versions"], "wall_seconds": seconds}


def describe_run(command: str) -> dict[str, Any]:
    """What a reader needs to repeat the run: commit, versions, machine, date, command."""
    packages = ("minitx", "torch", "lightning", "hydra-core", "numpy", "scipy")
    return {
        "commit": _commit(),
        "code": code_fingerprint(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{_processor()}, {available_cores()} cores",
    }


def _commit() -> str:
    """The checkout's commit, marked where files differ from it."""
    here = Path(__file__).resolve().parent
    try:
        words = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.check_output(words, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main(sys.argv[1:])
