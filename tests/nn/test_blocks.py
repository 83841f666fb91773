"""Blocks: where the norms stand, by hand, and who may see whom."""

import pytest
import torch
from torch import nn

from minitx.nn import (
    Causal,
    DecoderBlock,
    EncoderBlock,
    FeedForward,
    LayerScale,
    MixtureOfExperts,
    MultiHeadAttention,
    Padding,
    Residual,
    Rotary,
    SlidingWindow,
    StochasticDepth,
    is_recomputing,
)
from minitx.nn.blocks import run_checkpointed

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


def test_layer_scale_is_one_gain_a_channel():
    scale = LayerScale(3, 0.1)
    with torch.no_grad():
        scale.gain.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert scale(torch.ones(1, 1, 3)).tolist() == [[[1.0, 2.0, 3.0]]]
    scale.reset_parameters()
    assert scale.gain.tolist() == pytest.approx([0.1] * 3)


@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_the_branch_acts_on_the_sublayer_not_on_the_stream(norm_position):
    residual = Residual(nn.Identity, norm_position, branch=lambda: LayerScale(4, 0.5))
    assert residual(torch.ones(2, 3, 4), lambda h: 3 * h).unique().tolist() == [2.5]  # 1 + 0.5 · 3


def test_every_residual_makes_a_branch_of_its_own():
    block = build(DecoderBlock, cross_attention=MultiHeadAttention(E, H), branch=lambda: LayerScale(E, 0.1))
    gains = [residual.branch.gain for residual in (block.attention_residual, block.cross_residual, block.feedforward_residual)]
    assert len({id(gain) for gain in gains}) == 3


def test_stochastic_depth_drops_whole_samples_and_keeps_the_mean():
    drop = StochasticDepth(0.25)
    out = drop(torch.ones(4000, 3, 2))
    assert out.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert (out == out[:, :1, :1]).all()  # a sample is dropped as a whole
    # a share of 4000 coins has a standard error of √(0.25 · 0.75 / 4000) = 0.0068
    assert (out[:, 0, 0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    x = torch.randn(5, 3, 2)
    assert torch.equal(drop.eval()(x), x)


@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_a_dropped_sublayer_leaves_the_stream_as_it_was(norm_position):
    residual = Residual(nn.Identity, norm_position, branch=lambda: StochasticDepth(0.5), residual_scale=1.0)
    x = torch.randn(40, 3, 2)
    out = residual(x, lambda h: h + 1.0)
    dropped = (out == x).all(-1).all(-1)
    assert 0 < dropped.sum() < 40
    torch.testing.assert_close(out[~dropped], (x + 2.0 * (x + 1.0))[~dropped])


def recorded(block, x, run):
    """Output, gradients, and what a hook on the core sees, with and without those of the second run."""
    every, once = [], []

    def record(module, args, out):
        every.append(out)
        if not is_recomputing():
            once.append(out)

    handle = block.attention.core.register_forward_hook(record)
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    out = run(block, x)
    after = torch.rand(1)
    out.square().sum().backward()
    handle.remove()
    gradients = [x.grad, *(p.grad.clone() for p in block.parameters())]
    block.zero_grad()
    return out, gradients, after, every, once


@pytest.mark.parametrize("kind", [EncoderBlock, DecoderBlock])
def test_checkpointing_gives_the_same_bits_and_records_once(kind):
    options = {"dropout": 0.3, "branch": lambda: StochasticDepth(0.3)}
    block, x = build(kind, **options), torch.randn(B, L, E, dtype=torch.float64)
    plain = recorded(block, x, lambda block, x: block(x))
    checkpointed = recorded(block, x, run_checkpointed)
    assert torch.equal(plain[0], checkpointed[0])
    assert all(torch.equal(one, two) for one, two in zip(plain[1], checkpointed[1], strict=True))
    assert torch.equal(plain[2], checkpointed[2])  # the generator goes on as if nothing had been run again
    assert (len(plain[3]), len(plain[4])) == (1, 1)
    assert (len(checkpointed[3]), len(checkpointed[4])) == (2, 1)
    assert not is_recomputing()


def test_an_error_in_the_second_run_does_not_leave_it_open():
    block, x = build(), torch.randn(B, L, E, dtype=torch.float64, requires_grad=True)
    out = run_checkpointed(block, x)

    def fail(module, args):
        raise ArithmeticError

    handle = block.attention.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        out.sum().backward()
    handle.remove()
    assert not is_recomputing()


def test_a_block_hands_every_option_to_its_attention():
    block = build(DecoderBlock, rotary=True)
    x, bias = torch.randn(B, L, E, dtype=torch.float64), torch.randn(L, L, dtype=torch.float64)
    options = {"position_ids": 2 * torch.arange(L)[None], "attn_bias": bias, "head_mask": torch.tensor([1.0, 0.0, 0.5])}
    h = x + block.attention(block.attention_residual.norm(x), is_causal=True, **options)
    want = h + block.feedforward(block.feedforward_residual.norm(h))
    torch.testing.assert_close(block(x, **options), want, rtol=0, atol=1e-13)


def test_an_attention_that_knows_the_mask_alone_serves_in_a_block():
    class Mean(nn.Module):
        def forward(self, x, *, attn_mask):
            return x.mean(1, keepdim=True).expand_as(x)

    block = EncoderBlock(Mean(), FeedForward(E, 8), norm=nn.Identity)
    assert block(torch.randn(B, L, E), attn_mask=Causal()).shape == (B, L, E)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_block_returns_the_routing_of_its_experts(parallel):
    experts = MixtureOfExperts(E, 8, num_experts=5, experts_per_token=2)
    block = EncoderBlock(MultiHeadAttention(E, H), experts, norm=lambda: nn.LayerNorm(E), parallel=parallel)
    x = torch.randn(B, L, E)
    out, extras = block(x, return_extras=True)
    assert torch.equal(out, block(x))
    assert {name: tuple(tensor.shape) for name, tensor in extras.items()} == {
        "router_probs": (B, L, 5),
        "router_choice": (B, L, 2),
    }
    assert build()(torch.randn(B, L, E).double(), return_extras=True)[1] == {}
