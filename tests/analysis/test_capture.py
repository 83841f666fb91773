"""Capture looks without touching."""

import pytest
import torch

from minitx.analysis import capture
from minitx.config import TransformerConfig
from minitx.nn import Causal, DecoderLM, EncoderDecoder, KVCache, MultiHeadAttention

IDS = torch.tensor([[1, 2, 3, 5, 7], [4, 4, 8, 9, 1]])


def model_of(**options):
    torch.manual_seed(0)
    return DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2, max_len=8, **options)).eval()


@pytest.mark.parametrize("backend", ["auto", "math", "sdpa", "chunked"])
@pytest.mark.parametrize("what", ["statistics", "weights", "scores", "values"])
def test_the_output_and_the_gradients_are_bit_equal_with_and_without_looking(backend, what):
    model = model_of(backend=backend, position="rotary")
    plain = model(IDS)
    plain.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with capture(model, what=what):
        watched = model(IDS)
        watched.sum().backward()
    assert torch.equal(plain, watched)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_dropout_draws_the_same_numbers_with_and_without_looking():
    model = model_of(dropout=0.3).train()
    torch.manual_seed(5)
    plain = model(IDS)
    torch.manual_seed(5)
    with capture(model):
        assert torch.equal(plain, model(IDS))


def test_weights_are_those_before_dropout_and_with_the_values_they_give_what_the_layer_gives():
    attention, x = MultiHeadAttention(12, 6, num_kv_heads=2, dropout=0.5), torch.randn(2, 5, 12)
    with capture(attention, what="weights") as seen:
        attention(x, attn_mask=Causal())
    weights = seen["core"][0]
    assert weights.shape == (2, 6, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, 5))
    assert (weights.triu(1) == 0).all()
    with capture(attention.eval(), what="values") as values:
        out = attention(x, is_causal=True)
    torch.testing.assert_close(attention.out_proj((weights @ values["core"][0]).transpose(1, 2).flatten(2)), out)


def test_nothing_stays_on_the_modules_and_every_call_is_recorded_once():
    model = model_of()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ZeroDivisionError), capture(model) as seen:
        _ = model(IDS), model(IDS), 1 / 0
    model(IDS)
    assert {name: len(calls) for name, calls in seen.items()} == {f"blocks.{i}.attention.core": 2 for i in (0, 1)}
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(("model", "options", "message"), [
    ({}, {"what": "weight"}, "what='weight' must be one of statistics, weights"),
    (None, {}, "Linear has no attention core with weights"),
    ({"attention": "linear"}, {}, "no attention core with weights"),
    ({}, {"layers": ["cross"]}, "layers: 'cross' is none of"),
    ({}, {"heads": [3]}, "must be some of 0 to 2"),
])  # fmt: skip
def test_what_is_not_there_is_refused_and_the_hooks_are_gone(model, options, message):
    model = torch.nn.Linear(2, 2) if model is None else model_of(**model)
    with pytest.raises(ValueError, match=message), capture(model, **options):
        model(IDS)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_chosen_layers_and_heads_are_slices_of_the_whole():
    model = model_of(num_kv_heads=1)
    for what in ("weights", "scores", "values", "statistics"):
        with capture(model, what=what) as whole, capture(model, what=what, layers=[-1], heads=[2, 0]) as part:
            model(IDS)
        assert list(part) == ["blocks.1.attention.core"]
        all_heads, chosen = whole["blocks.1.attention.core"][0], part["blocks.1.attention.core"][0]
        if what == "statistics":
            assert torch.equal(chosen["entropy"], all_heads["entropy"][[2, 0]])
            all_heads, chosen = all_heads["favourite"], chosen["favourite"]
        assert torch.equal(chosen, all_heads[:, [2, 0]])


def test_softmax_of_the_scores_is_the_weights_and_hidden_keys_have_minus_infinity():
    model = model_of(position="alibi", softcap=5.0, window=3)
    with capture(model, what="scores") as scores, capture(model, what="weights") as weights:
        model(IDS)
    for name in scores:
        torch.testing.assert_close(scores[name][0].softmax(-1), weights[name][0])
        assert torch.equal(scores[name][0] == -torch.inf, weights[name][0] == 0)
        assert (scores[name][0] == -torch.inf).any()


@torch.no_grad()
def test_cached_decoding_gives_row_by_row_what_one_forward_gives():
    model, cache, again = model_of(position="rotary"), *(KVCache(capacity=5, num_layers=2) for _ in range(2))
    with capture(model, what="weights") as whole:
        model(IDS)
    with capture(model, what="weights") as steps:
        watched = [model(piece, cache=cache) for piece in IDS.split(1, dim=1)]
    assert all(torch.equal(model(piece, cache=again), out) for piece, out in zip(IDS.split(1, dim=1), watched, strict=True))
    for name in whole:
        for i, row in enumerate(steps[name]):
            torch.testing.assert_close(row[:, :, 0], whole[name][0][:, :, i, : i + 1])


def test_padded_targets_count_neither_in_self_nor_in_cross_attention():
    torch.manual_seed(0)
    options = {"vocab_size": 11, "embed_dim": 12, "num_heads": 3, "num_layers": 1, "init": "lecun"}
    model = EncoderDecoder(TransformerConfig(architecture="encoder_decoder", **options)).eval().double()
    source, target = torch.tensor([[1, 2, 3, 5, 7]]), torch.tensor([[2, 4, 6]])
    with capture(model) as plain:
        model(source, target)
    masks = {"key_mask": torch.arange(7)[None] < 5, "decoder_key_mask": torch.arange(7)[None] < 3}
    with capture(model) as padded:
        model(torch.nn.functional.pad(source, (0, 2)), torch.nn.functional.pad(target, (0, 4)), **masks)
    places = {"blocks.0.attention": "causal", "blocks.0.cross_attention": "cross", "encoder.blocks.0.attention": "self"}
    assert plain.kinds == padded.kinds == {f"{name}.core": kind for name, kind in places.items()}
    for name in plain:
        for statistic, value in plain[name][0].items():
            if statistic != "favourite":
                torch.testing.assert_close(padded[name][0][statistic], value, msg=lambda m, s=statistic: f"{s}: {m}")
    assert (padded["blocks.0.cross_attention.core"][0]["favourite"][0, :, 3:] == -1).all()
