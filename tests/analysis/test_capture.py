"""Capture looks without touching."""

import pytest
import torch

from minitx.analysis import capture
from minitx.config import TransformerConfig
from minitx.nn import Causal, DecoderLM, DotProductAttention, MultiHeadAttention

IDS = torch.tensor([[1, 2, 3, 5, 7], [4, 4, 8, 9, 1]])


def model_of(**options):
    torch.manual_seed(0)
    return DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2, max_len=8, **options)).eval()


@pytest.mark.parametrize("backend", ["auto", "math", "sdpa"])
@pytest.mark.parametrize("what", ["statistics", "weights"])
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
        watched = model(IDS)
    assert torch.equal(plain, watched)


def test_weights_are_those_before_dropout_and_sum_to_one():
    attention = MultiHeadAttention(12, 3, num_kv_heads=1, core=DotProductAttention(dropout=0.5))
    with capture(attention, what="weights") as seen:
        attention(torch.randn(2, 5, 12), attn_mask=Causal())
    weights = seen["core"][0]
    assert weights.shape == (2, 3, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))
    assert (weights.triu(1) == 0).all()


def test_every_layer_is_named_and_every_call_is_recorded_once():
    model = model_of()
    with capture(model) as seen:
        model(IDS)
        model(IDS)
    assert list(seen) == ["blocks.0.attention.core", "blocks.1.attention.core"]
    assert all(len(calls) == 2 for calls in seen.values())
    assert seen["blocks.0.attention.core"][0]["entropy"].shape == (3,)


def test_nothing_stays_on_the_modules():
    model = model_of()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ZeroDivisionError), capture(model):
        raise ZeroDivisionError
    with capture(model) as seen:
        model(IDS)
    calls = len(seen["blocks.0.attention.core"])
    model(IDS)
    assert len(seen["blocks.0.attention.core"]) == calls
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_scale_in_force_is_the_one_that_is_seen():
    spreads = {}
    for scale in ("inv_sqrt", "unscaled", 0.0):
        model = model_of(scale=scale, init="lecun")
        with capture(model) as seen:
            model(IDS)
        spreads[scale] = float(seen["blocks.0.attention.core"][0]["logit_std"].mean())
    assert spreads["unscaled"] == pytest.approx(2 * spreads["inv_sqrt"], rel=1e-6)  # head_dim 4
    assert spreads[0.0] == 0.0


def test_a_compiled_module_is_refused_by_name():
    model = model_of()
    model.blocks[1].compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"blocks\.1 is compiled"), capture(model):
        pass


def test_a_wrong_word_and_a_model_without_attention_are_refused():
    with (
        pytest.raises(ValueError, match="what='weight' must be one of statistics, weights"),
        capture(model_of(), what="weight"),
    ):
        pass
    with pytest.raises(ValueError, match="Linear has no attention core with weights"), capture(torch.nn.Linear(2, 2)):
        pass
