"""To and from ``torch.nn.MultiheadAttention``: the same numbers, and where torch answers differently, on record."""

import math

import pytest
import torch
from torch import nn

from minitx.nn import (
    DotProductAttention,
    MultiHeadAttention,
    QKNorm,
    Rotary,
    ScoreScale,
    from_key_padding_mask,
)

B, L, S, E, H = 2, 5, 7, 12, 3
WIDTHS = {"self": {}, "kdim": {"kdim": 8}, "vdim": {"vdim": 10}, "both": {"kdim": 8, "vdim": 10}}


def theirs_with(**options):
    theirs = nn.MultiheadAttention(E, H, **{"batch_first": True, "dtype": torch.float64, **options})
    for p in theirs.parameters():  # biases start at zero and would hide their own loss
        nn.init.normal_(p, std=0.5)
    return theirs


def inputs(theirs):
    widths = E, theirs.kdim, theirs.vdim
    return [torch.randn(B, n, width, dtype=torch.float64) for n, width in zip((L, S, S), widths, strict=True)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("training", [True, False])
def test_layers_from_torch_give_its_output_and_weights(widths, bias, training):
    theirs = theirs_with(**WIDTHS[widths], bias=bias).train(training)
    ours = MultiHeadAttention.from_torch(theirs)
    assert ours.training is training
    query, key, value = inputs(theirs)
    want, want_weights = theirs(query, key, value, average_attn_weights=False)
    got, got_weights = ours(query, key, value, need_weights=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    torch.testing.assert_close(got_weights, want_weights, rtol=0, atol=1e-13)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", WIDTHS)
def test_layers_come_back_from_torch_unchanged(widths, bias):
    ours = MultiHeadAttention(E, H, **WIDTHS[widths], bias=bias, core=DotProductAttention(dropout=0.25)).double().eval()
    for p in ours.parameters():
        nn.init.normal_(p, std=0.5)
    theirs = ours.to_torch()
    assert (theirs.batch_first, theirs.dropout, theirs.training) == (True, 0.25, False)
    back = MultiHeadAttention.from_torch(theirs)
    assert back.core.dropout == 0.25
    assert {name: p.dtype for name, p in back.named_parameters()} == {name: p.dtype for name, p in ours.named_parameters()}
    assert all(torch.equal(p, back.get_parameter(name)) for name, p in ours.named_parameters())
    query, key, value = inputs(theirs)
    torch.testing.assert_close(theirs(query, key, value)[0], ours(query, key, value), rtol=0, atol=1e-13)


def test_copies_do_not_share_memory():
    theirs = theirs_with()
    ours = MultiHeadAttention.from_torch(theirs)
    before = ours.q_proj.weight.clone()
    with torch.no_grad():
        theirs.in_proj_weight.zero_()
    assert torch.equal(ours.q_proj.weight, before)
    assert all(p.requires_grad and p.is_leaf for p in ours.parameters())


def test_gradients_are_those_of_torch():
    theirs = theirs_with()
    ours = MultiHeadAttention.from_torch(theirs)
    query, key, value = inputs(theirs)
    theirs(query, key, value)[0].square().sum().backward()
    ours(query, key, value).square().sum().backward()
    stacked = torch.cat([getattr(ours, f"{name}_proj").weight.grad for name in "qkv"])
    torch.testing.assert_close(stacked, theirs.in_proj_weight.grad, rtol=0, atol=1e-11)
    torch.testing.assert_close(ours.out_proj.bias.grad, theirs.out_proj.bias.grad, rtol=0, atol=1e-11)


def test_sequence_first_layers_take_transposed_tensors():
    theirs = theirs_with(batch_first=False)
    query, key, value = inputs(theirs)
    want, _ = theirs(*(x.transpose(0, 1) for x in (query, key, value)))
    torch.testing.assert_close(
        MultiHeadAttention.from_torch(theirs)(query, key, value), want.transpose(0, 1), rtol=0, atol=1e-13
    )


def test_masks_of_torch_are_inverted_or_become_a_bias():
    theirs = theirs_with()
    ours = MultiHeadAttention.from_torch(theirs)
    query, key, value = inputs(theirs)
    padding = torch.tensor([[False] * 4 + [True] * 3, [False] * 7])  # torch: True = hidden
    hidden = torch.rand(L, S) < 0.3
    hidden[:, 0] = False
    want, _ = theirs(query, key, value, key_padding_mask=padding, attn_mask=hidden)
    got = ours(query, key, value, key_mask=from_key_padding_mask(padding), attn_mask=~hidden)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    wrong = ours(query, key, value, attn_mask=hidden)
    assert not torch.allclose(wrong, want)
    added = torch.randn(L, S, dtype=torch.float64)
    torch.testing.assert_close(
        ours(query, key, value, attn_bias=added), theirs(query, key, value, attn_mask=added)[0], rtol=0, atol=1e-13
    )


def test_weights_are_averaged_over_heads_by_torch_alone():
    theirs = theirs_with()
    query, key, value = inputs(theirs)
    _, averaged = theirs(query, key, value)
    _, weights = MultiHeadAttention.from_torch(theirs)(query, key, value, need_weights=True)
    assert averaged.shape == (B, L, S)
    torch.testing.assert_close(weights.mean(1), averaged, rtol=0, atol=1e-13)


def test_weights_are_returned_after_dropout_by_torch_alone():
    theirs = theirs_with(dropout=0.5)
    query, key, value = inputs(theirs)
    _, dropped = theirs(query, key, value, average_attn_weights=False)
    assert (dropped == 0).any()
    _, weights = MultiHeadAttention.from_torch(theirs)(query, key, value, need_weights=True)
    assert (weights > 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, L).double())


def test_a_row_without_keys_is_nan_in_torch_and_the_output_bias_here():
    theirs = theirs_with()
    query, key, value = inputs(theirs)
    nothing = torch.tensor([[True] * S, [False] * S])
    want, _ = theirs(query, key, value, key_padding_mask=nothing)
    got = MultiHeadAttention.from_torch(theirs)(query, key, value, key_mask=~nothing)
    assert want[0].isnan().all()
    assert torch.equal(got[0], theirs.out_proj.bias.expand(L, E))
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("option", "name"), [({"add_bias_kv": True}, "add_bias_kv"), ({"add_zero_attn": True}, "add_zero_attn")]
)
def test_keys_that_nobody_sent_are_refused(option, name):
    with pytest.raises(ValueError, match=f"{name}=True appends a key to every sequence"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(E, H, **option))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_kv_heads": 1}, "num_kv_heads=1"),
        ({"head_dim": 5}, "head_dim=5"),
        ({"scale": "unscaled"}, "scale=unscaled"),
        ({"scale": ScoreScale(head_dim=4, factor=2.0)}, "scale=inv_sqrt times 2.0"),
        ({"qk_norm": QKNorm("rms", 4)}, "qk_norm"),
        ({"rotary": Rotary(4)}, "rotary"),
        ({"sinks": True}, "sinks"),
        ({"core": DotProductAttention(softcap=3.0)}, "softcap"),
        ({"core": nn.Identity()}, "Identity"),
    ],
)
def test_what_torch_does_not_have_is_refused_by_name(options, name):
    with pytest.raises(ValueError, match=f"torch.nn.MultiheadAttention has no {name}"):
        MultiHeadAttention(E, H, **options).to_torch()


def test_the_default_scale_of_torch_is_ours():
    ours = MultiHeadAttention.from_torch(theirs_with())
    assert ours.scale(torch.ones(1, H, 1, 4))[1] == 1 / math.sqrt(4)
