"""What every backend keeps to, which kernel runs, and what is refused. Answers and gradients: ``tests/lattice/calls.py``."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from sizes import DV, HKV, B, D, H, L, OpRecorder, S, grids
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad as fwAD

import minitx.nn as mx
from minitx.check.reference import tolerance
from minitx.config import TransformerConfig
from minitx.nn import scaled_dot_product_attention as attention
from minitx.nn.functional import make_call

BACKENDS = ("math", "sdpa", "chunked")
LEFT = torch.tensor([[False, False, True, True, True, True, True], [True] * 7])
EMPTY = grids(lambda b, h, t, j, i: i not in (0, 3) and j != 2)


def tensors(dtype):
    """Query, key and value by name: the same numbers in every dtype, but for rounding."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (B, H, L, D), "key": (B, HKV, S, D), "value": (B, HKV, S, D)}
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: value.to(dtype).requires_grad_() for name, value in drawn.items()}


@pytest.mark.parametrize("backend", BACKENDS)
class TestContract:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_float32_bias_beyond_half_precision_is_not_turned_into_infinity(self, backend, dtype):
        call = functools.partial(attention, *tensors(dtype).values(), backend=backend)
        everywhere = torch.full((L, S), -1e5)
        # float32 keeps 1e5 to 1/128, so the scores themselves move by half of that
        torch.testing.assert_close(call(attn_bias=everywhere), call(), rtol=0, atol=0.02)
        some = everywhere.clone()
        some[:, ::2] = 0.0
        hidden = call(some == 0.0)
        torch.testing.assert_close(call(attn_bias=some), hidden, rtol=0, atol=tolerance(hidden, hidden, dtype))

    def test_asking_for_weights_changes_no_bit_weights_times_values_are_the_output_and_empty_rows_are_zero(self, backend):
        q, k, v = tensors(torch.float64).values()
        plain = attention(q, k, v, EMPTY, backend=backend)
        out, weights = attention(q, k, v, EMPTY, backend=backend, need_weights=True)
        assert torch.equal(out, plain)
        assert not weights[~EMPTY].any() and not out[~EMPTY.any(-1)].any()
        torch.testing.assert_close(weights.sum(-1), EMPTY.any(-1).double(), rtol=0, atol=1e-14)
        torch.testing.assert_close(weights @ v.repeat_interleave(H // HKV, dim=1), out, rtol=0, atol=1e-14)

    def test_dropout_keeps_the_expectation_and_drops_weights_not_rows(self, backend):
        n, p = 20000, 0.25
        q, k, v = torch.zeros(n, 1, 1, 2), torch.zeros(n, 1, 4, 2), torch.eye(4)[:, :2].expand(n, 1, 4, 2)
        with torch.no_grad():  # a function applies what it is given, without asking for a mode
            out = attention(q, k, v, None, p, backend=backend)[:, 0, 0]
        # each weight of 1/4 is 0 or (1/4) / (1 - p) = 1/3
        assert set(out.mul(3).round(decimals=4).unique().tolist()) == {0.0, 1.0}
        error = math.sqrt(p / (1 - p) / n) / 4  # standard error of the mean
        assert (out.mean(0) - 0.25).abs().max() < 5 * error
        assert abs(torch.corrcoef(out.T)[0, 1]) < 5 / math.sqrt(n)  # independent from key to key

    def test_a_call_writes_to_no_input_and_draws_no_random_number(self, backend):
        leaves = tensors(torch.float32)
        given, state = [*leaves.values(), EMPTY.clone()], torch.get_rng_state()
        before = [tensor.detach().clone() for tensor in given]
        attention(*given, backend=backend).sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))
        assert torch.equal(torch.get_rng_state(), state)


def test_math_is_twice_differentiable_rows_without_keys_included():
    shapes = *(3 * [(1, 2, 2, 2)]), (2, 2), (2,)

    def call(q, k, v, bias, sinks):
        options = {"attn_bias": bias, "sinks": sinks, "softcap": 0.8, "backend": "math"}
        return attention(q, k, v, torch.tensor([[False, False], [True, True]]), 0.0, True, **options)

    assert torch.autograd.gradgradcheck(call, [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes])


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
        "grouped and padded": (q, grouped, grouped, {"attn_mask": mx.Padding(LEFT), "is_causal": True}),
        "fixed bias": (q, k, v, {"attn_bias": leaf.detach()}),
        "bfloat16 with a float32 bias": (q.bfloat16(), k.bfloat16(), v.bfloat16(), {"attn_bias": leaf.detach()}),
        "strided last axis": (q, torch.randn(B, H, D, S).transpose(-1, -2), v, {}),
        "training": (q.clone().requires_grad_(), k, v, {"attn_mask": mx.Padding(LEFT)}),
        "dropout": (q, k, v, {"dropout_p": 0.1}),
        "learned bias": (q, k, v, {"attn_bias": leaf}),
        "wide values": (q, k, torch.randn(B, H, S, DV), {}),
    }


LEAVE_THE_KERNEL = ("dropout", "learned bias", "wide values")


