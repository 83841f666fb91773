"""The result of a run, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from minitx.training.metrics_csv import finite, read_metrics
from minitx.training.nonfinite import NonFiniteError


def summarise(
    folder: Path,
    steps: int,
    nonfinite: NonFiniteError | None,
    metrics: Mapping[str, Any],
    floors: Mapping[str, float],
    network: nn.Module,
) -> dict[str, Any]:
    """Return the result of a run as plain data without NaN.

    ==================  =====================================================================================
    ``steps``           number of updates; in a run whose training was not finite, number of updates before the first such step
    ``nonfinite_step``  the first step whose loss or gradient was not finite, or whose validation was not; or None
    ``nonfinite_phase`` ``training`` or ``validation``, or None
    ``train_loss``      the loss in the last row of ``metrics.csv``
    ``val_loss, val_accuracy``  results of the last validation; None without a validation, or in a non-finite run
    ``floors``          losses of simple baselines, in nats, by name
    ``num_parameters``  number of parameters of the network
    ``metrics``         the last value of every column of ``metrics.csv``, and of every other logged metric
    ==================  =====================================================================================
    """
    rows = read_metrics(folder / "metrics.csv")
    last = {name: float(value) for name, value in metrics.items()}
    for row in rows:
        last |= {name: value for name, value in row.items() if value is not None and name != "step"}
    finite_metrics = {name: finite(value) for name, value in last.items() if nonfinite is None or not name.startswith("val_")}
    return {
        "steps": steps if nonfinite is None else nonfinite.step,
        "nonfinite_step": nonfinite and nonfinite.step + (nonfinite.phase == "training"),
        "nonfinite_phase": nonfinite and nonfinite.phase,
        **{name: finite_metrics.get(name) for name in ("train_loss", "val_loss", "val_accuracy")},
        "floors": dict(floors),
        "num_parameters": sum(p.numel() for p in network.parameters()),
        "metrics": finite_metrics,
    }
