"""What all efficient cores share: the call of the exact core, refusals, dtypes, masks; and Linformer's own formula."""

import pytest
import torch

import minitx.nn as mx
from minitx.nn.efficient import EfficientAttention, LinearAttention, LinformerAttention, PerformerAttention, approximation_error
from minitx.nn.functional import make_call
from minitx.testing import DTYPES

B, H, HKV, L, S, D, DV = 2, 6, 3, 11, 13, 5, 7
BUILD = {
    "linear": lambda: LinearAttention(chunk_size=4),
    "performer": lambda: PerformerAttention(D, chunk_size=4),
    "linformer": lambda: LinformerAttention(S, 3),
}
CAUSAL = ("linear", "performer")
REAL = torch.ones(B, S, dtype=torch.bool)
QUERY_BY_QUERY = (mx.SlidingWindow(3) & mx.Padding(REAL), mx.Dense(REAL[0].expand(L, S)), mx.Padding(REAL) | mx.Causal())


def draw(num_queries=L, num_keys=S, dtype=torch.float32, size=1.0):
    """Query, key and value; ``size`` is that of queries and keys."""
    shapes = {(B, H, num_queries, D): size, (B, HKV, num_keys, D): size, (B, HKV, num_keys, DV): 1.0}
    return tuple((x * torch.randn(shape, dtype=torch.float64)).to(dtype).requires_grad_() for shape, x in shapes.items())


def run(core, tensors, mask=None, **options):
    return core(make_call(*tensors, mask, **options))


@pytest.fixture(params=BUILD)
def core(request):
    return BUILD[request.param]()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float_dtype_is_computed_in_at_least_float32_under_autocast_too(core, dtype):
    tensors = [x.detach() for x in draw(dtype=dtype)]
    out = run(core, tensors)
    assert out.dtype == dtype
    if dtype != torch.float64:
        assert torch.equal(out, run(core, [x.float() for x in tensors]).to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(core, tensors), out)


@pytest.mark.parametrize(  # Linformer's columns belong to positions: padding must stand at the end
    ("name", "side"), [(name, side) for name in BUILD for side in ("right", "left") if (name, side) != ("linformer", "left")]
)
def test_padding_changes_nothing_nan_or_not(name, side):
    q, k, v = (x.detach().double() for x in draw(L, L))
    real = torch.arange(L + 4) < L if side == "right" else torch.arange(L + 4) >= 4
    padded = []
    for x in (q, k, v):
        filler = torch.full_like(x[:, :, :4], 0.5 if x is q else torch.nan)
        padded.append(torch.cat((x, filler) if side == "right" else (filler, x), 2))
    core = LinformerAttention(L + 4, 3) if name == "linformer" else BUILD[name]()
    for mask in [None, mx.Causal()] if name in CAUSAL else [None]:
        padding = mx.Padding(real.expand(B, -1))
        got = run(core, padded, padding if mask is None else mask & padding)
        torch.testing.assert_close(got[:, :, real], run(core, (q, k, v), mask), rtol=0, atol=1e-12)


def test_a_batch_row_without_a_real_key_is_zero_with_zero_gradient(core):
    tensors = draw()
    out = run(core, tensors, mx.Padding(torch.tensor([[False] * S, [True] * S])))
    grads = torch.autograd.grad(out.sum(), tensors)
    assert not out[0].any()
    assert out[1].any()
    assert not any(grad[0].any() for grad in grads)
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize(
    ("name", "options", "refused"),
    [
        *((name, {"attn_bias": torch.zeros(L, S)}, "attn_bias") for name in ("linear", "linformer")),
        *((name, {"need_weights": True}, "need_weights") for name in ("linear", "linformer")),
        ("linear", {"sinks": torch.zeros(H)}, "sinks"),
        ("linear", {"softcap": 3.0}, "softcap"),
        ("linear", {"dropout_p": 0.1}, "dropout"),
        *((name, {"mask": mask}, "mask") for name in ("linear", "linformer") for mask in QUERY_BY_QUERY),
        *(("linformer", {"mask": mask}, "causal") for mask in (mx.Causal(), mx.Causal() & mx.Padding(REAL))),
    ],
)
def test_what_the_mathematics_has_no_place_for_is_refused(name, options, refused):
    with pytest.raises(ValueError, match=refused):
        run(BUILD[name](), draw(), **options)
    if refused in ("dropout", "softcap", "sinks"):  # and no layer is built with it
        with pytest.raises(ValueError, match=refused):
            mx.MultiHeadAttention(12, 3, core=BUILD[name](), **{refused: True if refused == "sinks" else 0.1})


def test_linformer_equals_its_formula_and_trains_both_mixes():
    core = LinformerAttention(S + 2, 3).double()
    q, k, v = draw(dtype=torch.float64)
    slots, contents = (
        torch.einsum("ks,bhsd->bhkd", mix[:, :S], x).repeat_interleave(H // HKV, 1)
        for mix, x in ((core.key_mix, k), (core.value_mix, v))
    )
    scores = 2.0 * torch.tanh(0.3 * torch.einsum("bhid,bhkd->bhik", q, slots) / 2.0)
    out = run(core, (q, k, v), scale=0.3, softcap=2.0)
    torch.testing.assert_close(out, scores.softmax(-1) @ contents, rtol=0, atol=1e-13)
    grads = torch.autograd.grad(out.sum(), (core.key_mix, core.value_mix))
    assert all(grad[:, :S].all() and not grad[:, S:].any() for grad in grads)
    assert sorted(core.state_dict()) == ["key_mix", "value_mix"]
    assert abs(LinformerAttention(400, 100).key_mix.std() * 20 - 1) < 0.05


def test_the_error_is_the_distance_to_exact_attention_under_the_same_mask_and_scale():
    q, k, v = (x.detach() for x in draw(L, L, torch.float64))
    assert approximation_error(mx.DotProductAttention(), q, k, v, mask=mx.Causal())["relative_error"] < 1e-14

    class Zero(EfficientAttention):
        def attend(self, call):
            return torch.zeros(*call.shape[:3], call.value.shape[3], dtype=call.value.dtype)

    core = Zero().train()
    error = approximation_error(core, q, k, v, mask=mx.Causal(), scale=1.0)
    want = mx.reference_attention(make_call(q, k, v, mx.Causal(), scale=1.0))
    assert error["relative_error"] == pytest.approx(1.0) and core.training
    torch.testing.assert_close(error["relative_error_per_head"], torch.ones(H, dtype=torch.float64))
    torch.testing.assert_close(error["max_abs_error_per_head"], want.abs().amax((0, 2, 3)))
