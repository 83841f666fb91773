"""The playground in a real browser: its numbers are those of Python, and every step, slider and language works."""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
import string
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from pages import choose, is_dark, shows_focus, unnamed, weak_texts

from minitx.analysis import attention_statistics
from minitx.analysis.viewer import playground
from minitx.nn import AttentionCall, Dense, attention_scores, attention_weights, reference_attention, scale_multiplier
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = pytest.mark.parametrize("lang", ["en", "zh"])
SIZES = {"narrow": (320, 600), "phone": (390, 844), "tablet": (820, 1180), "desk": (1280, 900)}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("play") / "play.html"
    playground().save(path)
    return path


@pytest.fixture
def play(window, file):
    """``play("scene=2")`` opens the page in English, or as the words say."""
    return lambda words="", **options: window(file.as_uri(), f"#lang=en&{words}", **options)


def number(page, name):
    """A number of scene 1, with all digits."""
    return float(page.locator(f"#row [data-id='{name}']").get_attribute("data-value"))


def typed(page, name):
    """A matrix of inputs: "k" or "v"."""
    texts = page.locator(f"#row input[data-id^='{name}-']").evaluate_all("nodes => nodes.map(node => node.value)")
    return torch.tensor([float(text) for text in texts], dtype=torch.float64).view(-1, 3)


def query(page):
    return torch.tensor([float(page.locator(f"#asks [data-id='q-{d}']").input_value()) for d in range(3)], dtype=torch.float64)


def call_of(page, visible):
    """The row that the page shows, as a call of attention; ``visible`` is a mask or None."""
    q, k, v = query(page).view(1, 1, 1, 3), typed(page, "k")[None, None], typed(page, "v")[None, None]
    return AttentionCall(q, k, v, mask=visible, scale=scale_multiplier("inv_sqrt", 3))


def assert_equals_reference(page, visible):
    call = call_of(page, visible)
    n = call.key.shape[2]
    shown = {
        name: torch.tensor([number(page, f"{name}-{j}") for j in range(n)], dtype=torch.float64) for name in ("dot", "z", "p")
    }
    shown["out"] = torch.tensor([number(page, f"out-{d}") for d in range(3)], dtype=torch.float64)
    wanted = {"dot": call.key @ query(page), "z": attention_scores(call.query, call.key, scale=call.scale)}
    wanted |= {"p": attention_weights(call), "out": reference_attention(call)}
    for name, value in wanted.items():
        torch.testing.assert_close(shown[name], value.flatten(), rtol=0, atol=1e-6)


def fill_all(page, seed):
    """Other numbers in every box, negative ones too."""
    numbers = 3 * torch.randn(100, generator=torch.Generator().manual_seed(seed))
    for box, value in zip(page.locator("#hand input[type=number]").all(), numbers, strict=False):
        box.fill(f"{value:.2f}")


# --- scene 1


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_every_number_of_the_row_equals_the_definition_under_every_mask(play, seed):
    page = play("step=7")
    if seed is not None:
        fill_all(page, seed)
    assert_equals_reference(page, None)
    choose(page, "Causal")
    for i in (0, 2, 3):
        page.locator("#query").select_option(str(i))
        assert_equals_reference(page, Dense(torch.arange(4)[None] <= i))
    page.locator("#row [data-id='seen-1']").uncheck()
    assert_equals_reference(page, Dense(torch.tensor([[True, False, True, True]])))
    for j in (0, 2, 3):
        page.locator(f"#row [data-id='seen-{j}']").uncheck()
    assert_equals_reference(page, Dense(torch.zeros(1, 4, dtype=torch.bool)))
    page.locator("#row [data-id='p-0']").click()
    assert "sees no key" in page.locator("#origin").inner_text()


def test_large_numbers_do_not_overflow(play):
    page = play("step=7")
    for box in page.locator("#hand input[type=number]").all():
        box.fill("99")
    page.locator("#row [data-id='k-1-0']").fill("-99")
    assert_equals_reference(page, None)
    assert number(page, "p-1") == 0 and math.isclose(number(page, "p-0"), 1 / 3)


def test_the_steps_go_forward_and_back_and_each_adds_its_column(play):
    page, seen = play(), []
    for step in range(1, 8):
        assert page.locator("#step-words h2").inner_text().startswith(f"Step {step} of 7")
        assert page.locator("#hand-steps [aria-current=step]").inner_text().startswith(str(step))
        assert page.locator("#formula .on").count() == 1
        seen.append(page.locator("#row thead th:visible").count())
        page.locator("#next").press("Enter")
    assert seen == [3, 4, 6, 7, 7, 8, 10]
    assert page.locator("#next").evaluate("node => node === document.activeElement")  # the last press did nothing
    page.locator("#back").press("Enter")
    assert "step=6" in page.evaluate("location.hash")
    page.locator("#hand-steps button").nth(1).click()
    assert page.locator("#row thead th:visible").count() == 4


