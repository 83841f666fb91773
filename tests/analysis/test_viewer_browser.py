"""The viewer in a real browser (Debian's chromium, driven by playwright): what a reader sees, points at and types."""

from __future__ import annotations

import math
import re

import pytest
import torch
from pages import SOURCE, TARGET, random_snapshot

from minitx.analysis.viewer import Trace, View, view, viewer_page

pytestmark = pytest.mark.slow

STEPS = [random_snapshot(seed, step) for seed, step in ((1, 5), (2, 20), (3, 60))]
OTHER = random_snapshot(4, 60, title="unscaled")
SELF, SECOND, CAUSAL, CROSS = range(4)  # layers


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    """Addresses of a page with one model, of one with two, of a long text, and of a notebook with two views."""
    folder = tmp_path_factory.mktemp("pages")
    scaled, unscaled = Trace("scaled", STEPS), Trace("<script>alert(2)</script>", [OTHER])
    long = random_snapshot(7, kinds=("causal",), H=2, tokens={"decoder_input_ids": [[f"t{i}" for i in range(97)]]})
    traces = {"one": [scaled], "two": [scaled, unscaled], "long": [Trace("long", [long])]}
    made = {name: viewer_page(given, title="<script>alert(3)</script>") for name, given in traces.items()}
    made["notebook"] = "".join(View(viewer_page([Trace(name, [STEPS[0]])]))._repr_html_() for name in ("first", "second"))
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in made}


@pytest.fixture
def visit(window, pages):
    """``visit("one", "#layer=1")`` opens a page."""

    def open_page(name, address="", **options):
        page = window(pages[name], address, **options)
        for frame in page.frames[1:] or [page]:
            frame.wait_for_selector("#panes .cells")
        return page

    return open_page


def cell(page, q, k, pane=0):
    """The middle of a cell, in pixels of the window."""
    box = page.locator(".cells").nth(pane).bounding_box()
    L, S = page.evaluate("[...document.querySelectorAll('.axis')].slice(0, 2).map(a => a.children.length)")[::-1]
    return box["x"] + (k + 0.5) * box["width"] / S, box["y"] + (q + 0.5) * box["height"] / L


def pointed(page, q, k, pane=0):
    """What the page says of a cell when the mouse is on it."""
    page.mouse.move(*cell(page, q, k, pane))
    return readout(page)


def readout(page):
    return page.locator("#readout").inner_text().replace("\n", " ")


def address(page):
    return page.evaluate("location.hash")


def weight(snapshot, layer, head, q, k):
    return f"{snapshot.maps[layer].weights[0, head, q, k].item():.4f}"


def choose(page, text):
    page.locator(".choice label", has_text=re.compile(f"^{re.escape(text)}$")).click()


def thumb(page, layer, head):
    return page.locator(f".thumb[data-layer='{layer}'][data-head='{head}']")


def pixel(page, q, k):
    script = f"[...document.querySelector('.cells canvas').getContext('2d').getImageData({k}, {q}, 1, 1).data]"
    return page.evaluate(script)


def test_pointing_at_a_cell_shows_its_weight_and_the_distance_to_the_likeliest_key(visit):
    page, layer = visit("one"), STEPS[-1].maps[SELF]
    row, wanted = layer.weights[0, 0, 2], weight(STEPS[-1], SELF, 0, 2, 3)
    assert wanted in pointed(page, 2, 3)
    assert wanted in page.locator("#tip").inner_text()
    assert f"row H̄ {layer.entropy()[0, 0, 2]:.3f}" in readout(page)
    assert f"max |z| {layer.max_logit[0, 0, 2]:.2f}" in readout(page)
    k = int(row.argsort()[-2])
    assert f"z {math.log(row.max() / row[k]):.2f} below the row's largest" in pointed(page, 2, k)
    assert "z is the row's largest" in pointed(page, 2, int(row.argmax()))


