"""Hugging Face models with our core: the same function, looked at and changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from minitx.analysis import capture, intervene  # noqa: E402
from minitx.interop import adopt_hf, release_hf  # noqa: E402
from minitx.interop.adopt import adopted_cores  # noqa: E402
from tests.interop.families import NAMES, QUICK, REFUSED, build, inputs_of, output_of  # noqa: E402

FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.release) for name in NAMES]
ROUNDING = 1e-6  # eager computes its softmax in float32, also in a model of float64


def as_double(inputs):
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def gradients(model, inputs, counts):
    model.zero_grad()
    out = output_of(model, inputs, counts)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adopted_model_has_the_logits_and_gradients_of_its_eager_self(name):
    if name in ("GptOss", "Mixtral", "Olmoe"):
        pytest.skip("transformers' experts have no float64 product: the test in float32 has them")
    model = build(name).double()
    inputs, counts = inputs_of(name, pad="right")
    inputs = as_double(inputs)
    model.set_attn_implementation("eager")
    out, wanted = gradients(model, inputs, counts)
    adopted_out, found = gradients(adopt_hf(model), inputs, counts)
    torch.testing.assert_close(adopted_out, out, atol=float(out.abs().max()) * ROUNDING, rtol=0)
    assert wanted.keys() == found.keys()
    largest = max(gradient.abs().max() for gradient in wanted.values())
    for key in wanted:
        torch.testing.assert_close(
            found[key], wanted[key], atol=float(largest) * ROUNDING, rtol=0, msg=lambda said, key=key: f"{key}: {said}"
        )


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_padding_on_either_side_is_hidden_as_it_is_in_the_model(name, pad):
    model = build(name)
    inputs, counts = inputs_of(name, pad=pad)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = output_of(model, inputs, counts)
        found = output_of(adopt_hf(model), inputs, counts)
    torch.testing.assert_close(found, wanted, atol=float(wanted.abs().max()) * 1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_looking_changes_no_bit_and_knocking_a_head_out_changes_the_answer(name):
    model = adopt_hf(build(name))
    inputs, counts = inputs_of(name, pad="left")
    with torch.no_grad():
        plain = output_of(model, inputs, counts)
        with capture(model, what="weights") as seen:
            assert torch.equal(output_of(model, inputs, counts), plain)
        with intervene(model, "heads", 0.0, heads=[1]):
            changed = output_of(model, inputs, counts)
    assert seen.keys() == {f"{name}.core" for name in adopted_cores(model)} and all(seen.values())
    for weights, *_ in seen.values():
        sums = weights.sum(-1)
        assert ((sums - 1).abs() < 1e-5).logical_or(sums == 0).all() or name == "GptOss"
    assert (changed - plain).abs().max() > 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_output_attentions_are_the_weights_of_the_core(name):
    model = build(name)
    inputs, _ = inputs_of(name, pad="right")
    model.set_attn_implementation("eager")
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


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_and_generate_give_what_the_model_gives(name):
    model = build(name)
    inputs, _ = inputs_of(name, pad="left")
    if not model.can_generate() or "pixel_values" in inputs or "input_features" in inputs:
        pytest.skip("it does not generate text from text")
    options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    inputs.pop("decoder_input_ids", None)
    model.set_attn_implementation("eager")
    wanted = model.generate(**inputs, **options)
    adopt_hf(model)
    assert torch.equal(model.generate(**inputs, **options), wanted)
    assert torch.equal(model.generate(**inputs, **options, use_cache=False), wanted)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_attention_does_not_pass_through_the_interface_is_refused(name):
    model = build(name)
    before = copy.deepcopy(model.config)
    with pytest.raises(ValueError, match="does not pass through"):
        adopt_hf(model)
    assert model.config.to_dict() == before.to_dict() and not adopted_cores(model)


def test_what_is_no_model_of_transformers_is_refused():
    with pytest.raises(TypeError, match="contains none"):
        adopt_hf(nn.Linear(2, 3))


def test_a_model_made_from_the_same_config_object_stays_as_it_is():
    one = build("Llama")
    two = type(one)(one.config).eval()
    assert two.config is one.config
    inputs, counts = inputs_of("Llama", pad="left")
    with torch.no_grad():
        before = output_of(two, inputs, counts)
        adopt_hf(one)
        assert torch.equal(output_of(two, inputs, counts), before)
        assert two.config._attn_implementation == "sdpa" and not adopted_cores(two)


def test_a_model_inside_another_can_be_adopted_alone():
    outer = build("Llama")
    inputs, counts = inputs_of("Llama", pad="left")
    with torch.no_grad():
        before = output_of(outer, inputs, counts)
        adopt_hf(outer.model)
        assert outer.config._attn_implementation == "sdpa"
        torch.testing.assert_close(output_of(outer, inputs, counts), before, atol=1e-5, rtol=1e-4)
        assert len(adopted_cores(outer)) == 2


@pytest.mark.parametrize("name", QUICK)
def test_release_gives_the_model_back(name):
    model = build(name)
    config, state = model.config, {key: value.clone() for key, value in model.state_dict().items()}
    modules, hooks = dict(model.named_modules()).keys(), sum(len(m._forward_pre_hooks) for m in model.modules())
    inputs, counts = inputs_of(name, pad="left")
    with torch.no_grad():
        before = output_of(model, inputs, counts)
        adopt_hf(model)
        assert model.state_dict().keys() == state.keys()
        release_hf(model)
        assert torch.equal(output_of(model, inputs, counts), before)
    assert model.config is config and dict(model.named_modules()).keys() == modules
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == hooks
    with pytest.raises(ValueError, match="is not adopted"):
        release_hf(model)


def test_a_saved_adopted_model_is_the_saved_model(tmp_path):
    model = build("Llama")
    model.save_pretrained(tmp_path / "plain")
    adopt_hf(model).save_pretrained(tmp_path / "adopted")
    files = [{path.name: path.read_bytes() for path in (tmp_path / kind).iterdir()} for kind in ("plain", "adopted")]
    assert files[0] == files[1]


def test_a_copy_of_an_adopted_model_is_a_model_of_its_own():
    model = adopt_hf(build("Llama"))
    twin = copy.deepcopy(model)
    release_hf(model)
    inputs, counts = inputs_of("Llama")
    with torch.no_grad():
        torch.testing.assert_close(output_of(twin, inputs, counts), output_of(model, inputs, counts), atol=1e-5, rtol=1e-4)
    assert adopted_cores(twin) and not adopted_cores(model)
    release_hf(twin)