def test_a_click_on_a_number_says_where_it_comes_from_and_marks_its_sources(play):
    page = play("step=7")
    wanted = {
        "dot-1": ("love: q·k = 1 × 0 + 2 × 1 + 0 × 1 = 2", {"q-0", "q-1", "q-2", "k-1-0", "k-1-1", "k-1-2"}),
        "z-1": ("love: z = 2 / √3 = 2 / 1.7321 = 1.1547", {"dot-1"}),
        "m-1": ("love: z = 1.1547", {"z-1", "seen-1"}),
        "e-1": ("love: exp(z − max) = exp(1.1547 − 1.7321) = exp(−0.5774) = 0.5614", {"m-1", "m-2"}),
        "sum": ("Σ = 0.3152 + 0.5614 + 1 + 0.1769 = 2.0535", {"e-0", "e-1", "e-2", "e-3"}),
        "p-1": ("love: p = 0.5614 / 2.0535 = 0.2734", {"e-1", "sum"}),
        "psum": ("Σ p = 0.1535 + 0.2734 + 0.4870 + 0.0862 = 1", {"p-0", "p-1", "p-2", "p-3"}),
        "pv-1-1": ("love: p·v = 0.2734 × 10 = 2.7338", {"p-1", "v-1-1"}),
        "out-1": ("o₂ = 0 + 2.7338 + 0 + 0.1723 = 2.9062", {"pv-0-1", "pv-1-1", "pv-2-1", "pv-3-1"}),
    }
    for name, (text, sources) in wanted.items():
        page.locator(f"#row [data-id='{name}']").press("Enter")
        assert page.locator("#origin").inner_text().replace("  ", " ").endswith(text)
        assert set(page.locator("#hand .source").evaluate_all("nodes => nodes.map(node => node.dataset.id)")) == sources
        assert page.locator("#row [aria-pressed=true]").get_attribute("data-id") == name


def test_the_readers_own_tokens_are_shown_and_a_chinese_sentence_is_cut_into_words(play):
    page = play("step=7&lang=zh")
    for text, wanted in (
        ("我喜欢深度学习", ["我", "喜欢", "深度", "学习"]),
        ("<b>a</b> b c", ["<b>a</b>", "b", "c"]),
        ("1 2 3 4 5 6", list("123456")),
    ):
        page.locator("#tokens").fill(text)
        page.locator("#tokens").press("Enter")
        assert page.locator("#row tbody th").all_inner_texts() == wanted
        assert page.locator("#query option").all_inner_texts() == wanted
        assert page.locator("#asks bdi").inner_text() == wanted[-1]
        assert_equals_reference(page, None)
    page.locator("#row [data-id='out-2']").click()
    page.locator("#reset").click()
    assert page.locator("#row tbody tr").count() == 4


def test_what_cannot_be_read_is_said_and_the_last_good_values_count(play):
    page = play("step=7")
    before = number(page, "out-0")
    for box, bad, good in (
        (page.locator("#row [data-id='v-0-0']"), "100", "3"),
        (page.locator("#row [data-id='v-0-0']"), "", "3"),
    ):
        box.fill(bad)
        assert "between −99 and 99" in page.locator("#problem").inner_text() and number(page, "out-0") == before
        box.fill(good)
        assert page.locator("#problem").is_hidden() and number(page, "out-0") > before
        box.fill("1")
    for bad in ("one", "a b c d e f g", " "):
        page.locator("#tokens").fill(bad)
        page.locator("#tokens").press("Enter")
        assert "Between 2 and 6" in page.locator("#problem").inner_text()
        assert page.locator("#row tbody tr").count() == 4
    page.locator("#row [data-id='v-0-0']").fill("2")
    assert page.locator("#problem").inner_text().startswith("Between 2 and 6")  # the tokens are still bad
    page.locator("#row [data-id='v-0-0']").fill("100")
    page.locator("#tokens").fill("I love deep learning")
    page.locator("#tokens").press("Enter")
    assert page.locator("#problem").inner_text().startswith("A number must lie")
    page.locator("#reset").click()
    assert page.locator("#problem").is_hidden() and page.locator("#tokens").input_value() == "I love deep learning"


# --- scene 2


def statistics(page):
    """What the table shows once all rows are counted: {factor: {statistic: value}}."""
    page.wait_for_selector("#statistics[data-rows='6400']")
    found = {}
    for of in page.locator("#statistics td").evaluate_all("nodes => nodes.map(node => ({...node.dataset}))"):
        found.setdefault(of["factor"], {})[of["name"]] = float(of["value"])
    return found


@pytest.fixture(scope="module")
def why():
    sys.path.insert(0, str(ROOT / "examples"))  # where Python looks when it runs the script
    try:
        return importlib.import_module("why_scale")
    finally:
        sys.path.pop(0)


