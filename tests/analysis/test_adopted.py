"""What looks at models and changes them works on Hugging Face models after ``adopt_hf``: a decoder, an encoder, an encoder–decoder."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

transformers = pytest.importorskip("transformers")

import peft  # noqa: E402
from pages import data_of  # noqa: E402
from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: E402

from minitx.analysis import (  # noqa: E402
    capture,
    head_heatmap,
    head_scores,
    heads_figure,
    heatmap_grid,
    intervene,
    knock_out_heads,
    logit_lens,
    patch_heads,
    take_snapshot,
)
from minitx.analysis.answers import next_tokens  # noqa: E402
from minitx.analysis.experiments import answers_without_heads  # noqa: E402
from minitx.analysis.gradients import gradient_statistics, projections  # noqa: E402
from minitx.analysis.recorder import modules_of, watch  # noqa: E402
from minitx.analysis.snapshot import read_snapshot, write_snapshot  # noqa: E402
from minitx.analysis.statistics import real_keys  # noqa: E402
from minitx.analysis.viewer import view  # noqa: E402
from minitx.interop import adopt_hf, release_hf  # noqa: E402
from tests.analysis.models import records_of  # noqa: E402
from tests.interop.families import BESIDE, NAMES, build, inputs_of  # noqa: E402

KINDS = ("Llama", "Bert", "T5")
BLOCKS = {
    "Llama": ["model.layers.0", "model.layers.1"],
    "Bert": ["bert.encoder.layer.0", "bert.encoder.layer.1"],
    "T5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
}
FEEDFORWARD = {
    "Llama": "model.layers.1.mlp",
    "Bert": "bert.encoder.layer.1.output.dense",
    "T5": "decoder.block.1.layer.2.DenseReluDense",
    "GPT2": "transformer.h.1.mlp",
    "OPT": "model.decoder.layers.1.fc2",
    "Bart": "model.decoder.layers.1.fc2",
    "ViT": "layers.1.mlp",
    "NomicBert": "nomic_bert.layers.1.mlp",
    "Albert": "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn_output",
    "DistilBert": "distilbert.transformer.layer.1.ffn",
    "Mixtral": "model.layers.1.mlp",
    "GptOss": "model.layers.1.mlp",
}


def adopted(name, *, pad="right"):
    """A model, and a batch with padding in its second row; the target of T5 has as many positions as the source."""
    inputs, _ = inputs_of(name, pad=pad)
    if name == "T5":
        target = inputs["input_ids"].flip(1)
        inputs |= {"decoder_input_ids": target}
        inputs["decoder_attention_mask"] = torch.ones_like(target).index_fill(1, torch.tensor(10), 0)
    return adopt_hf(build(name)), inputs


@pytest.mark.parametrize("name", KINDS)
def test_the_residual_stream_is_what_transformers_calls_hidden_states(name):
    model, inputs = adopted(name)
    with torch.no_grad(), capture(model, what="residual") as seen:
        found = model(**inputs, output_hidden_states=True)
    states = {"Llama": "hidden_states", "Bert": "hidden_states", "T5": "decoder_hidden_states"}[name]
    assert list(seen) == BLOCKS[name]
    records = [records[0] for block, records in seen.items() if "encoder" not in block or name == "Bert"]
    assert torch.equal(records[0], found[states][1])


@pytest.mark.parametrize("name", FEEDFORWARD)
def test_the_feedforward_part_is_what_the_layer_adds_to_its_stream(name):
    model = adopt_hf(build(name))
    inputs, _ = inputs_of(name)
    assert list(modules_of(model, "feedforward"))[-1] == FEEDFORWARD[name]
    adds = name not in ("Bert", "Albert", "DistilBert", "NomicBert", "Bart")  # whose norm comes after the sum
    [[part, *_]], [[after, *_]] = (
        records_of(model, **inputs, what=of, layers=-1).values() for of in ("feedforward", "residual")
    )
    with intervene(model, "feedforward", 0.0, layers=-1):
        [[before, *_]] = records_of(model, **inputs, what="residual", layers=-1).values()
    assert part.abs().max() > 0 and not torch.equal(after, before)
    if adds:
        torch.testing.assert_close(after, before + part.view(after.shape), atol=float(after.abs().max()) * 1e-5, rtol=1e-5)


class Layer(GradientCheckpointingLayer):
    """A layer of transformers around the attention of Llama, with other parts."""

    def __init__(self, attention, **parts):
        super().__init__()
        for name, part in {**parts, "self_attn": attention}.items():
            self.add_module(name, part)


def with_parts(**parts):
    """An adopted model whose layers have these parts."""
    model = build("Llama")
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = Layer(layer.self_attn, **parts)
    return adopt_hf(model, check=False)


def test_the_feedforward_part_of_a_layer_has_one_of_the_known_names_and_others_are_refused():
    network, gate = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), nn.Linear(8, 8)
    for parts in ({"mlp": network, "mamba": gate}, {"mlp": network, "gate": gate}, {"mlp": network, "norm": nn.LayerNorm(8)}):
        assert list(modules_of(with_parts(**parts), "feedforward")) == ["model.layers.0.mlp"]  # one module, one name
    for parts in ({"network": network}, {"experts": network, "shared": gate}, {"mlp": network, "feed_forward": gate}):
        with pytest.raises(ValueError, match="feed-forward"), capture(with_parts(**parts), what="feedforward"):
            pass


@pytest.mark.filterwarnings("ignore:.*layers whose attention does not pass")
@pytest.mark.parametrize("name", [*NAMES, *BESIDE])
def test_every_layer_of_the_families_has_one_feedforward_part(name):
    model = adopt_hf(build(name), check=False)
    blocks, parts = list(modules_of(model, "residual")), list(modules_of(model, "feedforward"))
    assert len(parts) == len(blocks) > 0
    assert all(part.startswith(f"{block}.") for part, block in zip(parts, blocks, strict=True))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")
@pytest.mark.parametrize("name", ["Bert", "OPT"])
def test_lora_and_parametrisations_of_the_last_matrix_do_not_change_which_part_it_is(name):
    model = adopt_hf(build(name))
    [*_, last] = modules_of(model, "feedforward")
    first = last.replace("output", "intermediate").replace("fc2", "fc1")
    weight_norm(model.get_submodule(last))
    assert list(modules_of(model, "feedforward"))[-1] == last
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[first]))
    assert list(modules_of(wrapped, "feedforward"))[-1] == f"base_model.model.{last}"


@pytest.mark.parametrize("name", ["OPT", "Llama"])
def test_feedforward_records_have_rows_and_positions_also_where_a_model_flattens_them(name):
    model = adopt_hf(build(name))
    inputs, _ = inputs_of(name)
    plain = records_of(model, **inputs, what="feedforward")
    [first, *_], [[stream]] = plain.values(), records_of(model, **inputs, what="residual", layers=0).values()
    with intervene(model, "feedforward", 0.0, layers=0, positions=[3]):
        [[part]], [[other]] = (records_of(model, **inputs, what=of, layers=0).values() for of in ("feedforward", "residual"))
    assert first[0].shape == (2, 11, 32) and all(records[0].shape == (2, 11, 32) for records in plain.values())
    assert (part[:, 3] == 0).all() and torch.equal(part[:, 4:], first[0][:, 4:])
    assert torch.equal(stream[:, 4:], other[:, 4:]) and not torch.equal(stream[:, 3], other[:, 3])
    with torch.no_grad(), intervene(model, "feedforward", plain):
        model(**inputs)


def test_each_layer_of_a_list_is_a_block_where_layers_share_their_attention():
    model = build("Llama")
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    assert list(modules_of(adopt_hf(model, check=False), "residual")) == BLOCKS["Llama"]  # they share a cache, too, which fails


@pytest.mark.parametrize("name", KINDS)
def test_a_released_model_has_no_blocks_and_a_copy_of_an_adopted_one_has_its_own(name):
    model, _ = adopted(name)
    twin = copy.deepcopy(model)
    release_hf(model)
    assert not modules_of(model, "residual") and list(modules_of(twin, "residual")) == BLOCKS[name]
    assert not set(modules_of(twin, "residual").values()) & set(model.modules())


@pytest.mark.parametrize("name", KINDS)
def test_padding_of_attention_mask_counts_neither_as_queries_nor_as_keys(name):
    model, inputs = adopted(name)
    source, target = inputs["attention_mask"] != 0, inputs.get("decoder_attention_mask", inputs["attention_mask"]) != 0
    with torch.no_grad(), watch(model, lambda look: (look.kind, look.real_queries, real_keys(look.call))) as seen:
        model(**inputs)
    wanted = {"causal": (target, target), "self": (source, source), "cross": (target, source)}
    for [(kind, queries, keys)] in seen.values():
        assert torch.equal(queries, wanted[kind][0]) and torch.equal(keys, wanted[kind][1])
    assert {kind for [(kind, *_)] in seen.values()} == {"Llama": {"causal"}, "Bert": {"self"}}.get(name, {*wanted})


def test_a_target_of_one_token_is_a_target_and_a_decoder_without_a_mask_has_no_padding_of_the_source():
    model, inputs = adopted("T5")
    start = {"decoder_input_ids": inputs["decoder_input_ids"][:, :1]}
    snapshot = take_snapshot(model, {"input_ids": inputs["input_ids"], **start})
    assert {(m.kind, m.queries, m.keys) for m in snapshot.maps if m.weights.shape[2:] == (1, 1)} == {("causal", *start, *start)}
    del inputs["decoder_attention_mask"]
    with torch.no_grad(), watch(model, lambda look: look.real_queries, layers="decoder") as seen:
        model(**inputs)
    assert all(queries.all() for [queries] in seen.values())


@pytest.mark.parametrize("name", KINDS)
def test_the_last_row_of_the_lens_is_the_answer_bit_for_bit(name):
    model, inputs = adopted(name)
    lens = logit_lens(model, **inputs)
    with torch.no_grad():
        plain = model(**inputs).logits
        assert lens.shape == (2, *plain.shape) and torch.equal(lens[-1], plain) and not torch.equal(lens[0], plain)
        [[stream]] = records_of(model, **inputs, what="residual", layers=-2).values()  # without the last layer
        last = model.get_submodule(BLOCKS[name][-1])
        with last.register_forward_hook(lambda module, args, out: (stream, *out[1:]) if isinstance(out, tuple) else stream):
            assert torch.equal(lens[0], model(**inputs).logits)


HYBRIDS = {name: BESIDE[name] for name in ("Jamba", "Bamba", "Qwen3Next")}
ENDS_WITHOUT = {**BESIDE["Jamba"], "num_hidden_layers": 3}
"""Layers without attention at the start and at the end."""


@pytest.mark.filterwarnings("ignore:.*layers whose attention does not pass")
@pytest.mark.parametrize("options", [*HYBRIDS.values(), ENDS_WITHOUT], ids=[*HYBRIDS, "ends without"])
def test_every_layer_of_a_hybrid_has_the_number_that_it_has_in_the_model(options, tmp_path):
    name = next((name for name, known in HYBRIDS.items() if known is options), "Jamba")
    cls = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = adopt_hf(cls(cls.config_class(**options)).eval())
    number, ids = model.config.num_hidden_layers, torch.tensor([[3, 5, 7, 11, 13]])
    layers = [f"model.layers.{i}" for i in range(number)]
    with torch.no_grad(), capture(model, what="residual") as seen, capture(model, what="weights") as weights:
        found = model(ids, output_hidden_states=True)
    assert list(seen) == layers
    for i in range(1, number):
        assert torch.equal(seen[layers[i - 1]][0], found.hidden_states[i])
    lens = logit_lens(model, input_ids=ids)
    assert len(lens) == number and torch.equal(lens[-1], found.logits)
    with intervene(model, "residual", seen[layers[0]][0], layers=[-1]):
        assert torch.equal(lens[0], model(ids).logits)
    attending = {next(i for i in range(number) if f"{layers[i]}." in core) for core in weights}
    assert 0 < len(attending) < number
    snapshot = read_snapshot(write_snapshot(take_snapshot(model, ids), tmp_path))
    asked = next_tokens("input_ids", ids.tolist(), str, 99)
    shown = heads_figure(head_scores(snapshot)).axes[0].get_yticklabels()
    assert [text.get_text() for text in shown] == [str(i) for i in sorted(attending)]
    assert [one["number"] for one in data_of(view(model, ids).page)["layers"]] == [str(i) for i in sorted(attending)]
    for i in range(number):
        assert list(records_of(model, ids, what="residual", layers=i)) == [layers[i]]
        if i in attending:
            [core] = records_of(model, ids, what="weights", layers=i)
            assert core in weights and f"{layers[i]}." in core
            assert [one.name for one in take_snapshot(model, ids, layers=i).maps] == [core]
            assert list(answers_without_heads(model, {"input_ids": ids}, asked, layers=i)) == [core]
            assert head_heatmap(snapshot, i, 0).axes[0].get_title() == head_heatmap(snapshot, core, 0).axes[0].get_title()
            continue
        with pytest.raises(ValueError, match=rf"layer {i} \({layers[i]}\) has no attention"):
            head_heatmap(snapshot, i, 0)
        for look in (lambda i=i: capture(model, layers=i), lambda i=i: intervene(model, "heads", 0.0, layers=i)):
            with pytest.raises(ValueError, match=rf"layer {i} \({layers[i]}\) has no attention"), look():
                pass


def with_pictures(name):
    """A model of text and pictures, and its inputs. Llava flattens its pictures to one row, Qwen2-VL to a matrix."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {
        **sizes,
        "vocab_size": 99,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    ids, shape = torch.tensor([[3, 5, 5, 5, 5, 7, 8, 9], [3, 5, 5, 5, 5, 7, 8, 2]]), (2, 3, 8, 8)
    if name == "Llava":
        vision = {**sizes, "model_type": "pixtral", "image_size": 8, "patch_size": 4, "head_dim": 8}
        options = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_token_index": 5}
        inputs = {"pixel_values": torch.randn(shape), "image_sizes": torch.tensor([[8, 8], [8, 8]])}
        config = transformers.LlavaConfig(text_config={**text, "model_type": "llama"}, vision_config=vision, **options)
        return transformers.LlavaForConditionalGeneration(config).eval(), {"input_ids": ids, **inputs}
    text["rope_parameters"] |= {"mrope_section": [1, 1, 2]}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 1}
    marks = {"image_token_id": 5, "video_token_id": 97, "vision_start_token_id": 3, "vision_end_token_id": 7}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config={**vision, "temporal_patch_size": 2}, **marks)
    inputs = {"pixel_values": torch.randn(8, 96), "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]])}
    inputs |= {"mm_token_type_ids": (ids == 5).int()}
    return transformers.Qwen2VLForConditionalGeneration(config).eval(), {"input_ids": ids, **inputs}


@pytest.mark.parametrize("name", ["Llava", "Qwen2VL"])
def test_a_model_with_pictures_records_their_blocks_and_the_lens_reads_those_of_the_text(name):
    model, inputs = with_pictures(name)
    adopt_hf(model, check=inputs)
    streams, parts = (records_of(model, **inputs, what=what) for what in ("residual", "feedforward"))
    assert [stream.shape for [stream] in streams.values()] == [(1, 8, 32)] * 2 + [(2, 8, 32)] * 2
    assert [part.shape for [part] in parts.values()] == [(1, 8, 32)] * 2 + [(2, 8, 32)] * 2
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
        wanted = torch.stack([model.lm_head(model.model.language_model.norm(states[1])), model(**inputs).logits])
    torch.testing.assert_close(logit_lens(model, **inputs), wanted)


@pytest.mark.parametrize("name", ["Llava", "Qwen2VL"])
def test_a_snapshot_of_a_model_with_pictures_has_the_layers_of_the_text_and_says_so(name):
    model, inputs = with_pictures(name)
    adopt_hf(model, check=inputs)
    with pytest.warns(UserWarning, match=r"read other tokens than input_ids, such as images, and are left out"):
        snapshot = take_snapshot(model, inputs, layers=[0, 2, 3])
    assert [(layer.name.split(".")[1], layer.weights.shape) for layer in snapshot.maps] == [
        ("language_model", (2, 4, 8, 8))
    ] * 2
    assert {head.layer for head in head_scores(snapshot).heads} == {layer.name for layer in snapshot.maps}
    with pytest.raises(ValueError, match=r"no attention core of .* ran that reads input_ids"):
        take_snapshot(model, inputs, layers=0)


def test_a_row_of_layers_that_read_different_tokens_is_refused():
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2}
    model = adopt_hf(transformers.SwinModel(transformers.SwinConfig(**sizes)).eval())
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}
    with pytest.raises(
        ValueError,
        match=r"has 8 rows of 4 queries and 4 keys, and pixel_values has 32 of 4: take a separate snapshot of layers that read",
    ):
        head_scores(take_snapshot(model, inputs))
    assert head_scores(take_snapshot(model, inputs, layers=[0])).heads


