"""flex, flash_attn and the kernels under sdpa: what is handed over, what is refused, and answers where the CPU has them.

FlexAttention's lowering is judged by torch's own uncompiled ``flex_attention``: its generated kernels run on CUDA only.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from test_backends import DV, HKV, LEFT, MASKS, OPTIONS, B, D, H, L, S, tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from minitx.nn import (
    ALiBi,
    AttentionCall,
    Causal,
    Dense,
    Padding,
    SlidingWindow,
    T5RelativeBias,
    explain_backends,
    register_backend,
    unregister_backend,
)
from minitx.nn import scaled_dot_product_attention as attention
from minitx.nn.backends import flash_attn, flex, sdpa


@pytest.fixture
def uncompiled(monkeypatch):
    """A backend ``lowered``: torch's flex_attention without compiling, which says so in a warning."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(flex, "_kernel", lambda: flex_attention)
    register_backend("lowered", flex.run)
    yield
    unregister_backend("lowered")


def both(mask=None, is_causal=False, dtype=torch.float32, backend="lowered", **options):
    leaves, _ = tensors(dtype, **options)
    arguments = leaves["query"].detach(), leaves["key"].detach(), leaves["value"].detach()
    extra = {name: options[name] for name in ("scale", "softcap") if name in options}
    extra["attn_bias"] = leaves["bias"].detach() if "bias" in leaves else options.get("rule")
    extra["sinks"] = leaves["sinks"].detach() if "sinks" in leaves else None
    return [attention(*arguments, mask, 0.0, is_causal, backend=name, **extra) for name in (backend, "math")]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:.*flex_attention called without.*")
class TestLowering:
    @pytest.mark.parametrize("mask", MASKS)
    def test_every_mask_becomes_a_block_mask(self, mask):
        attn_mask, is_causal, _ = MASKS[mask]
        got, want = both(attn_mask, is_causal)
        torch.testing.assert_close(got, want)

    @pytest.mark.slow
    @pytest.mark.parametrize("option", OPTIONS)
    @pytest.mark.parametrize("mask", ["none", "right padding and causal", "empty rows"])
    def test_every_option_becomes_a_score_modification(self, option, mask):
        attn_mask, is_causal, _ = MASKS[mask]
        got, want = both(attn_mask, is_causal, **OPTIONS[option])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("rule", [ALiBi(H), T5RelativeBias(H, num_buckets=8, max_distance=6)], ids=["alibi", "t5"])
    def test_rules_are_evaluated_score_by_score(self, rule):
        if isinstance(rule, T5RelativeBias):
            torch.nn.init.normal_(rule.weight)
        with torch.no_grad():
            got, want = both(Padding(LEFT), True, rule=rule, softcap=2.0)
        torch.testing.assert_close(got, want)

    def test_poison_where_no_query_looks_changes_no_bit(self):
        q, k, v = (torch.randn(B, heads, n, D) for heads, n in ((H, L), (HKV, S), (HKV, S)))
        clean = attention(q, k, v, Padding(LEFT), 0.0, True, backend="lowered")
        k[0, :, :2] = v[0, :, :2] = torch.nan
        assert torch.equal(attention(q, k, v, Padding(LEFT), 0.0, True, backend="lowered"), clean)

    def test_layers_that_share_a_mask_share_its_block_mask(self):
        mask = Causal() & Padding(LEFT)
        q, k = torch.randn(B, H, L, D), torch.randn(B, HKV, S, D)
        attention(q, k, k, mask, backend="lowered")
        call = AttentionCall(q, k, k)
        assert flex.block_mask(mask, call) is flex.block_mask(mask, call)
        assert flex.seen_keys(mask, call) is flex.seen_keys(mask, call)

    @pytest.mark.parametrize("rule", [ALiBi(H), T5RelativeBias(H, num_buckets=8, max_distance=6)], ids=["alibi", "t5"])
    def test_a_rule_counts_from_the_last_key_where_the_future_is_visible_too(self, rule):
        if isinstance(rule, T5RelativeBias):
            torch.nn.init.normal_(rule.weight)
        with torch.no_grad():
            torch.testing.assert_close(*both(rule=rule))


