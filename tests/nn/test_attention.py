"""MultiHeadAttention: names, widths, order of operations, and one code path."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from minitx.check.reference import naive_attention
from minitx.nn import DotProductAttention, MultiHeadAttention, QKNorm, Rotary, SlidingWindow, T5RelativeBias

B, L, S, E, H = 2, 5, 7, 12, 3
REAL = torch.tensor([[False, True, True, True, True], [True] * 5])
BACKENDS = ("math", "sdpa", "chunked")


def test_checkpoint_has_four_separate_projections():
    projections = [f"{p}_proj.weight" for p in ("q", "k", "v", "out")]
    assert list(MultiHeadAttention(E, H, bias=False).state_dict()) == projections
    everything = MultiHeadAttention(
        E, H, scale="learned", qk_norm=QKNorm("l2", 4, num_kv_heads=H), sinks=True, rotary=Rotary(4)
    )
    biases = {name.replace("weight", "bias") for name in projections}
    assert set(everything.state_dict()) == {*projections, *biases, "scale.log_scale", "qk_norm.gain", "sinks"}


def test_the_whole_layer_equals_the_loops_with_every_width_different():
    attention = MultiHeadAttention(E, 4, num_kv_heads=2, head_dim=5, kdim=7, vdim=11).double()
    x, y, z = (torch.randn(B, n, width, dtype=torch.float64) for n, width in ((L, E), (S, 7), (S, 11)))

    def heads(projection, inputs, count):
        flat = inputs @ projection.weight.T + projection.bias
        return torch.stack([flat[..., h * 5 : (h + 1) * 5] for h in range(count)], dim=1)

    q, k, v = heads(attention.q_proj, x, 4), heads(attention.k_proj, y, 2), heads(attention.v_proj, z, 2)
    out, weights = naive_attention(q, k, v, scale=1 / math.sqrt(5))
    joined = torch.cat([out[:, h] for h in range(4)], dim=-1)
    got, got_weights = attention(x, y, z, need_weights=True)
    torch.testing.assert_close(got, joined @ attention.out_proj.weight.T + attention.out_proj.bias, rtol=0, atol=1e-14)
    torch.testing.assert_close(got_weights, weights, rtol=0, atol=1e-14)


def test_the_learned_scale_acts_after_qk_norm():
    attention, seen = MultiHeadAttention(E, H, qk_norm=QKNorm("l2", 4, num_kv_heads=H), scale="learned"), []
    attention.core.register_forward_pre_hook(lambda module, args: seen.extend(args))
    attention(torch.randn(B, L, E))
    wanted = torch.full((B, H, L), 0.5)  # 1 · 1/√4; before the norm it would be lost
    torch.testing.assert_close(seen[0].query.norm(dim=-1), wanted)


CALLS = {
    "masked": {"key_mask": REAL, "is_causal": True},
    "window": {"attn_mask": SlidingWindow(2)},
    "tensor bias": {"attn_bias": torch.linspace(-1, 1, L * L).view(L, L)},
    "t5": {"attn_bias": T5RelativeBias(H), "is_causal": True},
    "bool tensor": {"attn_mask": torch.arange(L * L).view(L, L) % 3 != 1},
    "positions": {"position_ids": torch.tensor([[3, 1, 4, 0, 5]]), "is_causal": True},
    "weights": {"key_mask": REAL, "is_causal": True, "need_weights": True},
}
nn.init.normal_(CALLS["t5"]["attn_bias"].requires_grad_(False).weight)  # torch's CPU kernel takes no bias that learns


def layer(backend, **options):
    torch.manual_seed(0)
    attention = MultiHeadAttention(E, H, **options, rotary=Rotary(4), core=DotProductAttention(backend=backend)).double()
    return attention, torch.randn(B, L, E, dtype=torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", CALLS)
def test_train_eval_and_no_grad_give_the_same_bits_and_every_backend_the_numbers_of_math(call, backend):
    attention, x = layer(backend)
    trained = attention(x, **CALLS[call])
    attention.eval()
    for mode in (nullcontext(), torch.no_grad(), torch.inference_mode()):
        with mode:
            torch.testing.assert_close(attention(x, **CALLS[call]), trained, rtol=0, atol=0)
    torch.testing.assert_close(trained, layer("math")[0](x, **CALLS[call]), rtol=0, atol=1e-13)


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize("backend", BACKENDS)
def test_neither_the_future_nor_padding_changes_a_bit(backend):
    """Of a model with any other option: in ``test_models.py`` and ``test_every_model.py``."""
    more = {} if backend == "sdpa" else {"sinks": True, "softcap": 2.0}
    attention, x = layer(backend, num_kv_heads=1, scale="log_length", max_len=9, **more)
    future, padding = x.clone(), x.clone()
    future[:, 3:] += 1.0
    padding[0, 0] = math.nan  # which no query sees; a NaN that later queries see is theirs to show
    past = (torch.arange(L) < 3).expand(B, L)
    for other, hides, real in ((future, {"is_causal": True}, past), (padding, {"key_mask": REAL}, REAL)):
        one, two = (attention(inputs, **hides) for inputs in (x, other))
        assert torch.equal(one[real], two[real]) and not torch.equal(one[~real], two[~real])
