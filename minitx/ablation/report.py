"""The report of a grid: one HTML file, its figures, a Markdown summary, and a table of the runs.

A grid's ``about`` names a module with what only its question says. It may define any of

``LEAD``                               a text above the sentences: what the question is about
``sentences(findings) -> list[str]``   the first screen's sentences
``figure(findings) -> list[Picture]``  the first screen's figures
``sections(findings) -> list[Section]``  sections after the figures
``limits(findings) -> list[str]``      sentences of the section on limits
``RULES``                              rules of predictions: name -> ``function(findings, **options) -> (status, evidence)``

What it does not define comes from ``minitx.ablation.generic``.
"""

from __future__ import annotations

import base64
import html
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from minitx.ablation.config import RATE
from minitx.ablation.figures import lettered
from minitx.ablation.judge import Findings
from minitx.ablation.wording import words
from minitx.analysis.canvas import DPI, png, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Table:
    """Rows of text. ``is_open``: shown at once, not behind its caption."""

    caption: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_open: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure: a name of its own, a title, and what it shows."""

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def file(self) -> str:
        """The name of its files, without the ending."""
        return quote(self.name, safe="")


Block = str | Table | Picture


@dataclass(frozen=True)
class Section:
    """A part of the page; one without blocks is left out."""

    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


@dataclass(frozen=True)
class Written:
    """The first screen's sentences, and the page."""

    sentences: list[str]
    page: Path


PARTS = ("sentences", "figure", "sections", "limits")
BADGES = {
    **dict.fromkeys(("HELD", "PASS", "EQUAL", "SAME"), "good"),
    **dict.fromkeys(("SLOWER", "LESS STABLE", "NARROWER", "WORSE", "NOT HELD", "FAIL", "DIFFERENT", "CONTRADICTED"), "bad"),
    **dict.fromkeys(("FASTER", "MORE STABLE", "WIDER", "BETTER"), "good"),
    **dict.fromkeys(("UNDECIDED", "NOT TESTED", "INCONCLUSIVE", "NOT RUN", "NOT CONTRADICTED", "TEST"), "open"),
}
"""Words that a table shows as a coloured label."""


def write_report(findings: Findings, folder: Path, *, meta: Mapping[str, Any]) -> Written:
    """Write ``report.html``, ``summary.md``, ``cells.csv`` and ``figures/`` into ``folder``.

    Equal runs give equal files, whatever the order of their records; only ``meta`` changes them.

    Args:
        meta: what made the records: ``commit``, ``command``, ``date``, ``hardware``, ``versions`` (a mapping), ``wall_seconds``.
    """
    generic = importlib.import_module("minitx.ablation.generic")
    about = importlib.import_module(findings.grid.about) if findings.grid.about else generic
    with lettered(findings.grid):
        said = {name: getattr(about, name, getattr(generic, name))(findings) for name in PARTS}
        sections = generic.all_sections(findings, said["sections"], said["limits"], meta)
        pictures = said["figure"] + [block for part in sections for block in part.blocks if isinstance(block, Picture)]
        page = {
            "title": findings.grid.question,
            "lead": getattr(about, "LEAD", ""),
            "note": findings.grid.note,
            "sentences": said["sentences"],
            "incomplete": generic.incomplete(findings),
            "pictures": said["figure"],
            "shown": {picture.name for picture in said["figure"]},
            "sections": [part for part in sections if part.blocks],
        }
        templates = _templates(_write_figures({picture.name: picture for picture in pictures}, folder / "figures"))
    for name in ("report.html", "summary.md"):
        (folder / name).write_text(templates.get_template(f"{name}.j2").render(page), encoding="utf-8")
    _write_cells(findings, folder / "cells.csv")
    return Written(said["sentences"], folder / "report.html")


def _write_figures(pictures: Mapping[str, Picture], folder: Path) -> dict[str, bytes]:
    """The PNG files by the name of the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, picture in pictures.items():
        picture.figure.draw_without_rendering()
        picture.figure.set_layout_engine("none")  # it is laid out once, not again for each file
        drawn[name] = png(picture.figure)
        (folder / f"{picture.file}.png").write_bytes(drawn[name])
        (folder / f"{picture.file}.svg").write_bytes(svg(picture.figure))
    return drawn


def _templates(drawn: Mapping[str, bytes]) -> Any:
    """The templates of this package. HTML is escaped in the page, and Markdown in the summary."""
    import jinja2

    loader = jinja2.PackageLoader("minitx.ablation", "templates")
    found = jinja2.Environment(
        loader=loader, autoescape=lambda name: name != "summary.md.j2", trim_blocks=True, lstrip_blocks=True
    )
    found.filters["markdown"] = _markdown
    found.filters["data"] = lambda picture: "data:image/png;base64," + base64.b64encode(drawn[picture.name]).decode()
    found.filters["width"] = lambda picture: round(picture.figure.get_figwidth() * DPI)
    found.tests["table"] = lambda block: isinstance(block, Table)
    found.tests["picture"] = lambda block: isinstance(block, Picture)
    found.globals["badges"] = BADGES
    return found


def _markdown(text: str) -> str:
    """Text in which no table, emphasis, link or tag begins or ends."""
    return html.escape(re.sub(r"[\\|_*`\[\]$]", r"\\\g<0>", " ".join(text.split())), quote=False)


def _write_cells(findings: Findings, path: Path) -> None:
    """One row a run: its place, its status, and its numbers."""
    import pandas

    numbers = ("steps", "cap", "val_loss", "val_accuracy", "nonfinite_step", "start_error", "parameters", "digest")
    rows = []
    for run in findings.runs.all:
        result = run.result if run.status == "done" else {}
        row: dict[str, Any] = {
            "study": run.study,
            "arm": run.arm,
            "in words": words(findings.grid, run.arm),
            **run.condition,
            RATE: run.rate,
        }
        row |= {
            "seed": run.seed,
            "status": run.status,
            **{name: run.record.get(name) for name in ("reason", "seconds", "cell", "command")},
        }
        rows.append(row | {name: result.get(name) for name in numbers} | result.get("measures", {}))
    pandas.DataFrame(rows).to_csv(path, index=False, lineterminator="\n")
