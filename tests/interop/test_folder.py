"""Folders in and out: the same bits, a config that means the same, and an error for everything that would be lost."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import tokenizers
import torch
import transformers
from foreign import CASES, LLAMA3, ROPE, YARN, V, answers, batch, build, saved, worst
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minitx.config import TransformerConfig
from minitx.data.tokenizer import Tokenizer, train_tokenizer
from minitx.interop import FAMILIES, config_json, load_hf, pretrained_hf, save_hf
from minitx.nn.efficient import LinearAttention
from minitx.nn.models import build_model

PAGE = (Path(__file__).parents[2] / "docs" / "weights.md").read_text(encoding="utf-8")
OWN_BERT = {"architecture": "encoder", "norm_position": "post", "embed_norm": True, "activation": "gelu", "norm_eps": 1e-12}
ROTARY = {"position": "rotary", "norm": "rms", "activation": "swiglu", "bias": False}


def edit(folder, **changes):
    """Change keys of config.json; "absent" removes one."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))
    return folder


def rewrite(folder, change):
    """Replace the tensors of a folder by ``change(tensors)``."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)
    return folder


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


SHAPES = {"llama grouped tied", "llama yarn", "llama yarn one turn", "mistral", "qwen2 mixed", "gemma2 no caps", "gemma3 window",
          "bert token", "t5 few buckets", "roberta pooler"}  # fmt: skip
"""Further shapes of families, which test_logits.py has."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in SHAPES])
def test_a_round_trip_keeps_every_bit_and_transformers_reads_it_as_the_same_model(name, tmp_path):
    theirs = build(name)
    first, second = saved(theirs, tmp_path / "first"), tmp_path / "second"
    ours = load_hf(first)
    save_hf(ours, second, model_type=theirs.config.model_type)
    before, after = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert before.keys() == after.keys()
    for key in before:
        rounded = name.startswith("gemma") and key.endswith("norm.weight")  # 1 + weight is rounded here
        torch.testing.assert_close(before[key], after[key], rtol=0, atol=2**-23 if rounded else 0)
    again, report = type(theirs).from_pretrained(second, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert worst(answers(again.eval(), ours, batch("none", name))) < 1e-3
    one, two = theirs.config.to_dict(), again.config.to_dict()
    changed = {key for key in one if one[key] != two.get(key)} - {"_name_or_path"}
    unused = {"t5 encoder": {"scale_decoder_outputs"}, "gemma2 window": set(), "gemma3 window": set()}
    assert changed <= {"n_inner", "max_window_layers"} | unused.get(name, {"sliding_window"} if "gemma" in name else set())
    assert two.keys() - one.keys() <= {"n_ctx", "head_dim", "position_embedding_type", "decoder_start_token_id"}


@pytest.mark.parametrize("name", ["gpt2", "bert sequence", "vit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_dtype_is_kept_unless_another_is_wanted(name, dtype, tmp_path):
    kept = load_hf(saved(build(name).to(dtype), tmp_path / "first"))
    assert {parameter.dtype for parameter in kept.parameters()} == {dtype}
    save_hf(kept, tmp_path / "second")
    assert same(*(load_file(tmp_path / one / "model.safetensors") for one in ("first", "second")))
    for wanted in (torch.float32, "float32", "torch.float32"):
        model = load_hf(tmp_path / "first", dtype=wanted)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32} and not model.training
    for wrong in ("bf16", "nn", "int8", torch.int64, 16):
        with pytest.raises(ValueError, match=r"^dtype must be a floating point dtype"):
            load_hf(tmp_path / "first", dtype=wrong)


def test_shards_are_read_and_written(tmp_path):
    theirs, folder = build("llama"), tmp_path / "ours"
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    ours = load_hf(tmp_path / "theirs")
    assert worst(answers(theirs, ours, batch("none"))) < 1e-5
    save_hf(ours, folder)
    save_hf(ours, folder, max_shard_bytes=20_000)  # over a whole one
    assert not (folder / "model.safetensors").exists()
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert same(transformers.LlamaForCausalLM.from_pretrained(folder).state_dict(), theirs.state_dict())
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(FileNotFoundError, match="not in the folder: model-00002-of-"):
        load_hf(folder)


# how older files spell the same model


TURNS = {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": True, "attention_factor": None}
KINDS = {
    kind["rope_type"]: kind
    for kind in ({**ROPE, "rope_type": "default"}, {**ROPE, "rope_type": "linear"}, LLAMA3, {**YARN, **TURNS})
}
SPELLINGS = {
    "new": lambda rope: {"rope_parameters": rope},
    "old": lambda rope: {"rope_scaling": {**rope, "type": rope["rope_type"]}, "rope_theta": rope.get("rope_theta", 700.0)},
    "length outside": lambda rope: {"rope_parameters": rope, "original_max_position_embeddings": 7},
    "length left out": lambda rope: {"rope_parameters": rope, "max_position_embeddings": "absent"},
}


def rotary_angles(config):
    """Frequencies and magnitude as transformers computes them, or None where it cannot."""
    try:
        rotary = LlamaRotaryEmbedding(LlamaConfig(**config))
    except (KeyError, TypeError, StrictDataclassError):
        return None
    return rotary.inv_freq, torch.tensor(rotary.attention_scaling)


@pytest.mark.parametrize(("name", "spelling"), [
    *(("default", "old"), ("linear", "length outside"), ("linear", "length left out")),
    *(("llama3", "old"), ("llama3", "new"), ("yarn", "length outside")),
])  # fmt: skip
def test_an_absent_or_null_rotary_option_means_what_transformers_computes_or_is_refused(name, spelling, tmp_path):
    saved("llama", tmp_path)
    kind = KINDS[name]
    changes = [{}, *({option: value} for option in kind if option != "rope_type" for value in ("absent", None))]
    equal = []
    for change in changes:
        rope = {option: value for option, value in {**kind, **change}.items() if value != "absent"}
        edit(tmp_path, **{"rope_scaling": "absent", "rope_theta": "absent", "original_max_position_embeddings": "absent"})
        edit(tmp_path, max_position_embeddings=43, rope_parameters="absent")
        edit(tmp_path, **SPELLINGS[spelling](rope))
        theirs = rotary_angles(json.loads((tmp_path / "config.json").read_text()))
        if theirs is None or change == {"truncate": None}:
            with pytest.raises(ValueError, match=r"must be a number|truncate=False"):
                load_hf(tmp_path)
            continue
        ours = load_hf(tmp_path)
        save_hf(ours, tmp_path / "again")
        again = rotary_angles(json.loads((tmp_path / "again" / "config.json").read_text()))
        rotary = ours.blocks[0].attention.rotary
        angles = rotary.frequencies(), torch.tensor(rotary.scaling.magnitude if rotary.scaling else 1.0)
        for numbers in (angles, again):
            torch.testing.assert_close(numbers, theirs, rtol=1e-6, atol=0)
        equal.append(change)
    assert {} in equal


def old_gpt2(tensors):
    buffers = {f"h.{i}.attn.{kind}": torch.ones(1, 1, 43, 43) for i in range(2) for kind in ("bias", "masked_bias")}
    plain = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    return {**plain, **buffers, "lm_head.weight": plain["wte.weight"].clone()}


def old_bert(tensors):
    for new, name in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        tensors = {key.replace(new, name): value for key, value in tensors.items()}
    tensors["cls.predictions.decoder.bias"] = tensors.pop("cls.predictions.bias")
    other = {"bert.pooler.dense.weight": torch.ones(40, 40), "cls.seq_relationship.bias": torch.ones(2)}  # of another head
    return {**tensors, **other, "bert.embeddings.position_ids": torch.arange(43)[None]}


def old_t5(tensors):
    copies = {key: tensors["shared.weight"].clone() for key in ("encoder.embed_tokens.weight", "lm_head.weight")}
    return {**tensors, **copies, "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(32, 3)}


@pytest.mark.parametrize(("name", "old"), [("gpt2", old_gpt2), ("bert masked", old_bert), ("t5 v1.0", old_t5)])
def test_old_names_of_tensors_and_buffers_load(name, old, tmp_path):
    want = load_hf(saved(name, tmp_path)).state_dict()
    assert same(load_hf(rewrite(tmp_path, old)).state_dict(), want)


@pytest.mark.parametrize("name", ["t5 v1.0", "t5 v1.1"])
def test_an_old_t5_says_by_its_ties_whether_logits_are_scaled(name, tmp_path):
    tied = name == "t5 v1.0"
    edit(saved(name, tmp_path), scale_decoder_outputs="absent", decoder_start_token_id=0, n_positions=512)
    config = load_hf(tmp_path, overrides={"tie_word_embeddings": tied}).config
    assert (config.scale_logits, config.tie_embeddings) == (tied, tied)


def test_a_vit_may_name_both_equal_sides(tmp_path):
    want = load_hf(saved("vit", tmp_path)).config
    assert load_hf(edit(tmp_path, image_size=[12, 12], patch_size=[3, 3])).config == want


def test_a_config_may_leave_out_what_is_the_default(tmp_path):
    want, (ids, _) = load_hf(saved("llama", tmp_path)), batch("none")
    absent = ("hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "head_dim", "num_key_value_heads", "architectures")
    edit(tmp_path, **dict.fromkeys((*absent, "rope_parameters", "tie_word_embeddings"), "absent"))
    assert torch.equal(load_hf(tmp_path)(ids), want(ids))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_defaults_of_a_family_are_those_of_its_config_class(family):
    theirs = CONFIG_MAPPING[family.model_type]().to_dict()
    ours = {key: value for key, value in family.config.defaults.items() if key in theirs}
    if "use_sliding_window" in theirs:  # false, and the window is null; 4096 where it is true
        assert (theirs["use_sliding_window"], ours.pop("sliding_window")) == (False, 4096)
    assert len(ours) >= 10
    assert {key: theirs[key] for key in ours} == ours


def test_the_page_has_the_classes_of_each_family():
    rows = [line.split("|") for line in PAGE.splitlines() if line.startswith("| `")]
    for name, family in FAMILIES.items():
        (classes,) = [row[3] for row in rows if f"`{name}`" in row[1]]
        ends = [re.sub(r"^.*?(For|Model$)", r"…\1", title) for title in family.architectures]
        listed = {*re.findall("`([^`]+)`", classes)}
        assert [title for title, end in zip(family.architectures, ends, strict=True) if not {title, end} & listed] == []


# what would be lost


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


# case, what its config says instead, and the key that the refusal names
REFUSED = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"activation_function": "mish"}, "activation_function='mish'"),
    ("gpt2", {"new_trick": True}, "new_trick=True"),
    ("gpt2", {"model_type": "gpt3"}, "gpt3"),
    ("bert masked", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
    ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
    ("gpt2", {"architectures": ["GPT2ForTokenClassification"]}, "architectures=['GPT2ForTokenClassification']"),
    ("roberta masked", {"max_position_embeddings": "43"}, "wrong type"),
    ("roberta masked", {"pad_token_id": None}, "pad_token_id=None"),
    ("roberta masked", {"hidden_act": "relu"}, "hidden_act='relu'"),  # of which its head knows nothing
    ("llama", {"num_local_experts": 4}, "num_local_experts=4"),
    ("llama", {"model_type": "mixtral"}, "mixtral"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama", rope("default", partial_rotary_factor=0.5), "rope_parameters.partial_rotary_factor=0.5"),
    ("llama", rope("dynamic", factor=2.0), "rope_parameters.rope_type='dynamic'"),
    ("llama yarn", {"rope_parameters": {**YARN, "attention_factor": 1.5}}, "rope_parameters.attention_factor="),
    ("llama yarn", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}, "rope_parameters.mscale="),
    ("llama yarn", {"rope_parameters": {**YARN, "truncate": False}}, "rope_parameters.truncate="),
    ("llama yarn", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, "rope_type='yarn'"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention="),
    ("qwen2 window", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("gemma3 window", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "rope_type='linear'"),
    ("t5 v1.0", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj='gated-mish'"),
    ("vit", {"image_size": [12, 24]}, "image_size=[12, 24]"),
    ("vit", {"patch_size": 5}, "patch_size=5"),
]


WRONG = ("wrong type", "pad_token_id=None", "rope_type='yarn'", "image_size=[12, 24]", "patch_size=5")  # there, too


@pytest.mark.parametrize(("name", "changes", "word"), REFUSED, ids=lambda part: part if isinstance(part, str) else "")
def test_a_key_that_could_change_the_answer_is_refused_by_name_and_no_other_value_is_advised(name, changes, word, tmp_path):
    load_hf(saved(name, tmp_path))
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))}.*{re.escape(word)}") as error:
        load_hf(edit(tmp_path, **changes))
    said = str(error.value)
    assert ("pretrained_hf(folder, adopt=True)" in said) == (word not in WRONG)
    assert word in WRONG or not re.search(r"overrides|ignore|must be", said)


def test_what_is_advised_for_an_option_that_our_blocks_lack_has_the_logits_of_transformers(tmp_path):
    """An override to the falsy value would load another model."""
    edit(saved("gemma3", tmp_path), use_bidirectional_attention=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids, _ = batch("none")
    with torch.no_grad():
        want, other = theirs(ids).logits, load_hf(tmp_path, overrides={"use_bidirectional_attention": None})(ids)
        adopted = pretrained_hf(str(tmp_path), adopt=True)(ids).logits
    assert (other - want).abs().max() > 0.1
    torch.testing.assert_close(adopted, want, rtol=1e-5, atol=1e-5)


def test_a_tensor_that_the_answer_may_need_is_not_advised_to_be_left_out(tmp_path):
    changes = {
        "lm_head.bias": torch.ones(61),
        "model.layers.0.self_attn.q_proj.bias": torch.ones(40),
        "score.weight": torch.ones(2, 40),
    }
    for name, tensor in changes.items():
        with pytest.raises(ValueError, match="is unexpected") as error:
            load_hf(rewrite(saved("llama", tmp_path), lambda tensors, name=name, tensor=tensor: {**tensors, name: tensor}))
        assert ("ignore=[...] leaves out" in str(error.value)) == (name == "score.weight")
        assert ("adopt=True" in str(error.value)) == (name != "score.weight")


def test_keys_that_change_nothing_pass(tmp_path):
    want = load_hf(saved("llama", tmp_path)).config
    falsy = {"use_mrope": False, "a_new_list": [], "quantization_config": None}
    listed = {
        "_attn_implementation_internal": "sdpa",
        "unsloth_version": "2024.9",
        "is_llama_config": True,
        "torch_dtype": "bfloat16",
    }
    labels = {"id2label": {"0": "LABEL_0"}, "summary_type": "mean", "auto_map": {"AutoModel": "modeling.Mine"}}
    more = {"attention_dropout": 0.1, "mask_token_id": 5, "cache_implementation": "hybrid", "transformers.js_config": {"a": 1}}
    assert load_hf(edit(tmp_path, **falsy, **listed, **labels, **more)).config == want


@pytest.mark.parametrize("value", [False, 0, 0.0])
def test_an_unknown_option_may_be_off_unless_transformers_has_it_on_by_default(value, tmp_path, monkeypatch):
    edit(saved("llama", tmp_path), norm_topk_prob=value)
    load_hf(tmp_path)
    defaults = SimpleNamespace(to_dict=lambda: {"norm_topk_prob": True})
    monkeypatch.setattr("transformers.AutoConfig.for_model", lambda model_type: defaults)
    monkeypatch.setattr(config_json, "_default_options", config_json._default_options.__wrapped__)
    with pytest.raises(ValueError, match=f"norm_topk_prob={value!r} is not a known option of model_type='llama'"):
        load_hf(tmp_path)


def test_overrides_and_ignore_are_the_ways_out(tmp_path):
    edit(saved("gpt2", tmp_path), new_trick=True)
    wanted = {"eos_token_id": 5, "new_trick": None}
    assert load_hf(tmp_path, overrides=wanted).config.eos_id == 5
    rewrite(tmp_path, lambda tensors: {**tensors, "extra.weight": torch.ones(3), "extra.bias": torch.ones(3)})
    with pytest.raises(ValueError, match=r"extra\.bias .*extra\.weight "):
        load_hf(tmp_path, overrides=wanted)
    load_hf(tmp_path, overrides=wanted, ignore=["extra.*"])
    load_hf(tmp_path, overrides=wanted, ignore="extra.*")  # not its letters, of which one is *
    edit(saved("llama yarn", tmp_path), rope_parameters={**YARN, "mscale": 1.0})
    for changes in ({"rope_parameters.mscale": None}, {"rope_parameters": {"mscale": None}}):
        assert load_hf(tmp_path, overrides=changes).config.rotary_scaling == "yarn"
    plain = {"rope_type": "default", **dict.fromkeys(("factor", "mscale", "original_max_position_embeddings"))}
    assert load_hf(tmp_path, overrides={"rope_parameters": plain}).config.rotary_scaling is None


# case, a name, the tensor that it gets (None: it is gone), and what the refusal names
STRICT = [
    ("llama", "model.norm.weight", None, ["final_norm.weight (40,)", "norm.weight"]),
    ("llama", "lm_head.weight", None, ["head.weight (61, 40)", "lm_head.weight"]),
    ("llama", "model.layers.2.mlp.up_proj.weight", torch.ones(53, 40), ["layers.2.mlp.up_proj.weight (53, 40)"]),
    ("llama", "model.norm.weight", torch.ones(41), ["norm.weight", "(41,)", "(40,)"]),
    ("llama", "model.layers.0.self_attn.q_proj.bias", torch.ones(40), ["q_proj.bias (40,)"]),
    ("gpt2", "transformer.wte.weight", torch.ones(64, 40), ["wte.weight", "(64, 40)", "(61, 40)", "vocab_size"]),
    ("gpt2", "lm_head.weight", torch.ones(61, 40), ["lm_head.weight", "wte.weight", "ties"]),
    ("gpt2", "wte.weight", torch.ones(61, 40), ["wte.weight", "twice"]),
    ("gpt2", "transformer.h.0.attn.c_attn.weight", torch.ones(120, 40), ["c_attn.weight", "(120, 40)", "(40, 120)"]),
    ("gpt2", "transformer.ln_f.bias", torch.ones(40, dtype=torch.int), ["ln_f.bias has dtype torch.int32"]),
]


@pytest.mark.parametrize(("name", "key", "tensor", "words"), STRICT)
def test_every_tensor_that_does_not_fit_is_named_with_its_shape(name, key, tensor, words, tmp_path):
    def change(tensors):
        tensors.pop(key, None)
        return tensors if tensor is None else {**tensors, key: tensor}

    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        load_hf(rewrite(saved(name, tmp_path), change))
    assert all(word in str(error.value) for word in words)


def test_what_cannot_be_read_is_named(tmp_path):
    def refused(kind, message):
        with pytest.raises(kind, match=message):
            load_hf(tmp_path)

    refused(FileNotFoundError, r"No such file .*config\.json")
    weights = saved("gpt2", tmp_path) / "model.safetensors"
    weights.rename(tmp_path / "pytorch_model.bin")
    refused(FileNotFoundError, r"\*\.bin")
    weights.write_bytes(b"\x10")
    refused(ValueError, "safetensors")
    edit(tmp_path, model_type="mamba")
    refused(ValueError, r"model_type='mamba' .*gpt2, llama")
    for text, message in (("[]", r"config\.json .*list"), ("{", "JSON")):
        (tmp_path / "config.json").write_text(text)
        refused(ValueError, message)


# models of our own


SIZES_OF_OWN = {"vocab_size": V, "embed_dim": 12, "num_heads": 3, "num_layers": 2, "max_len": 31, "dropout": 0.2}


def own(**options):
    return build_model(TransformerConfig(**{**SIZES_OF_OWN, **options})).eval()


@pytest.mark.parametrize(
    ("kind", "options", "drops"),
    [
        ("GPT2LMHeadModel", {"activation": "gelu_tanh"}, ["embd_pdrop", "attn_pdrop", "resid_pdrop"]),
        ("LlamaForCausalLM", {**ROTARY, "num_kv_heads": 1}, []),
        ("LlamaForCausalLM", {**ROTARY, "rotary_scaling": "llama3", "rotary_factor": 2.0, "rotary_original_len": 13}, []),
        ("MistralForCausalLM", {**ROTARY, "embed_dim": 16, "head_dim": 4}, []),  # which Llama's config refuses
    ],
)
def test_a_model_of_our_own_becomes_a_llama_or_gpt2_that_transformers_runs(kind, options, drops, tmp_path):
    model = own(init="lecun", **options)
    save_hf(model, tmp_path)
    theirs = getattr(transformers, kind).from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert worst(answers(theirs, model, batch("right"))) < 1e-5
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == [kind]
    assert {key: value for key, value in values.items() if "drop" in key} == dict.fromkeys(drops, 0.2)


@pytest.mark.parametrize("head", [{"head": "lm", "head_bias": True, "head_transform": True}, {"head": "none", "pooler": True}])
def test_a_bert_of_our_own_without_token_types_answers_the_same_in_transformers(head, tmp_path):
    model = own(**OWN_BERT, **head)
    save_hf(model, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (kind,) = values["architectures"]
    assert values["hidden_dropout_prob"] == values["attention_probs_dropout_prob"] == 0.2
    theirs, report = getattr(transformers, kind).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    (ids, real), theirs = batch("right"), theirs.eval()
    with torch.no_grad():
        out, ours = theirs(ids, attention_mask=real.long()), model(ids, key_mask=real)
        for again in (out[0], load_hf(tmp_path)(ids, key_mask=real)):
            assert (again - ours)[real].abs().max() < 1e-5


@pytest.mark.parametrize(
    ("options", "model_type", "message"),
    [
        ({"sinks": True}, None, "GPT2LMHeadModel.*sinks=True.*False"),
        ({"position": "alibi"}, None, "position='alibi'.*'learned'"),
        ({**ROTARY, "rotary_scaling": "ntk", "rotary_factor": 2.0}, None, "LlamaForCausalLM.*rotary_scaling='ntk'.*None"),
        ({"scale": "learned"}, None, "scale='learned'.*'inv_sqrt'"),
        ({}, "gpt3", r"model_type='gpt3' .*gpt2"),
        ({}, "bert", r"Bert\w+"),
        ({**OWN_BERT, "head": "sequence", "num_labels": 3}, None, "BertForSequenceClassification, pooler=False would be True$"),
    ],
)
def test_a_model_that_no_family_or_not_the_wanted_one_expresses_is_refused_by_field(options, model_type, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_hf(own(**options), tmp_path, model_type=model_type)
    assert not list(tmp_path.iterdir())


CLASSIFIER = {**OWN_BERT, "head": "sequence", "num_labels": 3, "pooler": True}
VISION = {"architecture": "vision", "image_size": 12, "num_channels": 2, "head": "sequence", "num_labels": 3}
T5 = {
    "architecture": "encoder_decoder",
    "position": "t5",
    "scale": "unscaled",
    "norm": "rms",
    "bias": False,
    "activation": "relu",
}
GEMMA3 = {
    **ROTARY,
    "activation": "geglu_tanh",
    "norm_position": "sandwich",
    "scale_embeddings": True,
    "qk_norm": "rms",
    "norm_eps": 1e-6,
}
GEMMA3["window"] = (5, None)
OWN = {
    "gpt2": {"activation": "gelu_tanh"}, "llama": ROTARY, "mistral": ROTARY, "gemma3_text": GEMMA3, "bert": CLASSIFIER,
    "roberta": {**OWN_BERT, "head_transform": True, "head_bias": True, "position_offset": 2, "pad_id": 1}, "vit": VISION, "t5": T5,
}  # fmt: skip
CHANGES = [
    {"sinks": True}, {"softcap": 3.0}, {"qk_norm": "l2"}, {"layer_scale": 0.1}, {"scale_factor": 2.0}, {"scale": "learned"},
    {"embed_dim": 14, "head_dim": 6}, {"num_kv_heads": 1}, {"activation": "relu2"}, {"norm": "rms"}, {"bias": False}, {"pooling": "mean"},
    {"rotary_scaling": "yarn", "rotary_factor": 2.0, "rotary_original_len": 13}, {"position": "none"},
]  # fmt: skip


def refusal(family, options, folder):
    """The fields and keys that stand in the refusal of a model. None if its fields do not go together."""
    try:
        model = own(**options)
    except ValueError:
        return None
    try:
        save_hf(model, folder, model_type=family)
    except ValueError as error:
        return set(re.findall(r"([\w.]+)=", str(error)))
    return set()


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("gpt2", "t5"))) for name in OWN]
)
def test_what_stands_in_the_way_of_a_model_alone_stands_there_among_others_too(family, tmp_path):
    base, together, changes = OWN[family], OWN[family], []
    assert refusal(family, base, tmp_path / "base") == set()
    for change in CHANGES:
        alone = refusal(family, {**base, **change}, tmp_path / "alone")
        more = {**together, **change}
        if alone and refusal(family, more, tmp_path / "together") is not None:
            together = more
            changes.append(alone & {*change, "hidden_act", "rope_parameters.rope_type"})
    found = refusal(family, together, tmp_path / "together")
    assert len(changes) >= 7 and all(changes)
    assert [names for names in changes if names.isdisjoint(found)] == []
    assert not (tmp_path / "together").exists()


def test_berts_layer_before_a_sequence_head_is_the_pooler():
    numbers = []
    for options in ({"pooler": True}, {"pooler": False, "head_transform": True}):
        torch.manual_seed(3)
        model = own(**{**CLASSIFIER, **options})
        numbers.append((model(torch.tensor([[1, 2, 3]])), model.state_dict()))
    torch.testing.assert_close(numbers[0], numbers[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model.blocks[0].attention, "softcap", 5.0), "blocks.0.attention.softcap is 5.0, not None"),
        (lambda model: setattr(model.blocks[0].attention, "core", LinearAttention()), "attention.core is .*LinearAttention"),
        (
            lambda model: model.head.register_forward_hook(lambda *call: call[-1] * 2),
            "head has a hook, and hooks are not saved",
        ),
    ],
)
def test_a_model_that_was_changed_after_it_was_built_is_refused_by_the_part(change, message, tmp_path):
    model = own(activation="gelu_tanh")
    save_hf(model, tmp_path / "as built")
    change(model)
    with pytest.raises(ValueError, match=f"^save_hf: the model differs from its config: .*{message}"):
        save_hf(model, tmp_path / "changed")
    assert not (tmp_path / "changed").exists()


