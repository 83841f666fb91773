"""``metrics.csv``: one row a logged step, appended as the run goes, continued (never erased) on resume."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger

COLUMNS = ("step", "train_loss", "val_loss", "val_accuracy", "lr", "grad_norm", "tokens", "seconds")


class MetricsFile(Logger):
    """Writes the columns of ``COLUMNS``; values of one step that arrive apart (training, validation) share its row.

    A row's ``step`` counts the updates made: its ``train_loss`` is the loss that update ``step`` was computed from, its
    ``val_loss`` is measured after it. Floats are written so that they read back bit-equal.

    Args:
        path: the file. start_step: rows beyond it (of a run that went on after its last checkpoint) are dropped.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        super().__init__()
        self.path = path
        self._row: dict[str, Any] = {}
        kept = [row for row in read_metrics(path) if row["step"] <= start_step] if path.exists() else []
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, COLUMNS, extrasaction="ignore")
        self._writer.writeheader()
        self._writer.writerows(kept)

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The config has a file of its own."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add values to the row of ``step``; an older row is written out."""
        if self._row and self._row["step"] != step:
            self._write()
        self._row.update(metrics, step=step)

    def save(self) -> None:
        """Flush to the file system."""
        if not self._file.closed:
            self._file.flush()

    def finalize(self, status: str) -> None:
        """Write the last row and close."""
        if not self._file.closed:
            self._write()
            self._file.close()

    def _write(self) -> None:
        if self._row:
            self._writer.writerow({name: _as_text(value) for name, value in self._row.items()})
        self._row = {}


def _as_text(value: Any) -> str:
    return repr(float(value)) if isinstance(value, float) else str(value)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a cell that was not logged is None. A last line cut short by a crash is left out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    return [
        {name: (None if text == "" else int(text) if name in ("step", "tokens") else float(text)) for name, text in row.items()}
        for row in rows
    ]


def finite(value: float | None) -> float | None:
    """The value, or None where it is missing or not finite (JSON and reports know no NaN)."""
    return value if value is not None and math.isfinite(value) else None
