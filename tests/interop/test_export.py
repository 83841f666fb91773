"""What onnxruntime answers is what the model answers: other batches and lengths than the example's, padding on both sides."""

import logging

import pytest
import torch

from minitx.config import TransformerConfig
from minitx.interop import export_onnx
from minitx.nn.models import build_model

V = 13
SIZES = {"vocab_size": V, "embed_dim": 12, "num_heads": 3, "num_layers": 1, "max_len": 31, "init": "lecun"}
LLAMA = {"position": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "num_kv_heads": 1, "head_dim": 6}
YARN = {"rotary_scaling": "yarn", "rotary_factor": 2.0, "rotary_original_len": 8}
ENCODER = {"architecture": "encoder", "norm_position": "post", "embed_norm": True}
PAIR = {"architecture": "encoder_decoder", "scale_embeddings": True}
PICTURE = {"head": "sequence", "num_labels": 5, "image_size": 6, "patch_size": 2, "num_channels": 1}
MODELS = {
    "rotary window": {**LLAMA, **YARN, "window": 3},
    "masked": {**ENCODER, "head": "lm", "head_transform": True, "type_vocab_size": 2},
    "t5": {**PAIR, "position": "t5", "scale": "unscaled", "init": "t5", "norm": "rms"},
    "vision": {"architecture": "vision", **PICTURE},
}
SHAPES = ((1, 1), (3, 7), (2, 31))
logging.getLogger("torch.onnx").setLevel(logging.ERROR)


def inputs(config, rows, length):
    """Random inputs of another shape than the example's; rows are padded on the left and on the right."""
    if config.architecture == "vision":
        return {"pixel_values": torch.randn(rows, 1, 6, 6)}
    given = {}
    for side, L in (("", length), ("decoder_", max(1, length - 2))):
        given[f"{side}input_ids"] = torch.randint(V, (rows, L))
        bounds = torch.randint(0, L, (rows, 2)).sort(-1).values
        given[f"{side}key_mask"] = (torch.arange(L) >= bounds[:, :1]) & (torch.arange(L) <= bounds[:, 1:])
    if config.architecture != "encoder_decoder":
        given = {name: tensor for name, tensor in given.items() if not name.startswith("decoder_")}
    if config.type_vocab_size:
        given["token_type_ids"] = torch.randint(2, (rows, length))
    return given


@pytest.mark.parametrize("options", [{"backend": "chunked"}, {"attention": "performer"}])
def test_what_onnx_has_no_operator_for_is_named(options, tmp_path):
    with pytest.raises(ValueError, match=next(f"{name}={value}" for name, value in options.items())):
        export_onnx(build_model(TransformerConfig(**SIZES, **options)), tmp_path / "model.onnx")


@pytest.mark.release
@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_answers_as_the_model_does_over_lengths_and_padding(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = build_model(TransformerConfig(**{**SIZES, **MODELS[name]}))
    if model.config.position == "t5":
        torch.nn.init.normal_(model.attn_bias.weight)
        torch.nn.init.normal_(model.encoder.attn_bias.weight)
    export_onnx(model, tmp_path / "model.onnx")
    assert model.training
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for shape in SHAPES:
        given = inputs(model.config, *shape)
        (answer,) = session.run(["logits"], {key: tensor.numpy() for key, tensor in given.items()})
        with torch.no_grad():
            want = model(**given)
        real = given.get("decoder_key_mask", given.get("key_mask"))
        pair = torch.from_numpy(answer), want
        if want.dim() == 3:
            pair = pair[0][real], pair[1][real]
        torch.testing.assert_close(*pair, rtol=0, atol=1e-5)
    assert want.std() > 0.05


def test_a_missing_package_is_named_with_the_command_that_brings_it(tmp_path, monkeypatch):
    monkeypatch.setattr("minitx.interop.export.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"export_onnx needs onnx and onnxscript: install minitx with the extra export"):
        export_onnx(build_model(TransformerConfig(**SIZES)), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
