"""Another score scale, the same function."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from minitx.config import TransformerConfig
from minitx.nn import MultiHeadAttention, QKNorm, ScoreScale, fold_scale
from minitx.nn.efficient import LinearAttention
from minitx.nn.models import build_model

SIZES = {"vocab_size": 13, "embed_dim": 24, "num_heads": 6, "head_dim": 5, "num_layers": 2, "max_len": 16}
MODELS = {
    "gpt": {},
    "soft-cap, sinks, alibi": {"softcap": 2.0, "sinks": True, "position": "alibi"},
    "RMSNorm of queries and keys, rotary": {"qk_norm": "rms", "position": "rotary", "head_dim": 6},
    "LayerNorm of queries and keys": {"qk_norm": "layer"},
}
IDS = torch.arange(14).view(2, 7) % 13


def build(name, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    model = build_model(TransformerConfig(**{**SIZES, **MODELS[name], **changes})).to(dtype).eval()
    for parameter in model.parameters():  # scores that matter, biases that are not 0
        nn.init.normal_(parameter, std=0.5)
    return model, (IDS,)


@pytest.mark.parametrize("target", [("unscaled", 1.0), (-0.3, 2.0)], ids=str)
@pytest.mark.parametrize("name", MODELS)  # of other kinds: tests/lattice/models.py
def test_the_model_under_another_scale_is_the_same_function(name, target):
    for dtype, relative in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        model, inputs = build(name, dtype)
        want = model(*inputs)
        assert fold_scale(model, target[0], factor=target[1]) is model
        assert (model.config.scale, model.config.scale_factor) == target
        torch.testing.assert_close(model(*inputs), want, rtol=0, atol=relative * want.abs().max().item())
        fresh = build_model(model.config).to(dtype).eval()  # the config says what the weights now need
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(fresh(*inputs), model(*inputs))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scale": "learned"}, "scale=learned"),
        ({"qk_norm": QKNorm("l2", 4, num_kv_heads=3)}, "qk_norm=l2"),
        ({"scale": "log_length", "max_len": 9}, "scale=log_length"),
        ({"scale": ScoreScale(1.0, head_dim=4, factor=0.0)}, "0"),
        ({"core": LinearAttention()}, "LinearAttention"),
    ],
)
def test_what_cannot_be_folded_is_refused_by_name_and_left_as_it_was(options, reason):
    model = nn.ModuleDict({"first": MultiHeadAttention(12, 3), "second": MultiHeadAttention(12, 3, **options)})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"second: .*{reason}"):
        fold_scale(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("scale", ["learned", "log_length"])
def test_a_scale_without_a_fixed_multiplier_keeps_its_kind_and_what_it_has_learned(scale):
    model, inputs = build("gpt", scale=scale, scale_factor=0.5)
    want = model(*inputs)
    learned = [parameter.clone() for name, parameter in model.named_parameters() if name.endswith("log_scale")]
    before = model.blocks[0].attention.q_proj.weight.clone()
    fold_scale(model, scale, factor=2.0)
    torch.testing.assert_close(model(*inputs), want, rtol=0, atol=1e-12)
    torch.testing.assert_close(model.blocks[0].attention.q_proj.weight, before / 2)
    assert all(
        torch.equal(*pair)
        for pair in zip(learned, (s.log_scale for s in model.modules() if hasattr(s, "log_scale")), strict=True)
    )
    with pytest.raises(ValueError, match=f"scale={scale} has no fixed multiplier"):
        fold_scale(model, "unscaled")


def test_layers_with_common_projections_are_folded_once_or_refused():
    first, second = (MultiHeadAttention(12, 3, scale=scale).double() for scale in ("inv_sqrt", "inv_sqrt"))
    second.q_proj, second.k_proj = first.q_proj, first.k_proj
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    want = second(x + first(x))
    fold_scale(nn.ModuleList([first, second]))
    torch.testing.assert_close(second(x + first(x)), want, rtol=0, atol=1e-12)
    second.scale = ScoreScale(0.3, head_dim=4)
    before = first.q_proj.weight.clone()
    with pytest.raises(ValueError, match="shares a projection"):
        fold_scale(nn.ModuleList([first, second]), "inv")
    assert torch.equal(first.q_proj.weight, before) and first.scale.scale == "unscaled"


class Doubled(nn.Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


def with_adapter():
    low_rank = nn.Linear(12, 12)
    low_rank.lora_a, low_rank.lora_b = nn.Linear(12, 2), nn.Linear(2, 12)
    return low_rank


def hooked(before):
    layer = nn.Linear(12, 12)
    register = layer.register_forward_pre_hook if before else layer.register_forward_hook
    register((lambda module, args: (args[0] + 1.0,)) if before else (lambda module, args, out: out + 1.0))
    return layer


def patched():
    layer = nn.Linear(12, 12)
    layer.forward = lambda x: x
    return layer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_adapter, "lora_a"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(12, 12)), "parametrizations"),
        (lambda: prune.random_unstructured(nn.Linear(12, 12), "weight", 0.5), "weight_orig"),
        (lambda: torch.ao.nn.quantized.dynamic.Linear(12, 12), "Linear has its own forward"),
        (lambda: Doubled(12, 12), "Doubled has its own forward"),
        (lambda: hooked(before=True), "hook"),
        (lambda: hooked(before=False), "hook"),
        (patched, "its own forward"),
    ],
)
@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_a_projection_that_is_no_plain_linear_layer_is_refused_by_its_difference(name, make, reason):
    layer = MultiHeadAttention(12, 3)
    setattr(layer, name, make())
    with pytest.raises(ValueError, match=f"plain Linear layers: .*{reason}"):
        fold_scale(layer)
    assert layer.scale.scale == "inv_sqrt"


def tie(model, part):
    """Use a weight of attention in another place too."""
    layer = model.blocks[1].attention
    if part == "module":
        layer.v_proj = layer.k_proj
    elif part == "weight":
        layer.v_proj.weight = layer.k_proj.weight
    elif part == "memory":
        layer.v_proj.weight = nn.Parameter(layer.k_proj.weight.detach())
    else:
        model.embeddings.token.weight = layer.q_proj.weight


@pytest.mark.parametrize(
    ("part", "name"),
    [(part, "blocks.1.attention.v_proj.weight") for part in ("module", "weight", "memory")]
    + [("embedding", "embeddings.token.weight")],
)
def test_a_weight_that_is_also_used_elsewhere_is_refused_and_left_as_it_was(part, name):
    model, inputs = build("gpt", vocab_size=30, num_layers=2)
    tie(model, part)
    want = model(*inputs)
    with pytest.raises(ValueError, match=f"{name} is also the weight"):
        fold_scale(model)
    assert torch.equal(model(*inputs), want)


def test_a_layer_that_is_applied_twice_and_a_projection_for_queries_and_keys_are_folded_once():
    model, inputs = build("gpt")
    model.blocks[1] = model.blocks[0]
    layer = model.blocks[0].attention
    layer.k_proj = layer.q_proj
    want = model(*inputs)
    torch.testing.assert_close(fold_scale(model)(*inputs), want, rtol=0, atol=1e-12 * want.abs().max().item())


def test_a_scale_that_no_fold_can_reach_and_a_model_without_our_attention_are_refused():
    for to in ("learned", 0):
        with pytest.raises(ValueError, match="scale"):
            fold_scale(MultiHeadAttention(12, 3), to)
    with pytest.raises(ValueError, match="Linear"):
        fold_scale(nn.Linear(2, 2), 1.0)


def test_weights_that_overlap_in_memory_are_refused_and_parts_of_one_tensor_are_folded():
    both = torch.randn(30, 12)
    layer, x = MultiHeadAttention(12, 3, bias=False), torch.randn(2, 5, 12)
    layer.q_proj.weight, layer.k_proj.weight = nn.Parameter(both[:12]), nn.Parameter(both[6:18])
    with pytest.raises(ValueError, match="is also the weight"):
        fold_scale(layer)
    layer.k_proj.weight, layer.v_proj.weight = nn.Parameter(both[12:24]), nn.Parameter(both[18:30])
    with pytest.raises(ValueError, match=r"v_proj\.weight is also the weight"):
        fold_scale(layer)
    layer.v_proj.weight = nn.Parameter(torch.randn(12, 12))
    want = layer(x)
    torch.testing.assert_close(fold_scale(layer)(x), want)
