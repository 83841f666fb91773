"""Text of any script in figures: find a font for each character, show code points if there is none, and make spaces visible."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

FAMILIES = (
    *("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN", "WenQuanYi Micro Hei"),
    *("WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB", "Heiti SC", "Microsoft YaHei", "SimHei"),
    *("Noto Sans CJK JP", "Droid Sans Fallback", "Arial Unicode MS"),
)
"""The fonts to try first, in this order. The first comes with matplotlib. All other installed fonts follow."""

LONGEST = 14
"""The largest number of characters of a token's label."""


def token_labels(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a visible label for every token, and the font families for them (see ``drawable``).

    A space becomes ``␣``, a line end ``↵``, a tab ``⇥``, an empty text ``∅``; labels longer than ``LONGEST`` are cut.

    >>> token_labels(["to", " be", "", "incomprehensible"])
    (['to', '␣be', '∅', 'incomprehensi…'], ['DejaVu Sans'])
    """
    cut = [text if len(text) <= LONGEST else text[: LONGEST - 1] + "…" for text in tokens]
    return drawable([text.translate(str.maketrans(" \n\t", "␣↵⇥")) or "∅" for text in cut])


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
    return spelled, list(dict.fromkeys([FAMILIES[0], *filter(None, family_of.values())]))


@functools.cache
def family_with(character: str) -> str | None:
    """Return the first font family with a glyph for a character."""
    if not character.isprintable():
        return None
    return next((name for name, font in fonts() if font.get_char_index(ord(character))), None)


@functools.cache
def fonts() -> list[tuple[str, Any]]:
    """Return the upright, regular face of every installed font family, ``FAMILIES`` first."""
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font

    faces = [e for e in fontManager.ttflist if e.style == "normal" and e.weight in (400, "normal", "regular")]
    files = {e.name: e.fname for e in sorted(faces, key=lambda e: e.fname, reverse=True)}
    found = []
    for name in sorted(files, key=lambda name: (FAMILIES.index(name) if name in FAMILIES else len(FAMILIES), name)):
        try:
            font = FT2Font(files[name])
        except (RuntimeError, OSError):  # gone since the list was made, or a font of bitmaps
            continue
        if not name.startswith("Last Resort"):  # boxes for everything
            found.append((name, font))
    return found
