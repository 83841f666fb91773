"""The viewer's page as a text: what it holds, what it asks for (nothing), and what it refuses."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest
import torch
from pages import SOURCE, TARGET, data_of, random_snapshot, weights_of

from minitx.analysis import take_snapshot
from minitx.analysis.viewer import SCRIPTS, Trace, view, viewer_page
from minitx.config import TransformerConfig
from minitx.nn import DecoderLM

HALF_A_STEP = 0.5 / 65534


def frame_of(page: str) -> str:
    """A page without what was handed to it."""
    return re.sub(r'(id="data">).*?(</script>)', r"\1\2", page, flags=re.DOTALL)


class Elements(HTMLParser):
    """Names and attributes of every element, as a browser would find them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def page():
    return viewer_page(
        [Trace("scaled", [random_snapshot(1, 5), random_snapshot(2, 60)]), Trace("plain", [random_snapshot(3, 60)])]
    )


def test_the_page_refers_to_nothing_outside_of_itself(page):
    frame = frame_of(page)
    assert not re.search(r"https?:|[\"'(=]\s*//|url\(|@import|fetch\(|XMLHttpRequest|WebSocket|import\(|sendBeacon", frame)
    outward = {"src", "srcset", "href", "action", "data", "poster"}
    assert {v for _, attrs in Elements(page).found for k, v in attrs.items() if k in outward} == {"data:,"}


def test_the_policy_allows_this_style_and_this_script_alone(page):
    policy = next(attrs["content"] for _, attrs in Elements(page).found if "http-equiv" in attrs)
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    assert allowed["default-src"] == "'none'"
    for part, text in (("style-src", r"<style>(.*?)</style>"), ("script-src", r'<script type="module">(.*?)</script>')):
        (content,) = re.findall(text, page, re.DOTALL)
        assert allowed[part] == f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def test_without_its_data_the_page_is_small(page):
    assert 20_000 < len(frame_of(page).encode()) < 72_000


def test_every_script_of_the_package_is_in_the_page(page):
    names = {file.name for file in files("minitx.analysis.viewer").iterdir() if file.name.endswith(".js")}
    assert names == set(SCRIPTS)


def test_weights_and_masks_arrive_as_they_were_up_to_half_a_step():
    snapshots = [[random_snapshot(1, 5), random_snapshot(2, 60)], [random_snapshot(3, 60)]]
    data = data_of(viewer_page([Trace("a", snapshots[0]), Trace("b", snapshots[1])]))
    for trace, listed in enumerate(snapshots):
        for number, snapshot in enumerate(listed):
            assert data["traces"][trace]["snapshots"][number]["step"] == snapshot.step
            for i, layer in enumerate(snapshot.maps):
                weights, visible = weights_of(data, trace, number, i)
                assert np.array_equal(visible, layer.visible[0].numpy())
                assert np.abs(weights - layer.weights[0].double().numpy()).max() <= HALF_A_STEP
                packed = data["traces"][trace]["snapshots"][number]["layers"][i]
                for name, wanted in (("entropy", layer.entropy()), ("max_logit", layer.max_logit)):
                    got = np.frombuffer(base64.b64decode(packed[name]), "<f4").reshape(wanted[0].shape)
                    assert np.allclose(got, wanted[0].numpy(), equal_nan=True, atol=1e-6)


def test_weights_of_hidden_pairs_do_not_travel_and_equal_masks_travel_once():
    snapshot = random_snapshot(1, kinds=("causal", "causal"))
    data = data_of(viewer_page([Trace("a", [snapshot])]))
    assert len(data["masks"]) == 1
    L = len(TARGET)
    numbers = base64.b64decode(data["traces"][0]["snapshots"][0]["layers"][0]["weights"])
    assert len(numbers) == 2 * 3 * L * (L + 1) // 2


def test_heads_with_masks_of_their_own_keep_them():
    snapshot = random_snapshot(4, kinds=("self",))
    layer = snapshot.maps[0]
    visible = layer.visible.clone()
    visible[0, 1, :, 2:] = False
    snapshot = dataclasses.replace(snapshot, maps=(dataclasses.replace(layer, visible=visible),))
    data = data_of(viewer_page([Trace("a", [snapshot])]))
    assert np.array_equal(weights_of(data, 0, 0, 0)[1], visible[0].numpy())


def test_a_weight_that_is_no_number_stays_none():
    snapshot = random_snapshot(1, kinds=("self",))
    snapshot.maps[0].weights[0, 1, 2, 3] = torch.nan
    snapshot.maps[0].max_logit[0, 1, 2] = torch.inf
    weights, _ = weights_of(data_of(viewer_page([Trace("a", [snapshot])])), 0, 0, 0)
    assert np.argwhere(np.isnan(weights)).tolist() == [[1, 2, 3]]


def test_text_of_users_cannot_become_markup():
    nasty = [
        *SOURCE,
        "</SCRIPT>",
        "<!--",
        "-->",
        "{{style}}",
        "\u2028",
        "\ud800",
        "\0",
        "http://x",
        "<img src=x onerror=alert(1)>",
    ]
    snapshot = random_snapshot(1, kinds=("self",), tokens={"input_ids": [nasty]}, title="</script><b>")
    page = viewer_page([Trace("<script>alert(2)</script>", [snapshot])], title="<i>{{data}}</i> \"&'")
    harmless = viewer_page([Trace("a", [random_snapshot(1, kinds=("self",))])])
    assert [tag for tag, _ in Elements(page).found] == [tag for tag, _ in Elements(harmless).found]
    assert page.count("&lt;i&gt;{{data}}&lt;/i&gt;") == 2
    data = data_of(page)
    assert data["tokens"]["input_ids"] == nasty
    assert data["traces"][0]["name"] == "<script>alert(2)</script>"


