"""Every link of every page leads somewhere."""

import pytest
import yaml
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
    assert "docs/masks.md" in pages()
    assert sum(len(links(page)) for page in pages()) > 50


def test_every_page_is_on_the_site_and_the_site_names_no_other():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def files(node):
        return (
            [node]
            if isinstance(node, str)
            else [file for one in node for file in files(one.values() if isinstance(one, dict) else one)]
        )

    named = [file for entry in site["nav"] for file in files(entry.values())]
    flat = [file for file in named if isinstance(file, str)]
    assert all((ROOT / "docs" / file).exists() for file in flat)
    own = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert own <= set(flat)