STEP_0 = ("entropy", "max_weight", "saturation_90", "saturation_99", "jacobian_l1")
LOW_PRECISION = {
    "largest logit": "max_logit",
    "fp16: rows with inf or NaN": "overflow",
    "minus the maximum": "repaired",
    "weights that are 0": "zeros",
    "bf16: largest rounding": "rounding",
    "weight moved, worst row": "moved",
}


@pytest.mark.parametrize("width", [8, 64, 512])
def test_the_numbers_equal_those_of_why_scale(play, why, width):
    found = statistics(play(f"scene=2&width={width.bit_length() - 1}"))
    for scale in why.SCALES:
        wanted = why.step_0(64, width, scale)
        for name in STEP_0:
            assert found[scale][name] == pytest.approx(wanted[name], rel=1e-4, abs=2e-4)
        reaching = wanted["jacobian_l1"] * scale_multiplier(scale, width)
        assert found[scale]["scaled_jacobian_l1"] == pytest.approx(reaching, rel=1e-4)
    for scale in why.SCALES[:2]:
        for name, value in why.low_precision(width, scale).items():
            assert found[scale][LOW_PRECISION[name]] == pytest.approx(value, rel=2e-3, abs=2e-4), name


def test_another_number_of_keys_seed_factor_and_a_mask_equal_pythons_statistics(play, why):
    found = statistics(play("scene=2&width=4&keys=4&seed=3&half=half&factor=own&own=-0.75"))
    q, k = why.normal(6, 1, 200, 32, 16), why.normal(7, 1, 200, 16, 16)
    half = Dense((torch.arange(16) < 8).expand(32, 16))
    wanted = attention_statistics(AttentionCall(q, k, k, mask=half, scale=2**-0.75))
    for name in (*STEP_0, "row_std"):
        assert found["own"][name] == pytest.approx(wanted[name].mean().item(), rel=1e-4, abs=2e-4)
    assert found["own"]["max_logit"] == pytest.approx(wanted["max_logit"].max().item(), rel=1e-5)


def test_each_slider_and_switch_changes_what_is_shown(play):
    page = play("scene=2")
    before = statistics(page)
    for slider, key, text in (("head-dim", "End", "1,024"), ("num-keys", "ArrowLeft", "32")):
        page.locator(f"#{slider}").press(key)
        assert page.locator(f"output[for={slider}]").inner_text() == text
        assert page.locator(f"#{slider}").evaluate("node => node.ariaValueText") == text
        now = statistics(page)
        assert now["unscaled"] != before["unscaled"]
        before = now
    assert "below" in page.locator("#verdict").inner_text()
    pictures = page.locator("#logits").inner_html(), page.locator("#weights").inner_html()
    choose(page, "1")
    assert "beyond" in page.locator("#verdict").inner_text()
    assert page.locator("#statistics thead .chosen").inner_text() == "1"
    after = page.locator("#logits").inner_html(), page.locator("#weights").inner_html()
    assert pictures[0] != after[0] and pictures[1] != after[1]
    assert page.locator("#own").is_hidden()
    choose(page, "any")
    page.locator("#own").press("Home")
    assert page.locator("#statistics thead .chosen").inner_text() == "yours: 9.8e−4"
    assert statistics(page)["own"]["max_weight"] < 0.04
    choose(page, "Hides half of the keys")
    assert "16 visible keys" in page.locator("#statistics caption").inner_text()
    assert page.locator("#weights .hidden-keys").count() == 1
    page.locator("#seed").fill("7")
    assert "seed=7" in page.evaluate("location.hash")
    page.locator("#seed").fill("-1")
    assert "seed=7" in page.evaluate("location.hash") and page.locator("#seed").get_attribute("aria-invalid") == "true"


def test_the_histogram_counts_the_logits(play, why):
    page = play("scene=2&width=6&factor=unscaled")
    statistics(page)
    z = why.normal(0, 200, 32, 64)[:8] @ why.normal(1, 200, 64, 64)[:8].mT
    bins = torch.histc(z, 49, -12, 12)
    heights = page.locator("#logits .bar").evaluate_all("nodes => nodes.map(node => Number(node.getAttribute('height')))")
    torch.testing.assert_close(torch.tensor(heights) / max(heights), bins / bins.max(), rtol=0, atol=0.005)
    left, right = page.locator("#logits .outside").all_text_contents()
    assert (left, right) == (f"← {100 * (z < -12).double().mean():.2f} %", f"{100 * (z > 12).double().mean():.2f} % →")


# --- scene 3


@pytest.fixture(scope="module")
def record():
    return json.loads((ROOT / "minitx" / "analysis" / "viewer" / "training.json").read_text(encoding="utf-8"))


LEVELS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
FILLS = "nodes => nodes.map(node => getComputedStyle(node).fill)"
WRONG_GUESS = {0: 1, 1: 2, 2: 0}


