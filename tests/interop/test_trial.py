"""Adoption checks itself: what differs is refused, what was not reached is named, and the model stays as it was."""

from __future__ import annotations

import random
import re
import warnings
from collections import Counter
from pathlib import Path

import accelerate
import numpy
import peft
import pytest
import torch
import transformers
from torch import nn

from minitx.check.properties import compare, hidden_tokens, later_tokens, rounding
from minitx.interop import adopt, adopt_hf, release_hf
from minitx.interop.adopted_core import adopted_cores
from minitx.interop.trial import AdoptionTrial, answer, made_up_inputs, settled
from tests import pretend
from tests.interop.families import (
    BESIDE,
    DECODERS,
    PAIRS,
    PARTLY,
    QUICK,
    build,
    inputs_of,
)
from tests.tools.other_families import measured, on_record
from tests.training.ranks import run_ranks

RECORD = on_record()
SPARSE = {
    **{"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"pad_token_id": 0, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "first_k_dense_replace": 1},
}


def deepseek_v4():
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    sizes = {"vocab_size": 99, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "n_routed_experts": 4}
    sizes |= {"num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 2, "partial_rotary_factor": 0.5}
    rates = dict.fromkeys(kinds[1:], 4)
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(**sizes, sliding_window=4, compress_rates=rates, layer_types=kinds)
    return transformers.DeepseekV4ForCausalLM(config).eval()


def silent(model, **options):
    """Adopt the model, and return what was warned of."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        adopt_hf(model, **options)
    return [str(warning.message) for warning in seen]


def snapshot(model):
    """What a check must leave as it was. (transformers notes in a first call that it has prepared one.)"""
    attributes = {
        name: {key: value for key, value in vars(module).items() if not isinstance(value, dict) and "_capturing" not in key}
        for name, module in model.named_modules()
    }
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    states = random.getstate(), tuple(map(str, numpy.random.get_state())), torch.get_rng_state().tolist()
    return dict(model.named_modules()), attributes, hooks, states, model.state_dict()


def assert_unchanged(model, before):
    after = snapshot(model)
    assert all(one is other for one, other in zip(after[0].values(), before[0].values(), strict=True))
    assert after[0].keys() == before[0].keys() and after[1:4] == before[1:4]
    torch.testing.assert_close(after[4], before[4], rtol=0, atol=0)


# --- what is right is adopted


@pytest.mark.parametrize(("name", "implementation", "dtype"), [
    *(("GPT2", "eager", torch.float32), ("Llama", "sdpa", torch.float64), ("Gemma2", "sdpa", torch.float32)),
    *(("Gemma2", "eager", torch.bfloat16), ("Bert", "eager", torch.bfloat16), ("T5", "sdpa", torch.float64)),
    *(("T5", "eager", torch.float16), ("ViT", "sdpa", torch.float16)),
])  # fmt: skip
def test_a_right_model_is_adopted_without_a_word_whatever_its_dtype_and_attention(name, implementation, dtype):
    model = build(name)
    model.set_attn_implementation(implementation if model._supports_sdpa else "eager")
    assert silent(model.to(dtype)) == [] and adopted_cores(model)


class Quantised(nn.Module):
    """A matrix of eight bits, which makes coarse steps."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("scale", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale @ (self.weight * self.scale).T


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")
@pytest.mark.parametrize(
    "kind", ["plain", "training", "checkpointing", "lora", "compiled", "accelerate", "quantised", "no_gradient"]
)
def test_a_check_draws_nothing_and_leaves_everything_as_it_was(kind):
    model = build("Llama").train(kind in ("training", "checkpointing", "lora"))
    model.model.layers[0].eval()
    if kind == "checkpointing":
        model.activation_checkpointing_enable({"use_reentrant": False})
    if kind == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj"]))
    if kind == "compiled":
        model.model.layers[0].compile(backend="eager")
    if kind == "accelerate":
        model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    if kind == "quantised":
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(layer.self_attn, name, Quantised(getattr(layer.self_attn, name)))
    if kind == "no_gradient":
        model.requires_grad_(False)
    before = snapshot(model)
    assert silent(model) == []
    assert_unchanged(release_hf(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def adopted_on_an_accelerator(names):
    device = pretend.register()  # where mixing devices is an error
    models = [build(name).to(dtype).to(device) for name in names for dtype in (torch.float32, torch.bfloat16)]
    state = torch.get_device_module(device.type).get_rng_state()
    told = [silent(model) for model in models]
    return told, all(map(adopted_cores, models)), torch.equal(torch.get_device_module(device.type).get_rng_state(), state)


@pytest.mark.slow
@pretend.is_needed
def test_a_model_on_an_accelerator_is_checked_there():
    told, are_adopted, is_restored = run_ranks(1, adopted_on_an_accelerator, QUICK)[0]
    assert not any(told) and are_adopted and is_restored


def test_a_model_that_draws_random_numbers_in_evaluation_mode_is_compared_with_equal_draws():
    model = build("Llama")
    model.model.norm.register_forward_hook(lambda module, args, out: out + torch.randn_like(out) + random.random())
    state = torch.get_rng_state()
    assert silent(model) == [] and torch.equal(torch.get_rng_state(), state)


def test_a_model_that_changes_with_a_short_row_is_given_back_as_it_was():
    model = build("BigBirdPegasus")
    before = snapshot(model)
    with pytest.raises(ValueError, match="its answer differs by"):
        adopt_hf(model)
    assert_unchanged(model, before)
    assert model.model.encoder.attention_type == "block_sparse"


def test_a_model_that_is_not_finite_for_padding_is_checked_where_it_is():
    model = build("Llama")
    model.model.norm.register_forward_hook(lambda module, args, out: out.index_fill(0, torch.tensor([1, 3]), torch.nan))
    assert silent(model) == []


# --- what is wrong is refused


def test_a_mask_of_floats_that_a_model_extends_is_refused_and_the_model_given_back():
    model = deepseek_v4()
    before = snapshot(model)
    inputs = {"input_ids": torch.arange(3, 51).view(2, 24)}
    wanted = answer(model, inputs)
    with pytest.raises(
        ValueError, match=r"^DeepseekV4ForCausalLM cannot be adopted: its answer differs by \d.* rounding explains"
    ):
        adopt_hf(model)
    assert_unchanged(model, before)
    assert torch.equal(answer(model, inputs), wanted)


@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa", "HYV4", "AXK2", "MistralLarge4Text"])
def test_attention_that_selects_keys_by_indices_is_refused_at_adoption(name):
    end = "Model" if name.endswith("Text") else "ForCausalLM"
    cls = getattr(transformers, f"{name}{end}")
    model = cls(cls.config_class(**SPARSE)).eval()
    with pytest.raises(ValueError, match=f"^{name}{end} cannot be adopted: .*passes indices to its attention function"):
        adopt_hf(model)
    assert not adopted_cores(model)


def lose_causality(core, args, out):
    return out.flip(2)


def hide_one_key(core, args, out):
    return out.index_fill(2, torch.tensor([4]), 0.0)


def make_one_head_larger(core, args, out):
    return torch.cat((1.001 * out[:, :1], out[:, 1:]), 1)


@pytest.mark.parametrize(("name", "fault"), [
    *(("GPT2", lose_causality), ("Llama", hide_one_key), ("Gemma2", make_one_head_larger)),
    *(("Bert", lose_causality), ("T5", hide_one_key), ("ViT", make_one_head_larger)),
])  # fmt: skip
def test_a_core_that_is_wrong_in_one_layer_is_refused(name, fault, monkeypatch):
    model = build(name)
    exchange = adopt._exchange

    def exchange_wrongly(model, *args):
        exchange(model, *args)
        [*_, last] = adopted_cores(model).values()
        last.core.register_forward_hook(fault)

    monkeypatch.setattr(adopt, "_exchange", exchange_wrongly)
    leak = "later tokens move it by" if fault is lose_causality and name in ("GPT2", "Llama", "Gemma2") else ""
    with pytest.raises(ValueError, match=f"its answer differs by .*{leak}"):
        adopt_hf(model)
    assert not adopted_cores(model)


def test_an_interrupted_adoption_gives_the_model_back(monkeypatch):
    def interrupt(trials):
        raise KeyboardInterrupt

    model = build("Llama")
    before = snapshot(model)
    monkeypatch.setattr(adopt, "_compare", interrupt)
    with pytest.raises(KeyboardInterrupt):
        adopt_hf(model)
    assert_unchanged(model, before)


def test_a_named_backend_that_cannot_serve_the_model_is_refused_at_adoption_with_its_reason():
    with pytest.raises(
        ValueError, match=r"Gemma2ForCausalLM cannot be adopted: backend 'sdpa' cannot serve this call: .* soft-cap"
    ):
        adopt_hf(build("Gemma2"), backend="sdpa")
    assert adopted_cores(adopt_hf(build("Gemma2"), backend="sdpa", check=False))


# --- what is not checked is named


@pytest.mark.parametrize("name", [*BESIDE, *PARTLY])
def test_layers_without_an_attention_core_are_named_in_one_warning(name):
    layers = {
        "Jamba": "model.layers.0",
        "Bamba": "model.layers.0",
        "Qwen3Next": "model.layers.0, model.layers.1, model.layers.2",
    }
    layers |= {"LongT5": "encoder.block.0, encoder.block.1", "PegasusX": "model.encoder.layers.0, model.encoder.layers.1"}
    told = silent(build(name))
    if name == "FalconH1":  # attention and Mamba in each layer
        assert told == []
    else:
        assert len(told) == 1 and re.search(
            rf"layers whose attention does not pass .* stay unchanged.*\({layers[name]}\)$", told[0]
        )


def llava():
    text = {**DECODERS["Llama"], "model_type": "llama"}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4}
    vision |= {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, "projection_dim": 32}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=5)
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).eval()


def test_cores_that_did_not_run_are_named_in_one_warning_and_inputs_that_run_them_check_them():
    ids = torch.tensor([[7, 5, 5, 5, 5, 8, 9], [6, 5, 5, 5, 5, 4, 3]])
    [told] = silent(llava())
    assert re.search(r"did not run in the check .*vision_tower.* and 2 more\)$", told)
    assert silent(llava(), check={"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8)}) == []
    [told] = silent(transformers.BartForCausalLM(transformers.BartConfig(**PAIRS["Bart"])))
    assert "encoder_attn" in told and "self_attn" not in told


def test_an_error_of_a_model_is_the_cause_of_the_refusal_and_an_error_of_the_check_is_not_reported_as_one_of_the_model(
    monkeypatch,
):
    model = build("Llama")
    before = snapshot(model)
    with monkeypatch.context() as patch:
        patch.setattr("minitx.interop.trial.compare", lambda *_: {}["nothing"])
        with pytest.raises(KeyError, match="nothing"):
            adopt_hf(model)
    with pytest.raises(ValueError, match="a call of LlamaForCausalLM with it fails: IndexError") as error:
        adopt_hf(model, check={"input_ids": torch.tensor([[1, 10**6]])})
    assert isinstance(error.value.__cause__.__cause__, IndexError)
    assert_unchanged(model, before)


def test_models_that_cannot_be_called_with_made_up_inputs_are_told_to_be_unchecked():
    [told] = silent(build("Whisper"))
    assert told.endswith("pass check=inputs, the arguments of a call (no inputs are made up for input_features)")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "projection_dim": 32}
    clip = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 99}, vision_config={**sizes, "image_size": 8, "patch_size": 4}
    )
    [told] = silent(transformers.CLIPModel(clip))
    assert "is not checked" in told
    [told] = silent(accelerate.cpu_offload(build("Llama")))
    assert "(weights are on the meta device or offloaded)" in told
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODERS["Llama"]))
    [told] = silent(model)
    assert "meta" in told and silent(release_hf(model), check=False) == []
    broken = build("Llama")
    broken.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    [told] = silent(broken)
    assert "(ZeroDivisionError: division by zero)" in told


