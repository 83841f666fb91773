"""What later layers take from the first: its input, its values; and the soft-cap on logits."""

from dataclasses import replace

import pytest
import torch

from minitx.config import ConfigError, TransformerConfig
from minitx.generation import generate
from minitx.nn import DecoderLM, KVCache
from minitx.nn.models import build_model

CONFIG = TransformerConfig(
    vocab_size=11, embed_dim=12, num_heads=3, num_kv_heads=1, num_layers=3, position="rotary", init="lecun", max_len=16
)
IDS = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(0))


def model(**options):
    torch.manual_seed(1)
    return DecoderLM(replace(CONFIG, **options)).double()


@torch.no_grad()
def set_mixes(network, x, y):
    for name, parameter in network.named_parameters():
        if name.endswith("mix.weights") or "shortcut" in name or "value_residual" in name:
            parameter.copy_(torch.tensor([x, y]))


def test_a_shortcut_starts_as_no_shortcut():
    assert torch.equal(model(embed_shortcut=True)(IDS), model()(IDS))


def test_a_shortcut_alone_leaves_only_the_last_block():
    network, plain = model(embed_shortcut=True), model(num_layers=1)
    set_mixes(network, 0.0, 1.0)
    plain.blocks[0].load_state_dict({k: v for k, v in network.blocks[-1].state_dict().items() if "shortcut" not in k})
    plain.embeddings.load_state_dict(network.embeddings.state_dict())
    plain.head.load_state_dict(network.head.state_dict())
    torch.testing.assert_close(network(IDS), plain(IDS))


def test_a_value_residual_of_own_values_alone_is_the_plain_model():
    network = model(value_residual=True)
    assert not torch.allclose(network(IDS), model()(IDS))
    set_mixes(network, 1.0, 0.0)
    assert torch.equal(network(IDS), model()(IDS))


def test_a_value_residual_of_first_values_alone_never_reads_later_ones():
    network = model(value_residual=True)
    set_mixes(network, 0.0, 1.0)
    before = network(IDS)
    with torch.no_grad():
        network.blocks[2].attention.v_proj.weight.normal_()
    assert torch.equal(network(IDS), before)
    with torch.no_grad():
        network.blocks[0].attention.v_proj.weight.normal_()
    assert not torch.allclose(network(IDS), before)


@torch.no_grad()
@pytest.mark.parametrize("parallel", [False, True])
def test_with_a_cache_the_answers_are_those_without_one(parallel):
    network = model(value_residual=True, embed_shortcut=True, parallel=parallel).eval()
    set_mixes(network, 0.7, 0.4)
    cache = KVCache(7, 3)
    parts = [network(part, cache=cache) for part in IDS.split([3, 1, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), network(IDS), rtol=1e-12, atol=1e-12)


def test_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        network = model(value_residual=True, embed_shortcut=True, checkpointing=checkpointing, dropout=0.1)
        set_mixes(network, 0.7, 0.4)
        torch.manual_seed(5)
        network(IDS).square().sum().backward()
        gradients.append({name: p.grad for name, p in network.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    mixes = [g for name, g in gradients[0].items() if "shortcut" in name or "value_residual" in name]
    assert len(mixes) == 4 and all(g.abs().min() > 0 for g in mixes)


@pytest.mark.parametrize(
    "options",
    [
        {"architecture": "encoder"},
        {"architecture": "encoder", "num_experts": 2},
        {"architecture": "encoder_decoder", "position": "learned"},
        {
            "architecture": "vision",
            "head": "sequence",
            "num_labels": 3,
            "image_size": 4,
            "num_channels": 1,
            "position": "learned",
        },
    ],
    ids=lambda options: "-".join(map(str, options.values()))[:30],
)
def test_every_model_has_both_and_trains_them(options):
    network = build_model(replace(CONFIG, value_residual=True, embed_shortcut=True, **options))
    if options["architecture"] == "vision":
        inputs = (torch.randn(2, 1, 4, 4),)
    else:
        inputs = (IDS, IDS) if options["architecture"] == "encoder_decoder" else (IDS,)
    network(*inputs).square().sum().backward()
    mixes = {n: p for n, p in network.named_parameters() if "shortcut" in n or "value_residual" in n}
    stacks = 2 if options["architecture"] == "encoder_decoder" else 1
    assert len(mixes) == 4 * stacks and all(p.grad.abs().sum() > 0 for p in mixes.values())


def test_logits_are_capped_smoothly():
    plain, capped = model(), model(logit_softcap=0.5)
    torch.testing.assert_close(capped(IDS), 0.5 * torch.tanh(plain(IDS) / 0.5))
    assert capped(IDS).abs().max() < 0.5
    answers = [generate(network.eval(), IDS, max_new_tokens=3) for network in (plain, capped)]
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))  # the order of logits stays


def test_what_has_no_meaning_is_refused():
    with pytest.raises(
        ConfigError, match=r"logit_softcap=30.0 belongs to architecture=decoder or encoder_decoder, got .*encoder"
    ):
        replace(CONFIG, architecture="encoder", logit_softcap=30.0)
    with pytest.raises(ConfigError, match=r"logit_softcap=-1.0 must be"):
        replace(CONFIG, logit_softcap=-1.0)
    network = model(value_residual=True, embed_shortcut=True)
    with pytest.raises(ValueError, match="first_value belongs to a layer with value_residual, which needs it"):
        network.blocks[1].attention(torch.randn(2, 5, 12).double())
    with pytest.raises(ValueError, match="embeddings belong to a block with a shortcut, which needs them"):
        network.blocks[1](torch.randn(2, 5, 12).double())
