"""Run a grid from the command line. Cells are composed and run here, because only ``cli`` uses hydra."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from minitx.ablation.design import AblationConfig, settings
from minitx.ablation.execution import SLURM_JOBS, CellJob, LocalPool, SlurmPool, WorkerPool, duration, run_cells
from minitx.ablation.grid import RECORD_KEYS, Cell, Record, Runs, cells, code_fingerprint, command_of
from minitx.ablation.judge import judge
from minitx.ablation.report import module_of, write_report
from minitx.cli.compose import compose_cell, compose_config, for_cells
from minitx.cli.exit_codes import sentence
from minitx.cli.launch import run_training
from minitx.cli.overrides import by_key
from minitx.config import CONFIG_DIR, ConfigError
from minitx.config.failures import FailedRunError
from minitx.config.schema import require
from minitx.crash_safe import replacing
from minitx.training import StoppedError, stop_signals
from minitx.training.json_lines import read_json_lines

log = logging.getLogger("minitx")


def run_ablation(grid: AblationConfig, folder: Path, overrides: Sequence[str], command: str) -> None:
    """Run the grid in ``folder``, write its report, and print its sentences and the path of its page.

    Raises:
        ConfigError: the grid cannot be run.
        FailedRunError: runs failed. The others are finished, and the report has been written.
    """
    from minitx.ablation.measures import check_measures

    common = for_cells(overrides)
    require("ckpt_path" not in settings(common), "ckpt_path is for single runs: to resume a grid, repeat its command")
    chosen = cells(grid, common=["callbacks.progress=false", "trainer.threads=1", *common])
    seeds = {str(seed) for study in grid.studies.values() for seed in study.seeds}
    if "seed" in by_key(overrides) and seeds != {settings(overrides).get("seed")}:  # ablation=rate takes it
        log.info("seed= has no effect on a grid: the seeds of its runs are ablation.studies.NAME.seeds")
    folder = Path(os.path.relpath(folder)) if folder.is_relative_to(Path.cwd()) else folder  # stored commands contain it
    if grid.report_only:
        if not (folder / "cells.jsonl").exists():
            raise ConfigError(f"output_dir={folder} has no cells.jsonl: first run the grid without ablation.report_only=true")
        write_findings(grid, chosen, stored_records(chosen, folder / "cells.jsonl"), folder)
        return
    module_of(grid)
    check_measures(grid)
    check(chosen)
    check_judged(grid, chosen)
    launch = Launch(folder / "launches.json", command)
    with stop_on_signals():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "command.txt").write_text(command + "\n", encoding="utf-8")
        pool = pool_of(grid, chosen, folder)
        try:
            records = run_cells(pool, grid, chosen, folder, run_cell, after_line=launch.keep)
        finally:
            pool.close()
    write_findings(grid, chosen, records, folder)
    log.info("%s in all", duration(launch.seconds()))
    failed = [record for record in records if record["status"] == "failed"]
    if failed:
        first = f"the first: {failed[0]['reason']} ({failed[0]['command']})"
        raise FailedRunError(f"{len(failed)} of {len(records)} runs failed; {first}")


def check(chosen: Sequence[Cell]) -> None:
    """Check that the grid can be run, before anything is written.

    Raises:
        ConfigError: a run has no number of steps, needs several devices, or has an invalid config. For each study, the first
            run of each arm and of each level of a factor is checked.
    """
    for cell in chosen:
        cell.steps()
    kinds = {(cell.place.study, kind): cell for cell in reversed(chosen) for kind in (cell.place.arm, *cell.place.factors)}
    for cell in {cell.place: cell for cell in kinds.values()}.values():
        place = f"ablation.studies.{cell.place.study}"
        try:
            config = compose_cell(cell.overrides)
        except Exception as error:
            levels = "".join(f", {factor} {level}" for factor, level in cell.place.factors)
            raise ConfigError(f"{place}, arm {cell.place.arm}{levels}: {sentence(error)[0]}") from None
        if cell.keeps_weights and not config.trainer.ckpt_every:
            raise ConfigError(f"{place}: trainer.ckpt_every must not be 0, because other runs start from its weights")
        if cell.threshold is not None and not config.optimizer.get("lr"):
            raise ConfigError(f"{place}.threshold searches for optimizer.lr, but {config.optimizer.name} has no lr above 0")
        if config.trainer.plan:
            raise ConfigError(f"{place}: trainer.plan=true is for single runs: remove it from the grid")
        if config.trainer.world_size > 1:
            raise ConfigError(f"{place}: trainer.devices must be 1, because each run of a grid uses one device")


def check_judged(grid: AblationConfig, chosen: Sequence[Cell]) -> None:
    """Check that the runs produce all numbers that are judged.

    Raises:
        ConfigError: a window is longer than the runs of its study, or no callback writes a measure.
    """
    solvers = {study.start.study for study in grid.chosen().values() if study.start is not None and study.start.solved}
    for name, study in grid.chosen().items():
        of_study, place = [cell for cell in chosen if cell.place.study == name], f"ablation.studies.{name}"
        steps = min(cell.steps() for cell in of_study)
        rules = {"threshold": study.threshold, "solved": study.solved if "time" in study.scores or name in solvers else None}
        for key, rule in rules.items():
            require(
                rule is None or rule.window <= steps,
                f"{place}.{key}.window={rule and rule.window} is longer than its runs of {steps} steps",
            )
        needed = [*study.measures, *(["operations"] if "speedup" in study.scores else [])]
        parts = compose_cell(of_study[0].overrides).callbacks.values() if needed else ()
        writers = [node for node in parts if node is not None and node.name.endswith(".Measures")]
        written = {f"loss_at_{length}" for node in writers for length in node.get("lengths", ())}
        written |= {"attention_error", "attention_cost"} if any(node.get("attention") for node in writers) else set()
        written |= {"operations"} if any(node.get("operations") for node in writers) else set()
        # other names are numbers that a user has added to ``Measures``, see CONTRIBUTING.md
        is_ours = re.compile("loss_at_|attention_|operations").match
        missing = [name for name in needed if name not in written and (not writers or is_ours(name))]
        require(
            not missing,
            f"{place}.measures={missing} are not measured: add a callback minitx.ablation.measures.Measures to the runs",
        )


def stored_records(chosen: Sequence[Cell], path: Path) -> list[Record]:
    """Return the records in ``path``, from any version of the code. Records of ``chosen`` come last, and so take precedence.

    A warning counts the runs whose records all have other overrides, from an earlier version of the grid.
    """

    def without_folders(overrides: Sequence[str]) -> tuple[str, ...]:
        return tuple(word for word in overrides if not word.startswith(CONFIG_DIR))

    current, names = {without_folders(cell.overrides) for cell in chosen}, {cell.hash for cell in chosen}
    records = sorted(
        read_json_lines(path, RECORD_KEYS),
        key=lambda record: (without_folders(record["overrides"]) in current, record["cell"] in names),
    )
    done = Runs.of([cell.place for cell in chosen], records)
    others = [run for run in done.all if run.status == "done" and without_folders(run.record["overrides"]) not in current]
    if others:
        log.warning(
            "%d of %d runs have other overrides than the current grid; the first: %s", len(others), len(chosen), others[0]
        )
    return records


def write_findings(grid: AblationConfig, chosen: Sequence[Cell], records: Sequence[Record], folder: Path) -> None:
    """Write the report, and print its sentences and the path of its page."""
    findings = judge(grid, Runs.of([cell.place for cell in chosen], records))
    sentences = write_report(findings, folder, meta=read_meta(folder / "launches.json"))
    log.info("\n%s\n\n%s", "\n".join(sentences), folder / "report.html")


def run_cell(job: CellJob) -> dict[str, Any]:
    """Run a cell (an ordinary training run or a threshold) in a worker process. Return the ``result`` of its record."""
    from minitx.ablation.measures import result_of

    if job.threshold is not None:
        from minitx.ablation.thresholds import measure_threshold

        outcome = measure_threshold(compose_cell(job.words), job.folder, job.threshold)
        shutil.rmtree(job.folder)
        return outcome
    shutil.rmtree(job.folder, ignore_errors=True)  # remains of a killed run
    config = compose_cell(job.words)
    trainer = dataclasses.replace(config.trainer, rehearse=job.rehearses and config.trainer.rehearse)
    config = dataclasses.replace(config, trainer=trainer)
    trained = run_training(config, job.folder, command_of(job.words))
    result = result_of(job.folder, trained, job.steps)
    if job.keeps_attention:
        result["attention"] = first_heads(job.folder)
    if not job.keeps_weights:
        shutil.rmtree(job.folder, ignore_errors=True)
    return result


def first_heads(folder: Path) -> dict[str, list[Any]]:
    """Return the weights (rows, L, S) of the first head in layer 1 that the probe wrote, by step, rounded to four decimals."""
    from minitx.analysis import read_snapshots

    return {str(shot.step): (shot.maps[0].weights[:, 0] * 1e4).round().div(1e4).tolist() for shot in read_snapshots(folder)}


def pool_of(grid: AblationConfig, chosen: Sequence[Cell], folder: Path) -> WorkerPool:
    """Return the pool for the cells. A local pool has a worker per core, or per GPU if runs use GPUs."""
    if grid.launcher == "slurm":
        return SlurmPool(grid.workers or SLURM_JOBS, folder / "jobs", grid.launcher_options)
    devices = gpus(chosen)
    return LocalPool(grid.workers or len(devices) or available_cores(), devices)


def gpus(chosen: Sequence[Cell]) -> list[str]:
    """Return the GPUs of this machine as in CUDA_VISIBLE_DEVICES, or [] if no study trains on a GPU."""
    import torch

    visible = visible_gpus(torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    first_cells = {cell.place.study: cell for cell in chosen}.values()
    is_used = visible and any(compose_config(cell.overrides).trainer.accelerator in ("auto", "gpu") for cell in first_cells)
    return visible if is_used else []


def visible_gpus(count: int, visible: str | None) -> list[str]:
    """Return the GPUs that a process may use, as values of CUDA_VISIBLE_DEVICES for its workers.

    Args:
        count: the number of GPUs that torch counts.
        visible: CUDA_VISIBLE_DEVICES of this process. CUDA ignores it from the first name on that it does not know.

    >>> visible_gpus(2, None), visible_gpus(2, "3, 1,-1"), visible_gpus(0, "")
    (['0', '1'], ['3', '1'], [])
    """
    names = [name.strip() for name in visible.split(",")] if visible else [str(index) for index in range(count)]
    return names[:count]


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Turn the signals of ``stop_signals`` into ``StoppedError``, so that the workers end with the grid."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedError(number, "; finished runs are kept: to resume, repeat the command")

    previous = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Launch:
    """The entry of a launch of a grid in ``launches.json``: commit, versions, machine, date, command and duration."""

    def __init__(self, path: Path, command: str) -> None:
        self.path, self.before, self.facts, self.started = path, launches(path), facts(command), time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds since this launch started."""
        return time.perf_counter() - self.started

    def keep(self) -> None:
        """Write the entry with the duration so far."""
        entry = {**self.facts, "wall_seconds": round(self.seconds(), 1)}
        with replacing(self.path) as new:
            new.write_text(json.dumps([*self.before, entry], indent=1) + "\n", encoding="utf-8")


def launches(path: Path) -> list[dict[str, Any]]:
    """Return the entries of ``launches.json``; [] if it does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []  # type: ignore[no-any-return]


def read_meta(path: Path) -> dict[str, Any]:
    """Return the origin of the records for the report. Seconds are summed over launches; other values that differ are listed."""
    entries, names = launches(path), ("commit", "command", "date", "hardware")
    listed = {name: "; ".join(dict.fromkeys(launch[name] for launch in entries)) for name in names}
    versions = entries[-1]["versions"] if entries else {}
    return {**listed, "versions": versions, "wall_seconds": sum(launch["wall_seconds"] for launch in entries)}


def facts(command: str) -> Mapping[str, Any]:
    """Return the facts that are needed to reproduce a run."""
    from minitx.training.trackers import git_commit

    packages = ("minitx", "torch", "lightning", "hydra-core", "numpy", "scipy")
    return {
        "commit": git_commit(Path(__file__).parent) or "not a git checkout",
        "code": code_fingerprint(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{_processor()}, {available_cores()} cores",
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
