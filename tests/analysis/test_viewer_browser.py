"""The viewer in a real browser (Debian's chromium, driven by playwright): what a reader sees, points at and types."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from pages import SOURCE, TARGET, choose, is_dark, random_snapshot, shows_focus, unnamed, weak_texts, with_answers

from minitx.analysis.answers import Answer
from minitx.analysis.snapshot import AnswerCounts
from minitx.analysis.viewer import Trace, View, view, viewer_page
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

STEPS = [random_snapshot(seed, step) for seed, step in ((1, 5), (2, 20), (3, 60))]
OTHER = random_snapshot(4, 60, title="unscaled")
SELF, SECOND, CAUSAL, CROSS = range(4)  # layers


def answer(p, said="16", at=6, text="Which value has key 7?", right="16"):
    """A model's answer: its right one has the probability ``p``."""
    return Answer(text, at, 3, right, said == right, -math.log(p), ((said, max(p, 1 - p)), ("4", 0.01)))


def asked(step, p, said="16", **options):
    return with_answers(random_snapshot(step, step, kinds=("self",)), [answer(p, said, **options)])


FILM = [
    Trace("scaled", [asked(0, 0.02, "4"), asked(50, 0.1, "9"), asked(300, 0.98)]),
    Trace("unscaled", [asked(0, 0.03, "4"), asked(50, 0.03, "<b>"), asked(300, 1e-7, "4")]),
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    """Addresses of a page with one model, of one with two, of a long text, and of a notebook with two views."""
    folder = tmp_path_factory.mktemp("pages")
    scaled, unscaled = Trace("scaled", STEPS), Trace("<script>alert(2)</script>", [OTHER])
    long = random_snapshot(7, kinds=("causal",), H=2, tokens={"decoder_input_ids": [[f"t{i}" for i in range(97)]]})
    traces = {"one": [scaled], "two": [scaled, unscaled], "long": [Trace("long", [long])], "film": FILM}
    made = {name: viewer_page(given, title="<script>alert(3)</script>") for name, given in traces.items()}
    made["notebook"] = "".join(View(viewer_page([Trace(name, [STEPS[0]])]))._repr_html_() for name in ("first", "second"))
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in made}


@pytest.fixture
def visit(window, pages, tmp_path):
    """``visit("one", "#layer=1")`` opens a page, ``visit([Trace(…)])`` or ``visit(view(…))`` another one."""

    def open_page(shown, address="", **options):
        if not isinstance(shown, str):
            (shown if isinstance(shown, View) else View(viewer_page(shown))).save(tmp_path / "page.html")
        page = window(pages[shown] if isinstance(shown, str) else (tmp_path / "page.html").as_uri(), address, **options)
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
    assert f"entropy H̄ {layer.entropy()[0, 0, 2]:.3f}" in readout(page)
    assert f"largest score |z| {layer.max_logit[0, 0, 2]:.2f}" in readout(page)
    k = int(row.argsort()[-2])
    assert f"z {math.log(row.max() / row[k]):.2f} below the row's largest" in pointed(page, 2, k)
    assert "z is the row's largest" in pointed(page, 2, int(row.argmax()))
    assert ["the token itself" in pointed(page, 2, k) for k in (2, 3)] == [True, False]


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
    assert "step=60" in address(page) and page.locator("#play").inner_text() == "Play"


def test_two_models_stand_side_by_side_and_as_a_difference(visit):
    page = visit("two", "#step=20")  # B has only step 60
    a, b = (s.maps[SELF].weights[0, 0, 3, 2].item() for s in (STEPS[1], OTHER))
    said = pointed(page, 3, 2, pane=1)
    assert f"A {a:.4f}" in said and f"B {b:.4f}" in said
    assert "A − B" not in page.locator(".bars").first.inner_text()
    choose(page, "A − B")
    assert page.locator(".pane").count() == 1 and "A − B" in page.locator(".bars").inner_text()
    assert f"{a - b:+.4f}".replace("-", "−") in pointed(page, 3, 2)
    red, _, blue, _ = pixel(page, 3, 2)
    assert (red > blue) == (a > b)


