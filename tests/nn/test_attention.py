"""MultiHeadAttention: names, widths, order of operations, and one code path."""

import copy
import itertools
import math

import pytest
import torch
from sizes import OpRecorder
from torch import nn

from minitx.nn import (
    Causal,
    DotProductAttention,
    MultiHeadAttention,
    Padding,
    QKNorm,
    Rotary,
    RotaryScaling,
    ScoreScale,
    SlidingWindow,
    from_key_padding_mask,
    reference_attention,
    register_backend,
)
from minitx.nn.backends import unregister_backend
from minitx.nn.bias import ALiBi
from minitx.testing import naive_attention

B, L, S, E, H = 2, 5, 7, 12, 3
REAL = torch.tensor([[False, True, True, True, True], [True] * 5])


def test_checkpoint_has_four_separate_projections():
    attention = MultiHeadAttention(E, H)
    assert list(attention.state_dict()) == [f"{p}_proj.{t}" for p in ("q", "k", "v", "out") for t in ("weight", "bias")]
    assert list(MultiHeadAttention(E, H, bias=False).state_dict()) == [f"{p}_proj.weight" for p in ("q", "k", "v", "out")]
    everything = MultiHeadAttention(
        E, H, bias=False, scale="learned", qk_norm=QKNorm("l2", 4, num_kv_heads=H), sinks=True, rotary=Rotary(4)
    )
    assert set(everything.state_dict()) - {f"{p}_proj.weight" for p in ("q", "k", "v", "out")} == {
        "scale.log_scale",
        "qk_norm.gain",
        "sinks",
    }


def test_the_checkpoint_does_not_depend_on_the_kernel():
    layouts = {tuple(MultiHeadAttention(E, H, core=DotProductAttention(backend=b)).state_dict()) for b in ("math", "sdpa")}
    assert len(layouts) == 1


def test_shapes_with_every_width_different():
    attention = MultiHeadAttention(13, 6, num_kv_heads=2, head_dim=5, kdim=17, vdim=19)
    out, weights = attention(torch.randn(B, L, 13), torch.randn(B, S, 17), torch.randn(B, S, 19), need_weights=True)
    assert out.shape == (B, L, 13)
    assert weights.shape == (B, 6, L, S)
    assert attention.q_proj.weight.shape == (30, 13)
    assert attention.k_proj.weight.shape == (10, 17)
    assert attention.v_proj.weight.shape == (10, 19)
    assert attention.out_proj.weight.shape == (13, 30)


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_the_whole_layer_equals_the_loops(backend):
    core = DotProductAttention(backend=backend)
    attention = MultiHeadAttention(E, 4, num_kv_heads=2, head_dim=5, kdim=7, vdim=11, core=core).double()
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