@pytest.mark.parametrize("name", [*QUICK, "Whisper", "Jamba"])
def test_inputs_of_ones_own_are_a_check(name):
    inputs = inputs_of(name, pad="right")[0]
    told = silent(build(name), check=inputs)
    assert all("layers whose attention does not pass" in text for text in told)
    with pytest.raises(ValueError, match=r"^check=.*: a call of .* with it fails: "):
        adopt_hf(build(name), check={"nothing": 3})
    for wrong in (True, None, "no", inputs.get("input_ids")):
        with pytest.raises(ValueError, match="must be 'auto', False, or a mapping"):
            adopt_hf(build(name), check=wrong)


def test_a_wrapper_is_called_itself_with_inputs_of_ones_own_and_its_models_with_made_up_ones():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = build("Llama"), build("Bert")

        def forward(self, ids):
            return self.first(ids).logits + self.second(ids).logits

    ids = torch.arange(3, 17).view(2, 7)
    assert silent(Twice()) == silent(Twice(), check={"ids": ids}) == []
    [told] = silent(Twice(), check={"ids": ids[:1]}) or [""]
    assert told == ""


# --- a call costs little


def test_a_check_calls_the_model_twice_before_and_once_after():
    model, calls = build("Llama"), []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape))
    adopt_hf(model)
    assert calls == [(4, 9)] * 3
    adopt_hf(release_hf(model), check=False)
    assert len(calls) == 3


