"""The parts of a report's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Table:
    """A table. Each row maps the name of a column to its text. ``is_open``: shown at once, not only after a click on its caption."""

    caption: str
    rows: Sequence[Mapping[str, str]]
    is_open: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure with a unique name, a title, and a description."""

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
    """A section of the page. Tables without rows and sections without blocks are left out."""

    title: str
    blocks: Sequence[Block]
