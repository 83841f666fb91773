"""Torch's own models after ``swap_attention``: the padding and the causality that they are given, whatever the form, as capture sees them."""

import pytest
import torch
from torch import nn

from minitx.analysis import capture, take_snapshot
from minitx.analysis.recorder import watch
from minitx.nn import Causal, Dense, MultiHeadAttention, Padding, swap_attention

B, H, L, E = 3, 2, 7, 12
LENGTHS = torch.tensor([7, 5, 2])
PADDED = torch.arange(L) >= LENGTHS[:, None]  # True = hidden, as in torch
LATER = torch.ones(L, L, dtype=torch.bool).triu(1)


def as_float(hidden):
    return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)


def for_heads(hidden):
    """(B, S) or (B, L, S) as torch's (B * H, L, S)."""
    hidden = hidden.expand(B, L, L) if hidden.dim() == 3 else hidden[:, None].expand(B, L, L)
    return hidden.repeat_interleave(H, dim=0)


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True)
    model = swap_attention(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False, **options)).eval()
    for parameter in model.layers[0].self_attn.parameters():  # weights that are far from uniform
        nn.init.normal_(parameter, std=0.6)
    return model


def layer_of(model):
    return lambda x, **options: model.layers[0].self_attn(x, x, x, need_weights=False, **options)


PADDINGS = {
    "bool": {"key_padding_mask": PADDED},
    "float": {"key_padding_mask": as_float(PADDED)},
    "bool for each head": {"attn_mask": for_heads(PADDED)},
    "float for each head": {"attn_mask": as_float(for_heads(PADDED))},
}
CAUSAL = {
    "bool": {"attn_mask": LATER},
    "float": {"attn_mask": as_float(LATER)},
    "hint": {"attn_mask": as_float(LATER), "is_causal": True},
    "for each head": {"attn_mask": LATER.expand(B * H, L, L)},
}
BOTH = {
    "two bools": {"key_padding_mask": PADDED, "attn_mask": LATER, "is_causal": True},
    "two floats": {"key_padding_mask": as_float(PADDED), "attn_mask": as_float(LATER)},
    "one bool": {"attn_mask": for_heads(PADDED[:, None] | LATER)},
    "one float": {"attn_mask": as_float(for_heads(PADDED[:, None] | LATER))},
}


def seen(model, call):
    with torch.no_grad(), capture(model) as found:
        call()
    ((name, (statistics,)),) = found.items()
    return statistics, found.kinds[name]


def calls_of(model, call):
    found = []
    with torch.no_grad(), watch(model, lambda look: found.append((look.call.mask, look.call.attn_bias))):
        call()
    return found


def assert_same_statistics(got, want):
    for name in want.keys() - {"favourite"}:
        torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-9, msg=name)


@pytest.fixture(params=[True, False], ids=["values can be read", "as off the CPU"])
def reads(request, monkeypatch):
    """Whether the values of a mask can be read at no cost."""
    if not request.param:
        monkeypatch.setattr("minitx.nn.drop_in.can_look", lambda tensor: False)
    return request.param


def padded_calls(model, x):
    """The same padding in every form."""
    calls = {form: lambda given=given: layer_of(model)(x, **given) for form, given in PADDINGS.items()}
    calls["of an encoder"] = lambda: model(x, src_key_padding_mask=PADDED)
    return calls | {"of an encoder, float": lambda: model(x, src_key_padding_mask=as_float(PADDED))}


def test_padded_queries_are_left_out_of_statistics_in_whatever_form_the_padding_is_given(reads):
    model, x = encoder(), torch.randn(B, L, E)
    want, _ = seen(model, lambda: model.layers[0].self_attn.attention(x, key_mask=~PADDED))
    for form, call in padded_calls(model, x).items():
        if reads or "head" not in form:  # such a mask is padding only by its values
            got, kind = seen(model, call)
            assert_same_statistics(got, want)
            assert kind == "self"


@pytest.mark.parametrize("form", CAUSAL)
def test_a_mask_that_hides_later_positions_is_causal_in_whatever_form_it_is_given(form, reads):
    model, x = encoder(), torch.randn(B, L, E)
    want, _ = seen(model, lambda: model.layers[0].self_attn.attention(x, is_causal=True))
    got, kind = seen(model, lambda: layer_of(model)(x, **CAUSAL[form]))
    assert kind == "causal"
    assert_same_statistics(got, want)
    ours = MultiHeadAttention(E, H)
    assert seen(ours, lambda: ours(x, attn_mask=~LATER))[1] == "causal"
    assert seen(ours, lambda: ours(x, attn_bias=as_float(LATER)))[1] == "causal"
    assert seen(ours, lambda: ours(x, attn_mask=~PADDED[:, None, None].expand(B, 1, L, L)))[1] == "self"