def test_a_check_leaves_nothing_that_a_call_added_to_the_model():
    model = build("Llama")
    model.log = []

    def forward(self, *args, **options):
        self.calls = len(self.log)
        self.log.append(random.random())
        return type(self).forward(self, *args, **options)

    model.forward = forward.__get__(model)
    before = random.getstate()
    with settled(model):
        model(torch.tensor([[1, 2, 3]]))
        assert len(model.log) == 1
    assert random.getstate() == before and model.log == [] and not hasattr(model, "calls")


# --- the oracles hold for adopted models


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Gemma2", "Bert", "T5", "Qwen3Next", "GptOss", "ModernBert"])
def test_hidden_tokens_change_nothing_in_an_adopted_model_and_later_ones_nothing_in_a_decoder(name):
    model = build(name)
    silent(model)
    for pad in ("left", "right"):
        inputs, _ = inputs_of(name, pad=pad)
        real = inputs["attention_mask"].bool()
        ask = lambda rows: answer(model, rows)  # noqa: E731
        with settled(model):
            noise = rounding(ask, model, inputs)
            hidden = hidden_tokens(inputs)
            out = ask(hidden.inputs)
            rows, twins = out.chunk(2)
            where = real if name != "T5" else None  # all positions of its decoder
            assert compare(twins, rows, noise, where).is_rounding
            if name in DECODERS or name in ("GPT2", "T5", "Qwen3Next"):
                ids = "decoder_input_ids" if name == "T5" else "input_ids"
                assert later_tokens(inputs, ids).moved(ask, noise).is_rounding


