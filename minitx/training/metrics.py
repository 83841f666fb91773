"""``metrics.csv``: one row a logged step, appended as the run goes, continued (never erased) on resume."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

COLUMNS = ("step", "train_loss", "val_loss", "val_accuracy", "lr", "grad_norm", "tokens", "seconds")


class MetricsFile(Logger):
    """Writes the columns of ``COLUMNS``; values of one step that arrive apart (training, validation) share its row.

    A row's ``step`` counts the updates made: its ``train_loss`` is the loss that update ``step`` was computed from, its
    ``val_loss`` is measured after it; ``seconds`` count from the start of this process's run. Floats read back bit-equal.
    Every call writes through: the last row is on disk when it returns. The first process of a run writes alone.

    Args:
        path: the file. start_step: rows beyond it (of a run that went on after its last checkpoint) are dropped.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        super().__init__()
        self.path = path
        self._row: dict[str, Any] = {}
        self._begin(start_step)

    @rank_zero_only
    def _begin(self, start_step: int) -> None:
        kept = [row for row in read_metrics(self.path) if row["step"] <= start_step] if self.path.exists() else []
        self._row = kept.pop() if kept else {}
        self.path.write_text(_csv(dict(zip(COLUMNS, COLUMNS, strict=True)), *kept), encoding="utf-8")
        self._offset = self.path.stat().st_size  # where the last row begins
        self._write_row()

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The config has a file of its own."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add values to the row of ``step``, which is the last row or a new one."""
        if self._row and self._row["step"] != step:
            self._offset = self.path.stat().st_size
            self._row = {}
        self._row = {**self._row, **metrics, "step": step}
        self._write_row()

    def _write_row(self) -> None:
        if not self._row:
            return
        try:
            with self.path.open("r+", encoding="utf-8", newline="") as file:
                file.seek(self._offset)
                file.truncate()
                file.write(_csv(self._row))
        except OSError as error:  # a full disk, which does not say where
            raise OSError(error.errno, error.strerror, str(self.path)) from None


def _csv(*rows: dict[str, Any]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writerows(rows)
    return text.getvalue()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a cell that was not logged is None. A last line cut short by a crash is left out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if line.endswith("\n")))
    return [
        {name: (None if text == "" else int(text) if name in ("step", "tokens") else float(text)) for name, text in row.items()}
        for row in rows
    ]


def finite(value: float | None) -> float | None:
    """The value, or None where it is missing or not finite (JSON and reports know no NaN)."""
    return value if value is not None and math.isfinite(value) else None
