"""What all efficient cores share: the call of the exact core, refusals, dtypes, masks; and Linformer's own formula."""

import re

import pytest
import torch

from minitx.nn import (
    Causal,
    Documents,
    DotProductAttention,
    MultiHeadAttention,
    Padding,
    PrefixLM,
    SlidingWindow,
    reference_attention,
)
from minitx.nn.efficient import (
    CORE_KINDS,
    BlockSparseAttention,
    EfficientAttention,
    LinearAttention,
    LinformerAttention,
    PerformerAttention,
    SlidingWindowAttention,
    approximation_error,
    build_core,
)
from minitx.nn.masks import as_mask

B, H, HKV, L, S, D, DV = 2, 6, 3, 11, 13, 5, 7
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BUILD = {
    "window": lambda **options: SlidingWindowAttention(5, block_size=4, **options),
    "block-sparse": lambda **options: BlockSparseAttention(block_size=4, **options),
    "linear": lambda **options: LinearAttention(chunk_size=4, **options),
    "performer": lambda **options: PerformerAttention(D, chunk_size=4, **options),
    "linformer": lambda **options: LinformerAttention(S, 3, **options),
}
EXACT, CAUSAL = ("window", "block-sparse"), ("window", "block-sparse", "linear", "performer")
KERNELS = ("linear", "performer")


def draw(num_queries=L, num_keys=S, dtype=torch.float32):
    shapes = ((B, H, num_queries, D), (B, HKV, num_keys, D), (B, HKV, num_keys, DV))
    return tuple(torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)


@pytest.fixture(params=BUILD)
def name(request):
    return request.param


@pytest.fixture
def core(name):
    return BUILD[name]()


def test_it_is_a_core_of_multi_head_attention(name, core):
    exact = MultiHeadAttention(12, H, num_kv_heads=HKV, head_dim=D)
    attention = MultiHeadAttention(12, H, num_kv_heads=HKV, head_dim=D, core=core)
    attention.load_state_dict(exact.state_dict(), strict=False)
    x, real = torch.randn(B, L, 12, requires_grad=True), torch.arange(L).expand(B, L) < L - 2
    out = attention(x, key_mask=real, is_causal=name in CAUSAL)
    assert out.shape == (B, L, 12)
    out.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in attention.parameters())
    if name in EXACT:
        window = SlidingWindow(5) if name == "window" else None
        torch.testing.assert_close(out, exact(x, attn_mask=window, key_mask=real, is_causal=True))


def test_grouped_heads_wide_values_and_cross_attention_have_the_shape_of_the_exact_core(core):
    q, k, v = draw()
    assert core(q, k, v).shape == DotProductAttention()(q, k, v).shape == (B, H, L, DV)