@pytest.mark.parametrize("name", fused_cases())
def test_small_calls_run_torchs_fused_kernel_exactly_where_the_report_says_so_and_strict_refuses_the_others(name):
    q, k, v, options = fused_cases()[name]
    for backend in ("sdpa", "auto"):
        with OpRecorder() as recorder:
            attention(q, k, v, **options, backend=backend)
        (running,) = [report for report in mx.explain_backends(q, k, v, **options, backend=backend) if report.runs]
        assert running.name == "sdpa"
        assert recorder.fused == running.fused == (name not in LEAVE_THE_KERNEL)
        strict, call = mx.DotProductAttention(backend=backend, strict=True), make_call(q, k, v, **options)
        if running.fused:
            assert strict(call).shape == q.shape
        else:
            with pytest.raises(RuntimeError, match="strict"):
                strict(call)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_a_batch_without_rows_has_an_answer_without_rows(backend):
    q, k = torch.randn(0, H, L, D, requires_grad=True), torch.randn(0, HKV, S, D)
    mask = mx.Padding(torch.ones(0, S, dtype=torch.bool)) & mx.SlidingWindow(3)
    for options in ({}, {"attn_mask": mask, "is_causal": True}):
        out, weights = attention(q, k, k, **options, backend=backend, need_weights=True)
        assert (out.shape, weights.shape) == ((0, H, L, D), (0, H, L, S))
        out.sum().backward()


def test_a_call_on_tensors_without_values_has_a_shape():
    for without_values in (FakeTensorMode(), torch.device("meta")):
        with without_values:  # whatever looks at a value fails
            q, k = torch.randn(B, H, L, D), torch.randn(B, HKV, S, D)
            mask = mx.Padding(torch.ones(B, S).bool()) & mx.Documents(torch.ones(B, S).long()) & mx.Causal()
            for backend in ("math", "sdpa", "chunked"):
                assert attention(q, k, k, mask, backend=backend).shape == (B, H, L, D)
            network = mx.DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=1))
            assert network(torch.ones(2, 5, dtype=torch.long)).shape == (2, 5, 11)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule for its CPU kernel
@pytest.mark.parametrize("hidden", ["key", "value"])
def test_a_hidden_nan_does_not_leak_where_values_cannot_be_looked_at(hidden):
    leaves = tensors(torch.float32)
    mask = mx.Padding(LEFT) & mx.Causal()

    def total(key, value):
        return attention(leaves["query"], key, value, mask, backend="sdpa").sum()

    given = {name: leaves[name].detach().clone() for name in ("key", "value")}
    want = torch.func.grad(total, argnums=(0, 1))(*given.values())
    given[hidden][0, :, :2] = math.nan
    stacked = [tensor.expand(3, *tensor.shape) for tensor in given.values()]
    for got, one in zip(torch.func.vmap(torch.func.grad(total, argnums=(0, 1)))(*stacked), want, strict=True):
        torch.testing.assert_close(got, one.expand_as(got))


# ---- torch.func and forward derivatives

NEEDS = {  # calls for which auto takes chunked where nothing is around them
    "soft-cap": {"softcap": 0.7},
    "sinks": {"sinks": torch.linspace(-1, 1, H)},
    "window": {"attn_mask": mx.SlidingWindow(2) & mx.Causal()},
    "a bias that learns": {"attn_bias": torch.ones(L, L, requires_grad=True)},
    "torch's kernel": {"is_causal": True},
}


def dual(f, x, tangent):
    with fwAD.dual_level():
        return fwAD.unpack_dual(f(fwAD.make_dual(x, tangent))).tangent


TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "dual": lambda f, x: dual(f, x, x.cos()),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).square().sum())(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda x: torch.func.grad(lambda y: f(y).square().sum())(x).square().sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule for its CPU kernel
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's forward derivatives use it
@pytest.mark.usefixtures("chunked_from_the_start")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("kind", NEEDS)
def test_auto_computes_what_a_transform_asks_for_as_math_does(name, kind):
    x = torch.randn(1, H, L, D, dtype=torch.float64)
    calls = [functools.partial(attention, **NEEDS[kind], backend=backend) for backend in ("auto", "math")]
    got, want = (TRANSFORMS[name](lambda x, call=call: call(x, x.sin(), x), x) for call in calls)
    assert want.any()
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_what_a_mask_remembers_of_a_transform_does_not_outlive_it(backend):
    x, mask = torch.randn(1, H, L, D), mx.SlidingWindow(2) & mx.Causal()
    for name in ("grad of grad", "grad", "grad of grad"):
        TRANSFORMS[name](lambda x: attention(x, x, x, attn_mask=mask, backend=backend), x)
    assert attention(x, x, x, attn_mask=mask, backend=backend).isfinite().all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's forward derivatives use it
@pytest.mark.usefixtures("chunked_from_the_start")
@pytest.mark.parametrize(
    ("name", "backend"), [*((n, "chunked") for n in TRANSFORMS), ("jvp", "sdpa"), ("hessian", "sdpa"), ("dual", "sdpa")]
)
def test_a_named_backend_refuses_a_transform_that_it_lacks(name, backend):
    x = torch.randn(1, H, L, D)
    with pytest.raises(NotImplementedError, match=f"backend '{backend}' cannot serve this call: .*derivatives.* math can"):
        TRANSFORMS[name](lambda x: attention(x, x, x, is_causal=True, backend=backend), x)


@pytest.mark.parametrize("mask", [None, mx.Causal(), mx.Padding(LEFT)], ids=str)
@pytest.mark.parametrize("size", [-1e9, -1e5, 1e9])
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_the_weights_of_the_backward_pass_sum_to_one_where_a_large_bias_is_on_all_keys_that_a_query_sees(backend, size, mask):
    query, key, value = tensors(torch.float32).values()
    bias = torch.zeros(L, S).index_fill(0, torch.tensor([1]), size)
    bias[:, : S - L + 1] = size  # under the causal mask, all that the first query sees
    bias[:, -1] = -torch.inf
    attention(query, key, value, mask, attn_bias=bias, backend=backend).sum().backward()
    assert value.grad.sum().item() == pytest.approx(B * H * L * D, rel=1e-5)
    reports = mx.explain_backends(query, key, value, mask, attn_bias=bias)
    assert not reports[0].fused and "large bias" in reports[0].reason
    with torch.no_grad():
        assert mx.explain_backends(query, key, value, mask, attn_bias=bias)[0].fused  # nothing is wrong with the output
    assert mx.explain_backends(query, key, value, mask, attn_bias=bias.clamp(min=-1e3, max=1e3))[0].fused


def test_replaced_scores_of_minus_infinity_hide_keys():
    query, key, value = tensors(torch.float64).values()
    call = make_call(query, key, value, LEFT[:, None, None])
    weights = mx.attention_weights(replace(call, scores=torch.zeros(B, H, L, S).masked_fill(~EMPTY, -torch.inf)))
    visible = EMPTY & LEFT[:, None, None]
    assert torch.equal(weights > 0, visible.expand(B, H, L, S)) and torch.equal(weights.sum(-1) > 0.99, visible.any(-1))


# ---- choice, explanation, registration


def test_an_explanation_names_every_backend_the_reason_and_what_runs_and_runs_nothing():
    q, mask = torch.randn(1, 2, 3, 4), mx.Padding(torch.ones(1, 3, dtype=torch.bool))
    for backend, running in (("auto", ["math"]), ("sdpa", [])):  # a named backend that refuses is explained, not raised
        with OpRecorder() as recorder:
            reports = {r.name: r for r in mx.explain_backends(q, q, q, mask, softcap=3.0, backend=backend)}
        assert list(reports) == ["sdpa", "chunked", "math", "flex"]
        assert [name for name, report in reports.items() if report.auto] == running  # which says why auto chose it
        assert [name for name, report in reports.items() if report.runs] == running
        assert not reports["sdpa"].can and "soft-cap" in reports["sdpa"].reason
        assert reports["math"].can and not reports["math"].fused
        assert recorder.ops == []


def test_a_registered_backend_serves_calls_by_name_only_until_it_is_unregistered():
    seen, q = [], torch.randn(1, 2, 3, 4)
    options = {"why_not": lambda call: "no window" if isinstance(call.mask, mx.SlidingWindow) else None}
    mx.register_backend("mine", lambda call: seen.append(call) or call.value, falls_back=lambda call: "step by step", **options)
    try:
        out, weights = attention(q, q, q, scale=0.3, is_causal=True, backend="mine", need_weights=True)
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 3))
        assert out is q and seen[0].scale == 0.3 and isinstance(seen[0].mask, mx.Causal) and seen[0].shape == (1, 2, 3, 3)
        assert mx.DotProductAttention(backend="mine")(make_call(q, q, q)) is q
        attention(q, q, q)
        assert len(seen) == 2  # auto does not take it
        with pytest.raises(NotImplementedError, match=r"'mine' .* no window; sdpa, chunked, math can"):
            attention(q, q, q, mx.SlidingWindow(2), backend="mine")
        report = mx.explain_backends(q, q, q, backend="mine")[-1]
        assert (report.name, report.can, report.fused, report.reason) == ("mine", True, False, "step by step")
        for need_weights in (False, True):
            with pytest.raises(RuntimeError, match="step by step"):
                mx.DotProductAttention(backend="mine", strict=True)(make_call(q, q, q, need_weights=need_weights))
        assert mx.backend_names()[0] == "auto" and mx.backend_names()[-1] == "mine"
    finally:
        mx.unregister_backend("mine")
    assert "mine" not in mx.backend_names()


def test_names_that_are_taken_unknown_or_ours_are_refused():
    taken, ours = (lambda name: mx.register_backend(name, len)), mx.unregister_backend
    for name, change in (("math", taken), ("auto", taken), ("nobody", ours), ("math", ours)):
        with pytest.raises(ValueError, match=f"backend '{name}'"):
            change(name)