@pytest.mark.parametrize("compiling", [False, True])
def test_flex_hands_over_what_the_call_has_and_in_a_graph_leaves_compiling_to_it(monkeypatch, compiling):
    from torch.nn.attention import flex_attention as module

    def kernel(name):
        return lambda query, key, value, **options: given.append((name, options)) or value

    given = []
    monkeypatch.setattr(module, "flex_attention", kernel("plain"))
    monkeypatch.setattr(flex, "_kernel", lambda: kernel("compiled"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    for key in (q, k):
        flex.run(AttentionCall(q, key, key, scale=0.3))
    assert [name for name, _ in given] == 2 * ["plain" if compiling else "compiled"]
    assert [options.pop("enable_gqa") for _, options in given] == [False, True]
    assert [options for _, options in given] == 2 * [{"score_mod": None, "block_mask": None, "scale": 0.3, "return_aux": None}]


def reason(backend, **options):
    q = options.pop("query", torch.randn(1, 4, 6, 8))
    k = options.pop("key", q)
    reports = explain_backends(q, k, options.pop("value", k), options.pop("attn_mask", None), **options)
    return next(report.reason for report in reports if report.name == backend)


def test_flex_refuses_what_it_cannot_do():
    q = torch.randn(1, 4, 6, 8)
    assert "FlexAttention needs CUDA: its kernel for CPUs has no backward pass" in reason("flex")
    assert reason("flex", dropout_p=0.1) == "FlexAttention has no dropout"
    assert reason("flex", query=q.double()) == "FlexAttention computes in float32"
    with FakeTensorMode():
        assert reason("flex", query=torch.randn(1, 4, 6, 8, device="cuda", requires_grad=True), softcap=2.0) == ""
    with pytest.raises(NotImplementedError, match="wrong answers at some sizes; sdpa, chunked, math can"):
        attention(q, q, q, backend="flex")


# ---- flash_attn


@pytest.fixture
def flash(monkeypatch):
    """A stand-in for the package that keeps what it is given."""
    seen = {}

    def flash_attn_func(q, k, v, **options):
        seen.update(options, shapes=[tuple(t.shape) for t in (q, k, v)])
        return q.new_zeros((*q.shape[:3], v.shape[-1]))

    module = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return seen


def test_flash_attn_is_refused_where_it_is_not_installed():
    assert reason("flash_attn") == "flash-attn is not installed"
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(NotImplementedError, match="flash-attn is not installed; sdpa, chunked, math can"):
        attention(q, q, q, backend="flash_attn")


def test_flash_attn_gets_lengths_before_heads_the_scale_and_the_cap(flash):
    q, k = torch.randn(B, H, L, D), torch.randn(B, HKV, S, D)
    out = flash_attn.run(AttentionCall(q, k, k, Causal(), scale=1.0, softcap=30.0, dropout_p=0.1))
    assert out.shape == (B, H, L, D)
    assert flash["shapes"] == [(B, L, H, D), (B, S, HKV, D), (B, S, HKV, D)]
    assert flash["softmax_scale"] == 1.0 and flash["softcap"] == 30.0 and flash["dropout_p"] == 0.1
    assert flash["causal"] is True and flash["window_size"] == (-1, 0) and flash["alibi_slopes"] is None
    flash_attn.run(AttentionCall(q, k, k, scale=0.5))
    assert flash["softcap"] == 0.0 and flash["causal"] is False and flash["window_size"] == (-1, -1)
    flash_attn.run(AttentionCall(q, k, k, Causal(), attn_bias=ALiBi(H)))
    torch.testing.assert_close(-flash["alibi_slopes"], ALiBi(H).dense(1, 2, num_heads=H)[0, :, 0, 0])


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (None, (-1, -1)),
        (Causal(), (-1, 0)),
        (SlidingWindow(3), (2, 2)),  # its own and two to either side
        (SlidingWindow(3) & Causal(), (2, 0)),
        (Causal() & SlidingWindow(3), (2, 0)),
        (SlidingWindow(4) & SlidingWindow(3), (2, 2)),
        (SlidingWindow(3) & SlidingWindow(4), (2, 2)),
        (SlidingWindow(1) & SlidingWindow(3), (0, 0)),
        (Padding(LEFT) & Causal(), None),
        (Causal() | SlidingWindow(2), None),
    ],
)
def test_a_band_is_keys_to_the_left_and_right_of_the_querys_own(mask, window):
    q, k = torch.randn(B, H, L, D), torch.randn(B, HKV, S, D)
    assert flash_attn.window_of(AttentionCall(q, k, k, mask)) == window
    if window is not None:
        left, right = (S if side < 0 else side for side in window)
        row, key = torch.arange(L)[:, None] + S - L, torch.arange(S)
        band = (key >= row - left) & (key <= row + right)
        assert mask is None or torch.equal(mask.dense(L, S)[0, 0], band)