def windowed(snapshot, **changes):
    """The snapshot with a mask that shows each query the token before alone, and the first query nothing."""
    layer = snapshot.maps[0]
    visible = layer.visible.tril(-1).triu(-1)
    maps = (replace(layer, visible=visible, weights=visible.float(), max_logit=layer.max_logit * visible.any(-1), **changes),)
    return replace(snapshot, maps=maps)


def test_two_models_with_other_masks_have_their_own_counts_and_largest_scores(visit):
    a, b = one, other = random_snapshot(1, kinds=("self",)), windowed(random_snapshot(2, kinds=("self",)))
    unknown = replace(b, maps=(replace(b.maps[0], max_logit=b.maps[0].max_logit * torch.nan),))
    page = visit([Trace("a", [one]), Trace("b", [other])], "#q=3")
    for both in ("A beside B", "A − B"):
        choose(page, both)
        counts = re.findall(r"(\w): (\d+) of 7 keys", page.locator("#row-facts").inner_text())
        assert counts == [("A", "7"), ("B", "1")]
    difference = (a.maps[0].max_logit.amax(-1) - b.maps[0].max_logit.amax(-1))[0, 0].item()
    shown = thumb(page, 0, 0).locator(".numbers").last
    assert float(shown.inner_text().removeprefix("z ").replace("−", "-")) == pytest.approx(difference, abs=0.051)
    page.mouse.click(*cell(page, 0, 0))
    assert "B: 0 of 7 keys visible · entropy H̄ – · largest score |z| –" in page.locator("#row-facts").inner_text()
    page = visit([Trace("a", [one]), Trace("b", [unknown])], "#view=diff&q=3")
    assert thumb(page, 0, 0).locator(".numbers").last.inner_text() == "z –"
    assert page.locator(".strip-names small").last.inner_text() == "–"
    choose(page, "A beside B")
    assert page.locator(".strip-names").first.locator("small").last.inner_text().startswith("0–")  # A has scores


def test_hidden_pairs_are_clear_and_their_hatching_can_be_switched_off(visit):
    page = visit("one", f"#layer={CAUSAL}")
    assert (pixel(page, 1, 3)[3], pixel(page, 3, 1)[3]) == (0, 255)
    hatching = "getComputedStyle(document.querySelector('.cells')).backgroundImage"
    assert "gradient" in page.evaluate(hatching)
    page.locator("#hatch").uncheck()
    assert page.evaluate(hatching) == "none"
    assert "hidden" in pointed(page, 1, 3)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_until_another_theme_is_chosen(visit, scheme):
    page = visit("film", "#heads=1.2&step=300", color_scheme=scheme, reduced_motion="reduce")
    assert is_dark(page) == (scheme == "dark")
    assert weak_texts(page) == []
    page.locator("#theme").click()
    assert is_dark(page) == (scheme == "light")


def test_the_map_is_walked_with_the_keyboard_alone_and_its_row_is_a_table(visit):
    page = visit("one", "#q=2&k=2")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className").startswith("cells"):
            break
    assert page.evaluate("document.activeElement.matches('.cells:focus-visible')")
    before = address(page), cell(page, 2, 2)
    for key in ("Control+ArrowRight", "Alt+ArrowDown", "Control+-"):  # the browser's
        page.keyboard.press(key)
        assert (address(page), cell(page, 2, 2)) == before
    for key, (q, k) in {"ArrowRight": (2, 3), "ArrowDown": (3, 3), "End": (3, 6), "PageUp": (0, 6), "Home": (0, 0)}.items():
        page.keyboard.press(key)
        assert readout(page).startswith(f"query {q} ")
        assert weight(STEPS[-1], SELF, 0, q, k) in readout(page)
    row = STEPS[-1].maps[SELF].weights[0, 0, 0]
    cells = [line.locator("td").all_inner_texts() for line in page.locator("#row tbody tr").all()]
    assert cells == [[str(k), f"{row[k].item():.4f}"] for k in row.argsort(descending=True).tolist()]


