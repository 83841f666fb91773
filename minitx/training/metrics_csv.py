"""``metrics.csv`` and its columns. ``metrics_rows.StepLog`` computes the rows."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from minitx.crash_safe import naming, replacing

COLUMNS = (
    *("step", "train_loss", "val_loss", "val_accuracy", "lr", "grad_norm", "tokens", "seconds"),
    *("train_accuracy", "tokens_per_second", "memory_mb", "mfu"),
)

OF_THE_MACHINE = frozenset(("seconds", "tokens_per_second", "memory_mb", "mfu"))
"""Columns that differ between two equal runs."""


class MetricsFile(Logger):
    """Write the columns of ``COLUMNS``. Training and validation values of a step share a row.

    ``step`` is the number of updates. ``train_loss`` is the loss of this update, and ``val_loss`` is measured after it.
    ``seconds`` is the time since training started in this process. Floats are written exactly. The last row is on disk when
    ``log_metrics`` returns. Only rank 0 writes.

    Metrics with other names (from ``self.log`` or other callbacks) do not start a row. Their latest values are written with the
    next row, in additional columns at the end.

    Args:
        path: the file.
        start_step: remove the rows after this step. They were written after the checkpoint that the run resumes from.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        super().__init__()
        self.path = path
        self._columns, self._row, self._others = list(COLUMNS), dict[str, Any](), dict[str, Any]()
        self._start_step = start_step

    @rank_zero_only
    def begin(self) -> None:
        """Create the file, or remove rows. Before this, all processes must have checked that the folder contains no other run."""
        rows = read_metrics(self.path) if self.path.exists() else []
        self._write([row for row in rows if row["step"] <= self._start_step])

    @property
    def name(self) -> str:
        return ""  # Lightning uses it in the path of checkpoints without a ``dirpath``

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because ``config.yaml`` contains the config."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add values to the row of ``step``. It is the last row or a new row."""
        # drop Lightning's epoch: it counts from the start of the process, not of the data
        metrics = {name: value for name, value in metrics.items() if name != "epoch"}
        if not metrics.keys() & {*COLUMNS}:
            self._others.update({name: float(value) for name, value in metrics.items()})
        else:
            self._add(metrics, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write metrics that have no row yet into the last row."""
        if self._others and self._row:
            self._add({}, self._row["step"])

    def _add(self, metrics: Mapping[str, Any], step: int | None) -> None:
        if self._row and self._row["step"] != step:
            self._offset = self.path.stat().st_size
            self._row = {}
        self._row = {**self._row, **self._others, **metrics, "step": step}
        self._others = {}
        if self._row.keys() <= set(self._columns):
            with naming(self.path), self.path.open("r+", encoding="utf-8", newline="") as file:
                file.seek(self._offset)
                file.truncate()
                self._writer(file).writerow(self._row)
        else:  # a new name adds a column to the whole file
            self._write([*(row for row in read_metrics(self.path) if row["step"] != step), self._row])

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write the whole file. The last of ``rows`` can still be extended."""
        self._columns = list(dict.fromkeys(name for row in [dict.fromkeys(self._columns), *rows] for name in row))
        with naming(self.path), replacing(self.path) as new, new.open("w", encoding="utf-8", newline="") as file:
            self._writer(file).writeheader()
            self._writer(file).writerows(rows[:-1])
            file.flush()
            self._offset = file.tell()  # the position of the last row
            self._writer(file).writerows(rows[-1:])
        self._row = dict(rows[-1]) if rows else {}

    def _writer(self, file: TextIO) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._columns, lineterminator="\n")


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Read the rows of a metrics file. An empty cell is None. An incomplete last line, after a crash, is skipped."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows: Iterable[dict[str, str]] = list(csv.DictReader(line for line in file if line.endswith("\n")))
    integers = ("step", "tokens")
    return [
        {name: None if text == "" else int(text) if name in integers else float(text) for name, text in row.items()}
        for row in rows
    ]


def finite(value: float | None) -> float | None:
    """Return the value, or None if it is not finite, because JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
