"""Blocks: where the norms stand, by hand, and who may see whom; and their parts: norms and the position-wise network."""

import math

import pytest
import torch
from torch import nn

import minitx.nn as mx
from minitx.nn.blocks import run_checkpointed

B, L, S, E, H = 2, 5, 7, 12, 3
F64 = torch.float64
NORM_POSITIONS = ("pre", "post", "sandwich", "deepnorm")
REAL = torch.arange(S) < torch.tensor([[4], [S]])


def build(attention=None, **options):
    attention = attention or mx.MultiHeadAttention(E, H)
    return mx.Block(attention, mx.FeedForward(E, 4 * E), **{"norm": lambda: nn.LayerNorm(E), **options}).double()


@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_a_block_is_its_sublayers_in_order(norm_position):
    block = build(norm_position=norm_position, residual_scale=1.7)
    x = torch.randn(B, L, E, dtype=F64)
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


def test_parallel_sublayers_read_one_normed_input():
    block = build(parallel=True)
    x = torch.randn(B, L, E, dtype=F64)
    h = block.attention_residual.norm(x)
    torch.testing.assert_close(block(x), x + block.attention(h) + block.feedforward(h), rtol=0, atol=1e-13)
    assert sum(isinstance(m, nn.LayerNorm) for m in block.modules()) == 1


def reach(block, **options):
    """Whether d out[t] / d x[u] is anything but zero: (L, L)."""
    x = torch.randn(1, L, E, dtype=F64, requires_grad=True)
    out = block(x, **options)
    gradients = [torch.autograd.grad(out[0, t].square().sum(), x, retain_graph=True)[0][0] for t in range(L)]
    return torch.stack(gradients).abs().sum(-1) > 0


PAST = mx.Causal().dense(L, L)[0, 0]


def test_a_causal_block_stays_causal_under_any_mask_that_says_nothing_about_the_future():
    block, everything, wide = build(causal=True), torch.ones(L, L, dtype=torch.bool), mx.SlidingWindow(L)
    for mask in (everything, wide, mx.Causal() | wide, mx.PrefixLM(3) | mx.Causal()):
        assert torch.equal(reach(block, attn_mask=mask), PAST)
    assert torch.equal(reach(block, attn_mask=mx.SlidingWindow(2)), PAST & PAST.triu(-1))


