"""Runs the cells of a grid: a projection first, then what is not done yet, in an order in which no cell misses another's result.

A finished cell is never run again, a cell that fails never stops the others, and a grid that was killed goes on where it was.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minitx.ablation.config import RATE, AblationConfig
from minitx.ablation.grid import Cell
from minitx.ablation.pools import Job, Pool
from minitx.ablation.records import Place, Record, is_lost, read_records, solved_step

log = logging.getLogger(__name__)

RunCell = Callable[..., dict[str, Any]]
"""Called in a worker with a cell's words, its folder, its cap, and whether to keep its weights and its attention."""

_PROBES = (2, 22)  # steps of the two short runs that a projection is made from


@dataclass
class Book:
    """``cells.jsonl`` of a grid's folder: the records of its cells, one line each, on the disk as soon as they are known."""

    cells: Sequence[Cell]
    folder: Path
    records: dict[Place, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path = self.folder / "cells.jsonl"
        hashes = {cell.hash: cell for cell in self.cells}
        for record in read_records(self.path):
            if record["cell"] in hashes and record["status"] != "failed":
                self.records[hashes[record["cell"]].place] = record
        if self.path.exists() and self.path.stat().st_size and not self.path.read_bytes().endswith(b"\n"):
            self._append("\n")  # a line that a crash cut short must not swallow the next one

    def write(self, cell: Cell, status: str, *, reason: str | None = None, seconds: float = 0.0, result: Any = None) -> None:
        """Keep what came of a cell."""
        known = {"status": status, "reason": reason, "seconds": round(seconds, 3), "result": result}
        self.records[cell.place] = {**cell.describe(self.folder), **known}
        self._append(json.dumps(self.records[cell.place]) + "\n")

    def forget(self, cells: Iterable[Cell]) -> None:
        """Take these cells as not decided; their lines in the file stay."""
        for cell in cells:
            del self.records[cell.place]

    def _append(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


class Rules:
    """Which cells a cell waits for, and why one is not run: its first phase did not solve the task, or ``prune`` says so."""

    def __init__(self, grid: AblationConfig, cells: Sequence[Cell]) -> None:
        self.grid = grid
        self._rows: dict[Any, list[Cell]] = defaultdict(list)
        for cell in cells:
            self._rows[self._row(cell)].append(cell)

    def _row(self, cell: Cell) -> tuple[Any, ...]:
        """Cells of a row differ in their rate, and under ``prune=unsolved`` in their seed."""
        study = self.grid.studies[cell.place.study]
        others = tuple((name, level) for name, level in cell.place.factors if name != RATE)
        return (cell.place.study, cell.place.arm, others, None if study.prune == "unsolved" else cell.place.seed)

    def deciding(self, cell: Cell) -> list[Cell]:
        """The cells whose results decide whether ``cell`` is run."""
        study = self.grid.studies[cell.place.study]
        if study.prune is None:
            return []
        row = self._rows[self._row(cell)]
        if study.prune == "unsolved":
            row = [other for other in row if other.place.seed in study.tune_seeds]
        return [other for other in row if float(other.rate) < float(cell.rate)]

    def waits_for(self, cell: Cell) -> Iterator[Place]:
        """The cells whose records there must be before ``cell`` is decided."""
        if cell.start is not None:
            yield cell.start.place
        yield from (other.place for other in self.deciding(cell))

    def why_not(self, cell: Cell, records: Mapping[Place, Record]) -> str | None:
        """The reason not to run ``cell``, given the records that it waits for."""
        study = self.grid.studies[cell.place.study]
        if cell.start is not None:
            assert study.start is not None
            first = records[cell.start.place]
            if first["status"] != "done":
                return "the run that it starts from is missing"
            if study.start.solved and solved_step(first["result"], self.grid.studies[study.start.study].solved) is None:
                return "the run that it starts from did not solve the task"
        below: dict[str, list[Record]] = defaultdict(list)
        for other in self.deciding(cell):
            below[other.rate].append(records[other.place])
        if study.prune == "lost":
            lost = [rate for rate, found in below.items() if any(_is_lost(record, study.stable) for record in found)]
            return f"at a smaller rate, {min(lost, key=float)}, this arm lost what it had learned" if lost else None
        if study.prune == "unsolved":
            rates = sorted(below, key=float)
            solved = [
                any(r["status"] == "done" and solved_step(r["result"], study.solved) for r in below[rate]) for rate in rates
            ]
            for i in range(solved.index(True) + 1, len(rates) - 1) if True in solved else ():
                if not solved[i] and not solved[i + 1]:
                    return f"no tuning seed solved the task at the two rates {rates[i]} and {rates[i + 1]}"
        return None


def _is_lost(record: Record, stable: Any) -> bool:
    return record["status"] == "not run" or (record["status"] == "done" and is_lost(record["result"], stable))


def run_cells(
    pool: Pool,
    grid: AblationConfig,
    cells: Sequence[Cell],
    folder: Path,
    run_cell: RunCell,
    *,
    seconds: Callable[[Cell], float] = lambda cell: 1.0,
    after_cell: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Run what is not done yet and return the records of all ``cells``, in their order.

    A cell that raises gets a record with ``status: failed``; it is tried again when the grid is run again. Where a worker dies,
    the cells that were under way are tried once more, each alone, so that the one that killed it is known.

    Args:
        seconds: projected for a cell, for the time that is left.
        after_cell: called when a cell's line has been written.
    """
    book, rules = Book(cells, folder), Rules(grid, cells)
    book.forget(_undecided(cells, rules, book))
    again = _first_phases_without_weights(cells, book)
    waiting = [cell for cell in cells if cell.place not in book.records or cell in again]
    log.info("%d runs: %d done before, %d to do, %d at once", len(cells), len(cells) - len(waiting), len(waiting), pool.workers)
    progress = Progress(sum(map(seconds, waiting)), len(cells) - len(waiting), len(cells))
    running: dict[Cell, tuple[Job, float]] = {}
    suspects: list[Cell] = []  # of killing a worker
    while waiting or running or suspects:
        has_room = len(running) < pool.workers and not suspects
        for cell in _ready(waiting, rules, book, again) if has_room else ():
            if len(running) == pool.workers:
                break
            waiting.remove(cell)
            if reason := rules.why_not(cell, book.records):
                book.write(cell, "not run", reason=reason)
                progress.end(seconds(cell))
                break  # what waits for it may be ready now
            running[cell] = (_submit(pool, grid, cell, folder, run_cell), time.perf_counter())
        if suspects and not running:
            running[suspects[0]] = (_submit(pool, grid, suspects[0], folder, run_cell), time.perf_counter())
        for cell in [cell for cell, (job, _) in running.items() if job.done()]:
            job, began = running.pop(cell)
            alone = cell in suspects
            try:
                found = job.result()
            except Exception as error:  # the process or job died; what a run raises is an answer
                if not alone:
                    suspects.append(cell)
                    continue
                found = {"error": f"the process died: {' '.join(str(error).split())[:200]}"}
            if alone:
                suspects.remove(cell)
            took = time.perf_counter() - began
            failed = found.get("error")
            book.write(cell, "failed" if failed else "done", reason=failed, seconds=took, result=found.get("result"))
            after_cell()
            progress.end(seconds(cell), f"failed: {cell.place}: {failed}" if failed else None)
        progress.look()
        time.sleep(0.02 if running else 0.0)
    progress.close()
    return [book.records[cell.place] for cell in cells]


def _undecided(cells: Sequence[Cell], rules: Rules, book: Book) -> list[Cell]:
    """The cells that a rule left out because of one that failed, which is tried again, or because of each other."""
    found: list[Cell] = []
    open_places = {cell.place for cell in cells if cell.place not in book.records}
    left_out = [cell for cell in cells if book.records.get(cell.place, {}).get("status") == "not run"]
    while more := [cell for cell in left_out if cell not in found and open_places.intersection(rules.waits_for(cell))]:
        found += more
        open_places |= {cell.place for cell in more}
    return found


def _first_phases_without_weights(cells: Sequence[Cell], book: Book) -> set[Cell]:
    """The finished cells whose weights are gone and still needed: they are run again."""
    starts = {cell.start for cell in cells if cell.start is not None and cell.place not in book.records}
    done = {cell for cell in starts if book.records.get(cell.place, {}).get("status") == "done"}
    return {cell for cell in done if not cell.weights(book.folder).exists()}


def _ready(waiting: Sequence[Cell], rules: Rules, book: Book, again: set[Cell]) -> Iterator[Cell]:
    """The cells whose turn it may be, in the order of the grid."""
    open_again = {cell.place for cell in waiting if cell in again}
    for cell in list(waiting):
        if all(place in book.records and place not in open_again for place in rules.waits_for(cell)):
            yield cell


def _submit(pool: Pool, grid: AblationConfig, cell: Cell, folder: Path, run_cell: RunCell) -> Job:
    keep = grid.studies[cell.place.study].keep_attention
    return pool.submit(attempt, run_cell, cell.words(folder), str(cell.folder(folder)), cell.steps(), cell.keeps_weights, keep)


def attempt(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """``{"result": ...}``, or ``{"error": words}``: not every exception can be sent from one process to another."""
    try:
        return {"result": function(*arguments)}
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}


def project(pool: Pool, cells: Iterable[Cell], folder: Path, run_cell: RunCell) -> Callable[[Cell], float]:
    """Measure what runs cost, with two short runs of each kind. Returns a function: the seconds that a cell takes at most.

    A run that ends early, because it solved its task, takes less.
    """
    kinds: dict[tuple[str, ...], Cell] = {}
    for cell in cells:
        kinds.setdefault(_kind(cell), cell)
    place = folder / "projection"
    jobs = {
        kind: pool.submit(_cost, run_cell, cell.overrides, str(place / str(i))) for i, (kind, cell) in enumerate(kinds.items())
    }
    while not all(job.done() for job in jobs.values()):
        time.sleep(0.02)
    costs = {}
    for kind, job in jobs.items():
        with suppress(Exception):  # its process died: the grid will say why
            costs[kind] = job.result()
    shutil.rmtree(place, ignore_errors=True)

    def seconds(cell: Cell) -> float:
        fixed, a_step = costs.get(_kind(cell), (0.0, 0.0))
        return fixed + a_step * cell.steps()

    return seconds


def _kind(cell: Cell) -> tuple[str, ...]:
    """The overrides that a step's cost depends on most."""
    return tuple(text for text in cell.overrides if text.startswith(("experiment=", "data", "model=", "model.num_layers=")))


def _cost(run_cell: RunCell, overrides: Sequence[str], folder: str) -> tuple[float, float]:
    """(seconds of a run beside its steps, seconds of a step). A run that fails costs nothing here: the grid will say why."""
    took = []
    for steps in (1, *_PROBES):  # the first one imports torch and makes the data
        less = [
            f"trainer.max_steps={steps}",
            "schedule.warmup_steps=0",
            "callbacks.probe.every=0",
            "callbacks.probe.weights_every=0",
        ]
        began = time.perf_counter()
        attempt(run_cell, [*overrides, *less], folder, steps, False, False)
        took.append(time.perf_counter() - began)
    a_step = max(0.0, took[2] - took[1]) / (_PROBES[1] - _PROBES[0])
    return max(0.0, took[1] - _PROBES[0] * a_step), a_step


class Progress:
    """A bar with the time left, which the runs that are done correct; plain lines where there is no terminal."""

    def __init__(self, seconds: float, before: int, total: int) -> None:
        self.terminal = sys.stdout.isatty()
        self.done, self.total, self.failed, self.shown = before, total, 0, time.monotonic()
        text = "{percentage:3.0f}% {postfix[0]}, {elapsed} passed, {remaining} left"
        out = sys.stdout if self.terminal else io.StringIO()
        self.bar = tqdm(total=seconds or 1.0, bar_format=text, file=out, postfix=[self._words()], smoothing=0.0)

    def _words(self) -> str:
        return f"{self.done} of {self.total} runs" + (f", {self.failed} failed" if self.failed else "")

    def end(self, seconds: float, failure: str | None = None) -> None:
        """A run is over: ``seconds`` as projected, and its failure."""
        self.done += 1
        self.failed += failure is not None
        self.bar.postfix = [self._words()]
        self.bar.update(seconds)
        if failure:
            log.warning("%s", failure)

    def look(self) -> None:
        """Show where things stand, if it is time to."""
        if time.monotonic() - self.shown >= (1.0 if self.terminal else 20.0):
            self.shown = time.monotonic()
            if self.terminal:
                self.bar.refresh()
            else:
                log.info("%s", str(self.bar).strip())

    def close(self) -> None:
        """The last line."""
        self.bar.close()
        if not self.terminal:
            log.info("%s", self._words())
