"""Sliding-window and block-sparse attention equal float64 ``math`` under the same mask, and skip what it hides."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minitx.nn import (
    ALiBi,
    Causal,
    Dense,
    Documents,
    Mask,
    Padding,
    PrefixLM,
    SlidingWindow,
    attention_weights,
    intersect,
    reference_attention,
)
from minitx.nn.efficient import BlockSparseAttention, SlidingWindowAttention

DOUBLE = torch.float64


class Checkers(Mask):
    """A rule that the library has never heard of."""

    def visible(self, batch, head, row, key, offset):
        return (row + offset + key + head + batch) % 3 != 0


def leaves(B, H, Hkv, L, S, D, Dv, dtype=DOUBLE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv), (H,))
    return [torch.randn(shape, generator=generator, dtype=DOUBLE).to(dtype).requires_grad_() for shape in shapes]


def assert_equals_math(core, inputs, mask, exact_mask, *, scale, sinks=False, bias=None, atol=1e-11):
    """Outputs and gradients, against the reference in float64."""
    q, k, v, s = inputs
    parameters = [x for x in (getattr(bias, "slopes", bias), s if sinks else None) if x is not None]
    wanted = [q, k, v, *parameters]
    options = {"scale": scale, "sinks": s if sinks else None, "attn_bias": bias}
    got = core(q, k, v, mask=mask, **options)
    exact = reference_attention(q, k, v, mask=exact_mask, softcap=core.softcap, **options)
    cotangent = torch.randn(got.shape, dtype=DOUBLE)
    pairs = [(got, exact)]
    pairs += zip(torch.autograd.grad(got, wanted, cotangent), torch.autograd.grad(exact, wanted, cotangent), strict=True)
    for name, (ours, theirs) in zip(("output", "query", "key", "value", "bias", "sinks"), pairs, strict=False):
        size = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol * size, msg=lambda text, name=name: f"{name}: {text}")


@st.composite
def masks(draw, B, H, L, S):
    """Any mask of the library that fits, alone or combined."""
    seed = draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)

    def bits(*shape):
        return torch.rand(shape, generator=generator) < draw(st.sampled_from((0.05, 0.5, 0.95)))

    kinds = {
        "window": lambda: SlidingWindow(draw(st.integers(1, 30))),
        "padding": lambda: Padding(bits(B, S)),
        "dense": lambda: Dense(bits(*draw(st.sampled_from(((L, S), (B, 1, L, S), (1, H, L, S), (B, H, 1, S), (L, 1)))))),
        "checkers": Checkers,
    }
    if L <= S:
        kinds |= {
            "causal": Causal,
            "prefix": lambda: PrefixLM(draw(st.integers(0, S))),
            "prefixes": lambda: PrefixLM(torch.randint(0, S + 1, (B,), generator=generator)),
            "packed": lambda: Documents(torch.randint(0, 2, (B, S), generator=generator).cumsum(1)),
            "shuffled": lambda: Documents(torch.randint(0, 4, (B, S), generator=generator)),
        }
    chosen = [kinds[name]() for name in draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=3))]
    mask = chosen[0]
    for other in chosen[1:]:
        mask = mask & other if draw(st.booleans()) else mask | other
    return mask


@st.composite
def calls(draw):
    H, Hkv = draw(st.sampled_from(((1, 1), (4, 4), (4, 2), (6, 1))))
    B, D, Dv = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 3, 8))), draw(st.sampled_from((1, 5, 8)))
    length = st.one_of(st.integers(1, 40), st.sampled_from((63, 64, 65)))
    L, S = draw(length), draw(length)
    S = draw(st.sampled_from((L, S)))
    block_size = draw(st.sampled_from((1, 2, 3, 7, 16, 64)))
    if block_size < 3:
        L, S = min(L, 19), min(S, 19)
    mask = draw(st.one_of(st.none(), masks(B, H, L, S)))
    inputs = leaves(B, H, Hkv, L, S, D, Dv, seed=draw(st.integers(0, 9)))
    options = {"scale": draw(st.sampled_from((D**-0.5, 1.0, 0.0, -0.5))), "sinks": draw(st.booleans())}
    axes = draw(st.sampled_from((None, "rule", (L, S), (B, H, L, S), (1, H, 1, S), (B, 1, L, 1))))
    if axes == "rule":
        options["bias"] = ALiBi(slopes=inputs[3].detach().abs().requires_grad_())
    elif axes is not None:
        bias = torch.randn(axes, dtype=DOUBLE)
        options["bias"] = bias.masked_fill(torch.rand(axes) < draw(st.sampled_from((0.0, 0.3))), -torch.inf).requires_grad_()
    return block_size, draw(st.sampled_from((None, 1.7))), inputs, mask, options


def check_block_sparse(call):
    block_size, softcap, inputs, mask, options = call
    assert_equals_math(BlockSparseAttention(block_size=block_size, softcap=softcap), inputs, mask, mask, **options)


def check_window(call, window):
    block_size, softcap, inputs, mask, options = call
    core = SlidingWindowAttention(window, block_size=block_size, softcap=softcap)
    assert_equals_math(core, inputs, mask, intersect(SlidingWindow(window), mask), **options)


@settings(max_examples=300)
@given(calls())
def test_block_sparse_attention_equals_math_under_any_mask(call):
    check_block_sparse(call)


@settings(max_examples=300)
@given(calls(), st.integers(1, 70))
def test_sliding_window_attention_equals_math_within_the_window(call, window):
    check_window(call, window)


@pytest.mark.long
@settings(max_examples=5000)
@given(calls(), st.integers(1, 70))
def test_tiles_equal_math_in_a_long_run(call, window):
    check_block_sparse(call)
    check_window(call, window)


@settings(max_examples=100)
@given(calls())
def test_the_tiles_are_exactly_those_with_a_visible_cell(call):
    block_size, _, (q, k, _, _), mask, _ = call
    B, H, L, S = *q.shape[:3], k.shape[2]
    visible = torch.ones(1, 1, L, S, dtype=torch.bool) if mask is None else mask.dense(L, S, batch_size=B, num_heads=H)
    seen = visible.expand(B, H, L, S).any(0).any(0).nonzero() // block_size
    found = BlockSparseAttention(block_size=block_size).tiles(mask, (B, H, L, S), q.device)
    tiles = list(zip(found.query_block.tolist(), found.key_block.tolist(), strict=True))
    assert len(tiles) == len(set(tiles))
    assert set(tiles) == {tuple(pair) for pair in seen.tolist()}


def test_a_window_worked_out_by_hand():
    value = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(1, 1, 4, 1)
    flat = torch.zeros(1, 1, 4, 1)
    both = SlidingWindowAttention(2, block_size=3)(flat, flat, value).flatten()
    assert both.tolist() == pytest.approx([5.5, 37.0, 370.0, 550.0])
    past = SlidingWindowAttention(2, block_size=3)(flat, flat, value, mask=Causal()).flatten()
    assert past.tolist() == pytest.approx([1.0, 5.5, 55.0, 550.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_low_precision_is_as_exact_as_math_in_low_precision(dtype, size):
    q, k, v, s = (x.detach() for x in leaves(2, 4, 2, 37, 37, 8, 5, dtype))
    q = q * size  # scores up to a thousand
    mask = Causal() & SlidingWindow(9)
    exact = reference_attention(q.double(), k.double(), v.double(), mask=mask, scale=1.0, sinks=s.double())
    low = reference_attention(q, k, v, mask=mask, scale=1.0, sinks=s)
    allowed = 2 * (low.double() - exact).abs().max() + 4 * torch.finfo(dtype).eps * exact.abs().max()
    for got in (
        SlidingWindowAttention(9, block_size=8)(q, k, v, mask=Causal(), scale=1.0, sinks=s),
        BlockSparseAttention(block_size=8)(q, k, v, mask=mask, scale=1.0, sinks=s),
    ):
        assert got.dtype == dtype
        assert (got.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("core", [SlidingWindowAttention(4, block_size=3), BlockSparseAttention(block_size=3)])
def test_rows_without_a_visible_key_are_zero_with_zero_gradient(core):
    q, k, v, _ = leaves(1, 2, 1, 7, 7, 3, 3)
    rows = torch.ones(7, 7, dtype=torch.bool)
    rows[2] = rows[6] = False
    for mask, empty in ((Dense(rows), [2, 6]), (Dense(torch.zeros(7, 7, dtype=torch.bool)), list(range(7)))):
        out = core(q, k, v, mask=mask)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert not out[:, :, empty].any()
        assert not grads[0][:, :, empty].any()
        assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("core", [SlidingWindowAttention(4, block_size=3), BlockSparseAttention(block_size=3)])
def test_poison_in_keys_that_no_query_sees_changes_no_bit(core, poison):
    q, k, v, _ = (x.detach() for x in leaves(2, 2, 1, 7, 7, 3, 3))
    real = torch.tensor([[True] * 5 + [False] * 2, [False] * 3 + [True] * 4])
    mask = Padding(real) & Causal()
    hurt = ~real[:, None, :, None]
    clean, bad = (core(q, k.masked_fill(hurt, x), v.masked_fill(hurt, x), mask=mask) for x in (0.5, poison))
    assert torch.equal(clean, bad)
    bias = torch.zeros(2, 1, 1, 7, dtype=DOUBLE).masked_fill(~real[:, None, None], -torch.inf)  # hides as False would
    hidden = core(q, k.masked_fill(hurt, poison), v.masked_fill(hurt, poison), mask=Causal(), attn_bias=bias)
    assert torch.equal(clean, hidden)


def test_dropout_acts_on_the_weights_in_training_only():
    q, k, v, _ = (x.detach() for x in leaves(1, 1, 1, 64, 64, 2, 1))
    core, exact = BlockSparseAttention(block_size=16, dropout=0.25), BlockSparseAttention(block_size=16)
    assert torch.equal(core.eval()(q, k, v), exact(q, k, v))
    mean = torch.stack([core.train()(q, k, v) for _ in range(400)]).mean(0)
    assert not torch.equal(core(q, k, v), exact(q, k, v))
    torch.testing.assert_close(mean, exact(q, k, v), rtol=0, atol=0.06)
    ones = core(q, k, torch.ones_like(v))  # the kept weights, divided by 1 - p, sum to one only on average
    assert ones.std() > 0.01


def test_weights_are_computed_beside_the_tiles():
    q, k, v, s = (x.detach() for x in leaves(2, 4, 2, 9, 9, 3, 5))
    core = SlidingWindowAttention(3, block_size=4, softcap=2.0)
    out, weights = core(q, k, v, mask=Causal(), scale=1.0, sinks=s, need_weights=True)
    assert torch.equal(out, core(q, k, v, mask=Causal(), scale=1.0, sinks=s))
    mask = Causal() & SlidingWindow(3)
    assert torch.equal(weights, attention_weights(q, k, mask=mask, scale=1.0, softcap=2.0, sinks=s))
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), out, rtol=0, atol=1e-14)
