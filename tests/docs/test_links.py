"""Every link of every page leads somewhere."""

import re

import pytest
from page_blocks import ROOT, anchors, links, pages


@pytest.mark.parametrize("page", pages())
def test_every_link_and_picture_of_a_page_is_there(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        place = (ROOT / page).parent / path if path else ROOT / page
        assert place.exists(), f"{page} links to {target}, and there is no {place}"
        if anchor and place.suffix == ".md":
            found = anchors(place.resolve().relative_to(ROOT).as_posix())
            assert anchor in found, f"{page} links to {target}, and {place.name} has only {sorted(found)}"


def test_the_links_are_seen_at_all():
    assert "docs/attention.md" in pages()
    assert sum(len(links(page)) for page in pages()) > 50


def test_every_page_is_on_the_site_and_the_site_names_no_other():
    nav = re.search(r"\nnav:\n(.*?)\n\w", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.DOTALL)[1]
    named = re.findall(r"[\w/.]+\.md", nav)
    assert all((ROOT / "docs" / file).exists() for file in named)
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(named)
