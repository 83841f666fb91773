"""flex and sdpa: what torch's kernels are handed, what is refused, and answers where the CPU has them.

FlexAttention's lowering is judged by torch's own uncompiled ``flex_attention``: its generated kernels run on CUDA only. Its answers are
in ``tests/lattice/calls.py`` (``backend=lowered``).
"""

import pytest
import torch
from test_backends import HKV, LEFT, H, tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from minitx.nn import (
    AttentionCall,
    Causal,
    Documents,
    Padding,
    SlidingWindow,
    explain_backends,
)
from minitx.nn import scaled_dot_product_attention as attention
from minitx.nn.backends import flex, sdpa
from minitx.nn.functional import make_call


def both(mask=None, is_causal=False):
    arguments = [leaf.detach() for leaf in tensors(torch.float32).values()]
    return [attention(*arguments, mask, 0.0, is_causal, backend=name) for name in ("sdpa", "math")]


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


def report(backend, **options):
    q = options.pop("query", torch.randn(1, 4, 6, 8))
    k = options.pop("key", q)
    reports = explain_backends(q, k, options.pop("value", k), options.pop("attn_mask", None), **options)
    return next(line for line in reports if line.name == backend)


SERVED = {"device": "cuda", "dtype": torch.bfloat16, "widths": (16, 16), "num_rows": 2, "dropout_p": 0.0}
LACKS = [
    ({}, None), ({"dtype": torch.float32, "num_rows": 1}, None), ({"dtype": torch.float64}, "float32"), ({"num_rows": 0}, "empty batch"),
    ({"dropout_p": 0.1}, "dropout"), ({"widths": (15, 16)}, "width 16 or more"), ({"widths": (16, 8)}, "width 16 or more"),
    ({"device": "cpu"}, "CUDA"), ({"device": "mps"}, "CUDA"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "lack"), LACKS, ids=str)
def test_flex_takes_half_and_single_precision_from_width_16_on_cuda_without_dropout(facts, lack):
    reason = flex.lacks(**(SERVED | facts))
    assert reason is None if lack is None else lack in reason


def test_a_float_mask_has_the_dtype_of_the_queries_except_on_a_cpu():
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    assert [sdpa.mask_dtype("cpu", dtype) for dtype in (half, single, double)] == [single, single, double]
    assert [sdpa.mask_dtype("cuda", dtype) for dtype in (half, single, double)] == [half, single, double]


def test_flex_refuses_what_it_cannot_do():
    q = torch.randn(1, 4, 6, 8)
    for options, named in (({}, "CUDA"), ({"dropout_p": 0.1}, "dropout"), ({"query": q.double()}, "float32")):
        refused = report("flex", **options)
        assert not refused.can and named in refused.reason
    with FakeTensorMode():
        cuda = report("flex", query=torch.randn(1, 4, 6, 16, device="cuda", requires_grad=True), softcap=2.0)
    assert cuda.can and cuda.runs
    with pytest.raises(NotImplementedError, match="flex"):
        attention(q, q, q, backend="flex")


# ---- sdpa


ALL = (True, True, True, True)
HOPPER = [
    ((9, 0), "2.11.0", ALL, True), ((10, 0), "3.0.0a0+cu130", ALL, True), ((9, 0), "2.10.0", ALL, False),
    ((8, 9), "3.0.0", ALL, False), ((9, 0), "2.11.0", (False, False, True, True), False),
]  # fmt: skip


@pytest.mark.parametrize(("capability", "version", "enabled", "is_preferred"), HOPPER)
def test_torch_prefers_cudnn_on_hopper_from_2_11_where_nobody_chose_the_kernels(capability, version, enabled, is_preferred):
    assert sdpa.prefers_cudnn(capability, version, enabled) == is_preferred


