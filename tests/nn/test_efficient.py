"""What all cores share: the call of the exact core, refusals, dtypes, masks; and the formula of each."""

import math

import pytest
import torch
from sizes import assert_same, assert_same_with_gradients, small_model, tokens
from torch.nn.utils import prune

import minitx.nn as mx
from minitx.check.reference import DTYPES
from minitx.nn.counting import fit_exponent
from minitx.nn.efficient import (
    AdditiveAttention,
    EfficientAttention,
    LinearAttention,
    LinformerAttention,
    PerformerAttention,
    approximation_error,
)
from minitx.nn.functional import make_call

B, H, HKV, L, S, D, DV = 2, 6, 3, 11, 13, 5, 7
BUILD = {
    "linear": lambda: LinearAttention(chunk_size=4),
    "performer": lambda: PerformerAttention(D, chunk_size=4),
    "linformer": lambda: LinformerAttention(S, 3),
    "additive": lambda: AdditiveAttention(D, 4),
}
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
    for mask in [None, mx.Causal()] if name != "linformer" else [None]:
        padding = mx.Padding(real.expand(B, -1))
        got = run(core, padded, padding if mask is None else mask & padding)
        torch.testing.assert_close(got[:, :, real], run(core, (q, k, v), mask), rtol=0, atol=1e-12)


def test_a_batch_row_without_a_real_key_is_zero_with_zero_gradient(core):
    tensors = draw()
    out = run(core, tensors, mx.Padding(torch.tensor([[False] * S, [True] * S])))
    grads = torch.autograd.grad(out.sum(), tensors)
    assert out[1].any() and not any(tensor[0].any() for tensor in (out, *grads))
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


# ---- additive attention