@pytest.mark.parametrize(("forms", "kinds"), [(PADDINGS, [Padding]), (CAUSAL, [Causal]), (BOTH, [Causal, Padding])])
def test_masks_that_only_hide_reach_the_core_as_rules_without_a_bias(forms, kinds):
    model, x = encoder(), torch.randn(B, L, E)
    for given in forms.values():
        ((mask, bias),) = calls_of(model, lambda given=given: layer_of(model)(x, **given))
        assert bias is None
        assert sorted(type(part).__name__ for part in mask.parts()) == [kind.__name__ for kind in kinds]
    nothing = {"key_padding_mask": torch.zeros(B, L, dtype=torch.bool), "attn_mask": torch.zeros(L, L, dtype=torch.bool)}
    assert calls_of(model, lambda: layer_of(model)(x, **nothing)) == [(None, None)]


def test_what_is_neither_padding_nor_causal_stays_a_tensor_and_what_is_added_stays_a_bias():
    model, x = encoder(), torch.randn(B, L, E)
    ((window, none),) = calls_of(model, lambda: layer_of(model)(x, attn_mask=LATER | LATER.T.roll(1, 0)))
    assert none is None and {type(part) for part in window.parts()} == {Causal, Dense}
    distance = (torch.arange(L) - torch.arange(L)[:, None]).float()
    slopes = distance.expand(B, H, L, L) * torch.tensor([0.5, 0.1]).view(H, 1, 1)  # ALiBi (Press et al. 2022)
    for added in (slopes.flatten(0, 1), (slopes + as_float(LATER)).flatten(0, 1)):
        ((mask, bias),) = calls_of(model, lambda added=added: layer_of(model)(x, attn_mask=added))
        assert torch.equal(bias.flatten(0, 1), added)
        assert (type(mask) is Causal) == bool(added.isinf().any())
    weights = torch.rand(B, L)  # of keys
    ((mask, bias),) = calls_of(model, lambda: layer_of(model)(x, key_padding_mask=weights + as_float(PADDED)))
    assert torch.equal(mask.key_mask, ~PADDED) and torch.equal(bias[:, 0, 0], weights + as_float(PADDED))


@pytest.mark.parametrize("argument", ["key_padding_mask", "attn_mask"])
def test_a_float_mask_of_0_and_minus_inf_has_the_gradient_that_it_has_in_torch(argument, reads):
    torch.manual_seed(0)
    theirs, x = (
        nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.double).eval(),
        torch.randn(B, L, E, dtype=torch.double),
    )
    mask = as_float(PADDED if argument == "key_padding_mask" else LATER).double().requires_grad_()
    gradients = []
    for attention in (theirs, swap_attention(nn.ModuleList([theirs]))[0]):
        out, _ = attention(x, x, x, **{argument: mask})
        gradients += torch.autograd.grad(out.square().sum(), mask)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)
    assert gradients[0].abs().sum() > 0.1


def test_snapshots_of_a_swapped_causal_encoder_are_causal():
    model, x = encoder(), torch.randn(1, L, E)
    mask = nn.Transformer.generate_square_subsequent_mask(L)
    snapshot = take_snapshot(model, {"src": x, "mask": mask})
    assert [found.kind for found in snapshot.maps] == ["causal"]
    assert snapshot.maps[0].weights.triu(1).abs().sum() == 0


@pytest.mark.parametrize("as_given", [lambda mask: mask, as_float], ids=["bool", "float"])
def test_padded_queries_of_cross_attention_are_left_out_in_a_swapped_decoder(as_given):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=True)
    model = swap_attention(nn.TransformerDecoder(layer, 1)).eval()
    x, memory = torch.randn(1, L, E), torch.randn(1, 5, E)
    cut, short = int(LENGTHS[1]), {}
    for length in (cut, L):
        padded = as_given(torch.arange(length)[None] >= cut)
        with torch.no_grad(), capture(model, layers="multihead_attn") as found:
            model(x[:, :length], memory, None, None, padded)
        ((_, (short[length],)),) = found.items()
    assert_same_statistics(short[L], short[cut])