def test_a_model_of_another_library_is_refused_in_one_sentence(tmp_path):
    build = partial(own, activation="gelu_tanh")
    adapted, tied = (peft.get_peft_model(build(), peft.LoraConfig(target_modules=[name])) for name in ("q_proj", "head"))
    known = {"got Linear": torch.nn.Linear(2, 2), r"got PeftModel; merge_and_unload\(\)": adapted}
    known["got PeftModel; embeddings.token.weight and head.weight are one weight, and merging would change it"] = tied
    for hint, model in known.items():
        with pytest.raises(TypeError, match=f"^save_hf saves models of minitx.nn, {hint}") as error:
            save_hf(model, tmp_path)
        assert "\n" not in str(error.value)
    save_hf(peft.get_peft_model(build(), peft.LoraConfig(target_modules=["q_proj"])).merge_and_unload(), tmp_path)


def test_fields_without_an_effect_stand_in_no_ones_way(tmp_path):
    for options in (
        {"head": "token", "num_labels": 3, "pooling": "mean", "head_bias": True},
        {"head": "none", "tie_embeddings": False},
    ):
        save_hf(own(**OWN_BERT, **options), tmp_path / options["head"])
    save_hf(own(**VISION, tie_embeddings=False), tmp_path / "vit")


LABELLED = {
    "pooler": CLASSIFIER, "head_transform": {**CLASSIFIER, "pooler": False, "head_transform": True, "head_bias": True}, "vit": VISION,
    "token": {**CLASSIFIER, "pooler": False, "head": "token"},
}  # fmt: skip


