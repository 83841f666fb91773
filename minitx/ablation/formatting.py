"""Texts of the report, in English and Chinese: messages with values, numbers, names and settings.

English is in the code, Chinese in ``templates/chinese.po``, by the English message. The texts of a grid (its question, arms,
studies and predictions) are shown as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from minitx.ablation.design import AblationConfig, ComparisonConfig, Condition
from minitx.ablation.grid import Run
from minitx.ablation.intervals import Span


class Text(str):
    """An English text with its Chinese, by default the same text."""

    chinese: str

    def __new__(cls, english: str, chinese: str | None = None) -> Text:
        text = super().__new__(cls, english)
        text.chinese = english if chinese is None else chinese
        return text


def say(message: str, /, **values: object) -> Text:
    """Return a message in both languages. A message that is not in the catalogue stays English.

    Args:
        values: the values of ``%(name)s`` in the message. A ``Text`` appears in the language of the message.

    >>> say("%(count)s seeds", count=5).chinese, say("MORE").chinese, say("with the scale").chinese
    ('5 个种子', '更多', 'with the scale')
    """
    entry = _catalogue().get(message)
    translation = entry.string if entry is not None else message
    if not values:
        return Text(message, translation)
    return Text(message % values, translation % {name: getattr(value, "chinese", value) for name, value in values.items()})


def chinese(text: str) -> str:
    """Return the Chinese of a text; for a plain string, the entry of the catalogue, or the string itself."""
    return text.chinese if isinstance(text, Text) else say(text).chinese


@cache
def _catalogue() -> Any:
    from babel.messages.pofile import read_po

    with Path(__file__).with_name("templates").joinpath("chinese.po").open("rb") as file:
        return read_po(file, locale="zh_Hans")


def capital(text: str) -> Text:
    """Return a text with a capital first letter."""
    english, translation = (each[:1].upper() + each[1:] for each in (str(text), chinese(text)))
    return Text(english, translation)


def words(grid: AblationConfig, name: str) -> str:
    """Return the text of the grid for the name of an arm, a factor, a level or a measure, by default the name itself."""
    return grid.words.get(name, name)


def title(grid: AblationConfig, study: str) -> str:
    """Return the title of a study."""
    return grid.studies[study].title or study


def condition_text(grid: AblationConfig, condition: Condition) -> str:
    """Return a condition in the words of the grid, for example ``d_k 128`` for ``{"head_dim": "128"}``."""
    return ", ".join(f"{words(grid, factor)} {words(grid, level)}".strip() for factor, level in condition.items())


def sides(grid: AblationConfig, comparison: ComparisonConfig, condition: Condition) -> tuple[str, str]:
    """Return the texts of reference and treatment: the arms, or the levels if one arm is compared at two levels."""
    levels = comparison.against, {factor: condition[factor] for factor in comparison.against}
    both = zip(comparison.arms, levels, strict=True)
    is_one_arm = comparison.arms[0] == comparison.arms[1]
    names = [["" if is_one_arm else words(grid, arm), condition_text(grid, level)] for arm, level in both]
    first, second = (", ".join(filter(None, name)) for name in names)
    return first, second


def number(value: float | None) -> str:
    """Return a number with three digits, or "–" for None.

    >>> number(0.03162), number(None), number(-12345.6), number(math.inf)
    ('0.0316', '–', '−12,346', '∞')
    """
    if value is None or math.isnan(value):
        return "–"
    text = f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.3g}"
    return text.replace("inf", "∞").replace("-", "−")


def span_text(span: Span | None) -> Text:
    """Return a range as text, with "or more" or "or less" for an open end, or one number if both ends print alike.

    >>> span_text(Span(2, 4)), span_text(Span(2, math.inf)), span_text(Span(-math.inf, -2)), span_text(Span(2, 2.0001))
    ('2 to 4', '2 or more', '−2 or less', '2')
    """
    if span is None:
        return Text("–")
    low, high = number(span.low), number(span.high)
    if math.isinf(span.high):
        return say("unknown") if span.low in (0, -math.inf) else say("%(low)s or more", low=low)
    if low == high:
        return Text(low)
    return say("%(high)s or less", high=high) if math.isinf(span.low) else say("%(low)s to %(high)s", low=low, high=high)


def seeds_text(count: int) -> Text:
    """Return the number of seeds as text.

    >>> seeds_text(1), seeds_text(6)
    ('1 seed', '6 seeds')
    """
    return say("%(count)s seed" if count == 1 else "%(count)s seeds", count=f"{count:,}")


def range_text(interval: tuple[Span, float] | None, seeds: int) -> Text:
    """Return an interval with its coverage (see ``median_interval``) and the number of seeds."""
    if interval is None:
        return say("(%(seeds)s: no interval)", seeds=seeds_text(seeds))
    span, coverage = span_text(interval[0]), f"{interval[1]:.1%}"
    return say("(%(span)s; %(seeds)s, %(coverage)s)", span=span, seeds=seeds_text(seeds), coverage=coverage)


def list_text(items: Sequence[str], separator: str = "、") -> Text:
    """Return ``a, b and c``. In Chinese, ``separator`` separates the items."""
    listed = " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)
    return Text(listed, separator.join(getattr(item, "chinese", item) for item in items))


def caps_text(runs: Sequence[Run]) -> Text:
    """Return the cap of steps of the runs, such as ``1,500``, or a list if they differ."""
    return list_text([f"{cap:,}" for cap in sorted({run.result["cap"] for run in runs if run.status == "done"})])