@pytest.mark.usefixtures("flash")
def test_flash_attn_refuses_what_it_has_no_argument_for():
    assert "computes in float16 or bfloat16 on CUDA, not in torch.float32 on cpu" in reason("flash_attn")
    assert "on CUDA, not in torch.float16 on cpu" in reason("flash_attn", query=torch.randn(1, 4, 6, 8).half())
    with FakeTensorMode():
        assert "not in torch.float32 on cuda" in reason("flash_attn", query=torch.randn(1, 4, 6, 8, device="cuda"))
        q = torch.randn(1, 4, 6, 8, device="cuda", dtype=torch.bfloat16)
        assert reason("flash_attn", query=q, is_causal=True, softcap=3.0, dropout_p=0.1) == ""
        assert "no sinks" in reason("flash_attn", query=q, sinks=torch.zeros(4, device="cuda"))
        assert "no bias but ALiBi" in reason("flash_attn", query=q, attn_bias=torch.zeros(6, 6, device="cuda"))
        assert "causal and window masks only" in reason("flash_attn", query=q, attn_mask=torch.ones(6, 6, dtype=torch.bool))
        assert "as wide as queries" in reason("flash_attn", query=q, value=torch.randn(1, 4, 6, 9, device="cuda").bfloat16())


def test_flash_attn_gets_the_slopes_in_float32_beside_the_queries(flash):
    with FakeTensorMode():
        q = torch.randn(1, 4, 6, 8, device="cuda", dtype=torch.bfloat16)
        flash_attn.run(AttentionCall(q, q, q, attn_bias=ALiBi(4)))
        assert (flash["alibi_slopes"].device.type, flash["alibi_slopes"].dtype) == ("cuda", torch.float32)


# ---- the kernels under sdpa


@pytest.mark.parametrize(
    ("capability", "version", "avoided"),
    [
        ((9, 0), "2.11.0", True),
        ((9, 0), "2.13.0+cu130", True),
        ((10, 0), "2.12.1", True),
        ((9, 0), "2.10.0", False),
        ((8, 0), "2.13.0", False),
        ((8, 9), "3.0.0", False),
        ((9, 0), "3.0.0a0", True),
    ],
)
def test_cudnn_is_avoided_on_hopper_from_torch_2_11(capability, version, avoided):
    assert sdpa.avoids_cudnn(capability, version) is avoided


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_on_hopper_cudnn_runs_only_where_it_is_named(monkeypatch, capability):
    chosen = []
    monkeypatch.setattr(sdpa, "sdpa_kernel", lambda kernels: chosen.append(kernels))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    cuda = torch.device("cuda")
    sdpa._choice(cuda, None)
    hopper = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    assert chosen == ([hopper] if capability == (9, 0) else [])
    sdpa._choice(cuda, "cudnn")
    assert chosen[-1] == [SDPBackend.CUDNN_ATTENTION]
    chosen.clear()
    sdpa._choice(torch.device("cpu"), None)
    assert chosen == []


@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize("mask", ["none", "causal", "right padding and causal", "empty rows"])
def test_a_named_kernel_gives_the_same_answer(kernel, mask):
    attn_mask, is_causal, _ = MASKS[mask]
    torch.testing.assert_close(*both(attn_mask, is_causal, backend=f"sdpa:{kernel}"))


def test_a_named_kernel_is_refused_where_torch_would_leave_it():
    wide = torch.randn(1, 4, 6, DV)
    assert reason("sdpa:flash") == ""
    assert reason("sdpa:flash", value=wide) == "torch's CPU kernel wants values as wide as queries"
    assert reason("sdpa:math", value=wide) == "torch's own plain path"
    assert reason("sdpa:cudnn") == "torch has no cudnn kernel for the CPU"
    assert reason("sdpa:math", softcap=1.0) == "torch's kernels have no soft-cap"


def test_on_cuda_torch_is_asked_which_kernel_takes_a_call(monkeypatch):
    asked = []
    for kernel in ("flash", "efficient", "cudnn"):
        answer = kernel != "efficient"
        name = f"can_use_{kernel}_attention"
        monkeypatch.setattr(sdpa.cuda, name, lambda params, kernel=kernel, answer=answer: asked.append(kernel) or answer)
    monkeypatch.setattr(sdpa.cuda, "SDPAParams", lambda *arguments: arguments)
    with FakeTensorMode():
        q = torch.randn(1, 4, 6, 8, device="cuda")
        assert reason("sdpa:flash", query=q, is_causal=True) == ""
        assert reason("sdpa:efficient", query=q) == "torch's efficient kernel does not take these dtypes, widths or options"
        asked.clear()
        mask = Padding(torch.ones(1, 6, dtype=torch.bool, device="cuda"))
        assert reason("sdpa:flash", query=q, attn_mask=mask) == "torch's flash kernel takes no mask or bias"
        assert asked == ["efficient", "cudnn"]  # flash was not asked: it would have said yes to a call without the mask