@pytest.mark.parametrize("name", LABELLED)
def test_a_classifier_is_saved_with_the_names_of_its_labels(name, tmp_path):
    model = own(**LABELLED[name])
    save_hf(model, tmp_path, labels=("good", "bad", "neither"))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.id2label == {0: "good", 1: "bad", 2: "neither"} and config.label2id["bad"] == 1
    theirs, (inputs, real) = (
        getattr(transformers, config.architectures[0]).from_pretrained(tmp_path).eval(),
        batch("right", name),
    )
    with torch.no_grad():
        if name == "vit":
            want, got = theirs(pixel_values=inputs).logits, model(inputs)
        else:
            want, got = theirs(inputs, attention_mask=real.long()).logits, model(inputs, key_mask=real)
            want, got = (want[real], got[real]) if name == "token" else (want, got)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="labels must be 3 names"):
        save_hf(model, tmp_path, labels=("good", "bad"))


# what lies beside the weights

WORDS = "the Word was with God,\tand so on"


def with_first_token():
    """A tokenizer as Llama's, whose file puts ``<s>`` before each text."""
    made = tokenizers.Tokenizer.from_str(train_tokenizer("bpe", [WORDS], vocab_size=280).to_dict()["json"])
    made.add_special_tokens(["<s>"])
    special = [("<s>", made.token_to_id("<s>"))]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=special)
    return made


