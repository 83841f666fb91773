"""Figures draw the numbers they are given, mark what is hidden, and refuse what they cannot draw."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_rgb

from minitx.analysis import (
    capture,
    distance_profile,
    entropy_over_layers,
    head_heatmap,
    heatmap_grid,
    lettering,
    logit_histograms,
    saturation_over_steps,
    save_figure,
    take_snapshot,
    to_bertviz,
)
from minitx.analysis.canvas import PALETTE, png, svg
from minitx.analysis.figures import PROBED
from minitx.analysis.heatmaps import HIDDEN, SEQUENTIAL
from minitx.analysis.snapshot import AttentionMap, Snapshot
from minitx.config import TransformerConfig
from minitx.nn import Causal, DecoderLM, EncoderDecoder, MultiHeadAttention

SIZES = {"vocab_size": 31, "embed_dim": 12, "num_heads": 3, "num_layers": 2, "init": "lecun"}
SCRIPTS = ["中文", "日本", "한국", "हिन्दी", "ไทย", "שלום", "سلام", "Ελλ", "🙂", "\ud800", "$x$", "%"]


@pytest.fixture(scope="module")
def decoder():
    """A model, a batch of which the second row has two padded positions in front, and its mask."""
    torch.manual_seed(0)
    ids = torch.randint(1, 31, (2, 7))
    return DecoderLM(TransformerConfig(**SIZES)), ids, torch.arange(7) >= torch.tensor([[0], [2]])


@pytest.fixture(scope="module")
def snapshot(decoder):
    model, ids, real = decoder
    return take_snapshot(model, {"input_ids": ids, "key_mask": real}, title="a model", step=3)


@pytest.fixture(scope="module")
def translator():
    """A model and a batch of which the second row is padded at the end on both sides."""
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(1, 31, (2, 7)), "decoder_input_ids": torch.randint(1, 31, (2, 5))}
    masks = {"key_mask": torch.tensor([[7], [4]]), "decoder_key_mask": torch.tensor([[5], [3]])}
    real = {name: torch.arange(7 if name == "key_mask" else 5) < lengths for name, lengths in masks.items()}
    return EncoderDecoder(TransformerConfig(architecture="encoder_decoder", **SIZES)), {**inputs, **real}


@pytest.fixture(scope="module")
def translation(translator):
    model, inputs = translator
    return take_snapshot(model, inputs)


def made(tokens, heads=1, causal=True):
    """A snapshot of one layer with random weights on ``tokens``."""
    L = len(tokens)
    visible = torch.ones(L, L, dtype=torch.bool)
    visible = (visible.tril() if causal else visible).expand(1, heads, L, L)
    weights = torch.randn(1, heads, L, L).masked_fill(~visible, -torch.inf).softmax(-1)
    layer = AttentionMap(
        "blocks.0.attention.core", "causal", "input_ids", "input_ids", weights, visible, torch.zeros(1, heads, L)
    )
    return Snapshot((layer,), {"input_ids": [tokens]}, {}, {"input_ids": torch.ones(1, L, dtype=torch.bool)})


def names(axis):
    return [text.get_text() for text in axis.get_ticklabels()]


# --- weights


def test_the_grid_draws_every_head_of_the_row_without_its_padding_and_masks_what_is_hidden(snapshot):
    *panels, bar = heatmap_grid(snapshot, row=1).axes
    assert len(panels) == 2 * 3
    assert bar.get_ylabel() == "attention weight"
    for place, ax in enumerate(panels):
        layer, head = snapshot.maps[place // 3], place % 3
        drawn = ax.images[0].get_array()
        assert np.array_equal(drawn.filled(0.0), layer.weights[1, head, 2:, 2:].numpy())
        assert np.array_equal(drawn.mask, ~torch.ones(5, 5).tril().bool().numpy())
        assert ax.patch.get_hatch()  # lies behind the image, where its cells are masked
        assert to_rgb(ax.patch.get_facecolor()) == to_rgb(HIDDEN)
    assert [ax.get_title() for ax in panels] == ["head 0", "head 1", "head 2", "", "", ""]
    assert [panels[0].get_ylabel(), panels[3].get_ylabel()] == ["blocks.0", "blocks.1"]


def test_equal_colours_are_equal_weights_in_every_panel(translation):
    images = [ax.images[0] for ax in heatmap_grid(translation).axes if ax.images]
    assert len({image.get_cmap().name for image in images}) == 1
    assert {(image.norm.vmin, image.norm.vmax, image.norm.gamma) for image in images} == {(0.0, 1.0, 0.5)}


def test_only_where_something_is_hidden_the_legend_says_so(snapshot, translation):
    cross = replace(translation, maps=translation.maps[1:2])
    assert cross.maps[0].kind == "cross"
    assert [bool(heatmap_grid(one).legends) for one in (snapshot, cross)] == [True, False]
    assert [bool(head_heatmap(one, 0, 0).legends) for one in (snapshot, cross)] == [True, False]


def test_layers_may_differ_in_their_heads(snapshot):
    layer = snapshot.maps[1]
    parts = {name: getattr(layer, name)[:, :1] for name in ("weights", "visible", "max_logit")}
    *panels, _ = heatmap_grid(replace(snapshot, maps=(replace(layer, **parts), snapshot.maps[0]))).axes
    assert [panel.get_ylabel() for panel in panels] == ["blocks.1", "blocks.0", "", ""]
    assert [panel.get_title() for panel in panels] == ["head 0", "", "head 1", "head 2"]


def test_one_head_has_its_tokens_on_both_axes_and_its_weights_in_the_cells(translation):
    texts = {
        "input_ids": [["to", "", "incomprehensible", "\t", *"efg"]] * 2,
        "decoder_input_ids": [["to", " be", "\n", *"de"]] * 2,
    }
    sentence = replace(translation, tokens=texts)
    ax = head_heatmap(sentence, "blocks.1.cross", -1, row=1).axes[0]
    layer = next(m for m in translation.maps if m.name == "blocks.1.cross_attention.core")
    assert np.array_equal(ax.images[0].get_array().filled(0.0), layer.weights[1, 2, :3, :4].numpy())
    assert names(ax.xaxis) == ["to", "∅", "incomprehensi…", "⇥"]
    assert names(ax.yaxis) == ["to", "␣be", "↵"]
    cells = {text.get_position(): text.get_text() for text in ax.texts}
    assert cells == {(j, i): f"{layer.weights[1, 2, i, j]:.2f}" for i in range(3) for j in range(4)}


def test_a_layer_goes_by_index_or_by_name(snapshot, translation):
    titles = [head_heatmap(snapshot, layer, 1).axes[0].get_title() for layer in (1, -1, "blocks.1", "blocks.1.attention.core")]
    assert titles == ["blocks.1, head 1"] * 4
    assert head_heatmap(translation, "blocks.0", 0).axes[0].get_title() == "blocks.0, head 0"  # not encoder.blocks.0


@pytest.mark.parametrize("count", [5, 67, 199])
def test_the_named_tokens_of_a_sentence_of_any_length_do_not_overlap(count):
    figure = head_heatmap(made([f"token{i}" for i in range(count)]), 0, 0)
    figure.draw_without_rendering()
    ax = figure.axes[0]
    for axis, low, high in ((ax.xaxis, "x0", "x1"), (ax.yaxis, "y0", "y1")):
        boxes = sorted(
            (getattr(t.get_window_extent(), low), getattr(t.get_window_extent(), high)) for t in axis.get_ticklabels()
        )
        assert all(this[1] <= following[0] for this, following in itertools.pairwise(boxes))
        assert min(t.get_fontsize() for t in axis.get_ticklabels()) >= 7
        assert names(axis) == [f"token{i}" for i in axis.get_ticklocs()]
        assert len(boxes) >= min(count, 30)
    assert (ax.get_xlabel() == "key") == (len(boxes) == count)


@pytest.mark.parametrize("fonts", ["installed", "matplotlib's own"])
def test_tokens_of_any_script_are_drawn_without_a_warning(fonts, monkeypatch):
    if fonts != "installed":
        own = [face for face in lettering._upright() if face[0] == "DejaVu Sans"]
        monkeypatch.setattr(lettering, "_upright", lambda: own)
    lettering._families.cache_clear()
    figure = head_heatmap(replace(made(SCRIPTS), title="中文 $"), 0, 0)
    legend = logit_histograms({"中文 $_": captured("scores")})
    assert png(figure) and svg(legend)  # a missing glyph is a warning, and warnings are errors here
    shown = dict(zip(SCRIPTS, names(figure.axes[0].xaxis), strict=True))
    assert (shown["Ελλ"], shown["$x$"], shown["\ud800"]) == ("Ελλ", "$x$", "U+D800")
    if fonts != "installed":
        assert shown["中文"] == "U+4E2DU+6587"
    lettering._families.cache_clear()


# --- statistics


def captured(what, seed=0, **options):
    torch.manual_seed(seed)
    attention = MultiHeadAttention(12, 3, **options)
    with capture(attention, what=what) as seen:
        attention(torch.randn(2, 5, 12), attn_mask=Causal())
    return seen


@pytest.mark.parametrize("which", ["decoder", "translator"])
def test_entropy_is_that_of_the_statistics_wherever_it_is_read_from(which, decoder, snapshot, translator, translation):
    model, ids, real = decoder
    model, inputs = (model, {"input_ids": ids, "key_mask": real}) if which == "decoder" else translator
    with capture(model.eval()) as seen:
        model(**inputs)
    wanted: dict[str, list[list[float]]] = {}
    for name, calls in seen.items():
        wanted.setdefault(seen.kinds[name], []).append(calls[0]["entropy"].tolist())
    for given, tolerance in ((seen, 0.0), (snapshot if which == "decoder" else translation, 1e-6)):
        lines = entropy_over_layers(given).axes[0].lines
        for dots, line, heads in zip(lines[::2], lines[1::2], wanted.values(), strict=True):
            assert dots.get_xdata() == pytest.approx([0, 0, 0, 1, 1, 1], abs=0.2)
            assert list(dots.get_ydata()) == pytest.approx([*heads[0], *heads[1]], abs=tolerance)
            assert list(line.get_ydata()) == pytest.approx([np.mean(layer) for layer in heads], abs=tolerance)


def test_entropy_averages_the_calls_of_a_layer_and_keeps_kinds_apart(translation):
    seen = captured("statistics")
    other = captured("statistics", seed=1)
    (first,), (second,) = seen["core"], other["core"]
    seen["core"].append(second)
    dots = entropy_over_layers(seen).axes[0].lines[0]
    assert list(dots.get_ydata()) == pytest.approx(((first["entropy"] + second["entropy"]) / 2).tolist())
    figure = entropy_over_layers(translation)
    assert len(figure.axes[0].lines) == 2 * 3
    assert [text.get_text() for text in figure.legends[0].texts] == [
        "causal self-attention",
        "cross-attention",
        "self-attention",
    ]


def test_histograms_hold_every_visible_score_of_every_series():
    series = {"scaled": captured("scores"), "unscaled": captured("scores", scale="unscaled")}
    (ax,) = logit_histograms(series, bins=11).axes
    assert ax.get_title() == "core"
    for seen, outline, text in zip(series.values(), ax.patches, ax.texts, strict=True):
        visible = seen["core"][0][seen["core"][0] > -torch.inf].double()
        assert len(visible) == 2 * 3 * 15
        density, edges = np.histogram(visible.numpy(), 11, density=True)
        assert np.array_equal(outline.get_data().values, density)
        assert np.array_equal(outline.get_data().edges, edges)
        assert (density * np.diff(edges)).sum() == pytest.approx(1.0)
        assert text.get_text() == f"std {float(visible.std(correction=0)):.3g}"
    assert [patch.get_linestyle() for patch in ax.patches] == ["-", "--"]


def test_padded_queries_can_be_left_out_of_a_histogram():
    seen = captured("scores")
    real = torch.tensor([[True] * 5, [False] * 3 + [True] * 2])
    (ax,) = logit_histograms(seen, query_mask=real, bins=7).axes
    scores = seen["core"][0]
    kept = torch.cat([scores[0].flatten(), scores[1, :, 3:].flatten()])
    wanted = np.histogram(kept[kept > -torch.inf].double().numpy(), 7, density=True)[0]
    assert np.array_equal(ax.patches[0].get_data().values, wanted)
    assert not ax.figure.legends


def brute_profile(layer, real, head):
    """Mean weight and mean 1 / n by distance, by loops."""
    found: dict[int, list[tuple[float, float]]] = {}
    B, _, L, S = layer.weights.shape
    for b in range(B):
        for i in range(L):
            for j in range(S):
                if layer.visible[b, head, i, j] and real[b, i]:
                    uniform = 1 / int(layer.visible[b, head, i].sum())
                    found.setdefault(i + S - L - j, []).append((float(layer.weights[b, head, i, j]), uniform))
    return {distance: np.mean(pairs, axis=0) for distance, pairs in sorted(found.items())}


@pytest.mark.parametrize("which", ["causal", "both ways"])
def test_a_distance_profile_is_the_mean_over_all_pairs_that_far_apart(which, snapshot, translation):
    given = snapshot if which == "causal" else translation
    kept = [layer for layer in given.maps if layer.kind != "cross"]
    panels = distance_profile(given).axes
    assert len(panels) == len(kept)
    for layer, ax in zip(kept, panels, strict=True):
        *heads, uniform = ax.lines
        assert len(heads) == 3
        for head, line in enumerate(heads):
            wanted = brute_profile(layer, given.real[layer.queries], head)
            assert list(line.get_xdata()) == list(uniform.get_xdata()) == list(wanted)
            assert list(line.get_ydata()) == pytest.approx([weight for weight, _ in wanted.values()], rel=1e-9)
            assert list(uniform.get_ydata()) == pytest.approx([share for _, share in wanted.values()], rel=1e-9)
    lowest = -6 if which == "both ways" else 0
    assert min(panels[-1].lines[0].get_xdata()) == lowest


def test_fewer_queries_than_keys_stand_at_the_end():
    visible = torch.ones(1, 1, 2, 5, dtype=torch.bool).tril(3)
    weights = visible / visible.sum(-1, keepdim=True)
    layer = AttentionMap("core", "causal", "new", "all", weights, visible, torch.zeros(1, 1, 2))
    real = {"new": torch.ones(1, 2, dtype=torch.bool), "all": torch.ones(1, 5, dtype=torch.bool)}
    head, _ = distance_profile(Snapshot((layer,), {}, {}, real)).axes[0].lines
    assert dict(zip(head.get_xdata(), head.get_ydata(), strict=True)) == pytest.approx(
        {0: 0.225, 1: 0.225, 2: 0.225, 3: 0.225, 4: 0.2}
    )


def test_more_heads_than_colours_are_drawn_with_their_mean():
    (ax,) = distance_profile(made(list("abcde"), heads=11)).axes
    *heads, mean, _ = ax.lines
    assert len(heads) == 11
    assert len({line.get_color() for line in heads}) == 1
    assert list(mean.get_ydata()) == pytest.approx(np.mean([line.get_ydata() for line in heads], axis=0))


def probe_records(steps, layers, shift=0.0):
    numbers = {name: 0.01 * i + shift for i, name in enumerate(PROBED, 1)}
    return [{"step": s, "layers": [{n: v * (1 + s) + k for n, v in numbers.items()} for k in range(layers)]} for s in steps]


def test_saturation_draws_a_line_a_layer_of_every_run_in_the_order_of_the_steps():
    runs = {"scaled": probe_records([2, 0, 1], 2), "unscaled": probe_records([0, 1, 4], 1, shift=0.1)}
    figure = saturation_over_steps(runs)
    for ax, name in zip(figure.axes, PROBED, strict=True):
        lines = iter(ax.lines)
        for records in runs.values():
            ordered = sorted(records, key=lambda record: record["step"])
            for k in range(len(records[0]["layers"])):
                line = next(lines)
                assert list(line.get_xdata()) == [record["step"] for record in ordered]
                assert list(line.get_ydata()) == [record["layers"][k][name] for record in ordered]
        assert next(lines, None) is None
        assert ax.lines[0].get_alpha() < ax.lines[1].get_alpha()
    assert [text.get_text() for text in figure.legends[0].texts] == ["scaled", "unscaled", "deeper layers darker"]


def test_probes_by_head_are_averaged_and_one_record_is_enough():
    by_head = [{"step": 0, "layers": [{"name": "core", **{name: [0.25, 0.75] for name in PROBED}}]}]
    figure = saturation_over_steps(by_head)
    assert [list(ax.lines[0].get_ydata()) for ax in figure.axes] == [[0.5]] * 4
    assert png(figure)


# --- files, colours, refusals


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_equal_figures_give_equal_bytes_however_often_they_are_saved(suffix, tmp_path):
    snapshot = made(list("abc"))
    figure, same = (head_heatmap(snapshot, 0, 0) for _ in range(2))
    first, again = (save_figure(figure, str(tmp_path / f"{i}.{suffix.upper()}")).read_bytes() for i in range(2))
    assert first == again == save_figure(same, tmp_path / f"same.{suffix}").read_bytes()
    assert first.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    assert not any(word in first for word in (b"Date", b"dc:date", b"matplotlib.org"))


def test_saving_changes_no_setting_of_matplotlib(snapshot, tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    save_figure(heatmap_grid(snapshot), tmp_path / "a.svg")
    assert dict(matplotlib.rcParams) == before


def test_a_file_of_another_kind_and_a_missing_folder_are_refused(tmp_path, snapshot):
    figure = entropy_over_layers(snapshot)
    with pytest.raises(ValueError, match=r"path=a\.jpg must end in \.png or \.svg"):
        save_figure(figure, "a.jpg")
    with pytest.raises(ValueError, match=r"path=.*missing/a\.svg is in a folder that does not exist"):
        save_figure(figure, tmp_path / "missing" / "a.svg")


def luminance(color):
    """Of an sRGB colour, by WCAG 2."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_more_weight_is_darker_and_nothing_looks_like_a_hidden_cell():
    colors = colormaps[SEQUENTIAL](np.linspace(0, 1, 101))[:, :3]
    steps = np.diff([luminance(color) for color in colors])
    assert (steps < 0).all()
    assert luminance(colors[0]) / luminance(colors[-1]) > 20
    assert np.abs(colors - np.array(to_rgb(HIDDEN))).max(1).min() > 0.05
    assert max(to_rgb(HIDDEN)) == min(to_rgb(HIDDEN))  # grey, which the blues are not