def test_padding_is_left_out():
    torch.manual_seed(0)
    model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=1))
    real = torch.tensor([[False, False, True, True, True]])
    snapshot = take_snapshot(model, {"input_ids": torch.tensor([[0, 0, 2, 3, 5]]), "key_mask": real})
    data = data_of(viewer_page([Trace("a", [snapshot])]))
    assert data["layers"][0]["shape"] == [3, 3, 3]
    assert data["tokens"] == {"input_ids": ["2", "3", "5"]}


def test_an_image_has_its_patches_as_tokens_with_and_without_a_class_token():
    from minitx.analysis.snapshot import _patches

    assert _patches(4) == ["0,0", "0,1", "1,0", "1,1"]
    assert _patches(5) == ["cls", "0,0", "0,1", "1,0", "1,1"]
    assert _patches(3) == ["0", "1", "2"]


def shrunk(snapshot):
    layer = snapshot.maps[0]
    cut = {name: getattr(layer, name)[:, :2] for name in ("weights", "visible", "max_logit")}
    return dataclasses.replace(snapshot, maps=(dataclasses.replace(layer, **cut), *snapshot.maps[1:]))


@pytest.mark.parametrize(
    ("traces", "message"),
    [
        ([], r"traces must hold one model, or two to compare, got 0"),
        ([Trace("a", [random_snapshot(1)])] * 3, r"traces must hold one model, or two to compare, got 3"),
        ([Trace("a", [])], r"trace 'a' has no snapshots"),
        ([Trace("a", [random_snapshot(1, 5), random_snapshot(1, 5)])], r"trace 'a' must have steps that rise .*, got \[5, 5\]"),
        ([Trace("a", [random_snapshot(1), random_snapshot(1, 5)])], r"steps that rise .*, got \[None, 5\]"),
        (
            [Trace("a", [random_snapshot(1)]), Trace("b", [shrunk(random_snapshot(1))])],
            r"'b' has other layers than the first snapshot: .*\(self, .*\(2, 7, 7\)\) against .*\(3, 7, 7\)\)",
        ),
        (
            [Trace("a", [random_snapshot(1, kinds=("self",) * 2)]), Trace("b", [random_snapshot(1, kinds=("self",))])],
            r"'b' has other layers than the first snapshot: 1 layers against 2 layers",
        ),
        (
            [Trace("a", [random_snapshot(1)]), Trace("b", [random_snapshot(1, tokens={"input_ids": [[*SOURCE[:-1], "x"]]})])],
            r"'b' has other tokens: input_ids\[6\] is 'x' against 'שלום'",
        ),
    ],
)
def test_what_cannot_be_shown_together_is_refused(traces, message):
    with pytest.raises(ValueError, match=message):
        viewer_page(traces)


def test_more_than_one_row_is_refused():
    model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=1))
    snapshot = take_snapshot(model, {"input_ids": torch.tensor([[2, 3], [5, 7]])})
    with pytest.raises(ValueError, match=r"trace 'a' has a snapshot of 2 rows: choose one with sentence\(row\)"):
        viewer_page([Trace("a", [snapshot])])
    viewer_page([Trace("a", [snapshot.sentence(1)])])


# --- in a notebook


class Letters:
    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids):
        return "".join(chr(ord("a") + i) for i in ids)


def model_of(scale):
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "embed_dim": 12, "num_heads": 3, "num_layers": 2}
    return DecoderLM(TransformerConfig(**sizes, scale=scale))


def test_a_notebook_shows_the_page_of_a_text_in_a_frame_that_may_only_run_its_script(tmp_path):
    model = model_of("inv_sqrt")
    shown = view(model, "abcade", tokenizer=Letters(), height=479)
    (name, frame), *_ = Elements(shown._repr_html_()).found
    assert (name, frame["sandbox"]) == ("iframe", "allow-scripts")
    assert "479px" in frame["style"]
    assert frame["srcdoc"] == shown.page
    data = data_of(shown.page)
    assert data["tokens"]["input_ids"] == list("abcade")
    want = take_snapshot(model, {"input_ids": torch.tensor([[0, 1, 2, 0, 3, 4]])}).maps[1].weights[0]
    assert np.abs(weights_of(data, 0, 0, 1)[0] - want.numpy()).max() < 1e-5
    shown.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == shown.page


def test_two_models_and_the_steps_of_a_run_are_shown_by_name():
    ids = torch.tensor([[1, 2, 3, 5], [5, 3, 2, 1]])
    both = data_of(view({"scaled": model_of("inv_sqrt"), "unscaled": model_of("unscaled")}, ids, row=1).page)
    assert [trace["name"] for trace in both["traces"]] == ["scaled", "unscaled"]
    assert both["tokens"]["input_ids"] == ["5", "3", "2", "1"]
    steps = [take_snapshot(model_of("inv_sqrt"), {"input_ids": ids}, step=step) for step in (0, 7)]
    assert [shot["step"] for shot in data_of(view(steps).page)["traces"][0]["snapshots"]] == [0, 7]


def test_a_view_without_something_to_read_is_refused():
    with pytest.raises(ValueError, match="tokenizer="):
        view(model_of("inv_sqrt"), "abc")
    with pytest.raises(ValueError, match="needs inputs"):
        view(model_of("inv_sqrt"))