def exported(model, folder, tokenizer):
    save_hf(model, folder, tokenizer=tokenizer)
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_a_saved_tokenizer_of_ours_adds_no_tokens_and_one_of_others_stays_as_it_is(tmp_path):
    theirs = with_first_token()
    model = own(vocab_size=theirs.get_vocab_size(), activation="gelu_tanh")
    unigram = tokenizers.models.Unigram([("<unk>", 0.0), *((letter, -1.0) for letter in sorted({*WORDS}))], unk_id=0)  # as T5's
    for ours in (Tokenizer(tokenizers.Tokenizer(unigram).to_str()), Tokenizer(theirs.to_str())):
        assert exported(model, tmp_path / "ours", ours)(WORDS).input_ids == ours.encode(WORDS).tolist()
    first = theirs.token_to_id("<s>")
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=theirs, bos_token="<s>")
    for name, given in {"tokenizers": theirs, "transformers": wrapped}.items():
        assert exported(model, tmp_path / name, given)(WORDS).input_ids == [first, *ours.encode(WORDS).tolist()]


def test_a_saved_classifier_reads_its_class_token_before_a_text(tmp_path):
    tokenizer = train_tokenizer("char", [WORDS], marks=["pad", "cls", "eos"])
    sizes = {"vocab_size": tokenizer.vocab_size, "num_labels": 3, "pad_id": tokenizer.mark_ids["pad"]}
    model = own(head="sequence", pooler=True, **sizes, **OWN_BERT)
    again = exported(model, tmp_path, tokenizer)
    cls, eos = (tokenizer.mark_ids[name] for name in ("cls", "eos"))
    one, two = (tokenizer.encode(text).tolist() for text in ("so", "on"))
    assert again("so").input_ids == [cls, *one]
    assert again("so", "on").input_ids == [cls, *one, eos, *two]
    padded = again(["so", "the Word"], padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()(**padded).logits
        assert (theirs - model(padded.input_ids, key_mask=padded.attention_mask.bool())).abs().max() < 1e-5


def test_all_ends_of_a_text_are_in_the_generation_config_and_a_readme_of_the_users_is_kept(tmp_path):
    tokenizer = train_tokenizer("bpe", [WORDS], vocab_size=280, marks=["eos"])
    model = own(vocab_size=tokenizer.vocab_size, activation="gelu_tanh", eos_id=7, bos_id=5)
    save_hf(model, tmp_path, tokenizer=tokenizer, facts={"a|b": "c|d", "unknown": None})
    found = json.loads((tmp_path / "generation_config.json").read_text())
    assert found == {"bos_token_id": 5, "eos_token_id": [7, tokenizer.mark_ids["eos"]]}
    assert "c/d" in (tmp_path / "README.md").read_text() and "unknown" not in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("mine")
    save_hf(model, tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    with pytest.raises(ValueError, match="chat_template needs tokenizer"):
        save_hf(model, tmp_path, chat_template="{{ messages }}")
