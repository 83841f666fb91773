"""The report of a grid: one HTML file, its figures, a Markdown summary, and a table of the runs.

A grid's ``about`` names a module for its question. The module may define any of

``LEAD``                               a text above the sentences: what the question is about
``sentences(findings) -> list[str]``   the first screen's sentences
``figure(findings) -> list[Picture]``  the first screen's figures
``sections(findings) -> list[Section]``  sections after the figures
``limits(findings) -> list[str]``      sentences of the section on limits
``RULES``                              rules of predictions: name -> ``function(findings, **options) -> (status, evidence)``

The rest comes from ``minitx.ablation.generic``.
"""

from __future__ import annotations

import base64
import html
import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minitx.ablation import generic
from minitx.ablation.judge import Findings
from minitx.ablation.layout import Block, Picture, Section, Table
from minitx.analysis.canvas import DPI, png, svg

PARTS = ("sentences", "figure", "sections", "limits")
NUMBERS = ("steps", "cap", "val_loss", "val_accuracy", "nonfinite_step", "start_error", "parameters", "digest")
"""The numbers of a run's result in the table of runs."""


def write_report(findings: Findings, folder: Path, *, meta: Mapping[str, Any]) -> list[str]:
    """Write ``report.html``, ``summary.md``, ``cells.csv`` and ``figures/`` into ``folder``.

    Equal runs give equal files in any order of the records. Only ``meta`` changes the files.

    Args:
        meta: how the records were made: ``commit``, ``command``, ``date``, ``hardware``, ``versions`` (a mapping),
            ``wall_seconds``.

    Returns:
        The first screen's sentences.
    """
    about = importlib.import_module(findings.grid.about) if findings.grid.about else generic
    said = {part: getattr(about, part, getattr(generic, part))(findings) for part in PARTS}
    sections = _worth_showing(generic.all_sections(findings, said["sections"], said["limits"], meta), said["figure"])
    pictures = [*said["figure"], *(block for part in sections for block in part.blocks if isinstance(block, Picture))]
    page = {
        "title": findings.grid.question,
        "lead": getattr(about, "LEAD", ""),
        "sentences": said["sentences"],
        "notes": [text for text in (findings.grid.note, generic.incomplete(findings)) if text],
        "pictures": said["figure"],
        "sections": sections,
        "images": _write_figures(pictures, folder / "figures"),
        "dpi": DPI,
    }
    for name in ("report.html", "summary.md"):
        (folder / name).write_text(_template(name).render(page), encoding="utf-8")
    _write_cells(findings, folder / "cells.csv")
    return said["sentences"]  # type: ignore[no-any-return]


def _worth_showing(sections: Sequence[Section], first: Sequence[Picture]) -> list[Section]:
    """Without the figures of the first screen, tables without rows, and then sections without blocks."""
    shown = {picture.name for picture in first}

    def is_news(block: Block) -> bool:
        if isinstance(block, Picture):
            return block.name not in shown
        return not isinstance(block, Table) or bool(block.rows)

    kept = [Section(section.title, [block for block in section.blocks if is_news(block)]) for section in sections]
    return [section for section in kept if section.blocks]


def _write_figures(pictures: Sequence[Picture], folder: Path) -> dict[str, str]:
    """Write each figure as PNG and SVG. Returns the PNG files in base 64, by the name of the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    images = {}
    for picture in pictures:
        picture.figure.draw_without_rendering()
        picture.figure.set_layout_engine("none")  # it is laid out once, not again for each file
        image = png(picture.figure)
        (folder / f"{picture.file}.png").write_bytes(image)
        (folder / f"{picture.file}.svg").write_bytes(svg(picture.figure))
        images[picture.name] = base64.b64encode(image).decode()
    return images


def _template(name: str) -> Any:
    """A template of this package. HTML is escaped in the page; the summary has the filter ``markdown``."""
    import jinja2

    loader = jinja2.PackageLoader("minitx.ablation", "templates")
    environment = jinja2.Environment(loader=loader, autoescape=name.endswith(".html"), trim_blocks=True, lstrip_blocks=True)
    environment.filters["markdown"] = _markdown
    return environment.get_template(f"{name}.j2")


def _markdown(text: str) -> str:
    """Text in which no table, emphasis, link or tag begins or ends."""
    return html.escape(re.sub(r"[\\|_*`\[\]$]", r"\\\g<0>", " ".join(text.split())), quote=False)


def _write_cells(findings: Findings, path: Path) -> None:
    """One row a run: its place, its status, and its numbers."""
    import pandas

    rows = []
    for run in findings.runs.all:
        row: dict[str, Any] = {"study": run.study, "arm": run.arm, **dict(run.place.factors), "seed": run.seed}
        row |= {"status": run.status, **{name: run.record.get(name) for name in ("reason", "seconds", "cell", "command")}}
        if run.status == "done":
            row |= {name: run.result[name] for name in NUMBERS} | run.result["measures"]
        rows.append(row)
    pandas.DataFrame(rows).to_csv(path, index=False, lineterminator="\n")
