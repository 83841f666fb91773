"""What a user wrote is shown and never followed: pages and drawings have the elements and attributes of their templates."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from pages import data_of, random_snapshot

from minitx.analysis import head_heatmap, heatmap_grid
from minitx.analysis.canvas import label, legend, panels, svg
from minitx.analysis.viewer import Trace, viewer_page

EVIL = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</SCRIPT ><img src=x onerror=alert(1)>",
    "<img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' autofocus onfocus='alert(1)",
    "--><svg onload=alert(1)>",
    "]]><script>alert(1)</script>",
    "<!--<script>",
    "</title></style></textarea></noscript>",
    "&lt;script&gt;",
    "javascript:alert(1)",
    "\u2028\u2029alert(1)",
    '"}]</script>',
    "\\u003c/script>",
    "{{script}}",
    "\0",
]


class Skeleton(HTMLParser):
    """Every element with its attributes, and the texts, as a browser would find them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple]] = []
        self.comments: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, tuple(attrs)))

    def handle_comment(self, data):
        self.comments.append(data)


@pytest.mark.parametrize("text", EVIL, ids=range(len(EVIL)))
def test_the_viewer_has_no_element_or_attribute_but_those_of_its_template(text):
    def page(word: str) -> str:
        tokens = {"input_ids": [[word, "b", word]]}
        snapshots = [random_snapshot(1, step, kinds=("self",), tokens=tokens, title=word) for step in (1, 2)]
        return viewer_page([Trace(word, snapshots), Trace(f"{word}2", snapshots)], title=word)

    evil, plain = Skeleton(page(text)), Skeleton(page("a"))
    assert evil.elements == plain.elements
    assert evil.comments == plain.comments == []
    assert page(text).count("</script") == page("a").count("</script")
    data = data_of(page(text))
    assert data["tokens"]["input_ids"] == [text, "b", text]
    assert [trace["name"] for trace in data["traces"]] == [text, f"{text}2"]
    assert "\u2028" not in page(text).partition("</title>")[2].partition('id="data">')[2]


def drawings():
    """Every kind of figure that holds words of a user, as SVG."""
    tokens = {"input_ids": [[*EVIL, *EVIL[:2]]]}
    for kind, words in (("one", "".join(EVIL[:8])), ("two", "".join(EVIL[8:]))):
        snapshot = random_snapshot(1, 1, kinds=("self",), tokens=tokens, title=words, H=1)
        yield kind, svg(heatmap_grid(snapshot))
    yield "head", svg(head_heatmap(snapshot, 0, 0))
    figure, ((ax,),) = panels(1, 1)
    label(ax, "title", x="x", y="y")
    legend(figure, [(word, "#000000", "o", "-") for word in EVIL])
    yield "legend", svg(figure)


ELEMENTS = {"svg", "g", "path", "use", "defs", "style", "clipPath", "rect", "image", "metadata", "RDF", "Work", "type", "format",
            "pattern", "title", "text", "line"}  # fmt: skip


def test_a_drawing_has_curves_for_words_and_no_script():
    for kind, drawing in drawings():
        root = ElementTree.fromstring(drawing)  # raises where the text broke out
        for element in root.iter():
            assert element.tag.rpartition("}")[2] in ELEMENTS, (kind, element.tag)
            for name, value in element.attrib.items():
                assert not name.rpartition("}")[2].lower().startswith("on"), (kind, name)
                assert "javascript:" not in value
                assert not name.endswith("href") or value.startswith(("#", "data:image/png;base64,")), (kind, value)
