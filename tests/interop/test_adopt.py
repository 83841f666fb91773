"""Hugging Face models with our core: the same function, looked at and changed."""

from __future__ import annotations

import copy
import io
from functools import partial
from threading import Thread

import accelerate
import peft
import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from minitx.analysis import capture, intervene
from minitx.analysis.recorder import watch
from minitx.analysis.statistics import real_keys
from minitx.interop import adopt_hf, release_hf
from minitx.interop.adopted_core import adopted_cores
from minitx.nn import MultiHeadAttention, Padding, fold_scale, is_recomputing, set_scale, swap_attention
from minitx.training.sharding import layers_to_shard, parallelize
from tests.interop.families import (
    BESIDE,
    DECODERS,
    GPT,
    GROUPED,
    NAMES,
    PARTLY,
    PICTURES,
    QUICK,
    REFUSED,
    TEXT,
    build,
    inputs_of,
    output_of,
)

pytestmark = pytest.mark.filterwarnings(  # test_trial.py is about them
    "ignore:.*adopted model is not checked",
    "ignore:.*did not run in the check",
    "ignore:.*layers whose attention does not pass",
)
TWO = ("Llama", "T5")
"""Families for one sentence about each oracle that tests/lattice/models.py asks of eight."""
ROUNDING = 1e-6  # eager computes its softmax in float32, also in a model of float64


def eager(name):
    model = build(name)
    model.set_attn_implementation("eager")
    return model


def answer(model, name="Llama", pad="left"):
    with torch.no_grad():
        return output_of(model, *inputs_of(name, pad=pad))


def assert_near(found, wanted, atol=1e-5, rtol=1e-4):
    torch.testing.assert_close(found, wanted, atol=float(wanted.abs().max()) * atol, rtol=rtol)


def as_double(inputs):
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def gradients(model, inputs, counts):
    model.zero_grad()
    out = output_of(model, inputs, counts)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", QUICK)
def test_an_adopted_model_has_the_logits_and_gradients_of_its_eager_self(name):
    if name in ("GptOss", "Mixtral", "Olmoe", "Jamba", "Qwen3Next"):
        pytest.skip("transformers' experts have no float64 product: the test in float32 has them")
    model, (inputs, counts) = eager(name).double(), inputs_of(name, pad="right")
    out, wanted = gradients(model, as_double(inputs), counts)
    adopted_out, found = gradients(adopt_hf(model), as_double(inputs), counts)
    assert_near(adopted_out, out, ROUNDING, rtol=0)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    torch.testing.assert_close(found, wanted, atol=largest * ROUNDING, rtol=0)


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("name", [*TWO, *BESIDE])  # also beside linear attention and Mamba
def test_padding_on_either_side_is_hidden_as_it_is_in_the_model(name, pad):
    model = eager(name)
    wanted = answer(model, name, pad)
    assert_near(answer(adopt_hf(model), name, pad), wanted)
    assert adopted_cores(model)


@pytest.mark.parametrize("name", TWO)
@pytest.mark.filterwarnings("ignore:.*counts the padding on the left")
def test_looking_changes_no_bit_and_knocking_a_head_out_changes_the_answer(name):
    model = adopt_hf(build(name))
    plain = answer(model, name)
    with capture(model, what="weights") as seen:
        assert torch.equal(answer(model, name), plain)
    with intervene(model, "heads", 0.0, heads=[1]):
        changed = answer(model, name)
    assert seen.keys() == {f"{name}.core" for name in adopted_cores(model)} and all(seen.values())
    for weights, *_ in seen.values():
        sums = weights.sum(-1)
        assert ((sums - 1).abs() < 1e-5).logical_or(sums == 0).all() or name == "GptOss"
    assert (changed - plain).abs().max() > 1e-6


@pytest.mark.parametrize("name", QUICK)
def test_output_attentions_are_the_weights_of_the_core(name):
    model, (inputs, _) = eager(name), inputs_of(name, pad="right")
    with torch.no_grad():
        wanted, found = model(**inputs, output_attentions=True), adopt_hf(model)(**inputs, output_attentions=True)
        silent = model(**inputs)
    kinds = [kind for kind in wanted if kind.endswith("attentions")]
    assert any(len(wanted[kind]) for kind in kinds)
    for kind in kinds:
        assert len(found[kind]) == len(wanted[kind])
        for ours, theirs in zip(found[kind], wanted[kind], strict=True):
            sees = ours.sum(-1, keepdim=True) > 0  # where a query sees no key, eager spreads its weight over all
            torch.testing.assert_close(ours, theirs * sees, atol=1e-5, rtol=1e-4)
        assert not silent.get(kind)


@pytest.mark.parametrize("name", QUICK)
def test_a_cache_and_generate_give_what_the_model_gives(name):
    model, (inputs, _) = eager(name), inputs_of(name, pad="left")
    if not model.can_generate() or "pixel_values" in inputs or "input_features" in inputs:
        pytest.skip("it does not generate text from text")
    options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    inputs.pop("decoder_input_ids", None)
    wanted = model.generate(**inputs, **options)
    adopt_hf(model)
    assert torch.equal(model.generate(**inputs, **options), wanted)
    assert torch.equal(model.generate(**inputs, **options, use_cache=False), wanted)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_attention_is_not_replaced_or_not_rightly_is_refused_and_given_back(name):
    model = build(name)
    before, modules = copy.deepcopy(model.config), dict(model.named_modules()).keys()
    why = "its answer differs by" if name in ("Git", "BigBirdPegasus") else "no layer calls transformers' AttentionInterface"
    with pytest.raises(ValueError, match=why):
        adopt_hf(model)
    assert model.config.to_dict() == before.to_dict() and dict(model.named_modules()).keys() == modules
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    with pytest.raises(TypeError, match="or a module that contains one"):
        adopt_hf(nn.Linear(2, 3))


