"""Blocks: where the norms stand, by hand, and who may see whom."""

import pytest
import torch
from torch import nn

from minitx.nn import (
    Causal,
    DecoderBlock,
    EncoderBlock,
    FeedForward,
    MultiHeadAttention,
    Padding,
    Residual,
    Rotary,
    SlidingWindow,
)

B, L, S, E, H = 2, 5, 7, 12, 3
NORM_POSITIONS = ("pre", "post", "sandwich", "deepnorm")


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def build(kind=EncoderBlock, **options):
    options = {"norm": lambda: nn.LayerNorm(E), **options}
    rotary = Rotary(4) if options.pop("rotary", False) else None
    return kind(MultiHeadAttention(E, H, rotary=rotary), FeedForward(E, 4 * E), **options).double()


@pytest.mark.parametrize(
    ("norm_position", "wanted"),
    # x = 1, the sublayer adds 10, the norm doubles
    [("pre", 1 + (2 * 1 + 10)), ("post", 2 * (1 + 11)), ("sandwich", 1 + 2 * (2 * 1 + 10)), ("deepnorm", 2 * (3 * 1 + 11))],
)
def test_residual_formulas_by_hand(norm_position, wanted):
    scale = 3.0 if norm_position == "deepnorm" else 1.0
    residual = Residual(Double, norm_position, residual_scale=scale)
    assert residual(torch.tensor(1.0), lambda x: x + 10).item() == wanted


@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_residual_dropout_acts_on_the_sublayer_not_on_the_stream(norm_position):
    residual = Residual(nn.Identity, norm_position, dropout=0.5)
    x = torch.ones(10000)
    assert set(residual(x, lambda h: 3 * h).tolist()) == {1.0, 7.0}  # 1 + 0 or 1 + 3 / (1 - 0.5)
    assert set(residual.eval()(x, lambda h: 3 * h).tolist()) == {4.0}


@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_a_block_is_its_sublayers_in_order(norm_position):
    block = build(norm_position=norm_position, residual_scale=1.7)
    x = torch.randn(B, L, E, dtype=torch.float64)
    want = x
    for residual, sublayer in ((block.attention_residual, block.attention), (block.feedforward_residual, block.feedforward)):
        norm = residual.norm
        if norm_position == "pre":
            want = want + sublayer(norm(want))
        elif norm_position == "sandwich":
            want = want + residual.output_norm(sublayer(norm(want)))
        else:
            want = norm(1.7 * want + sublayer(want))
    torch.testing.assert_close(block(x), want, rtol=0, atol=1e-13)


def test_norms_are_modules_of_their_own():
    block = build(norm_position="sandwich")
    with torch.no_grad():
        block.attention_residual.norm.weight.fill_(2.0)
    assert block.attention_residual.output_norm.weight.eq(1).all()
    assert block.feedforward_residual.norm.weight.eq(1).all()


def test_parallel_sublayers_read_one_normed_input():
    block = build(parallel=True)
    x = torch.randn(B, L, E, dtype=torch.float64)
    h = block.attention_residual.norm(x)
    torch.testing.assert_close(block(x), x + block.attention(h) + block.feedforward(h), rtol=0, atol=1e-13)
    assert sum(isinstance(m, nn.LayerNorm) for m in block.modules()) == 1


def future_gradients(block, **options):
    """|d out[t] / d x[u]| summed over channels: (L, L)."""
    x = torch.randn(1, L, E, dtype=torch.float64, requires_grad=True)
    out = block(x, **options)
    return torch.stack(
        [torch.autograd.grad(out[0, t].square().sum(), x, retain_graph=True)[0][0].abs().sum(-1) for t in range(L)]
    )


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("norm_position", [*NORM_POSITIONS, "parallel"])
def test_a_decoder_block_sends_no_gradient_to_the_future(norm_position, rotary):
    where = {"parallel": True} if norm_position == "parallel" else {"norm_position": norm_position}
    reach = future_gradients(build(DecoderBlock, rotary=rotary, **where))
    assert not reach.triu(1).any()
    assert (reach.tril() > 0).sum() == L * (L + 1) // 2  # and to all of the past


def test_a_decoder_block_stays_causal_under_any_mask():
    everything = torch.ones(L, L, dtype=torch.bool)
    block = build(DecoderBlock)
    for mask in (everything, SlidingWindow(L), Causal() | SlidingWindow(L), Causal() & Causal()):
        assert not future_gradients(block, attn_mask=mask).triu(1).any()


def test_a_window_limits_the_reach_of_gradients():
    reach = future_gradients(build(DecoderBlock), attn_mask=SlidingWindow(2))
    assert torch.equal(reach > 0, torch.ones(L, L, dtype=torch.bool).tril().triu(-1))


def test_an_encoder_block_sees_both_ways():
    assert (future_gradients(build()) > 0).all()


def test_cross_attention_reads_all_of_the_memory_that_its_mask_allows():
    block = build(DecoderBlock, cross_attention=MultiHeadAttention(E, H, kdim=8, vdim=8))
    x = torch.randn(B, L, E, dtype=torch.float64)
    memory = torch.randn(B, S, 8, dtype=torch.float64, requires_grad=True)
    real = torch.ones(B, S, dtype=torch.bool)
    real[0, 4:] = False
    (grad,) = torch.autograd.grad(block(x, memory=memory, memory_mask=Padding(real))[:, 0].square().sum(), memory)
    assert torch.equal(grad.abs().sum(-1) > 0, real)


def test_cross_attention_stands_between_attention_and_feedforward():
    cross = MultiHeadAttention(E, H)
    block = build(DecoderBlock, cross_attention=cross)
    x, memory = torch.randn(B, L, E, dtype=torch.float64), torch.randn(B, S, E, dtype=torch.float64)
    h = x + block.attention(block.attention_residual.norm(x), is_causal=True)
    h = h + cross(block.cross_residual.norm(h), memory)
    want = h + block.feedforward(block.feedforward_residual.norm(h))
    torch.testing.assert_close(block(x, memory=memory), want, rtol=0, atol=1e-13)


def test_a_decoder_block_without_cross_attention_is_an_encoder_block_with_a_causal_mask():
    decoder, encoder = build(DecoderBlock), build(EncoderBlock)
    encoder.load_state_dict(decoder.state_dict())
    x = torch.randn(B, L, E, dtype=torch.float64)
    assert torch.equal(decoder(x), encoder(x, attn_mask=Causal()))
