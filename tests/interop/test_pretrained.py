"""Our own folders: the same model comes back, and neither a changed byte nor another config passes."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from minitx.config import TransformerConfig
from minitx.interop import from_pretrained, save_hf, save_pretrained
from minitx.nn.efficient import LinearAttention
from minitx.nn.models import build_model

SIZES = {"vocab_size": 7, "embed_dim": 4, "num_heads": 2, "num_layers": 1, "max_len": 5, "ffn_dim": 3}
MODELS = {
    "tied": {},
    "learned scale": {"scale": "learned", "sinks": True, "tie_embeddings": False},
    "encoder": {"architecture": "encoder", "head": "sequence", "num_labels": 3, "pooler": True},
    "t5": {"architecture": "encoder_decoder", "position": "t5", "num_buckets": 8},
    "vision": {"architecture": "vision", "head": "none", "image_size": 4, "num_channels": 1, "vocab_size": None},
}


def build(name="tied", **options):
    return build_model(TransformerConfig(**{**SIZES, **MODELS[name], **options}))


@pytest.mark.parametrize("name", MODELS)
def test_the_same_model_comes_back_bit_for_bit(name, tmp_path):
    model = build(name)
    model = model.bfloat16() if name == "t5" else model
    save_pretrained(model, tmp_path / "new")
    state = torch.random.get_rng_state()
    again = from_pretrained(tmp_path / "new", config=model.config)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert type(again) is type(model) and again.config == model.config and not again.training
    want, got = model.state_dict(), again.state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[key], got[key]) and want[key].dtype == got[key].dtype for key in want)
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
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
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
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors does not exist"):
        from_pretrained(tmp_path)


def test_a_tokenizer_lies_beside_the_model(tmp_path):
    from minitx.data.tokenizers import load_tokenizer, train_tokenizer

    ours = train_tokenizer("char", ["abcé"])
    save_pretrained(build(), tmp_path, tokenizer=ours)
    again = load_tokenizer(tmp_path)
    assert again.encode("éa").tolist() == ours.encode("éa").tolist()