def test_everything_that_can_be_reached_has_a_name_and_shows_its_focus(visit):
    page = visit("two")
    assert unnamed(page) == []
    for _ in range(12):
        page.keyboard.press("Tab")
        assert shows_focus(page)


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


def test_a_token_without_lines_says_that_no_weight_is_large_enough(visit):
    one = windowed(random_snapshot(1, kinds=("self",)))
    one.maps[0].weights[0, 0, 2, 1] = torch.nan
    page, note = visit([Trace("a", [one])]), "No weight of this token is large enough for a line (0.02 of the full colour)."
    told = {("keys", 6): note, ("queries", 0): note, ("queries", 2): f"NaN has no line. {note}", ("queries", 3): ""}
    for (side, i), wanted in told.items():
        page.locator(f".web .{side} li").nth(i).hover()
        assert page.locator(".lines .note").inner_text() == wanted


@pytest.mark.parametrize("length", [4, 17, 97])
@pytest.mark.parametrize("width", [940, 1100, 1400])
def test_the_frame_of_a_view_shows_the_whole_map(length, width, visit):
    weights = torch.ones(2, length, length).tril()
    one = weights / weights.sum(-1, keepdim=True)
    for shown in (view(one), view({"scaled": one, "unscaled": one})):
        page = visit(shown, size=(width, shown.height))
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
    again.evaluate("location.hash = '#layer=0&head=2&q=1&k=1'")
    again.locator("#look-title", has_text="Encoder, layer 0, head 2").wait_for()
    assert again.locator("#scale").input_value() == "root" and again.locator(".pane").count() == 2
    broken = visit("two", "#layer=99&head=-3&step=7&view=nonsense&q=1e9&k=&zoom=x&heads=a.b&theme=red&scale=&hatch=")
    assert broken.locator("#look-title").inner_text() == "Cross, layer 3, head 0"  # blocks.3.cross


def test_the_page_follows_where_the_browser_refuses_more_addresses(visit):
    page = visit("one")
    page.evaluate("history.put = history.replaceState; history.replaceState = () => { throw new Error('too many') }; 0")
    thumb(page, SECOND, 1).click()
    assert page.locator("#look-title").inner_text() == "Encoder, layer 1, head 1"
    page.evaluate("history.replaceState = history.put; 0")
    wait_for(lambda: address(page).startswith("#layer=1&head=1&"))


def test_the_legend_of_small_weights_has_their_numbers(visit):
    page = visit(view(torch.full((1, 1, 200, 200), 1 / 200)), "#scale=largest")
    assert page.locator(".tick").all_inner_texts() == ["0", "0.0013", "0.0025", "0.0038", "0.005"]


def test_a_model_whose_answers_are_no_numbers_is_shown_with_them(visit):
    for loss, p in ((math.nan, math.nan), (math.inf, 1.0)):
        one = Answer("Which?", 6, 3, "16", False, loss, (("4", p),))
        snapshot = with_answers(random_snapshot(0, kinds=("self",)), [one], [[[one]] * 3])
        snapshot.maps[0].weights[0, 0, 6, 3] = math.nan
        page = visit([Trace("model", [snapshot])], "#out=1")
        said = "Infinity" if p == 1 else "NaN"
        assert f"loss {said}" in page.locator(".answer .verdict").first.text_content()
        assert page.locator(".tops tbody tr").count() == 2
        assert page.locator("#row tbody td").first.inner_text() == "3"  # no number comes before the largest


def test_tokens_that_look_alike_have_a_row_each_and_a_line_end_in_a_question_is_seen(visit):
    one = answer(0.4, "\n", text="Which token follows “\n”?", right="⏎")
    one = replace(one, top=(("\n", 0.004), ("⏎", 0.003), ("\u2800", 0.001)))
    page = visit([Trace("a", [with_answers(random_snapshot(1, kinds=("self",)), [one], [[[one]] * 3])])], "#q=6&out=1")
    assert "Which token follows “⏎”?" in answers(page)[0] and "with probability 4·10⁻³" in answers(page)[0]
    table = [row.inner_text().split() for row in page.locator(".tops tbody tr").all()]
    assert table == [["⏎", *["4·10⁻³"] * 2], ["⏎", "✓", *["3·10⁻³"] * 2], ["⟨U+2800⟩", *["1·10⁻³"] * 2]]


