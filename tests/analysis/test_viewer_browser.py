"""The viewer in a real browser (Debian's chromium, driven by playwright): what a reader sees, points at and types."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import re
import shutil

import pytest
from pages import SOURCE, TARGET, random_snapshot

from minitx.analysis.viewer import Trace, View, viewer_page
from tests.waiting import PATIENCE

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
MISSING = [
    name for name, there in (("playwright", importlib.util.find_spec("playwright")), ("chromium", CHROMIUM)) if not there
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"needs {' and '.join(MISSING)} (pip install playwright; apt-get install chromium)"
    ),
]

STEPS = [random_snapshot(seed, step) for seed, step in ((1, 5), (2, 20), (3, 60))]
OTHER = random_snapshot(4, 60, title="unscaled")
SELF, SECOND, CAUSAL, CROSS = range(4)  # layers


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = {"args": ["--no-sandbox", "--disable-dev-shm-usage"], "timeout": 1000 * PATIENCE}
        browser = playwright.chromium.launch(executable_path=CHROMIUM, **options)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    """Addresses of a page with one model and of one with two."""
    folder = tmp_path_factory.mktemp("pages")
    scaled, unscaled = Trace("scaled", STEPS), Trace("<script>alert(2)</script>", [OTHER])
    long = random_snapshot(7, kinds=("causal",), H=2, tokens={"decoder_input_ids": [[f"t{i}" for i in range(211)]]})
    made = {"one": [scaled], "two": [scaled, unscaled], "long": [Trace("long", [long])]}
    for name, traces in made.items():
        (folder / f"{name}.html").write_text(viewer_page(traces, title="<script>alert(3)</script>"), encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in made}


@pytest.fixture(scope="module")
def windows(browser):
    """``windows(size, **options)``: a browser's window with these options, made once."""
    made = {}

    def window(size, **options):
        key = size, *options.items()
        if key not in made:
            made[key] = browser.new_context(viewport=dict(zip(("width", "height"), size, strict=True)), **options)
        return made[key]

    return window


@pytest.fixture
def visit(windows, pages):
    """``visit("one", "#layer=1")`` opens a page; afterwards no error, no dialog and no request may have happened."""
    opened, wrong = [], []

    def open_page(name, address="", *, size=(1280, 900), **options):
        page = windows(size, **options).new_page()
        opened.append(page)
        page.set_default_timeout(1000 * PATIENCE)
        page.on("console", lambda message: wrong.append(message.text) if "getImageData" not in message.text else None)  # ours
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
        page.on(
            "request", lambda request: wrong.append(request.url) if not request.url.startswith((pages[name], "data:")) else None
        )
        page.goto(pages[name] + address)
        page.wait_for_selector("#panes .cells")
        return page

    yield open_page
    for page in opened:
        page.close()
    assert wrong == []


def cell(page, q, k, pane=0):
    """The middle of a cell, in pixels of the window."""
    box = page.locator(".cells").nth(pane).bounding_box()
    L, S = page.evaluate("[...document.querySelectorAll('.axis')].slice(0, 2).map(a => a.children.length)")[::-1]
    return box["x"] + (k + 0.5) * box["width"] / S, box["y"] + (q + 0.5) * box["height"] / L


def address(page):
    return page.evaluate("location.hash")


def readout(page):
    return page.locator("#readout").inner_text().replace("\n", " ")


def weight(snapshot, layer, head, q, k):
    return f"{snapshot.maps[layer].weights[0, head, q, k].item():.4f}"


def choose(page, text):
    page.locator(".choice label", has_text=re.compile(f"^{re.escape(text)}$")).click()


def thumb(page, layer, head):
    return page.locator(f".thumb[data-layer='{layer}'][data-head='{head}']")


def test_pointing_at_a_cell_shows_its_weight(visit):
    page = visit("one")
    for q, k in ((0, 3), (6, 1)):
        page.mouse.move(*cell(page, q, k))
        wanted = weight(STEPS[-1], SELF, 0, q, k)
        assert wanted in readout(page)
        assert wanted in page.locator("#tip").inner_text()
        entropy = STEPS[-1].maps[SELF].entropy()[0, 0, q]
        assert f"row H̄ {entropy:.3f}" in readout(page)
        assert f"max |z| {STEPS[-1].maps[SELF].max_logit[0, 0, q]:.2f}" in readout(page)
    page.mouse.move(1, 1)
    assert page.locator("#tip").is_hidden()