def test_a_loss_about_masks_is_no_obstacle_and_a_model_without_attention_is_refused():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    sizes |= {"image_size": 16, "patch_size": 4, "num_blocks": 1, "num_queries": 3}
    eomt = transformers.EomtForUniversalSegmentation(transformers.EomtConfig(**sizes))
    assert len(adopted_cores(adopt_hf(eomt))) == 2  # its loss matches masks by a softmax
    with pytest.raises(ValueError, match="JambaModel has no attention to adopt"):
        adopt_hf(transformers.JambaModel(transformers.JambaConfig(**BESIDE["Jamba"] | {"num_hidden_layers": 1})))


def test_attention_of_torch_in_a_model_is_named_in_a_warning_and_taken_after_swap_attention():
    config = transformers.SiglipVisionConfig(**PICTURES["SiglipVision"] | {"vision_use_head": True})
    model, inputs = transformers.SiglipVisionModel(config).eval(), inputs_of("SiglipVision")[0]
    with torch.no_grad():
        wanted = model(**inputs).pooler_output
        with pytest.warns(UserWarning, match=r"^SiglipVisionModel: torch's .*swap_attention.*\(head\.attention\)"):
            adopt_hf(model)
        with capture(adopt_hf(swap_attention(release_hf(model)))) as seen:
            assert_near(model(**inputs).pooler_output, wanted)
    assert list(seen.kinds.values()) == ["self", "self", "cross"]


ONE_LAYER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}


def test_attention_whose_module_gets_queries_and_keys_apart_is_cross_where_they_are_two():
    four = {"blocks_per_stage": [1] * 4, "embed_dim_per_stage": [8] * 4, "num_attention_heads_per_stage": [1] * 4}
    backbone = {"model_type": "sam2_hiera_det_model", "hidden_size": 8, "num_attention_heads": 1, **four}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "mlp_dim": 16, "iou_head_hidden_dim": 16}
    config = transformers.Sam2Config(
        vision_config={"backbone_config": backbone, "backbone_channel_list": [8] * 4, "fpn_hidden_size": 16},
        prompt_encoder_config={"hidden_size": 16, "image_size": 64, "patch_size": 16, "mask_input_channels": 4},
        mask_decoder_config=sizes,
    )
    model = adopt_hf(transformers.Sam2Model(config).eval())
    pictures = [torch.randn(1, 2, 16, 16), torch.randn(1, 4, 8, 8), torch.randn(1, 16, 4, 4)]
    with torch.no_grad(), capture(model, layers="mask_decoder") as seen:
        model(image_embeddings=pictures, input_points=torch.ones(1, 1, 1, 2))
    assert {name: "self" if "self_attn" in name else "cross" for name in seen} == seen.kinds and len(seen) == 4


def test_padded_text_is_no_query_of_attention_to_pictures_between_its_layers():
    vision = {**ONE_LAYER, "image_size": 8, "patch_size": 4}
    options = {**TEXT, **ONE_LAYER, "cross_layer_interval": 1, "additional_vocab_size": 0}
    config = transformers.IdeficsConfig(**options, vision_config=vision)
    inputs = inputs_of("Llama", pad="left")[0] | {"pixel_values": torch.randn(2, 1, 3, 8, 8)}
    inputs["image_attention_mask"] = torch.ones(2, 11, 1, dtype=torch.long)
    model = adopt_hf(transformers.IdeficsForVisionText2Text(config).eval())
    with watch(model, lambda look: look.real_queries, layers="cross") as seen:
        answer_to(model, inputs)
    [[queries]] = seen.values()
    assert torch.equal(queries, inputs["attention_mask"].bool()) and [*seen.kinds.values()] == ["cross"]


def test_the_decoder_of_a_model_without_sdpa_sees_no_later_token():
    sizes = {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_sparse_step": 0}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_sparse_step": 0}
    config = transformers.NllbMoeConfig(**sizes, **layers, vocab_size=99, max_position_embeddings=64)
    model = transformers.NllbMoeForConditionalGeneration(config).eval()  # its attention does not say that it is causal
    ids = torch.randint(3, 99, (2, 11))
    with torch.no_grad():
        wanted = model(input_ids=ids, decoder_input_ids=ids[:, :7]).logits
        with capture(adopt_hf(model), what="weights") as seen:
            got = model(input_ids=ids, decoder_input_ids=ids[:, :7]).logits
    torch.testing.assert_close(got, wanted)
    assert list(seen.kinds.values()) == ["self", "causal", "cross"]
    assert not seen["model.decoder.layers.0.self_attn.core"][0].triu(1).any()


def mllama():
    """A model whose modules do not say whether they are causal, with pictures in its second layer, and its inputs."""
    text = {**GROUPED, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 4}
    vision |= {"image_size": 8, "patch_size": 4, "max_num_tiles": 2, "vision_output_dim": 64}
    vision |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2]]}
    config = transformers.MllamaConfig(
        text_config=text, vision_config=vision, image_token_index=98, attn_implementation="eager"
    )
    model = transformers.MllamaForConditionalGeneration(config).eval()
    for gate in ("cross_attn_attn_gate", "cross_attn_mlp_gate"):
        nn.init.ones_(getattr(model.model.language_model.layers[1], gate))
    inputs = inputs_of("Llama", pad="left")[0] | {"pixel_values": torch.randn(2, 1, 2, 3, 8, 8)}
    inputs |= {"aspect_ratio_ids": torch.tensor([[2], [1]]), "aspect_ratio_mask": torch.tensor([[[1, 1]], [[1, 0]]])}
    return model, inputs | {"cross_attention_mask": inputs["aspect_ratio_mask"][:, None].expand(-1, 11, -1, -1)}