def test_grouped_heads_equal_repeated_heads(core):
    q, k, v = draw(dtype=torch.float64)
    repeated = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    torch.testing.assert_close(core(q, k, v), core(q, *repeated), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float_dtype_is_computed_in_at_least_float32(core, dtype):
    q, k, v = (x.detach() for x in draw(dtype=dtype))
    out = core(q, k, v)
    assert out.dtype == dtype
    if dtype != torch.float64:
        assert torch.equal(out, core(q.float(), k.float(), v.float()).to(dtype))


def test_autocast_changes_no_bit(core):
    q, k, v = draw()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(core(q, k, v), core.forward(q, k, v))
        inside = core(q, k, v)
    assert torch.equal(inside, core(q, k, v))


def test_training_evaluation_and_no_grad_are_one_path(core):
    q, k, v = draw()
    train, evaluation = core.train()(q, k, v), core.eval()(q, k, v)
    with torch.no_grad():
        assert torch.equal(train, core(q, k, v))
    assert torch.equal(train, evaluation)


def test_the_scale_defaults_to_one_over_the_root_of_the_width(core):
    q, k, v = draw()
    assert torch.equal(core(q, k, v), core(q, k, v, scale=D**-0.5))
    assert not torch.allclose(core(q, k, v), core(q, k, v, scale=1))
    assert not torch.allclose(core(q, k, v, scale=-1.0), core(q, k, v, scale=1.0))


@pytest.mark.parametrize("name", CAUSAL)
def test_future_tokens_receive_no_gradient_and_change_no_bit(name):
    core = BUILD[name]()
    q, k, v = draw(L, L)
    out = core(q, k, v, mask=Causal())
    for i in range(L):
        grads = torch.autograd.grad(out[:, :, i].square().sum(), (q, k, v), retain_graph=True)
        assert not any(grad[:, :, i + 1 :].any() for grad in grads)
        assert not grads[0][:, :, :i].any()
        assert grads[2][:, :, i].any()
    other = [torch.cat((x[:, :, :6], torch.randn_like(x[:, :, 6:])), 2) for x in (q, k, v)]
    assert torch.equal(core(*other, mask=Causal())[:, :, :6], out[:, :, :6])


@pytest.mark.parametrize(  # Linformer's columns belong to positions: padding must stand at the end
    ("name", "side"), [(name, side) for name in BUILD for side in ("right", "left") if (name, side) != ("linformer", "left")]
)
@pytest.mark.parametrize("poison", [0.5, torch.nan])
def test_padding_changes_nothing(name, side, poison):
    q, k, v = (x.detach().double() for x in draw(L, L))
    masks = [None, Causal()] if name in CAUSAL else [None]
    real = torch.arange(L + 4) < L if side == "right" else torch.arange(L + 4) >= 4
    padded = []
    for x in (q, k, v):
        filler = torch.full_like(x[:, :, :4], 0.5 if x is q else poison)
        padded.append(torch.cat((x, filler) if side == "right" else (filler, x), 2))
    core = LinformerAttention(L + 4, 3) if name == "linformer" else BUILD[name]()
    for mask in masks:
        padding = Padding(real.expand(B, -1))
        got = core(*padded, mask=padding if mask is None else mask & padding)
        torch.testing.assert_close(got[:, :, real], core(q, k, v, mask=mask), rtol=0, atol=1e-12)


def test_a_batch_row_without_a_real_key_is_zero_with_zero_gradient(core):
    q, k, v = draw()
    real = torch.tensor([[False] * S, [True] * S])
    out = core(q, k, v, mask=Padding(real))
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not out[0].any()
    assert out[1].any()
    assert not any(grad[0].any() for grad in grads)
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_gradients_equal_finite_differences(name, core):
    q, k, v = (torch.randn(1, heads, 6, 5, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    mask = Padding(torch.tensor([[False] + [True] * 5]))
    mask = mask & Causal() if name in CAUSAL else mask
    assert torch.autograd.gradcheck(lambda *x: core(*x, mask=mask, scale=0.8), (q, k, v))


def test_nothing_is_kept_on_the_module(core):
    before = {key: id(value) for key, value in vars(core).items()}
    state = {key: value.clone() for key, value in core.state_dict().items()}
    core(*draw())
    assert {key: id(value) for key, value in vars(core).items()} == before
    assert all(torch.equal(core.state_dict()[key], value) for key, value in state.items())


BIAS, SINKS = {"attn_bias": torch.zeros(L, S)}, {"sinks": torch.zeros(H)}


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        *((name, BIAS, "no place for a number that belongs to a pair of positions") for name in KERNELS),
        *((name, SINKS, "no softmax to which a logit could be added") for name in KERNELS),
        *((name, {"need_weights": True}, "it never forms weights") for name in KERNELS),
        ("linformer", BIAS, "a number that belongs to one key has no score"),
        ("linformer", {"need_weights": True}, "weights belong to slots"),
    ],
)
def test_what_the_mathematics_has_no_place_for_is_refused_with_the_reason(name, options, reason):
    (option,) = options
    with pytest.raises(ValueError, match=rf"Attention cannot honour {option}: .*{reason}"):
        BUILD[name]()(*draw(), **options)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("option", "setting"), [("dropout", 0.1), ("softcap", 3.0)])
