"""The reference itself: against numbers worked out by hand, and against loops."""

import math

import pytest
import torch
from oracle import DTYPES, DV, HKV, B, D, H, L, S, grids, naive

from minitx.nn import Causal, attention_scores, attention_weights, masked_softmax, reference_attention
from minitx.nn.masks import Dense


def test_two_keys_worked_out_by_hand():
    query = torch.tensor([[[[2.0, 0.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[math.log(3.0), 7.0], [0.0, -7.0]]]], dtype=torch.float64)
    value = torch.tensor([[[[4.0], [8.0]]]], dtype=torch.float64)
    # scores 0.5 * (2 ln 3, 0) = (ln 3, 0); weights (3/4, 1/4); output 3 + 2
    out = reference_attention(query, key, value, scale=0.5)
    assert out.item() == pytest.approx(5.0, rel=1e-15)


def test_softmax_with_a_sink_by_hand():
    # e^0, e^0 and a sink of ln 2: 1/4, 1/4, and a half that goes nowhere
    weights = masked_softmax(torch.zeros(1, 1, 1, 2), sinks=torch.tensor([math.log(2.0)]))
    assert weights.flatten().tolist() == pytest.approx([0.25, 0.25])


def test_soft_cap_is_applied_before_the_bias_by_hand():
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    scores = attention_scores(10 * one, one, scale=1.0, softcap=2.0, attn_bias=100 * one)
    assert scores.item() == pytest.approx(2 * math.tanh(5.0) + 100, rel=1e-15)


def test_scale_is_applied_before_the_soft_cap_by_hand():
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    assert attention_scores(10 * one, one, scale=0.1, softcap=2.0).item() == pytest.approx(2 * math.tanh(0.5), rel=1e-15)


def test_mask_acts_after_the_soft_cap():
    # if the mask came first, a hidden score would be capped back to -1 and keep a weight
    query = torch.ones(1, 1, 2, 1)
    weights = attention_weights(query, query, mask=Causal(), scale=1.0, softcap=1.0)
    assert weights[0, 0, 0].tolist() == [1.0, 0.0]


def test_weights_of_hidden_keys_are_exactly_zero_even_next_to_the_lowest_scores():
    lowest = torch.finfo(torch.float32).min
    weights = masked_softmax(torch.tensor([[lowest, lowest, 0.0]]), torch.tensor([[True, True, False]]))
    assert weights.tolist() == [[0.5, 0.5, 0.0]]


def test_softmax_survives_scores_that_overflow_exp():
    assert masked_softmax(torch.tensor([[1e4, 1e4, -1e4]])).tolist() == [[0.5, 0.5, 0.0]]


def test_softmax_does_not_depend_on_a_shift():
    scores = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(masked_softmax(scores + 1000), masked_softmax(scores), rtol=1e-11, atol=0)


def test_an_empty_row_is_zero_with_zero_gradient():
    scores = torch.randn(1, 1, 2, 3, requires_grad=True)
    weights = masked_softmax(scores, torch.tensor([[False, False, False], [True, True, False]]))
    weights.square().sum().backward()
    assert weights[0, 0, 0].tolist() == [0.0, 0.0, 0.0]
    assert scores.grad[0, 0, 0].tolist() == [0.0, 0.0, 0.0]
    assert scores.grad[0, 0, 1, :2].abs().min() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_and_weights_are_kept_in_at_least_float32(dtype):
    x = torch.randn(1, 2, 3, 5, dtype=dtype)
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert attention_scores(x, x, scale=1.0).dtype == wanted
    assert attention_weights(x, x, scale=1.0).dtype == wanted
    assert reference_attention(x, x, x, scale=1.0).dtype == dtype


def test_half_precision_scores_beyond_its_range_do_not_overflow():
    x = torch.full((1, 1, 2, 64), 60.0, dtype=torch.float16)  # 60 * 60 * 64 = 230400 > 65504
    assert torch.isfinite(attention_scores(x, x, scale=1.0)).all()
    assert torch.isfinite(reference_attention(x, x, x, scale=1.0)).all()


def test_reference_is_computed_in_float32_under_autocast():
    x = torch.randn(B, H, L, D)
    plain = attention_weights(x, x, scale=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention_weights(x, x, scale=1.0), plain)
        assert torch.equal(reference_attention(x, x, x, scale=1.0), reference_attention(x, x, x, scale=1.0).float())


def test_every_option_together_equals_the_loops():
    f64 = {"dtype": torch.float64}
    q, k, v = torch.randn(B, H, L, D, **f64), torch.randn(B, HKV, S, D, **f64), torch.randn(B, HKV, S, DV, **f64)
    bias, sinks = torch.randn(1, H, L, S, **f64), torch.randn(H, **f64)
    visible = grids(lambda b, h, t, j, i: (b + h + t + j) % 3 != 0 and not (i == 2 and b == 1))
    want, want_weights = naive(q, k, v, visible, scale=-0.7, bias=bias.expand(B, -1, -1, -1), softcap=1.3, sinks=sinks)
    options = {"mask": Dense(visible), "scale": -0.7, "attn_bias": bias, "softcap": 1.3, "sinks": sinks}
    torch.testing.assert_close(reference_attention(q, k, v, **options), want, rtol=0, atol=1e-14)
    torch.testing.assert_close(attention_weights(q, k, **options), want_weights, rtol=0, atol=1e-14)