def test_a_model_with_pictures_in_layers_of_their_own_is_cross_attention_there_also_with_a_cache():
    model, inputs = mllama()
    real = inputs["attention_mask"].bool()
    wanted = answer_to(model, inputs).logits
    written = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    with watch(adopt_hf(model), lambda look: look.real_queries) as seen:
        logits = answer_to(model, inputs).logits
    assert_near(logits[real], wanted[real])
    kinds = {"vision": "self", "self_attn": "causal", "cross_attn": "cross"}
    assert all(next(kind for part, kind in kinds.items() if part in name) == found for name, found in seen.kinds.items())
    assert all(torch.equal(records[0], real) for name, records in seen.items() if "language" in name)
    with capture(model) as seen:
        assert torch.equal(model.generate(**inputs, max_new_tokens=3, do_sample=False), written)
    assert seen.kinds["model.language_model.layers.1.cross_attn.core"] == "cross"


def test_a_model_inside_another_can_be_adopted_alone():
    outer = build("Llama")
    before = answer(outer)
    adopt_hf(outer.model)
    assert outer.config._attn_implementation == "sdpa"
    torch.testing.assert_close(answer(outer), before, atol=1e-5, rtol=1e-4)
    assert len(adopted_cores(outer)) == 2


@pytest.mark.parametrize("name", TWO)
def test_release_gives_the_model_back(name):
    model = build(name)
    config, state = model.config, {key: value.clone() for key, value in model.state_dict().items()}
    modules, hooks = dict(model.named_modules()).keys(), sum(len(m._forward_pre_hooks) for m in model.modules())
    before = answer(model, name)
    adopt_hf(model)
    assert model.state_dict().keys() == state.keys()
    release_hf(model)
    assert torch.equal(answer(model, name), before)
    assert model.config is config and dict(model.named_modules()).keys() == modules
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == hooks
    with pytest.raises(ValueError, match="is not adopted"):
        release_hf(model)
    with pytest.raises(ValueError, match="is already adopted"):
        adopt_hf(adopt_hf(model))


def test_attributes_named_like_ours_are_kept():
    model = build("Llama")
    model.model.adoption = "their own"
    assert release_hf(adopt_hf(model)).model.adoption == "their own"
    model.model.layers[1].self_attn.core = nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn already has an attribute named core"):
        adopt_hf(model)


def test_a_number_among_the_weights_of_an_attention_is_no_obstacle_to_a_fold():
    model = build("Llama").double()
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_parameter("gain", nn.Parameter(torch.tensor(0.5)))
    wanted = answer(model)
    fold_scale(adopt_hf(model), "inv")
    torch.testing.assert_close(answer(model), wanted)


def test_of_two_models_made_from_one_config_object_one_is_adopted_and_released():
    one = build("Llama")
    two = type(one)(one.config).eval()
    shared = one.config
    before = answer(one), answer(two)
    adopt_hf(one)
    assert torch.equal(answer(two), before[1]) and not adopted_cores(two)
    assert two.config is shared and shared._attn_implementation == "sdpa"
    adopt_hf(two)
    release_hf(one)
    assert torch.equal(answer(one), before[0]) and one.config is shared
    torch.testing.assert_close(answer(two), before[1], atol=1e-5, rtol=1e-4)
    assert not adopted_cores(one) and len(adopted_cores(two)) == 2
    assert len(two(**inputs_of("Llama")[0], output_attentions=True).attentions) == 2
    three = type(one)(two.config).eval()
    three.load_state_dict(two.state_dict())
    with pytest.raises(RuntimeError, match=r"call adopt_hf\(model\)"):
        answer(three)
    assert torch.equal(answer(adopt_hf(three)), answer(two)) and len(adopted_cores(two)) == 2
    torch.testing.assert_close(answer(release_hf(three)), answer(two), atol=1e-5, rtol=1e-4)
    assert len(adopted_cores(two)) == 2


def test_a_container_of_two_adopted_models_is_released_and_a_part_of_a_model_is_refused():
    both = nn.ModuleList([adopt_hf(build("Llama")), adopt_hf(build("Bert"))])
    with pytest.raises(ValueError, match="LlamaModel is a part of an adopted model"):
        release_hf(both[0].model)
    assert len(adopted_cores(release_hf(both))) == 0
    assert all(model.config._attn_implementation == "sdpa" for model in both)


@pytest.mark.parametrize("look", [capture, lambda model: intervene(model, "heads", 0.0, layers=[0], heads=[0])])
def test_a_model_that_is_released_under_someone_who_looks_is_told(look):
    model = adopt_hf(build("Llama"))

    def release_inside():
        with look(model):
            answer(model, "Llama")
            release_hf(model)

    with pytest.warns(UserWarning, match=r"attn\.core.* left the model \(release_hf\) while the context was open"):
        release_inside()


def test_a_saved_adopted_model_is_the_saved_model(tmp_path):
    model = build("Llama")
    model.save_pretrained(tmp_path / "plain")
    adopt_hf(model).save_pretrained(tmp_path / "adopted")
    files = [{path.name: path.read_bytes() for path in (tmp_path / kind).iterdir()} for kind in ("plain", "adopted")]
    assert files[0] == files[1]


@pytest.mark.parametrize("name", TWO)
@pytest.mark.filterwarnings("ignore:.*counts the padding on the left")
def test_a_pickled_adopted_model_and_a_copy_of_one_are_adopted_models_of_their_own(name):
    model, file = adopt_hf(build(name)), io.BytesIO()
    torch.save(model, file)
    wanted = answer(model, name)
    others = [torch.load(io.BytesIO(file.getvalue()), weights_only=False), copy.deepcopy(model)]
    release_hf(model)
    for other in others:
        assert torch.equal(answer(other, name), wanted)
        with capture(other, what="weights") as seen:
            answer(other, name)
        assert len(seen) == len(adopted_cores(other)) > 0 == len(adopted_cores(model))
        assert not adopted_cores(release_hf(other))