@pytest.mark.parametrize("name", ["two", "long"])
def test_a_narrow_window_is_not_scrolled_sideways(visit, name):
    page = visit(name, size=(360, 740), offline=True, reduced_motion="reduce")
    script = (
        "[...document.querySelectorAll('html, #panes, #controls, #readout, #row')].map(e => e.getBoundingClientRect().right)"
    )
    assert max([page.evaluate("document.documentElement.scrollWidth"), *page.evaluate(script)]) <= 360
    assert page.evaluate("[...document.querySelectorAll('*')].every(e => getComputedStyle(e).transitionDuration === '0s')")


def answers(page):
    """What stands above each map."""
    return [text.replace("\n", " ") for text in page.locator(".answer").all_inner_texts()]


def test_the_question_and_what_each_model_says_stand_above_its_map_at_every_step(visit):
    page = visit("film", "#step=50")
    a, b = answers(page)
    assert "Which value has key 7? Right: 16 at the framed key <script>alert(1)</script>" in a
    assert re.search(r"✗ wrong\s*The model says 9 with probability 0\.90 · right answer 0\.10 · loss 2\.30", a)
    assert "The model says <b> with probability 0.97" in b
    page.locator("#step").focus()
    page.keyboard.press("ArrowRight")
    a, b = answers(page)
    assert re.search(r"✓ right\s*The model says 16 with probability 0\.98", a)
    assert re.search(r"✗ wrong\s*The model says 4 .* right answer 1·10⁻⁷", b)
    good, bad = (page.locator(f".{kind} .sign").evaluate("e => getComputedStyle(e).color") for kind in ("good", "bad"))
    assert good != bad
    framed = page.evaluate(
        "[...document.querySelectorAll('.axis.keys')].map(a => [...a.children].findIndex(e => e.matches('.wanted')))"
    )
    assert framed == [3, 3]
    before = cell(page, 0, 1)
    page.set_viewport_size({"width": 750, "height": 900})
    wait_for(lambda: cell(page, 0, 1) != before)
    assert page.locator(".axis .wanted").count() == 2
    choose(page, "A − B")
    (both,) = answers(page)
    assert "✓ right" in both and "✗ wrong" in both
    choose(page, "B")
    assert "✗ wrong" in answers(page)[0]


@pytest.fixture
def knocked(visit):
    """A page that knows the answers without each head: two layers of three heads, two questions. Head 1 of layer 1 matters for the second."""

    def rows(p):
        return [
            answer(q, "b" if q > 0.5 else "c", at=at, text=f"What follows {at}?", right="b") for at, q in ((1, 0.6), (2, p))
        ]

    without = [[rows(0.02 if (layer, head) == (1, 1) else 0.91) for head in range(3)] for layer in range(2)]
    snapshot = with_answers(random_snapshot(1, kinds=("self", "self")), rows(0.9), without)
    return visit([Trace("model", [snapshot])], "#layer=1&head=1&q=2")


def test_a_knocked_out_head_answers_at_once_with_what_was_computed_before(knocked):
    button = knocked.locator("#out")
    assert "✓ right" in answers(knocked)[0] and "Without head" not in answers(knocked)[0]
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    (said,) = answers(knocked)
    assert re.search(r"✓ right\s*All heads: b with probability 0\.90", said)
    assert re.search(r"✗ wrong\s*Without head 1: c with probability 0\.98 · right answer 0\.02", said)
    assert "Loss of the right answer: 0.11 → 3.91 (+3.81 nats)" in said
    table = [row.inner_text().split() for row in knocked.locator(".tops tbody tr").all()]
    assert table == [["b", "✓", "0.90", "0.02"], ["4", "0.01", "0.01"], ["c", "–", "0.98"]]
    thumb(knocked, 0, 2).click()  # stays knocked out, now of another head
    assert "Without head 2: b with probability 0.91" in answers(knocked)[0]
    button.focus()
    knocked.keyboard.press("Enter")
    assert "Without head" not in answers(knocked)[0]