def means(counts):
    """Mean accuracy of the last eight steps at each step."""
    return [sum(counts[max(0, end - 8) : end]) / 64 / min(8, end) for end in range(1, len(counts) + 1)]


def shown_numbers(page):
    rows = page.locator("#numbers tbody tr").all()
    return {row.get_attribute("data-name"): row.locator("td").all_inner_texts() for row in rows}


def parsed(text):
    return float(text.replace(",", "").replace("−", "-").removesuffix(" %"))


def assert_shows(page, runs, look, step):
    """Maps, numbers and curves are those of the record."""
    for i, run in enumerate(runs):
        drawn = page.locator(f"#map-{run['arm']} .weight").evaluate_all(FILLS)
        letters = run["weights"][look]
        assert len(drawn) == len(letters) == 16 * 17
        colours = dict(zip(letters, drawn, strict=True))
        assert [colours[letter] for letter in letters] == drawn and colours.get("A") in (None, "rgb(255, 255, 255)")
        signs = page.locator(f"#map-{run['arm']} text").all_text_contents()
        assert ["01"[sign == "✓"] for sign in signs] == list(run["right"][look])
        label = page.locator(f"#map-{run['arm']}").evaluate("node => node.ariaLabel")
        levels = [LEVELS.index(letter) for letter in letters]
        found = sum(max(levels[17 * q : 17 * q + 17]) == levels[17 * q + q] for q in range(16))
        assert [int(n) for n in re.findall(r"\d+", label)] == [step, found, 16, run["right"][look].count("1"), 16]
        numbers = shown_numbers(page)
        accuracy = means(run["accuracy"])
        steps = f", mean of {min(8, step + 1)} steps" if step else ""
        assert page.locator("#numbers [data-name=accuracy] th").inner_text() == f"accuracy{steps}"
        assert parsed(numbers["accuracy"][i]) == pytest.approx(100 * accuracy[step], abs=0.051)
        assert parsed(numbers["loss"][i]) == pytest.approx(run["loss"][step], abs=5.1e-5)
        assert parsed(numbers["largest"][i]) == pytest.approx(run["largest"][look], rel=6e-3)
        for curve, values, top in (
            ("accuracy", accuracy, 1),
            ("loss", run["loss"], max(3.5, *runs[0]["loss"], *runs[1]["loss"])),
        ):
            points = page.locator(f"#{curve} .{run['arm']}.curve").get_attribute("points").split(" ")
            heights = [164 - float(point.split(",")[1]) for point in points]
            assert len(points) == step + 1
            assert heights == pytest.approx([152 * value / top for value in values[: step + 1]], abs=0.06)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_reader_predicts_each_training_and_then_sees_what_was_recorded(play, record, optimizer):
    page = play("scene=3")
    choose(page, {"adamw": "AdamW", "sgd": "SGD"}[optimizer])
    for rate in range(3):
        page.locator("#rate label").nth(rate).click()
        runs = [run for run in record["runs"] if run["optimizer"] == optimizer][2 * rate : 2 * rate + 2]
        assert page.locator("#play").is_disabled() and page.locator("#at").is_disabled()
        assert_shows(page, runs, 0, 0)
        assert page.locator("#told").inner_text().startswith("First say what happens")
        happened = sum(min(means(run["accuracy"])[7:]) < 0.9 for run in runs)
        assert happened == rate
        guess = happened if rate != 1 else WRONG_GUESS[happened]
        page.locator("#predict label").nth(guess).click()
        for look in (12, 40):
            page.locator("#at").fill(str(look))
            assert_shows(page, runs, look, record["looks"][look])
            assert "framed" in page.locator("#told").inner_text()
        assert page.locator("#predict input").first.is_disabled()
        page.locator("#at").press("End")
        assert_shows(page, runs, len(record["looks"]) - 1, 200)
        told = page.locator("#told").inner_text()
        assert told.startswith("✓ Right." if guess == happened else "✗ Not so.")
        for run in runs:
            lowest = f"{100 * min(means(run['accuracy'])[7:]):.1f}".removesuffix(".0")
            assert f"{lowest} %" in told
    assert page.locator("#seen tbody tr.chosen th").inner_text().startswith({"adamw": "AdamW", "sgd": "SGD"}[optimizer])
    texts = page.locator("#seen tbody td").all_inner_texts()
    mine = texts[:6] if optimizer == "adamw" else texts[6:]
    assert [text[0] for text in mine] == list("✓✓✓✗✗✗") and texts.count("?") == 6