def test_kernels_refuse_dropout_and_softcap_when_built(name, option, setting):
    with pytest.raises(ValueError, match=rf"cannot honour {option}: it forms no (weights|scores) that could be"):
        BUILD[name](**{option: setting})
    assert BUILD[name](dropout=0.0, softcap=None) is not None


@pytest.mark.parametrize("name", [*KERNELS, "linformer"])
@pytest.mark.parametrize(
    "mask",
    [
        SlidingWindow(3),
        SlidingWindow(3) & Padding(torch.ones(B, S, dtype=torch.bool)),
        PrefixLM(4),
        Documents(torch.zeros(B, S, dtype=torch.long)),
        as_mask(torch.ones(L, S, dtype=torch.bool)),
        Padding(torch.ones(B, S, dtype=torch.bool)) | Causal(),
    ],
    ids=["window", "window and padding", "prefix", "documents", "dense", "union"],
)
def test_masks_that_differ_from_query_to_query_are_refused(name, mask):
    with pytest.raises(ValueError, match=r"Attention cannot honour the mask \w+: it sums keys up before a query meets them"):
        BUILD[name]()(*draw(), mask=mask)


def test_linformer_refuses_to_be_causal():
    for mask in (Causal(), Causal() & Padding(torch.ones(B, S, dtype=torch.bool))):
        with pytest.raises(ValueError, match="cannot be causal: every slot mixes all positions, the future among them"):
            BUILD["linformer"]()(*draw(), mask=mask)
    with pytest.raises(ValueError, match="cannot be causal"):
        MultiHeadAttention(12, 3, core=LinformerAttention(9, 2))(torch.randn(1, 5, 12), is_causal=True)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SlidingWindowAttention(0), "window must be a positive whole number, got 0"),
        (lambda: SlidingWindowAttention(2.5), "window must be a positive whole number, got 2.5"),
        (lambda: BlockSparseAttention(block_size=True), "block_size must be a positive whole number, got True"),
        (lambda: LinearAttention(chunk_size=0), "chunk_size must be a positive whole number, got 0"),
        (lambda: PerformerAttention(0), "head_dim and num_features must be positive, got 0"),
        (lambda: PerformerAttention(4, num_features=0), "head_dim and num_features must be positive, got 4 and 0"),
        (lambda: LinformerAttention(8, 0), "max_len and num_slots must be positive, got 8 and 0"),
        (lambda: BlockSparseAttention(dropout=1.0), r"dropout must lie in \[0, 1\), got 1.0"),
        (lambda: BlockSparseAttention(softcap=-1.0), "softcap must be positive and finite .* got -1.0"),
    ],
)
def test_a_bad_setting_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda q, k, v: {"query": q[0]},
            ValueError,
            r"query must have shape \(batch, heads, length, width\), got \(6, 11, 5\)",
        ),
        (lambda q, k, v: {"key": k[:, :0]}, ValueError, "key must have at least one head, position and channel"),
        (lambda q, k, v: {"query": q[:0], "key": k[:0], "value": v[:0]}, ValueError, "query must have at least one row in its"),
        (lambda q, k, v: {"key": k[..., :4]}, ValueError, "key must have the query's width D = 5, got 4"),
        (
            lambda q, k, v: {"key": k[:, [0, 1, 2, 0]], "value": v[:, [0, 1, 2, 0]]},
            ValueError,
            "the number of key heads must divide the number of query heads, got 4 and 6",
        ),
        (lambda q, k, v: {"value": v[:1]}, ValueError, r"query, key and value must have one batch size, got \(2, 2, 1\)"),
        (
            lambda q, k, v: {"value": v[:, :, 1:]},
            ValueError,
            r"key and value must agree in heads and length, got \(3, 13\) and \(3, 12\)",
        ),
        (lambda q, k, v: {"value": v.double()}, TypeError, "value is torch.float64 on cpu, but query is torch.float32 on cpu"),
        (lambda q, k, v: {"query": q.long()}, TypeError, "query must be a floating-point tensor, got torch.int64"),
        (lambda q, k, v: {"scale": "unscaled"}, TypeError, "scale must be a number or None"),
        (lambda q, k, v: {"scale": float("inf")}, ValueError, "scale must be finite"),
        (lambda q, k, v: {"mask": Padding(torch.ones(B, L, dtype=torch.bool))}, ValueError, "key_mask must have shape"),
    ],
)
def test_a_bad_argument_is_named(core, change, error, message):
    q, k, v = draw()
    with pytest.raises(error, match=message):
        core(**({"query": q, "key": k, "value": v} | change(q, k, v)))


