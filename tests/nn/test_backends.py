"""Every backend against loops in float64, forward and backward; which kernel runs; what is refused."""

import functools
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import (
    DV,
    HKV,
    B,
    D,
    H,
    L,
    OpRecorder,
    S,
    assert_as_good_as_naive,
    grids,
    low_dtype,
    rounding_band,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from minitx.nn import (
    Causal,
    Documents,
    DotProductAttention,
    Padding,
    PrefixLM,
    SlidingWindow,
    backend_names,
    explain_backends,
    register_backend,
    scaled_dot_product_attention,
    unregister_backend,
)
from minitx.testing import DTYPES, gradient_sizes, naive_attention

BACKENDS = ("math", "sdpa", "chunked", "auto")
LEFT = torch.tensor([[False, False, True, True, True, True, True], [True] * 7])
RIGHT = torch.tensor([[True, True, True, True, False, False, False], [True] * 6 + [False]])
IDS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 3]])
LENGTHS = torch.tensor([4, 6])
CELLS = grids(lambda b, h, t, j, i: (5 * b + h + 2 * t + j) % 3 != 0)
EMPTY = grids(lambda b, h, t, j, i: i not in (0, 3) and j != 2)
MASKS = {  # attn_mask, is_causal, the same rule in plain numbers
    "none": (None, False, lambda b, h, t, j, i: True),
    "causal": (None, True, lambda b, h, t, j, i: j <= t),
    "causal twice": (Causal(), True, lambda b, h, t, j, i: j <= t),
    "left padding": (Padding(LEFT), False, lambda b, h, t, j, i: bool(LEFT[b, j])),
    "right padding and causal": (Padding(RIGHT), True, lambda b, h, t, j, i: bool(RIGHT[b, j]) and j <= t),
    "window": (SlidingWindow(3), False, lambda b, h, t, j, i: abs(t - j) < 3),
    "window and causal": (SlidingWindow(2) & Causal(), False, lambda b, h, t, j, i: 0 <= t - j < 2),
    "documents and causal": (Documents(IDS), True, lambda b, h, t, j, i: j <= t and bool(IDS[b, t] == IDS[b, j])),
    "prefix": (PrefixLM(3), False, lambda b, h, t, j, i: j <= t or j < 3),
    "prefix per row": (PrefixLM(LENGTHS), False, lambda b, h, t, j, i: j <= t or j < int(LENGTHS[b])),
    "dense (L, S)": (CELLS[0, 0], False, lambda b, h, t, j, i: bool(CELLS[0, 0, i, j])),
    "dense (L, 1)": (EMPTY[0, 0, :, :1], False, lambda b, h, t, j, i: i not in (0, 3)),
    "dense (B, 1, L, S)": (CELLS[:, :1], False, lambda b, h, t, j, i: bool(CELLS[b, 0, i, j])),
    "dense (1, H, L, S) and causal": (CELLS[:1], True, lambda b, h, t, j, i: j <= t and bool(CELLS[0, h, i, j])),
    "empty rows": (EMPTY, False, lambda b, h, t, j, i: i not in (0, 3) and j != 2),
    "a union": (Documents(IDS) | SlidingWindow(2), False, lambda b, h, t, j, i: bool(IDS[b, t] == IDS[b, j]) or abs(t - j) < 2),
    "everything": (
        Padding(LEFT) & SlidingWindow(4) & (Documents(IDS) | PrefixLM(5)),
        True,
        lambda b, h, t, j, i: bool(LEFT[b, j]) and 0 <= t - j < 4 and (bool(IDS[b, t] == IDS[b, j]) or j <= t or j < 5),
    ),
}
OPTIONS = {
    "scale 1": {"scale": 1.0},
    "scale 0": {"scale": 0},
    "scale negative": {"scale": -0.5},
    "scale tiny": {"scale": 1e-3},
    "bias": {"bias": (B, H, L, S)},
    "bias (L, S)": {"bias": (L, S)},
    "bias broadcast": {"bias": (1, H, 1, S)},
    "soft-cap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "wide values": {"value_width": DV},
    "multi-query": {"kv_heads": 1},
    "as many key heads": {"kv_heads": H},
    "all at once": {"scale": -0.5, "bias": (1, H, L, S), "softcap": 1.7, "sinks": True, "value_width": DV},
}
NEEDS_MATH = ("soft-cap", "sinks", "all at once")


