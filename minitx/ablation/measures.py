"""Read the ``result`` of a record from a finished run's folder."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minitx.ablation.callbacks import GRADIENT, MEASURES_FILE, START_FILE
from minitx.training.loggers import finite, read_metrics, read_probes


def result_of(folder: Path, trained: Mapping[str, Any], cap: int, *, keep_attention: bool = False) -> dict[str, Any]:
    """Return the ``result`` of a record (see ``records``) as plain data without NaN.

    Args:
        folder: the run's folder.
        trained: the result of ``train``.
        cap: ``trainer.max_steps``.
        keep_attention: also read the weights that the probe wrote.
    """
    rows = [row for row in read_metrics(folder / "metrics.csv") if row["train_loss"] is not None]
    losses = [row["train_loss"] for row in rows]
    return {
        "steps": rows[-1]["step"] if rows else 0,
        "cap": cap,
        "loss": [_short(loss) for loss in losses],
        "accuracy": _curve(rows, "train_accuracy"),
        "gradient": _curve(rows, GRADIENT),
        "nonfinite_step": trained["nonfinite_step"],
        "val_loss": trained["val_loss"],
        "val_accuracy": trained["val_accuracy"],
        "floors": dict(trained["floors"]),
        "digest": hashlib.sha256(b"".join(struct.pack("<d", loss) for loss in losses)).hexdigest(),
        "parameters": trained["num_parameters"],
        "start_error": _read(folder / START_FILE).get("error"),
        "measures": {name: finite(value) for name, value in _read(folder / MEASURES_FILE).items()},
        "probes": [
            {"step": probe["step"], "layers": [_layer(layer) for layer in probe["layers"]]} for probe in _probes(folder)
        ],
        "attention": _attention(folder / "attention") if keep_attention else {},
    }


def _short(value: float | None) -> float | None:
    """Five significant digits: curves are drawn and smoothed, and kept in the repository."""
    return None if finite(value) is None else float(f"{value:.5g}")


def _curve(rows: list[dict[str, Any]], name: str) -> list[float | None] | None:
    values = [_short(row.get(name)) for row in rows]
    return None if all(value is None for value in values) else values


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}  # type: ignore[no-any-return]


def _probes(folder: Path) -> list[dict[str, Any]]:
    return read_probes(folder / "probes.jsonl")


def _layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a layer; histograms are left out."""
    plain = {name: value for name, value in layer.items() if not isinstance(value, list | dict)}
    return {name: _short(value) if isinstance(value, float) else value for name, value in plain.items()}


def _attention(folder: Path) -> dict[str, list[Any]]:
    """The weights (rows, L, S) of the first layer's first head at each step that was kept, to four decimals."""
    from minitx.analysis.snapshot import read_snapshots

    return {str(shot.step): (shot.maps[0].weights[:, 0] * 1e4).round().div(1e4).tolist() for shot in read_snapshots(folder)}