def test_an_adopted_model_trains_under_ddp(process_group):
    model = adopt_hf(build("Llama"))
    inputs, counts = inputs_of("Llama", pad="left")
    out, wanted = gradients(model, inputs, counts)
    found_out, _ = gradients(nn.parallel.DistributedDataParallel(model), inputs, counts)
    assert torch.equal(found_out, out)
    assert all(torch.equal(p.grad, wanted[name]) for name, p in model.named_parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch says so of layers that return a view
@pytest.mark.parametrize("name", ["Llama", "Bert", "T5"])
@pytest.mark.parametrize("is_adopted", [False, True])
def test_fsdp_shards_each_layer_of_a_model_of_transformers(name, is_adopted, process_group):
    model = build(name)
    inputs, counts = inputs_of(name, pad="left")
    wanted, _ = gradients(model, inputs, counts)
    model = adopt_hf(model) if is_adopted else model
    parallelize(model, DeviceMesh("cpu", [0]), layers_to_shard(model))
    found, _ = gradients(model, inputs, counts)
    sharded = {key for key, module in model.named_modules() if isinstance(module, FSDPModule)}
    layers = {"Llama": "model.layers.", "Bert": "bert.encoder.layer.", "T5": "coder.block."}
    assert len([key for key in sharded if layers[name] in key]) == (4 if name == "T5" else 2) and "" in sharded
    assert_near(found, wanted)


@pytest.mark.parametrize(("name", "implementation"), [
    *(("GPT2", "static"), ("Llama", "dynamic"), ("T5", "static")),
    *(pytest.param(name, kind, marks=pytest.mark.slow) for name in ("Mistral", "Gemma2", "GptOss", "Bart") for kind in ("static", "dynamic")),
])  # fmt: skip
def test_caches_of_every_kind_and_beams_give_what_the_model_gives(name, implementation):
    model, (inputs, _) = eager(name), inputs_of(name, pad="left")
    inputs.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 15, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"cache_implementation": implementation}
    wanted = [model.generate(**inputs, **options, num_beams=beams) for beams in (1, 3)]
    adopt_hf(model)
    for beams, ids in zip((1, 3), wanted, strict=True):
        assert torch.equal(model.generate(**inputs, **options, num_beams=beams), ids)


@pytest.mark.parametrize("num_logits", [1, 3])
@pytest.mark.parametrize("is_static", [False, True])
def test_layers_that_share_keys_and_drop_queries_stay_causal(is_static, num_logits):
    sizes = {**DECODERS["Gemma3"], "num_hidden_layers": 3, "global_head_dim": 8, "vocab_size_per_layer_input": 99}
    layers = ["sliding_attention", "full_attention", "full_attention"]
    config = transformers.Gemma4TextConfig(
        **sizes, layer_types=layers, num_kv_shared_layers=1, hidden_size_per_layer_input=4, attn_implementation="eager"
    )
    model = transformers.Gemma4ForCausalLM(config).eval()
    ids = torch.randint(3, 99, (2, 11))

    def last_logits():
        cache = transformers.StaticCache(config=model.config, max_cache_len=16) if is_static else None
        with torch.no_grad():
            return model(ids, past_key_values=cache, logits_to_keep=num_logits).logits

    wanted = last_logits()
    adopt_hf(model)
    torch.testing.assert_close(last_logits(), wanted, atol=1e-6, rtol=1e-4)


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model.train().requires_grad_(True)


def checkpointing(model, reentrant, inputs):
    """The model, which checkpoints its layers."""
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant and "input_ids" in inputs:
        model.enable_input_require_grads()
    return model


def assert_same_gradients(found, wanted):
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    torch.testing.assert_close(found, wanted, atol=largest * 1e-4, rtol=0)  # 1.3e-5 in a T5 as it is


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", TWO)
def test_gradient_checkpointing_gives_the_same_gradients_also_with_attentions_asked_for(name, reentrant):
    model = without_dropout(adopt_hf(build(name)))
    inputs, counts = inputs_of(name, pad="left")
    out, wanted = gradients(model, inputs, counts)
    checkpointing(model, reentrant, inputs)
    for extra in ({}, {"output_attentions": True}):
        found_out, found = gradients(model, inputs | extra, counts)
        assert_near(found_out, out)
        assert_same_gradients(found, wanted)


