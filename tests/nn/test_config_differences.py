"""A model that is no longer what its config built, part by part."""

import re

import pytest
import torch
from torch.nn.utils import parametrizations

from minitx.config import TransformerConfig, node
from minitx.nn import DecoderLM, ScoreScale, fold_scale, set_scale
from minitx.nn.config_differences import changes_of, hooked_modules
from minitx.nn.efficient import LinearAttention
from minitx.nn.models import build_model

SIZES = {"vocab_size": 7, "embed_dim": 4, "num_heads": 2, "num_layers": 1, "max_len": 5, "ffn_dim": 3}
MODELS = {
    "tied": {},
    "learned scale": {"scale": "learned", "sinks": True, "tie_embeddings": False},
    "encoder": {"architecture": "encoder", "head": "sequence", "num_labels": 3, "pooler": True},
    "t5": {"architecture": "encoder_decoder", "position": "t5", "num_buckets": 8},
    "vision": {"architecture": "vision", "head": "none", "image_size": 4, "num_channels": 1, "vocab_size": None},
    "alibi": {"position": "alibi", "window": (2, None), "num_layers": 3, "softcap": 2.0, "sinks": True, "logit_softcap": 3.0},
    "rotary": {
        **{"position": "rotary", "rotary_scaling": "yarn", "rotary_factor": 2.0, "rotary_original_len": 3, "qk_norm": "rms"},
        **{"num_kv_heads": 1, "norm": "rms", "activation": "swiglu", "bias": False, "scale": 1},
    },
    "sandwich": {
        "norm_position": "sandwich",
        "layer_scale": 0.1,
        "stochastic_depth": 0.2,
        "dropout": 0.1,
        "scale": "log_length",
    },
    "additive": {"norm_position": "deepnorm", "embed_norm": True, "attention": "additive"},
    "performer": {"parallel": True, "attention": "performer", "num_features": 3},
    "linformer": {"architecture": "encoder", "attention": "linformer", "num_slots": 2},
}


def build(name="tied", **options):
    return build_model(TransformerConfig(**{**SIZES, **MODELS[name], **options}))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_as_built_has_no_changes_also_after_a_change_that_matters_in_training_alone(name):
    model = build(name).bfloat16()
    for module in model.modules():
        for key, value in {"dropout": 0.5, "p": 0.5, "backend": "math", "strict": True}.items():
            if isinstance(vars(module).get(key), type(value)):
                setattr(module, key, value)
    state = torch.random.get_rng_state()
    assert changes_of(model.eval()) == []
    assert torch.equal(torch.random.get_rng_state(), state)


def quantised(model):
    torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True)


def cut(model):
    model.blocks = model.blocks[:1]
    model.windows = model.windows[:1]


def used_twice(model):
    model.blocks[1] = model.blocks[0]


def changed(owner, name, value):
    return lambda model: setattr(model.get_submodule(owner), name, value)


CHANGES = [
    (cut, "blocks.1 is missing"),
    (used_twice, "^blocks.1 is the module blocks.0, not minitx.nn.blocks.Block$"),
    (changed("", "__class__", type("Mine", (DecoderLM,), {})), "the model is .*Mine, not .*DecoderLM"),
    (quantised, "blocks.0.attention.q_proj is torch.ao.nn.quantized"),
    (changed("blocks.1.attention", "scale", ScoreScale("unscaled", head_dim=2)), "blocks.1.attention.scale.scale is unscaled"),
    (changed("blocks.0.attention.scale", "factor", 2.0), "blocks.0.attention.scale.factor is 2.0, not 1.0"),
    (changed("blocks.0.attention", "softcap", 5.0), "blocks.0.attention.softcap is 5.0, not None"),
    (changed("blocks.0", "causal", False), "blocks.0.causal is False"),
    (changed("", "windows", (2, None)), r"windows is \(2, None\)"),
    (changed("blocks.0.feedforward", "activation", "relu"), "activation is relu"),
    (changed("blocks.1.attention", "core", LinearAttention()), "blocks.1.attention.core is .*LinearAttention"),
    (changed("final_norm", "eps", 0.1), "final_norm.eps is 0.1"),
    (changed("", "final_norm", torch.nn.Identity()), "final_norm is .*Identity"),
    (changed("embeddings", "token", torch.nn.Embedding(9, 4)), r"embeddings.token.num_embeddings is 9, not 7"),
    (
        changed("head", "weight", torch.nn.Parameter(torch.zeros(7, 4))),
        "head.weight is .*, not the tensor embeddings.token.weight",
    ),
    (changed("blocks.0.attention.q_proj", "bias", None), "blocks.0.attention.q_proj.bias is missing"),
    (lambda model: parametrizations.spectral_norm(model.blocks[0].attention.q_proj), "q_proj is .*ParametrizedLinear"),
]


@pytest.mark.filterwarnings("ignore")  # of torch.ao
@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_model_that_was_changed_after_it_was_built_is_known_by_the_part(change, message):
    model = build(num_layers=2, activation="gelu_tanh").eval()
    change(model)
    changes = changes_of(model)
    assert any(re.search(message, text) for text in changes), changes


def test_a_new_scale_of_the_whole_model_is_in_its_config():
    assert changes_of(fold_scale(build())) == changes_of(set_scale(build(), "inv")) == []


def test_a_core_that_the_config_names_is_compared_by_its_class():
    model = build(attention=node(LinearAttention))
    assert changes_of(model) == []
    model.blocks[0].attention.core = torch.nn.Identity()
    assert changes_of(model) == [
        f"blocks.0.attention.core is {torch.nn.Identity.__module__}.Identity, not {LinearAttention.__module__}.LinearAttention"
    ]


def test_hooks_are_known_by_their_modules():
    model = build()
    model.head.register_forward_hook(lambda *call: call[-1] * 2)
    model.register_forward_pre_hook(lambda *call: None)
    assert hooked_modules(model) == ["the model", "head"] and not changes_of(model)
