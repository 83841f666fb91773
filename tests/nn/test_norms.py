"""Norms of the stream and of queries and keys."""

import math

import pytest
import torch

from minitx.nn import QKNorm, make_norm

KINDS = ("rms", "layer", "l2")


def test_layer_and_rms_norm_by_hand():
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert make_norm("rms", 2, 0.0).double()(x).tolist() == pytest.approx([3 / math.sqrt(12.5), 4 / math.sqrt(12.5)])
    assert make_norm("layer", 2, 0.0).double()(x).tolist() == pytest.approx([-1.0, 1.0])
    assert make_norm("layer", 2, 0.75).double()(x).tolist() == pytest.approx([-0.5, 0.5])  # 0.5 / √(0.25 + 0.75)


@pytest.mark.parametrize("kind", KINDS)
def test_qk_norm_forgets_the_lengths_of_queries_and_keys(kind):
    norm = QKNorm(kind, 7, num_kv_heads=3)
    q, k = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 7)
    for one, two in zip(norm(q, k), norm(100 * q, 0.5 * k), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    alone, nothing = norm(q, None)  # the keys lie in a cache
    assert nothing is None and torch.equal(alone, norm(q, k)[0])


def test_l2_logits_start_at_sqrt_of_d_times_the_cosine():
    D = 4
    norm = QKNorm("l2", D, num_kv_heads=1)
    q, k = torch.randn(1, 1, 1, D), torch.randn(1, 1, 1, D)
    nq, nk = norm(q, k)
    cosine = torch.nn.functional.cosine_similarity(q, k, dim=-1)
    torch.testing.assert_close((nq * nk).sum(-1) / math.sqrt(D), math.sqrt(D) * cosine)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_go_through_unchanged_and_the_gradient_of_a_zero_vector_is_finite(kind, dtype):
    x = torch.randn(2, 3, 5, 7, dtype=dtype)
    x[0, 0] = 0.0
    x.requires_grad_()
    norm = QKNorm(kind, 7, num_kv_heads=3)
    for gains in (torch.float32, dtype):  # gains kept in float32 (mixed precision), and gains cast
        q, k = norm.to(gains)(x, x)
        assert q.dtype == k.dtype == dtype
        assert torch.isfinite(torch.autograd.grad((q + k).sum(), x)[0]).all()
