"""Runs the cells of a grid: over all cores, resumable, with a projection first; a failed cell never stops the others.

The runner is handed ``run_cell(overrides, folder) -> result`` and knows nothing of configs. Workers are processes that
live for the whole grid, because importing the training stack costs seconds.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minitx.ablation.grid import Cell

log = logging.getLogger(__name__)

Record = dict[str, Any]
RunCell = Callable[[Sequence[str], str], dict[str, Any]]
PROBE_STEPS = 20
_DIED = "a worker process died"


def read_records(path: Path) -> list[Record]:
    """The finished cells of ``cells.jsonl``; a last line cut short by a crash is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


@dataclass
class Pool:
    """A pool of persistent worker processes that survives the death of one."""

    workers: int
    run_cell: RunCell
    executor: ProcessPoolExecutor | None = None

    def submit(self, cell: Cell, overrides: Sequence[str], folder: Path) -> Future[Outcome]:
        """Start a cell."""
        if self.executor is None:
            spawn = multiprocessing.get_context("spawn")
            self.executor = ProcessPoolExecutor(self.workers, spawn, initializer=_start_worker, initargs=(os.getpid(),))
        place = str(folder / "cells" / cell.study / cell.hash)
        try:
            return self.executor.submit(_attempt, self.run_cell, tuple(overrides), place)
        except BrokenProcessPool:  # a worker died since the last look
            self.close()
            return self.submit(cell, overrides, folder)

    def result(self, future: Future[Outcome]) -> Outcome:
        """What came of a cell; the death of its worker is an outcome, and the next ``submit`` has new workers."""
        try:
            return future.result()
        except BrokenProcessPool:
            return Outcome(None, _DIED, 0.0)

    def close(self) -> None:
        """End the workers, without waiting for cells that have not begun."""
        if self.executor is not None:
            processes = list((self.executor._processes or {}).values())  # shutdown forgets them
            self.executor.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()  # SIGTERM would only stop the cell that it is in
            self.executor = None


@contextmanager
def open_pool(workers: int, run_cell: RunCell) -> Iterator[Pool]:
    """A pool whose workers end with the context, whatever happens in it."""
    pool = Pool(workers, run_cell)
    try:
        yield pool
    finally:
        pool.close()


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; it kills its workers
    logging.disable(logging.INFO)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """A worker whose parent was killed outright, perhaps before the worker began, would otherwise run on."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


@dataclass(frozen=True)
class Outcome:
    """What came of a cell in its worker; an error travels as text, because not every exception can be sent."""

    result: dict[str, Any] | None
    error: str | None
    seconds: float


def _attempt(run_cell: RunCell, overrides: tuple[str, ...], folder: str) -> Outcome:
    started = time.perf_counter()
    try:
        result = run_cell(overrides, folder)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Outcome(None, text, time.perf_counter() - started)
    return Outcome(result, None, time.perf_counter() - started)


def project(pool: Pool, cells: Iterable[Cell], folder: Path) -> dict[tuple[str, ...], tuple[float, float]]:
    """Measure (fixed seconds, seconds a step) for each kind of cell by running 1 and 20 steps of one of each.

    A kind is a study and its levels that change the cost (``kind_of``). The probes write into ``probe/`` and are no results.
    """
    kinds: dict[tuple[str, ...], Cell] = {}
    for cell in cells:
        kinds.setdefault(kind_of(cell), cell)
    warm = [pool.submit(cell, _shortened(cell, 1), folder / "projection") for cell in list(kinds.values())[: pool.workers]]
    wait(warm)  # imports and the first data set are no part of a cell's cost
    futures = {
        (kind, steps): pool.submit(cell, _shortened(cell, steps), folder / "projection" / str(steps))
        for kind, cell in kinds.items()
        for steps in {1, min(PROBE_STEPS, cell.steps())}
    }
    seconds = {key: pool.result(future).seconds for key, future in futures.items()}
    costs = {}
    for kind, cell in kinds.items():
        steps = min(PROBE_STEPS, cell.steps())
        short, longer = seconds[kind, 1], seconds[kind, steps]
        costs[kind] = (short, max(0.0, longer - short) / max(1, steps - 1))
    return costs


def kind_of(cell: Cell) -> tuple[str, ...]:
    """What a cell's cost depends on: its study, and a ladder's rung; widths, rates, inits and seeds cost the same."""
    return (cell.study, cell.factors.get("rung", ""))


def projected_seconds(cells: Iterable[Cell], costs: dict[tuple[str, ...], tuple[float, float]], workers: int) -> float:
    """Wall seconds for ``cells`` on ``workers`` cores."""
    total = sum(costs[kind_of(cell)][0] + costs[kind_of(cell)][1] * (cell.steps() - 1) for cell in cells)
    return total / workers


def _shortened(cell: Cell, steps: int) -> list[str]:
    return [*cell.overrides, f"trainer.max_steps={steps}", "schedule.warmup_steps=0", "callbacks.probe.every=0"]


def run_cells(
    pool: Pool,
    cells: Sequence[Cell],
    folder: Path,
    *,
    every_seconds: float = 10.0,
    expected_seconds: float | None = None,
    after_cell: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Run what is not done yet and return the records of all ``cells``, in their order.

    One JSON line a finished cell is appended to ``cells.jsonl`` as it finishes. A cell that raises gets a record with
    ``status: failed`` and its error; it is tried again when the grid is run again, as is a cell whose worker died.
    ``after_cell`` is called when a line has been written.
    """
    path = folder / "cells.jsonl"
    done = {record["cell"]: record for record in read_records(path) if record["status"] == "done"}
    todo = [cell for cell in cells if cell.hash not in done]
    log.info("%d cells: %d done before, %d to run on %d workers", len(cells), len(cells) - len(todo), len(todo), pool.workers)
    table = LiveTable(len(cells), len(cells) - len(todo), every_seconds, expected_seconds)
    with path.open("a", encoding="utf-8") as file:
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            file.write("\n")  # a line cut short by a crash must not swallow the next one
        for cell, outcome in _outcomes(pool, todo, folder):
            record = _record(cell, outcome)
            done[cell.hash] = record
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
            after_cell()
            table.update(record)
    return [done[cell.hash] for cell in cells]


