"""Additive attention against its formula."""

import pytest
import torch
from sizes import HKV, B, D, H, L, S, small_model, tokens

from minitx.nn.efficient import AdditiveAttention
from minitx.nn.functional import make_call

M = 13


def loops(core, q, k, v, visible, scale):
    """Bahdanau et al. 2015, §A.1.2, one pair at a time."""
    out = torch.zeros(B, H, L, v.shape[-1], dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for i in range(L):
                keys = [j for j in range(S) if visible[b, h, i, j]]
                mapped = [core.query_map.weight @ q[b, h, i] + core.key_map.weight @ k[b, h // 2, j] for j in keys]
                energies = [scale * core.energy.weight[0] @ torch.tanh(pair) for pair in mapped]
                if keys:
                    out[b, h, i] = torch.stack(energies).softmax(0) @ v[b, h // 2, keys]
    return out


def test_additive_attention_equals_its_formula_and_trains_all_its_weights():
    core = AdditiveAttention(D, M).double()
    shapes = (B, H, L, D), (B, HKV, S, D), (B, HKV, S, 17)
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    visible = torch.rand(B, H, L, S) < 0.6
    visible[:, :, 2] = False  # a query that sees nothing
    visible[..., 3] = False  # and a key that nobody sees
    with torch.no_grad():
        k[:, :, 3] = v[:, :, 3] = torch.nan
    out, weights = core(make_call(q, k, v, visible, scale=0.7, need_weights=True))
    torch.testing.assert_close(out, loops(core, q, k, v, visible, 0.7), rtol=0, atol=1e-13)
    torch.testing.assert_close(weights.sum(-1), visible.any(-1).double())
    out.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in core.parameters())
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_additive_attention_computes_in_float32_and_takes_a_bias_of_another_dtype(dtype):
    core, low = AdditiveAttention(D, M), AdditiveAttention(D, M)
    low.load_state_dict(core.to(dtype).state_dict())  # the same rounded weights, in float32
    q = torch.randn(B, H, L, D).to(dtype)
    got, want = core(make_call(q, q, q)), low(make_call(*(q.float(),) * 3))
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.to(dtype), rtol=0, atol=0)
    bias = torch.randn(L, L, dtype=torch.float64)
    wide, narrow = (low(make_call(*(q.float(),) * 3, attn_bias=each)) for each in (bias, bias.float()))
    assert torch.equal(wide, narrow)


@pytest.mark.parametrize(
    "option", [{"window": 3, "sinks": True, "softcap": 2.0}, {"position": "alibi", "num_kv_heads": 1, "dropout": 0.5}]
)
def test_a_model_is_built_with_it(option):
    model, ids = small_model(attention="additive", scale="unscaled", **option).eval(), tokens(2, 7)
    torch.testing.assert_close(model(ids)[:, :4], model(ids[:, :4]), rtol=0, atol=1e-12)
