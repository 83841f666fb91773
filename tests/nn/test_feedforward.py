"""The position-wise network."""

import math

import pytest
import torch

from minitx.nn import FeedForward


def erf_gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


FORMULAS = {
    "gelu": erf_gelu,
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("activation", FORMULAS)
def test_plain_networks_equal_their_formula(activation):
    network = FeedForward(5, 7, activation=activation).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    up, down = network.up_proj, network.down_proj
    want = FORMULAS[activation](x @ up.weight.T + up.bias) @ down.weight.T + down.bias
    torch.testing.assert_close(network(x), want, rtol=0, atol=1e-14)


GATES = {"swiglu": lambda x: x * torch.sigmoid(x), "geglu": erf_gelu, "reglu": lambda x: x.clamp(min=0)}


@pytest.mark.parametrize("activation", GATES)
def test_gated_networks_equal_their_formula(activation):
    network = FeedForward(5, 7, activation=activation, bias=False).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    gate = x @ network.gate_proj.weight.T
    want = (GATES[activation](gate) * (x @ network.up_proj.weight.T)) @ network.down_proj.weight.T
    torch.testing.assert_close(network(x), want, rtol=0, atol=1e-14)
    assert [n for n, _ in network.named_parameters()] == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]


def test_dropout_acts_on_the_hidden_layer_in_training_only():
    network = FeedForward(5, 7, dropout=0.5)
    x = torch.randn(2, 3, 5)
    assert not torch.equal(network(x), network(x))
    assert torch.equal(network.eval()(x), network(x))


def test_positions_do_not_mix():
    network, x = FeedForward(5, 7).double(), torch.randn(1, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(network(x)[:, 1:2], network(x[:, 1:2]), rtol=0, atol=1e-15)
