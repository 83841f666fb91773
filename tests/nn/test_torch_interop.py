"""To and from ``torch.nn.MultiheadAttention``: the same numbers, and where torch answers differently, on record."""

import pytest
import torch
from sizes import Louder
from sizes import torch_layer as theirs_with
from torch import nn
from torch.nn.utils import prune

from minitx.nn import MultiHeadAttention, QKNorm, Rotary, ScoreScale, from_key_padding_mask

B, L, S, E, H = 2, 5, 7, 12, 3
WIDTHS = {"self": {}, "kdim": {"kdim": 8}, "vdim": {"vdim": 10}, "both": {"kdim": 8, "vdim": 10}}


def inputs(theirs):
    widths = E, theirs.kdim, theirs.vdim
    return [torch.randn(B, n, width, dtype=torch.float64) for n, width in zip((L, S, S), widths, strict=True)]


def assert_near(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", WIDTHS)
def test_layers_come_back_from_torch_unchanged(widths, bias):
    ours = MultiHeadAttention(E, H, **WIDTHS[widths], bias=bias, dropout=0.25).double().eval()
    for p in ours.parameters():
        nn.init.normal_(p, std=0.5)
    theirs = ours.to_torch()
    assert (theirs.batch_first, theirs.dropout, theirs.training) == (True, 0.25, False)
    back = MultiHeadAttention.from_torch(theirs)
    assert (back.dropout, back.training) == (0.25, False)
    assert {name: p.dtype for name, p in back.named_parameters()} == {name: p.dtype for name, p in ours.named_parameters()}
    assert all(torch.equal(p, back.get_parameter(name)) for name, p in ours.named_parameters())
    given = inputs(theirs)
    assert_near(theirs(*given)[0], ours(*given))


def test_copies_share_no_memory_and_what_is_frozen_stays_frozen():
    theirs = theirs_with()
    theirs.in_proj_weight.requires_grad_(False)
    with torch.no_grad():
        ours = MultiHeadAttention.from_torch(theirs)
    frozen = {name for name, p in ours.named_parameters() if not p.requires_grad}
    assert frozen == {f"{name}_proj.weight" for name in "qkv"}
    before = ours.q_proj.weight.clone()
    theirs.in_proj_weight.zero_()
    assert torch.equal(ours.q_proj.weight, before)


def test_a_row_without_keys_is_nan_in_torch_and_the_output_bias_here():
    theirs = theirs_with()
    given = inputs(theirs)
    nothing = torch.tensor([[True] * S, [False] * S])
    want, _ = theirs(*given, key_padding_mask=nothing)
    got = MultiHeadAttention.from_torch(theirs)(*given, key_mask=from_key_padding_mask(nothing))
    assert want[0].isnan().all()
    assert torch.equal(got[0], theirs.out_proj.bias.expand(L, E))
    assert_near(got[1], want[1])


def hooked():
    layer = theirs_with()
    layer.register_forward_hook(lambda module, args, out: (2.0 * out[0], out[1]))
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        *((lambda name=name: nn.MultiheadAttention(E, H, **{name: True}), name) for name in ("add_bias_kv", "add_zero_attn")),
        (lambda: Louder(E, H), "Louder has a forward of its own"),
        (lambda: prune.random_unstructured(theirs_with(), "in_proj_weight", 0.5), "in_proj_weight_orig"),
        (hooked, "hook"),
    ],
)
def test_a_layer_that_computes_something_else_is_refused_by_its_difference(make, reason):
    with pytest.raises(ValueError, match=reason):
        MultiHeadAttention.from_torch(make())
    with pytest.raises(TypeError, match="got Linear"):
        MultiHeadAttention.from_torch(nn.Linear(2, 2))


def test_a_subclass_that_computes_the_same_is_taken():
    class Named(nn.MultiheadAttention):
        """Only another name."""

    theirs = Named(E, H, batch_first=True, dtype=torch.float64)
    given = inputs(theirs)
    assert_near(MultiHeadAttention.from_torch(theirs)(*given), theirs(*given)[0])


@pytest.mark.parametrize("widths", WIDTHS)
def test_a_frozen_layer_is_frozen_in_torch_and_one_that_is_frozen_in_part_is_refused(widths):
    ours = MultiHeadAttention(E, H, **WIDTHS[widths])
    ours.out_proj.requires_grad_(False)
    for projection in (ours.q_proj, ours.k_proj, ours.v_proj):
        projection.bias.requires_grad_(False)
    theirs = ours.to_torch()
    frozen = {name for name, parameter in theirs.named_parameters() if not parameter.requires_grad}
    assert frozen == {"in_proj_bias", "out_proj.weight", "out_proj.bias"}
    ours.k_proj.bias.requires_grad_(True)
    with pytest.raises(ValueError, match="frozen in part"):
        ours.to_torch()


def test_what_torch_does_not_have_is_refused_by_name():
    lacking = {"num_kv_heads": 1, "head_dim": 5, "out_bias": False, "scale": "unscaled", "sinks": True, "softcap": 3.0}
    parts = {
        "qk_norm": QKNorm("rms", 4),
        "rotary": Rotary(4),
        "scale": ScoreScale(head_dim=4, factor=2.0),
        "core": nn.Identity(),
    }
    for name, value in (*lacking.items(), *parts.items()):
        with pytest.raises(ValueError, match=f"has no {'Identity' if name == 'core' else name}"):
            MultiHeadAttention(E, H, **{name: value}).to_torch()


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj", "out_proj"])
def test_a_projection_that_computes_something_else_is_refused_on_the_way_to_torch(projection):
    changes = (
        (nn.utils.parametrizations.weight_norm, "parametrizations"),
        (lambda layer: layer.register_forward_hook(lambda module, args, out: 2 * out), "has a hook"),
    )
    for change, reason in changes:
        ours = MultiHeadAttention(E, H)
        change(getattr(ours, projection))
        with pytest.raises(ValueError, match=f"{projection} must be a plain Linear layer: .*{reason}"):
            ours.to_torch()
