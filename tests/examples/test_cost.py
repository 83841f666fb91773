"""The ledger counts what runs, part by part, and cost grows with the claimed power of the length."""

import pytest
import torch

from minitx.config import TransformerConfig
from minitx.nn import scaled_dot_product_attention
from minitx.nn.backends import chunked
from minitx.nn.counting import count_flops, flop_counter
from minitx.nn.models import build_model

KINDS = ("math", "sdpa", "chunked", "window", "linear", "performer", "linformer", "recurrent", "feed-forward")
SMALL = {"num_labels": 5, "vocab_size": 67, "embed_dim": 24, "num_layers": 2, "max_len": 131}


@pytest.fixture(scope="module")
def cost(example):
    return example("cost")


@pytest.fixture
def parts_of(cost):
    """``parts_of(length, batch_size, **options)``: a model and its ledger, by part."""

    def count(length=37, batch_size=2, **options):
        config = TransformerConfig(**{**SMALL, "num_heads": 3, **options})
        model = build_model(config)
        return model, {part.name: part for part in cost.ledger(model, cost.example_inputs(config, batch_size, length))}

    return count


@pytest.mark.parametrize("options", [
    {"activation": "swiglu", "position": "rotary"}, {"architecture": "encoder", "head_transform": True},
    {"architecture": "encoder_decoder", "position": "t5"},
    {"architecture": "vision", "head": "sequence", "vocab_size": None, "image_size": 12, "num_channels": 3},
], ids=str)  # fmt: skip
def test_every_part_of_a_model_costs_its_formula_but_for_what_the_mask_hides(cost, parts_of, options):
    model, parts = parts_of(**options, backend="math")
    assert tuple(parts) == cost.PARTS
    assert sum(part.parameters for part in parts.values()) == model.num_parameters()
    for name in set(cost.PARTS) - {"core", "embedding"}:
        assert parts[name].forward == parts[name].formula
        assert name == "head" or parts[name].backward == 2 * parts[name].forward
    assert parts["core"].formula <= parts["core"].forward
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    inputs = cost.example_inputs(model.config, 2, 37)
    assert sum(part.forward + part.backward for part in parts.values()) == count_flops(lambda: model(**inputs).sum().backward())


def test_a_case_worked_out_by_hand(parts_of):
    sizes = {"vocab_size": 7, "embed_dim": 6, "num_heads": 2, "num_layers": 1, "max_len": 5, "ffn_dim": 11, "bias": False}
    _, parts = parts_of(5, 3, **sizes, backend="math")
    assert (parts["q_proj"].parameters, parts["q_proj"].forward) == (36, 2 * 15 * 36)
    assert parts["core"].forward == 3 * 2 * 25 * (2 * 3 + 2 * 3)  # B H L L: q·k and p·v, three wide each
    assert parts["core"].formula == 3 * 2 * 15 * (2 * 3 + 2 * 3)  # 1 + 2 + 3 + 4 + 5 visible pairs
    assert parts["core"].kept >= 4 * 3 * 2 * 25  # the weights
    assert (parts["feedforward"].parameters, parts["feedforward"].backward) == (132, 2 * 2 * 15 * 132)
    assert parts["feedforward"].kept == 4 * 15 * (6 + 11 * 2)  # its input, and what goes into the GELU and comes out
    assert (parts["embedding"].parameters, parts["head"].parameters, parts["head"].forward) == (72, 0, 2 * 15 * 42)


@pytest.mark.parametrize(("backend", "forward", "backward"), [("math", 1.0, 2.0), ("sdpa", 1.0, 2.5), ("chunked", 0.75, 1.875)])
def test_each_backend_is_counted_and_its_answer_is_bit_equal(backend, forward, backward):
    q = torch.randn(1, 2, 512, 8, requires_grad=True)
    with flop_counter() as counter:
        counted = scaled_dot_product_attention(q, q, q, is_causal=True, backend=backend)
        before = counter.get_total_flops()
        (grad,) = torch.autograd.grad(counted.square().sum(), q)
    whole = 2 * 512 * 512 * 8 * 4
    assert (before, counter.get_total_flops() - before) == (forward * whole, backward * whole)
    out = scaled_dot_product_attention(q, q, q, is_causal=True, backend=backend)
    assert torch.equal(out, counted) and torch.equal(torch.autograd.grad(out.square().sum(), q)[0], grad)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_cost_grows_as_the_textbook_says(cost, kind, monkeypatch):
    monkeypatch.setattr(chunked, "LARGEST", 64)  # tiles that are small beside a row, or their constant size hides the growth
    sizes = {"num_heads": 1, "head_dim": 64, "causal": False, "window": 16, "num_slots": 32}
    found = cost.growth(kind, (256, 576), **sizes)
    for got, textbook in zip(found.exponents, cost.GROWTHS[kind], strict=True):
        assert -0.15 < got - (2 if "n²" in textbook else 1) < 0.15  # constant parts of bytes, and tiles at the ends of a window
