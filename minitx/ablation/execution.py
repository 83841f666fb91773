"""Run the cells of a grid. A projection comes first, then all cells that are not done. A cell waits for the cells whose results it needs.

A finished cell is never run again. A failed cell does not stop the others. A grid that was killed continues where it stopped.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minitx.ablation.design import AblationConfig
from minitx.ablation.grid import Cell
from minitx.ablation.pools import Pool
from minitx.ablation.records import Place, Record, is_lost, read_records, solved_step

log = logging.getLogger(__name__)

RunCell = Callable[..., dict[str, Any]]
"""A function that runs a cell in a worker. Arguments: words, folder, cap, whether to keep its weights, whether to keep its attention."""

_PROBES = (2, 22)  # steps of the two short runs that a projection is made from


class Book:
    """The file ``cells.jsonl`` of a grid's folder: the records of its cells, one per line. Each record is written to disk at once.

    Attributes:
        known: records that were in the file before, without failures and without runs that must be repeated.
        records: the records of finished cells and of cells that this launch has decided about.
    """

    def __init__(self, cells: Sequence[Cell], folder: Path, after_line: Callable[[], None]) -> None:
        self.folder, self.path, self.after_line = folder, folder / "cells.jsonl", after_line
        last = {record["cell"]: record for record in read_records(self.path)}
        found = {cell.place: last[cell.hash] for cell in cells if cell.hash in last}
        self.known = {place: record for place, record in found.items() if record["status"] != "failed"}
        for cell in reversed(cells):
            if cell.start and cell.place not in self.known and not cell.start.weights(folder).exists():
                self.known.pop(cell.start.place, None)  # its weights are gone, and needed
        self.records = {place: record for place, record in self.known.items() if record["status"] == "done"}
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            self._append("\n")  # a line that a crash cut short must not swallow the next one

    def write(self, cell: Cell, status: str, **known: Any) -> None:
        """Write the result of a cell (``reason``, ``seconds``, ``result``), unless the file already contains it."""
        what = {"status": status, "reason": None, "seconds": 0.0, "result": None, **known}
        self.records[cell.place] = record = {**cell.describe(self.folder), **what}
        if status == "failed":
            log.warning("failed: %s: %s", cell.place, what["reason"])
        if record != self.known.get(cell.place):
            self._append(json.dumps(record) + "\n")
            self.after_line()

    def _append(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


class Rules:
    """The rules of a grid: which cells a cell waits for, and why a cell is not run (its first phase did not solve the task, or ``prune``)."""

    def __init__(self, grid: AblationConfig, cells: Sequence[Cell]) -> None:
        self.grid = grid
        self._rows: dict[Any, list[Cell]] = defaultdict(list)  # each the smallest rate first
        for cell in sorted(cells, key=lambda cell: float(cell.place.rate or 1)):
            self._rows[self._row(cell.place)].append(cell)

    def _row(self, place: Place) -> tuple[Any, ...]:
        return (place.study, place.arm, *place.condition.items())

    def deciding(self, cell: Cell) -> list[Cell]:
        """Return the cells with smaller rates whose results decide, by ``prune``, whether ``cell`` is run."""
        study, place = self.grid.studies[cell.place.study], cell.place
        seeds = {"lost": (place.seed,), "unsolved": study.tune_seeds, None: ()}[study.prune]
        row = self._rows[self._row(place)]
        return [other for other in row if other.place.seed in seeds and float(other.place.rate) < float(place.rate)]

    def waits_for(self, cell: Cell) -> list[Cell]:
        """Return the cells whose records are needed before ``cell`` can be decided."""
        return [*([cell.start] if cell.start else []), *self.deciding(cell)]

    def why_not(self, cell: Cell, records: Mapping[Place, Record]) -> str | None:
        """Return the reason not to run ``cell``, given the records that it waits for, or None."""
        study = self.grid.studies[cell.place.study]
        if study.start is not None and cell.start is not None:
            first = records[cell.start.place]
            if first["status"] != "done":
                return "the run that it starts from is missing"
            if study.start.solved and solved_step(first["result"], self.grid.studies[study.start.study].solved) is None:
                return "the run that it starts from did not solve the task"
        below = [(other.place.rate, records[other.place]) for other in self.deciding(cell)]
        if study.prune == "lost":
            for rate, record in below:
                if record["status"] == "not run" or (record["status"] == "done" and is_lost(record["result"], study.stable)):
                    return f"at a smaller rate, {rate}, this arm lost what it had learned"
        if study.prune == "unsolved":
            solved = dict.fromkeys((rate for rate, _ in below), False)
            for rate, record in below:
                solved[rate] |= record["status"] == "done" and solved_step(record["result"], study.solved) is not None
            for (rate, is_solved), (above, is_solved_above) in pairwise(dropwhile(lambda item: not item[1], solved.items())):
                if not is_solved and not is_solved_above:
                    return f"no tuning seed solved the task at the two rates {rate} and {above}"
        return None


def attempt(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Return ``{"result": ...}``, or ``{"error": message}``, because some exceptions cannot be sent to another process."""
    try:
        return {"result": function(*arguments)}
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}