def test_a_causal_block_gives_torchs_kernel_the_flag_and_no_mask(monkeypatch):
    """With a mask the CPU's kernel computes the hidden half, too, and FlashAttention refuses."""
    kernel, seen = nn.functional.scaled_dot_product_attention, []

    def recorded(*tensors, **options):
        seen.append((options["is_causal"], options["attn_mask"]))
        return kernel(*tensors, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", recorded)
    build(causal=True)(torch.randn(B, L, E, dtype=F64))
    assert seen == [(True, None)]


def test_cross_attention_stands_between_attention_and_feedforward_and_reads_the_memory_that_its_mask_allows():
    cross = mx.MultiHeadAttention(E, H, kdim=8, vdim=8)
    block = build(causal=True, cross_attention=cross)
    x, memory = torch.randn(B, L, E, dtype=F64), torch.randn(B, S, 8, dtype=F64, requires_grad=True)
    h = x + block.attention(block.attention_residual.norm(x), is_causal=True)
    h = h + cross(block.cross_residual.norm(h), memory, key_mask=REAL)
    want = h + block.feedforward(block.feedforward_residual.norm(h))
    got = block(x, memory=memory, memory_mask=mx.Padding(REAL))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    (grad,) = torch.autograd.grad(got[:, 0].square().sum(), memory)
    assert torch.equal(grad.abs().sum(-1) > 0, REAL)


@pytest.mark.parametrize("length", [3, torch.tensor([3])])
def test_a_prefix_takes_the_place_of_causal_and_other_rules_still_intersect(length):
    block, prefix = build(causal=True), PAST.clone()
    prefix[:, :3] = True
    assert torch.equal(reach(block, attn_mask=mx.PrefixLM(length)), prefix)
    real = torch.tensor([[True, False, True, True, True]])
    seen = prefix & real | torch.eye(L, dtype=torch.bool)  # the residual connection stays
    assert torch.equal(reach(block, attn_mask=mx.PrefixLM(length) & mx.Padding(real)), seen)
    window = mx.SlidingWindow(2).dense(L, L)[0, 0]
    assert torch.equal(reach(block, attn_mask=mx.SlidingWindow(2) & mx.PrefixLM(length)), prefix & window)


def test_stochastic_depth_drops_whole_samples_and_keeps_the_mean():
    out = mx.StochasticDepth(0.25)(torch.ones(4000, 3, 2))
    assert out.unique().tolist() == pytest.approx([0.0, 4 / 3])
    # a share of 4000 coins has a standard error of √(0.25 · 0.75 / 4000) = 0.0068
    assert (out[:, 0, 0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_dropout_and_the_branch_act_on_the_sublayer_not_on_the_stream(norm_position):
    residual = mx.Residual(nn.Identity, norm_position, dropout=0.5)
    assert set(residual(torch.ones(10000), lambda h: 3 * h).tolist()) == {1.0, 7.0}  # 1 + 0 or 1 + 3 / (1 - 0.5)
    residual = mx.Residual(nn.Identity, norm_position, branch=lambda: mx.StochasticDepth(0.5))
    x = torch.randn(40, 3, 2)
    out = residual(x, lambda h: h + 1.0)
    dropped = (out == x).all(-1).all(-1)
    assert 0 < dropped.sum() < 40
    torch.testing.assert_close(out[~dropped], (x + 2.0 * (x + 1.0))[~dropped])


def test_checkpointing_gives_the_same_bits_and_records_once():
    block = build(causal=True, dropout=0.3, branch=lambda: mx.StochasticDepth(0.3))
    x, seen, results = torch.randn(B, L, E, dtype=F64, requires_grad=True), [], []
    block.attention.core.register_forward_hook(lambda *_: seen.append(mx.is_recomputing()))
    for run in (mx.Block.__call__, run_checkpointed):
        torch.manual_seed(1)
        out = run(block, x)
        after = torch.rand(1)  # the generator, too, goes on as if nothing had been run again
        results.append([out, after, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    assert seen == [False, False, True] and not mx.is_recomputing()


class Mean(nn.Module):
    """An attention of somebody else, which knows the mask alone."""

    def __init__(self, *more):
        super().__init__()
        self.more = more

    def forward(self, x, key=None, *, attn_mask=None):
        out = (x if key is None else key).mean(1, keepdim=True).expand_as(x)
        return (out, *self.more) if self.more else out


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_an_attention_that_returns_its_weights_too_gives_the_block_its_output(norm_position):
    x, memory = torch.randn(B, L, E, dtype=F64), torch.randn(B, S, E, dtype=F64)
    plain, more = (
        build(attention=Mean(*m), cross_attention=Mean(*m), norm_position=norm_position) for m in ((), (x[:, :, :L],))
    )
    more.load_state_dict(plain.state_dict())
    options = {"attn_mask": mx.Causal(), "memory": memory}
    assert torch.equal(more(x, **options), plain(x, **options))


# ---- the position-wise network


def erf_gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


PLAIN = {"gelu": erf_gelu, "gelu_tanh": tanh_gelu, "relu": torch.relu, "relu2": lambda x: torch.relu(x) ** 2}
GATES = {"swiglu": lambda x: x * torch.sigmoid(x), "geglu": erf_gelu, "geglu_tanh": tanh_gelu, "reglu": torch.relu}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [*PLAIN, *GATES])
def test_networks_equal_their_formula(activation, bias):
    network = mx.FeedForward(5, 7, activation=activation, bias=bias).double()
    x = torch.randn(2, 3, 5, dtype=F64)

    def apply(projection, inputs):
        return inputs @ projection.weight.T + (projection.bias if bias else 0.0)

    hidden = apply(network.up_proj, x)
    hidden = PLAIN[activation](hidden) if activation in PLAIN else GATES[activation](apply(network.gate_proj, x)) * hidden
    torch.testing.assert_close(network(x), apply(network.down_proj, hidden), rtol=0, atol=1e-14)


def test_dropout_acts_on_the_hidden_layer_in_training_only():
    network = mx.FeedForward(5, 7, dropout=0.5)
    x = torch.randn(2, 3, 5)
    assert not torch.equal(network(x), network(x))
    assert torch.equal(network.eval()(x), network(x))


# ---- norms of the stream and of queries and keys

KINDS = ("rms", "layer", "l2")


def test_layer_and_rms_norm_by_hand():
    x = torch.tensor([3.0, 4.0], dtype=F64)
    assert mx.make_norm("rms", 2, 0.0).double()(x).tolist() == pytest.approx([3 / math.sqrt(12.5), 4 / math.sqrt(12.5)])
    assert mx.make_norm("layer", 2, 0.0).double()(x).tolist() == pytest.approx([-1.0, 1.0])
    assert mx.make_norm("layer", 2, 0.75).double()(x).tolist() == pytest.approx([-0.5, 0.5])  # 0.5 / √(0.25 + 0.75)


@pytest.mark.parametrize("kind", KINDS)
def test_qk_norm_forgets_the_lengths_of_queries_and_keys(kind):
    norm = mx.QKNorm(kind, 7, num_kv_heads=3)
    q, k = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 7)
    for one, two in zip(norm(q, k), norm(100 * q, 0.5 * k), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    alone, nothing = norm(q, None)  # the keys lie in a cache
    assert nothing is None and torch.equal(alone, norm(q, k)[0])


def test_l2_logits_start_at_sqrt_of_d_times_the_cosine():
    D = 4
    norm = mx.QKNorm("l2", D, num_kv_heads=1)
    q, k = torch.randn(1, 1, 1, D), torch.randn(1, 1, 1, D)
    nq, nk = norm(q, k)
    cosine = torch.nn.functional.cosine_similarity(q, k, dim=-1)
    torch.testing.assert_close((nq * nk).sum(-1) / math.sqrt(D), math.sqrt(D) * cosine)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_go_through_unchanged_and_the_gradient_of_a_zero_vector_is_finite(kind, dtype):
    x = torch.randn(2, 3, 5, 7, dtype=dtype)
    x[0, 0] = 0.0
    x.requires_grad_()
    norm = mx.QKNorm(kind, 7, num_kv_heads=3)
    for gains in (torch.float32, dtype):  # gains kept in float32 (mixed precision), and gains cast
        q, k = norm.to(gains)(x, x)
        assert q.dtype == k.dtype == dtype
        assert torch.isfinite(torch.autograd.grad((q + k).sum(), x)[0]).all()


@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_a_block_is_its_residuals_one_after_the_other_with_their_hooks_and_forwards(norm_position):
    class Halved(mx.Residual):
        def forward(self, *args, **options):
            return super().forward(*args, **options) / 2

    block, x = build(norm_position=norm_position, residual_scale=1.5), torch.randn(B, L, E, dtype=F64)
    plain = block(x)
    for name in ("attention_residual", "feedforward_residual"):
        halved = Halved(lambda: nn.LayerNorm(E, dtype=F64), norm_position, residual_scale=1.5)
        halved.load_state_dict(getattr(block, name).state_dict())
        setattr(block, name, halved)
    want = block.feedforward_residual(block.attention_residual(x, block.attention), block.feedforward)
    torch.testing.assert_close(block(x), want, rtol=0, atol=1e-13)
    assert not torch.allclose(want, plain, atol=1e-3)
    with block.feedforward_residual.register_forward_hook(lambda module, args, out: 3 * out):
        torch.testing.assert_close(block(x), 3 * want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", [{"parallel": True}, {"cross_attention": mx.MultiHeadAttention(E, H)}], ids=str)
def test_hooks_on_every_residual_of_a_block_fire(options):
    block, memory = build(**options).float(), torch.randn(B, L, E) if "cross_attention" in options else None
    names = []
    residuals = [(name, module) for name, module in block.named_children() if isinstance(module, mx.Residual)]
    for name, module in residuals:
        module.register_forward_hook(lambda module, args, out, name=name: names.append(name))
    block(torch.randn(B, L, E), memory=memory)
    assert sorted(names) == sorted(name for name, _ in residuals) != []
