"""Names, sentences and errors of a grid are shown and never followed, in a report as HTML and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from minitx.ablation.render import Drawing, Page, Section, Table, to_html, to_markdown
from minitx.ablation.report import write_report
from minitx.config import AblationConfig, StudyConfig

EVIL = [
    "<script>alert(1)</script>",
    "</style></script><img src=x onerror=alert(1)>",
    '" onerror="alert(1)',
    "' onfocus='alert(1)' '",
    "--><svg onload=alert(1)><!--",
    "javascript:alert(1)",
    "\u2028<iframe src=javascript:alert(1)>",
    "&lt;script&gt;",
]
LINKS = ["[a](javascript:alert(1))", "![a](https://192.0.2.1/a.png)", "\\[a](javascript:alert(1))", "<javascript:alert(1)>", "[a]: javascript:alert(1)",
         "a\\|b", "`code` | b"]  # fmt: skip


class Skeleton(HTMLParser):
    """Every element with the names of its attributes and all values but those that hold words."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, tuple((name, "…" if name == "alt" else value) for name, value in attrs)))
        self.words += [value for name, value in attrs if name == "alt"]

    def handle_data(self, data):
        self.words.append(data)

    def handle_comment(self, data):
        raise AssertionError(data)


def page_of(word: str) -> Page:
    """A page with ``word`` at every place that takes one."""
    table = Table(word, (word, word), [(word, word)])
    blocks = [word, table, table._replace(folded=True), Drawing("figure", word, word, 9, b"")]
    return Page(word, word, [word, word], [(word, word)], [Section(word, blocks)])


@pytest.mark.parametrize("text", [*EVIL, *LINKS])
def test_a_page_has_no_element_or_attribute_but_those_of_its_template(text):
    same = "x" * len(text)  # long cells have a class of their own
    evil, plain = Skeleton(to_html(page_of(text))), Skeleton(to_html(page_of(same)))
    assert evil.elements == plain.elements
    assert "".join(evil.words).replace(text, same) == "".join(plain.words)


@pytest.mark.parametrize("text", [*EVIL, *LINKS])
def test_markdown_has_no_element_and_no_link_but_to_its_figures(text):
    written = to_markdown(page_of(text))
    assert not re.search(r"<[a-zA-Z/!]", written)
    links = re.findall(r"(?<!\\)\]\(([^)]*)\)|(?<!\\)\]:\s*(\S+)", written)
    assert links == [("figure.png", "")]
    rows = [line for line in written.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in rows} == {3}


def test_a_whole_report_holds_no_element_that_a_name_or_an_error_brought(
    fabricate: Any, make_grid: Any, tmp_path: Path
) -> None:
    def written(word: str) -> tuple[set, str]:
        arms = {**make_grid().arms, word: ()}
        study = StudyConfig(arms=("inv_sqrt", "unscaled", word), factors=make_grid().studies["recall"].factors, seeds=(0, 1))
        grid = AblationConfig(name=word, question=word, arms=arms, studies={"recall": study})
        records, *rest = fabricate(grid)
        records = [dict(r) for r in records]
        records[0] |= {"status": "failed", "error": word, "command": word}
        meta: Mapping[str, Any] = dict.fromkeys(("command", "commit", "date", "hardware"), word) | {"versions": {word: word}}
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        write_report(records, *rest, folder, meta=meta)
        page = (folder / "report.html").read_text(encoding="utf-8")
        return {(tag, tuple(name for name, _ in attrs)) for tag, attrs in Skeleton(page).elements}, page

    plain, _ = written("a")
    elements, page = written(EVIL[1])
    assert elements <= plain
    assert "<img src=x" not in page
