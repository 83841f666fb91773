"""The viewer's page as a text: what it holds, what it asks for (nothing), and what it refuses."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import SOURCE, data_of, random_snapshot, weights_of
from torch import nn

from minitx.analysis import intervene, take_snapshot, viewer
from minitx.analysis.viewer import Trace, playground, view, viewer_page
from minitx.check.mutants import MUTANTS
from minitx.config import TransformerConfig
from minitx.nn import Block, Encoder, FeedForward, MultiHeadAttention
from tests.analysis.models import SIZES, model_of

HALF_A_STEP = 0.5 / 65534


def frame_of(page: str) -> str:
    """A page without what was handed to it."""
    return re.sub(r'(type="application/json" id="[\w-]+">).*?(</script>)', r"\1\2", page, flags=re.DOTALL)


class Elements(HTMLParser):
    """Names and attributes of every element, and comments, as a browser would find them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_comment(self, data):
        self.found.append(("comment", {"data": data}))


@pytest.fixture(scope="module")
def traces():
    return [Trace("scaled", [random_snapshot(1, 5), random_snapshot(2, 60)]), Trace("plain", [random_snapshot(3, 60)])]


@pytest.fixture(scope="module")
def page(traces):
    return viewer_page(traces)


LARGEST = {"viewer": 110_000, "playground": 130_000}
"""Bytes of a page without the data that it shows."""


@pytest.fixture(params=LARGEST)
def kind(request):
    return request.param


@pytest.fixture
def either(kind, page):
    return page if kind == "viewer" else playground().page


def test_the_page_refers_to_nothing_outside_of_itself_and_is_small(kind, either):
    frame = frame_of(either).replace("http://www.w3.org/2000/svg", "")  # a name, which nothing fetches
    assert not re.search(r"https?:|[\"'(=]\s*//|url\(|@import|fetch\(|XMLHttpRequest|WebSocket|import\(|sendBeacon", frame)
    outward = {"src", "srcset", "href", "action", "data", "poster"}
    assert {v for _, attrs in Elements(either).found for k, v in attrs.items() if k in outward} == {"data:,"}
    assert 20_000 < len(frame.encode()) < LARGEST[kind]


def test_a_page_to_play_with_has_one_link_if_it_is_given_an_address_and_none_otherwise():
    address = '../a b/index.html"><script>alert(1)</script>'
    linked, alone = (Elements(one.page).found for one in (playground(pages=address), playground()))
    assert [attrs["href"] for tag, attrs in linked if tag == "a"] == [address]
    assert [one for one in linked if one[0] != "a"] == alone and all(tag != "a" for tag, _ in alone)


def test_the_policy_allows_this_style_and_this_script_alone(either):
    policy = next(attrs["content"] for _, attrs in Elements(either).found if "http-equiv" in attrs)
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    assert allowed["default-src"] == "'none'"
    for part, text in (("style-src", r"<style>(.*?)</style>"), ("script-src", r'<script type="module">(.*?)</script>')):
        (content,) = re.findall(text, either, re.DOTALL)
        assert allowed[part] == f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def test_weights_and_masks_arrive_as_they_were_up_to_half_a_step(traces, page):
    data = data_of(page)
    for trace, given in enumerate(traces):
        for number, snapshot in enumerate(given.snapshots):
            shown = data["traces"][trace]["snapshots"][number]
            assert shown["step"] == snapshot.step
            for i, layer in enumerate(snapshot.maps):
                weights, visible = weights_of(data, trace, number, i)
                assert np.array_equal(visible, layer.visible[0].numpy())
                assert np.abs(weights - layer.weights[0].double().numpy()).max() <= HALF_A_STEP
                for name, wanted in (("entropy", layer.entropy()), ("max_logit", layer.max_logit)):
                    got = np.frombuffer(base64.b64decode(shown["layers"][i][name]), "<f4").reshape(wanted[0].shape)
                    assert np.allclose(got, wanted[0].numpy(), equal_nan=True, atol=1e-6)


def test_weights_beyond_0_and_1_arrive_as_they_are_and_no_number_as_nan():
    one = random_snapshot(1, kinds=("self",), H=1)
    given = one.maps[0].weights.clone()
    given[0, 0, 0, :4] = torch.tensor([1.7, -0.5, torch.nan, torch.inf])
    shown, _ = weights_of(
        data_of(viewer_page([Trace("a", [replace(one, maps=(replace(one.maps[0], weights=given),))])])), 0, 0, 0
    )
    wanted = given[0].double().masked_fill(given[0].isinf(), torch.nan).numpy()
    assert np.allclose(shown, wanted, equal_nan=True, atol=2.2 * HALF_A_STEP)


EVIL = ["</script><script>alert(1)</script>", "</SCRIPT ><img src=x onerror=alert(1)>", '" onmouseover="alert(1)',
        "' autofocus onfocus='alert(1)", "--><svg onload=alert(1)>", "]]><script>alert(1)</script>", "<!--<script>", "{{script}}",
        "</title></style></textarea></noscript>", "&lt;script&gt;", "\u2028\u2029alert(1)", '"}]</script>', "\\u003c/script>",
        "\0", "\ud800", "{{style}}"]  # fmt: skip


