"""``DropInAttention``: torch's layer, and models that hold one, answer the same with ours in its place."""

import copy

import pytest
import torch
from sizes import torch_layer
from torch import nn

from minitx.nn import DropInAttention

B, L, S, E, H = 2, 5, 7, 12, 3
F64 = torch.float64


def cells(*shape):
    """True = hidden, as torch says it; the first key of each row stays visible."""
    hidden = torch.rand(*shape) < 0.4
    hidden[..., 0] = False
    return hidden


def as_float(hidden):
    return torch.zeros(hidden.shape, dtype=F64).masked_fill(hidden, -torch.inf)


MASKS = {
    "none": lambda *batch: {},
    "bool a head": lambda *batch: {"attn_mask": cells(H * sum(batch or (1,)), L, S)},
    "both": lambda *batch: {"attn_mask": cells(L, S), "key_padding_mask": cells(*batch, S)},
    "float": lambda *batch: {"attn_mask": torch.randn(L, S, dtype=F64), "key_padding_mask": as_float(cells(*batch, S))},
}


@pytest.mark.parametrize("form", ["batch first", "sequence first", "unbatched", "unbatched, sequence first"])
@pytest.mark.parametrize("masks", MASKS)
def test_output_and_weights_are_those_of_torch_in_every_call_form(masks, form):
    torch.manual_seed(0)
    theirs = torch_layer(batch_first="sequence" not in form, kdim=8, vdim=10).eval()
    ours = DropInAttention(theirs)
    batch = () if "unbatched" in form else (B,)
    inputs = [torch.randn(*batch, *shape, dtype=F64) for shape in ((L, E), (S, 8), (S, 10))]
    if form == "sequence first":
        inputs = [x.transpose(0, 1) for x in inputs]
    given = MASKS[masks](*batch)
    for options in ({}, {"average_attn_weights": False}, {"need_weights": False}):
        torch.testing.assert_close(ours(*inputs, **given, **options), theirs(*inputs, **given, **options), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(B, L, E), (L, E)])
@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_stays_self_attention(batch_first, shape):
    """A layer that is called with one tensor three times knows it: a rotary one would refuse another key."""
    theirs = torch_layer(batch_first=batch_first).eval()
    x = torch.randn(*shape, dtype=F64)
    seen = []
    ours = DropInAttention(theirs)
    ours.attention.register_forward_pre_hook(lambda module, args: seen.append(args[0] is args[1] is args[2]))
    torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x)[0], rtol=0, atol=1e-12)
    assert seen == [True]


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_layers_of_torchs_own_encoder_can_be_swapped(norm_first, training, nested):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=F64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x, causal = torch.randn(B, L, E, dtype=F64), nn.Transformer.generate_square_subsequent_mask(L, dtype=F64)
    hidden = cells(B, L)
    at_the_end = torch.arange(L) >= torch.arange(L - B + 1, L + 1)[:, None]
    both = {"mask": causal, "is_causal": True, "src_key_padding_mask": as_float(hidden)}
    calls = ({}, {"src_key_padding_mask": hidden}, {"src_key_padding_mask": at_the_end}, both)
    before = [model(x, **call) for call in calls]
    model.use_nested_tensor = nested and not norm_first  # torch's default, which would take padding at the end out
    for layer in model.layers:
        layer.self_attn = DropInAttention(layer.self_attn)
        assert layer.self_attn.training is training
    ran = []
    model.layers[1].self_attn.attention.core.register_forward_hook(lambda *_: ran.append(1))
    for call, wanted in zip(calls, before, strict=True):
        torch.testing.assert_close(model(x, **call), wanted, rtol=0, atol=1e-12)
    assert len(ran) == len(calls)  # torch's fused path would go past the layer


def test_an_encoder_can_be_made_of_a_layer_that_was_swapped_before():
    layer = nn.TransformerEncoderLayer(E, 2, 16, dropout=0.0, batch_first=True, dtype=F64).eval()
    x, want = torch.randn(B, L, E, dtype=F64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    swapped = copy.deepcopy(layer)
    swapped.self_attn = DropInAttention(swapped.self_attn)
    model = nn.TransformerEncoder(swapped, 2, enable_nested_tensor=False).eval()
    torch.testing.assert_close(model(x), want(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(B, L, L), (2, L, L)])
def test_a_3d_mask_of_another_size_is_refused(shape):
    x = torch.randn(B, L, E, dtype=F64)
    with pytest.raises(ValueError, match="attn_mask must have shape"):
        DropInAttention(torch_layer().eval())(x, x, x, attn_mask=torch.zeros(shape, dtype=torch.bool))


def test_a_causal_hint_without_a_mask_is_refused():
    x = torch.randn(B, L, E, dtype=F64)
    with pytest.raises(ValueError, match="attn_mask"):
        DropInAttention(torch_layer().eval())(x, x, x, is_causal=True)