def test_the_lens_of_a_model_without_a_head_is_refused():
    model, inputs = adopted("Bert")
    with pytest.raises(ValueError, match=r"BertModel returns a \w+, not logits"):
        logit_lens(model.bert, **inputs)


@pytest.mark.parametrize("name", KINDS)
def test_a_head_that_is_knocked_out_costs_what_its_zeroed_output_costs(name):
    model, inputs = adopted(name)

    def loss(model):
        return -model(**inputs).logits[:, 0, 5]

    effects = knock_out_heads(model, loss)
    cores = modules_of(model, "heads")
    assert effects.names == tuple(cores) and effects.mean.shape == (len(cores), 4) and effects.rows == 2
    core = list(cores.values())[-1]
    with torch.no_grad():
        whole = loss(model)
        with core.register_forward_hook(lambda module, args, out: out.index_fill(1, torch.tensor([2]), 0.0)):
            change = float((loss(model) - whole).mean())
    assert float(effects.mean[-1, 2]) == pytest.approx(change, abs=1e-6) and change != 0


@pytest.mark.parametrize(("name", "what"), [*zip(KINDS, ("values", "heads", "weights"), strict=True)])
def test_patching_reads_the_logits_and_restores_a_share_of_them(name, what):
    model, clean = adopted(name)
    corrupted = {**clean, "input_ids": clean["input_ids"].clone().index_fill(1, torch.tensor([0, 3]), 7)}
    effects = patch_heads(model, clean, corrupted, lambda logits: logits[:, 4, 5], what=what)
    assert effects.mean.shape == (len(modules_of(model, "heads")), 4)
    assert effects.mean.isfinite().all() and effects.mean.abs().max() > 0


