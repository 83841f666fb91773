"""Muon: its formula, torch's own, and what it shares with AdamW."""

import pytest
import torch
from torch import nn

from minitx.config import ConfigError, ParameterRule, TransformerConfig, node
from minitx.nn import DecoderLM
from minitx.training.muon import COEFFICIENTS, Muon, matrix_names, product_dtype
from minitx.training.optimizers import adamw, build_optimizer, muon, sgd

SHAPES = ((7, 13), (13, 7), (11, 11), (7, 13), (2, 5, 3))
SMALL = TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)


def parameters():
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def by_the_book(weight, gradients, lr, decay, momentum, steps):
    """One matrix at a time, as the formula is written."""
    average = torch.zeros_like(weight)
    for gradient in gradients:
        average = momentum * average + (1 - momentum) * gradient
        x = (1 - momentum) * gradient + momentum * average
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / x.norm()
        a, b, c = COEFFICIENTS
        for _ in range(steps):
            x = a * x + b * (x @ x.T @ x) + c * (x @ x.T @ x @ x.T @ x)
        x = x.T if tall else x
        factor = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
        weight = weight - lr * decay * weight - lr * factor * x
    return weight


@pytest.mark.parametrize("steps", [1, 5])
def test_each_matrix_is_updated_by_the_formula_as_if_it_stood_alone(steps):
    params = parameters()
    before = [p.detach().clone() for p in params]
    groups, gradients = [{"params": params, "lr": 0.1, "weight_decay": 0.3, "eps": 1e-8, "matrix": True}], []
    optimizer = Muon(groups, betas=(0.9, 0.95), momentum=0.8, steps=steps)
    optimizer.found_inf = torch.zeros(()) if steps > 1 else None  # float32, as the latch gives it
    for step in range(3):
        optimizer.step(lambda step=step: give_gradients(params, step))  # a closure, as Lightning gives one
        gradients.append([p.grad.clone() for p in params])
    for i, p in enumerate(params):
        alone = zip(before[i].reshape(-1, *p.shape[-2:]), p.detach().reshape(-1, *p.shape[-2:]), strict=True)
        for j, (start, end) in enumerate(alone):
            own = [g[i].reshape(-1, *p.shape[-2:])[j] for g in gradients]
            torch.testing.assert_close(end, by_the_book(start, own, 0.1, 0.3, 0.8, steps), rtol=1e-11, atol=1e-11)


def test_what_is_no_matrix_is_updated_by_adamw_bit_for_bit():
    networks = []
    for target in (adamw, muon):
        torch.manual_seed(0)
        network = DecoderLM(SMALL)
        optimizer = build_optimizer(node(target, lr=1e-2, weight_decay=0.1), network, head_dim=4)
        for step in range(3):
            give_gradients(list(network.parameters()), step)
            optimizer.step()
        networks.append(dict(network.named_parameters()))
    matrices = matrix_names(DecoderLM(SMALL))
    for name, theirs in networks[0].items():
        assert torch.equal(theirs, networks[1][name]) == (name not in matrices), name


def test_rates_and_rules_reach_the_matrices_too():
    rules = (ParameterRule(match="q_proj", lr=0.5), ParameterRule(match="head|token", lr=3.0))
    network = DecoderLM(SMALL)
    optimizer = build_optimizer(node(muon, lr=1e-3, matrix_lr=0.04, weight_decay=0.1, rules=rules), network, head_dim=4)
    rate = {id(p): (g["matrix"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    found = {name: rate[id(p)] for name, p in network.named_parameters()}
    assert found["blocks.0.attention.q_proj.weight"] == (True, 0.02, 0.1)
    assert found["blocks.0.attention.k_proj.weight"] == (True, 0.04, 0.1)
    assert found["blocks.0.attention.q_proj.bias"] == (False, 0.0005, 0.0)
    assert found["embeddings.token.weight"] == (False, pytest.approx(0.003), 0.1)


def test_a_step_that_must_not_be_made_changes_neither_weights_nor_momentum():
    params, options = [*parameters(), nn.Parameter(torch.ones(3).double())], {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-8}
    groups = [{"params": params[:-1], "matrix": True, **options}, {"params": params[-1:], **options}]
    optimizer = Muon(groups, betas=(0.9, 0.95))

    def seen():
        return [*params, *(state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state)]

    for step, stop in enumerate((1.0, 0.0, 1.0, 0.0)):
        before = [x.detach().clone() for x in seen()]
        give_gradients(params, step)
        if stop:
            params[0].grad.fill_(torch.nan)
            params[-1].grad.fill_(torch.inf)
        optimizer.found_inf = torch.tensor(stop)
        optimizer.step()
        assert [torch.equal(a, b) for a, b in zip(before, seen(), strict=False)] == [bool(stop)] * len(before)
        assert all(torch.isfinite(x).all() for x in seen())


@pytest.mark.parametrize("target", [adamw, sgd, muon])
def test_weights_in_bfloat16_are_updated_as_in_float32_but_for_rounding(target):
    weights = []
    for dtype in (torch.bfloat16, torch.float32):
        network = nn.Sequential(nn.Linear(16, 16, bias=False)).to(dtype)
        network[0].weight.data.copy_(torch.arange(256).view(16, 16) / 128)
        optimizer = build_optimizer(node(target, lr=0.3), network)
        network[0].weight.grad = torch.linspace(-1, 1, 256).view(16, 16).sin().to(dtype)
        optimizer.step()
        weights.append(network[0].weight.float())
    torch.testing.assert_close(*weights, rtol=0.01, atol=0.01)


def test_a_model_without_linear_layers_is_refused():
    assert matrix_names(nn.Linear(2, 3)) == {"weight"}
    network = nn.Sequential(nn.Embedding(5, 4), nn.Conv1d(4, 4, 1))  # as GPT-2 of transformers, whose layers are Conv1D
    network.add_module("head", nn.Linear(4, 5))
    for frozen in ({}, {"rules": [{"match": "3", "trainable": False}]}):
        with pytest.raises(ConfigError, match=r"a trainable torch\.nn\.Linear other than heads, but Sequential has none: use"):
            build_optimizer(node(muon, **frozen), network)
        network.add_module("3", nn.Linear(4, 4))


def test_products_are_in_bfloat16_on_cuda_and_elsewhere_in_the_dtype_of_the_matrices():
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    assert [product_dtype("cuda", dtype) for dtype in dtypes] == [torch.bfloat16] * 3
    assert [product_dtype(device, dtype) for device in ("cpu", "mps") for dtype in dtypes] == [*dtypes, *dtypes]