def test_the_distance_to_the_likeliest_key_is_that_of_the_scores(visit):
    page = visit("one")
    row = STEPS[-1].maps[SELF].weights[0, 0, 2]
    k = int(row.argsort()[-2])
    page.mouse.move(*cell(page, 2, k))
    assert f"z {math.log(row.max() / row[k]):.2f} below the row's largest" in readout(page)
    page.mouse.move(*cell(page, 2, int(row.argmax())))
    assert "z is the row's largest" in readout(page)


def test_a_thumbnail_opens_its_head_and_arrows_go_on_from_there(visit):
    page = visit("one")
    thumb(page, SECOND, 2).click()
    assert page.locator("#look-title").inner_text() == "Encoder, layer 1, head 2"
    page.mouse.move(*cell(page, 4, 5))
    assert weight(STEPS[-1], SECOND, 2, 4, 5) in readout(page)
    thumb(page, SECOND, 2).focus()
    for key in ("ArrowLeft", "ArrowUp"):
        page.keyboard.press(key)
    assert page.locator("#look-title").inner_text() == "Encoder, layer 0, head 1"
    assert page.evaluate("document.activeElement.ariaChecked") == "true"


def test_each_kind_of_attention_has_its_own_tokens_on_the_axes(visit):
    page = visit("one")
    assert page.locator("#group label").all_inner_texts() == ["Encoder", "Decoder", "Cross"]
    choose(page, "Cross")
    rows, columns = (page.locator(f".axis.{side} span").all_text_contents() for side in ("queries", "keys"))
    assert (len(rows), len(columns)) == (len(TARGET), len(SOURCE))
    assert rows[2] == "</script><!--"
    page.mouse.move(*cell(page, 2, 6))
    assert weight(STEPS[-1], CROSS, 0, 2, 6) in readout(page)


def test_the_slider_and_its_arrow_keys_change_the_step(visit):
    page = visit("one")
    page.locator("#step").focus()
    for at in (1, 0):
        page.keyboard.press("ArrowLeft")
        assert f"{STEPS[at].step} ({at + 1} of 3)" in page.locator("#step-text").inner_text()
        page.mouse.move(*cell(page, 1, 1))
        assert weight(STEPS[at], SELF, 0, 1, 1) in readout(page)
    page.locator("#play").click()
    page.locator("#step-text", has_text="60 (3 of 3)").wait_for()
    assert "step=60" in address(page)


def test_two_models_stand_side_by_side_and_as_a_difference(visit):
    page = visit("two", "#step=20")  # B has only step 60
    assert page.locator(".pane").count() == 2
    x, y = cell(page, 3, 2, pane=1)
    page.mouse.move(x, y)
    a, b = (s.maps[SELF].weights[0, 0, 3, 2].item() for s in (STEPS[1], OTHER))
    assert f"A {a:.4f}" in readout(page) and f"B {b:.4f}" in readout(page)
    choose(page, "A − B")
    assert page.locator(".pane").count() == 1
    page.mouse.move(*cell(page, 3, 2))
    assert f"{a - b:+.4f}".replace("-", "−") in readout(page)
    assert page.locator("#legend").inner_text().split("\n")[0] == "more in B"
    red, _, blue, _ = pixel(page, 3, 2)
    assert (red > blue) == (a > b)
    choose(page, "B")
    page.mouse.move(*cell(page, 3, 2))
    assert f"{b:.4f}" in readout(page)


def pixel(page, q, k):
    script = f"[...document.querySelector('.cells canvas').getContext('2d').getImageData({k}, {q}, 1, 1).data]"
    return page.evaluate(script)


