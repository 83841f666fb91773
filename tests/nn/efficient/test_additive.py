"""Additive attention against its formula."""

import pytest
import torch

from minitx.config import TransformerConfig
from minitx.nn import DecoderLM, MultiHeadAttention
from minitx.nn.efficient import AdditiveAttention
from minitx.nn.functional import make_call

B, H, HKV, L, S, D, M = 2, 6, 3, 5, 7, 11, 13


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
    out, weights = core(make_call(q, k, v, visible, scale=0.7, need_weights=True))
    torch.testing.assert_close(out, loops(core, q, k, v, visible, 0.7), rtol=0, atol=1e-13)
    torch.testing.assert_close(weights.sum(-1), visible.any(-1).double())
    out.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in core.parameters())
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


def test_a_nan_that_nobody_sees_does_not_leak_and_the_future_is_hidden():
    attention = MultiHeadAttention(12, 3, scale="unscaled", core=AdditiveAttention(4))
    x = torch.randn(2, 5, 12)
    poisoned = x.clone()
    poisoned[:, 4] = torch.nan
    real = torch.tensor([True, True, True, True, False]).expand(2, 5)
    got = attention(poisoned, key_mask=real, is_causal=True)
    torch.testing.assert_close(got[:, :4], attention(x[:, :4], is_causal=True))


@pytest.mark.parametrize(
    "option", [{"window": 3, "sinks": True, "softcap": 2.0}, {"position": "alibi", "num_kv_heads": 1, "dropout": 0.5}]
)
def test_a_model_is_built_with_it(option):
    config = TransformerConfig(
        vocab_size=11, embed_dim=12, num_heads=3, num_layers=2, attention="additive", scale="unscaled", **option
    )
    model = DecoderLM(config).eval()
    ids = torch.arange(14).view(2, 7) % 11
    torch.testing.assert_close(model(ids)[:, :4], model(ids[:, :4]), rtol=0, atol=1e-5)
