"""The reference itself: against numbers worked out by hand, and against loops."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from minitx import nn as mx
from minitx.check.reference import DTYPES
from minitx.nn import AttentionCall, attention_scores, attention_weights, reference_attention


def test_two_keys_worked_out_by_hand():
    query = torch.tensor([[[[2.0, 0.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[math.log(3.0), 7.0], [0.0, -7.0]]]], dtype=torch.float64)
    value = torch.tensor([[[[4.0], [8.0]]]], dtype=torch.float64)
    # scores 0.5 * (2 ln 3, 0) = (ln 3, 0); weights (3/4, 1/4); output 3 + 2
    out = reference_attention(AttentionCall(query, key, value, scale=0.5))
    assert out.item() == pytest.approx(5.0, rel=1e-15)


def test_softmax_with_a_sink_by_hand():
    # e^0, e^0 and a sink of ln 2: 1/4, 1/4, and a half that goes nowhere
    weights = mx.masked_softmax(torch.zeros(1, 1, 1, 2), sinks=torch.tensor([math.log(2.0)]))
    assert weights.flatten().tolist() == pytest.approx([0.25, 0.25])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_and_weights_are_kept_in_at_least_float32(dtype):
    x = torch.full((1, 2, 3, 64), 60.0, dtype=dtype)  # 60 * 60 * 64 = 230400, beyond the range of float16
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    call = AttentionCall(x, x, x)
    results = attention_scores(x, x, scale=1.0), attention_weights(call), reference_attention(call)
    assert [result.dtype for result in results] == [wanted, wanted, dtype]
    assert all(torch.isfinite(result).all() for result in results)


def test_scores_and_weights_that_a_call_brings_replace_those_of_its_queries():
    query, scores = torch.randn(1, 2, 3, 4, dtype=torch.float64), torch.randn(1, 2, 3, 3, dtype=torch.float64)
    call, hidden = AttentionCall(query, query, query, mask=mx.Causal()), torch.ones(3, 3, dtype=torch.bool).triu(1)
    given = replace(call, scores=scores)
    torch.testing.assert_close(attention_weights(given), scores.masked_fill(hidden, -math.inf).softmax(-1), rtol=0, atol=1e-15)
    torch.testing.assert_close(reference_attention(replace(given, weights=scores)), scores @ query, rtol=0, atol=1e-14)


def test_replaced_weights_read_the_value_of_a_key_that_no_query_sees():
    x, hidden = torch.randn(1, 1, 3, 4, dtype=torch.float64), torch.tensor([[True, False, True]])
    weights = torch.randn(1, 1, 3, 3, dtype=torch.float64)
    call = AttentionCall(x, x, x, mask=mx.Padding(hidden), weights=weights)
    torch.testing.assert_close(reference_attention(call), weights @ x, rtol=0, atol=1e-14)


def test_what_a_call_leaves_out_is_off_and_a_call_cannot_be_written_to():
    query = torch.randn(1, 2, 3, 4)
    call = AttentionCall(query, query, query)
    torch.testing.assert_close(reference_attention(call), (query @ query.mT).softmax(-1) @ query)
    assert call != AttentionCall(query, query, query)  # tensors have no truth value to compare by
    with pytest.raises(FrozenInstanceError):
        call.scale = 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "sinks", [None, torch.tensor([-math.inf]), torch.tensor([1.0])], ids=["no sinks", "sinks of -inf", "sinks"]
)
def test_no_finite_score_lets_a_hidden_key_into_the_softmax_and_an_empty_row_has_finite_derivatives(dtype, sinks):
    visible = torch.tensor([[True, True, False, False], [True, False, True, False], [False] * 4])
    lowest = torch.tensor([True, True, False, True])
    x = torch.randn(1, 1, 3, 4, dtype=dtype, requires_grad=True)

    def weights(x):
        return mx.masked_softmax(torch.where(lowest, torch.finfo(dtype).min + x, x), visible, sinks)

    with torch.autograd.set_detect_anomaly(True):  # raises where a NaN arises
        got = weights(x)
        (first,) = torch.autograd.grad((got * torch.randn_like(got)).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
    assert all(torch.isfinite(result).all() for result in (got, first, second))
    lowest_row = [0.5, 0.5, 0.0, 0.0] if sinks is None or sinks.isinf() else [0.0] * 4
    assert got[0, 0, 0].tolist() == lowest_row and got[0, 0, 2].tolist() == [0.0] * 4
    assert first[0, 0, 2].tolist() == [0.0] * 4
