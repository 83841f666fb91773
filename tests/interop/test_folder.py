"""Folders in and out: the same bits, a config that means the same, and an error for everything that would be lost."""

import json
import math
import re

import pytest
import torch
import transformers
from foreign import CASES, V, answers, batch, build, save, worst
from safetensors.torch import load_file, save_file

from minitx.config import TransformerConfig
from minitx.interop import load_hf, save_hf, save_pretrained
from minitx.nn.models import build_model

ONE_OF_EACH = ("gpt2", "llama", "qwen3", "bert sequence", "roberta masked", "t5 v1.0", "vit")


def edit(folder, **changes):
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))
    return folder


def rewrite(folder, change):
    """Replace the tensors of a folder by ``change(tensors)``."""
    path = folder / "model.safetensors"
    tensors = change(load_file(path))
    save_file(tensors, path)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_keeps_every_bit_and_transformers_reads_it_as_the_same_model(name, tmp_path):
    theirs = build(name)
    first, second = save(theirs, tmp_path / "first"), tmp_path / "second"
    save_hf(load_hf(first), second, model_type=theirs.config.model_type)
    before, after = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert before.keys() == after.keys()
    for key in before:
        if name.startswith("gemma") and key.endswith("norm.weight"):  # 1 + weight is rounded here
            torch.testing.assert_close(before[key], after[key], rtol=0, atol=2**-23)
        else:
            assert torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype
    again, report = type(theirs).from_pretrained(second, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    one, two = theirs.config.to_dict(), again.config.to_dict()
    changed = {key for key in one if one[key] != two.get(key)} - {"_name_or_path"}
    unused = {"t5 encoder": {"scale_decoder_outputs"}, "gemma2 window": set(), "gemma3 window": set()}
    assert changed <= {"n_inner", "max_window_layers"} | unused.get(name, {"sliding_window"} if "gemma" in name else set())
    assert two.keys() - one.keys() <= {"n_ctx", "head_dim", "position_embedding_type", "decoder_start_token_id"}


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_dtype_is_kept_unless_another_is_wanted(name, dtype, tmp_path):
    theirs = build(name).to(dtype)
    kept = load_hf(save(theirs, tmp_path / "first"))
    assert {parameter.dtype for parameter in kept.parameters()} == {dtype}
    save_hf(kept, tmp_path / "second")
    before, after = (load_file(tmp_path / one / "model.safetensors") for one in ("first", "second"))
    assert all(torch.equal(before[key], after[key]) for key in before)
    wanted = load_hf(tmp_path / "first", dtype=torch.float32)
    assert {parameter.dtype for parameter in wanted.parameters()} == {torch.float32}
    assert not wanted.training


def test_shards_are_read_and_written(tmp_path):
    theirs = build("llama")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    ours = load_hf(tmp_path / "theirs")
    assert worst(answers(theirs, ours, batch("none"))) < 1e-5
    save_hf(ours, tmp_path / "ours")
    save_hf(ours, tmp_path / "ours", max_shard_bytes=20_000)  # over a whole one
    assert not (tmp_path / "ours" / "model.safetensors").exists()
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 3
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(one, two) for one, two in zip(again.parameters(), theirs.parameters(), strict=True))
    next((tmp_path / "ours").glob("model-00002*")).unlink()
    with pytest.raises(FileNotFoundError, match="lists shards that are not in the folder: model-00002-of-"):
        load_hf(tmp_path / "ours")
    index = tmp_path / "ours" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../theirs/model-00001-of-00004.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"not in the folder: \.\./theirs"):
        load_hf(tmp_path / "ours")


def test_tied_parameters_stay_one(tmp_path):
    for name in ("gpt2", "bert masked", "t5 v1.0"):
        model = load_hf(save(build(name), tmp_path / name))
        head = model.head.head if name.startswith("bert") else model.head
        assert head.weight is model.embeddings.token.weight
    assert model.encoder.embeddings.token.weight is model.embeddings.token.weight
    untied = load_hf(save(build("t5 v1.1"), tmp_path / "untied"))
    assert untied.head.weight is not untied.embeddings.token.weight


# how older files spell the same model