def test_cudnn_is_left_out_where_torch_would_prefer_it_unless_the_caller_chose_the_kernels(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(sdpa, "prefers_cudnn", lambda *facts: seen.append(facts) or all(facts[2]))
    chosen = []
    monkeypatch.setattr(sdpa, "sdpa_kernel", chosen.append)
    sdpa._choice(torch.device("cuda"))
    assert chosen == [[SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        sdpa._choice(torch.device("cuda"))
    assert len(chosen) == 1
    assert seen == [((9, 0), torch.__version__, enabled) for enabled in (ALL, (False, False, True, True))]


def test_torchs_compiler_follows_the_choice_of_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def attend(q):
        with sdpa._choice(torch.device("cuda")):
            return sdpa.F.scaled_dot_product_attention(q, q, q)

    q = torch.randn(1, 2, 5, 8)
    assert torch.equal(torch.compile(attend, backend="eager", fullgraph=True)(q), attend(q))


def test_a_window_that_hides_nothing_does_not_choose_the_kernel():
    with FakeTensorMode():
        q, k = (torch.randn(1, 4, length, 64, device="cuda", dtype=torch.bfloat16) for length in (1, 100))
        windowed = report("flex", query=q, key=k, attn_mask=SlidingWindow(64) & Causal())
        assert windowed.runs
        assert not report("flex", query=q, key=k, attn_mask=SlidingWindow(128) & Causal()).runs


def test_on_cuda_auto_gives_packed_documents_to_flex_or_with_dropout_to_torch():
    ids = torch.tensor([[5, 5, 5, 1, 1, 9, 9]])
    for dropout_p, wanted in ((0.0, "flex"), (0.1, "sdpa")):
        with FakeTensorMode(allow_non_fake_inputs=True):
            q = torch.zeros(1, 3, 7, 16, dtype=torch.bfloat16, device="cuda")
            reports = explain_backends(q, q, q, Documents(ids) & Causal(), dropout_p=dropout_p)
        assert [line.name for line in reports if line.runs] == [wanted]


def test_on_cuda_torch_is_asked_about_the_call_that_its_kernel_would_get():
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    mask = Padding(torch.ones(1, 6, dtype=torch.bool))
    for key in (q, k):  # a mask is spelled out as a tensor, causality and grouped heads with it
        for options in ({}, {"is_causal": True}, {"is_causal": True, "attn_mask": mask, "dropout_p": 0.1}):
            query, keys, values, given, dropout_p, is_causal, grouped = sdpa.kernel_arguments(make_call(q, key, key, **options))
            masked = "attn_mask" in options
            assert query is q and (given is not None, dropout_p) == (masked, options.get("dropout_p", 0.0))
            assert (is_causal, grouped) == ("is_causal" in options and not masked, key is k and not masked)
            assert keys.shape == values.shape == (1, 2 if grouped else 4, 6, 8)  # beside a mask they are repeated
            assert given is None or given.shape == (1, 4, 6, 6)


def test_on_cuda_a_call_is_fused_if_one_of_torchs_kernels_takes_it(monkeypatch):
    takes, asked = set(), []
    for kernel in ("flash", "efficient", "cudnn"):
        can = lambda params, kernel=kernel: asked.append(kernel) or kernel in takes  # noqa: E731
        monkeypatch.setattr(sdpa.cuda, f"can_use_{kernel}_attention", can)
    with FakeTensorMode():
        q = torch.randn(1, 4, 6, 8, device="cuda")
        for kernel in ("flash", "efficient", "cudnn"):
            takes.add(kernel)
            assert report("sdpa", query=q).fused
            takes.clear()
        asked.clear()
        refused = report("sdpa", query=q)
    assert refused.can and not refused.fused and {"flash", "efficient", "cudnn"} <= set(asked)


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
    assert (options["attn_mask"] == 0.0).tolist() == [[[[True, False, False]]], [[[True, True, True]]]]


def test_a_bias_goes_to_the_kernel_as_exact_as_it_takes_and_without_new_infinities(handed):
    q, most = torch.randn(1, 1, 3, 4).half(), torch.finfo(torch.float32).max
    bias = torch.tensor([[-torch.inf, 100.3, torch.inf], [-torch.inf] * 3, [0.1, -1e30, 0.0]])
    attention(q, q, q, attn_bias=bias, backend="sdpa")
    ((_, options),) = handed
    # on a CPU float32 beside half precision
    want = torch.tensor([[-torch.inf, 100.3, most], [0.0, 0.0, 0.0], [0.1, -1e30, 0.0]])
    assert options["attn_mask"].dtype == torch.float32 and torch.equal(options["attn_mask"][0, 0], want)
    q = torch.randn(1, 1, 3, 4, device="meta", dtype=torch.float16)  # elsewhere the kernels want the queries' own
    plan = sdpa._plan(make_call(q, q, q, attn_bias=torch.randn(3, 3, device="meta")))
    assert plan.kernel_mask.dtype == torch.float16


def test_grouped_heads_beside_a_mask_are_repeated_where_the_kernel_wants_it(handed, monkeypatch):
    assert sdpa.repeats_heads("cuda", 2) and not sdpa.repeats_heads("cuda", 1) and not sdpa.repeats_heads("cpu", 2)
    plain, want = both(Padding(LEFT), True)
    monkeypatch.setattr(sdpa, "repeats_heads", lambda device, group: group > 1)  # as on CUDA
    repeated, _ = both(Padding(LEFT), True)
    both()  # without a mask flash takes grouped heads
    assert [(key.shape[1], options["enable_gqa"]) for (_, key, _), options in handed] == [(HKV, True), (H, False), (HKV, True)]
    torch.testing.assert_close(repeated, want)
    torch.testing.assert_close(plain, want)
