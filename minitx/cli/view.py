"""``view_attention.py``: write the attention of a model, or a page to play with, as one HTML file for a browser."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minitx.cli import importing
from minitx.cli.command_line import refusing, run_program, write, write_page, writing
from minitx.cli.play import PLAY, PLAY_USAGE, play
from minitx.cli.view_config import ViewConfig
from minitx.config.schema import require

if TYPE_CHECKING:
    from minitx.analysis.viewer import RowRule, Trace

USAGE = f"""python scripts/view_attention.py ckpt_path=FILE text=TEXT [key=value ...]
python scripts/view_attention.py model=FOLDER text=TEXT [key=value ...]
{PLAY_USAGE}   a page to play with, without a model"""
RULES: dict[RowRule, str] = {
    "typical": "the first on which each model ends with its most common outcome (right or wrong, key found or missed)",
    "first": "no row has the most common outcome of each model",
    "chosen": "chosen with row=",
}
"""Why a film shows a row, by the rule that chose it."""


def main() -> int:
    """The program behind ``scripts/view_attention.py`` and ``minitx-view``; returns the exit code."""
    if PLAY in sys.argv[1:]:
        return play(sys.argv[1:])
    return run_program(ViewConfig, USAGE, _view)


def _view(config: ViewConfig) -> None:
    with importing():
        from minitx.analysis.viewer import viewer_page

    paths = {name: path for name in ("ckpt_path", "model", "compare") if (path := getattr(config, name))}
    runs_model = bool(config.model or config.knock_out or config.text is not None)  # otherwise show the records of a run
    are_folders = {path: not runs_model and os.path.isdir(path) for path in paths.values()}
    shows_records = next(iter(are_folders.values()))
    require(
        len({is_folder for path, is_folder in are_folders.items() if os.path.exists(path)}) < 2,
        f"compare={config.compare} must be a {'run folder' if shows_records else 'checkpoint'}, as ckpt_path is",
    )
    rule: RowRule | None = None
    if shows_records:
        from minitx.cli.view_records import recorded_traces

        title, traces, rule = recorded_traces(config, paths)
    else:
        from minitx.cli.view_models import model_traces

        title, traces = model_traces(config, paths)
    if config.is_film:
        _write_film(config, traces, rule)
        return
    with refusing():
        page = viewer_page(traces, title=title, rule=rule)
    write_page(page, config.output, f"{_line_of_sizes(traces, 'model' if config.compare_text is None else 'text')}\n")


def _write_film(config: ViewConfig, traces: list[Trace], rule: RowRule | None) -> None:
    from minitx.analysis.film import write_film

    tally = traces[0].snapshots[0].tally
    note = f"Row {tally.row} of {tally.rows}, counted from 0: {RULES[rule]}" if tally and rule else ""
    with writing(config.output), refusing(f"output={config.output}: "):
        steps = write_film(traces, config.output, head=config.head, note=note)
    write(f"{steps} steps\n{config.output}  {Path(config.output).stat().st_size / 1e6:.2f} MB\n")


def _line_of_sizes(traces: list[Trace], side: str) -> str:
    maps = traces[0].snapshots[0].maps
    tokens = " and ".join(str(len(rows[0])) for rows in traces[0].snapshots[0].tokens.values())
    steps = max(len(trace.snapshots) for trace in traces)
    counted = [f"{len(maps)} layer", f"{maps[0].weights.shape[1]} head", f"{steps} step", f"{len(traces)} {side}"]
    return ", ".join(f"{text}s" if int(text.split()[0]) != 1 else text for text in counted) + f", {tokens} tokens"
