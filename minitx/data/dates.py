"""Dates in many languages and formats (Babel's CLDR data), and in ISO 8601."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np

from minitx.config import ConfigError, DatesDataConfig
from minitx.data.addressing import VALIDATION_SEED, generator

WIDTHS = ("short", "medium", "long", "full")
SKELETONS = ("yMd", "yMEd", "yMMMd", "yMMMEd")


def date_patterns(locale: Any) -> list[str]:
    """Return the different patterns (CLDR's notation) of complete dates in a Babel locale.

    Years are always written in full, because two digits would be ambiguous.
    """
    found = [locale.date_formats[width].pattern for width in WIDTHS]
    found += [locale.datetime_skeletons[name].pattern for name in SKELETONS if name in locale.datetime_skeletons]
    return sorted({pattern if "yyyy" in pattern else pattern.replace("yy", "y") for pattern in found})


def write_date(day: datetime.date, tag: str, locale: Any, pattern: str) -> str:
    """Return a date with its locale in front. The locale tells the order of day and month.

    >>> from babel import Locale
    >>> write_date(datetime.date(1999, 3, 7), "de", Locale.parse("de"), "d. MMMM y")
    'de: 7. März 1999'
    """
    from babel.dates import format_date

    return f"{tag}: {format_date(day, pattern, locale)}"


def date_pairs(config: DatesDataConfig) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (source, ISO 8601) pairs of both splits. The days of validation never occur in training.

    Days, locales and patterns are drawn with a constant seed. All days of training are about equally frequent.

    Raises:
        ConfigError: Babel is missing or does not know a locale.
    """
    formats = []
    for tag in config.locales:
        locale = babel_locale(tag)
        formats.append((tag, locale, date_patterns(locale)))
    first = datetime.date(config.first_year, 1, 1).toordinal()
    count = datetime.date(config.last_year, 12, 31).toordinal() + 1 - first
    random = generator(VALIDATION_SEED, "dates")
    days = random.permutation(count) + first
    val, train = days[: config.val_size], days[config.val_size :]
    drawn = np.concatenate([random.permutation(train) for _ in range(-(-config.train_size // len(train)))])

    def write(ordinal: int) -> tuple[str, str]:
        tag, locale, patterns = formats[random.integers(len(formats))]
        day = datetime.date.fromordinal(ordinal)
        return write_date(day, tag, locale, patterns[random.integers(len(patterns))]), day.isoformat()

    val_pairs = [write(int(day)) for day in val]
    return [write(int(day)) for day in drawn[: config.train_size]], val_pairs


def babel_locale(tag: str) -> Any:
    """Return Babel's locale ``tag``.

    Raises:
        ConfigError: Babel is missing or does not know the locale.
    """
    try:
        from babel import Locale, UnknownLocaleError
    except ImportError:
        raise ConfigError("data=dates needs the package Babel: pip install Babel") from None
    try:
        return Locale.parse(tag)
    except (UnknownLocaleError, ValueError):
        raise ConfigError(f"data.locales={tag} is not a locale that Babel knows, such as en_GB or pt") from None