def additive_kernel(core):
    """exp(z) with z = c · vᵀ tanh(W q + U k), Bahdanau et al. 2015, §A.1.2."""

    def kernel(q, k, scale):
        mapped_q, mapped_k = q @ core.query_map.weight.T, k.repeat_interleave(H // HKV, 1) @ core.key_map.weight.T
        return (scale * torch.tanh(mapped_q[:, :, :, None] + mapped_k[:, :, None]) @ core.energy.weight[0]).exp()

    return kernel


def test_additive_attention_equals_its_formula_and_trains_all_its_weights():
    core = AdditiveAttention(D, 4).double()
    q, k, v = draw(dtype=torch.float64)
    visible = torch.rand(B, H, L, S) < 0.6
    visible[:, :, 2] = False  # a query that sees nothing
    visible[..., 3] = False  # and a key that nobody sees
    with torch.no_grad():
        k[:, :, 3] = v[:, :, 3] = torch.nan
    out, weights = run(core, (q, k, v), visible, scale=0.7, need_weights=True)
    assert_same(out, quadratic(additive_kernel(core)(q, k, 0.7), v.nan_to_num(), visible), tolerance=1e-13)
    torch.testing.assert_close(weights.sum(-1), visible.any(-1).double())
    out.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in core.parameters())
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_additive_attention_widens_its_weights_and_takes_a_bias_of_another_dtype(dtype):
    core, low = AdditiveAttention(D, 4), AdditiveAttention(D, 4)
    low.load_state_dict(core.to(dtype).state_dict())  # the same rounded weights, in float32
    tensors, bias = draw(), torch.randn(L, S, dtype=torch.float64)
    assert torch.equal(run(core, tensors, attn_bias=bias), run(low, tensors, attn_bias=bias.float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", ["query_map", "key_map", "energy"])
def test_what_wraps_a_layer_of_additive_attention_acts(part, dtype):
    core, tensors = AdditiveAttention(D, 4).to(dtype), draw(dtype=dtype)
    prune.identity(getattr(core, part), "weight")
    before = run(core, tensors)
    getattr(core, part).weight_mask.zero_()
    assert not torch.equal(run(core, tensors), before)


def test_a_model_is_built_with_additive_attention():
    options = {"window": 3, "sinks": True, "softcap": 2.0, "position": "alibi", "num_kv_heads": 1, "dropout": 0.5}
    model, ids = small_model(attention="additive", scale="unscaled", **options).eval(), tokens(2, 7)
    assert_same(model(ids)[:, :4], model(ids[:, :4]))


# ---- linear attention and Performer: their formula, the estimate's statistics, numbers that stay finite


def quadratic(kernel, value, visible):
    """Σ_j s_ij v_j / Σ_j s_ij over visible keys, from the whole matrix s (B, H, L, S)."""
    weights = torch.where(visible, kernel, 0.0)
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.where(visible, weights, 0.0).nan_to_num() @ value.repeat_interleave(H // HKV, 1)


def elu_kernel(q, k, scale):
    phi_q, phi_k = torch.nn.functional.elu(q * scale) + 1, torch.nn.functional.elu(k) + 1
    return phi_q @ phi_k.repeat_interleave(H // HKV, 1).transpose(-1, -2)


def favor_kernel(core):
    def kernel(q, k, scale):
        omega, root = core.projection.double(), math.sqrt(abs(scale))
        q, k = (q * math.copysign(root, scale))[..., None, :], (k * root)[..., None, :]
        phi_q, phi_k = (torch.exp((omega * x).sum(-1) - 0.5 * (x * x).sum(-1)) / math.sqrt(len(omega)) for x in (q, k))
        return torch.einsum("bhim,bhjm->bhij", phi_q, phi_k.repeat_interleave(H // HKV, 1))

    return kernel


@pytest.mark.parametrize(("chunk_size", "scale"), [(1, D**-0.5), (4, -0.5), (64, 1.0), (4, 0.0)])
@pytest.mark.parametrize("shape", [(13, 13), (5, 13), (1, 13), (13, 5)])
@pytest.mark.parametrize("kind", ["linear", "performer"])
def test_it_equals_its_own_quadratic_formula_with_gradients(kind, shape, chunk_size, scale):
    L, S = shape
    core = LinearAttention(chunk_size=chunk_size) if kind == "linear" else PerformerAttention(D, chunk_size=chunk_size)
    kernel = elu_kernel if kind == "linear" else favor_kernel(core)
    real = torch.ones(B, S, dtype=torch.bool)
    real[0, S // 2 :] = real[1, :2] = False
    for mask in [None, mx.Padding(real)] + ([mx.Causal(), mx.Causal() & mx.Padding(real)] if L <= S else []):
        q, k, v = draw(L, S, torch.float64)
        visible = torch.ones(B, 1, L, S, dtype=torch.bool)
        visible = visible if mask is None else visible & mask.dense(L, S, batch_size=B)
        full = visible.any(-1, keepdim=True)
        got = run(core, (q, k, v), mask, scale=scale)
        exact = torch.where(full, quadratic(kernel(q, k, scale), v, visible | ~full), 0.0)
        assert_same(got, exact)
        assert_same_with_gradients(got, exact, (q, k, v), tolerance=1e-11)


@pytest.mark.parametrize("kind", ["linear", "performer"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_magnitude_of_queries_and_keys_gives_a_number_that_is_not_finite(kind, dtype):
    core = BUILD[kind]()
    for size in (0.0, 30.0, 1000.0):
        for mask in (None, mx.Causal()):
            tensors = draw(11, 11, dtype, size)
            out = run(core, tensors, mask, scale=1.0)
            assert out.abs().max() <= tensors[2].abs().max() * 1.01  # a weighted mean; false of a NaN
            assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(out.sum(), tensors))


def test_very_negative_queries_and_keys_keep_their_weights():
    """elu(x) + 1 is exp(x) below zero: 1e-52 each here, beyond float32, and still 1 : e after division."""
    q, k, v = (torch.tensor(x).view(1, 1, -1, 1) for x in ([-120.0], [-120.0, -119.0], [0.0, 1.0]))
    for mask in (None, mx.Causal()):
        assert run(LinearAttention(), (q, k, v), mask, scale=1.0).item() == pytest.approx(math.e / (1 + math.e), rel=1e-5)


@pytest.mark.parametrize(("head_dim", "num_features"), [(5, 13), (8, 64)])
def test_features_are_orthogonal_within_blocks_with_the_lengths_of_gaussian_vectors(head_dim, num_features):
    core = PerformerAttention(head_dim, num_features=num_features)
    assert core.projection.shape == (num_features, head_dim)
    for block in core.projection.double().split(head_dim):
        gram = block @ block.T
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-5
    lengths = torch.cat([(core.redraw(), core.projection.square().sum(1))[1] for _ in range(1000 // num_features)])
    spread = math.sqrt(2 * head_dim / len(lengths))  # the variance of chi-squared with D degrees of freedom is 2 D
    assert abs(lengths.mean() - head_dim) < 4 * spread


@pytest.mark.parametrize("orthogonal", [True, False])
def test_the_error_of_performer_falls_like_one_over_the_root_of_the_features(orthogonal):
    """Where the features are dense enough for a law of averages: q·k/√D of a few tenths. Beyond, it falls more slowly."""
    sizes = (32, 128, 512, 2048)
    q, k, v = (0.3 * x.detach() for x in draw(24, 24, torch.float64))
    errors = []
    for m in sizes:
        core = PerformerAttention(D, num_features=m, orthogonal=orthogonal)
        seeds = [(core.redraw(), approximation_error(core, q, k, v, mask=mx.Causal())["relative_error"])[1] for _ in range(12)]
        errors.append(sum(seeds) / len(seeds))
    assert -0.6 < fit_exponent(sizes, errors) < -0.4
    assert errors[-1] < 0.02


def test_the_draw_follows_the_generator_and_travels_in_the_checkpoint():
    first, second = (PerformerAttention(D, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first.projection, second.projection)
    old = first.projection.clone()
    first.redraw()
    assert not torch.equal(first.projection, old)
    assert list(first.state_dict()) == ["projection"]
    second.load_state_dict(first.state_dict())
    tensors = draw(7, 7, torch.float64)
    assert torch.equal(run(first, tensors), run(second, tensors))