def test_series_differ_by_marker_as_well_as_by_colour():
    colors, markers = zip(*PALETTE, strict=True)
    assert len(set(colors)) == len(set(markers)) == len(PALETTE)


def not_a_number(snapshot):
    layer = snapshot.maps[0]
    return replace(snapshot, maps=(replace(layer, weights=layer.weights * math.nan),))


REFUSALS = {
    "layer": (lambda s: head_heatmap(s, 2, 0), ValueError, r"layer=2 is none of the 2 attention layers blocks\.0\.attention"),
    "layer name": (lambda s: head_heatmap(s, "cross", 0), ValueError, "layer='cross' is none of the 2"),
    "ambiguous layer": (lambda s: head_heatmap(s, "attention", 0), ValueError, "layer='attention' fits 2 of the 2"),
    "head": (lambda s: head_heatmap(s, 0, 3), ValueError, r"head=3 must be one of 0 to 2 of blocks\.0"),
    "row": (lambda s: head_heatmap(s, 0, 0, row=2), ValueError, "row=2 must be one of the batch's 0 to 1"),
    "row of the grid": (lambda s: heatmap_grid(s, row=-1), ValueError, "row=-1 must be one of the batch's 0 to 1"),
    "NaN": (lambda s: heatmap_grid(not_a_number(s)), ValueError, r"blocks\.0.* weights that are not finite in head 0"),
    "no snapshot": (lambda s: entropy_over_layers([]), TypeError, r"entropy_over_layers takes .*'statistics'.*, got list"),
    "other record": (
        lambda s: entropy_over_layers(captured("weights")),
        TypeError,
        "needs capture.*'statistics'.*core holds a Tensor",
    ),
    "no scores": (lambda s: logit_histograms(captured("statistics")), TypeError, "needs capture.*'scores'.*core holds a dict"),
    "no series": (lambda s: logit_histograms({}), ValueError, "scores must be series of the same layers"),
    "query mask": (
        lambda s: logit_histograms(captured("scores"), query_mask=torch.ones(2, 3) > 0),
        ValueError,
        r"query_mask is \(2, 3\), core has \(B, L\) = \(2, 5\)",
    ),
    "nothing visible": (
        lambda s: logit_histograms({"a": captured("scores")}, query_mask=torch.zeros(2, 5) > 0),
        ValueError,
        "core has no visible score in 'a'",
    ),
    "no run": (lambda s: saturation_over_steps({}), ValueError, "probes holds no run"),
    "no record": (lambda s: saturation_over_steps({"a": []}), ValueError, "probes of 'a' holds no record"),
    "no statistic": (
        lambda s: saturation_over_steps([{"step": 4, "layers": [{"entropy": 1.0, "max_logit": 1.0}]}]),
        ValueError,
        "probes has no saturation_90, saturation_99 at step 4",
    ),
    "bertviz row": (lambda s: to_bertviz(s, row=5), ValueError, "row=5 must be one of the batch's 0 to 1"),
    "bertviz of a row": (
        lambda s: to_bertviz(captured("weights"), row=2),
        ValueError,
        "row=2 must be one of the batch's 0 to 1",
    ),
    "bertviz of nothing": (lambda s: to_bertviz([]), TypeError, "takes a Snapshot or what capture.* gave, got list"),
    "bertviz of numbers": (lambda s: to_bertviz(captured("statistics")), TypeError, "needs capture.*'weights'.*holds a dict"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(case, snapshot):
    call, error, sentence = REFUSALS[case]
    with pytest.raises(error, match=sentence):
        call(snapshot)


def test_cross_attention_alone_has_no_distances_and_a_layer_without_a_call_no_numbers(translation):
    with pytest.raises(ValueError, match="cross-attention alone"):
        distance_profile(replace(translation, maps=translation.maps[1:2]))
    with capture(MultiHeadAttention(6, 2)) as seen:
        pass
    for function in (entropy_over_layers, logit_histograms, to_bertviz):
        with pytest.raises(ValueError, match="core was not called while it was looked at"):
            function(seen)


def test_scores_that_are_not_finite_are_named():
    seen = captured("scores")
    seen["core"][0][0, 0, 3, 1] = math.nan
    with pytest.raises(ValueError, match="core has scores that are not finite in 'unscaled'"):
        logit_histograms({"unscaled": seen})


# --- other viewers


def as_bertviz_reads(attention, rows, columns):
    """The checks of bertviz 1.4.1: ``format_attention`` and the lengths in ``head_view`` and ``model_view``."""
    for layer in attention:
        assert len(layer.shape) == 4
    stacked = torch.stack([layer.squeeze(0) for layer in attention])  # layers x heads x queries x keys
    data = stacked.tolist()
    assert (len(data[0][0]), len(data[0][0][0])) == (len(rows), len(columns))
    assert attention[0][0].size(0) == stacked.shape[1]  # its number of heads
    return stacked


def test_bertviz_gets_one_sentence_of_a_decoder(snapshot):
    tokens = snapshot.sentence(1).tokens["input_ids"][0]
    stacked = as_bertviz_reads(to_bertviz(snapshot, row=1), tokens, tokens)
    assert torch.equal(stacked, torch.stack([layer.weights[1, :, 2:, 2:] for layer in snapshot.maps]))


def test_bertviz_gets_encoder_decoder_and_cross_attention_in_this_order(translation):
    encoder, decoder, cross = to_bertviz(translation, row=1)
    source, target = (translation.sentence(1).tokens[axis][0] for axis in ("input_ids", "decoder_input_ids"))
    by_name = {layer.name: layer.weights[1] for layer in translation.maps}
    for part, name, rows, columns in (
        (encoder, "encoder.blocks.{}.attention.core", source, source),
        (decoder, "blocks.{}.attention.core", target, target),
        (cross, "blocks.{}.cross_attention.core", target, source),
    ):
        stacked = as_bertviz_reads(part, rows, columns)
        wanted = torch.stack([by_name[name.format(i)][:, : len(rows), : len(columns)] for i in range(2)])
        assert torch.equal(stacked, wanted)
    alone = replace(translation, maps=tuple(layer for layer in translation.maps if layer.kind == "cross"))
    assert to_bertviz(alone)[:2] == (None, None)


def test_what_capture_saw_goes_to_bertviz_too(decoder, snapshot):
    model, ids, _ = decoder
    with capture(model.eval(), what="weights") as seen:
        model(ids[:, :3])
        model(ids)
    for layer, other in zip(to_bertviz(seen), to_bertviz(snapshot), strict=True):
        torch.testing.assert_close(layer, other)


def test_layers_with_different_heads_are_refused_because_bertviz_stacks_them(snapshot):
    layer = replace(snapshot.maps[1], weights=snapshot.maps[1].weights[:, :2])
    with pytest.raises(ValueError, match=r"the causal layers have \[3, 2\] heads; BertViz wants the same number"):
        to_bertviz(replace(snapshot, maps=(snapshot.maps[0], layer)))
