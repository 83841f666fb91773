"""Runs the cells of a grid: resumable, with a projection first and a table while it runs; a failed cell never stops the others.

The runner is handed a launcher and knows nothing of configs, processes or clusters.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from minitx.ablation.grid import Cell
from minitx.ablation.launchers import WORKER_DIED, Launcher, Outcome, devices_of
from minitx.ablation.progress import Display, LiveTable, log_lines

log = logging.getLogger(__name__)

Record = dict[str, Any]
Kind = tuple[str, str, int]
Costs = Mapping[Kind, tuple[float, float]]
PROBE_STEPS = 20


def read_records(path: Path) -> list[Record]:
    """The finished cells of ``cells.jsonl``; a last line cut short by a crash is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def project(launcher: Launcher, cells: Iterable[Cell], folder: Path) -> dict[Kind, tuple[float, float]]:
    """Measure (fixed seconds, seconds a step) for each kind of cell by running 1 and 20 steps of one of each.

    The probes write into ``folder/projection`` and are no results.
    """
    kinds: dict[Kind, Cell] = {}
    for cell in cells:
        kinds.setdefault(kind_of(cell), cell)
    probes = {kind: (_shortened(cell, 1), _shortened(cell, min(PROBE_STEPS, cell.steps()))) for kind, cell in kinds.items()}
    place = folder / "projection"
    warm = [short for short, _ in probes.values() if not launcher.runs_alone(short)][: launcher.workers]
    for _ in outcomes(launcher, warm, place):
        pass  # imports and the first data set are no part of a cell's cost
    todo = {probe.hash: probe for both in probes.values() for probe in both}
    seconds = {probe.hash: outcome.seconds for probe, outcome in outcomes(launcher, list(todo.values()), place)}
    costs = {}
    for kind, (short, longer) in probes.items():
        fixed = seconds[short.hash]
        costs[kind] = (fixed, max(0.0, seconds[longer.hash] - fixed) / max(1, longer.steps() - 1))
    return costs


def kind_of(cell: Cell) -> Kind:
    """What a cell's cost depends on: its study, a ladder's rung, and its devices; widths, rates, inits and seeds cost the same."""
    return (cell.study, cell.factors.get("rung", ""), devices_of(cell.overrides))


def cell_seconds(cell: Cell, costs: Costs) -> float:
    """What a cell is projected to take."""
    fixed, a_step = costs[kind_of(cell)]
    return fixed + a_step * (cell.steps() - 1)


def lanes_of(cell: Cell, launcher: Launcher) -> int:
    """How many cells like this one run beside each other."""
    return 1 if launcher.runs_alone(cell) else launcher.workers


def projected_seconds(cells: Iterable[Cell], costs: Costs, launcher: Launcher) -> float:
    """Wall seconds for ``cells``."""
    return sum(cell_seconds(cell, costs) / lanes_of(cell, launcher) for cell in cells)


def _shortened(cell: Cell, steps: int) -> Cell:
    less = (f"trainer.max_steps={steps}", "schedule.warmup_steps=0", "callbacks.probe.every=0")
    return replace(cell, overrides=(*cell.overrides, *less))


def run_cells(
    launcher: Launcher,
    cells: Sequence[Cell],
    folder: Path,
    *,
    costs: Costs | None = None,
    display: Display = log_lines,
    every_seconds: float = 10.0,
    after_cell: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Run what is not done yet and return the records of all ``cells``, in their order.

    One JSON line a finished cell is appended to ``cells.jsonl`` as it finishes. A cell that raises gets a record with
    ``status: failed`` and its error; it is tried again when the grid is run again, as is a cell whose worker died.

    Args:
        costs: what ``project`` measured; without it the first cells tell how long the others take.
        display: shows a line every ``every_seconds`` (see ``LiveTable``).
        after_cell: called when a cell's line has been written.
    """
    book = Book(cells, folder)
    todo = book.todo
    log.info("%d cells: %d done before, %d to run on %d workers", len(cells), book.before, len(todo), launcher.workers)
    seconds = {cell.hash: cell_seconds(cell, costs) for cell in todo} if costs else None
    lanes = {cell.hash: lanes_of(cell, launcher) for cell in todo}
    table = LiveTable(len(cells), book.before, seconds, lanes, display=display, every_seconds=every_seconds)
    for cell, outcome in outcomes(launcher, todo, folder, table):
        book.write(cell, outcome)
        after_cell()
        table.end(cell, outcome.error)
    return book.records()


class Book:
    """``cells.jsonl`` of a grid's folder: what is done before, and one line a cell as it finishes.

    Attributes:
        todo: the cells that are not done yet, in their order. before: how many are.
    """

    def __init__(self, cells: Sequence[Cell], folder: Path) -> None:
        self.cells, self.path = cells, folder / "cells.jsonl"
        found = {record["cell"]: record for record in read_records(self.path) if record["status"] == "done"}
        self._found = {cell.hash: found[cell.hash] for cell in cells if cell.hash in found}
        self.todo = [cell for cell in cells if cell.hash not in self._found]
        self.before = len(self._found)
        if self.path.exists() and self.path.stat().st_size and not self.path.read_bytes().endswith(b"\n"):
            self._append("\n")  # a line cut short by a crash must not swallow the next one

    def write(self, cell: Cell, outcome: Outcome) -> None:
        """Keep what came of a cell; it is on the disk when this returns."""
        self._found[cell.hash] = record = {
            **cell.describe(),
            "status": "failed" if outcome.error else "done",
            "error": outcome.error,
            "seconds": round(outcome.seconds, 3),
            "result": outcome.result,
        }
        self._append(json.dumps(record) + "\n")

    def records(self) -> list[Record]:
        """The records of all cells, in their order, once each has one."""
        return [self._found[cell.hash] for cell in self.cells]

    def _append(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def outcomes(
    launcher: Launcher, cells: Sequence[Cell], folder: Path, table: LiveTable | None = None
) -> Iterator[tuple[Cell, Outcome]]:
    """Cells and what came of them, as they finish; only as many are under way as there are workers.

    Cells that run alone come last, one by one. So do those that were under way when a worker of a pool died and took the
    others with it: which of them did it shows when each runs alone.
    """
    waiting = [cell for cell in reversed(cells) if not launcher.runs_alone(cell)]
    alone = [cell for cell in reversed(cells) if launcher.runs_alone(cell)]
    running: dict[Future[Outcome], Cell] = {}
    while waiting or running or alone:
        while len(running) < launcher.workers and (waiting or (alone and not running)):
            cell = waiting.pop() if waiting else alone.pop()
            if table:
                table.begin(cell)
            running[launcher.submit(cell, folder)] = cell
        finished, _ = wait(running, timeout=table.every_seconds if table else None, return_when=FIRST_COMPLETED)
        if any(future.result().error == WORKER_DIED for future in finished):
            finished, _ = wait(running)
        several_died = [future.result().error for future in finished].count(WORKER_DIED) > 1
        for future in finished:
            cell, outcome = running.pop(future), future.result()
            if outcome.error == WORKER_DIED and several_died:
                alone.append(cell)
            else:
                yield cell, outcome
        if table:
            table.look()
