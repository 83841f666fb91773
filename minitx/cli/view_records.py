"""The attention that runs recorded, for ``view_attention.py``."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from minitx.analysis.snapshot import Snapshot, read_snapshots, typical_row
from minitx.analysis.viewer import RowRule, Trace
from minitx.cli.command_line import refusing
from minitx.cli.view_config import ViewConfig
from minitx.cli.view_models import check_size, names_of_inputs
from minitx.config.schema import require


def recorded_traces(config: ViewConfig, paths: dict[str, str]) -> tuple[str, list[Trace], RowRule]:
    """Return the title of the page, a trace for each run in ``paths`` (by key), and the rule that chose the row."""
    runs: list[list[Snapshot]] = []
    for name, path in paths.items():
        require(os.path.isdir(path), f"{name}={path} does not exist")
        with refusing("without text= or a checkpoint file, the page shows what a run recorded: "):
            runs.append(read_snapshots(Path(path)))
    typical = typical_row(runs) if config.row is None else None
    row = config.row or typical or 0
    traces = []
    rule: RowRule = "chosen" if config.row is not None else "first" if typical is None else "typical"
    for path, snapshots, title_of_trace in zip(paths.values(), runs, names_of_inputs(list(paths.values())), strict=True):
        count = snapshots[0].num_rows
        require(row < count, f"row={row} must lie in [0, {count}), the range of sentences in {path}")
        with refusing():
            kept = snapshots[0].chosen(config.chosen_layers)
        shots = [snapshot.sentence(row) for snapshot in snapshots]
        shots = [dataclasses.replace(shot, maps=tuple(layer for layer in shot.maps if layer.name in kept)) for shot in shots]
        traces.append(Trace(title_of_trace, shots))
        check_size(traces[-1].snapshots[0], sum(len(trace.snapshots) for trace in traces))
    return f"Attention on recorded sentence {row}", traces, rule
