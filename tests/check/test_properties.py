"""The oracles of models, on models that have the properties and on models that have not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minitx.check.properties import compare, hidden_tokens, later_tokens, rounding
from minitx.config import TransformerConfig
from minitx.nn import DecoderLM, Encoder
from tests.lattice.gaps import linear_gap, slope_gap

SIZES = {"vocab_size": 31, "embed_dim": 24, "num_heads": 3, "num_layers": 2}
ROWS = {"input_ids": torch.arange(4, 26).view(2, 11), "key_mask": torch.arange(22).view(2, 11) % 11 > 3}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def model_of(kind, dtype=torch.float32):
    torch.manual_seed(0)
    model = kind(TransformerConfig(**SIZES, architecture=kind.architecture)).eval()
    for parameter in model.parameters():  # so large that attention matters
        parameter.mul_(3 if parameter.dim() > 1 else 1)
    return model.to(dtype)


def answers(model):
    return lambda inputs: model(**inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_in_a_causal_model_later_tokens_change_nothing_and_in_an_encoder_they_do(dtype):
    for kind, is_causal in ((DecoderLM, True), (Encoder, False)):
        answer, rows = answers(model := model_of(kind, dtype)), {"input_ids": torch.arange(4, 25).view(3, 7)}
        gap = later_tokens(rows).moved(answer, rounding(answer, model, rows))
        assert gap.is_rounding == is_causal
        assert is_causal or gap.size > 3 * gap.allowed


@pytest.mark.parametrize("kind", [DecoderLM, Encoder])
def test_hidden_tokens_change_nothing_unless_the_mask_is_ignored(kind):
    answer = answers(model := model_of(kind))
    noise = rounding(answer, model, ROWS, where=ROWS["key_mask"])
    twins = hidden_tokens(ROWS, mask="key_mask")
    assert torch.equal(twins.still, ROWS["key_mask"])
    assert twins.moved(answer, noise).is_rounding
    assert not twins.moved(lambda inputs: model(inputs["input_ids"]), noise).is_rounding


def test_twins_differ_from_their_rows_at_each_place_that_must_not_show_and_nowhere_else():
    twins = later_tokens(ROWS, mask="key_mask")
    rows, others = twins.inputs["input_ids"].chunk(2)
    assert torch.equal(rows, ROWS["input_ids"]) and torch.equal(rows == others, twins.still)
    assert torch.equal(twins.still, ROWS["key_mask"] & (torch.arange(11) < 5))
    assert all(row.item() in rows[index] for index in range(2) for row in others[index])
    assert torch.equal(twins.inputs["key_mask"], ROWS["key_mask"].repeat(2, 1))
    with pytest.raises(ValueError, match="only one distinct token"):
        later_tokens({"input_ids": torch.ones(2, 7, dtype=torch.long)})
    with pytest.raises(ValueError, match="every tensor must have the 2 rows"):
        later_tokens(ROWS | {"pixel_values": torch.zeros(5, 3)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rounding_covers_another_order_of_the_sums_and_no_more(dtype, scale):
    """The tolerance follows the dtype and the size of the numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(257, 257), nn.Tanh(), nn.Linear(257, 257)).to(dtype)
    model[2].weight.mul_(scale)
    order = torch.randperm(257)

    def reordered(inputs):
        first, last = model[0], model[2]
        hidden = torch.tanh(nn.functional.linear(inputs["x"][:, order], first.weight[:, order], first.bias))
        return nn.functional.linear(hidden[:, order], last.weight[:, order], last.bias)

    inputs = {"x": torch.randn(7, 257, dtype=dtype)}
    wanted = model(inputs["x"])
    noise = rounding(lambda inputs: model(inputs["x"]), model, inputs)
    assert compare(reordered(inputs), wanted, noise).is_rounding
    model[0].weight[3, 5] += 0.5  # one of 66,049 weights
    assert not compare(model(inputs["x"]), wanted, noise).is_rounding


class Pair(nn.Module):
    def forward(self, x):
        return x, x.long()


def test_rounding_passes_over_outputs_that_are_not_numbers_with_a_fraction():
    model = nn.ModuleList([Pair(), nn.Flatten(0), nn.Identity()])
    x = {"x": torch.arange(1.0, 6.0)}

    def answer(inputs):
        plain, whole = model[0](inputs["x"])
        return model[2](plain) + model[1](whole)

    noise = max(rounding(answer, model, x, seed=seed) for seed in range(3))  # the signs of two steps may cancel
    assert 0 < noise <= 6 * torch.finfo(torch.float32).eps