def test_play_runs_to_the_end_stops_there_and_can_be_paused_and_run_again(play):
    page = play("scene=3&optimizer=sgd&rate=1")
    page.locator("#predict label").nth(1).click()
    page.locator("#play").press("Enter")
    assert page.locator("#play").inner_text() == "Pause"
    wait_for(lambda: int(page.locator("#at").input_value()) >= 3)
    page.locator("#play").press("Enter")
    stopped = page.locator("#at").input_value()
    assert page.locator("#play").inner_text() == "Play"
    page.locator("#tab-width").click()
    page.locator("#tab-training").click()
    assert page.locator("#at").input_value() == stopped
    page.locator("#play").press("Enter")
    wait_for(lambda: page.locator("#told").inner_text().startswith("✓ Right."))
    assert page.locator("#at").input_value() == "52" and page.locator("#play").inner_text() == "Again"
    page.locator("#play").press("Enter")
    assert int(page.locator("#at").input_value()) < 52
    assert page.locator("#told").inner_text().startswith("✓ Right.")  # it was seen
    page.locator("#tab-hand").click()
    page.locator("#tab-training").click()
    assert page.locator("#play").inner_text() == "Play"  # it does not run where nobody looks


def test_a_map_has_other_colours_in_the_dark(play):
    page = play("scene=3&optimizer=sgd&rate=1&at=20")
    light = page.locator("#map-unscaled .weight").evaluate_all(FILLS)
    page.locator("#theme").click()
    dark = page.locator("#map-unscaled .weight").evaluate_all(FILLS)
    assert "rgb(255, 255, 255)" in light and "rgb(21, 23, 27)" in dark and "rgb(255, 255, 255)" not in dark
    page.emulate_media(media="print")
    assert page.locator("#map-unscaled .weight").evaluate_all(FILLS) == light


def test_the_numbers_in_the_words_of_scene_3_are_those_of_the_record(play, record):
    """What is written out in play_words.js, in both languages."""
    ratios = {name: {row[0]: row[3] for row in rows} for name, rows in record["limits"].items()}
    for lang in ("en", "zh"):
        page = play(f"scene=3&lang={lang}")
        table = page.locator("#limits tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.children].map(cell => Number(cell.textContent)))"
        )
        wanted = [[a[0], *a[1:4], *s[1:4]] for a, s in zip(record["limits"]["adamw"], record["limits"]["sgd"], strict=True)]
        assert table == wanted
        note = page.locator("[data-text=limits_note]").text_content()
        assert str(ratios["adamw"][8]) in note and str(ratios["sgd"][8]) in note
        why = page.locator("[data-text=why_text]").text_content()
        assert f"{128**0.5:.0f}" in why and f"{128**0.25:.1f}" in why
        first, second = page.locator(".question:visible legend").all_inner_texts()
        assert f"{record['runs'][0]['largest'][0]:.0f}" in first
        assert f"{ratios['adamw'][128]:.0f}" in second


# --- scene 4: the traps


def attention_by(lines):
    """The function that the lines of a trap define."""
    names = {"torch": torch, "F": torch.nn.functional}
    exec("\n".join(lines), names)
    return names[lines[0].split("(")[0].removeprefix("def ")]


def calls_of_traps():
    """Of each trap: the arguments after which its code goes wrong, what comes out of it, and the right answer."""
    q, k, v = torch.randn(3, 1, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    scale = scale_multiplier("inv_sqrt", 4)
    hidden = torch.tensor([False, False, True])

    def exactly(q, k, v, visible=None):
        call = AttentionCall(q.double(), k.double(), v.double(), mask=None if visible is None else Dense(visible), scale=scale)
        return reference_attention(call).to(q.dtype)

    some = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    no_last, large = torch.tensor([[True, True, False]] * 3), v.clone()
    large[:, :, 2] = 1e8  # a hidden value
    low = torch.full((1, 1, 3, 4), -10.0)
    layer = torch.nn.MultiheadAttention(4, 1, batch_first=True)
    x, real = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([[1, 1, 0]])
    return [
        ((q.half(), k.half(), v.half(), hidden), exactly(q.half(), k.half(), v.half(), ~hidden.expand(3, 3))),
        ((-low / 10 * 4, low, v), exactly(-low / 10 * 4, low, v)),
        ((q, k, v, some), exactly(q, k, v, some)),
        ((q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], k[:, :, :2], v[:, :, :2]), exactly(q[:, :, 2:], k, v)),
        ((layer, x, real), layer(x[:, :2], x[:, :2], x[:, :2])[0]),
        ((q, k, large, no_last), exactly(q, k, large, no_last)),
        ((q, k, v[..., :1]), exactly(q, k, v[..., :1])),
        ((q, k, v, some), exactly(q, k, v, some)),
        ((q[0], 2), torch.stack(q[0].chunk(2, dim=-1), dim=1)),
    ]


def equal(ours, wanted):
    return ours.shape == wanted.shape and torch.allclose(ours.double(), wanted.double(), rtol=0, atol=2e-3)