@pytest.mark.parametrize("name", KINDS)
def test_a_snapshot_its_scores_its_figure_and_its_page_leave_the_padding_out(name):
    model, inputs = adopted(name)
    snapshot = take_snapshot(model, inputs)
    source = inputs["attention_mask"] != 0
    assert torch.equal(snapshot.real["input_ids"], source)
    if name == "T5":
        assert torch.equal(snapshot.real["decoder_input_ids"], inputs["decoder_attention_mask"] != 0)
    seen = records_of(model, **inputs, what="weights")
    for layer in snapshot.maps:
        torch.testing.assert_close(layer.weights, seen[layer.name][0])
    row = snapshot.sentence(1)
    sizes = {axis: int(mask[1].sum()) for axis, mask in snapshot.real.items()}
    assert all(m.weights.shape[2:] == (sizes[m.queries], sizes[m.keys]) for m in row.maps)
    heads = head_scores(snapshot)
    assert len(heads.heads) == 4 * len(seen) and len(heads.lines()) == 1 + 4 * len(seen)
    assert heatmap_grid(snapshot, row=1).axes[0].images
    page = data_of(view(model, inputs, row=1).page)
    assert [layer["name"] for layer in page["layers"]] == list(seen)
    assert {axis: len(texts) for axis, texts in page["tokens"].items()} == sizes


