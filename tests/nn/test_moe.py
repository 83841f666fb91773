"""A mixture of experts: every token through its own k experts, none dropped, none computed for nothing."""

import math

import pytest
import torch
from sizes import small_model

from minitx.analysis.counting import count_flops
from minitx.nn import MixtureOfExperts, load_balancing_loss
from minitx.nn.feedforward import ACTIVATIONS, expert_matmul

B, L, E, F, N, K = 2, 5, 6, 11, 4, 2


def experts(**options):
    return MixtureOfExperts(E, F, **{"num_experts": N, "experts_per_token": K, **options}).double()


def token_by_token(mixture, x):
    """The definition: k networks for every token, weighted by the softmax over their own logits."""
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            logits = mixture.router.weight @ x[b, t]
            chosen = sorted(range(mixture.num_experts), key=lambda e: -logits[e].item())[: mixture.experts_per_token]
            total = sum(math.exp(logits[e].item()) for e in chosen)
            for e in chosen:
                up, gate = mixture.up_proj[e] @ x[b, t], None if mixture.gate_proj is None else mixture.gate_proj[e] @ x[b, t]
                activation = ACTIVATIONS[mixture.activation]
                hidden = activation(up) if gate is None else activation(gate) * up
                out[b, t] += math.exp(logits[e].item()) / total * (mixture.down_proj[e] @ hidden)
    return out


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_the_mixture_equals_a_loop_over_tokens(activation, k):
    mixture, x = experts(activation=activation, experts_per_token=k), torch.randn(B, L, E, dtype=torch.float64)
    torch.testing.assert_close(mixture(x), token_by_token(mixture, x), rtol=0, atol=1e-14)


def test_any_leading_axes_no_rows_and_tensors_without_values():
    mixture, x = experts(), torch.randn(B, L, E, dtype=torch.float64)
    assert torch.equal(mixture(x[0]), mixture(x[:1])[0])
    assert torch.equal(mixture(x[None]), mixture(x)[None])
    assert mixture(x[:0]).shape == (0, L, E)
    assert mixture.to("meta")(x.to("meta")).shape == (B, L, E)


def test_no_token_is_dropped_when_all_choose_the_same_expert():
    mixture = experts(experts_per_token=1)
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture.router.weight[2] = 1.0
    x = torch.rand(B, L, E, dtype=torch.float64)  # positive: expert 2 has the largest logit for every token
    out, _, chosen = mixture(x, return_routing=True)
    assert (chosen == 2).all()
    torch.testing.assert_close(out, token_by_token(mixture, x), rtol=0, atol=1e-14)


def test_gradients_equal_finite_differences():
    rows, weights = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (3, 2, 3)))
    counts = torch.tensor([2, 0, 3])
    assert torch.autograd.gradcheck(lambda r, w: expert_matmul(r, w, counts), (rows, weights))
    assert torch.autograd.gradgradcheck(lambda r, w: expert_matmul(r, w, counts), (rows, weights))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_an_expert_computes_only_the_tokens_that_were_sent_to_it(k):
    mixture = experts(experts_per_token=k)
    flops = count_flops(lambda: mixture(torch.randn(B, L, E, dtype=torch.float64)))
    assert flops == 2 * B * L * E * (N + 3 * k * F)  # the router, and of N experts the k that were chosen


def test_load_balancing_loss_by_hand():
    # two experts; three tokens choose expert 0 and one expert 1: f = (3/4, 1/4), P = (0.6, 0.4)
    probs = torch.tensor([[[0.9, 0.1], [0.7, 0.3], [0.6, 0.4], [0.2, 0.8]]])
    chosen = torch.tensor([[[0], [0], [0], [1]]])
    assert load_balancing_loss(probs, chosen).item() == pytest.approx(2 * (0.75 * 0.6 + 0.25 * 0.4))
    # of four, two a token: always the same two, whatever the other probabilities
    probs, chosen = torch.tensor([[[0.5, 0.5, 0.0, 0.0]] * 3]), torch.tensor([[[0, 1]] * 3])
    assert load_balancing_loss(probs, chosen).item() == pytest.approx(N / K)


def test_padding_does_not_count_in_the_loss():
    probs, chosen = torch.rand(2, L, N).softmax(-1), torch.randint(N, (2, L, K))
    real = torch.tensor([[False, False, True, True, True], [True] * 5])
    other = torch.where(real[..., None], probs, 1.0), torch.where(real[..., None], chosen, 0)
    assert load_balancing_loss(probs, chosen, real).item() == pytest.approx(load_balancing_loss(*other, real).item())
    assert load_balancing_loss(probs, chosen, real).item() != pytest.approx(load_balancing_loss(probs, chosen).item())
    assert torch.isfinite(load_balancing_loss(probs, chosen, torch.zeros_like(real)))


def model(**options):
    return small_model(num_experts=N, activation="swiglu", **options)


def test_the_router_loss_is_that_of_the_real_tokens():
    network, ids = model(position="rotary"), torch.randint(1, 13, (1, 7))
    _, alone = network(ids, return_extras=True)
    padded = torch.cat((torch.randint(1, 13, (1, 3)), ids), dim=1)
    _, beside = network(padded, key_mask=torch.tensor([[False] * 3 + [True] * 7]), return_extras=True)
    assert beside["router_loss"].item() == pytest.approx(alone["router_loss"].item(), rel=1e-12)
    losses = []
    for block in network.blocks:
        block.register_forward_hook(lambda m, a, out: losses.append(load_balancing_loss(*out[1].values())))
    network(ids, return_extras=True)
    assert alone["router_loss"].item() == pytest.approx(sum(x.item() for x in losses) / 2)  # the mean over layers


def test_experts_train_under_autocast():
    network = model().float()
    with torch.autocast("cpu", torch.bfloat16):
        hidden, extras = network(torch.randint(1, 13, (2, 7)), return_extras=True)
    (hidden.float().square().sum() + extras["router_loss"]).backward()
    assert extras["router_loss"].dtype == torch.float32
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)