@LANGUAGES
def test_each_trap_goes_wrong_by_the_line_that_is_to_be_found_and_by_no_other(play, lang):
    page = play(f"scene=4&lang={lang}")
    traps = page.locator(".trap").all()
    assert len(traps) == 9
    for trap, (arguments, wanted) in zip(traps, calls_of_traps(), strict=True):
        lines = trap.locator(".code code").all_text_contents()
        assert not equal(attention_by(lines)(*arguments)[..., :2, :], wanted[..., :2, :])
        buttons = trap.locator(".code button")
        answer = trap.locator(".answer")
        for i in range(len(lines)):
            buttons.nth(i).press("Enter")
            if trap.locator("pre").count():
                break
            assert answer.inner_text().startswith("✗") and str(i + 1) in answer.inner_text()
            assert buttons.nth(i).evaluate("node => node.ariaLabel").startswith("✗")
        found = i
        assert answer.inner_text().startswith("✓") and found > 0
        mended = [*lines[:found], trap.locator("pre").text_content(), *lines[found + 1 :]]
        ours = attention_by(mended)(*arguments)
        rows = wanted.shape[-2]
        assert equal(ours[..., :rows, :], wanted)
        buttons.first.press("Enter")  # nothing happens any more
        assert answer.inner_text().startswith("✓")
        page.locator("#language").click()  # the answer stays, in the other language
        assert answer.inner_text().startswith("✓")
        page.locator("#language").click()


def test_why_a_training_falls_apart_is_hidden_until_the_reader_has_predicted_and_seen_one(play):
    page = play("scene=3")
    assert not page.locator("#why").is_visible()
    page.locator("#predict label").nth(1).click()
    assert not page.locator("#why").is_visible()
    page.locator("#at").focus()
    page.keyboard.press("End")
    assert page.locator("#why p").first.is_visible()


def test_the_gradient_of_the_values_is_nan_although_the_loss_ignores_the_row_and_the_mended_line_has_it_right(play):
    page = play("scene=4")
    trap = page.locator(".trap").nth(2)
    lines = trap.locator(".code code").all_text_contents()
    trap.locator(".code button").nth(2).click()
    mended = [*lines[:2], trap.locator("pre").text_content(), lines[3]]
    for code, is_right in ((lines, False), (mended, True)):
        q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 1, 2, 4))
        out = attention_by(code)(q, k, v, torch.tensor([[True, True], [False, False]]))
        gradients = torch.autograd.grad(out[..., 0, :].sum(), (q, k, v))
        assert all(bool(g.isfinite().all()) for g in gradients) == is_right


# --- predict, then look


@pytest.mark.parametrize(
    ("scene", "question", "right", "number"),
    [(1, 0, 1, "0.6917"), (1, 1, 2, "1.9493"), (2, 0, 2, "0.925"), (2, 1, 1, "0.106"), (3, 0, 2, "244"), (3, 1, 1, "2.6")],
)
def test_a_prediction_is_judged_explained_and_shown(play, scene, question, right, number):
    for picked, lang in ((right, "en"), ((right + 1) % 3, "zh")):
        page = play(f"scene={scene}&lang={lang}")
        form = page.locator(".question:visible").nth(question)
        form.locator("button").click()
        assert form.locator(".answer").inner_text() in ("Pick an answer first.", "请先选一个答案。")
        form.locator("input").nth(picked).check()
        form.locator("button").click()
        answer = form.locator(".answer").inner_text()
        assert answer.startswith("✓" if picked == right else "✗") and number in answer
        if scene == 1:
            assert "step=6" in page.evaluate("location.hash")
        elif scene == 3:
            assert question or "optimizer=sgd&rate=1&at=20" in page.evaluate("location.hash")
            assert page.locator("#limits").is_visible() == bool(question)
        else:
            assert statistics(page)["unscaled"]["max_weight"] == pytest.approx(0.925, abs=5e-4)
            assert page.locator("#statistics thead .chosen").inner_text() == "1"
        page.locator("#language").click()  # the answer stays, in the other language
        again = page.locator(".question:visible").nth(question).locator(".answer").inner_text()
        assert again[0] == answer[0] and again != answer and number in again


def look(page, question, option):
    form = page.locator("#hand .question").nth(question)
    form.locator("input").nth(option).check()
    form.locator("button").click()
    return form.locator(".answer").inner_text()


def test_a_large_query_is_doubled_and_later_numbers_of_the_reader_stay(play):
    page = play("step=7")
    page.locator("#asks [data-id='q-0']").fill("60")
    look(page, 0, 1)
    assert query(page).tolist() == [120, 4, 0]
    page.locator("#asks [data-id='q-0']").fill("-3")
    page.locator("#row [data-id='v-0-0']").focus()
    look(page, 1, 2)
    assert query(page).tolist() == [-3, 4, 0]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_largest_weight_of_1_gives_no_infinite_factor(play, lang):
    page = play(f"step=7&lang={lang}")
    for name in ("q-1", "k-1-1"):
        page.locator(f"#hand [data-id='{name}']").fill("90")
    said = look(page, 1, 2)
    assert "Infinity" not in said and "(1 − 1)" not in said and {"en": "a huge one", "zh": "非常大"}[lang] in said