def test_sizes_that_a_core_was_not_built_for_are_refused():
    q, k, v = draw()
    with pytest.raises(ValueError, match="query must have the width head_dim = 4, got 5"):
        PerformerAttention(4)(q, k, v)
    with pytest.raises(ValueError, match="mixes at most max_len=12 keys, got 13"):
        LinformerAttention(12, 3)(q, k, v)
    with pytest.raises(ValueError, match=r"sinks must have shape \(H,\) = \(6,\), got \(3,\)"):
        BlockSparseAttention()(q, k, v, sinks=torch.zeros(3))
    with pytest.raises(NotImplementedError, match="EfficientAttention defines no attend"):
        EfficientAttention()(q, k, v)


def test_linformer_equals_exact_attention_with_one_slot_a_key():
    core = LinformerAttention(S, S).double()
    torch.nn.init.eye_(core.key_mix), torch.nn.init.eye_(core.value_mix)
    q, k, v = draw(dtype=torch.float64)
    sinks = torch.randn(H, dtype=torch.float64)
    for options in ({"scale": 0.4}, {"scale": -1.0, "sinks": sinks}):
        torch.testing.assert_close(core(q, k, v, **options), reference_attention(q, k, v, **options), rtol=0, atol=1e-13)


def test_linformer_equals_its_formula_and_trains_both_mixes():
    core = LinformerAttention(S + 2, 3, softcap=2.0).double()
    q, k, v = draw(dtype=torch.float64)
    slots, contents = (
        torch.einsum("ks,bhsd->bhkd", mix[:, :S], x).repeat_interleave(H // HKV, 1)
        for mix, x in ((core.key_mix, k), (core.value_mix, v))
    )
    scores = 2.0 * torch.tanh(0.3 * torch.einsum("bhid,bhkd->bhik", q, slots) / 2.0)
    out = core(q, k, v, scale=0.3)
    torch.testing.assert_close(out, scores.softmax(-1) @ contents, rtol=0, atol=1e-13)
    grads = torch.autograd.grad(out.sum(), (core.key_mix, core.value_mix))
    assert all(grad[:, :S].all() and not grad[:, S:].any() for grad in grads)
    assert sorted(core.state_dict()) == ["key_mix", "value_mix"]
    assert abs(LinformerAttention(400, 100).key_mix.std() * 20 - 1) < 0.05


def test_the_error_of_an_exact_core_is_rounding_and_of_a_window_what_it_leaves_out():
    q, k, v = (x.detach() for x in draw(L, L, torch.float64))
    full = approximation_error(BlockSparseAttention(block_size=4), q, k, v, mask=Causal())
    assert full["relative_error"] < 1e-14
    window = SlidingWindowAttention(3, block_size=4)
    assert approximation_error(window, q, k, v, mask=SlidingWindow(3))["relative_error"] < 1e-14
    error = approximation_error(window, q, k, v, mask=Causal(), scale=1.0)
    exact = reference_attention(q, k, v, mask=Causal(), scale=1.0)
    gap = reference_attention(q, k, v, mask=Causal() & SlidingWindow(3), scale=1.0) - exact
    assert error["relative_error"] == pytest.approx((gap.norm() / exact.norm()).item())
    assert error["max_abs_error"] == pytest.approx(gap.abs().max().item())
    for head in range(H):
        assert error["relative_error_per_head"][head] == pytest.approx((gap[:, head].norm() / exact[:, head].norm()).item())
        assert error["max_abs_error_per_head"][head] == pytest.approx(gap[:, head].abs().max().item())


def test_the_error_is_measured_without_dropout_and_leaves_the_core_as_it_was():
    q, k, v = (x.detach() for x in draw(L, L, torch.float64))
    core = BlockSparseAttention(dropout=0.5).train()
    error = approximation_error(core, q, k, v)
    assert core.training
    assert error["relative_error"] < 1e-14
    nothing = approximation_error(core, q, k, torch.zeros_like(v))
    assert nothing["relative_error"] == nothing["max_abs_error"] == 0.0


BUILT = {
    "sliding_window": ({"window": 5, "block_size": 4}, "window=5, block_size=4, dropout=0.0, softcap=None"),
    "block_sparse": ({"block_size": 4, "softcap": 2.0}, "block_size=4, dropout=0.0, softcap=2.0"),
    "linear": ({}, "chunk_size=64"),
    "performer": ({"num_features": 7}, f"{D}, num_features=7, orthogonal=True, chunk_size=64"),
    "linformer": ({"num_slots": 3, "dropout": 0.1}, f"max_len={S}, num_slots=3, dropout=0.1, softcap=None"),
}


@pytest.mark.parametrize("kind", CORE_KINDS)
def test_a_core_is_built_from_a_word_and_numbers(kind):
    options, shown = BUILT[kind]
    core = build_core(kind, head_dim=D, max_len=S, **options)
    assert isinstance(core, EfficientAttention)
    assert core.extra_repr() == shown
    assert core(*draw()).shape == (B, H, L, DV)


def test_what_is_not_said_is_left_to_the_core():
    assert build_core("sliding_window", window=200).block_size == SlidingWindowAttention(200).block_size == 64
    assert build_core("block_sparse").block_size == BlockSparseAttention().block_size
    assert build_core("performer", head_dim=D).num_features == PerformerAttention(D).num_features


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("flash", {}, "attention='flash' is not known; one of sliding_window, block_sparse, linear, performer, linformer"),
        ("sliding_window", {}, "attention='sliding_window' needs window, got window=None"),
        ("performer", {}, "attention='performer' needs head_dim, got head_dim=None"),
        ("linformer", {"num_slots": 3}, "attention='linformer' needs max_len, got max_len=None"),
        ("linformer", {"max_len": 9}, "attention='linformer' needs num_slots, got num_slots=None"),
        ("block_sparse", {"window": 5}, "attention='block_sparse' does not take window, got window=5"),
        ("linear", {"num_features": 5}, "attention='linear' does not take num_features, got num_features=5"),
        (
            "sliding_window",
            {"window": 5, "num_slots": 2},
            "attention='sliding_window' does not take num_slots, got num_slots=2",
        ),
        ("linformer", {"max_len": 9, "num_slots": 3, "block_size": 4}, "attention='linformer' does not take block_size"),
        ("sliding_window", {"window": 0}, "window must be a positive whole number, got 0"),
        ("linear", {"dropout": 0.1}, "LinearAttention cannot honour dropout: it forms no weights that could be dropped"),
        ("performer", {"head_dim": 4, "softcap": 2.0}, "PerformerAttention cannot honour softcap: it forms no scores"),
    ],
)
def test_a_core_that_cannot_be_built_is_one_sentence(kind, options, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        build_core(kind, **options)