def project(pool: Pool, cells: Sequence[Cell], folder: Path, run_cell: RunCell) -> Callable[[Cell], float]:
    """Measure the cost of runs with two short runs of each kind. Return a function that gives the largest number of seconds of a cell.

    A run that solves its task early takes less.
    """
    place = folder / "projection"
    jobs: dict[Any, Any] = {}
    for kind, cell in {_kind(cell): cell for cell in reversed(cells)}.items():
        while sum(not job.done() for job in jobs.values()) >= pool.workers:
            time.sleep(0.02)
        jobs[kind] = pool.submit(_cost, run_cell, cell.overrides, str(place / cell.hash))
    while not all(job.done() for job in jobs.values()):
        time.sleep(0.02)
    nothing = (0.0, 0.0)  # where its process died: the grid will say why
    costs = {kind: attempt(job.result).get("result", nothing) for kind, job in jobs.items()}
    shutil.rmtree(place, ignore_errors=True)

    def seconds(cell: Cell) -> float:
        fixed, a_step = costs.get(_kind(cell), nothing)
        return float(fixed + a_step * cell.steps())

    return seconds


def _kind(cell: Cell) -> tuple[str, ...]:
    """The overrides that a step's cost depends on most."""
    return tuple(text for text in cell.overrides if text.startswith(("experiment=", "data", "model=", "model.num_layers=")))


def _cost(run_cell: RunCell, overrides: Sequence[str], folder: str) -> tuple[float, float]:
    """(seconds of a run beside its steps, seconds of a step)."""
    less = ["schedule.warmup_steps=0", "callbacks.probe.every=0", "callbacks.probe.weights_every=0"]
    took = []
    for steps in (1, *_PROBES):  # the first one imports torch and makes the data
        began = time.perf_counter()
        attempt(run_cell, [*overrides, f"trainer.max_steps={steps}", *less], folder, steps, False, False)
        took.append(time.perf_counter() - began)
    a_step = max(0.0, took[2] - took[1]) / (_PROBES[1] - _PROBES[0])
    return max(0.0, took[1] - _PROBES[0] * a_step), a_step