@pytest.mark.parametrize("what", ["weights", "residual", "feedforward"])
@pytest.mark.parametrize("name", KINDS)
def test_gradient_checkpointing_of_the_model_is_recorded_once_a_call(name, what):
    model, inputs = adopted(name)
    model.train()
    with capture(model, what=what) as plain:
        model(**inputs)
    model.activation_checkpointing_enable()
    with capture(model, what=what) as seen:
        model(**inputs).logits.sum().backward()
    assert seen.keys() == plain.keys() and all(len(records) == 1 for records in seen.values())
    if name == "Llama":  # the others have dropout
        assert all(torch.equal(records[0], plain[key][0]) for key, records in seen.items())


@pytest.mark.parametrize("name", ["Llama", "Bert", "T5", "DistilBert", "Qwen3", "Bart"])
def test_the_probe_finds_the_matrices_of_separate_projections(name):
    model = adopt_hf(build(name))
    found = projections(model)
    assert found.keys() == modules_of(model, "weights").keys()
    for core, layers in found.items():
        layer = model.get_submodule(core.removesuffix(".core"))
        assert [next(n for n, p in layer.named_parameters() if p is layers[x].weight)[0] for x in "qkv"] == ["q", "k", "v"]
    assert not projections(adopt_hf(build("GPT2"))) and not projections(adopt_hf(build("Phi3")))


@pytest.mark.parametrize("name", KINDS)
def test_gradient_statistics_of_adopted_models_have_the_projections(name):
    model, inputs = adopted(name)
    found = gradient_statistics(model, inputs, lambda batch: (model(**batch).logits.square().sum(), {}))
    assert all({"snr_q", "snr_k", "snr_v", "grad_query_rms"} <= layer.keys() for layer in found.values()) and found