@pytest.mark.parametrize("backend", ["sdpa", "chunked"])
@pytest.mark.parametrize("name", ["Llama", "Bert", "T5"])
def test_reentrant_checkpointing_gives_the_same_gradients_with_every_backend(name, backend):  # the other kind: tests/lattice
    model = without_dropout(adopt_hf(build(name), backend=backend))
    inputs, counts = inputs_of(name, pad="left")
    _, wanted = gradients(model, inputs, counts)
    _, found = gradients(checkpointing(model, True, inputs), inputs, counts)
    assert_same_gradients(found, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_layers_that_run_again_after_another_call_have_their_own_padding_and_attentions(name, reentrant):
    model = without_dropout(adopt_hf(build(name), backend="chunked"))
    (left, _), (right, _) = inputs_of(name, pad="left"), inputs_of(name, pad="right")
    again = []

    def note(core, args):
        if is_recomputing():
            again.append((real_keys(args[0]), args[0].need_weights, args[0].is_cross))

    for module in adopted_cores(model).values():
        module.core.register_forward_pre_hook(note)

    def both():
        model.zero_grad()
        first, second = model(**left, output_attentions=True), model(**right)
        (first.logits.square().sum() + second.logits.square().sum()).backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    wanted = both()
    assert not again
    assert_same_gradients(checkpointing(model, reentrant, left) and both(), wanted)
    sources = [keys for keys, _, is_cross in again if is_cross or name == "Llama"]
    for inputs in (left, right):
        assert sum(torch.equal(keys, inputs["attention_mask"].bool()) for keys in sources) == len(sources) / 2 > 0
    assert sum(wanted for _, wanted, _ in again) == len(again) / 2
    assert model.adoption.tracker.running.calls == []


@pytest.mark.parametrize("backend", ["math", "sdpa", "chunked"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_torch_around_a_layer_gives_the_same_gradients(reentrant, backend):
    model = without_dropout(adopt_hf(build("Llama"), backend=backend))
    inputs, counts = inputs_of("Llama", pad="left")
    inputs["use_cache"] = False
    _, wanted = gradients(model, inputs, counts)
    model.enable_input_require_grads()
    for layer in model.model.layers:
        layer.forward = partial(run_checkpointed, layer.forward, reentrant)
    _, found = gradients(model, inputs, counts)
    assert_same_gradients(found, wanted)


def run_checkpointed(forward, reentrant, hidden, **options):
    return checkpoint(partial(forward, **options), hidden, use_reentrant=reentrant)


def test_release_gives_the_checkpoint_function_back_and_a_copy_has_its_own():
    model = without_dropout(adopt_hf(build("Llama")))
    inputs, counts = inputs_of("Llama", pad="left")
    checkpointing(model, False, inputs)
    function = model.model.layers[0]._gradient_checkpointing_func
    _, wanted = gradients(model, inputs, counts)
    twin = copy.deepcopy(model)
    assert twin.model.layers[0]._gradient_checkpointing_func.tracker is twin.adoption.tracker is not model.adoption.tracker
    assert_same_gradients(gradients(twin, inputs, counts)[1], wanted)
    assert release_hf(model).model.layers[0]._gradient_checkpointing_func is function
    assert_same_gradients(gradients(model, inputs, counts)[1], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_compiled_adopted_model_is_one_graph_with_the_same_answer(name):
    model = adopt_hf(build(name))
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_near(answer(compiled, name), answer(model, name), 1e-6, rtol=1e-5)
    with pytest.raises(RuntimeError, match="compiled"), capture(compiled, what="weights"):
        pass


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float16) for name in QUICK), ("Llama", torch.bfloat16), ("Llama", None)]
)
def test_in_half_precision_an_adopted_model_is_as_near_to_float32_as_its_eager_self(name, dtype):
    model, (inputs, counts) = eager(name), inputs_of(name, pad="left")
    model.config.use_cache = False  # under autocast, a cache makes float32 of all
    with torch.no_grad():
        wanted = output_of(model, inputs, counts)
        model.to(dtype)
        inputs = {key: value.to(dtype or value.dtype) if value.is_floating_point() else value for key, value in inputs.items()}
        with torch.autocast("cpu", enabled=dtype is None):
            low, found = output_of(model, inputs, counts), output_of(adopt_hf(model), inputs, counts)
    assert found.dtype == low.dtype == (dtype or low.dtype)
    allowed = 2 * (low.float() - wanted).abs().max() + torch.finfo(low.dtype).eps * wanted.abs().max()
    assert (found.float() - wanted).abs().max() <= allowed


@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:`is_gradient_checkpointing`")  # peft says so
@pytest.mark.parametrize(("name", "first"), [*((name, "peft") for name in QUICK), ("Llama", "adopt_hf")])
@pytest.mark.filterwarnings("ignore:.*counts the padding on the left")
def test_lora_before_and_after_adopting_is_the_same_model(name, first):
    model, options = build(name), peft.LoraConfig(r=2, init_lora_weights=False, target_modules="all-linear")
    torch.manual_seed(1)
    plain = peft.get_peft_model(copy.deepcopy(model), options)
    torch.manual_seed(1)
    adopts_first = first == "adopt_hf"
    wrapped = peft.get_peft_model(adopt_hf(model) if adopts_first else model, options)
    wrapped = wrapped if adopts_first else adopt_hf(wrapped)
    wanted, found = answer(plain, name), answer(wrapped, name)
    assert_near(found, wanted)
    with capture(wrapped, what="weights") as seen:
        assert torch.equal(answer(wrapped, name), found)
    assert len(seen) == len(adopted_cores(wrapped)) > 0
    assert torch.equal(answer(release_hf(wrapped), name), wanted)
    merged = adopt_hf(wrapped).merge_and_unload()
    assert not adopted_cores(release_hf(merged))


def keys_that_count(model, **inputs):
    """Which keys of each layer are not padding."""
    with torch.no_grad(), watch(model, lambda look: real_keys(look.call)) as seen:
        model(**inputs)
    return {core: keys for core, [keys] in seen.items()}


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_encoder_and_decoder_of_the_same_length_keep_their_own_padding(name):
    model = adopt_hf(build(name))
    inputs, _ = inputs_of(name, pad="left")
    inputs["decoder_input_ids"] = inputs["input_ids"]
    source, target = inputs["attention_mask"].bool(), torch.ones(2, 11, dtype=torch.bool)
    target[0, 9:] = False
    with_mask = keys_that_count(model, **inputs, decoder_attention_mask=target.long())
    without = keys_that_count(model, **inputs)
    for core in with_mask:
        is_cross = "EncDec" in core or "encoder_attn" in core
        is_target = "decoder." in core and not is_cross
        assert torch.equal(with_mask[core], target if is_target else source)
        assert torch.equal(without[core], torch.ones_like(source) if is_target else source)


def test_a_positional_mask_is_padding_too_and_is_forgotten_after_the_call():
    model = adopt_hf(build("Llama"))
    inputs, _ = inputs_of("Llama", pad="left")
    with capture(model, what="weights"), torch.no_grad():
        model(inputs["input_ids"], inputs["attention_mask"])
    seen = keys_that_count(model.model, **inputs)
    assert all(torch.equal(mask, inputs["attention_mask"].bool()) for mask in seen.values())
    assert model.adoption.tracker.running.calls == []
    with pytest.raises(AttributeError), torch.no_grad():
        model(**inputs, past_key_values=3)  # a call that fails
    assert model.adoption.tracker.running.calls == []


