"""The tables and figures of why_scale.py."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minitx.canvas import INK, PALETTE, label, log_ticks, panels, png

LOOKS = {"inv_sqrt": PALETTE[0], "unscaled": PALETTE[1], "inv": PALETTE[4], "unscaled, W_Q / √d_k": PALETTE[2]}
Series = Mapping[str, Sequence[float]]  # names in the legend, each with a value for each x


def output_folder() -> Path:
    """Return the folder of the option ``--output``."""
    parser = argparse.ArgumentParser(description="Why 1/√d_k, in numbers and figures.")
    parser.add_argument("--output", metavar="FOLDER", type=Path, default=Path("runs/why_scale"), help="(%(default)s)")
    folder: Path = parser.parse_args().output
    if folder.exists() and not folder.is_dir():
        parser.error(f"--output {folder} is a file")
    return folder


class Output:
    """Prints tables as Markdown, and writes them (``tables.md``) and the figures to a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.tables, self.drawings = folder, "", list[Any]()

    def table(self, name: str, headings: Sequence[object], rows: Sequence[Sequence[str | float]]) -> None:
        """Print a table, and append it to ``tables.md``."""
        cells = [[x if isinstance(x, str) else f"{x:.3g}" for x in row] for row in rows]
        lines = [f"| {' | '.join(map(str, line))} |" for line in (headings, ["---"] * len(headings), *cells)]
        text = "\n".join([f"<!-- {name} -->", *lines, "", ""])
        print(text)
        self.tables += text
        (self.folder / "tables.md").write_text(self.tables, encoding="utf-8")

    def draw(self, *drawing: Any, scales: str = "xy") -> None:
        """Add a panel to the next figure. The arguments are those of ``plot``."""
        self.drawings.append((drawing, scales))

    def figure(self, name: str) -> None:
        """Write a figure with the panels drawn since the last figure."""
        figure, (axes,) = panels(1, len(self.drawings), width=3.9 if len(self.drawings) < 3 else 3.4, height=3.0)
        for ax, (drawing, scales) in zip(axes, self.drawings, strict=True):
            plot(ax, *drawing, scales=scales)
        self.drawings.clear()
        (self.folder / f"{name}.png").write_bytes(png(figure))


def plot(
    ax: Any, title: str, x: tuple[str, Sequence[float]], y: tuple[str, Series], laws: Series | None = None, scales: str = "xy"
) -> None:
    """Draw each series of ``y`` against ``x`` as a line with markers, and each law as a thin dark line.

    Args:
        x, y: the label of the axis, and its values.
        scales: the logarithmic axes. Without ``x``, the lines have no markers, and the first line is wide.
    """
    (x_name, values), (y_name, series) = x, y
    for i, (name, y_values) in enumerate(series.items()):
        color, marker = LOOKS.get(name, PALETTE[i])
        many = {"linewidth": 4 if i == 0 else 1.2, "alpha": 0.45 if i == 0 else 1.0}
        look = {"marker": marker, "markersize": 8 - 1.3 * i, "linewidth": 1.2} if "x" in scales else many
        ax.plot(values, y_values, color=color, label=name, **look)
    for (name, y_values), line in zip((laws or {}).items(), ("--", ":"), strict=False):
        ax.plot(values, y_values, line, color=INK, label=name, linewidth=1)
    if "x" in scales:
        ax.set_xscale("log", base=2)
        ax.set_xticks(values, [f"{tick:g}" for tick in values])
        ax.minorticks_off()
    if "y" in scales:
        log_ticks(ax)
    label(ax, "", x_name, y_name)
    above = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "alignment": "left"}
    ax.legend(title=title, title_fontsize=8.5, fontsize=7.5, frameon=False, ncols=2, **above)