# --- language, colours, keyboard, width


def test_one_switch_changes_the_language_of_everything(play, window, file):
    assert window(file.as_uri(), locale="zh-CN").evaluate("document.documentElement.lang") == "zh-Hans"
    for scene in (1, 2, 3, 4):
        page = play(f"scene={scene}&step=3")
        texts = "[...document.querySelectorAll('[data-text]')].map(node => [node.dataset.text, node.textContent])"
        english, title = page.evaluate(texts), page.title()
        page.locator("#language").click()
        chinese = page.evaluate(texts)
        alike = {key for (key, a), (_, b) in zip(english, chinese, strict=True) if a == b}
        assert alike == {"own_factor"} and page.title() != title
        assert page.evaluate("document.documentElement.lang") == "zh-Hans" and "lang=zh" in page.evaluate("location.hash")
        if scene == 1:
            assert page.locator("#row tbody th").all_inner_texts() == ["我", "喜欢", "深度", "学习"]
        for lang in ("zh", "en"):
            body = page.locator("body").inner_text()
            body = body.replace("inf or NaN", "").replace("inf 或 NaN", "")
            assert not re.search(r"undefined|NaN|\[object", body)
            assert bool(re.search(r"[\u4e00-\u9fff]", body.replace("中文", ""))) == (lang == "zh")
            page.locator("#language").click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "words", ["scene=1&step=7", "scene=2&factor=unscaled", "scene=3&optimizer=sgd&rate=1&at=200", "scene=4"]
)
def test_every_text_stands_out_from_its_ground_by_wcag_aa(play, scheme, words):
    page = play(words, color_scheme="light", reduced_motion="reduce")
    if scheme == "dark":
        page.locator("#theme").click()
    assert is_dark(page) == (scheme == "dark")
    if "scene=2" in words:
        statistics(page)
    if "scene=4" in words:
        page.locator(".code button").first.click()
        page.locator(".code button").nth(2).click()
        page.locator(".code button").nth(6).click()
    else:
        page.locator(".question:visible input").first.check()
        page.locator(".question:visible button").first.click()
    for summary in page.locator("summary:visible").all():
        summary.click()
    assert weak_texts(page) == []


def test_the_page_is_used_with_the_keyboard_alone(play):
    page = play()
    page.keyboard.press("Tab")
    for _ in range(3):
        if page.evaluate("document.activeElement.role") == "tab":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.locator("#width").is_visible() and page.locator("#hand").is_hidden()
    page.keyboard.press("End")
    assert page.locator("#traps").is_visible()
    page.keyboard.press("Home")
    assert page.locator("#hand").is_visible()
    for scene in (1, 2, 3, 4):
        page = play(f"scene={scene}&step=7&optimizer=sgd&rate=0&at=2")
        assert unnamed(page) == []
        reached = set()
        for _ in range(90):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement === document.body"):
                break
            assert shows_focus(page)
            reached.add(
                page.evaluate("document.activeElement.dataset.id ?? (document.activeElement.id || document.activeElement.name)")
            )
        wanted = {
            1: {"q-0", "k-3-2", "v-3-2", "seen-0", "out-2", "next", "tokens", "query"},
            2: {"head-dim", "num-keys", "seed"},
            3: {"optimizer", "rate", "play", "at", "training-0", "training-1"},
            4: {"line-0-0", "line-4-3"},
        }
        assert wanted[scene] <= reached


@LANGUAGES
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_cut_or_scrolled_sideways_at_any_width(play, lang, size):
    def assert_fits():
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
        wide = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
        assert size == "narrow" or page.evaluate(wide) == 0  # on the narrowest, a table may be scrolled by itself

    page = play(f"lang={lang}", size=SIZES[size])
    for _ in range(7):
        assert_fits()
        page.locator("#next").press("Enter")
    assert "step=7" in page.evaluate("location.hash")
    page.locator("#tab-width").click()
    assert_fits()
    page.locator("#factor label").last.click()
    assert page.locator("#own").is_visible()
    assert_fits()
    page.locator("#tab-training").click()
    page.locator("#optimizer label").last.click()
    page.locator("#predict label").last.click()
    page.locator("#at").press("End")
    for summary in page.locator("#training summary").all():
        summary.click()
    assert_fits()
    page.locator("#tab-traps").click()
    for button in page.locator(".code button").all():
        button.press("Enter")
    assert_fits()


