"""Figures draw the numbers they are given, mark what is hidden, name their axes, and refuse what they cannot draw."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pages import random_snapshot

from minitx import canvas
from minitx.ablation import curves
from minitx.analysis import (
    head_heatmap,
    head_scores,
    heatmap,
    heatmap_grid,
    induction_steps,
    saturation_over_steps,
    save_figure,
    take_snapshot,
    to_bertviz,
)
from minitx.analysis.figures import PROBED
from minitx.canvas import legend, panels, png, svg
from tests.analysis.models import model_of, translation_of

SCRIPTS = ["中文", "日本", "한국", "हिन्दी", "ไทย", "שלום", "سلام", "Ελλ", "🙂", "\ud800", "$x$", "%"]


@pytest.fixture(scope="module")
def snapshot():
    """Of a batch of which the second row has two padded positions in front."""
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(1, 31, (2, 7)), "key_mask": torch.arange(7) >= torch.tensor([[0], [2]])}
    return take_snapshot(model_of(vocab_size=31), inputs, title="a model", step=3)


@pytest.fixture(scope="module")
def translation():
    """Of a batch of which the second row is padded at the end on both sides: four keys, three queries."""
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(1, 31, (2, 7)), "decoder_input_ids": torch.randint(1, 31, (2, 5))}
    masks = {"key_mask": torch.tensor([[7], [4]]), "decoder_key_mask": torch.tensor([[5], [3]])}
    real = {name: torch.arange(7 if name == "key_mask" else 5) < lengths for name, lengths in masks.items()}
    return take_snapshot(translation_of(vocab_size=31, num_decoder_layers=2), {**inputs, **real})


def made(tokens):
    """One causal layer of one head with random weights on ``tokens``."""
    return random_snapshot(0, kinds=("causal",), H=1, tokens={"decoder_input_ids": [tokens]})


@pytest.fixture
def only_dejavu(monkeypatch):
    """No font but the one that comes with matplotlib."""
    own = [font for font in canvas.fonts() if font[0] == "DejaVu Sans"]
    monkeypatch.setattr(canvas, "fonts", lambda: own)
    canvas.family_with.cache_clear()
    yield
    canvas.family_with.cache_clear()


def names(axis):
    return [text.get_text() for text in axis.get_ticklabels()]


def records(steps, layers, shift=0.0):
    numbers = {name: 0.01 * i + shift for i, name in enumerate(PROBED, 1)}
    return [{"step": s, "layers": [{n: v * (1 + s) + k for n, v in numbers.items()} for k in range(layers)]} for s in steps]


# --- weights


def test_the_grid_draws_every_head_of_the_row_without_its_padding_and_hatches_what_is_hidden(snapshot):
    ax = heatmap_grid(snapshot, row=1).axes[0]
    assert len(ax.images) == len(ax.patches) == 2 * 3
    for place, (image, behind) in enumerate(zip(ax.images, ax.patches, strict=True)):
        drawn, (left, right, bottom, top) = image.get_array(), image.get_extent()
        assert np.array_equal(drawn.filled(0.0), snapshot.maps[place // 3].weights[1, place % 3, 2:, 2:].numpy())
        assert np.array_equal(drawn.mask, ~torch.ones(5, 5).tril().bool().numpy())
        assert (int(top), int(left)) == (math.floor(bottom), math.floor(right)) == (place // 3, place % 3)  # no tile on another
        assert behind.get_hatch() and behind.get_zorder() < image.get_zorder()  # seen where the image's cells are masked
    assert (names(ax.xaxis), names(ax.yaxis)) == (["head 0", "head 1", "head 2"], ["blocks.0", "blocks.1"])


def test_equal_colours_are_equal_weights_in_every_figure_and_the_legend_says_what_is_hidden(snapshot, translation):
    cross = replace(translation, maps=translation.maps[1:2])
    figures = [heatmap_grid(snapshot), head_heatmap(snapshot, 0, 0), heatmap_grid(cross), head_heatmap(cross, 0, 0)]
    figures += [heatmap(one.maps[0].weights[0, 0]) for one in (snapshot, cross)]
    figures.append(curves.attention([("a head of the lab", torch.rand(2, 3, 5).softmax(-1))], keys=[1, 4]))
    images = [image for figure in figures for image in figure.axes[0].images]
    assert {(im.get_cmap().name, im.norm.vmin, im.norm.vmax, im.norm.gamma) for im in images} == {("Blues", 0.0, 1.0, 0.5)}
    assert [bool(figure.legends) for figure in figures] == [True, True, False, False, True, False, False]


@pytest.mark.filterwarnings("ignore:matplotlib has no font")  # of the machine
def test_one_head_has_its_tokens_on_both_axes_and_its_weights_in_the_cells(translation):
    source, target = ["天", "", "incomprehensible", "\t", *"efg"], ["to", " be", "\n", *"de"]
    texts = {"input_ids": [source] * 2, "decoder_input_ids": [target] * 2}
    ax = head_heatmap(replace(translation, tokens=texts), "blocks.1.cross", -1, row=1).axes[0]
    layer = next(m for m in translation.maps if m.name == "blocks.1.cross_attention.core")
    assert np.array_equal(ax.images[0].get_array().filled(0.0), layer.weights[1, 2, :3, :4].numpy())
    assert names(ax.xaxis)[1:] == ["∅", "incomprehensi…", "⇥"] and names(ax.xaxis)[0] in ("天", "U+5929")
    assert names(ax.yaxis) == ["to", "␣be", "↵"]
    cells = {text.get_position(): text.get_text() for text in ax.texts}
    assert cells == {(j, i): f"{layer.weights[1, 2, i, j]:.2f}" for i in range(3) for j in range(4)}


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
def test_a_matrix_of_anybody_is_drawn_with_one_list_of_tokens_or_two(kind):
    rows = [[1.0, 0.0, 0.0], [0.25, 0.75, 0.0]]
    ax = heatmap(kind(rows), (["le", "chat"], ["the", " cat", "sat"]), title="$ by hand").axes[0]
    assert np.array_equal(ax.images[0].get_array().filled(0.0), np.array(rows))
    assert {t.get_position(): t.get_text() for t in ax.texts} == {(0, 0): "1.00", (0, 1): "0.25", (1, 1): "0.75"}
    assert (names(ax.xaxis), names(ax.yaxis), ax.get_title()) == (["the", "␣cat", "sat"], ["le", "chat"], "$ by hand")
    square = heatmap(kind([[1, 0], [0, 1]]), ["a", "b"]).axes[0]
    assert names(square.xaxis) == names(square.yaxis) == ["a", "b"]
    assert names(heatmap(kind(rows)).axes[0].xaxis) == ["0", "1", "2"]


@pytest.mark.parametrize(("size", "count"), [(12, 144), (13, 0)])
def test_cells_have_numbers_up_to_twelve_tokens(size, count):
    assert len(heatmap(np.full((size, size), 1 / size)).axes[0].texts) == count


@pytest.mark.parametrize("count", [5, 199])
def test_the_named_tokens_of_a_sentence_of_any_length_do_not_overlap(count):
    figure = head_heatmap(made([f"token{i}" for i in range(count)]), 0, 0)
    figure.draw_without_rendering()
    ax = figure.axes[0]
    for axis, low, high in ((ax.xaxis, "x0", "x1"), (ax.yaxis, "y0", "y1")):
        extents = [t.get_window_extent() for t in axis.get_ticklabels()]
        boxes = sorted((getattr(box, low), getattr(box, high)) for box in extents)
        assert all(this[1] <= following[0] for this, following in itertools.pairwise(boxes))
        assert names(axis) == [f"token{i}" for i in axis.get_ticklocs()]
        assert len(boxes) >= min(count, 30)
    assert (ax.get_xlabel() == "key") == (len(boxes) == count)


@pytest.mark.filterwarnings("ignore:matplotlib has no font")  # of the machine
@pytest.mark.parametrize("only", [None, "only_dejavu"])
def test_tokens_of_any_script_are_drawn_without_a_warning_of_matplotlib(only, request):
    if only:
        request.getfixturevalue(only)
    figure = head_heatmap(replace(made(SCRIPTS), title="中文 $"), 0, 0)
    other, _ = panels(1, 1)
    legend(other, [("中文 $_", "#000000", "o", "-")])
    assert png(figure) and svg(other)  # a missing glyph is a warning, and warnings are errors here
    shown = dict(zip(SCRIPTS, names(figure.axes[0].xaxis), strict=True))
    assert (shown["Ελλ"], shown["$x$"], shown["\ud800"]) == ("Ελλ", "$x$", "U+D800")
    assert only is None or shown["中文"] == "U+4E2DU+6587"


def test_a_missing_font_is_said_with_its_remedy(only_dejavu):
    with pytest.warns(UserWarning, match=r"no font for 我 学, .* code points.*Noto Sans CJK.*fontlist-\*\.json in ") as said:
        figure = heatmap(torch.eye(3), ["我", "学", "\ud800"])
    assert said[0].filename == __file__ and png(figure)


# --- statistics over steps


def test_every_layer_of_every_run_is_drawn_in_the_order_of_the_steps():
    runs = {"scaled": records([2, 0, 1], 2), "unscaled": records([0, 1, 4], 1, shift=0.1)}
    figure = saturation_over_steps(runs)
    for ax, name in zip(figure.axes, PROBED, strict=True):
        for line, (run, layer) in zip(ax.lines, (("scaled", 0), ("scaled", 1), ("unscaled", 0)), strict=True):
            wanted = sorted((record["step"], record["layers"][layer][name]) for record in runs[run])
            assert list(zip(*line.get_data(), strict=True)) == wanted
        assert ax.lines[0].get_alpha() < ax.lines[1].get_alpha()
        assert ax.lines[0].get_color() != ax.lines[2].get_color()


# --- all figures


@pytest.mark.slow
def test_every_figure_names_its_axes_and_is_shown_by_a_notebook(snapshot):
    heads = head_scores(snapshot)
    over_steps = saturation_over_steps(records([0, 1, 4], 2)), induction_steps({0: heads, 50: heads})
    for figure in (heatmap_grid(snapshot), head_heatmap(snapshot, 0, 0), *over_steps):
        for ax in figure.axes:
            shared = [other for other in figure.axes if ax.get_shared_y_axes().joined(ax, other)]
            assert any(other.get_ylabel() for other in [ax, *shared]) and (ax.get_xlabel() or ax.get_label() == "<colorbar>")
        assert figure._repr_png_() == png(figure)  # IPython calls it, when a cell ends with the figure


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_equal_figures_give_equal_bytes_however_often_they_are_saved(suffix, start, tmp_path):
    snapshot = made(list("abc"))
    figure, same = (head_heatmap(snapshot, 0, 0) for _ in range(2))
    first, again = (save_figure(figure, str(tmp_path / f"{i}.{suffix.upper()}")).read_bytes() for i in range(2))
    assert first == again == save_figure(same, tmp_path / f"same.{suffix}").read_bytes()
    assert first.startswith(start) and not any(word in first for word in (b"Date", b"dc:date", b"matplotlib.org"))


def test_what_cannot_be_drawn_is_refused_in_a_sentence(snapshot):
    first, no_number = snapshot.maps[0], math.nan * snapshot.maps[0].weights
    for call, sentence in (
        (lambda: head_heatmap(snapshot, 2, 0), r"2 is none of the 2 layers 0 \(blocks"),
        (lambda: head_heatmap(snapshot, 0, 3), "head=3 must be one of 0 to 2"),
        (lambda: heatmap_grid(snapshot, row=-1), "row=-1 must be one of the rows 0 to 1 of the batch"),
        (lambda: heatmap_grid(replace(snapshot, maps=(replace(first, weights=no_number),))), "not finite in head 0"),
        (lambda: saturation_over_steps([{"step": 4, "layers": [{"entropy": 1.0}]}]), "have no .*saturation_90"),
        (lambda: heatmap(torch.ones(2, 3, 4, 4) / 4), r"\(2, 3, 4, 4\): weights\[0, 0\] is row 0 of the batch, head 0"),
        (lambda: heatmap(torch.ones(3, 4, 4) / 4), r"weights\[0\] is the first head"),
        (lambda: heatmap([0.5, 0.5]), r"got \(2,\): one row is \[weights\]"),
        (lambda: heatmap([[0.5, -2.5]]), r"got -2.5 to 0.5: apply softmax\(-1\)"),
        (lambda: heatmap([[0.5], [0.5, 0.5]]), "nested lists of equal length"),
        (lambda: heatmap([[0.5, 0.5], [math.nan, math.nan]]), "not finite in row 1, .* fill its row with 0"),
        (lambda: heatmap([[0.5, 0.5]], "two words"), "is one text; give a list"),
        (lambda: heatmap([[0.5, 0.5]], ["a", "b"]), "texts of 1 queries and of 2 keys .* got 2"),
        (lambda: heatmap([[0.5, 0.5]], (["a"], ["a", "b", "c"])), "got 1 and 3"),
        (lambda: save_figure(heatmap_grid(snapshot), "a.jpg"), r"path=a\.jpg must end in \.png or \.svg"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


# --- BertViz


def test_bertviz_gets_encoder_decoder_and_cross_attention_in_this_order(translation):
    places = {"encoder.blocks.{}.attention": (4, 4), "blocks.{}.attention": (3, 3), "blocks.{}.cross_attention": (3, 4)}
    by_name = {layer.name: layer.weights[1:] for layer in translation.maps}
    for part, (name, (L, S)) in zip(to_bertviz(translation, row=1), places.items(), strict=True):
        assert all(torch.equal(part[i], by_name[f"{name.format(i)}.core"][:, :, :L, :S]) for i in range(2))
    alone = replace(translation, maps=tuple(layer for layer in translation.maps if layer.kind == "cross"))
    assert to_bertviz(alone)[:2] == (None, None)