def test_made_up_rows_hold_no_special_token_and_one_of_them_is_padded():
    model = build("Llama")
    model.config.eos_token_id = list(range(2, 90))
    inputs = made_up_inputs(model)
    assert {*inputs["input_ids"].flatten().tolist()} <= {*range(90, 99)}
    assert inputs["attention_mask"].sum(1).tolist() == [9, 6]
    assert AdoptionTrial(model, inputs).counts.shape == (4, 9)
    assert made_up_inputs(build("T5"))["decoder_input_ids"].shape == (2, 5)
    assert made_up_inputs(build("ViT").half())["pixel_values"].dtype == torch.half


# --- families


def test_the_page_has_the_numbers_of_the_record():
    answers = Counter(answer.partition(",")[0] for _, answer, _ in RECORD.values())
    reasons = Counter(answer for _, answer, _ in RECORD.values())
    agreeing = Counter(agreement for _, _, agreement in RECORD.values())
    page = (Path(__file__).parents[2] / "docs/weights.md").read_text(encoding="utf-8")
    (paragraph,) = [line for line in page.splitlines() if "adopted_families.tsv" in line]
    named = ("no layer calls the interface", "a call fails", "the answer differs")
    expected = [sum(answers.values()), *(answers[kind] for kind in ("checked", "not checked", "refused"))]
    expected += [*(reasons[f"refused, {reason}"] for reason in named), agreeing["agrees"]]
    numbers = map(int, re.findall(r"\d+", paragraph))
    assert all(number in numbers for number in expected), "the page lacks one of these numbers, in this order"
    assert not agreeing["disagrees"]


@pytest.mark.release
@pytest.mark.parametrize("name", RECORD)
def test_the_record_says_of_each_family_what_adoption_says(name):
    assert measured(name) == RECORD[name]
