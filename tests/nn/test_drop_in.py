"""``DropInAttention``: torch's layer, and models that hold one, answer the same with ours in its place."""

import pytest
import torch
from torch import nn

from minitx.nn import DropInAttention, MultiHeadAttention

B, L, S, E, H = 2, 5, 7, 12, 3
F64 = torch.float64


def theirs_with(**options):
    theirs = nn.MultiheadAttention(E, H, **{"batch_first": True, "dtype": F64, **options}).eval()
    for p in theirs.parameters():  # biases start at zero and would hide their own loss
        nn.init.normal_(p, std=0.5)
    return theirs


def cells(*shape):
    """True = hidden, as torch says it; the first key of each row stays visible."""
    hidden = torch.rand(*shape) < 0.4
    hidden[..., 0] = False
    return hidden


def as_float(hidden):
    return torch.zeros(hidden.shape, dtype=F64).masked_fill(hidden, -torch.inf)


MASKS = {
    "none": lambda: {},
    "bool": lambda: {"attn_mask": cells(L, S)},
    "bool a head": lambda: {"attn_mask": cells(B * H, L, S)},
    "float": lambda: {"attn_mask": torch.randn(L, S, dtype=F64)},
    "padding": lambda: {"key_padding_mask": cells(B, S)},
    "float padding": lambda: {"key_padding_mask": as_float(cells(B, S))},
    "both": lambda: {"attn_mask": cells(L, S), "key_padding_mask": cells(B, S)},
    "both float": lambda: {"attn_mask": torch.randn(B * H, L, S, dtype=F64), "key_padding_mask": as_float(cells(B, S))},
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", MASKS)
def test_output_and_weights_are_those_of_torch(masks, batch_first):
    torch.manual_seed(0)
    theirs = theirs_with(batch_first=batch_first, kdim=8, vdim=10)
    ours = DropInAttention(theirs)
    shapes = [(B, L, E), (B, S, 8), (B, S, 10)]
    inputs = [torch.randn(*(shape if batch_first else (shape[1], shape[0], shape[2])), dtype=F64) for shape in shapes]
    given = MASKS[masks]()
    for options in ({}, {"average_attn_weights": False}, {"need_weights": False}):
        torch.testing.assert_close(ours(*inputs, **given, **options), theirs(*inputs, **given, **options), rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_stays_self_attention(batch_first):
    """A layer that is called with one tensor three times knows it: a rotary one would refuse another key."""
    theirs = theirs_with(batch_first=batch_first)
    x = torch.randn(B, L, E, dtype=F64)
    seen = []
    ours = DropInAttention(theirs)
    ours.attention.register_forward_pre_hook(lambda module, args: seen.append(args[0] is args[1] is args[2]))
    torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x)[0], rtol=0, atol=1e-12)
    assert seen == [True]


def test_a_batch_of_two_is_not_unpacked_into_its_rows():
    """``out, _ = layer(...)`` takes MultiHeadAttention's one tensor of a batch of two apart without a word."""
    theirs, x = theirs_with(), torch.randn(2, L, E, dtype=F64)
    out, _ = DropInAttention(theirs)(x, x, x, need_weights=False)
    assert out.shape == x.shape
    row, _ = MultiHeadAttention.from_torch(theirs)(x)
    assert row.shape == x.shape[1:]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_layers_of_torchs_own_encoder_can_be_swapped(norm_first, training):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=F64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x, causal = torch.randn(B, L, E, dtype=F64), nn.Transformer.generate_square_subsequent_mask(L, dtype=F64)
    hidden = cells(B, L)
    calls = (
        {},
        {"src_key_padding_mask": hidden},
        {"mask": causal, "is_causal": True, "src_key_padding_mask": as_float(hidden)},
    )
    before = [model(x, **call) for call in calls]
    for layer in model.layers:
        layer.self_attn = DropInAttention(layer.self_attn)
        assert layer.self_attn.training is training
    ran = []
    model.layers[1].self_attn.attention.core.register_forward_hook(lambda *_: ran.append(1))
    for call, wanted in zip(calls, before, strict=True):
        torch.testing.assert_close(model(x, **call), wanted, rtol=0, atol=1e-12)
    assert len(ran) == len(calls)  # torch's fused path would go past the layer


def test_a_causal_hint_without_a_mask_is_refused():
    x = torch.randn(B, L, E, dtype=F64)
    with pytest.raises(ValueError, match="is_causal=True is a hint about attn_mask, which is missing"):
        DropInAttention(theirs_with())(x, x, x, is_causal=True)


def test_the_backend_can_be_named():
    assert DropInAttention(theirs_with(), backend="math").attention.core.backend == "math"
