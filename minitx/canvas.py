"""Panels, legends, axes, text of any script, and files, shared by all figures.

Figures are made without pyplot, because pyplot has global state and may need a display. Colours are Okabe and Ito's:
colour-blind readers can tell them apart. Series also differ by marker.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

DPI, FILE_DPI = 110, 200
"""Dots per inch of a PNG on a screen (``png``) and in a separate file (``save_figure``)."""

INK, GREY = "#222222", "#767676"
PALETTE = (
    *(("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#767676", "D"), ("#CC79A7", "v")),
    *(("#56B4E9", "P"), ("#E69F00", "X"), ("#8A6D00", "<"), ("#000000", ">"), ("#882255", "d")),
)
"""Colour and marker of a series."""

FONT_FAMILIES = (
    *("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN", "WenQuanYi Micro Hei"),
    *("WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB", "Heiti SC", "Microsoft YaHei", "SimHei"),
    *("Noto Sans CJK JP", "Droid Sans Fallback", "Arial Unicode MS"),
)
"""The fonts to try first, in this order. The first comes with matplotlib. All other installed fonts follow."""

LONGEST = 14
"""The largest number of characters of a token's label."""

Entry = tuple[str, str, str, Any]
"""One entry of a legend: label, colour, marker, line style."""


def panels(rows: int, columns: int, width: float = 2.9, height: float = 2.5, **share: Any) -> tuple[Figure, Any]:
    """Return a figure and its (rows, columns) axes. Sizes are in inches per panel. A notebook shows the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(width * columns, 4.2), height * rows + 0.35), dpi=DPI, layout="constrained")
    figure._repr_png_ = functools.partial(png, figure)  # type: ignore[attr-defined]  # what IPython looks for
    axes = figure.subplots(rows, columns, squeeze=False, **share)
    for ax in axes.flat:
        ax.tick_params(labelsize=8, colors=INK)
        ax.grid(True, color="#E6E6E6", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def wrapped_panels(used: int, y: str, **size: Any) -> tuple[Figure, Any]:
    """Return a figure and ``used`` panels as a flat sequence, four per row, with one y axis label per row."""
    columns = min(used, 4)
    figure, axes = panels(math.ceil(used / columns), columns, **size)
    for ax in axes[:, 0]:
        ax.set_ylabel(y, fontsize=8.5, color=INK)
    for ax in axes.flat[used:]:
        ax.remove()
    return figure, axes.flat[:used]


def legend(figure: Figure, entries: Sequence[Entry]) -> None:
    """Draw one legend above all panels."""
    from matplotlib.lines import Line2D

    labels, families = drawable([label.replace("$", r"\$") for label, *_ in entries])
    handles = [
        Line2D([], [], color=color, marker=marker, linestyle=line, markersize=5, label=label)
        for label, (_, color, marker, line) in zip(labels, entries, strict=True)
    ]
    font = {"family": families, "size": 8}
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 4), prop=font, frameon=False)


def label(ax: Axes, title: str = "", x: str = "", y: str | None = None) -> None:
    """Set the title and the axis names. A y axis that has a name keeps it."""
    [shown], families = drawable([title])
    ax.set_title(shown, fontsize=9, family=families, color=INK, parse_math=False)
    ax.set_xlabel(x, fontsize=8.5, color=INK)
    if y is not None:
        ax.set_ylabel(y, fontsize=8.5, color=INK)


def dodge(count: int, index: int, width: float) -> float:
    """Return the offset of series ``index`` of ``count``, so that dots at the same place stay visible."""
    return (index - (count - 1) / 2) * width


def log_ticks(ax: Axes) -> None:
    """Make the y axis logarithmic, with labelled ticks even if it spans less than a decade."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0), numticks=8))
    ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    ax.minorticks_off()


def step_axis(ax: Axes, last: int) -> None:
    """Make the x axis logarithmic for steps from 0 to ``last``."""
    ax.set_xscale("symlog", linthresh=1, base=2)
    ticks = [0, *(t for t in (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144) if t <= last)]
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.set_xlim(-0.25, 1.2 * max(last, 1))  # room for the first and the last marker
    ax.minorticks_off()


def weight_image(ax: Axes, weights: Any, **options: Any) -> AxesImage:
    """Draw attention weights (rows, columns), from white to dark blue, on the scale of all figures."""
    from matplotlib.colors import PowerNorm

    ax.grid(False)
    return ax.imshow(weights, cmap="Blues", norm=PowerNorm(0.5, 0.0, 1.0), aspect="auto", **options)


def weight_bar(figure: Figure, axes: Any, image: AxesImage, name: str = "attention weight", **options: Any) -> None:
    """Draw the colour bar of ``weight_image`` beside ``axes``."""
    bar = figure.colorbar(image, ax=axes, aspect=16, **options)
    bar.set_ticks([0.0, 0.01, 0.1, 0.25, 0.5, 1.0], labels=["0", ".01", ".1", ".25", ".5", "1"])
    bar.ax.tick_params(labelsize=7.5, colors=INK)
    bar.set_label(name, fontsize=8.5, color=INK)
    bar.outline.set_visible(False)


