"""Run the unfinished cells of a grid. A cell waits for the cell that it starts from.

A finished cell is never run again, and a failed cell does not stop the others. A grid that was killed resumes where it stopped.
Cells are computed by a pool: worker processes of this machine, or Slurm jobs through submitit.

A pool has ``workers``, ``submit(function, *arguments)``, ``wait(calls)`` and ``close()``. ``submit`` pickles its arguments and returns a
call: an object with ``done()`` and ``result()``, such as a future or a job of submitit. ``result()`` raises an error if the process or
job died. The caller must submit at most ``workers`` concurrent calls. ``wait`` returns when one of the running calls has ended, or after
half a second. ``close`` stops all running calls.
"""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minitx.ablation.design import AblationConfig, ThresholdConfig
from minitx.ablation.grid import RECORD_KEYS, Cell, GridPlace, Record, solved_step
from minitx.config import ConfigError
from minitx.config.packages import package
from minitx.training.json_lines import end_last_line, read_json_lines

log = logging.getLogger(__name__)
duration = tqdm.format_interval  # seconds as MM:SS or H:MM:SS


@dataclass(frozen=True)
class CellJob:
    """A cell as a worker runs it.

    Attributes:
        words: the overrides of the run.
        folder: the folder of the run.
        steps: the number of its steps.
        keeps_weights: whether to keep the weights, because other cells start from them.
        keeps_attention: whether to keep attention weights in the record.
        threshold: the rule of a threshold; None: an ordinary run.
        rehearses: whether to rehearse the run, unless its config disables that.
    """

    words: Sequence[str]
    folder: Path
    steps: int
    keeps_weights: bool = False
    keeps_attention: bool = False
    threshold: ThresholdConfig | None = None
    rehearses: bool = False


RunCell = Callable[[CellJob], dict[str, Any]]
"""A function that runs a cell in a worker, and returns the ``result`` of its record."""


# --- pools

PAUSE = 0.5
"""The longest wait for a call, in seconds. Then the progress bar shows the time again."""

SLURM_JOBS = 16
"""The default of ``ablation.workers`` on Slurm."""