def test_padding_of_a_text_is_known_after_a_model_of_pictures_has_run():
    text = {"model_type": "gemma", **ONE_LAYER, "vocab_size": 99, "num_key_value_heads": 2, "head_dim": 8}
    vision = {"model_type": "siglip_vision_model", **ONE_LAYER, "image_size": 8, "patch_size": 4, "vision_use_head": False}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=32, image_token_index=3)
    model = adopt_hf(transformers.PaliGemmaForConditionalGeneration(config).eval())
    ids = torch.tensor([[3, 3, 3, 3, 7, 8, 9], [3, 3, 3, 3, 5, 0, 0]])
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8), "token_type_ids": torch.zeros_like(ids)}
    seen = keys_that_count(model, **inputs, attention_mask=(ids > 0).long())
    assert len(seen) == 2 and all(
        torch.equal(keys, ids > 0) if "language" in core else keys.all() for core, keys in seen.items()
    )


def test_keys_that_a_mask_of_floats_hides_are_hidden_from_the_statistics():
    model, records = adopt_hf(build("Llama")), []
    ids, real = (inputs_of("Llama", pad="right")[0][name] for name in ("input_ids", "attention_mask"))
    visible = torch.ones(11, 11, dtype=torch.bool).tril() & real.bool()[:, None, None]
    for mask in (visible, *(torch.zeros(visible.shape).masked_fill(~visible, least) for least in (torch.finfo().min, -1e4))):
        with torch.no_grad(), capture(model) as seen:
            model(ids, mask)
        assert set(seen.kinds.values()) == {"causal"}
        records.append([calls[0] for calls in seen.values()])
    for wanted, *others in zip(*records, strict=True):
        for found in others:
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
            assert found["max_logit"].max() < 100


def test_a_mask_of_floats_that_a_layer_makes_for_itself_is_not_kept_until_the_model_ends():
    model, kept = transformers.DogeForCausalLM(transformers.DogeConfig(**GROUPED)).eval(), []
    inputs = inputs_of("Llama", pad="left")[0]
    real, wanted = inputs["attention_mask"].bool(), answer_to(model, inputs).logits
    model.lm_head.register_forward_pre_hook(lambda *_: kept.append(list(model.adoption.tracker.call.masks)))
    assert_near(answer_to(adopt_hf(model), inputs).logits[real], wanted[real])
    assert kept == [[]]


def test_calls_of_two_threads_at_once_have_each_their_own_padding_and_attentions():
    model, other = adopt_hf(build("Llama")), []
    inputs, _ = inputs_of("Llama", pad="left")
    short = {name: value[:, -7:] for name, value in inputs.items()}
    alone, alone_short = answer_to(model, inputs), answer_to(model, short, output_attentions=False)

    def call_between_two_layers(*_):
        if not other:
            other.append(None)
            thread = Thread(target=lambda: other.append(answer_to(model, short, output_attentions=False)))
            thread.start(), thread.join()

    with model.model.layers[1].register_forward_pre_hook(call_between_two_layers):
        between = answer_to(model, inputs)
    assert torch.equal(between.logits, alone.logits) and torch.equal(other[1].logits, alone_short.logits)
    assert all(map(torch.equal, between.attentions, alone.attentions)) and other[1].attentions is None


def answer_to(model, inputs, output_attentions=True):
    with torch.no_grad():
        return model(**inputs, output_attentions=output_attentions)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
@pytest.mark.parametrize("static", [False, True])
def test_the_padding_is_known_with_a_static_cache_and_with_a_window(name, static):
    model = adopt_hf(build(name))
    inputs, _ = inputs_of(name, pad="left")
    ids, real = inputs["input_ids"], inputs["attention_mask"]
    kind = transformers.StaticCache if static else transformers.DynamicCache
    cache = kind(config=model.config, **({"max_cache_len": 17} if static else {}))
    with torch.no_grad():
        whole = model(ids, real).logits[:, -4:]
        with watch(model, lambda look: (real_keys(look.call), look.real_queries)) as seen:
            pieces = [model(ids[:, :7], real[:, :7], past_key_values=cache).logits]
            pieces += [model(ids[:, n : n + 1], real[:, : n + 1], past_key_values=cache).logits for n in range(7, 11)]
    assert_near(torch.cat(pieces[1:], 1), whole)
    for records in seen.values():
        for n, (keys, queries) in zip((7, 8, 9, 10, 11), records, strict=True):
            assert torch.equal(keys, real[:, n - keys.shape[1] : n].bool())
            assert torch.equal(queries, real[:, n - queries.shape[1] : n].bool())


def test_the_cores_of_layers_on_several_devices_follow_their_queries():
    model = adopt_hf(build("Llama"))
    inputs, _ = inputs_of("Llama", pad="left")

    def move(module, args, options):
        def there(value):
            if isinstance(value, tuple):
                return tuple(map(there, value))
            return value.to("meta") if isinstance(value, torch.Tensor) else value

        return there(args), {key: there(value) for key, value in options.items()}

    for module in (model.model.layers[1], model.model.norm, model.lm_head):
        module.to("meta").register_forward_pre_hook(move, with_kwargs=True)
    calls = []
    for module in adopted_cores(model).values():
        module.core.register_forward_pre_hook(lambda core, args: calls.append(args[0]))
    with torch.no_grad():
        logits = model(**inputs).logits
        assert logits.device.type == "meta" and logits.shape == (2, 11, 99)
        attentions = model(**inputs, output_attentions=True).attentions
    assert [weights.device.type for weights in attentions] == ["cpu", "meta"]
    for call in calls:
        masks = [part.key_mask for part in call.mask.parts() if isinstance(part, Padding)]
        tensors = [call.query, call.key, call.value, *masks]
        assert len(tensors) == 4 and {tensor.device for tensor in tensors} == {call.query.device}


def test_weights_are_computed_in_the_calls_that_ask_for_them_only():
    model, ids = adopt_hf(build("T5")), inputs_of("T5", pad="left")[0]["input_ids"]
    for wanted in (True, False):
        model.encoder(ids, output_attentions=wanted)
        assert model.adoption.tracker.needs_weights == wanted


