"""Numbers, conditions and arms as the report says and draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from minitx.ablation.records import FLOOR, FOLD, INIT, RECALL, REFERENCE, TREATMENT, WIDTH, Condition
from minitx.ablation.statistics import Interval
from minitx.analysis.canvas import PALETTE

STYLES = dict(zip((REFERENCE, TREATMENT, FOLD, FLOOR), PALETTE, strict=False))


def style(arm: str, arms: Sequence[str]) -> tuple[str, str]:
    """Colour and marker of an arm: the same in every figure."""
    if arm in STYLES:
        return STYLES[arm]
    others = [a for a in arms if a not in STYLES]
    rest = PALETTE[len(STYLES) :]
    return rest[others.index(arm) % len(rest)]


def number(value: float | None, digits: int = 3) -> str:
    """A number for the page; "–" where nothing was measured. Never ``nan``.

    >>> number(-0.5), number(-0.0001), number(None), number(1234567.0)
    ('−0.500', '0.000', '–', '1.23e+06')
    """
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:.2e}" if abs(value) >= 10_000 else f"{round(value, digits) + 0.0:.{digits}f}"
    return text.replace("-", "−")


def signed(value: float | None, digits: int = 3) -> str:
    """A difference: always with its sign."""
    text = number(value, digits)
    return text if text[0] in "–−" else f"+{text}"


def span(interval: Interval | None, digits: int = 3) -> str:
    """The ends of a 95 % interval."""
    return "no interval" if interval is None else f"{signed(interval.low, digits)} to {signed(interval.high, digits)}"


def p_text(p: float | None) -> str:
    """A p value to four places."""
    return "–" if p is None else "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def count_text(count: int, word: str) -> str:
    """A count with its noun, in the plural where it is not one."""
    return f"{count} {word}" + ("" if count == 1 else "s")


def condition_text(condition: Condition) -> str:
    """``{"head_dim": "128", "init": "lecun"}`` as ``init lecun, d_k 128``."""
    words = {WIDTH: "d_k"}
    names = sorted(condition, key=lambda name: (name != INIT, name))
    return ", ".join(f"{words.get(name, name)} {condition[name]}" for name in names) or "all cells"


def place_text(study: str, condition: Condition) -> str:
    """Where something was compared; the name of recall, which most is about, is left out."""
    if study == RECALL:
        return condition_text(condition)
    return ", ".join([study, condition_text(condition)] if condition else [study])
