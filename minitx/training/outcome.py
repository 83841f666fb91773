"""The result of a finished run, read from its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minitx.training.metrics import finite, read_metrics


def summarise(folder: Path, *, floors: Mapping[str, float], nonfinite_step: int | None, num_parameters: int) -> dict[str, Any]:
    """Return the result of a run as plain data without NaN.

    ==================  =====================================================================================
    ``steps``           updates made; of a run that was not finite, those before that step
    ``nonfinite_step``  the step whose loss or gradient was not finite, or None
    ``train_loss``      of the last step that has a row in ``metrics.csv``
    ``val_loss, val_accuracy``  of the last validation; None where there was none, or the run was not finite
    ``floors``          losses to compare with, in nats, by name
    ``num_parameters``  of the network
    ==================  =====================================================================================
    """
    rows = read_metrics(folder / "metrics.csv")
    logged = [row for row in rows if row["train_loss"] is not None]
    validated = [row for row in rows if row["val_loss"] is not None] if nonfinite_step is None else []
    return {
        "steps": nonfinite_step - 1 if nonfinite_step is not None else logged[-1]["step"] if logged else 0,
        "nonfinite_step": nonfinite_step,
        "train_loss": finite(logged[-1]["train_loss"]) if logged else None,
        "val_loss": finite(validated[-1]["val_loss"]) if validated else None,
        "val_accuracy": finite(validated[-1]["val_accuracy"]) if validated else None,
        "floors": dict(floors),
        "num_parameters": num_parameters,
    }