def test_every_head_says_what_its_loss_would_be_for_the_cursors_question(knocked):
    effects = [text.strip() for text in knocked.locator(".effect").all_inner_texts()]
    assert effects == ["Δ 0.0"] * 4 + ["Δ +3.8"] + ["Δ 0.0"]
    assert "without it, the loss changes by +3.8" in thumb(knocked, 1, 1).get_attribute("aria-label")
    assert "Δ: change of the loss" in knocked.locator("#symbols").inner_text()
    strongest = knocked.locator("#strongest button")
    assert strongest.all_inner_texts() == ["L1 h1 +3.8"]
    thumb(knocked, 0, 0).click()
    strongest.click()
    assert knocked.locator("#look-title").inner_text() == "Layer 1, head 1"
    knocked.mouse.click(*cell(knocked, 1, 1))
    assert not knocked.locator("#strongest").is_visible()
    assert {text.strip() for text in knocked.locator(".effect").all_inner_texts()} == {"Δ 0.0"}
    knocked.mouse.click(*cell(knocked, 5, 1))  # which asks nothing
    assert knocked.locator(".effect").count() == 0


def test_an_address_opens_a_knocked_out_head_and_a_page_without_such_answers_ignores_it(knocked, visit):
    knocked.locator("#out").click()
    assert "out=1" in address(knocked)
    page = visit("film", "#out=1")
    assert not page.locator("#out").is_visible()
    page.locator("#hatch").uncheck()
    assert "hatch=0" in address(page) and "out" not in address(page)
    assert page.locator(".effect").count() == 0
    assert "Δ" not in page.locator("#symbols").inner_text()


def test_a_text_has_the_question_of_the_row_with_the_cursor_and_other_rows_have_none(visit):
    rows = [answer(0.9, "b", at=at, text=f"Which token follows “{at}”?", right="b") for at in (1, 2)]
    page = visit([Trace("a", [with_answers(random_snapshot(1), rows)])], "#q=2")
    assert "follows “2”" in answers(page)[0]
    page.mouse.click(*cell(page, 1, 1))
    assert "follows “1”" in answers(page)[0]
    page.mouse.click(*cell(page, 4, 1))
    assert answers(page) == [""]
    choose(page, "Cross")  # whose queries are the decoder's
    assert answers(page) == [""]


def test_how_to_read_the_page_is_open_at_the_first_visit_and_stands_beside_the_map(visit, window):
    page = visit("film")
    assert page.locator("#help").get_attribute("open") is not None
    told, board = page.locator("#help").bounding_box(), page.locator(".map").first.bounding_box()
    assert told["x"] + told["width"] <= board["x"]
    assert told["y"] < 900
    assert "diagonal" in page.locator("#help").inner_text()
    page.reload()
    page.wait_for_selector("#panes .cells")
    assert page.locator("#help").get_attribute("open") is None


@pytest.mark.parametrize("name", ["film", "two", "one"])
def test_on_a_phone_the_map_is_on_the_first_screen_and_the_rest_is_behind_a_button(visit, name):
    page = visit(name, size=(390, 844))
    board = page.locator(".cells").first.bounding_box()
    assert board["y"] + board["height"] <= 844
    assert page.locator("#play").is_visible()
    assert not page.locator("#scale").is_visible()
    page.locator("#more").click()
    assert page.locator("#scale").is_visible() and unnamed(page) == []
    assert page.locator("#help").bounding_box()["y"] > board["y"]
    if name != "one":  # the second map follows the first, without lines between them
        assert page.locator(".cells").nth(1).bounding_box()["y"] < board["y"] + 844
        choose(page, "B")
        assert page.locator(".lines").is_visible()


def test_a_printed_map_has_the_light_colours_of_the_legend_and_no_grid_over_them(visit):
    light, page = visit("one"), visit("one", "#theme=dark", color_scheme="dark")
    assert pixel(page, 2, 3) != pixel(light, 2, 3)
    page.emulate_media(media="print")
    assert not is_dark(page)
    wait_for(lambda: pixel(page, 2, 3) == pixel(light, 2, 3))
    assert page.evaluate("getComputedStyle(document.querySelector('.ruled'), '::after').display") == "none"
    page.emulate_media(media="screen")
    wait_for(lambda: pixel(page, 2, 3) != pixel(light, 2, 3))


