"""The position-wise network."""

import math

import pytest
import torch

from minitx.nn import FeedForward


def erf_gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def relu(x):
    return x.clamp(min=0)


PLAIN = {"gelu": erf_gelu, "gelu_tanh": tanh_gelu, "relu": relu, "relu2": lambda x: relu(x) ** 2}
GATES = {"swiglu": lambda x: x * torch.sigmoid(x), "geglu": erf_gelu, "geglu_tanh": tanh_gelu, "reglu": relu}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [*PLAIN, *GATES])
def test_networks_equal_their_formula(activation, bias):
    network = FeedForward(5, 7, activation=activation, bias=bias).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64)

    def apply(projection, inputs):
        return inputs @ projection.weight.T + (projection.bias if bias else 0.0)

    hidden = apply(network.up_proj, x)
    hidden = PLAIN[activation](hidden) if activation in PLAIN else GATES[activation](apply(network.gate_proj, x)) * hidden
    torch.testing.assert_close(network(x), apply(network.down_proj, hidden), rtol=0, atol=1e-14)


def test_dropout_acts_on_the_hidden_layer_in_training_only():
    network = FeedForward(5, 7, dropout=0.5)
    x = torch.randn(2, 3, 5)
    assert not torch.equal(network(x), network(x))
    assert torch.equal(network.eval()(x), network(x))
