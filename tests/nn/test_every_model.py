"""What holds for every model: backends agree, padding does not matter, looking ahead is impossible, sizes are honest."""

import pytest
import torch
import torch.nn.functional as F
from sizes import VOCAB, small_model
from torch import nn

L, S, C = 7, 5, 3
MODERN = {
    "position": "rotary", "qk_norm": "rms", "norm": "rms", "bias": False, "activation": "relu2", "tie_embeddings": False,
    "logit_softcap": 30.0,
}  # fmt: skip
VANILLA = {"position": "sinusoidal", "norm_position": "post", "scale_embeddings": True, "activation": "relu"}
T5 = {
    "position": "t5", "norm": "rms", "bias": False, "scale": "unscaled", "activation": "relu", "scale_logits": True,
    "num_buckets": 8, "max_distance": 11,
}  # fmt: skip
BERT = {"norm_position": "post", "embed_norm": True, "head_transform": True, "head_bias": True, "type_vocab_size": 2}
LLAMA = {"position": "rotary", "norm": "rms", "bias": False, "activation": "swiglu", "num_kv_heads": 1, "tie_embeddings": False}
SEQUENCE = {"head": "sequence", "num_labels": C}
IMAGES = {"head": "sequence", "num_labels": C, "image_size": 6, "num_channels": 2}
MODELS = {
    "gpt2": ("decoder", {}),
    "llama": ("decoder", LLAMA),
    "decoder with alibi and a window": ("decoder", {"position": "alibi", "window": 3}),
    "modern decoder": ("decoder", {**MODERN, "scale": "learned", "qkv_bias": True}),
    "bert": ("encoder", BERT),
    "bert, sequence": ("encoder", {**BERT, **SEQUENCE, "head_transform": False, "pooler": True}),
    "encoder, mean of tokens": ("encoder", {**SEQUENCE, "pooling": "mean", "position": "rotary"}),
    "encoder, tokens": ("encoder", {"head": "token", "num_labels": C, "position": "alibi"}),
    "t5 encoder": ("encoder", {**T5, "head": "none", "scale_logits": False}),
    "vaswani": ("encoder_decoder", VANILLA),
    "t5": ("encoder_decoder", T5),
    "encoder-decoder, rotary and deepnorm": ("encoder_decoder", {"position": "rotary", "norm_position": "deepnorm"}),
    "encoder-decoder, 3 and 1 layers": ("encoder_decoder", {"num_layers": 3, "num_decoder_layers": 1}),
    "encoder-decoder, log_length": ("encoder_decoder", {"scale": "log_length", "type_vocab_size": 2}),
    "vision": ("vision", IMAGES),
    "vision, mean of patches": ("vision", {**IMAGES, "pooling": "mean", "norm": "rms"}),
}
PADDED = [name for name, (kind, _) in MODELS.items() if kind != "vision"]


def model(name, **more):
    kind, options = MODELS[name]
    network = small_model(architecture=kind, **{**options, **more})
    torch.manual_seed(0)
    for module in network.modules():  # what starts at zero or one would hide its own loss
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter_name in ("weight", "bias", "class_token") and (parameter == parameter.flatten()[0]).all():
                nn.init.normal_(parameter, 1.0, 0.3)
    return network


def padding(length, side, extra=3):
    """(1, length + extra) bool, real tokens True."""
    left = {"left": extra, "right": 0, "both": 2}[side]
    return (torch.arange(length + extra) >= left) & (torch.arange(length + extra) < left + length)


def padded(ids, side):
    """Two rows: ``ids`` among other tokens, and a row without padding."""
    real = padding(ids.shape[1], side)
    row = torch.randint(1, VOCAB, (1, real.shape[0]))
    row[0, real] = ids[0]
    other = torch.randint(1, VOCAB, (1, real.shape[0]))
    return torch.cat((row, other)), torch.stack((real, torch.ones_like(real)))


def inputs(kind, side=None):
    torch.manual_seed(1)
    if kind == "vision":
        return {"pixel_values": torch.randn(2, 2, 6, 6, dtype=torch.float64)}
    ids = torch.randint(1, VOCAB, (1, L))
    batch = {"input_ids": torch.cat((ids, ids.flip(1)))}
    if side is not None:
        batch["input_ids"], batch["key_mask"] = padded(ids, side)
    if kind == "encoder_decoder":
        target = torch.randint(1, VOCAB, (1, S))
        batch["decoder_input_ids"] = torch.cat((target, target.flip(1)))
        if side is not None:
            batch["decoder_input_ids"], batch["decoder_key_mask"] = padded(target, side)
    return batch


def loss_of(network, batch):
    """Cross-entropy of a fixed label at every real position, and the logits."""
    logits = network(**batch)
    logits = logits if network.config.head != "none" else logits.sigmoid()
    flat = logits.flatten(0, -2)
    labels = torch.arange(flat.shape[0]) % flat.shape[1]
    mask = batch.get("decoder_key_mask", batch.get("key_mask"))
    if mask is not None and logits.dim() == 3:
        labels = labels.masked_fill(~mask.flatten(), -100)
    return F.cross_entropy(flat, labels, ignore_index=-100), logits


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "vision"])  # the others: tests/lattice/models.py
def test_loss_and_all_gradients_are_those_of_math_in_every_backend_and_every_parameter_matters(name):
    batch, found = inputs(MODELS[name][0], "left" if name in PADDED else None), {}
    for backend in ("math", "sdpa", "chunked"):
        network = model(name, backend=backend)
        loss, _ = loss_of(network, batch)
        loss.backward()
        grads = {n: p.grad for n, p in network.named_parameters()}
        assert all(grad is not None and torch.isfinite(grad).all() for grad in grads.values()), backend
        found[backend] = {"loss": loss.detach(), **grads}
    # a bias on the keys moves all scores of a query alike
    assert [n for n, grad in found["math"].items() if not grad.any() and not n.endswith("k_proj.bias")] == []
    for backend, got in found.items():
        for key, want in found["math"].items():
            torch.testing.assert_close(got[key], want, rtol=0, atol=1e-10, msg=lambda m, b=backend, k=key: f"{b} {k}: {m}")


@pytest.mark.parametrize("name", ["modern decoder", "bert, sequence", "t5"])  # the others: tests/lattice/models.py
def test_padding_changes_nothing(name):
    network = model(name).eval()
    kind = network.config.architecture
    plain = {key: value[:1] for key, value in inputs(kind).items()}
    want = network(**plain)
    for side in ("left", "right", "both"):
        batch = dict(plain)
        batch["input_ids"], batch["key_mask"] = padded(plain["input_ids"], side)
        if kind == "encoder_decoder":
            batch["decoder_input_ids"], batch["decoder_key_mask"] = padded(plain["decoder_input_ids"], side)
        got = network(**batch)[:1]
        torch.testing.assert_close(
            got if network.config.head == "sequence" else got[:, padding(want.shape[1], side)], want, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("name", ["gpt2", "vision"])
def test_hidden_states_are_the_input_of_the_head(name):
    network, batch = model(name).eval(), inputs(MODELS[name][0])
    assert torch.equal(network.head(network(**batch, return_hidden=True)), network(**batch))