def test_copied_weights_give_the_output_and_weights_of_torch():
    theirs = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    nn.init.normal_(theirs.in_proj_bias), nn.init.normal_(theirs.out_proj.bias)
    ours = MultiHeadAttention.from_torch(theirs)
    x = torch.randn(B, L, E, dtype=torch.float64)
    hidden = torch.tensor([[False, False, False, True, True], [False] * 5])  # theirs: True = padding
    future = torch.ones(L, L, dtype=torch.bool).triu(1)  # theirs: True = may not
    want, want_weights = theirs(x, x, x, key_padding_mask=hidden, attn_mask=future, average_attn_weights=False)
    got, got_weights = ours(x, key_mask=from_key_padding_mask(hidden), is_causal=True, need_weights=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
    torch.testing.assert_close(got_weights, want_weights, rtol=0, atol=1e-14)


def test_cross_attention_equals_torch_with_its_key_and_value_defaults():
    theirs = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    ours = MultiHeadAttention.from_torch(theirs)
    x, memory = torch.randn(B, L, E, dtype=torch.float64), torch.randn(B, S, E, dtype=torch.float64)
    want, _ = theirs(x, memory, memory)
    torch.testing.assert_close(ours(x, memory), want, rtol=0, atol=1e-14)
    torch.testing.assert_close(ours(x, memory, memory), want, rtol=0, atol=1e-14)


def test_all_constraints_intersect():
    attention = MultiHeadAttention(E, H)
    x = torch.randn(B, L, E)
    dense = torch.rand(L, L) < 0.7
    _, weights = attention(x, attn_mask=dense, key_mask=REAL, is_causal=True, need_weights=True)
    visible = dense & torch.ones(L, L, dtype=torch.bool).tril() & REAL[:, None, None, :]
    assert torch.equal(weights > 0, visible.expand(B, H, L, L))
    symbolic = attention(x, attn_mask=Causal() & Padding(REAL) & SlidingWindow(2))
    torch.testing.assert_close(symbolic, attention(x, attn_mask=SlidingWindow(2), key_mask=REAL, is_causal=True))


def test_a_query_that_sees_nothing_gets_the_output_bias():
    attention = MultiHeadAttention(E, H)
    nn.init.normal_(attention.out_proj.bias)
    out = attention(torch.randn(B, L, E), key_mask=REAL, is_causal=True)
    assert torch.equal(out[0, 0], attention.out_proj.bias)


def test_bias_is_added_to_the_scores_and_learns():
    attention = MultiHeadAttention(E, H)
    bias = torch.zeros(1, H, L, L)
    bias[..., 2] = 50.0  # every query is driven to key 2
    bias.requires_grad_()
    x = torch.randn(B, L, E)
    out, weights = attention(x, attn_bias=bias, need_weights=True)
    assert (weights[..., 2] > 0.999).all()
    out.square().sum().backward()
    assert bias.grad.shape == bias.shape


def test_qk_norm_comes_before_rotary():
    # a gain that differs from channel to channel does not commute with a rotation
    norm, rotary = QKNorm("rms", 4), Rotary(4)
    with torch.no_grad():
        norm.query_norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    attention = MultiHeadAttention(E, H, qk_norm=norm, rotary=rotary).double()
    seen = []
    attention.core.register_forward_pre_hook(lambda module, args: seen.extend(args))
    x = torch.randn(B, L, E, dtype=torch.float64)
    attention(x)
    q = attention.q_proj(x).view(B, L, H, 4).transpose(1, 2)
    k = attention.k_proj(x).view(B, L, H, 4).transpose(1, 2)
    positions = torch.arange(L)[None]
    normed = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * torch.tensor([1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(seen[0], rotary(normed, positions), rtol=0, atol=1e-13)
    assert not torch.allclose(seen[0], norm(rotary(q, positions), k)[0])
    torch.testing.assert_close(
        seen[1], rotary(k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt(), positions), rtol=0, atol=1e-13
    )


def test_the_learned_scale_acts_after_qk_norm():
    attention = MultiHeadAttention(E, H, qk_norm=QKNorm("l2", 4, num_kv_heads=H), scale="learned")
    seen = []
    attention.core.register_forward_pre_hook(lambda module, args: seen.extend(args))
    attention(torch.randn(B, L, E))
    torch.testing.assert_close(seen[0].norm(dim=-1), torch.full((B, H, L), 0.5))  # 1 · 1/√4; before the norm it would be lost


def test_rotary_makes_the_layer_see_distances_only():
    attention = MultiHeadAttention(E, H, rotary=Rotary(4)).double()
    x = torch.randn(B, L, E, dtype=torch.float64)
    near, far = (attention(x, position_ids=torch.arange(L)[None] + shift, is_causal=True) for shift in (0, 97))
    torch.testing.assert_close(near, far, rtol=0, atol=1e-12)
    spread = attention(x, position_ids=2 * torch.arange(L)[None], is_causal=True)
    assert not torch.allclose(near, spread, atol=1e-4)


def test_sinks_begin_as_one_extra_key_of_logit_zero_and_learn():
    attention = MultiHeadAttention(E, H, sinks=True, core=DotProductAttention(backend="math"))
    out, weights = attention(torch.randn(B, L, E), need_weights=True)
    assert (weights.sum(-1) < 1).all()
    out.sum().backward()
    assert attention.sinks.grad.shape == (H,)
    assert attention.sinks.grad.abs().min() > 0


# every option of the constructor and of forward; a backend that cannot serve a layer refuses by name
OPTIONS = {
    "plain": {},
    "grouped": {"num_kv_heads": 1},
    "wide heads": {"head_dim": 6},
    "no bias": {"bias": False},
    **{f"scale {word}": {"scale": word} for word in ("unscaled", "inv", "learned", 0.3, -1.0)},
    "scale log_length": {"scale": lambda: ScoreScale("log_length", head_dim=4, max_len=9)},
    **{f"qk-norm {kind}": {"qk_norm": lambda kind=kind: QKNorm(kind, 4, num_kv_heads=H)} for kind in ("rms", "layer", "l2")},
    "rotary": {"rotary": lambda: Rotary(4)},
    "rotary interleaved": {"rotary": lambda: Rotary(4, interleaved=True, scaling=RotaryScaling("ntk", 2.0))},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 2.0},
    "kdim and vdim": {"kdim": 8, "vdim": 10},
}
CALLS = {
    "bare": {},
    "masked": {"key_mask": REAL, "is_causal": True},
    "window": {"attn_mask": SlidingWindow(2)},
    "tensor bias": {"attn_bias": torch.linspace(-1, 1, L * L).view(L, L)},
    "alibi": {"attn_bias": ALiBi(H), "is_causal": True},
    "bool tensor": {"attn_mask": torch.arange(L * L).view(L, L) % 3 != 1},
    "positions": {"position_ids": torch.tensor([[3, 1, 4, 0, 5]]), "is_causal": True},
    "weights": {"key_mask": REAL, "is_causal": True, "need_weights": True},
    "heads": {"head_mask": torch.tensor([1.0, 0.0, 0.5])},
}
REFUSED = {("sinks", "sdpa"), ("softcap", "sdpa")}


def layer(option, backend):
    torch.manual_seed(0)
    options = {name: value() if callable(value) else value for name, value in OPTIONS[option].items()}
    core = DotProductAttention(softcap=options.pop("softcap", None), backend=backend)
    attention = MultiHeadAttention(E, H, **options, core=core)
    if attention.sinks is not None:
        nn.init.normal_(attention.sinks)
    x = torch.randn(B, L, E)
    given = (x, torch.randn(B, L, 8), torch.randn(B, L, 10)) if "kdim" in options else (x,)
    return attention, given


@pytest.mark.parametrize("backend", ["math", "sdpa", "chunked", "auto"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("option", OPTIONS)
def test_train_eval_and_no_grad_run_the_same_code(option, call, backend):
    attention, given = layer(option, backend)
    if (option, backend) in REFUSED:
        with pytest.raises(RuntimeError, match="backend 'sdpa' cannot serve this call"):
            attention(*given, **CALLS[call])
        return
    calls = []
    attention.core.register_forward_hook(lambda module, args, out: calls.append(out))

    def run():
        with OpRecorder() as recorder:
            out = attention(*given, **CALLS[call])
        return out if isinstance(out, tuple) else (out,), [op for op in recorder.ops if op not in ("detach", "alias")]

    trained, train_ops = run()
    attention.eval()
    evaluated, eval_ops = run()
    with torch.no_grad():
        silent, _ = run()
    with torch.inference_mode():
        inferred, _ = run()
    assert len(trained) == (2 if call == "weights" else 1)
    assert train_ops == eval_ops
    assert len(calls) == 4  # hooks fire in every mode
    for other in (evaluated, silent, inferred):
        assert all(torch.equal(a, b) for a, b in zip(other, trained, strict=True))
    reference, given = layer(option, "math")
    want = reference(*given, **CALLS[call])
    torch.testing.assert_close(trained, want if isinstance(want, tuple) else (want,), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "backend"),
    [
        case
        for case in itertools.product(OPTIONS, ("math", "sdpa", "chunked", "auto"))
        if case not in REFUSED and "kdim" not in case[0]
    ],
)
def test_the_future_changes_no_bit_whatever_the_option(option, backend):
    attention, (x,) = layer(option, backend)
    other = x.clone()
    other[:, 3:] += 1.0
    one, two = (attention(inputs, is_causal=True) for inputs in (x, other))
    assert torch.equal(one[:, :3], two[:, :3])
    assert not torch.equal(one[:, 3:], two[:, 3:])


@pytest.mark.parametrize("weights", [False, True])
def test_a_head_mask_multiplies_what_a_head_adds(weights):
    attention = MultiHeadAttention(E, H).double()
    x = torch.randn(B, L, E, dtype=torch.float64)
    parts = []
    for head in range(H):  # one head at a time, through the columns of W_O that belong to it
        alone = copy.deepcopy(attention)
        with torch.no_grad():
            alone.out_proj.weight.view(E, H, 4)[:, [h for h in range(H) if h != head]] = 0.0
            alone.out_proj.bias.zero_()
        parts.append(alone(x))
    mask = torch.tensor([0.5, 0.0, 2.0])
    want = 0.5 * parts[0] + 2.0 * parts[2] + attention.out_proj.bias
    got = attention(x, head_mask=mask, need_weights=weights)
    torch.testing.assert_close(got[0] if weights else got, want, rtol=0, atol=1e-14)
    rows = torch.tensor([[1, 1, 1], [0, 1, 0]], dtype=torch.bool)
    got = attention(x, head_mask=rows)
    torch.testing.assert_close(got[0], attention(x)[0], rtol=0, atol=1e-15)
    torch.testing.assert_close(got[1], (parts[1] + attention.out_proj.bias)[1], rtol=0, atol=1e-14)


def test_a_head_mask_receives_the_gradient_that_ranks_heads():
    # Michel et al. 2019, arXiv:1905.10650, eq. 2: |d loss / d mask|
    mask = torch.ones(H, requires_grad=True)
    MultiHeadAttention(E, H)(torch.randn(B, L, E), head_mask=mask).square().sum().backward()
    assert mask.grad.shape == (H,) and mask.grad.abs().min() > 0


def test_a_backend_must_be_registered_before_a_module_names_it():
    with pytest.raises(ValueError, match="backend='late' is not known; one of auto, "):
        DotProductAttention(backend="late")
    register_backend(
        "late", lambda call: reference_attention(call.query, call.key, call.value, scale=call.scale, mask=call.mask)
    )
    try:
        attention = MultiHeadAttention(E, H, core=DotProductAttention(backend="late"))
        x = torch.randn(B, L, E)
        want = attention(x)
        attention.core.backend = "math"
        assert torch.equal(attention(x), want)
    finally:
        unregister_backend("late")


def test_backends_agree_on_every_option_of_the_layer():
    for option in OPTIONS:
        outs = []
        for backend in ("math", "auto" if (option, "sdpa") in REFUSED else "sdpa"):
            attention, given = layer(option, backend)
            outs.append(attention.double()(*(x.double() for x in given), key_mask=REAL, is_causal=True))
        torch.testing.assert_close(*outs, rtol=0, atol=1e-13)


def test_dropout_is_off_in_eval_for_every_backend():
    x = torch.randn(B, L, E)
    for backend, training in itertools.product(("math", "sdpa", "chunked", "auto"), (True, False)):
        attention = MultiHeadAttention(E, H, core=DotProductAttention(dropout=0.5, backend=backend)).train(training)
        assert torch.equal(attention(x), attention(x)) is not training


def test_nothing_is_kept_on_the_module():
    attention = MultiHeadAttention(E, H, scale="learned", rotary=Rotary(4))
    before = {name: set(vars(module)) for name, module in attention.named_modules()}
    attention(torch.randn(B, L, E), key_mask=REAL, need_weights=True)
    assert {name: set(vars(module)) for name, module in attention.named_modules()} == before
    assert not any(isinstance(value, torch.Tensor) for module in attention.modules() for value in vars(module).values())


def test_layers_are_initialised_independently():
    one, two = MultiHeadAttention(E, H), MultiHeadAttention(E, H)
    assert not torch.equal(one.q_proj.weight, two.q_proj.weight)
    assert not torch.equal(one.q_proj.weight, one.k_proj.weight)


def test_padding_changes_no_bit_of_the_real_rows():
    attention = MultiHeadAttention(E, H)
    x = torch.randn(B, L, E)
    other = x.clone()
    other[0, 0] = 1e3
    one, two = (attention(inputs, key_mask=REAL) for inputs in (x, other))
    assert torch.equal(one[0, 1:], two[0, 1:])
    assert torch.equal(one[1], two[1])