class LocalPool:
    """Worker processes that live for the whole grid, because importing torch and Lightning takes seconds.

    If a worker dies, its call is lost, and the worker is replaced. A worker ends when its pipe to this process is closed, and so also if
    this process is killed.

    Args:
        workers: the number of processes.
        devices: values of ``CUDA_VISIBLE_DEVICES``. Each worker gets one value, in turn.
    """

    def __init__(self, workers: int, devices: Sequence[str] = ()) -> None:
        self.workers, self.devices = workers, tuple(devices) or (None,)
        self._executors: dict[int, ProcessPoolExecutor] = {}  # one process each, so that other workers survive a crash
        self._pipes: dict[int, Connection] = {}
        self._calls: dict[int, Future[Any]] = {}

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Start ``function(*arguments)`` in a free worker."""
        free = next(i for i in range(self.workers) if i not in self._calls or self._calls[i].done())
        try:
            if free not in self._executors:
                spawn, device = multiprocessing.get_context("spawn"), self.devices[free % len(self.devices)]
                theirs, self._pipes[free] = spawn.Pipe(duplex=False)
                self._executors[free] = ProcessPoolExecutor(1, spawn, initializer=_start_worker, initargs=(device, theirs))
            self._calls[free] = self._submit(self._executors[free], function, *arguments)
        except BrokenProcessPool:
            del self._executors[free]
            return self.submit(function, *arguments)
        return self._calls[free]

    @staticmethod
    def _submit(executor: ProcessPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Submit with SIGINT blocked. A new worker inherits the mask, so Ctrl-C reaches this process only, which then ends its workers."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return executor.submit(function, *arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def wait(self, calls: Collection[Future[Any]]) -> None:
        """Wait for the first of the calls."""
        wait(calls, timeout=PAUSE, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """End the workers."""
        for worker, executor in self._executors.items():
            executor.shutdown(wait=False, cancel_futures=True)
            self._pipes[worker].close()
        self._executors.clear()


def _start_worker(device: str | None, parent: Connection) -> None:
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device  # torch is not imported yet
    logging.disable(logging.INFO)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    with suppress(EOFError, OSError):
        parent.recv()  # nothing is ever sent
    os._exit(1)


class SlurmPool:
    """Slurm jobs through submitit (https://github.com/facebookincubator/submitit), one job per call.

    Args:
        workers: the number of concurrent jobs.
        folder: the folder for submitit's files. All nodes must see it.
        options: options of submitit's ``update_parameters`` (``slurm_partition``, ``timeout_min``, ...). The default limit is
            one hour per job. ``cluster`` is ``slurm``, or ``local`` for processes of this machine instead.

    Raises:
        ConfigError: submitit is not installed, Slurm is not available, or submitit does not accept an option.
    """

    def __init__(self, workers: int, folder: Path, options: Mapping[str, Any]) -> None:
        self.workers = workers
        submitit = package("submitit", "ablation.launcher=slurm")
        parameters = {"name": "minitx", "timeout_min": 60, **options}
        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=parameters.pop("cluster", "slurm"))
            self._executor.update_parameters(**parameters)
        except (RuntimeError, NameError, ValueError, AssertionError) as error:
            raise ConfigError(f"ablation.launcher=slurm with launcher_options={dict(options)}: {error}") from None
        self._jobs: list[Any] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Start ``function(*arguments)`` as a job."""
        self._jobs.append(self._executor.submit(function, *arguments))
        return self._jobs[-1]

    def wait(self, calls: Collection[Any]) -> None:
        """Wait for half a second: submitit itself asks Slurm only now and then."""
        time.sleep(PAUSE)

    def close(self) -> None:
        """Cancel the running jobs."""
        for job in self._jobs:
            if not job.done():
                job.cancel(check=False)


WorkerPool = LocalPool | SlurmPool


# --- cells


class Book:
    """The file ``cells.jsonl`` of a grid: one record per line, written to disk immediately.

    Attributes:
        known: records from earlier launches, without failures and without runs that must be repeated.
        records: records of finished cells, and of all cells that this launch has finished or left out.
    """

    def __init__(self, cells: Sequence[Cell], folder: Path, after_line: Callable[[], None]) -> None:
        self.folder, self.path, self.after_line = folder, folder / "cells.jsonl", after_line
        last = {record["cell"]: record for record in read_json_lines(self.path, RECORD_KEYS)}
        by_place = {cell.place: last[cell.hash] for cell in cells if cell.hash in last}
        self.known = {place: record for place, record in by_place.items() if record["status"] != "failed"}
        for cell in reversed(cells):
            if cell.start and cell.place not in self.known and not cell.start.weights(folder).exists():
                self.known.pop(cell.start.place, None)  # repeat it: its weights are needed, but are gone
        self.records = {place: record for place, record in self.known.items() if record["status"] == "done"}
        end_last_line(self.path)

    def write(self, cell: Cell, status: str, **known: Any) -> None:
        """Write the result of a cell (``reason``, ``seconds``, ``result``), unless the file already contains it."""
        outcome = {"status": status, "reason": None, "seconds": 0.0, "result": None, **known}
        self.records[cell.place] = record = {**cell.describe(self.folder), **outcome}
        if status == "failed":
            log.warning("failed: %s: %s", cell.place, outcome["reason"])
        if record != self.known.get(cell.place):
            self._append(json.dumps(record) + "\n")
            self.after_line()

    def _append(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def skip_reason(grid: AblationConfig, cell: Cell, records: Mapping[GridPlace, Record]) -> str | None:
    """Return the reason for leaving out ``cell``, from the record of the run that it starts from, or None."""
    start = grid.studies[cell.place.study].start
    if start is None or cell.start is None:
        return None
    first = records[cell.start.place]
    if first["status"] != "done":
        return "the run that it starts from is missing"
    if start.solved and solved_step(first["result"], grid.studies[start.study].solved) is None:
        return "the run that it starts from did not solve the task"
    return None


def run_cells(
    pool: WorkerPool,
    grid: AblationConfig,
    cells: Sequence[Cell],
    folder: Path,
    run_cell: RunCell,
    *,
    after_line: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Run all unfinished cells, and return the records of all ``cells``, in their order.

    A cell that raises an error gets a record with ``status: failed``, and is repeated by the next launch. A cell whose worker
    died is repeated once.

    Args:
        after_line: a function to call after each new line of ``cells.jsonl``.
    """
    book = Book(cells, folder, after_line)
    todo = [cell for cell in cells if cell.place not in book.known]
    log.info("%d runs: %d done before, %d to do, %d at once", len(cells), len(cells) - len(todo), len(todo), pool.workers)
    bar, queue = _progress_bar(len(todo)), CellQueue(pool, grid, cells, book, run_cell)
    while queue.waiting or queue.running:
        ready = queue.ready()
        recorded = queue.collect() if ready is None else queue.begin(ready)
        if ready is None and recorded is None:
            pool.wait([call for call, _ in queue.running.values()])
        bar.set_description_str(f"{len(book.records)} of {len(cells)} runs, ", refresh=False)
        bar.update(recorded is not None and recorded.place not in book.known)
    bar.close()
    return [book.records[cell.place] for cell in cells]


class CellQueue:
    """The cells of one launch: those that wait, and those that run in the pool.

    Attributes:
        waiting: cells without a record, in their order.
        running: the job of each running cell, and the time of its start.
        done_arms: the arms with a finished run. Runs of other arms are rehearsed.
    """

    def __init__(self, pool: WorkerPool, grid: AblationConfig, cells: Sequence[Cell], book: Book, run_cell: RunCell) -> None:
        self.pool, self.grid, self.book, self.run_cell = pool, grid, book, run_cell
        self.waiting, self.running = list(cells), dict[Cell, tuple[Any, float]]()
        self.done_arms = {arm_of(cell) for cell in cells if cell.place in book.known}
        self._died = set[Cell]()

    def ready(self) -> Cell | None:
        """Return the first waiting cell that can begin, or None: no worker is free, or all cells wait for a start."""
        free = self.waiting if len(self.running) < self.pool.workers else ()
        return next((cell for cell in free if cell.start is None or cell.start.place in self.book.records), None)

    def begin(self, cell: Cell) -> Cell | None:
        """Start a cell. Return it if it needs no run, because it has a record or a rule of the grid leaves it out."""
        self.waiting.remove(cell)
        records = self.book.records
        if cell.place not in records and (reason := skip_reason(self.grid, cell, records)):
            self.book.write(cell, "not run", reason=reason)
        if cell.place in records:
            return cell
        job = CellJob(
            words=cell.words(self.book.folder),
            folder=cell.folder(self.book.folder),
            steps=cell.steps(),
            keeps_weights=cell.keeps_weights,
            keeps_attention=self.grid.studies[cell.place.study].keep_attention,
            threshold=cell.threshold,
            rehearses=arm_of(cell) not in self.done_arms,
        )
        self.running[cell] = (self.pool.submit(attempt, self.run_cell, job), time.perf_counter())
        return None

    def collect(self) -> Cell | None:
        """Return a cell that has ended, after writing its record, or None. A cell whose worker died waits once more."""
        ended = next((cell for cell, (job, _) in self.running.items() if job.done()), None)
        if ended is None:
            return None
        job, started = self.running.pop(ended)
        try:
            outcome = job.result()
        except Exception as error:
            if ended not in self._died:
                self._died.add(ended)
                self.waiting.insert(0, ended)
                return None
            outcome = {"error": f"the process died: {' '.join(str(error).split())[:200]}"}
        status, seconds = "failed" if "error" in outcome else "done", round(time.perf_counter() - started, 3)
        self.book.write(ended, status, reason=outcome.get("error"), seconds=seconds, result=outcome.get("result"))
        self.done_arms |= {arm_of(ended)} if status == "done" else set()
        return ended


def arm_of(cell: Cell) -> tuple[str, str]:
    """Return the study and the arm of a cell. Runs of an arm are rehearsed until one of them is done."""
    return cell.place.study, cell.place.arm


def attempt(run_cell: RunCell, job: CellJob) -> dict[str, Any]:
    """Return ``{"result": ...}`` or ``{"error": message}``, because some exceptions cannot be pickled."""
    try:
        return {"result": run_cell(job)}
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}


def _progress_bar(runs: int) -> Any:
    """Return a progress bar with the estimated remaining time. Without a terminal, it writes lines to the log."""
    text = "{desc}{percentage:3.0f}%, {elapsed} passed, {remaining} left"
    file, pause = (sys.stdout, 0.5) if sys.stdout.isatty() else (_Lines(), 20.0)
    options = {"bar_format": text, "file": file, "mininterval": pause}
    # without miniters, tqdm's monitor thread repeats lines
    return tqdm(total=runs, disable=not runs, smoothing=0.0, miniters=0, **options)


class _Lines(io.StringIO):
    """A file for tqdm that turns each state of the bar into a line of the log."""

    def write(self, text: str) -> int:
        if text.strip():
            log.info("%s", text.strip())
        return len(text)