def test_old_rotary_keys_mean_what_the_new_ones_do(tmp_path):
    for name in ("llama llama3", "llama yarn", "llama linear", "llama"):
        folder = save(build(name), tmp_path / name)
        want = load_hf(folder).config
        rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
        theta = rope.pop("rope_theta")
        rope["type"] = rope.pop("rope_type")
        scaling = None if rope["type"] == "default" else rope
        edit(folder, rope_parameters="absent", rope_theta=theta, rope_scaling=scaling, dtype="absent", torch_dtype="float32")
        assert load_hf(folder).config == want


def test_old_names_of_tensors_and_buffers_load(tmp_path):
    folder = save(build("gpt2"), tmp_path / "gpt2")
    want = load_hf(folder).state_dict()
    buffers = {f"h.{i}.attn.{kind}": torch.ones(1, 1, 43, 43) for i in range(2) for kind in ("bias", "masked_bias")}
    rewrite(folder, lambda tensors: {**{k.removeprefix("transformer."): v for k, v in tensors.items()}, **buffers})
    rewrite(folder, lambda tensors: {**tensors, "lm_head.weight": tensors["wte.weight"].clone()})
    assert all(torch.equal(value, want[key]) for key, value in load_hf(folder).state_dict().items())

    folder = save(build("bert masked"), tmp_path / "bert")
    want = load_hf(folder).state_dict()

    def old(tensors):
        for new, name in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
            tensors = {key.replace(new, name): value for key, value in tensors.items()}
        tensors["cls.predictions.decoder.bias"] = tensors.pop("cls.predictions.bias")
        return {**tensors, "bert.embeddings.position_ids": torch.arange(43)[None]}

    rewrite(folder, old)
    assert all(torch.equal(value, want[key]) for key, value in load_hf(folder).state_dict().items())

    folder = save(build("t5 v1.0"), tmp_path / "t5")
    useless = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies = ("encoder.embed_tokens.weight", "lm_head.weight")
    rewrite(folder, lambda t: {**t, **{key: t["shared.weight"].clone() for key in copies}, useless: torch.ones(32, 3)})
    edit(folder, scale_decoder_outputs="absent", decoder_start_token_id=0, n_positions=512)
    assert load_hf(folder).config.scale_logits


def test_an_old_t5_says_by_its_ties_whether_logits_are_scaled(tmp_path):
    folder = edit(save(build("t5 v1.1"), tmp_path), scale_decoder_outputs="absent", tie_word_embeddings=False)
    assert (load_hf(folder).config.scale_logits, load_hf(folder).config.tie_embeddings) == (False, False)


def test_a_config_may_leave_out_what_is_the_default(tmp_path):
    folder = save(build("llama"), tmp_path)
    want, (ids, _) = load_hf(folder), batch("none")
    absent = ("hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "head_dim", "num_key_value_heads", "architectures")
    edit(folder, **dict.fromkeys((*absent, "rope_parameters", "tie_word_embeddings"), "absent"))
    assert torch.equal(load_hf(folder)(ids), want(ids))


# what would be lost


# case, what its config says instead, and the words of the refusal that name it
REFUSED = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx=True"]),
    (
        "gpt2",
        {"add_cross_attention": True, "reorder_and_upcast_attn": True},
        ["add_cross_attention", "reorder_and_upcast_attn"],
    ),
    ("gpt2", {"activation_function": "mish"}, ["activation_function='mish'", "'gelu_new'"]),
    ("gpt2", {"new_trick": True}, ["new_trick=True", "overrides={'new_trick': None}"]),
    ("gpt2", {"quantization_config": {"bits": 4}}, ["quantization_config={'bits': 4}"]),
    ("gpt2", {"architectures": ["GPT2ForTokenClassification"]}, ["architectures=['GPT2ForTokenClassification']"]),
    ("gpt2", {"n_head": "4"}, ["n_head"]),
    ("gpt2", {"n_head": None}, ["n_head"]),
    ("roberta masked", {"max_position_embeddings": "43"}, ["wrong type"]),
    ("roberta masked", {"pad_token_id": None}, ["pad_token_id=None"]),
    ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
    ("llama", {"rope_interleaved": True}, ["rope_interleaved=True"]),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ["rope_parameters.partial_rotary_factor=0.5"],
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        ["rope_parameters.rope_type='dynamic'", "'llama3'"],
    ),
    ("llama yarn", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, ["rope_type='yarn'", "'linear'"]),
    ("llama", {"rope_theta": 7.0}, ["rope_parameters.rope_theta=10000.0", "7.0"]),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["rope_parameters.full_attention="]),
    ("qwen2", {"layer_types": ["full_attention", "chunked_attention"], "use_sliding_window": True}, ["chunked_attention"]),
    ("gemma2", {"use_bidirectional_attention": True}, ["use_bidirectional_attention=True"]),
    ("gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping=50.0"]),
    ("bert masked", {"is_decoder": True}, ["is_decoder=True"]),
    ("bert masked", {"position_embedding_type": "relative_key"}, ["position_embedding_type='relative_key'", "'absolute'"]),
    ("t5 v1.0", {"feed_forward_proj": "gated-mish"}, ["feed_forward_proj='gated-mish'"]),
    ("vit", {"image_size": [12, 24]}, ["image_size=[12, 24]"]),
    ("vit pooler", {"pooler_act": "relu"}, ["pooler_act='relu'"]),
    ("vit", {"patch_size": 5}, ["image_size=12", "patch_size=5"]),
]