def test_thumbnails_and_kinds_of_attention_open_their_heads_and_tokens(visit):
    page = visit("one")
    thumb(page, SECOND, 2).click()
    assert page.locator("#look-title").inner_text() == "Encoder, layer 1, head 2"
    assert weight(STEPS[-1], SECOND, 2, 4, 5) in pointed(page, 4, 5)
    thumb(page, SECOND, 2).focus()
    for key in ("ArrowLeft", "ArrowUp"):
        page.keyboard.press(key)
    assert page.locator("#look-title").inner_text() == "Encoder, layer 0, head 1"
    choose(page, "Cross")
    rows, columns = (page.locator(f".axis.{side} span").all_text_contents() for side in ("queries", "keys"))
    assert (len(rows), len(columns), rows[2]) == (len(TARGET), len(SOURCE), "</script><!--")
    assert weight(STEPS[-1], CROSS, 1, 2, 6) in pointed(page, 2, 6)
    assert columns[0] == "你·1/3"


def test_the_slider_its_arrow_keys_and_play_change_the_step(visit):
    page = visit("one")
    page.locator("#step").focus()
    for at in (1, 0):
        page.keyboard.press("ArrowLeft")
        assert f"{STEPS[at].step} ({at + 1} of 3)" in page.locator("#step-text").inner_text()
        assert weight(STEPS[at], SELF, 0, 1, 1) in pointed(page, 1, 1)
    page.locator("#play").click()
    page.locator("#step-text", has_text="60 (3 of 3)").wait_for()
    assert "step=60" in address(page)


def test_two_models_stand_side_by_side_and_as_a_difference(visit):
    page = visit("two", "#step=20")  # B has only step 60
    a, b = (s.maps[SELF].weights[0, 0, 3, 2].item() for s in (STEPS[1], OTHER))
    said = pointed(page, 3, 2, pane=1)
    assert f"A {a:.4f}" in said and f"B {b:.4f}" in said
    choose(page, "A − B")
    assert page.locator(".pane").count() == 1
    assert f"{a - b:+.4f}".replace("-", "−") in pointed(page, 3, 2)
    red, _, blue, _ = pixel(page, 3, 2)
    assert (red > blue) == (a > b)


def test_hidden_pairs_are_clear_and_their_hatching_can_be_switched_off(visit):
    page = visit("one", f"#layer={CAUSAL}")
    assert (pixel(page, 1, 3)[3], pixel(page, 3, 1)[3]) == (0, 255)
    hatching = "getComputedStyle(document.querySelector('.cells')).backgroundImage"
    assert "gradient" in page.evaluate(hatching)
    page.locator("#hatch").uncheck()
    assert page.evaluate(hatching) == "none"
    assert "hidden" in pointed(page, 1, 3)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_until_another_theme_is_chosen(visit, is_dark, scheme):
    page = visit("one", color_scheme=scheme)
    assert is_dark(page) == (scheme == "dark")
    page.locator("#theme").click()
    assert is_dark(page) == (scheme == "light")


def test_the_map_is_walked_with_the_keyboard_alone_and_its_row_is_a_table(visit):
    page = visit("one", "#q=2&k=2")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className").startswith("cells"):
            break
    assert page.evaluate("document.activeElement.matches('.cells:focus-visible')")
    for key, (q, k) in {"ArrowRight": (2, 3), "ArrowDown": (3, 3), "End": (3, 6), "PageUp": (0, 6), "Home": (0, 0)}.items():
        page.keyboard.press(key)
        assert readout(page).startswith(f"query {q} ")
        assert weight(STEPS[-1], SELF, 0, q, k) in readout(page)
    row = STEPS[-1].maps[SELF].weights[0, 0, 0]
    cells = [line.locator("td").all_inner_texts() for line in page.locator("#row tbody tr").all()]
    assert cells == [[str(k), f"{row[k].item():.4f}"] for k in row.argsort(descending=True).tolist()]


def test_everything_that_can_be_reached_has_a_name_and_shows_its_focus(visit):
    page = visit("two")
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, select, [tabindex=\"0\"]')].filter(e => !e.hidden && !(e.ariaLabel ||"
        " e.textContent.trim() || e.labels?.length || e.ariaLabelledByElements?.length)).map(e => e.outerHTML)"
    )
    assert unnamed == []
    for _ in range(12):
        page.keyboard.press("Tab")
        outline = "e => getComputedStyle(e.matches('.choice input') ? e.nextSibling : e).outlineStyle"
        assert page.locator(":focus").evaluate(outline) != "none"


