"""What ``examples/flash_attn_backend.py`` hands to the package and what it refuses. The package is a stand-in: it needs a GPU."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minitx.nn import ALiBi, AttentionCall, Causal, Padding, SlidingWindow, explain_backends

B, H, HKV, L, S, D = 2, 6, 3, 5, 7, 11
PADDING = Padding(torch.tensor([[False, False, True, True, True, True, True], [True] * 7]))


@pytest.fixture
def backend(example):
    return example("flash_attn_backend")


@pytest.fixture
def package(monkeypatch):
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


def reason(query, **options):
    reports = explain_backends(query, query, query, **options)
    return next(report.reason for report in reports if report.name == "flash_attn")


@pytest.mark.usefixtures("backend")
def test_it_is_refused_where_the_package_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "not installed" in reason(torch.randn(1, 1, 2, 4))


def test_the_package_gets_lengths_before_heads_the_scale_and_the_cap(backend, package):
    q, k = torch.randn(B, H, L, D), torch.randn(B, HKV, S, D)
    backend.run(AttentionCall(q, k, k, Causal(), scale=1.0, softcap=30.0))
    assert package["shapes"] == [(B, L, H, D), (B, S, HKV, D), (B, S, HKV, D)]
    assert package["softmax_scale"] == 1.0 and package["softcap"] == 30.0 and package["dropout_p"] == 0.0
    assert package["causal"] is True and package["window_size"] == (-1, 0) and package["alibi_slopes"] is None
    backend.run(AttentionCall(q, k, k, scale=0.5, dropout_p=0.1))
    assert package["softcap"] == 0.0 and package["dropout_p"] == 0.1 and package["causal"] is False
    backend.run(AttentionCall(q, k, k, Causal(), attn_bias=ALiBi(H)))
    torch.testing.assert_close(-package["alibi_slopes"], ALiBi(H).dense(1, 2, num_heads=H)[0, :, 0, 0])


@pytest.mark.parametrize(("mask", "window"), [
    (None, (-1, -1)), (Causal(), (-1, 0)), (SlidingWindow(3), (2, 2)), (SlidingWindow(3) & Causal(), (2, 0)),
    (SlidingWindow(4) & SlidingWindow(3), (2, 2)), (PADDING & Causal(), None), (Causal() | SlidingWindow(2), None),
])  # fmt: skip
def test_a_band_is_keys_to_the_left_and_right_of_the_querys_own(mask, window, backend):
    q, k = torch.randn(B, H, L, D), torch.randn(B, HKV, S, D)
    assert backend.window_of(AttentionCall(q, k, k, mask)) == window
    if window is not None:
        left, right = (S if side < 0 else side for side in window)
        row, key = torch.arange(L)[:, None] + S - L, torch.arange(S)
        band = (key >= row - left) & (key <= row + right)
        assert mask is None or torch.equal(mask.dense(L, S)[0, 0], band)


def test_it_refuses_what_the_package_has_no_argument_for(backend, package):
    assert "not in torch.float16 on cpu" in reason(torch.randn(1, 4, 6, 8).half())
    with FakeTensorMode():
        q = torch.randn(1, 4, 6, 8, device="cuda", dtype=torch.bfloat16)
        assert reason(q, is_causal=True, softcap=3.0) == reason(q, is_causal=True, dropout_p=0.1) == ""
        assert "soft-cap together with dropout" in reason(q, softcap=3.0, dropout_p=0.1)
        assert "sinks" in reason(q, sinks=torch.zeros(4, device="cuda"))
        assert "bias other than ALiBi" in reason(q, attn_bias=torch.zeros(6, 6, device="cuda"))
        assert "positive scale" in reason(q, scale=0.0)
        backend.run(AttentionCall(q, q, q, attn_bias=ALiBi(4)))
        assert (package["alibi_slopes"].device.type, package["alibi_slopes"].dtype) == ("cuda", torch.float32)


@pytest.mark.usefixtures("backend")
def test_the_program_tells_on_any_machine_what_the_package_cannot_serve(ran):
    reasons = ran("flash_attn_backend")[0]
    assert "sinks" in reasons["sinks"] and reasons["causal"]  # on a CPU, whether the package is installed or not
