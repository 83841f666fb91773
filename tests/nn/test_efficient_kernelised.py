"""Linear attention and Performer: their own formula, the estimate's statistics, numbers that stay finite."""

import math

import pytest
import torch
from sizes import assert_same, assert_same_with_gradients
from test_efficient_call import BUILD, HKV, B, D, H, draw, run

from minitx.analysis.counting import fit_exponent
from minitx.nn import Causal, Padding
from minitx.nn.efficient import LinearAttention, PerformerAttention, approximation_error
from minitx.testing import DTYPES

DOUBLE = torch.float64


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
    for mask in [None, Padding(real)] + ([Causal(), Causal() & Padding(real)] if L <= S else []):
        q, k, v = draw(L, S, DOUBLE)
        visible = torch.ones(1, 1, L, S, dtype=torch.bool) if mask is None else mask.dense(L, S, batch_size=B)
        visible = visible.expand(B, 1, L, S)
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
        for mask in (None, Causal()):
            q, k, v = draw(11, 11, dtype, size)
            out = run(core, (q, k, v), mask, scale=1.0)
            assert torch.isfinite(out).all()
            assert out.abs().max() <= v.abs().max() * 1.01  # a weighted mean
            assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_very_negative_queries_and_keys_keep_their_weights():
    """elu(x) + 1 is exp(x) below zero: 1e-52 each here, beyond float32, and still 1 : e after division."""
    q = torch.full((1, 1, 1, 1), -120.0)
    k = torch.tensor([-120.0, -119.0]).view(1, 1, 2, 1)
    v = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    for mask in (None, Causal()):
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
    q, k, v = (0.3 * x.detach() for x in draw(24, 24, DOUBLE))
    errors = []
    for m in sizes:
        core = PerformerAttention(D, num_features=m, orthogonal=orthogonal)
        seeds = [(core.redraw(), approximation_error(core, q, k, v, mask=Causal())["relative_error"])[1] for _ in range(12)]
        errors.append(sum(seeds) / len(seeds))
    assert -0.6 < fit_exponent(sizes, errors) < -0.4
    assert errors[-1] < 0.02


def test_the_draw_follows_the_generator_and_travels_in_the_checkpoint():
    first, second = (PerformerAttention(D, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first.projection, second.projection)
    assert first.num_features == math.ceil(D * math.log(D))
    old = first.projection.clone()
    first.redraw()
    assert not torch.equal(first.projection, old)
    assert list(first.state_dict()) == ["projection"]
    assert not list(first.parameters())
    second.load_state_dict(first.state_dict())
    q, k, v = draw(7, 7, DOUBLE)
    assert torch.equal(run(first, (q, k, v)), run(second, (q, k, v)))
