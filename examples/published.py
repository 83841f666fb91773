"""Shared by the programs published_*.py: their options, the table, and the record.

``--output PAGE`` writes the table below the line ``<!-- NAME -->`` of a Markdown page (or appends the line and the table), and the
numbers of the table to ``NAME.json`` in the same folder. ``--quick`` measures a small setting in seconds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

Record = Mapping[str, Any]


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent p in y ∝ x^p, by least squares on the logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median, the smallest and the largest as text: ``0.50 (0.41 to 0.62)``."""
    middle, low, high = (f"{round(x, digits) + 0.0:.{digits}f}" for x in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str | float]]) -> str:
    """Return a table in Markdown. Numbers have three significant digits."""
    cells = [[x if isinstance(x, str) else f"{x:.3g}" for x in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, ["---"] * len(headings), *cells))


def machine() -> str:
    """Return the class of the processor, the version of torch and the date."""
    return f"{torch.backends.cpu.get_cpu_capability()}, one thread, torch {torch.__version__}, {datetime.date.today()}"


def write(page: Path, name: str, record: Record, table: str) -> None:
    """Replace the table below the line ``<!-- name -->`` of ``page``, and write ``record`` to the folder of the page."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    mark = f"<!-- {name} -->\n"
    before, has_mark, after = text.partition(mark)
    lines = after.splitlines(keepends=True) if has_mark else []
    while lines and lines[0].startswith("|"):
        lines.pop(0)
    page.write_text(before + mark + table + "".join(lines), encoding="utf-8")
    page.with_name(f"{name}.json").write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def run(name: str, measure: Callable[..., Record], table: Callable[[Record], str], quick: Mapping[str, Any]) -> None:
    """Measure, print the table, and write it to the page given by ``--output``.

    Args:
        measure: returns the record. Its defaults are the published setting.
        table: returns the table of a record.
        quick: arguments of ``measure`` with ``--quick``.
    """
    parser = argparse.ArgumentParser(prog=name, description="A published number beside ours.")
    parser.add_argument("--quick", action="store_true", help="a small setting, in seconds")
    parser.add_argument("--output", metavar="PAGE", type=Path, help="write the table to this Markdown page")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = {"machine": machine(), **measure(**(quick if arguments.quick else {}))}
    print(table(record))
    if arguments.output:
        write(arguments.output, name, record, table(record))