def png(figure: Figure, dpi: int = DPI) -> bytes:
    """Return the figure as a PNG file. Equal figures give equal bytes."""
    return _file(figure, "png", dpi, Software=None)


def svg(figure: Figure) -> bytes:
    """Return the figure as an SVG file, with text as curves. Equal figures give equal bytes."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "minitx", "svg.fonttype": "path"}):
        return _file(figure, "svg", 2 * DPI, Date=None, Creator=None)


def _file(figure: Figure, kind: str, dpi: int, **metadata: None) -> bytes:
    """Save a copy, because drawing moves the panels: a second file of the same figure would differ from the first."""
    buffer = io.BytesIO()
    pickle.loads(pickle.dumps(figure)).savefig(buffer, format=kind, dpi=dpi, metadata=metadata)
    return buffer.getvalue()


def save_figure(figure: Figure, path: Path | str) -> Path:
    """Write ``figure`` as SVG, or as PNG with 200 dots per inch, depending on the extension of ``path``. Return the path.

    Equal figures give equal bytes. An SVG contains text as curves, so it needs no fonts.

    Raises:
        ValueError: ``path`` has another extension.

    >>> from matplotlib.figure import Figure
    >>> save_figure(Figure(), "attention.gif")
    Traceback (most recent call last):
    ValueError: path=attention.gif must end in .png or .svg
    """
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"path={path} must end in .png or .svg")
    path.write_bytes(svg(figure) if path.suffix.lower() == ".svg" else png(figure, FILE_DPI))
    return path


# --- text: a font for each character, code points for characters without a font, visible spaces


def token_labels(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a visible label for every token, and the font families for them (see ``drawable``).

    A space becomes ``␣``, a line end ``↵``, a tab ``⇥``, an empty text ``∅``. Labels longer than ``LONGEST`` are cut.

    Warns:
        UserWarning: matplotlib has no font for a printable character. The message explains how to add one.

    >>> token_labels(["to", " be", "", "incomprehensible"])
    (['to', '␣be', '∅', 'incomprehensi…'], ['DejaVu Sans'])
    """
    cut = [text if len(text) <= LONGEST else text[: LONGEST - 1] + "…" for text in tokens]
    shown = [text.translate(str.maketrans(" \n\t", "␣↵⇥")) or "∅" for text in cut]
    if missing := [c for c in dict.fromkeys("".join(shown)) if c.isprintable() and family_with(c) is None]:
        import matplotlib

        warnings.warn(
            f"matplotlib has no font for {' '.join(missing[:8])}, so the figure shows code points. If no such font is installed, "
            "install one (Noto Sans CJK for Chinese, Japanese and Korean; Symbola or Noto Emoji, without colours, for emoji). Then "
            f"delete fontlist-*.json in {matplotlib.get_cachedir()} and restart Python",
            stacklevel=4,
        )
    return drawable(shown)


def short_name(module: str) -> str:
    """Return the name of a layer in figures.

    >>> short_name("blocks.0.attention.core")
    'blocks.0'
    """
    return module.removesuffix(".core").removesuffix(".attention")


def drawable(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return ``texts`` with code points for characters that no installed font has, and the font families for the rest.

    Line ends are kept. Matplotlib stores a list of fonts in ``matplotlib.get_cachedir()``. Delete it after installing a font.

    >>> drawable(["√d", chr(7)])
    (['√d', 'U+0007'], ['DejaVu Sans'])
    """
    family_of = {c: family_with(c) for c in dict.fromkeys("".join(texts))}
    spelled = ["".join(c if family_of[c] or c == "\n" else f"U+{ord(c):04X}" for c in text) for text in texts]
    return spelled, list(dict.fromkeys([FONT_FAMILIES[0], *filter(None, family_of.values())]))


@functools.cache
def family_with(character: str) -> str | None:
    """Return the first font family with a glyph for a character."""
    if not character.isprintable():
        return None
    return next((name for name, font in fonts() if font.get_char_index(ord(character))), None)


@functools.cache
def fonts() -> list[tuple[str, Any]]:
    """Return the upright, regular face of every installed font family, ``FONT_FAMILIES`` first."""
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font

    faces = [e for e in fontManager.ttflist if e.style == "normal" and e.weight in (400, "normal", "regular")]
    files = {e.name: e.fname for e in sorted(faces, key=lambda e: e.fname, reverse=True)}
    families = []
    for name in sorted(
        files, key=lambda name: (FONT_FAMILIES.index(name) if name in FONT_FAMILIES else len(FONT_FAMILIES), name)
    ):
        try:
            font = FT2Font(files[name])
        except (RuntimeError, OSError):  # deleted since matplotlib made its list, or a bitmap font
            continue
        if not name.startswith("Last Resort"):  # a font of placeholder boxes
            families.append((name, font))
    return families