def run_cells(
    pool: Pool,
    grid: AblationConfig,
    cells: Sequence[Cell],
    folder: Path,
    run_cell: RunCell,
    *,
    projection: Callable[..., Callable[[Cell], float]] = project,
    after_line: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Run all cells that are not done, and return the records of all ``cells``, in their order.

    A cell that raises an error gets a record with ``status: failed``, and is tried again when the grid is run again. A cell
    whose worker died is tried once more. The rules that leave out cells are applied again at each launch.

    Args:
        projection: ``project``, or a function like it.
        after_line: a function that is called after each line of ``cells.jsonl``.
    """
    book = Book(cells, folder, after_line)
    todo = [cell for cell in cells if cell.place not in book.known]
    seconds = projection(pool, todo, folder, run_cell)
    left = {cell: seconds(cell) for cell in todo}
    log.info("%d runs: %d done before, %d to do, %d at once", len(cells), len(cells) - len(todo), len(todo), pool.workers)
    if todo:
        log.info("projection: at most %s", duration(sum(left.values()) / pool.workers))
    bar = _progress_bar(sum(left.values()))
    for cell in _decided(pool, grid, cells, book, run_cell):
        if cell is None:
            time.sleep(0.02)
        bar.set_description_str(f"{len(book.records)} of {len(cells)} runs, ", refresh=False)
        bar.update(left.get(cell, 0.0) if cell else 0.0)
    bar.close()
    return [book.records[cell.place] for cell in cells]


def _decided(pool: Pool, grid: AblationConfig, cells: Sequence[Cell], book: Book, run_cell: RunCell) -> Iterator[Cell | None]:
    """Each cell when the book has its record, and None where there is nothing to do but wait."""
    rules, numbers = Rules(grid, cells), {cell: number for number, cell in enumerate(cells)}
    graph = TopologicalSorter({number: [numbers[other] for other in rules.waits_for(cell)] for cell, number in numbers.items()})
    graph.prepare()
    ready: list[int] = []  # a heap: the cells in their order
    running: dict[int, tuple[Any, float]] = {}
    died: set[int] = set()
    while graph.is_active():
        for number in graph.get_ready():
            heappush(ready, number)
        ended = next((number for number, (job, _) in running.items() if job.done()), None)
        if ready and len(running) < pool.workers:
            number = heappop(ready)
            cell = cells[number]
            if cell.place not in book.records and (reason := rules.why_not(cell, book.records)):
                book.write(cell, "not run", reason=reason)
            if cell.place not in book.records:
                running[number] = (_submit(pool, grid, cell, book.folder, run_cell), time.perf_counter())
                continue
        elif ended is not None:
            number, cell = ended, cells[ended]
            job, began = running.pop(number)
            found = _answer(job)
            if "died" in found and number not in died:
                died.add(number)
                heappush(ready, number)
                continue
            status, seconds = "failed" if "error" in found else "done", round(time.perf_counter() - began, 3)
            book.write(cell, status, reason=found.get("error"), seconds=seconds, result=found.get("result"))
        else:
            yield None
            continue
        graph.done(number)
        yield cell


def _submit(pool: Pool, grid: AblationConfig, cell: Cell, folder: Path, run_cell: RunCell) -> Any:
    keep = grid.studies[cell.place.study].keep_attention
    what: tuple[Any, ...] = (cell.words(folder), str(cell.folder(folder)), cell.steps(), cell.keeps_weights, keep)
    what += () if cell.threshold is None else (cell.threshold,)
    return pool.submit(attempt, run_cell, *what)


def _answer(job: Any) -> dict[str, Any]:
    """What ``attempt`` gave in another process, or that the process died."""
    try:
        return job.result()  # type: ignore[no-any-return]
    except Exception as error:
        return {"error": f"the process died: {' '.join(str(error).split())[:200]}", "died": True}


def _progress_bar(seconds: float) -> Any:
    """A bar with the time left, which the runs that are done correct; where there is no terminal, a line of the log now and then."""
    is_terminal = sys.stdout.isatty()
    text = "{desc}{percentage:3.0f}%, {elapsed} passed, {remaining} left"
    file, pause = (sys.stdout, 0.5) if is_terminal else (_Lines(), 20.0)
    shown = {"bar_format": text, "file": file, "mininterval": pause, "miniters": 0}  # else tqdm's monitor writes lines twice
    return tqdm(total=seconds, disable=not seconds, smoothing=0.0, **shown)


class _Lines:
    """A file that tqdm writes to: each state of the bar becomes a line of the log."""

    def write(self, text: str) -> None:
        if text.strip():
            log.info("%s", text.strip())

    def flush(self) -> None:
        pass


def duration(seconds: float) -> str:
    """Return a readable duration.

    >>> duration(89.6), duration(1234), duration(9000)
    ('90 s', '21 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