def test_two_views_in_a_notebook_are_independent(visit):
    """Each stands in a sandboxed frame without an address; one is turned dark, the other stays light."""

    def themes():
        return [frame.evaluate("document.documentElement.dataset.theme") for frame in (first, second)]

    first, second = visit("notebook", size=(1280, 1700)).frames[1:]
    assert first.locator("#help").get_attribute("open") is None
    before = themes()
    first.locator("#theme").click()
    thumb(first, 1, 2).click()
    assert [a == b for a, b in zip(before, themes(), strict=True)] == [False, True]


def counted(snapshot, right, on_key):
    """The snapshot as row 2 of 8, with so many right answers, and so many favourite keys of the only layer's heads."""
    name, H = snapshot.maps[0].name, snapshot.maps[0].weights.shape[1]
    return replace(snapshot, tally=AnswerCounts(2, 8, asked=8, right=right, keyed=8, on_key={name: [on_key] * H}))


COUNTED = [
    Trace("scaled", [counted(asked(0, 0.02, "4"), 1, 0), counted(asked(50, 0.9), 6, 7)]),
    Trace("unscaled", [counted(asked(0, 0.03, "4"), 1, 1), counted(asked(50, 0.03, "4"), 2, 1)]),
]


def test_curves_of_all_rows_move_with_the_map_and_the_page_says_which_row_it_shows(visit):
    page = visit(View(viewer_page(COUNTED, rule="typical")), "#step=0")
    captions = page.locator("#tally figcaption")
    assert "A 12.5 % B 12.5 %" in captions.nth(0).inner_text() and "A 0.0 % B 12.5 %" in captions.nth(1).inner_text()
    page.locator("#step").press("End")
    assert "A 75.0 % B 25.0 %" in captions.nth(0).inner_text() and "A 87.5 % B 12.5 %" in captions.nth(1).inner_text()
    points = page.locator("#tally polyline").evaluate_all("lines => lines.map(line => line.points.length)")
    assert points == [2, 2, 2, 2]
    assert (
        page.locator("#tally .note")
        .inner_text()
        .startswith("The map shows row 2 of the 8, counted from 0: the first row on which")
    )
    assert not visit("film").locator("#tally").is_visible()


def test_the_page_speaks_chinese_by_its_button_and_by_its_address_and_names_everything(visit):
    page = visit(View(viewer_page(COUNTED, rule="chosen")))
    page.locator("#language").click()
    assert page.locator("html").get_attribute("lang") == "zh-Hans" and "lang=zh" in address(page)
    assert "键 7 的值是什么？" in page.locator(".answer").first.inner_text()
    assert page.locator("#tally .note").inner_text() == "图中是 8 行里的第 2 行（从 0 数起）：由 row= 指定。"
    assert unnamed(page) == []
    words = page.locator("main").inner_text()
    assert not re.search(r"\b(query|weight|entropy|visible|step|layer|right)\b", words), words
    page.locator("#language").click()
    assert page.locator("html").get_attribute("lang") == "en" and "Right: " in page.locator(".answer").first.inner_text()


def test_a_wrong_answer_beside_a_found_key_is_explained_where_one_head_decides(visit):
    one = with_answers(random_snapshot(0, kinds=("self",), H=1), [answer(0.02, "4")])
    weights = one.maps[0].weights.clone()
    for weight, said in (
        (0.95, "Found the key, the answer is still wrong"),
        (0.3, "The largest weight of this head lies on a wrong key"),
    ):
        weights[0, 0, 6] = 0
        weights[0, 0, 6, 3], weights[0, 0, 6, 1] = weight, 1 - weight
        page = visit([Trace("a", [replace(one, maps=(replace(one.maps[0], weights=weights.clone()),))])])
        assert said in page.locator(".answer").inner_text()