def test_hidden_pairs_are_clear_and_their_hatching_can_be_switched_off(visit):
    page = visit("one", f"#layer={CAUSAL}")
    assert pixel(page, 1, 3)[3] == 0
    assert pixel(page, 3, 1)[3] == 255
    hatching = "getComputedStyle(document.querySelector('.cells')).backgroundImage"
    assert "gradient" in page.evaluate(hatching)
    page.locator("#hatch").uncheck()
    assert page.evaluate(hatching) == "none"
    page.mouse.move(*cell(page, 1, 3))
    assert "hidden" in readout(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_run_evenly_from_the_page_to_its_opposite(visit, scheme):
    page = visit("one", color_scheme=scheme)
    script = "c => { const d = c.getContext('2d').getImageData(0, 0, 256, 1).data; return [...d] }"
    values = page.locator(".ramp canvas").evaluate(script)
    lightness = [luminance(values[i : i + 3]) for i in range(0, len(values), 4)]
    steps = [b - a for a, b in itertools.pairwise(lightness)]
    assert all((step <= 0.5) if scheme == "light" else (step >= -0.5) for step in steps)
    assert abs(lightness[-1] - lightness[0]) > 80


def luminance(rgb):
    """CIE L* of an sRGB colour."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (value / 255 for value in rgb)]
    y = sum(part * c for part, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def test_the_map_is_walked_with_the_keyboard_alone(visit):
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
    assert page.locator("#readout").get_attribute("aria-live") == "polite"
    page.keyboard.press("+")
    assert "zoom=" in address(page)


def test_everything_that_can_be_reached_has_a_name_and_shows_its_focus(visit):
    page = visit("two")
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, select, [tabindex=\"0\"]')].filter(e => !e.hidden && !(e.ariaLabel ||"
        " e.textContent.trim() || e.labels?.length || e.ariaLabelledByElements?.length)).map(e => e.outerHTML)"
    )
    assert unnamed == []
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen = page.evaluate(
            "(() => { const e = document.activeElement, s = getComputedStyle(e.matches('.choice input') ? e.nextSibling : e);"
            " return [e === document.body ? 'BODY' : e.id || e.className || e.name || e.tagName, s.outlineStyle] })()"
        )
        if seen[0] == "BODY":
            break
        assert seen[1] != "none", seen
        reached.add(seen[0])
    assert {"theme", "step", "play", "scale", "smaller", "hatch", "thumb", "chip", "cells ruled"} <= reached


def test_the_row_of_the_cursor_is_a_table_of_its_strongest_keys(visit):
    page = visit("one", "#q=4&k=0")
    row = STEPS[-1].maps[SELF].weights[0, 0, 4]
    order = row.argsort(descending=True).tolist()
    cells = [line.locator("td").all_inner_texts() for line in page.locator("#row tbody tr").all()]
    assert cells == [[str(k), f"{row[k].item():.4f}"] for k in order]
    assert page.locator("#row tbody th[scope=row]").count() == len(order)


def test_lines_of_one_token_alone_are_drawn_when_it_is_pointed_at_or_focused(visit):
    page = visit("one")
    drawn = "(() => { const c = document.querySelector('.web canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n })()"
    all_lines = page.evaluate(drawn)
    page.locator(".web .queries li").nth(5).hover()
    assert 0 < page.evaluate(drawn) < all_lines
    heights = page.evaluate(  # of the ink where the lines begin, in rows of text
        "(() => { const c = document.querySelector('.web canvas'), d = c.getContext('2d').getImageData(1, 0, 1, c.height).data;"
        " return [...d.keys()].filter(i => i % 4 === 3 && d[i]).map(i => Math.floor((i >> 2) / (c.height / c.clientHeight) / 20)) })()"
    )
    assert set(heights) == {5}
    strongest = int(STEPS[-1].maps[SELF].weights[0, 0, 5].argmax())
    assert "lit" in page.locator(".web .keys li").nth(strongest).get_attribute("class")
    page.mouse.move(1, 1)
    assert page.evaluate(drawn) == all_lines
    page.locator(".web .keys li[tabindex='0']").focus()
    page.keyboard.press("Home")
    assert page.evaluate(drawn) < all_lines
    assert "k=0" in address(page)


def test_heads_are_switched_on_beside_one_another(visit):
    page = visit("one")
    chips = page.locator(".chip")
    chips.nth(2).click()
    assert chips.nth(2).get_attribute("aria-pressed") == "true"
    assert "heads=2" in address(page)
    chips.nth(0).click(force=True)  # the head on the map stays
    assert chips.nth(0).get_attribute("aria-pressed") == "true"


def test_text_of_users_is_text(visit):
    page = visit("two")
    assert page.locator("h1").inner_text() == "<script>alert(3)</script>"
    assert "<script>alert(2)</script>" in page.locator("#models").inner_text()
    labels = page.locator(".axis.queries").first.locator("span").all_text_contents()
    assert labels[3:6] == ["<script>alert(1)</script>", "␣", "⏎"]
    assert page.evaluate("document.scripts.length") == 2
    choose(page, "Decoder")
    assert page.locator(".axis.queries").first.locator("span").all_text_contents()[4] == "◌\u0301"


def test_tokens_stand_apart_from_the_direction_of_others(visit):
    page = visit("one")
    assert page.locator(".axis.queries bdi").count() == len(SOURCE)
    assert page.locator(".web .keys bdi").last.inner_text() == "שלום"


def test_a_chinese_token_is_drawn_as_its_character(visit):
    page = visit("one")
    assert page.locator(".axis.queries span").first.text_content() == "你·1/3"
    picture = """text => { const c = document.createElement('canvas'); c.width = c.height = 40; const x = c.getContext('2d');
      x.font = `30px ${getComputedStyle(document.body).fontFamily}`; x.fillText(text, 2, 32); return c.toDataURL(); }"""
    drawn = {text: page.evaluate(picture, text) for text in ("你", "好", "\U00057abc")}
    if drawn["你"] == drawn["好"]:
        pytest.skip("no font with Chinese characters here (apt-get install fonts-noto-cjk)")
    assert drawn["你"] != drawn["\U00057abc"]


def test_an_address_opens_the_same_view_again(visit):
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


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_light_and_dark_follow_the_system_until_they_are_chosen(visit, scheme, dark):
    page = visit("one", color_scheme=scheme)

    def is_dark():
        return (
            luminance(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3])) < 50
        )

    assert is_dark() == dark
    page.locator("#theme").click()
    assert is_dark() != dark
    assert f"theme={'light' if dark else 'dark'}" in address(page)


@pytest.mark.parametrize("name", ["two", "long"])
def test_a_narrow_window_is_not_scrolled_sideways(visit, name):
    page = visit(name, size=(360, 740))
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    right = page.evaluate(
        "Math.max(...[...document.querySelectorAll('#panes, #controls, #readout, #row')].map(e => e.getBoundingClientRect().right))"
    )
    assert right <= 360


def test_labels_of_a_long_text_do_not_lie_over_one_another(visit):
    page = visit("long")
    script = """side => { const boxes = [...document.querySelectorAll(`.axis.${side} span:not(.thin, .on)`)]
      .map(e => e.getBoundingClientRect()); return boxes.map(b => side === 'queries' ? [b.top, b.bottom] : [b.left, b.right]); }"""
    for side in ("queries", "keys"):
        boxes = page.evaluate(script, side)
        assert len(boxes) > 15
        overlaps = sum(a[1] > b[0] + 6 for a, b in itertools.pairwise(boxes))  # lines of text have air of their own
        assert overlaps == 0, side


def test_nothing_moves_where_less_motion_is_wanted(visit):
    page = visit("one", reduced_motion="reduce")
    assert page.evaluate("[...document.querySelectorAll('*')].every(e => getComputedStyle(e).transitionDuration === '0s')")


def test_the_page_works_without_a_network(visit):
    page = visit("one", offline=True)
    assert page.locator(".thumb").count() == 6


def test_two_views_in_a_notebook_are_independent_and_do_not_fail(windows, tmp_path):
    """Each stands in a sandboxed frame without an address; one is turned dark, the other stays light."""
    views = [View(viewer_page([Trace(name, [STEPS[0]])])) for name in ("first", "second")]
    (tmp_path / "notebook.html").write_text("".join(view._repr_html_() for view in views), encoding="utf-8")
    page, wrong = windows((1280, 1700)).new_page(), []
    page.set_default_timeout(1000 * PATIENCE)
    page.on("console", lambda message: wrong.append(message.text) if "getImageData" not in message.text else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto((tmp_path / "notebook.html").as_uri())
    first, second = page.frames[1:]
    for frame in (first, second):
        frame.wait_for_selector("#panes .cells")
    themes = [frame.evaluate("document.documentElement.dataset.theme") for frame in (first, second)]
    first.locator("#theme").click()
    thumb(first, 1, 2).click()
    changed = [frame.evaluate("document.documentElement.dataset.theme") for frame in (first, second)]
    assert changed[0] != themes[0]
    assert changed[1] == themes[1]
    page.close()
    assert wrong == []