def test_the_first_screen_says_what_to_do_and_shows_numbers(play):
    for size, wanted in (("desk", "#origin"), ("phone", "#row tbody tr:last-child")):
        page = play(size=SIZES[size])
        for selector in ("h1", "#next", "#step-words", wanted):
            box = page.locator(selector).bounding_box()
            assert box["y"] + box["height"] <= SIZES[size][1] * (1 if size == "desk" else 1.2), (size, selector)


# --- the address, the printer, and where the page is opened from


def test_an_address_opens_the_same_view_again_and_a_broken_one_opens_some_view(play, window, file):
    page = play("scene=2")
    page.locator("#head-dim").press("ArrowRight")
    choose(page, "any")
    choose(page, "Hides half of the keys")
    page.locator("#theme").click()
    address = page.evaluate("location.hash")
    again = window(file.as_uri(), address)
    assert again.evaluate("location.hash") == address
    assert again.locator("#head-dim").input_value() == "7" and again.locator("#own").is_visible()
    assert again.evaluate("document.documentElement.dataset.theme") == "dark"
    assert statistics(again) == statistics(page)
    page = play("scene=3")
    choose(page, "SGD")
    page.locator("#rate label").nth(2).click()
    page.locator("#predict label").nth(0).click()
    page.locator("#at").fill("7")
    again = window(file.as_uri(), page.evaluate("location.hash"))
    assert again.locator("#numbers").inner_text() == page.locator("#numbers").inner_text()
    assert again.locator("#at").input_value() == "7" and again.locator("#predict input").first.is_disabled()
    seen = window(file.as_uri(), "#lang=en&scene=3&optimizer=sgd&rate=1&at=200")
    assert seen.locator("#told").inner_text().startswith("Only the copy with 1/√d_k holds")
    assert seen.locator("#seen .chosen td").all_inner_texts()[0].startswith("✓ holds")
    broken = window(
        file.as_uri(),
        "#lang=fr&scene=9&step=0&width=1e9&keys=1&factor=&own=0.1&half=x&seed=-1&theme=red&x=1&optimizer=lion&rate=3&at=1",
    )
    assert broken.locator("#hand").is_visible() and broken.locator("#step-words h2").inner_text() != ""
    assert broken.evaluate("location.hash") == "#lang=en&scene=1&step=1"


@pytest.mark.parametrize(("scene", "tables"), [(1, 1), (2, 1), (3, 2), (4, 0)])
def test_a_printed_page_is_light_and_has_no_controls(play, scene, tables):
    page = play(f"scene={scene}&step=7&theme=dark")
    assert is_dark(page)
    page.emulate_media(media="print")
    assert not is_dark(page)
    assert page.locator(".controls:visible, #theme:visible, #language:visible, #next:visible").count() == 0
    assert page.locator("table:visible").count() == tables
    assert page.pdf().startswith(b"%PDF")


def test_the_first_page_of_the_site_leads_to_the_others(window, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.html").write_text(
        "<!DOCTYPE html><link rel=icon href=data:,><title>The pages</title>", encoding="utf-8"
    )
    playground(pages="docs/index.html").save(tmp_path / "index.html")
    for lang, text in (("en", "The pages of minitx →"), ("zh", "minitx 的文档（英文）→")):
        page = window(tmp_path.as_uri() + "/", f"index.html#lang={lang}", size=(390, 844))
        assert page.locator(".pages").inner_text() == text
        page.emulate_media(media="print")
        assert page.locator(".pages").is_hidden()
        page.emulate_media(media="screen")
        page.locator(".pages").click()
        wait_for(lambda page=page: page.title() == "The pages")


def test_the_initial_weights_that_the_words_of_scene_2_name_give_the_logits_that_they_say(play):
    """The standard deviation of unscaled logits is √d_k · width · σ², with σ that of W_Q's and W_K's numbers."""
    for lang in ("en", "zh"):
        said = play(f"scene=2&lang={lang}").locator("[data-text=width_model]").inner_text()
        assert f"{128**0.5 * 128 * 0.02**2:.1f}" in said and "0.02" in said


def test_the_page_works_from_a_server_and_in_a_notebook(window, file, tmp_path):
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *args: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=file.parent))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page = window(f"http://127.0.0.1:{server.server_port}/play.html", "#step=7")
        assert_equals_reference(page, None)
    finally:
        server.shutdown()
        server.server_close()
    (tmp_path / "notebook.html").write_text(playground()._repr_html_(), encoding="utf-8")
    frame = window((tmp_path / "notebook.html").as_uri()).frames[1]
    frame.locator("#next").click()
    assert frame.locator("#hand-steps [aria-current=step]").inner_text().startswith("2")
    frame.locator("#tab-width").click()
    frame.wait_for_selector("#statistics[data-rows='6400']")
    frame.locator("#tab-training").click()
    frame.locator("#predict label").first.click()
    frame.locator("#at").press("End")
    assert frame.locator("#told").inner_text().startswith("✓ Right.")
    assert len(repr(playground())) < 200
