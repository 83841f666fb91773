"""Texts of any script in a figure: a font that has them, code points where there is none, spaces made visible."""

from __future__ import annotations

import functools
from collections.abc import Sequence

FAMILIES = (
    *("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN", "WenQuanYi Micro Hei"),
    *("WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB", "Heiti SC", "Microsoft YaHei", "SimHei"),
    *("Noto Sans CJK JP", "Droid Sans Fallback", "Arial Unicode MS"),
)
"""Asked first, in this order, for a character; the first comes with matplotlib. Then all other installed fonts."""

LONGEST = 14
"""Characters of a token's label."""

_SHOWN = {" ": "␣", "\n": "↵", "\t": "⇥"}


def token_labels(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Labels that show every token, and the font families for them, see ``drawable``.

    A space becomes ``␣``, a line end ``↵``, a tab ``⇥``, an empty text ``∅``; more than ``LONGEST`` characters are cut.

    >>> token_labels(["to", " be", "", "incomprehensible"])
    (['to', '␣be', '∅', 'incomprehensi…'], ['DejaVu Sans'])
    """
    cut = [text if len(text) <= LONGEST else text[: LONGEST - 1] + "…" for text in tokens]
    return drawable(["".join(_SHOWN.get(c, c) for c in text) or "∅" for text in cut])


def drawable(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """``texts`` with a code point for what no installed font has (line ends stay), and the font families that have the rest.

    So matplotlib has no missing glyph to warn of. It keeps a list of fonts: one that was installed later is found once that
    list (in ``matplotlib.get_cachedir()``) is deleted.

    >>> drawable(["√d", chr(7)])
    (['√d', 'U+0007'], ['DejaVu Sans'])
    """
    family_of = _families(frozenset("".join(texts)))
    spelled = ["".join(c if c in family_of or c == "\n" else f"U+{ord(c):04X}" for c in text) for text in texts]
    return spelled, list(dict.fromkeys([FAMILIES[0], *family_of.values()]))


@functools.lru_cache(maxsize=256)
def _families(characters: frozenset[str]) -> dict[str, str]:
    """The first family with a glyph for each of ``characters``; none for those that no family has."""
    wanted = sorted(c for c in characters if c.isprintable())
    found: dict[str, str] = {}
    for family, path in _upright():
        if not wanted:
            break
        found |= dict.fromkeys(_glyphs(path, wanted), family)
        wanted = [c for c in wanted if c not in found]
    return found


def _upright() -> list[tuple[str, str]]:
    """Installed families in the order in which they are asked, and the file of their upright, regular face."""
    from matplotlib.font_manager import fontManager

    faces = [e for e in fontManager.ttflist if e.style == "normal" and e.weight in (400, "normal", "regular")]
    files = {e.name: e.fname for e in sorted(faces, key=lambda e: e.fname, reverse=True)}
    files = {name: path for name, path in files.items() if not name.startswith("Last Resort")}  # boxes for everything
    rank = {family: place for place, family in enumerate(FAMILIES)}
    return sorted(files.items(), key=lambda item: (rank.get(item[0], len(rank)), item[0]))


def _glyphs(path: str, characters: Sequence[str]) -> list[str]:
    """Those of ``characters`` that the font in ``path`` can draw."""
    from matplotlib.font_manager import get_font

    try:
        font = get_font(path)
    except (RuntimeError, OSError):  # gone since the list was made, or a font of bitmaps
        return []
    return [c for c in characters if font.get_char_index(ord(c))]


def short_name(module: str) -> str:
    """How a layer is called in a figure.

    >>> short_name("blocks.0.attention.core")
    'blocks.0'
    """
    return module.removesuffix(".core").removesuffix(".attention")