def test_rounding_draws_no_random_number_and_leaves_no_hook():
    answer, state = answers(model := model_of(DecoderLM)), torch.get_rng_state()
    assert rounding(answer, model, ROWS) == rounding(answer, model, ROWS) != rounding(answer, model, ROWS, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(("precision", "epsilon"), [("highest", 2.0**-23), ("high", 2.0**-10), ("medium", 2.0**-7)])
def test_the_rounding_of_a_step_is_that_of_products_in_tf32_or_bfloat16_where_torch_may_use_them(precision, epsilon):
    wanted = torch.ones(3)
    torch.set_float32_matmul_precision(precision)
    try:
        assert compare(wanted * (1 + 4 * epsilon), wanted, 0.0).is_rounding
        assert not compare(wanted * (1 + 5 * epsilon), wanted, 0.0).is_rounding
    finally:
        torch.set_float32_matmul_precision("highest")


def test_values_that_are_not_finite_are_a_gap_unless_both_have_them():
    wanted = torch.tensor([1.0, -torch.inf, torch.nan, 1e38])
    assert compare(wanted.clone(), wanted, 0.0).size == 0
    for place, value in ((0, torch.nan), (1, torch.inf), (1, 0.0), (2, 1.0)):
        found = wanted.clone()
        found[place] = value
        gap = compare(found, wanted, 1.0)
        assert gap.size == torch.inf and gap.place == (place,) and not gap.is_rounding
    found = wanted.clone()
    found[0] = 1.1
    assert compare(found, wanted, 0.0).place == (0,)  # a large number elsewhere excuses nothing


def test_only_the_positions_that_count_are_compared():
    wanted, where = torch.zeros(2, 3, 5), torch.tensor([[True, False, True], [True, True, True]])
    found = wanted.clone()
    found[0, 1, 4] = 7
    assert compare(found, wanted, 0.0, where).is_rounding and not compare(found, wanted, 0.0).is_rounding
    with pytest.raises(ValueError, match="hides every position"):
        compare(found, wanted, 0.0, torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="same shape"):
        compare(found, wanted[:, :2], 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_linear_output_differs_from_its_gradient_by_rounding_and_another_gradient_by_more(dtype):
    value, weight, cotangent = (torch.randn(shape, dtype=dtype) for shape in ((5, 31), (31, 7), (5, 7)))
    output, gradient = value @ weight, cotangent @ weight.mT
    gap = linear_gap(output, cotangent, value, gradient)
    assert gap.is_rounding and gap.place == ()
    assert gap.size == abs(float((cotangent.double() * output.double()).sum() - (value.double() * gradient.double()).sum()))
    wrong = gradient * (1 + 1000 * torch.finfo(dtype).eps)
    assert not linear_gap(output, cotangent, value, wrong).is_rounding
    assert not linear_gap(output, cotangent, value, torch.zeros_like(gradient)).is_rounding
    assert linear_gap(0 * output, cotangent, value, 0 * gradient).is_rounding


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
def test_a_slope_differs_from_a_central_difference_by_its_error_and_the_rounding_of_the_values(offset):
    for slope, bend in ((3.0, 0.0), (-3.0, 1e5), (0.0, -7.0)):
        function = lambda x, slope=slope, bend=bend: offset + slope * x + bend * x**3 + 11.0 * x**2  # noqa: E731
        assert slope_gap(function, slope).is_rounding
        wrong = slope_gap(function, slope + 0.01)
        assert not wrong.is_rounding and wrong.size == pytest.approx(0.01, rel=0.1)


def test_rounding_in_one_layer_is_about_that_of_its_largest_number():
    rows = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    for layer in (torch.nn.Linear(16, 16), torch.nn.GRU(16, 16, batch_first=True)):

        def answer(inputs, layer=layer):
            result = layer(inputs["x"])
            return result[0] if isinstance(result, tuple) else result

        with torch.no_grad():
            largest = answer({"x": rows}).abs().max().item()
            noise = rounding(answer, layer, {"x": rows})
        assert 0.5 <= noise / (largest * torch.finfo(torch.float32).eps) <= 5
