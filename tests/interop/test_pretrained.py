"""Our own folders: the same model comes back, and neither a changed byte nor another config passes."""

import dataclasses
import json
import sys

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.utils import parametrizations

from minitx.config import TransformerConfig, node
from minitx.interop import from_pretrained, save_hf, save_pretrained
from minitx.interop.files import WEIGHTS, read_tensors, write_tensors
from minitx.interop.pretrained import _digest
from minitx.nn import DecoderLM, ScoreScale, fold_scale
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
def test_the_same_model_comes_back_bit_for_bit_also_after_a_change_that_matters_in_training_alone(name, tmp_path):
    model = build(name)
    model = model.bfloat16() if name == "t5" else model
    for module in model.modules():
        for key, value in {"dropout": 0.5, "p": 0.5, "backend": "math", "strict": True}.items():
            if isinstance(vars(module).get(key), type(value)):
                setattr(module, key, value)
    save_pretrained(model, tmp_path / "new")
    state = torch.random.get_rng_state()
    again = from_pretrained(tmp_path / "new", config=model.config)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert type(again) is type(model) and again.config == model.config and not again.training
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert again.num_parameters() == model.num_parameters()


@pytest.mark.parametrize(
    ("file", "message"), [("model.safetensors", "is damaged"), ("config.json", r"config\.json|format_version=")]
)
def test_a_changed_byte_anywhere_is_an_error(file, message, tmp_path):
    save_pretrained(build(), tmp_path)
    from_pretrained(tmp_path)
    path = tmp_path / file
    whole = path.read_bytes()
    for at in range(0, len(whole), 11):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=message):
            from_pretrained(tmp_path)
    path.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path)


def test_a_core_of_ones_own_is_asked_for_and_no_other_class_gets_the_model(tmp_path):
    model = build_model(TransformerConfig(**SIZES), core=LinearAttention).eval()
    save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match="core="):
        from_pretrained(tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(from_pretrained(tmp_path, core=LinearAttention)(ids), model(ids))
    with pytest.raises(ValueError, match="core="):
        save_hf(model, tmp_path / "hf")
    save_pretrained(build(), tmp_path / "exact")
    with pytest.raises(ValueError, match="without core="):
        from_pretrained(tmp_path / "exact", core=LinearAttention)


def test_a_core_that_the_config_names_is_not_looked_up_in_a_file(tmp_path):
    named = node(LinearAttention)
    model = build_model(TransformerConfig(**SIZES, attention=named)).eval()
    save_pretrained(model, tmp_path / "named")
    with pytest.raises(ValueError, match="core="):
        from_pretrained(tmp_path / "named")
    ids = torch.tensor([[1, 2, 3]])
    loaded = from_pretrained(tmp_path / "named", core=LinearAttention)
    assert loaded.config == model.config and torch.equal(loaded(ids), model(ids))
    for evil in ({"_target_": "antigravity.fly"}, {"_target_": "os.system", "command": "touch owned"}):
        save_pretrained(build(), tmp_path / "evil")
        values = json.loads((tmp_path / "evil" / "config.json").read_text())
        tensors, _ = read_tensors(tmp_path / "evil" / WEIGHTS)
        values["model"]["attention"] = evil
        write_tensors(tensors, tmp_path / "evil" / WEIGHTS, {"sha256": _digest(tensors, values["model"])})
        (tmp_path / "evil" / "config.json").write_text(json.dumps(values))
        with pytest.raises(ValueError, match="code that a file names is not run"):
            from_pretrained(tmp_path / "evil")
    assert "antigravity" not in sys.modules


def test_a_config_of_another_model_is_refused_by_field(tmp_path):
    model = build()
    save_pretrained(model, tmp_path)
    other = dataclasses.replace(model.config, scale="unscaled", norm_eps=1e-6)
    with pytest.raises(ValueError, match=r"config: norm_eps=1e-05\b.*\b1e-06; scale=inv_sqrt\b.*\bunscaled$"):
        from_pretrained(tmp_path, config=other)


def test_a_model_is_saved_over_the_folder_that_it_came_from(tmp_path):
    save_pretrained(build(), tmp_path)
    model = from_pretrained(tmp_path)
    with torch.no_grad():
        model.final_norm.bias.fill_(0.5)
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_pretrained(model, tmp_path)
    assert all(torch.equal(tensor, want[name]) for name, tensor in from_pretrained(tmp_path).state_dict().items())
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_folders_of_other_kinds_are_recognised(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No such file .*config\.json"):
        from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"format=None.*load_hf"):
        from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"format": "minitx", "format_version": 2}')
    with pytest.raises(ValueError, match=r"format_version=1.*format_version=2"):
        from_pretrained(tmp_path)
    save_pretrained(build(), tmp_path)
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="save_pretrained"):
        from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"No such file .*model\.safetensors"):
        from_pretrained(tmp_path)


# ---- a model that is no longer what its config describes


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
    (used_twice, "config: blocks.1 is the module blocks.0, not minitx.nn.blocks.Block$"),
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
    (lambda model: model.head.register_forward_hook(lambda *call: call[-1] * 2), "head has a hook, and hooks are not saved"),
    (lambda model: model.register_forward_pre_hook(lambda *call: None), "the model has a hook"),
]


@pytest.mark.filterwarnings("ignore")  # of torch.ao
@pytest.mark.parametrize("save", [save_pretrained, save_hf])
@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_model_that_was_changed_after_it_was_built_is_refused_by_the_part(save, change, message, tmp_path):
    model = build(num_layers=2, activation="gelu_tanh").eval()
    save(model, tmp_path / "as built")
    change(model)
    with pytest.raises(ValueError, match=f"^{save.__name__}: .*{message}"):
        save(model, tmp_path / "changed")
    assert not (tmp_path / "changed").exists()


def test_a_folded_model_is_saved_with_its_new_scale(tmp_path):
    model, ids = build().eval(), torch.tensor([[1, 2, 3]])
    want = model(ids)
    save_pretrained(fold_scale(model), tmp_path)
    again = from_pretrained(tmp_path)
    assert again.config.scale == "unscaled"
    assert (again(ids) - want).abs().max() < 1e-6


@pytest.mark.parametrize("save", [save_pretrained, save_hf])
def test_a_model_of_another_library_is_refused_in_one_sentence(save, tmp_path):
    adapted, tied = (peft.get_peft_model(build(), peft.LoraConfig(target_modules=[name])) for name in ("q_proj", "head"))
    known = {"got Linear": torch.nn.Linear(2, 2), r"got PeftModel; merge_and_unload\(\)": adapted}
    known["got PeftModel; embeddings.token.weight and head.weight are one weight, and merging would change it"] = tied
    for hint, model in known.items():
        with pytest.raises(TypeError, match=f"^{save.__name__} saves models of minitx.nn, {hint}") as error:
            save(model, tmp_path)
        assert "\n" not in str(error.value)
    model = build(activation="gelu_tanh")
    save(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).merge_and_unload(), tmp_path)
