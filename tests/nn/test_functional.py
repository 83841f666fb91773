"""The reference itself: against numbers worked out by hand, and against loops."""

import math
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
from sizes import DV, HKV, B, D, H, L, S, grids

from minitx.nn import (
    ALiBi,
    AttentionCall,
    Causal,
    Dense,
    Mask,
    attention_scores,
    attention_weights,
    masked_softmax,
    reference_attention,
)
from minitx.nn.functional import hide_unseen
from minitx.testing import DTYPES, naive_attention


def test_two_keys_worked_out_by_hand():
    query = torch.tensor([[[[2.0, 0.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[math.log(3.0), 7.0], [0.0, -7.0]]]], dtype=torch.float64)
    value = torch.tensor([[[[4.0], [8.0]]]], dtype=torch.float64)
    # scores 0.5 * (2 ln 3, 0) = (ln 3, 0); weights (3/4, 1/4); output 3 + 2
    out = reference_attention(AttentionCall(query, key, value, scale=0.5))
    assert out.item() == pytest.approx(5.0, rel=1e-15)


def test_softmax_with_a_sink_by_hand():
    # e^0, e^0 and a sink of ln 2: 1/4, 1/4, and a half that goes nowhere
    weights = masked_softmax(torch.zeros(1, 1, 1, 2), sinks=torch.tensor([math.log(2.0)]))
    assert weights.flatten().tolist() == pytest.approx([0.25, 0.25])


def test_scale_then_soft_cap_then_bias_by_hand():
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    scores = attention_scores(10 * one, one, scale=0.1, softcap=2.0, attn_bias=100 * one)
    assert scores.item() == pytest.approx(2 * math.tanh(0.5) + 100, rel=1e-15)


def test_mask_acts_after_the_soft_cap():
    # if the mask came first, a hidden score would be capped back to -1 and keep a weight
    query = torch.ones(1, 1, 2, 1)
    weights = attention_weights(AttentionCall(query, query, query, Causal(), softcap=1.0))
    assert weights[0, 0, 0].tolist() == [1.0, 0.0]


def test_weights_of_hidden_keys_are_exactly_zero_even_next_to_the_lowest_scores():
    lowest = torch.finfo(torch.float32).min
    weights = masked_softmax(torch.tensor([[lowest, lowest, 0.0]]), torch.tensor([[True, True, False]]))
    assert weights.tolist() == [[0.5, 0.5, 0.0]]


def test_softmax_survives_scores_that_overflow_exp():
    assert masked_softmax(torch.tensor([[1e4, 1e4, -1e4]])).tolist() == [[0.5, 0.5, 0.0]]


def test_an_empty_row_is_zero_with_zero_gradient():
    scores = torch.randn(1, 1, 2, 3, requires_grad=True)
    weights = masked_softmax(scores, torch.tensor([[False, False, False], [True, True, False]]))
    weights.square().sum().backward()
    assert weights[0, 0, 0].tolist() == [0.0, 0.0, 0.0]
    assert scores.grad[0, 0, 0].tolist() == [0.0, 0.0, 0.0]
    assert scores.grad[0, 0, 1, :2].abs().min() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_and_weights_are_kept_in_at_least_float32(dtype):
    x = torch.full((1, 2, 3, 64), 60.0, dtype=dtype)  # 60 * 60 * 64 = 230400, beyond the range of float16
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    call = AttentionCall(x, x, x)
    results = attention_scores(x, x, scale=1.0), attention_weights(call), reference_attention(call)
    assert [result.dtype for result in results] == [wanted, wanted, dtype]
    assert all(torch.isfinite(result).all() for result in results)


def test_reference_is_computed_in_float32_under_autocast():
    x = torch.randn(B, H, L, D)
    call = AttentionCall(x, x, x)
    plain = attention_weights(call), reference_attention(call)
    with torch.autocast("cpu", torch.bfloat16):
        cast = attention_weights(call), reference_attention(call)
    assert all(torch.equal(one, two) for one, two in zip(plain, cast, strict=True))


def test_every_option_together_equals_the_loops():
    f64 = {"dtype": torch.float64}
    q, k, v = torch.randn(B, H, L, D, **f64), torch.randn(B, HKV, S, D, **f64), torch.randn(B, HKV, S, DV, **f64)
    bias, sinks = torch.randn(1, H, L, S, **f64), torch.randn(H, **f64)
    visible = grids(lambda b, h, t, j, i: (b + h + t + j) % 3 != 0 and not (i == 2 and b == 1))
    want, want_weights = naive_attention(
        q, k, v, visible, scale=-0.7, attn_bias=bias.expand(B, -1, -1, -1), softcap=1.3, sinks=sinks
    )
    call = AttentionCall(q, k, v, Dense(visible), bias, scale=-0.7, softcap=1.3, sinks=sinks)
    torch.testing.assert_close(reference_attention(call), want, rtol=0, atol=1e-14)
    torch.testing.assert_close(attention_weights(call), want_weights, rtol=0, atol=1e-14)


def test_keys_that_no_query_sees_are_zeroed_and_others_kept_by_group():
    tensor = torch.full((1, 2, 3, 1), 7.0)
    visible = torch.zeros(1, 4, 5, 3, dtype=torch.bool)
    visible[0, 1, 4, 0] = visible[0, 2, 0, 2] = True  # query heads 0, 1 share the first key head, 2, 3 the second
    assert hide_unseen(tensor, visible).flatten().tolist() == [7.0, 0.0, 0.0, 0.0, 0.0, 7.0]


def test_a_rule_for_the_bias_gets_the_batch_the_heads_and_the_device_of_the_call():
    query, key = torch.randn(2, 4, 3, 5), torch.randn(2, 2, 7, 5)
    dense = ALiBi(4).dense(3, 7, batch_size=2, num_heads=4)
    with_rule, with_tensor = (attention_weights(AttentionCall(query, key, key, None, bias)) for bias in (ALiBi(4), dense))
    assert torch.equal(with_rule, with_tensor)
    query, key = query.to("meta"), key.to("meta")
    on_meta = attention_weights(AttentionCall(query, key, key, Causal(), ALiBi(4)))
    assert on_meta.shape == (2, 4, 3, 7) and on_meta.device.type == "meta"


def test_a_mask_by_head_and_row_of_the_batch_reaches_every_one():
    @dataclass(frozen=True, eq=False)
    class Near(Mask):
        def visible(self, batch, head, row, key, offset):
            return row + offset - key <= head + 2 * batch

    query, key = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    weights = attention_weights(AttentionCall(query, key, key, Near() & Causal()))
    assert torch.equal(weights > 0, grids(lambda b, h, t, j, i: 0 <= t - j <= h + 2 * b, (2, 3, 5, 7)))


def test_what_a_call_leaves_out_is_off_and_a_call_cannot_be_written_to():
    query = torch.randn(1, 2, 3, 4)
    call = AttentionCall(query, query, query)
    torch.testing.assert_close(reference_attention(call), (query @ query.mT).softmax(-1) @ query)
    assert call != AttentionCall(query, query, query)  # tensors have no truth value to compare by
    with pytest.raises(FrozenInstanceError):
        call.scale = 2.0