@pytest.mark.parametrize("text", EVIL, ids=range(len(EVIL)))
def test_the_page_has_no_element_or_attribute_but_those_of_its_template(text):
    def page(word: str) -> str:
        tokens = {"input_ids": [[word, "b", word]]}
        snapshots = [random_snapshot(1, step, kinds=("self",), tokens=tokens, title=word) for step in (1, 2)]
        return viewer_page([Trace(word, snapshots), Trace(f"{word}2", snapshots)], title=word)

    evil, plain = Elements(page(text)), Elements(page("a"))
    assert evil.found == plain.found
    assert page(text).count("</script") == page("a").count("</script")
    data = data_of(page(text))
    assert data["tokens"]["input_ids"] == [text, "b", text]
    assert [trace["name"] for trace in data["traces"]] == [text, f"{text}2"]
    assert page(text).encode()
    assert "\u2028" not in page(text).partition("</title>")[2].partition('id="data">')[2]


def test_what_cannot_be_shown_together_is_refused():
    one, two_rows = [random_snapshot(1)], take_snapshot(model_of(), {"input_ids": torch.tensor([[1, 2], [5, 3]])})
    other_tokens = [random_snapshot(1, tokens={"input_ids": [[*SOURCE[:-1], "x"]]})]
    for call, message in (
        (lambda: viewer_page([Trace("a", one)] * 3), "one model, or two to compare, got 3"),
        (lambda: viewer_page([Trace("a", [random_snapshot(1, 5)] * 2)]), r"increasing steps, got \[5, 5\]"),
        (lambda: viewer_page([Trace("a", one), Trace("b", [random_snapshot(1, H=2)])]), "'b' has other layers"),
        (
            lambda: viewer_page([Trace("a", one), Trace("b", other_tokens)]),
            r"'b' has other tokens: input_ids\[6\] is 'x' against 'שלום'",
        ),
        (lambda: viewer_page([Trace("a", [two_rows])]), r"2 rows: choose one with sentence\(row\)"),
        (lambda: view(model_of(), "abc"), "tokenizer="),
        (lambda: view(model_of()), "needs inputs"),
        (lambda: view(torch.ones(2, 2), torch.tensor([1, 2])), "is a Tensor, and only a module takes inputs; .*tokens="),
        (lambda: view(torch.ones(3)), r"weights must be \(B, H, L, S\), .*, got \(3,\)"),
        (lambda: view(torch.tensor([[0.3, -2.0]])), r"between 0 and 1, got -2 to 0\.3: apply softmax"),
        (lambda: view(torch.ones(2, 2), knock_out=True), "knock_out=True needs a model, and model is a Tensor"),
        (lambda: view(encoder_of(), torch.tensor([1, 2]), knock_out=True), "gives no answer on this input"),
        (lambda: view("model.ckpt"), r"view takes a model, .*, got 'model.ckpt' \(str\)"),
        (lambda: view(torch.ones(2, 2), tokens=["a", "b"]), r"tokens must be a dict .*such as {\"query\": "),
        (lambda: view(MultiHeadAttention(12, 3).core, torch.ones(1, 2, 12)), "core of an attention layer and takes no x"),
        (lambda: view(model_of(attention="linear"), torch.tensor([1])), "LinearAttention: it computes no weights over keys"),
        (lambda: view(nn.MultiheadAttention(12, 3), torch.ones(1, 2, 12)), "no attention of minitx"),
        (lambda: view([torch.ones(2, 2), torch.ones(3, 3)]), r"the same \(B, L, S\) in each layer"),
        (lambda: view(torch.ones(2, 2), tokens={"key": [["a", "b"]]}), r"tokens=\['key'\] must be among query"),
        (lambda: view(one, tokens={"query": [["a"]]}), "tokens= has no effect"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# --- in a notebook


def encoder_of():
    return Encoder(TransformerConfig(architecture="encoder", **SIZES))


class Letters:
    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids):
        return "".join(chr(ord("a") + i) for i in ids)


def test_a_notebook_shows_the_page_of_a_text_in_a_frame_that_may_only_run_its_script(tmp_path):
    shown = view(model_of(), "abcade", tokenizer=Letters(), height=479)
    (name, frame), *_ = Elements(shown._repr_html_()).found
    assert (name, frame["sandbox"], frame["srcdoc"]) == ("iframe", "allow-scripts", shown.page)
    assert "479px" in frame["style"]
    assert re.fullmatch(r"View\(\d+ kB, height=479\): save\(path\) writes the page", repr(shown))
    data = data_of(shown.page)
    assert data["tokens"]["input_ids"] == list("abcade")
    want = take_snapshot(model_of(), {"input_ids": torch.tensor([[0, 1, 2, 0, 3, 4]])}).maps[1].weights[0]
    assert np.abs(weights_of(data, 0, 0, 1)[0] - want.numpy()).max() < 1e-5
    shown.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == shown.page


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_view_of_a_language_model_says_which_token_it_expects_with_and_without_each_head(side):
    model, ids = model_of(), torch.tensor([[7, 2, 5, 2, 3], [1, 2, 3, 5, 8]])
    pads = {"left": [0, 0, 1, 1, 1], "right": [1, 1, 1, 0, 0]}[side]
    inputs = {"input_ids": ids, "key_mask": torch.tensor([pads, [1] * 5]).bool()}
    kept = [i for i, one in enumerate(pads) if one]
    data = data_of(view(model, inputs, knock_out=True).page)
    (snapshot,) = data["traces"][0]["snapshots"]
    words, rows, without = data["words"], snapshot["answers"]["rows"], snapshot["answers"]["without"]
    with torch.no_grad():
        logs = model(**inputs)[0, kept].log_softmax(-1)
    assert [one["at"] for one in rows] == [0, 1, 2]
    assert [None if one["right"] is None else words[one["right"]] for one in rows] == [
        str(int(ids[0, i])) for i in kept[1:]
    ] + [None]
    assert [words[one["answer"][2][0][0]] for one in rows] == [str(i) for i in logs.argmax(-1).tolist()]
    for one, row, right in zip(rows, logs, kept[1:], strict=False):
        assert one["answer"][1] == pytest.approx(-float(row[ids[0, right]]), abs=1e-4)
    with torch.no_grad(), intervene(model, "heads", 0.0, layers=[1], heads=[2]):
        changed = model(**inputs)[0, kept].log_softmax(-1)
    assert without[1][2][0][1] == pytest.approx(-float(changed[0, ids[0, kept[1]]]), abs=1e-4) != rows[0]["answer"][1]
    assert "answers" not in data_of(view(model, inputs).page)["traces"][0]["snapshots"][0]  # ids may be no text
    found = data_of(view(model, inputs, tokenizer=Letters()).page)["traces"][0]["snapshots"][0]["answers"]
    assert len(found["rows"]) == 3 and "without" not in found


def test_a_view_names_no_next_token_where_attention_sees_it_or_its_id_by_number_without_a_name():
    for ids in ([1, 2, 3], [1]):
        encoder = data_of(view(encoder_of(), torch.tensor(ids), tokenizer=Letters()).page)
        assert "answers" not in encoder["traces"][0]["snapshots"][0]

    class Few(Letters):
        def decode(self, ids):
            return "abc"[ids[0]]

    assert "id 7" in data_of(view(model_of(), "abcabc", tokenizer=Few()).page)["words"]


def test_answers_with_the_same_text_stay_apart():
    class Bytes(Letters):
        def decode(self, ids):
            return "\ufffd"

    data = data_of(view({"a": model_of(), "b": model_of()}, torch.tensor([1, 2, 3]), tokenizer=Bytes()).page)
    for trace in data["traces"]:
        for row in trace["snapshots"][0]["answers"]["rows"]:
            is_right, _, top = row["answer"]
            assert len({word for word, _ in top}) == 5 and is_right in (None, top[0][0] == row["right"])
    assert all(re.fullmatch(r"\ufffd( \(id \d+\))?", word) for word in data["words"])


def test_a_layer_its_weights_and_its_snapshot_are_shown_alike():
    layer, x = MultiHeadAttention(12, 3), torch.randn(2, 5, 12)
    block = Block(layer, FeedForward(12, 12), norm=nn.Identity)
    assert view(layer, x[0]).page == view(layer, x).page and weights_of(data_of(view(block, x[0]).page), 0, 0, 0)[0].any()
    array, many = torch.eye(2).numpy(), [np.eye(2), torch.eye(2)]
    assert view(array).page == view(torch.eye(2)).page and len(data_of(view(many).page)["layers"]) == 2
    _, weights = layer(x, attn_mask=torch.ones(5, 5).tril().bool(), need_weights=True)
    causal = {"query": x, "is_causal": True}
    texts = {"query": [list("abcde"), list("fghij")]}
    wanted = data_of(view(layer, causal, tokens=texts, row=1).page)
    got = data_of(view(weights, tokens=texts, row=1).page)
    assert got["tokens"] == wanted["tokens"] == {"query": list("fghij")}
    for mine, theirs in zip(weights_of(got, 0, 0, 0), weights_of(wanted, 0, 0, 0), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
    many, cross = data_of(view([weights[:1], weights[0, :2]]).page), data_of(view(weights[0, 0, :, :3]).page)
    assert [shown["kind"] for shown in many["layers"] + cross["layers"]] == ["causal", "causal", "cross"]
    assert view(take_snapshot(layer, x[:1])).page == view(layer, x[:1]).page
    two = data_of(view({"a": weights[:1], "b": weights[:1] / 2}).page)
    assert [trace["name"] for trace in two["traces"]] == ["a", "b"]


def test_each_trap_of_the_playground_names_a_mutant_of_the_checker():
    source = (Path(viewer.__file__).parent / "traps.js").read_text(encoding="utf-8")
    named = re.findall(r'mutant: "(.*)"', source)
    assert len(named) == source.count("lines: [") == 9
    assert set(named) <= {entry.name for entry in MUTANTS}
