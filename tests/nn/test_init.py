"""Initial weights: their sizes, and draws that are paired between arms."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from minitx.config import TransformerConfig
from minitx.nn import DecoderLM, Encoder, MultiHeadAttention, build_model, init_weights
from tests.lattice.networks import CHANGES, OURS, refused_by_tables
from tests.lattice.networks import SIZES as LATTICE_SIZES

SIZES = {"vocab_size": 97, "embed_dim": 128, "num_heads": 2, "num_layers": 2, "max_len": 64, "tie_embeddings": False}
E, D, F = 128, 64, 512


def model(seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return DecoderLM(TransformerConfig(**{**SIZES, **options}), generator=generator)


def parameters(**options):
    return {name: p.detach() for name, p in model(**options).named_parameters()}


# standard deviations worked out from the papers, at E 128, D 64, F 512, two layers
ROLES = ("q", "k", "v", "out", "up", "down", "head", "token")
TABLE = {
    "gpt2": (0.02, 0.02, 0.02, 0.01, 0.02, 0.01, 0.02, 0.02),
    "lecun": (*[E**-0.5] * 5, F**-0.5, E**-0.5, 1.0),
    "xavier": (*[E**-0.5] * 4, *[(2 / (E + F)) ** 0.5] * 2, E**-0.5, 1.0),
    "torch_mha": (*[(2 * E) ** -0.5] * 3, *[(3 * E) ** -0.5] * 2, (3 * F) ** -0.5, (3 * E) ** -0.5, 1.0),
    "torch_linear": (*[(3 * E) ** -0.5] * 5, (3 * F) ** -0.5, (3 * E) ** -0.5, 1.0),
    "t5": ((E * D) ** -0.5, *[E**-0.5] * 4, F**-0.5, E**-0.5, 1.0),
}
STDS = {scheme: dict(zip(ROLES, stds, strict=True)) for scheme, stds in TABLE.items()}


@pytest.mark.parametrize("scheme", STDS)
def test_standard_deviations_are_those_of_the_papers(scheme):
    network = model(init=scheme)
    block = network.blocks[1]
    weights = {
        "q": block.attention.q_proj.weight, "k": block.attention.k_proj.weight, "v": block.attention.v_proj.weight,
        "out": block.attention.out_proj.weight, "up": block.feedforward.up_proj.weight,
        "down": block.feedforward.down_proj.weight, "head": network.head.weight, "token": network.embeddings.token.weight,
    }  # fmt: skip
    tied = model(init=scheme, tie_embeddings=True)
    assert tied.head.weight is tied.embeddings.token.weight
    for name, weight in [*weights.items(), ("head", tied.head.weight)]:  # tied embeddings have the size of a head
        n = weight.numel()
        # the sample std of n normal draws has a relative standard error 1/√(2n): five of them
        assert weight.std().item() == pytest.approx(STDS[scheme][name], rel=5 / math.sqrt(2 * n)), name
        assert abs(weight.mean().item()) < 5 * STDS[scheme][name] / math.sqrt(n), name


@pytest.mark.parametrize("scheme", ["torch_linear", "torch_mha", "xavier"])
def test_schemes_of_torch_match_torch_itself(scheme):
    if scheme != "torch_mha":
        theirs, ours = nn.Linear(64, 8192), init_weights(nn.Linear(64, 8192), scheme)
        pairs = [(theirs.weight, ours.weight), (theirs.bias, ours.bias)]
        if scheme == "xavier":
            pairs = [(nn.init.xavier_uniform_(theirs.weight), ours.weight)]
    else:
        theirs, layer = nn.MultiheadAttention(256, 4), init_weights(MultiHeadAttention(256, 4), scheme)
        pairs = [(theirs.in_proj_weight[:256], layer.q_proj.weight), (theirs.out_proj.weight, layer.out_proj.weight)]
    for want, got in pairs:
        assert got.abs().max().item() == pytest.approx(want.abs().max().item(), rel=0.01)
        # two sample stds of n uniform draws: relative standard error √(2 · 0.8 / 4n); five of them
        assert got.std().item() == pytest.approx(want.std().item(), rel=5 * math.sqrt(0.4 / got.numel()))


@pytest.mark.parametrize(("fold", "folded"), [("query", ("q_proj",)), ("symmetric", ("q_proj", "k_proj"))])
@pytest.mark.parametrize("scheme", STDS)
def test_a_fold_changes_its_projections_by_its_factor_and_nothing_else(scheme, fold, folded):
    options = {"init": scheme, "num_heads": 8}  # D = 16: 1/4 on one, or 1/2 on each, are exact
    plain, changed = parameters(**options), parameters(**options, init_fold=fold)
    for name, weight in plain.items():
        factor = 16 ** (-0.5 / len(folded)) if any(part in name for part in folded) else 1.0
        assert torch.equal(changed[name], weight * factor), name


@pytest.mark.parametrize("fold", ["query", "symmetric"])
@pytest.mark.parametrize("norm", [None, "rms", "layer", "l2"])
def test_without_the_scale_a_folded_start_is_the_same_function(norm, fold):
    ids, options = torch.arange(10)[None] % 7, {"init": "lecun", "qk_norm": norm}
    models = []
    for changes in ({}, {"scale": "unscaled", "init_fold": fold}):
        torch.manual_seed(0)
        models.append(
            DecoderLM(TransformerConfig(vocab_size=7, embed_dim=32, num_heads=2, num_layers=2, **options, **changes)).double()
        )
    torch.testing.assert_close(models[1](ids), models[0](ids), rtol=0, atol=1e-6)


def test_layers_that_share_a_projection_are_folded_once_at_the_start():
    first, second = MultiHeadAttention(12, 3), MultiHeadAttention(12, 3)
    second.q_proj, second.k_proj = first.q_proj, first.k_proj
    weights = []
    for fold in (None, "symmetric"):
        torch.manual_seed(0)
        weights.append(init_weights(nn.ModuleList([first, second]), "lecun", fold=fold)[0].q_proj.weight.detach().clone())
    torch.testing.assert_close(weights[1], weights[0] * 4**-0.25)


PAIRED = [{"scale": "unscaled"}, {"scale": "inv", "scale_factor": 4.0}, {"scale": "log_length"}, {"softcap": 50.0}]
PAIRED += [{"scale": "learned"}, {"qk_norm": "rms"}, {"qk_norm": "layer"}, {"qk_norm": "l2"}]  # with parameters of their own


@pytest.mark.parametrize("options", PAIRED)
def test_arms_start_from_identical_draws(options):
    plain, arm = parameters(init="lecun"), parameters(init="lecun", **options)
    assert all(torch.equal(plain[name], arm[name]) for name in plain)


def test_every_seed_draws_differently_and_the_same_seed_alike():
    one, again, other = parameters(seed=1), parameters(seed=1), parameters(seed=2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    drawn = [name for name in one if name.endswith("weight") and "norm" not in name]
    assert not any(torch.equal(one[name], other[name]) for name in drawn)


@pytest.mark.parametrize("scheme", ["gpt2", "torch_linear"])
def test_the_bias_of_a_tied_head_is_that_of_the_scheme(scheme):
    one, again = (model(init=scheme, head_bias=True, tie_embeddings=True).head.bias for _ in range(2))
    assert torch.equal(one, again) and one.any() == (scheme == "torch_linear")


def test_a_generator_of_ones_own_leaves_the_global_one_alone():
    network, before = model(), torch.get_rng_state()
    init_weights(network, "xavier", generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("core", [{"attention": "linformer", "num_slots": 3}, {"attention": "performer"}])
def test_cores_draw_from_the_generator_too(core):
    config = TransformerConfig(architecture="encoder", vocab_size=11, embed_dim=12, num_heads=3, num_layers=1, **core)
    one, same, other = (Encoder(config, generator=torch.Generator().manual_seed(seed)).state_dict() for seed in (3, 3, 4))
    drawn = [name for name in one if ".core." in name]
    assert drawn and all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in drawn)


def test_no_two_matrices_share_a_draw():
    weights = [p.flatten()[:50] for name, p in parameters().items() if p.dim() == 2 and p.numel() >= 50]
    assert len({tuple((w / w[0]).tolist()) for w in weights}) == len(weights)


@pytest.mark.parametrize("scheme", ["xavier", "gpt2", "torch_linear"])
def test_deepnorm_multiplies_values_outputs_and_feedforward_by_its_beta(scheme):
    """β = (8N)^-¼ for N layers of a decoder alone (Wang et al. 2022, Figure 2); queries, keys and the rest are left alone."""
    plain = parameters(init=scheme, norm_position="post", num_layers=2)
    deep = parameters(init=scheme, norm_position="deepnorm", num_layers=2)
    beta = 0.5  # 16^-¼, exact
    touched = ("v_proj.weight", "out_proj.weight", "up_proj.weight", "down_proj.weight")
    touched += tuple(name.replace("weight", "bias") for name in touched)
    for name, weight in plain.items():
        assert torch.equal(deep[name], weight * (beta if name.endswith(touched) else 1.0)), name


@pytest.mark.parametrize("options", [{}, {"norm_position": "deepnorm"}, {"activation": "swiglu"}])
def test_zero_outputs_make_every_block_the_identity_of_its_stream(options):
    plain, zero = parameters(**options), parameters(**options, init_zero_outputs=True)
    for name, weight in plain.items():
        emptied = ".out_proj." in name or ".down_proj" in name
        assert torch.equal(zero[name], torch.zeros_like(weight) if emptied else weight), name
    network = model(**options, init_zero_outputs=True)
    x = torch.randn(1, 5, E)
    assert "norm_position" in options or torch.equal(network.blocks[0](x), x)


def test_gains_are_given_by_role():
    plain = init_weights(MultiHeadAttention(12, 3), "xavier", generator=torch.Generator().manual_seed(0))
    gains, again = {"query": 2.0, "residual": 0.5}, torch.Generator().manual_seed(0)
    gained = init_weights(MultiHeadAttention(12, 3), "xavier", gains=gains, generator=again)
    for name, factor in (("q_proj", 2.0), ("k_proj", 1.0), ("v_proj", 1.0), ("out_proj", 0.5)):
        assert torch.equal(getattr(gained, name).weight, factor * getattr(plain, name).weight)


def combinations():
    """The options of every named model of the lattice, and of the first with each change that its config allows."""
    yield from ({**LATTICE_SIZES, **options} for options in OURS.values())
    first = next(iter(OURS.values()))
    yield from (
        options for change in CHANGES.values() if not refused_by_tables(options := {**LATTICE_SIZES, **first, **change})
    )


def test_drawing_again_leaves_no_parameter_as_it_was():
    for options in combinations():
        config = TransformerConfig(**options)
        network = build_model(config)
        fresh = {name: p.detach().clone() for name, p in network.named_parameters()}
        with torch.no_grad():
            for p in network.parameters():
                p.fill_(torch.nan)
        init_weights(network, config.init, fold=config.init_fold, num_layers=config.num_layers)
        left = [name for name, p in network.named_parameters() if not p.isfinite().all()]
        assert left == [], "init_weights must reset these: in _Drawer.attention, or in a reset_parameters of their module"
        alike = [name for name, p in fresh.items() if (p == p.flatten()[0]).all() and p.numel() > 1]
        assert [name for name in alike if not torch.equal(network.get_parameter(name), fresh[name])] == [], options


def test_the_row_of_padding_stays_zero():
    table = init_weights(nn.Embedding(5, 3, padding_idx=1)).weight
    assert (table != 0).any(1).tolist() == [True, False, True, True, True]


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, lambda layer: prune.identity(layer, "weight")])
def test_a_weight_that_is_computed_is_refused_and_the_model_unchanged(wrap):
    layers = nn.Sequential(nn.Linear(3, 3), wrap(nn.Linear(3, 3)))
    before = copy.deepcopy(layers.state_dict())
    with pytest.raises(ValueError, match=r"1\.weight is computed"):
        init_weights(layers)
    torch.testing.assert_close(layers.state_dict(), before, rtol=0, atol=0)