@pytest.mark.parametrize(
    ("name", "changes", "words"), REFUSED, ids=lambda part: next(iter(part)) if isinstance(part, dict) else ""
)
def test_a_key_that_could_change_the_answer_is_refused_by_name(name, changes, words, tmp_path):
    folder = save(build(name), tmp_path)
    load_hf(folder)
    with pytest.raises(ValueError, match=re.escape(str(folder))) as error:
        load_hf(edit(folder, **changes))
    assert all(word in str(error.value) for word in words)


def test_keys_that_change_nothing_pass(tmp_path):
    folder = save(build("llama"), tmp_path)
    want = load_hf(folder).config
    falsy = {"use_mrope": False, "a_new_list": [], "a_new_number": 0, "quantization_config": None}
    listed = {"_attn_implementation": "sdpa", "unsloth_version": "2024.9", "is_llama_config": True, "torch_dtype": "bfloat16"}
    labels = {"id2label": {"0": "LABEL_0"}, "summary_type": "mean", "auto_map": {"AutoModel": "modeling.Mine"}}
    more = {"attention_dropout": 0.1, "mask_token_id": 5, "cache_implementation": "hybrid", "transformers.js_config": {"a": 1}}
    assert load_hf(edit(folder, **falsy, **listed, **labels, **more)).config == want


@pytest.mark.parametrize(
    "options", [{"attention_factor": 1.5}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"truncate": False}], ids=str
)
def test_yarn_options_that_change_the_numbers_are_refused(options, tmp_path):
    folder = save(build("llama yarn"), tmp_path)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    with pytest.raises(ValueError, match=rf"rope_parameters\.{next(iter(options))}="):
        load_hf(edit(folder, rope_parameters={**rope, **options}))
    paper = {"attention_factor": 0.1 * math.log(3.0) + 1.0, "truncate": True}
    load_hf(edit(folder, rope_parameters={**rope, **paper}))


def test_overrides_and_ignore_are_the_ways_out(tmp_path):
    folder = edit(save(build("gpt2"), tmp_path), new_trick=True)
    wanted = {"eos_token_id": 5, "new_trick": None}
    assert load_hf(folder, overrides=wanted).config.eos_id == 5
    rewrite(folder, lambda tensors: {**tensors, "extra.weight": torch.ones(3), "extra.bias": torch.ones(3)})
    with pytest.raises(ValueError, match=r"extra\.bias .*extra\.weight "):
        load_hf(folder, overrides=wanted)
    load_hf(folder, overrides=wanted, ignore=["extra.*"])


def drop(key):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name != key}