def _outcomes(pool: Pool, todo: Sequence[Cell], folder: Path) -> Iterator[tuple[Cell, Outcome]]:
    """Cells and what came of them, as they finish; only as many are under way as there are workers.

    A worker that dies takes the pool with it. Which of the cells under way did it shows when each runs alone, at the end.
    """
    waiting, suspects = list(reversed(todo)), list[Cell]()
    running: dict[Future[Outcome], Cell] = {}
    while waiting or running or suspects:
        while len(running) < pool.workers and (waiting or (suspects and not running)):
            cell = waiting.pop() if waiting else suspects.pop()
            running[pool.submit(cell, cell.overrides, folder)] = cell
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        if any(pool.result(future).error == _DIED for future in finished):
            finished, _ = wait(running)
        outcomes = {future: pool.result(future) for future in finished}
        several_died = [outcome.error for outcome in outcomes.values()].count(_DIED) > 1
        for future, outcome in outcomes.items():
            cell = running.pop(future)
            if outcome.error == _DIED and several_died:
                suspects.append(cell)
            else:
                yield cell, outcome


def _record(cell: Cell, outcome: Outcome) -> Record:
    return {
        **cell.describe(),
        "status": "failed" if outcome.error else "done",
        "error": outcome.error,
        "seconds": round(outcome.seconds, 3),
        "result": outcome.result,
    }


class LiveTable:
    """A line now and then: done, failed, time passed, time left."""

    def __init__(self, total: int, done: int, every_seconds: float, expected_seconds: float | None) -> None:
        self.total, self.done, self.failed = total, done, 0
        self.every_seconds, self.expected = every_seconds, expected_seconds
        self.started = self.last = time.perf_counter()
        self.before = done

    def update(self, record: Record) -> None:
        """One more cell is over."""
        self.done += record["status"] == "done"
        self.failed += record["status"] == "failed"
        if record["status"] == "failed":
            log.info("failed: %s: %s", record["command"], record["error"])
        now, over = time.perf_counter(), self.done + self.failed
        if now - self.last < self.every_seconds and over < self.total:
            return
        self.last = now
        passed = now - self.started
        left = passed / max(1, over - self.before) * (self.total - over)
        if self.expected is not None:
            left = max(0.0, self.expected - passed) if over < self.total else 0.0
        log.info(
            "%4d of %d cells done, %d failed, %3.0f s passed, about %3.0f s left",
            self.done,
            self.total,
            self.failed,
            passed,
            left,
        )
