"""The page about the rest of the Transformer quotes lines of the package as they are, and is short."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "transformer.md").read_text(encoding="utf-8")


def test_each_line_that_the_page_quotes_stands_in_the_file_that_it_names():
    quoted = re.findall(r"\*In minitx\*: `([^`]+)` \(\[[\w.]+\]\(([\w./]+\.py)\)\)", PAGE)
    assert len(quoted) == PAGE.count("*In minitx*:") == 9
    assert [line for line, path in quoted if line not in (DOCS / path).read_text(encoding="utf-8")] == []


def test_the_page_has_at_most_1500_words():
    assert len(PAGE.split()) <= 1500