# case, how its tensors change, and the tensors and shapes that the refusal names
STRICT = [
    ("llama", drop("model.norm.weight"), ["final_norm.weight (40,)", "norm.weight"]),
    ("llama", drop("lm_head.weight"), ["head.weight (61, 40)", "lm_head.weight"]),
    (
        "llama",
        lambda t: {**t, "model.layers.2.mlp.up_proj.weight": torch.ones(53, 40)},
        ["layers.2.mlp.up_proj.weight (53, 40)"],
    ),
    ("llama", lambda t: {**t, "model.norm.weight": torch.ones(41)}, ["norm.weight", "(41,)", "(40,)"]),
    ("llama", lambda t: {**t, "model.layers.0.self_attn.q_proj.bias": torch.ones(40)}, ["q_proj.bias (40,)"]),
    (
        "gpt2",
        lambda t: {**t, "transformer.wte.weight": torch.ones(64, 40)},
        ["wte.weight", "(64, 40)", "(61, 40)", "vocab_size"],
    ),
    ("gpt2", lambda t: {**t, "lm_head.weight": torch.ones(61, 40)}, ["lm_head.weight", "wte.weight", "ties"]),
    ("gpt2", lambda t: {**t, "wte.weight": torch.ones(61, 40)}, ["wte.weight", "twice"]),
    (
        "gpt2",
        lambda t: {**t, "transformer.h.0.attn.c_attn.weight": torch.ones(120, 40)},
        ["c_attn.weight", "(120, 40)", "(40, 120)"],
    ),
]


@pytest.mark.parametrize(("name", "change", "words"), STRICT)
def test_every_tensor_that_does_not_fit_is_named_with_its_shape(name, change, words, tmp_path):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        load_hf(rewrite(save(build(name), tmp_path), change))
    assert all(word in str(error.value) for word in words)


def test_a_folder_of_our_own_is_recognised(tmp_path):
    save_pretrained(own(), tmp_path)
    with pytest.raises(ValueError, match=r"model_type=None .*from_pretrained"):
        load_hf(tmp_path)


def test_a_model_is_saved_over_the_folder_that_it_came_from(tmp_path):
    model = load_hf(save(build("gpt2"), tmp_path))
    with torch.no_grad():
        model.final_norm.bias.fill_(0.5)
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_hf(model, tmp_path)
    assert all(torch.equal(tensor, want[name]) for name, tensor in load_hf(tmp_path).state_dict().items())


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        load_hf(tmp_path)
    folder = save(build("gpt2"), tmp_path / "gpt2")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"\*\.bin"):
        load_hf(folder)
    (folder / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(ValueError, match="safetensors"):
        load_hf(folder)
    edit(folder, model_type="mamba")
    with pytest.raises(ValueError, match=r"model_type='mamba' .*gpt2, llama"):
        load_hf(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json .*list"):
        load_hf(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="JSON"):
        load_hf(folder)


# models of our own


def own(**options):
    sizes = {"vocab_size": V, "embed_dim": 12, "num_heads": 3, "num_layers": 2, "max_len": 31, "dropout": 0.1}
    return build_model(TransformerConfig(**{**sizes, **options})).eval()


def test_a_model_of_our_own_becomes_a_llama_or_gpt2_that_transformers_runs(tmp_path):
    shapes = {
        "GPT2LMHeadModel": {"activation": "gelu_tanh"},
        "LlamaForCausalLM": {"position": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "num_kv_heads": 1},
    }
    for kind, options in shapes.items():
        model = own(init="lecun", **options)
        save_hf(model, tmp_path / kind)
        theirs = getattr(transformers, kind).from_pretrained(tmp_path / kind, attn_implementation="eager").eval()
        assert worst(answers(theirs, model, batch("right"))) < 1e-5
        assert json.loads((tmp_path / kind / "config.json").read_text())["architectures"] == [kind]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": True}, "GPT2LMHeadModel.*sinks=True.*False"),
        ({"position": "alibi"}, "position='alibi'.*'learned'"),
        (
            {
                "position": "rotary",
                "norm": "rms",
                "activation": "swiglu",
                "bias": False,
                "rotary_scaling": "ntk",
                "rotary_factor": 2.0,
            },
            "LlamaForCausalLM.*rotary_scaling='ntk'.*None",
        ),
        ({"layer_scale": 0.1}, "layer_scale=0.1"),
        ({"scale": "learned"}, "scale='learned'.*'inv_sqrt'"),
        ({"scale": 0.0}, "scale=0.0.*'inv_sqrt'"),
        ({"norm_position": "sandwich"}, "norm_position='sandwich'"),
    ],
)
def test_a_model_that_no_family_expresses_is_refused_by_field(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_hf(own(**options), tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_unknown_model_type_to_write_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model_type='gpt3' .*gpt2"):
        save_hf(own(), tmp_path, model_type="gpt3")
    with pytest.raises(ValueError, match=r"Bert\w+"):
        save_hf(own(), tmp_path, model_type="bert")