@pytest.mark.parametrize("name", QUICK)
def test_set_scale_gives_the_model_of_another_scale_and_release_gives_its_own_back(name):
    model = eager(name)
    scaled = copy.deepcopy(model)
    for module in scaled.modules():
        if hasattr(module, "scaling"):
            module.scaling = 0.5
    own = answer(model, name)
    adopt_hf(model)
    assert set_scale(model, 0.25, factor=2.0) is model
    changed = answer(model, name)
    assert_near(changed, answer(scaled, name))
    assert (changed - own).abs().max() > 1e-4
    assert_near(answer(release_hf(model), name), own, 0, rtol=0)


def test_scales_that_an_adopted_model_cannot_have_are_refused():
    model = adopt_hf(build("Llama"))
    for change in (set_scale, fold_scale):
        with pytest.raises(ValueError, match="learned"):
            change(model, "learned")
    with pytest.raises(ValueError, match="scale is 0"):
        fold_scale(model, 0)
    with pytest.raises(ValueError, match="factor=nan must be finite"):
        set_scale(model, "inv", factor=float("nan"))


FOLDED = ["GPTNeoX", "GPTBigCode", "Phi3", "Persimmon", "Gemma3", "Qwen3", "Olmo2", "ModernBert", "Albert", "Bart", "Qwen3Next"]


@pytest.mark.parametrize("name", ["GPT2", *FOLDED])  # the families of the lattice: tests/lattice/models.py
def test_folding_the_scale_keeps_the_function_and_release_gives_the_weights_back(name):
    model = build(name)
    inputs, counts = inputs_of(name, pad="right")
    if name not in (*BESIDE, "GptOss", "Mixtral", "Olmoe"):
        model, inputs = model.double(), as_double(inputs)
    adopt_hf(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    scales = []
    for module in adopted_cores(model).values():
        module.core.register_forward_pre_hook(lambda core, args: scales.append(args[0].scale * core.model_factor))
    with torch.no_grad():
        wanted = output_of(model, inputs, counts)
        assert fold_scale(model, -0.25, factor=2.0, inputs=inputs if name == "Whisper" else None) is model
        scales.clear()
        found = output_of(model, inputs, counts)
    assert_near(found, wanted, 2e-6, rtol=0)
    assert set(scales) == {-0.5}
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, state[key])}
    folds = [module.core.folds for module in adopted_cores(model).values()]
    for query, key in folds:  # a square root of the ratio each
        assert -query.ratio == key.ratio
    assert len({key.rpartition(".")[0] for key in changed}) == len({fold.module for pair in folds for fold in pair})
    assert all(not key.endswith(".v_proj.weight") for key in changed)
    for key, value in release_hf(model).state_dict().items():
        is_offset = name in ("Gemma3", "Qwen3Next")  # their norms multiply by 1 + weight, which is what rounds
        torch.testing.assert_close(value, state[key], atol=2e-7 if is_offset and key.endswith("norm.weight") else 0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_weights_of_a_model_in_training_mode_are_folded_in_their_own_precision(dtype):
    model = adopt_hf(build("Llama").to(dtype).train().requires_grad_(False))
    before, wanted = torch.get_rng_state(), answer(model)
    found = answer(fold_scale(model, 8**-0.5 / 4))  # a power of two: no rounding
    assert torch.equal(found, wanted) and torch.equal(torch.get_rng_state(), before)
    assert model.training and not any(p.requires_grad or p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ["Llama", "OPT", "Whisper"])
def test_a_scale_replaces_the_one_with_which_a_layer_multiplies_its_own_queries(name):
    model, (inputs, counts) = build(name), inputs_of(name, pad="right")
    with torch.no_grad():
        wanted = output_of(model, inputs, counts)
        for module in adopted_cores(adopt_hf(copied := copy.deepcopy(model))).values():
            module.scaling = 1.0
        unscaled = output_of(copied, inputs, counts)
        assert_near(output_of(set_scale(adopt_hf(model), "inv_sqrt"), inputs, counts), wanted)
        assert_near(output_of(set_scale(model, "unscaled"), inputs, counts), unscaled)
        assert (unscaled - wanted).abs().max() > 1e-3


def test_another_attention_function_after_a_change_of_the_scale_is_refused():
    model = adopt_hf(build("Llama"))
    model.set_attn_implementation("sdpa")
    wanted = answer(model)
    set_scale(model, "unscaled")
    for _ in range(3):  # not the first time only
        with pytest.raises(RuntimeError, match="set to 'sdpa' after its scale was changed"):
            answer(model)
    model.set_attn_implementation("minitx")
    assert (answer(model) - wanted).abs().max() > 1e-3
    torch.testing.assert_close(answer(release_hf(model)), wanted)


def shared_by_two_layers(model, part):
    first, second = (layer.self_attn for layer in model.model.layers)
    setattr(second, part, getattr(first, part))


def in_one_memory(model, part):
    """The weight of ``part`` and that of the output of the first layer have rows in common."""
    layer = model.model.layers[0].self_attn
    weight, out = getattr(layer, part).weight, layer.o_proj.weight
    both = torch.randn(40, 32, dtype=weight.dtype)
    getattr(layer, part).weight, layer.o_proj.weight = nn.Parameter(both[: len(weight)]), nn.Parameter(both[-len(out) :])


def tied_to_the_output(model):
    layer = model.model.layers[1].self_attn
    layer.q_proj.weight = layer.o_proj.weight


def one_norm_for_queries_and_keys(model):
    layer = model.model.layers[1].self_attn
    layer.q_norm = layer.k_norm


def not_proportional(model, part):
    getattr(model.model.layers[1].self_attn, part).register_forward_hook(lambda module, args, out: out + 1)


def clipped(model):
    model.config.clip_qkv = 8.0


def packed(model):
    layer = model.model.layers[1].self_attn.q_proj
    layer.weight = type("Packed", (nn.Parameter,), {})(layer.weight)  # as quantised weights: what is written may not arrive


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("Llama", tied_to_the_output, r"o_proj\.weight is also the weight of queries"),
        ("Llama", partial(in_one_memory, part="q_proj"), r"o_proj\.weight is also .* shares memory"),
        ("Llama", partial(not_proportional, part="q_proj"), "not proportional .* differs by"),
        ("Olmo", clipped, "clip_qkv=8.0"),
        ("Llama", packed, r"layers\.1\.self_attn\.q_proj, Linear, is no projection or norm with plain weights"),
    ],
)
def test_weights_that_make_more_than_the_queries_are_refused_and_left_as_they_were(name, change, reason):
    model = build(name)
    change(model)
    state = {key: value.clone() for key, value in adopt_hf(model).state_dict().items()}
    with pytest.raises(ValueError, match=reason):
        fold_scale(model)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(module.core.scale is None for module in adopted_cores(model).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_weights_hide_no_wrong_fold_behind_the_rounding_of_the_answer(dtype):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)).eval().to(dtype)  # weights of a new model
    not_proportional(model, "q_proj")
    with pytest.raises(ValueError, match="not proportional"):
        fold_scale(adopt_hf(model))
    torch.manual_seed(0)
    config = transformers.GPTBigCodeConfig(**GPT, multi_query=False)  # queries, keys and values by head, under GPT-2's name
    with pytest.raises(ValueError, match="not proportional"):
        fold_scale(adopt_hf(transformers.GPTBigCodeForCausalLM(config).eval().to(dtype)))


