"""Format numbers, names and settings for the report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from minitx.ablation.design import AblationConfig, Condition
from minitx.ablation.grid import Run
from minitx.ablation.intervals import Span


def words(grid: AblationConfig, name: str) -> str:
    """Return the text of the grid for the name of an arm, a factor, a level or a measure, by default the name itself."""
    return grid.words.get(name, name)


def title(grid: AblationConfig, study: str) -> str:
    """Return the title of a study."""
    return grid.studies[study].title or study


def condition_text(grid: AblationConfig, condition: Condition) -> str:
    """Return a condition in the words of the grid, for example ``d_k 128`` for ``{"head_dim": "128"}``."""
    return ", ".join(f"{words(grid, factor)} {words(grid, level)}".strip() for factor, level in condition.items())


def number(value: float | None) -> str:
    """Return a number with three digits, or "–" for None.

    >>> number(0.03162), number(None), number(-12345.6), number(math.inf)
    ('0.0316', '–', '−12,346', '∞')
    """
    if value is None or math.isnan(value):
        return "–"
    text = f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.3g}"
    return text.replace("inf", "∞").replace("-", "−")


def span_text(span: Span | None) -> str:
    """Return a range as text, with "or more" or "or less" for an open end, or one number if both ends print alike.

    >>> span_text(Span(2, 4)), span_text(Span(2, math.inf)), span_text(Span(-math.inf, -2)), span_text(Span(2, 2.0001))
    ('2 to 4', '2 or more', '−2 or less', '2')
    """
    if span is None:
        return "–"
    low, high = number(span.low), number(span.high)
    if math.isinf(span.high):
        return "unknown" if span.low in (0, -math.inf) else f"{low} or more"
    return low if low == high else f"{high} or less" if math.isinf(span.low) else f"{low} to {high}"


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> count_text(1, "seed"), count_text(1200, "step")
    ('1 seed', '1,200 steps')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def list_text(items: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def budget(runs: Sequence[Run]) -> str:
    """Return the number of steps of the runs, such as ``1,500 steps``, or a list if they differ."""
    caps = sorted({run.result["cap"] for run in runs if run.status == "done"})
    return f"{list_text([f'{cap:,}' for cap in caps])} steps"