def test_a_key_is_seen_where_some_query_of_its_own_head_sees_it():
    q = torch.zeros(2, 3, 5, 4)
    mask = Dense(torch.rand(2, 3, 5, 5) < 0.3)
    want = mask.dense(5, 5, batch_size=2, num_heads=3).any(-2, keepdim=True)
    assert torch.equal(flex.seen_keys(mask, AttentionCall(q, q, q)), want)


def test_torch_is_asked_about_the_call_that_its_kernel_would_get(monkeypatch):
    asked = []
    monkeypatch.setattr(sdpa.cuda, "SDPAParams", lambda *arguments: arguments)
    monkeypatch.setattr(sdpa.cuda, "can_use_efficient_attention", lambda params: asked.append(params[-2:]) or True)
    for kernel in ("flash", "cudnn"):
        monkeypatch.setattr(sdpa.cuda, f"can_use_{kernel}_attention", lambda params: True)
    with FakeTensorMode():
        q, k = torch.randn(1, 4, 6, 8, device="cuda"), torch.randn(1, 2, 6, 8, device="cuda")
        mask = Padding(torch.ones(1, 6, dtype=torch.bool, device="cuda"))
        for key in (q, k):  # a mask is spelled out as a tensor, causality and grouped heads with it
            for options in ({}, {"is_causal": True}, {"is_causal": True, "attn_mask": mask}):
                assert reason("sdpa:efficient", query=q, key=key, **options) == ""
    causal, grouped = zip(*asked, strict=True)
    assert causal == (False, True, False) * 2
    assert grouped == (False, False, False, True, True, False)
    q = torch.randn(1, 4, 6, 8, device="meta")
    assert reason("sdpa:flash", query=q) == "torch has no flash kernel for meta"


@pytest.fixture
def handed(monkeypatch):
    """Records what torch's attention is called with: tensors and options."""
    calls = []
    kernel = sdpa.F.scaled_dot_product_attention

    def recording(*tensors, **options):
        calls.append((tensors, options))
        return kernel(*tensors, **options)

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", recording)
    return calls


def test_no_kernel_meets_a_row_without_a_key(handed):
    q = torch.randn(2, 1, 3, 4)
    attention(q, q, q, Padding(torch.tensor([[True, False, False], [False, False, False]])), backend="sdpa")
    ((_, options),) = handed
    assert options["attn_mask"].tolist() == [[[[True, False, False]]], [[[True, True, True]]]]


def test_a_bias_goes_to_the_kernel_as_exact_as_it_takes_and_without_new_infinities(handed):
    q, most = torch.randn(1, 1, 3, 4).half(), torch.finfo(torch.float32).max
    bias = torch.tensor([[-torch.inf, 100.3, torch.inf], [-torch.inf] * 3, [0.1, -1e30, 0.0]])
    attention(q, q, q, attn_bias=bias, backend="sdpa")
    ((_, options),) = handed
    want = torch.tensor(
        [[-torch.inf, 100.3, most], [0.0, 0.0, 0.0], [0.1, -1e30, 0.0]]
    )  # on a CPU float32 beside half precision
    assert options["attn_mask"].dtype == torch.float32 and torch.equal(options["attn_mask"][0, 0], want)
    with FakeTensorMode():  # elsewhere the kernels want the queries' own
        bias = sdpa._finite_bias(torch.randn(3, 3, device="cuda"), torch.randn(1, 1, 3, 4, device="cuda", dtype=torch.float16))
    assert bias.dtype == torch.float16


def test_grouped_heads_beside_a_mask_are_repeated_where_the_kernel_wants_it(handed, monkeypatch):
    assert sdpa.repeats_heads("cuda", 2) and not sdpa.repeats_heads("cuda", 1) and not sdpa.repeats_heads("cpu", 2)
    plain, want = both(Padding(LEFT), True, backend="sdpa")
    monkeypatch.setattr(sdpa, "repeats_heads", lambda device, group: group > 1)  # as on CUDA
    repeated, _ = both(Padding(LEFT), True, backend="sdpa")
    both(None, False, backend="sdpa")  # without a mask flash takes grouped heads
    assert [(key.shape[1], options["enable_gqa"]) for (_, key, _), options in handed] == [(HKV, True), (H, False), (HKV, True)]
    torch.testing.assert_close(repeated, want)
    torch.testing.assert_close(plain, want)


def test_explaining_a_named_backend_that_refuses_does_not_raise():
    q = torch.randn(1, 2, 3, 4)
    reports = {report.name: report for report in explain_backends(q, q, q, softcap=1.0, backend="sdpa")}
    assert not any(report.runs for report in reports.values())
    assert reports["sdpa"].reason == "torch's kernels have no soft-cap"
    with pytest.raises(ValueError, match="backend='nothing' is not known"):
        explain_backends(q, q, q, backend="nothing")