def test_a_layer_whose_projections_have_no_known_name_is_refused_and_left_as_it_was():
    config = transformers.Wav2Vec2BertConfig(**ONE_LAYER, position_embeddings_type="relative_key", conv_depthwise_kernel_size=3)
    model, inputs = adopt_hf(transformers.Wav2Vec2BertModel(config).eval()), {"input_features": torch.randn(2, 9, 160)}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn has no weights for its query under a known name \(q_norm, "):
        fold_scale(model, inputs=inputs)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Llama", partial(shared_by_two_layers, part="q_proj")),
        ("Llama", partial(shared_by_two_layers, part="k_proj")),
        ("Qwen3", one_norm_for_queries_and_keys),
    ],
)
def test_weights_that_two_layers_or_queries_and_keys_share_are_multiplied_and_given_back_once(name, change):
    model = build(name).double()
    change(model)
    state = {key: value.clone() for key, value in adopt_hf(model).state_dict().items()}
    wanted = answer(model)
    torch.testing.assert_close(answer(fold_scale(model)), wanted)
    assert {round(fold.ratio, 9) for module in adopted_cores(model).values() for fold in module.core.folds} == {
        round(8**-0.25, 9)
    }
    torch.testing.assert_close(dict(release_hf(model).state_dict()), state)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(not_proportional, "not proportional .* differs by"), (in_one_memory, r"o_proj\.weight is also .* shares memory")],
)
def test_queries_take_the_whole_factor_where_weights_make_more_than_keys_and_a_warning_says_so(change, reason):
    model = build("Llama").double()
    change(model, "k_proj")
    state = {key: value.clone() for key, value in adopt_hf(model).state_dict().items()}
    wanted = answer(model)
    with pytest.warns(UserWarning, match=f"{reason}.*: the queries take the whole factor"):
        fold_scale(model)
    torch.testing.assert_close(answer(model), wanted)
    changed = {key.split(".")[-2] for key, value in model.state_dict().items() if not torch.equal(value, state[key])}
    assert changed == {"q_proj"}
    assert [[fold.ratio for fold in module.core.folds] for module in adopted_cores(model).values()] == [[8**-0.5]] * 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft says so of itself
def test_a_fold_of_lora_of_a_speech_model_without_inputs_and_beside_our_attention_is_refused():
    wrapped = peft.get_peft_model(build("Llama"), peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"self_attn\.q_proj, Linear, is no projection or norm with plain weights"):
        fold_scale(adopt_hf(wrapped))
    set_scale(wrapped, "unscaled")
    assert all(module.core.scale == ("unscaled", 1.0) for module in adopted_cores(wrapped).values())
    with pytest.raises(ValueError, match="input_features"):
        fold_scale(adopt_hf(build("Whisper")))
    with pytest.raises(ValueError, match="offloaded"):
        fold_scale(adopt_hf(accelerate.cpu_offload(build("Llama"))))
    with pytest.raises(ValueError, match="did not run"):
        fold_scale(adopt_hf(build("T5")).encoder.block)
    with pytest.raises(ValueError, match="fold each part separately"):
        fold_scale(nn.ModuleList([adopt_hf(build("Llama")), MultiHeadAttention(12, 3)]))


@pytest.mark.parametrize("option", ["indices", "block_indices", "sinks"])
def test_an_argument_that_changes_the_answer_and_that_no_core_takes_is_refused(option):
    model = adopt_hf(build("Llama"))
    with pytest.raises(ValueError, match=option):
        model(**inputs_of("Llama")[0], **{option: torch.zeros(2)})


@pytest.mark.release
@pytest.mark.filterwarnings("ignore:.*counts the padding on the left")
@pytest.mark.parametrize("name", [*NAMES, *BESIDE, *PARTLY, *REFUSED])
def test_the_page_says_of_each_family_what_is_measured(name):
    from tests.tools.families_table import on_the_page, row

    assert on_the_page()[name] == row(name)


def test_the_page_has_the_families_of_the_tests_alone():
    from tests.tools.families_table import on_the_page

    assert {*on_the_page()} == {*NAMES, *BESIDE, *PARTLY, *REFUSED}, "run python tests/tools/families_table.py"
