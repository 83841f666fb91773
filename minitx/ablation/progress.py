"""What a running grid shows: a line that says what is done, what is running and how long the rest takes."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from minitx.ablation.grid import Cell
from minitx.ablation.records import key_of

log = logging.getLogger(__name__)

Display = Callable[[str, bool], None]
"""Takes a line, and whether it stays when the next one comes."""


def log_lines(text: str, stays: bool) -> None:
    """Every line goes to the log, and stays there."""
    log.info("%s", text)


class TerminalLine:
    """Draws on a terminal: a line that does not stay is drawn over by the next.

    >>> import io
    >>> stream = io.StringIO()
    >>> show = TerminalLine(stream, columns=lambda: 7)
    >>> show("2 of 8 done", False)
    >>> stream.getvalue()
    '\\r\\x1b[2K2 of 8'
    """

    def __init__(self, stream: TextIO, columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns) -> None:
        self.stream, self.columns = stream, columns

    def __call__(self, text: str, stays: bool) -> None:
        shown = f"{text}\n" if stays else text[: self.columns() - 1]  # a line that wraps cannot be drawn over
        self.stream.write(f"\r\x1b[2K{shown}")
        self.stream.flush()


class LiveTable:
    """Counts cells and tells how long the rest takes.

    A cell that is not done counts ``seconds`` × r, less what it has run; r is what the finished cells took ÷ what they were
    projected to take, so that the projection is corrected as the grid goes on. Divided by ``lanes``, the number of cells
    that run beside each other.

    Args:
        total: cells of the grid. before: those that were done when it began.
        seconds: projected for each cell to run, by hash; ``None``: nothing was measured, cells count alike.
        lanes: for each cell to run, by hash, how many of its kind run at once.
        display: gets a line every ``every_seconds``, one for each failed cell, and a last one that stays.
        clock: seconds, rising.
    """

    def __init__(
        self,
        total: int,
        before: int,
        seconds: Mapping[str, float] | None,
        lanes: Mapping[str, int],
        *,
        display: Display = log_lines,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.done, self.failed = total, before, 0
        self.measured, self.projected = seconds is not None, dict(seconds or dict.fromkeys(lanes, 1.0))
        self.lanes, self.display, self.every_seconds, self.clock = lanes, display, every_seconds, clock
        self.waiting, self.running = set(lanes), dict[str, tuple[Cell, float]]()
        self.spent = self.promised = 0.0
        self.began = self.shown = clock()

    def begin(self, cell: Cell) -> None:
        """A cell is under way (once more, where it goes alone after a worker died)."""
        self.waiting.discard(cell.hash)
        self.running[cell.hash] = (cell, self.clock())

    def end(self, cell: Cell, error: str | None) -> None:
        """What came of a cell is known; what it took counts from ``begin``, start of a job and queue included."""
        _, since = self.running.pop(cell.hash)
        if error is None:
            self.done += 1
            self.spent += self.clock() - since
            self.promised += self.projected[cell.hash]
        else:
            self.failed += 1
            self.display(f"failed: {cell.command}: {error}", True)
        if self.done + self.failed == self.total:
            self.display(self.line(), True)

    def look(self) -> None:
        """Show the line if it is time to."""
        if self.clock() - self.shown >= self.every_seconds and self.done + self.failed < self.total:
            self.shown = self.clock()
            self.display(self.line(), False)

    def seconds_left(self) -> float | None:
        """For the cells that wait or run; ``None`` while there is nothing to tell it by."""
        if not self.promised and not self.measured:
            return None
        correction = self.spent / self.promised if self.promised else 1.0
        left = {name: self.projected[name] * correction for name in self.waiting}
        for name, (_, since) in self.running.items():
            left[name] = max(0.0, self.projected[name] * correction - (self.clock() - since))
        return sum(seconds / self.lanes[name] for name, seconds in left.items())

    def line(self) -> str:
        """What there is to say now; the longest-running cell comes last, where a narrow terminal cuts it off."""
        passed, left = duration(self.clock() - self.began), self.seconds_left()
        text = f"{self.done} of {self.total} cells done, {len(self.running)} running, {self.failed} failed, {passed} passed"
        if (
            self.done + self.failed < self.total and left is not None and left >= 0.5
        ):  # 0: the last ones take longer than projected
            text += f", about {duration(left)} left"
        if self.running:
            cell, since = min(self.running.values(), key=lambda one: one[1])
            text += f"; longest {duration(self.clock() - since)}: {key_of(cell.describe())}"
        return text


def duration(seconds: float) -> str:
    """Seconds as one reads them.

    >>> duration(89.6), duration(1234), duration(9000)
    ('90 s', '21 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
