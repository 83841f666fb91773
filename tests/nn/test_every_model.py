"""What holds for every model: backends agree, padding does not matter, looking ahead is impossible, sizes are honest."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from test_models import PAIRS
from torch import nn

from minitx.config import ConfigError, TransformerConfig, to_dict
from minitx.nn import KVCache, MultiHeadAttention
from minitx.nn.models import build_model

V, E, H, L, S, C = 13, 12, 3, 7, 5, 3
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
DECODERS = {f"decoder, {position} {options}": ("decoder", {"position": position, **options}) for position, options in PAIRS}


def model(name, **more):
    """Weights large enough that every path matters; float64."""
    kind, options = (MODELS | DECODERS)[name]
    options = {"embed_dim": E, "num_heads": H, "num_layers": 2, "max_len": 31, "init": "lecun", **options, **more}
    if kind != "vision":
        options = {"vocab_size": V, **options}
    torch.manual_seed(0)
    network = build_model(TransformerConfig(architecture=kind, **options)).double()
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
    row = torch.randint(1, V, (1, real.shape[0]))
    row[0, real] = ids[0]
    other = torch.randint(1, V, (1, real.shape[0]))
    return torch.cat((row, other)), torch.stack((real, torch.ones_like(real)))


def inputs(kind, side=None):
    torch.manual_seed(1)
    if kind == "vision":
        return {"pixel_values": torch.randn(2, 2, 6, 6, dtype=torch.float64)}
    ids = torch.randint(1, V, (1, L))
    batch = {"input_ids": torch.cat((ids, ids.flip(1)))}
    if side is not None:
        batch["input_ids"], batch["key_mask"] = padded(ids, side)
    if kind == "encoder_decoder":
        target = torch.randint(1, V, (1, S))
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


@pytest.mark.parametrize("name", MODELS)
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


@pytest.mark.parametrize("name", [*PADDED, *DECODERS])
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


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vision"])
def test_extras_come_before_the_head_and_are_the_router_loss_of_experts(name):
    network, batch = model(name).eval(), inputs(MODELS[name][0])
    hidden, extras = network(**batch, return_extras=True)
    assert extras == {}
    assert torch.equal(network.head(hidden), network(**batch))
    network = model(name, num_experts=3)
    _, extras = network(**batch, return_extras=True)
    extras.pop("router_loss").backward()
    routers = [p for n, p in network.named_parameters() if "router" in n]
    assert len(routers) == (4 if name == "t5" else 2) and all(router.grad.any() for router in routers) and not extras


@pytest.mark.parametrize("name", ["llama", "bert", "vaswani", "vision"])
def test_checkpointing_changes_no_bit(name):
    batch, losses = inputs(MODELS[name][0]), []
    for checkpointing in (False, True):
        network = model(name, checkpointing=checkpointing, dropout=0.2, stochastic_depth=0.3)
        torch.manual_seed(7)
        loss_of(network, batch)[0].backward()
        losses.append([p.grad for p in network.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


@pytest.mark.parametrize("name", ["llama", "encoder, mean of tokens", "vision"])
@pytest.mark.parametrize(
    "options",
    [{"attention": "linear"}, {"attention": "performer", "num_features": 5}, {"attention": "linformer", "num_slots": 4}],
    ids=lambda options: options["attention"],
)
def test_one_word_gives_a_model_another_core(name, options):
    if options["attention"] == "linformer" and MODELS[name][0] == "decoder":
        with pytest.raises(ConfigError, match="attention"):
            model(name, **options)
        return
    network, batch = model(name, **options).eval(), inputs(MODELS[name][0])
    cores = {type(m.core).__name__.lower() for m in network.modules() if isinstance(m, MultiHeadAttention)}
    assert cores == {options["attention"] + "attention"}
    loss, logits = loss_of(network, batch)
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())
    assert not torch.allclose(model(name).eval()(**batch), logits)


# ---- encoders


@pytest.mark.parametrize("window", [None, 2])
def test_a_token_of_an_encoder_sees_every_other_or_those_of_its_window_to_both_sides(window):
    network, ids = model("bert", window=window, num_layers=1), torch.randint(1, V, (1, L))
    embedded = []
    network.embeddings.register_forward_hook(lambda m, a, out: embedded.append(out))
    logits = network(ids)
    for t in range(L):
        (grad,) = torch.autograd.grad(logits[0, t].square().sum(), embedded, retain_graph=True)
        assert (grad[0].abs().sum(-1) > 0).tolist() == [abs(t - u) < (window or L) for u in range(L)]


# ---- encoder-decoder


@pytest.mark.parametrize("name", [n for n in MODELS if MODELS[n][0] == "encoder_decoder"])
def test_memory_and_cache_give_what_the_whole_forward_gives(name):
    network, batch = model(name).eval(), inputs("encoder_decoder", "left")
    with torch.no_grad():
        want = network(**batch)
        memory = network.encode(batch["input_ids"], key_mask=batch["key_mask"])
        target = {"key_mask": batch["key_mask"], "memory": memory}
        again = network(None, batch["decoder_input_ids"], decoder_key_mask=batch["decoder_key_mask"], **target)
        assert torch.equal(again, want)
        cache, pieces = KVCache(capacity=11, num_layers=network.config.decoder_layers), []
        computed = []
        network.blocks[0].cross_attention.k_proj.register_forward_hook(lambda *_: computed.append(1))
        for start, stop in ((0, 3), (3, 4), (4, batch["decoder_input_ids"].shape[1])):
            ids, described = (batch[key][:, start:stop] for key in ("decoder_input_ids", "decoder_key_mask"))
            pieces.append(network(None, ids, decoder_key_mask=described, cache=cache, **target))
    real = batch["decoder_key_mask"]
    torch.testing.assert_close(torch.cat(pieces, dim=1)[real], want[real], rtol=0, atol=1e-10)
    assert len(computed) == 1  # the keys of the memory


def test_deepnorm_of_an_encoder_decoder_follows_both_depths():
    """Wang et al. 2022, Figure 2, for N layers of the encoder and M of the decoder."""
    N, M = 6, 4
    network = model("encoder-decoder, rotary and deepnorm", num_layers=N, num_decoder_layers=M)
    assert network.encoder.blocks[0].attention_residual.residual_scale == pytest.approx(0.81 * (N**4 * M) ** (1 / 16))
    assert network.blocks[0].attention_residual.residual_scale == pytest.approx((3 * M) ** 0.25)
    plain = model("encoder-decoder, rotary and deepnorm", num_layers=N, num_decoder_layers=M, norm_position="post")
    betas = {"encoder.": 0.87 * (N**4 * M) ** (-1 / 16), "": (12 * M) ** -0.25}
    for side, beta in betas.items():
        deep, other = (n.get_parameter(f"{side}blocks.0.attention.v_proj.weight") for n in (network, plain))
        torch.testing.assert_close(deep, beta * other)


# ---- sizes and refusals


def test_positions_of_other_image_sizes_keep_the_class_token():
    table = model("vision").embeddings
    assert torch.equal(table.positions(3, 3), table.position.weight)
    assert table.positions(5, 2).shape == (11, E) and torch.equal(table.positions(5, 2)[0], table.position.weight[0])


def test_number_of_parameters_by_hand():
    block = 4 * (E * E + E) + 2 * E * 4 * E + 5 * E + 2 * 2 * E
    cross = 4 * (E * E + E) + 2 * E
    network = model("vaswani")
    assert network.num_parameters() == V * E + 4 * block + 2 * cross
    network.blocks[0].requires_grad_(False)
    assert network.num_parameters() == V * E + 3 * block + cross
    with torch.device("meta"):
        sizes = {"vocab_size": 50257, "embed_dim": 768, "num_heads": 12, "num_layers": 12, "max_len": 1024}
        assert build_model(TransformerConfig(**sizes)).num_parameters() == 124_439_808


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"architecture": "decoder", "head": "token"}, "head=token"),
        ({"architecture": "vision", **IMAGES, "image_size": 7}, "image_size=7"),
        ({"architecture": "vision", **IMAGES, "position": "t5"}, "position=t5"),
        ({"architecture": "vision", **IMAGES, "window": 3}, "window=3"),
        ({"architecture": "encoder", "num_decoder_layers": 2}, "num_decoder_layers=2"),
        ({"architecture": "decoder", "head_transform": True}, "head_transform=True"),
        ({"attention": "linear", "position": "alibi"}, "position=alibi"),
        ({"attention": "linear", "architecture": "encoder_decoder"}, "attention=linear"),
        ({"pad_id": -1}, "pad_id=-1"),
        ({"num_labels": 0}, "num_labels=0"),
        ({"attention": "linear", "vocab_size": V, "num_slots": 3}, "num_slots=3"),
        ({"architecture": "encoder"}, "vocab_size=None"),
        ({"architecture": "encoder", "vocab_size": V, "head": "sequence"}, "num_labels=None"),
        ({"architecture": "vision", "head": "none", "num_channels": 1}, "image_size=None"),
    ],
    ids=str,
)
def test_a_config_without_a_model_is_refused_by_its_key(options, key):
    with pytest.raises(ValueError, match=f"^{key}"):
        build_model(TransformerConfig(**options))


@pytest.mark.parametrize(
    ("name", "inputs", "error", "argument"),
    [
        ("vision", [torch.randn(2, 2, 6, 7)], ValueError, "pixel_values"),
        ("vision", [torch.randn(2, 1, 6, 6)], ValueError, "pixel_values"),
        ("vision", [torch.ones(1, 2, 6, 6, dtype=torch.long)], TypeError, "pixel_values"),
        ("vaswani", [None, torch.ones(1, 2).long()], ValueError, "input_ids=None"),
        ("vaswani", [torch.ones(2, 3).long(), torch.ones(1, 2).long()], ValueError, "memory"),
        ("vaswani", [torch.ones(1, 3).long(), torch.ones(1, 2)], ValueError, "decoder_input_ids"),
    ],
)
def test_an_input_that_a_model_cannot_take_is_named(name, inputs, error, argument):
    with pytest.raises(error, match=argument):
        model(name)(*inputs)


@pytest.mark.parametrize("name", MODELS)
def test_copies_pickles_and_the_config_beside_the_weights_give_the_same_model(name):
    network, batch = model(name).eval(), inputs(MODELS[name][0])
    again = build_model(TransformerConfig(**to_dict(network.config))).double().eval()
    again.load_state_dict(network.state_dict())
    for other in (again, copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert torch.equal(other(**batch), network(**batch))