def tensors(dtype, *, kv_heads=HKV, value_width=D, bias=None, sinks=None, seed=0, **_):
    """The same numbers in every dtype: rounded to ``dtype``, as leaves."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"query": (B, H, L, D), "key": (B, kv_heads, S, D), "value": (B, kv_heads, S, value_width)}
    if bias is not None:
        shapes["bias"] = bias
    if sinks:
        shapes["sinks"] = (H,)
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    cotangent = torch.randn((B, H, L, value_width), generator=generator, dtype=torch.float64).to(dtype)
    return {name: value.to(dtype).requires_grad_() for name, value in drawn.items()}, cotangent


def recast(leaves, dtype):
    return {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in leaves.items()}


def gradients(output, cotangent, leaves):
    return dict(zip(leaves, torch.autograd.grad(output, list(leaves.values()), cotangent.to(output.dtype)), strict=True))


def run_naive(leaves, cotangent, dtype, visible, scale, softcap):
    leaves = recast(leaves, dtype)
    out, weights = naive_attention(
        leaves["query"], leaves["key"], leaves["value"], visible,
        scale=scale, attn_bias=leaves.get("bias"), softcap=softcap, sinks=leaves.get("sinks"),
    )  # fmt: skip
    return {"output": out.detach(), **gradients(out, cotangent, leaves)}, weights.detach()


@functools.cache
def judged(dtype, mask_name, option_name):
    """Leaves, the float64 reference, and the independent low-precision run of one case."""
    options = OPTIONS.get(option_name, {})
    leaves, cotangent = tensors(dtype, **options)
    visible = grids(MASKS[mask_name][2])
    scale = options.get("scale")
    scale = 1 / math.sqrt(D) if scale is None else scale
    arguments = visible, scale, options.get("softcap")
    reference, weights = run_naive(leaves, cotangent, torch.float64, *arguments)
    low, _ = run_naive(leaves, cotangent, low_dtype(dtype), *arguments)
    # half-precision answers are rounded once at the end, which is the larger error
    sizes = {}
    if dtype in (torch.float32, torch.float64):
        found = gradient_sizes(leaves["query"], leaves["key"], leaves["value"], cotangent, weights, scale)
        sizes = {name: found[f"gradient of {name}"] for name in ("query", "key")}
    return leaves, cotangent, reference, low, sizes


def check_call(dtype, mask_name, option_name, backend):
    leaves, cotangent, reference, low, sizes = judged(dtype, mask_name, option_name)
    options = OPTIONS.get(option_name, {})
    leaves = recast(leaves, dtype)
    attn_mask, is_causal, _ = MASKS[mask_name]
    output = scaled_dot_product_attention(
        leaves["query"], leaves["key"], leaves["value"], attn_mask, 0.0, is_causal,
        scale=options.get("scale"), attn_bias=leaves.get("bias"), softcap=options.get("softcap"),
        sinks=leaves.get("sinks"), backend=backend,
    )  # fmt: skip
    got = {"output": output.detach(), **gradients(output, cotangent, leaves)}
    for name in reference:
        assert_as_good_as_naive(got[name], reference[name], low[name], dtype, name, sizes.get(name, 1.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_equals_the_float64_loops_forward_and_backward(mask, dtype, backend):
    check_call(dtype, mask, "default", backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mask", ["none", "right padding and causal", "empty rows"])
def test_every_option_equals_the_float64_loops_forward_and_backward(option, mask, dtype, backend):
    if backend == "sdpa" and option in NEEDS_MATH:
        with pytest.raises(RuntimeError, match="backend 'sdpa' cannot serve this call"):
            check_call(dtype, mask, option, backend)
    else:
        check_call(dtype, mask, option, backend)


def attend(backend="auto", mask=None, is_causal=False, shape=(B, H, L, D), keys=S, kv_heads=H, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(shape, generator=generator).to(dtype)
    k, v = (torch.randn((shape[0], kv_heads, keys, shape[-1]), generator=generator).to(dtype) for _ in "kv")
    return scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, backend=backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
class TestContract:
    def test_the_default_scale_is_one_over_sqrt_of_d(self, backend):
        assert torch.equal(attend(backend), attend(backend, scale=D**-0.5))
        assert torch.equal(attend(backend, scale=1), attend(backend, scale=1.0))
        assert not torch.allclose(attend(backend), attend(backend, scale=1.0))

    def test_unscaled_is_not_silently_scaled_by_hand(self, backend):
        q = torch.tensor([[[[2.0, 0.0, 0.0, 0.0]]]])
        k = torch.tensor([[[[0.5 * math.log(3.0), 0.0, 0.0, 0.0], [0.0] * 4]]])
        v = torch.tensor([[[[1.0] * 4, [0.0] * 4]]])
        unscaled = scaled_dot_product_attention(q, k, v, scale=1.0, backend=backend)
        assert unscaled[0, 0, 0, 0].item() == pytest.approx(0.75)  # 3 / (3 + 1)
        scaled = scaled_dot_product_attention(q, k, v, backend=backend)
        assert scaled[0, 0, 0, 0].item() == pytest.approx(math.sqrt(3) / (math.sqrt(3) + 1))

    def test_the_last_query_sees_the_last_key(self, backend):
        identity = torch.eye(S).expand(1, 1, S, S)
        q = torch.zeros(1, 1, 2, S)
        out = scaled_dot_product_attention(q, identity, identity, is_causal=True, backend=backend)
        assert out[0, 0, 0].tolist() == pytest.approx([1 / 6] * 6 + [0])  # values are one-hot, so the output is the weights
        assert out[0, 0, 1].tolist() == pytest.approx([1 / 7] * 7)

    def test_more_queries_than_keys_is_an_error_when_causal_and_none_otherwise(self, backend):
        assert attend(backend, keys=3).shape == (B, H, L, D)
        with pytest.raises(ValueError, match="got 5 queries and 3 keys"):
            attend(backend, keys=3, is_causal=True)

    def test_causal_and_a_mask_intersect(self, backend):
        full = torch.ones(L, L, dtype=torch.bool)
        both = attend(backend, full, True, keys=L)
        torch.testing.assert_close(both, attend(backend, None, True, keys=L))
        upper = full.triu(1)  # only the future: with causal, nothing
        assert torch.equal(attend(backend, upper, True, keys=L), torch.zeros(B, H, L, D))

    def test_query_head_h_uses_key_head_h_over_group_size(self, backend):
        generator = torch.Generator().manual_seed(2)
        q = torch.randn(B, H, L, D, generator=generator)
        k, v = (torch.randn(B, HKV, S, D, generator=generator) for _ in "kv")
        grouped = scaled_dot_product_attention(q, k, v, Padding(LEFT), backend=backend)
        interleaved = [t.repeat_interleave(H // HKV, dim=1) for t in (k, v)]
        torch.testing.assert_close(grouped, scaled_dot_product_attention(q, *interleaved, Padding(LEFT), backend=backend))
        tiled = [t.repeat(1, H // HKV, 1, 1) for t in (k, v)]
        assert not torch.allclose(grouped, scaled_dot_product_attention(q, *tiled, Padding(LEFT), backend=backend))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_row_without_keys_is_zero_with_zero_weights_and_zero_finite_gradients(self, backend, dtype):
        leaves, cotangent = tensors(dtype)
        for attn_mask in (EMPTY, torch.zeros(L, S, dtype=torch.bool)):
            out, weights = scaled_dot_product_attention(
                leaves["query"], leaves["key"], leaves["value"], attn_mask, backend=backend, need_weights=True
            )
            empty = ~attn_mask.expand(B, H, L, S).any(-1)
            grads = gradients(out, cotangent, leaves)
            assert not out[empty].any()
            assert not weights[empty].any()
            assert not grads["query"][empty].any()
            assert all(torch.isfinite(grad).all() for grad in grads.values())
        assert not any(grad.any() for grad in grads.values())  # nothing visible at all

    @pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_poison_where_no_query_looks_changes_no_bit(self, backend, dtype, poison):
        clean, cotangent = tensors(dtype)
        dirty = recast(clean, dtype)
        with torch.no_grad():
            for name in ("key", "value"):
                dirty[name][0, :, :2] = poison
        results = []
        for leaves in (clean, dirty):
            out, weights = scaled_dot_product_attention(
                leaves["query"], leaves["key"], leaves["value"], Padding(LEFT), 0.0, True, backend=backend, need_weights=True
            )
            results.append((out, weights, *gradients(out, cotangent, leaves).values()))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)

    def test_poison_in_one_key_head_stays_hidden_when_its_group_does_not_look(self, backend):
        leaves, _ = tensors(torch.float32)
        visible = torch.ones(1, H, L, S, dtype=torch.bool)
        visible[:, 2:4, :, 3] = False  # the group of key head 1
        clean = scaled_dot_product_attention(*leaves.values(), visible, backend=backend)
        dirty = recast(leaves, torch.float32)
        with torch.no_grad():
            dirty["key"][:, 1, 3] = dirty["value"][:, 1, 3] = math.nan
        assert torch.equal(scaled_dot_product_attention(*dirty.values(), visible, backend=backend), clean)

    @pytest.mark.parametrize("mask", [None, Padding(RIGHT)], ids=["alone", "beside a mask"])
    def test_poison_behind_minus_infinity_in_the_bias_stays_hidden(self, backend, mask):
        leaves, cotangent = tensors(torch.float32)
        bias = torch.zeros(L, S)
        bias[:, 2] = -math.inf
        dirty = recast(leaves, torch.float32)
        with torch.no_grad():
            dirty["key"][:, :, 2] = dirty["value"][:, :, 2] = math.nan
        results = []
        for these in (leaves, dirty):
            out = scaled_dot_product_attention(*these.values(), mask, attn_bias=bias, backend=backend)
            results.append([out, *gradients(out, cotangent, these).values()])
        for clean, got in zip(*results, strict=True):
            assert torch.equal(got, clean)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_minus_infinity_in_the_bias_masks_as_false_does(self, backend, dtype):
        bias = torch.zeros(B, H, L, S, dtype=dtype).masked_fill(~EMPTY, -math.inf).requires_grad_()
        leaves, cotangent = tensors(dtype)
        arguments = leaves["query"], leaves["key"], leaves["value"]
        biased = scaled_dot_product_attention(*arguments, attn_bias=bias, backend=backend)
        masked = scaled_dot_product_attention(*arguments, EMPTY, attn_bias=torch.zeros_like(bias), backend=backend)
        band = rounding_band(dtype, masked.detach().double())
        torch.testing.assert_close(biased, masked, rtol=0, atol=band)
        (grad,) = torch.autograd.grad(biased, bias, cotangent)
        assert torch.isfinite(grad).all()
        assert not grad[~EMPTY].any()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_float32_bias_beyond_half_precision_is_not_turned_into_infinity(self, backend, dtype):
        everywhere = torch.full((L, S), -1e5)
        torch.testing.assert_close(
            attend(backend, dtype=dtype, attn_bias=everywhere), attend(backend, dtype=dtype), rtol=0, atol=0.02
        )  # float32 keeps 1e5 to 1/128, so the scores themselves move by half of that
        some = everywhere.clone()
        some[:, ::2] = 0.0
        hidden = attend(backend, some == 0.0, dtype=dtype)
        torch.testing.assert_close(
            attend(backend, dtype=dtype, attn_bias=some), hidden, rtol=0, atol=rounding_band(dtype, hidden)
        )

    @pytest.mark.parametrize("mask", MASKS)
    def test_asking_for_weights_changes_no_bit_of_the_output(self, backend, mask):
        attn_mask, is_causal, rule = MASKS[mask]
        plain = attend(backend, attn_mask, is_causal)
        out, weights = attend(backend, attn_mask, is_causal, need_weights=True)
        assert torch.equal(out, plain)
        visible = grids(rule)
        assert not weights[~visible].any()
        sums = weights.sum(-1)
        torch.testing.assert_close(sums, visible.any(-1).float(), rtol=0, atol=S * torch.finfo(torch.float32).eps)

    def test_weights_times_values_are_the_output(self, backend):
        leaves, _ = tensors(torch.float64)
        out, weights = scaled_dot_product_attention(*leaves.values(), CELLS, scale=1.0, backend=backend, need_weights=True)
        values = leaves["value"].repeat_interleave(H // HKV, dim=1)
        torch.testing.assert_close(weights @ values, out, rtol=0, atol=1e-14)

    def test_weights_are_those_before_dropout_and_carry_gradient(self, backend):
        q = torch.randn(B, H, L, D, requires_grad=True)
        _, dropped = scaled_dot_product_attention(q, q, q, None, 0.5, backend=backend, need_weights=True)
        _, plain = scaled_dot_product_attention(q, q, q, backend=backend, need_weights=True)
        assert torch.equal(dropped, plain)
        (grad,) = torch.autograd.grad(plain.square().sum(), q)
        assert grad.abs().sum() > 0

    def test_dropout_zero_is_exact_and_dropout_is_applied_as_given(self, backend):
        q = torch.randn(B, H, L, D)
        assert torch.equal(
            scaled_dot_product_attention(q, q, q, None, 0.0, backend=backend),
            scaled_dot_product_attention(q, q, q, backend=backend),
        )
        with torch.no_grad():  # functions know no eval mode
            dropped = scaled_dot_product_attention(q, q, q, None, 0.5, backend=backend)
        assert not torch.allclose(dropped, scaled_dot_product_attention(q, q, q, backend=backend))

    def test_dropout_keeps_the_expectation_and_drops_weights_not_rows(self, backend):
        n, p = 20000, 0.25
        q, k, v = torch.zeros(n, 1, 1, 2), torch.zeros(n, 1, 4, 2), torch.eye(4)[:, :2].expand(n, 1, 4, 2)
        out = scaled_dot_product_attention(q, k, v, None, p, backend=backend)[:, 0, 0]
        # each weight of 1/4 is 0 or (1/4) / (1 - p) = 1/3
        assert set(out.mul(3).round(decimals=4).unique().tolist()) == {0.0, 1.0}
        error = math.sqrt(p / (1 - p) / n) / 4  # standard error of the mean
        assert (out.mean(0) - 0.25).abs().max() < 5 * error
        assert abs(torch.corrcoef(out.T)[0, 1]) < 5 / math.sqrt(n)  # independent from key to key

    def test_sinks_let_the_weights_sum_below_one_or_are_refused(self, backend):
        sinks = torch.linspace(-2.0, 2.0, H)
        if backend == "sdpa":
            with pytest.raises(RuntimeError, match=r"no sinks; chunked, math can"):
                attend(backend, sinks=sinks)
            return
        _, weights = attend(backend, sinks=sinks, need_weights=True)
        assert (weights.sum(-1) < 1).all()
        _, without = attend(backend, sinks=torch.full((H,), -math.inf), need_weights=True)
        torch.testing.assert_close(without.sum(-1), torch.ones(B, H, L))

    def test_the_order_of_keys_does_not_matter(self, backend):
        leaves, _ = tensors(torch.float64)
        order = torch.randperm(S)
        q, k, v = leaves["query"], leaves["key"], leaves["value"]
        shuffled = scaled_dot_product_attention(q, k[:, :, order], v[:, :, order], CELLS[..., order], backend=backend)
        torch.testing.assert_close(shuffled, scaled_dot_product_attention(q, k, v, CELLS, backend=backend), rtol=0, atol=1e-14)

    def test_a_batch_is_its_rows(self, backend):
        leaves, _ = tensors(torch.float64)
        whole = scaled_dot_product_attention(*leaves.values(), Padding(LEFT), backend=backend)
        for b in range(B):
            rows = [leaf[b : b + 1] for leaf in leaves.values()]
            alone = scaled_dot_product_attention(*rows, Padding(LEFT[b : b + 1]), backend=backend)
            torch.testing.assert_close(alone, whole[b : b + 1], rtol=0, atol=1e-14)

    def test_strided_and_expanded_inputs_give_the_same_answer(self, backend):
        q = torch.randn(B, L, H, D).transpose(1, 2)
        k = torch.randn(B, H, D, S).transpose(-1, -2)
        v = torch.randn(1, 1, S, 1).expand(B, H, S, D)
        strided = scaled_dot_product_attention(q, k, v, Padding(LEFT), backend=backend)
        packed = [t.clone(memory_format=torch.contiguous_format) for t in (q, k, v)]
        torch.testing.assert_close(strided, scaled_dot_product_attention(*packed, Padding(LEFT), backend=backend))

    def test_a_future_key_receives_exactly_no_gradient(self, backend):
        q, k, v = (torch.randn(1, 1, L, D, requires_grad=True) for _ in range(3))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, backend=backend)
        for t in range(L):
            grads = torch.autograd.grad(out[:, :, t].sum(), (k, v), retain_graph=True)
            for grad in grads:
                assert not grad[:, :, t + 1 :].any()
        assert grads[0][:, :, : t + 1].any()

    def test_inputs_are_not_written_to(self, backend):
        leaves, _ = tensors(torch.float32)
        before = [leaf.detach().clone() for leaf in leaves.values()]
        mask = EMPTY.clone()
        scaled_dot_product_attention(*leaves.values(), mask, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(before, leaves.values(), strict=True))
        assert torch.equal(mask, EMPTY)

    def test_gradients_pass_gradcheck(self, backend):
        q, k, v = (
            torch.randn(1, heads, n, 3, dtype=torch.float64, requires_grad=True) for heads, n in ((2, 2), (1, 3), (1, 3))
        )
        bias = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        mask = torch.tensor([[True, False, True], [False, False, False]])

        def call(q, k, v, bias):
            return scaled_dot_product_attention(q, k, v, mask, scale=0.9, attn_bias=bias, backend=backend)

        assert torch.autograd.gradcheck(call, (q, k, v, bias))
        assert torch.autograd.gradcheck(lambda *a: call(*a, bias.detach()), (q, k, v))


def test_math_is_twice_differentiable():
    q, k, v = (torch.randn(1, 2, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, bias, sinks):
        options = {"attn_bias": bias, "sinks": sinks, "softcap": 0.8, "backend": "math"}
        return scaled_dot_product_attention(q, k, v, None, 0.0, True, **options)

    assert torch.autograd.gradcheck(call, (q, k, v, bias, sinks))
    assert torch.autograd.gradgradcheck(call, (q, k, v, bias, sinks))


def test_math_gradgradcheck_with_an_empty_row():
    q, k, v = (torch.randn(1, 1, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[False, False], [True, True]])
    assert torch.autograd.gradgradcheck(lambda *a: scaled_dot_product_attention(*a, mask, backend="math"), (q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, -0.5, -3.0, 1e-3])
def test_a_square_causal_call_survives_a_scale_of_zero_or_less(scale, dtype, backend):
    # the fused kernel multiplies its own -inf by the scale: -inf * 0 is NaN, and -inf * -1 sees only the future
    leaves, cotangent = tensors(dtype)
    square = {"query": leaves["query"], "key": leaves["key"][:, :, :L], "value": leaves["value"][:, :, :L]}
    visible = grids(lambda b, h, t, j, i: j <= i, (B, H, L, L))
    square = recast(square, dtype)
    reference, _ = run_naive(square, cotangent, torch.float64, visible, scale, None)
    low, _ = run_naive(square, cotangent, low_dtype(dtype), visible, scale, None)
    out = scaled_dot_product_attention(*square.values(), None, 0.0, True, scale=scale, backend=backend)
    got = {"output": out.detach(), **gradients(out, cotangent, square)}
    for name in reference:
        assert_as_good_as_naive(got[name], reference[name], low[name], dtype, name)


# ---- which kernel runs


def fused_cases():
    """Calls: name -> (query, key, value, keyword arguments)."""
    q, k, v = torch.randn(B, H, L, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D)
    square = torch.randn(B, H, S, D)
    grouped = torch.randn(B, HKV, S, D)
    leaf = torch.randn(L, S, requires_grad=True)
    return {
        "plain": (q, k, v, {}),
        "causal": (square, k, v, {"is_causal": True}),
        "causal, fewer queries": (q, k, v, {"is_causal": True}),
        "one query": (q[:, :, :1], k, v, {"is_causal": True}),
        "padded": (q, k, v, {"attn_mask": Padding(LEFT)}),
        "padded and causal": (square, k, v, {"attn_mask": Padding(LEFT), "is_causal": True}),
        "grouped": (square, grouped, grouped, {"is_causal": True}),
        "grouped and padded": (q, grouped, grouped, {"attn_mask": Padding(LEFT), "is_causal": True}),
        "unscaled": (square, k, v, {"scale": 1.0, "is_causal": True}),
        "window": (square, k, v, {"attn_mask": SlidingWindow(2), "is_causal": True}),
        "dense": (q, k, v, {"attn_mask": CELLS}),
        "fixed bias": (q, k, v, {"attn_bias": leaf.detach()}),
        "bfloat16": (q.bfloat16(), k.bfloat16(), v.bfloat16(), {"attn_mask": Padding(LEFT)}),
        "bfloat16 with a float32 bias": (q.bfloat16(), k.bfloat16(), v.bfloat16(), {"attn_bias": leaf.detach()}),
        "strided last axis": (q, torch.randn(B, H, D, S).transpose(-1, -2), v, {}),
        "expanded last axis": (q, k, torch.randn(1, 1, S, 1).expand(B, H, S, D), {}),
        "training": (q.clone().requires_grad_(), k, v, {"attn_mask": Padding(LEFT)}),
        "dropout": (q, k, v, {"dropout_p": 0.1}),
        "learned bias": (q, k, v, {"attn_bias": leaf}),
        "wide values": (q, k, torch.randn(B, H, S, DV), {}),
    }


LEAVE_THE_KERNEL = ("dropout", "learned bias", "wide values")


@pytest.mark.parametrize("name", fused_cases())
def test_sdpa_runs_the_fused_cpu_kernel_exactly_where_it_says_so(name):
    q, k, v, options = fused_cases()[name]
    with OpRecorder() as recorder:
        scaled_dot_product_attention(q, k, v, **options, backend="sdpa")
    says = {report.name: report for report in explain_backends(q, k, v, **options)}
    assert recorder.fused == says["sdpa"].fused == (name not in LEAVE_THE_KERNEL)


@pytest.mark.parametrize("name", fused_cases())
def test_auto_takes_sdpa_for_small_calls_fused_or_by_torchs_plain_path(name):
    q, k, v, options = fused_cases()[name]
    (running,) = [report for report in explain_backends(q, k, v, **options) if report.runs]
    assert (running.name, running.fused) == ("sdpa", name not in LEAVE_THE_KERNEL)
    with OpRecorder() as recorder:
        scaled_dot_product_attention(q, k, v, **options)
    assert recorder.fused == running.fused


def test_math_never_runs_a_fused_kernel():
    q = torch.randn(B, H, L, D)
    with OpRecorder() as recorder:
        scaled_dot_product_attention(q, q, q, is_causal=True, backend="math")
    assert not any("scaled_dot_product" in op for op in recorder.ops)


def test_the_backward_pass_of_sdpa_is_fused_too():
    q = torch.randn(B, H, L, D, requires_grad=True)
    out = scaled_dot_product_attention(q, q, q, is_causal=True, backend="sdpa")
    with OpRecorder() as recorder:
        out.sum().backward()
    assert "_scaled_dot_product_flash_attention_for_cpu_backward" in recorder.ops


def test_a_square_causal_call_builds_no_mask():
    q = torch.randn(B, H, L, D)
    with OpRecorder() as recorder:
        scaled_dot_product_attention(q, q, q, is_causal=True, backend="sdpa")
    assert recorder.ops == ["_scaled_dot_product_flash_attention_for_cpu"]


def test_weights_are_computed_beside_the_fused_kernel_not_instead_of_it():
    q = torch.randn(B, H, L, D)
    with OpRecorder() as recorder:
        scaled_dot_product_attention(q, q, q, is_causal=True, backend="sdpa", need_weights=True)
    assert recorder.fused


def test_lowering_a_mask_never_reads_its_values():
    with FakeTensorMode():  # tensors without values: whatever looks at one fails
        q, k = torch.randn(B, H, L, D), torch.randn(B, HKV, S, D)
        mask = Padding(torch.ones(B, S, dtype=torch.bool)) & Documents(torch.ones(B, S, dtype=torch.long)) & Causal()
        for backend in ("math", "sdpa", "chunked"):
            assert scaled_dot_product_attention(q, k, k, mask, backend=backend).shape == (B, H, L, D)


@pytest.mark.parametrize("backend", ["math", "chunked"])
def test_shapes_can_be_had_on_meta_tensors(backend):
    q, k = torch.randn(B, H, L, D, device="meta"), torch.randn(B, HKV, S, D, device="meta")
    out = scaled_dot_product_attention(q, k, k, is_causal=True, softcap=1.0, backend=backend)
    assert out.device.type == "meta" and out.shape == (B, H, L, D)


def test_the_cpu_kernel_hides_a_query_that_is_nan_and_the_others_show_it():
    # documented in sdpa.py: should torch mend it, the sentence there goes
    q, k = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 8)
    q[0, 0, 1] = math.nan
    for backend in ("math", "chunked"):
        out = scaled_dot_product_attention(q, k, k, backend=backend)
        assert out[0, 0, 1].isnan().all() and not out[0, 0, [0, 2]].isnan().any()
    assert not scaled_dot_product_attention(q, k, k, backend="sdpa")[0, 0, 1].any()


# ---- choice, explanation, registration


def test_explanation_names_every_backend_and_the_reason():
    q = torch.randn(1, 2, 3, 4)
    reports = {report.name: report for report in explain_backends(q, q, q, softcap=3.0, sinks=torch.zeros(2))}
    variants = ["sdpa:flash", "sdpa:efficient", "sdpa:cudnn", "sdpa:math"]
    assert list(reports) == ["sdpa", "chunked", "math", "flex", "flash_attn", *variants]
    assert not reports["sdpa"].can and not reports["sdpa"].runs
    assert reports["sdpa"].reason == "torch's kernels have no soft-cap"
    assert reports["math"].can and reports["math"].runs and not reports["math"].fused


def test_a_kernel_by_name_is_that_kernel_and_its_report_says_so():
    q = torch.randn(1, 2, 16, 8)
    for backend, fused in (("sdpa", True), ("sdpa:flash", True), ("sdpa:math", False)):
        with OpRecorder() as recorder:
            scaled_dot_product_attention(q, q, q, is_causal=True, backend=backend)
        assert recorder.fused == fused, backend
    reports = {report.name: (report.can, report.fused, report.reason) for report in explain_backends(q, q, q, is_causal=True)}
    assert reports["sdpa:flash"] == (True, True, "")
    assert reports["sdpa:math"] == (True, False, "torch's own plain path")
    assert reports["chunked"] == (True, False, "it works tile by tile in plain torch")
    for kernel in ("efficient", "cudnn"):
        assert reports[f"sdpa:{kernel}"] == (False, False, f"torch has no {kernel} kernel for the CPU")


def test_an_explanation_is_of_a_call_that_is_not_causal_unless_it_says_so(registered):
    seen = []
    register_backend("recording", lambda call: call.value, supports=lambda call: seen.append(call.mask))
    q = torch.randn(1, 2, 3, 4)
    explain_backends(q, q, q)
    explain_backends(q, q, q, is_causal=True)
    assert [type(mask) for mask in seen] == [type(None), Causal]


@pytest.mark.parametrize("backend", ["math", "sdpa", "sdpa:math", "chunked"])
def test_without_dropout_no_random_number_is_drawn(backend):
    q, state = torch.randn(1, 2, 5, 4, requires_grad=True), torch.get_rng_state()
    scaled_dot_product_attention(q, q, q, backend=backend).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_explaining_runs_nothing():
    q = torch.randn(1, 2, 3, 4)
    mask = Padding(torch.ones(1, 3, dtype=torch.bool))
    with OpRecorder() as recorder:
        explain_backends(q, q, q, mask, is_causal=True)
    assert recorder.ops == []


def test_strict_turns_a_fall_from_the_fused_kernel_into_an_error():
    q = torch.randn(1, 2, 3, 4)
    for backend in ("sdpa", "auto"):
        strict = DotProductAttention(backend=backend, strict=True)
        assert strict(q, q, q).shape == q.shape
        with pytest.raises(RuntimeError, match=r"strict: backend .* without a fused kernel"):
            strict(q, q, torch.randn(1, 2, 3, 5))
    with pytest.raises(RuntimeError, match="CPU kernel has no dropout"):
        DotProductAttention(backend="sdpa", strict=True, dropout=0.1)(q, q, q)
    assert DotProductAttention(backend="sdpa", strict=True, dropout=0.1).eval()(q, q, q).shape == q.shape


def test_a_refusal_names_the_backends_that_could():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(
        RuntimeError, match=r"backend 'sdpa' cannot serve this call: torch's kernels have no soft-cap; chunked, math can"
    ):
        scaled_dot_product_attention(q, q, q, softcap=1.0, backend="sdpa")


@pytest.fixture
def registered():
    """A registry that forgets what the test puts into it."""
    before = set(backend_names())
    yield
    for name in set(backend_names()) - before:
        unregister_backend(name)


def test_a_registered_backend_serves_calls_by_name_only(registered):
    seen = []

    def run(call):
        seen.append(call)
        return call.query[..., :1].expand(*call.query.shape[:3], call.value.shape[-1])

    register_backend("mine", run, supports=lambda call: "no window" if isinstance(call.mask, SlidingWindow) else None)
    q = torch.randn(1, 2, 3, 4)
    out, weights = scaled_dot_product_attention(q, q, q, scale=0.3, is_causal=True, backend="mine", need_weights=True)
    assert torch.equal(out, q[..., :1].expand(1, 2, 3, 4))
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 3))
    assert seen[0].scale == 0.3 and isinstance(seen[0].mask, Causal) and seen[0].shape == (1, 2, 3, 3)
    scaled_dot_product_attention(q, q, q)
    assert len(seen) == 1  # auto does not take it
    assert DotProductAttention(backend="mine")(q, q, q).shape == q.shape
    with pytest.raises(RuntimeError, match="'mine' cannot serve this call: no window; sdpa, chunked, math can"):
        scaled_dot_product_attention(q, q, q, SlidingWindow(2), backend="mine")
    assert [report.name for report in explain_backends(q, q, q)][-1] == "mine"
    assert backend_names()[0] == "auto" and backend_names()[-1] == "mine"
    unregister_backend("mine")
    assert "mine" not in backend_names()
    with pytest.raises(ValueError, match="backend='mine' is not known"):
        scaled_dot_product_attention(q, q, q, backend="mine")
    for name in ("mine", "math", "sdpa:flash"):  # gone already, or minitx's own
        with pytest.raises(ValueError, match=f"'{name}' was not registered by register_backend"):
            unregister_backend(name)


def test_a_registered_backend_without_a_fused_kernel_says_so_and_strict_refuses_it(registered):
    register_backend("plain", lambda call: call.value, falls_back=lambda call: "one step at a time")
    register_backend("fused", lambda call: call.value)
    q = torch.randn(1, 2, 3, 4)
    lines = [str(report) for report in explain_backends(q, q, q, backend="fused")]
    assert lines[-2:] == ["   plain          can     one step at a time", "-> fused          fused"]
    assert "   math           can     it holds the whole L x S matrix" in lines
    assert "   flash_attn     cannot  flash-attn is not installed" in lines or "flash_attn" in sys.modules
    assert DotProductAttention(backend="plain")(q, q, q) is q
    for need_weights in (False, True):
        with pytest.raises(RuntimeError, match=r"strict: backend 'plain' .* without a fused kernel: one step at a time"):
            DotProductAttention(backend="plain", strict=True)(q, q, q, need_weights=need_weights)
    assert DotProductAttention(backend="fused", strict=True)(q, q, q) is q


@pytest.mark.parametrize("name", ["math", "sdpa", "auto"])
def test_a_taken_name_cannot_be_registered(registered, name):
    with pytest.raises(ValueError, match=f"backend '{name}' is taken"):
        register_backend(name, lambda call: call.query)


def test_an_unknown_backend_is_refused_with_the_known_ones():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"backend='flsh' is not known; one of auto, sdpa, chunked, math, flex"):
        scaled_dot_product_attention(q, q, q, backend="flsh")


# ---- any call at all


def draw_call(data):
    """A random call with its rule in a dense form, for judging."""
    batch, group, kv_heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    keys = data.draw(st.integers(1, 9))
    rows = data.draw(st.integers(1, keys))
    width, value_width = data.draw(st.sampled_from([1, 3, 8])), data.draw(st.sampled_from([1, 3, 8]))
    dtype = data.draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    shape = batch, group * kv_heads, rows, keys
    q, k = normal(batch, shape[1], rows, width), normal(batch, kv_heads, keys, width)
    v = normal(batch, kv_heads, keys, value_width)
    rules = [lambda b, h, t, j, i: True]
    mask = None
    if data.draw(st.booleans()):
        cells = torch.rand(shape, generator=generator) < data.draw(st.sampled_from([0.2, 0.7]))
        mask, rules = cells, [*rules, lambda b, h, t, j, i: bool(cells[b, h, i, j])]
    elif data.draw(st.booleans()):
        real = torch.rand((batch, keys), generator=generator) < 0.7
        window = data.draw(st.integers(1, 9))
        mask = Padding(real) & SlidingWindow(window)
        rules = [*rules, lambda b, h, t, j, i: bool(real[b, j]) and abs(t - j) < window]
    is_causal = data.draw(st.booleans())
    if is_causal:
        rules.append(lambda b, h, t, j, i: j <= t)
    scale = data.draw(st.sampled_from([None, 1.0, 0.0, -0.3, 1e-3]))
    visible = grids(lambda *at: all(rule(*at) for rule in rules), shape)
    return (q, k, v), mask, is_causal, scale, visible


def check_any_call(data):
    inputs, mask, is_causal, scale, visible = draw_call(data)
    dtype = inputs[0].dtype
    number = 1 / math.sqrt(inputs[0].shape[-1]) if scale is None else scale
    cotangent = torch.linspace(-1, 1, inputs[0].shape[:3].numel() * inputs[2].shape[-1], dtype=torch.float64)
    independent = low_dtype(dtype)

    def run(kind, cast):
        leaves = [t.detach().to(cast).requires_grad_() for t in inputs]
        if kind == "loops":
            out, _ = naive_attention(*leaves, visible, scale=number)
        elif kind == "loops, last key first":
            out, _ = naive_attention(leaves[0], leaves[1].flip(2), leaves[2].flip(2), visible.flip(3), scale=number)
        else:
            out = scaled_dot_product_attention(*leaves, mask, 0.0, is_causal, scale=scale, backend=kind)
        grads = [torch.zeros_like(leaf) for leaf in leaves]
        if out.requires_grad:
            grads = torch.autograd.grad(out, leaves, cotangent.to(dtype).to(cast).view_as(out), materialize_grads=True)
        return [out.detach(), *grads]

    reference = run("loops", torch.float64)
    # a handful of numbers may be lucky in one order of summation: the worse of two is the error of the precision
    lows = [
        max(pair, key=lambda low, want=want: (low.double() - want).abs().max().item())
        for want, *pair in zip(reference, run("loops", independent), run("loops, last key first", independent), strict=True)
    ]
    # the gradient of a score is p (dp - Σ p dp): with one key it is zero, but each dp is as large as a dot product
    q, k, v = (t.abs().max().item() for t in inputs)
    largest_dp = v * cotangent.view_as(reference[0]).abs().sum(-1).max().item()
    sizes = {"output": v, "query": abs(number) * largest_dp * k, "key": abs(number) * largest_dp * q, "value": 1.0}
    for backend in ("math", "sdpa"):
        for (name, size), got, want, low in zip(sizes.items(), run(backend, dtype), reference, lows, strict=True):
            assert_as_good_as_naive(got, want, low, dtype, f"{backend} {name}", size)


@settings(max_examples=60)
@given(st.data())
def test_any_call_equals_the_float64_loops(data):
    check_any_call(data)


@pytest.mark.long
@settings(max_examples=1000)
@given(st.data())
def test_any_call_equals_the_float64_loops_at_length(data):
    check_any_call(data)


def textbook(q, k, v, visible):
    """One matrix at a time, in the dtype of its inputs: for lengths at which the loops take too long."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)).masked_fill(~visible, -1e4)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp() * visible
    return exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-6) @ v


@pytest.mark.parametrize("kind", ["causal", "padded and causal", "window and causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [63, 64, 65, 129, 257])
def test_lengths_around_the_kernel_tiles_equal_the_textbook_in_float64(length, dtype, kind):
    q, k, v = (torch.randn(1, heads, length, 16, dtype=torch.float64).to(dtype) for heads in (4, 2, 2))
    real = torch.arange(length)[None] >= 3
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask, visible = {
        "causal": (None, causal),
        "padded and causal": (Padding(real), causal & real),
        "window and causal": (SlidingWindow(31), causal.triu(-30)),
    }[kind]
    got = scaled_dot_product_attention(q, k, v, mask, 0.0, True, scale=1.0, backend="sdpa")
    reference = textbook(q.double(), k.double(), v.double(), visible)
    assert_as_good_as_naive(got, reference, textbook(q, k, v, visible), dtype)