def test_lines_of_one_token_alone_are_drawn_when_it_is_pointed_at(visit):
    page = visit("one")
    drawn = (
        "(() => { const c = document.querySelector('.web canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height);"
        " return d.data.filter((value, i) => i % 4 === 3 && value > 0).length })()"
    )
    all_lines = page.evaluate(drawn)
    page.locator(".web .queries li").nth(5).hover()
    assert 0 < page.evaluate(drawn) < all_lines
    strongest = int(STEPS[-1].maps[SELF].weights[0, 0, 5].argmax())
    assert "lit" in page.locator(".web .keys li").nth(strongest).get_attribute("class")
    page.mouse.move(1, 1)
    assert page.evaluate(drawn) == all_lines
    page.locator(".chip").nth(2).click()
    assert "heads=2" in address(page)


def test_text_of_users_is_text(visit):
    page = visit("two")
    assert page.locator("h1").inner_text() == "<script>alert(3)</script>"
    assert "<script>alert(2)</script>" in page.locator("#models").inner_text()
    labels = page.locator(".axis.queries").first.locator("span").all_text_contents()
    assert labels[3:6] == ["<script>alert(1)</script>", "␣", "⏎"]
    assert page.evaluate("document.scripts.length") == 2
    assert page.locator(".web .keys bdi").last.inner_text() == "שלום"  # apart from the direction of others


@pytest.mark.parametrize("length", [4, 17, 97])
@pytest.mark.parametrize("width", [940, 1100, 1400])
def test_the_frame_of_a_view_shows_the_whole_map(length, width, window, tmp_path):
    weights = torch.ones(2, length, length).tril()
    one = weights / weights.sum(-1, keepdim=True)
    for number, shown in enumerate((view(one), view({"scaled": one, "unscaled": one}))):
        shown.save(tmp_path / f"{number}.html")
        page = window((tmp_path / f"{number}.html").as_uri(), size=(width, shown.height))
        page.wait_for_selector("#panes .cells")
        for board in page.locator(".map").all():
            box = board.bounding_box()
            assert box["y"] + box["height"] <= shown.height


def test_an_address_opens_the_same_view_again_and_a_broken_one_opens_some_view(visit):
    page = visit("two")
    choose(page, "A")
    thumb(page, SECOND, 1).click()
    page.locator("#scale").select_option("linear")
    page.locator("#theme").click()
    page.mouse.click(*cell(page, 6, 4))
    again = visit("two", address(page))
    assert again.locator("#look-title").inner_text() == "Encoder, layer 1, head 1"
    assert again.locator("#scale").input_value() == "linear"
    assert readout(again) == readout(page)
    assert again.evaluate("document.documentElement.dataset.theme") == "dark"
    broken = visit("two", "#layer=99&head=-3&step=7&view=nonsense&q=1e9&k=&zoom=x&heads=a.b&theme=red&scale=&hatch=")
    assert broken.locator("#look-title").inner_text() == "Cross, layer 0, head 0"


@pytest.mark.parametrize("name", ["two", "long"])
def test_a_narrow_window_is_not_scrolled_sideways(visit, name):
    page = visit(name, size=(360, 740), offline=True, reduced_motion="reduce")
    script = (
        "[...document.querySelectorAll('html, #panes, #controls, #readout, #row')].map(e => e.getBoundingClientRect().right)"
    )
    assert max([page.evaluate("document.documentElement.scrollWidth"), *page.evaluate(script)]) <= 360
    assert page.evaluate("[...document.querySelectorAll('*')].every(e => getComputedStyle(e).transitionDuration === '0s')")


def test_two_views_in_a_notebook_are_independent(visit):
    """Each stands in a sandboxed frame without an address; one is turned dark, the other stays light."""

    def themes():
        return [frame.evaluate("document.documentElement.dataset.theme") for frame in (first, second)]

    first, second = visit("notebook", size=(1280, 1700)).frames[1:]
    before = themes()
    first.locator("#theme").click()
    thumb(first, 1, 2).click()
    assert [a == b for a, b in zip(before, themes(), strict=True)] == [False, True]
