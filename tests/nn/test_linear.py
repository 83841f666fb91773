"""``Linear`` is ``nn.Linear`` in all but speed: which product runs, and that both agree."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minitx.config import TransformerConfig
from minitx.generation import generate
from minitx.nn import DecoderLM
from minitx.nn.linear import LEAST_WEIGHTS, MOST_ROWS, Linear, product_in_halves

WIDE = 257, 263  # more weights than LEAST_WEIGHTS


class Products(TorchDispatchMode):
    """Counts batched products and all others."""

    def __init__(self):
        super().__init__()
        self.in_halves = self.whole = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.in_halves += func is torch.ops.aten.bmm.default
        self.whole += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.mv.default)
        return func(*args, **(kwargs or {}))


def products(call):
    with Products() as counted:
        call()
    return counted.in_halves, counted.whole


@given(st.integers(1, 4), st.integers(1, 13), st.integers(1, 11), st.integers(0, 2**31))
def test_halves_give_the_product_of_the_whole_matrix(num_rows, width, outputs, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, weight = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (num_rows, outputs))
    out = product_in_halves(rows, weight)
    torch.testing.assert_close(out, rows @ weight.t(), rtol=1e-13, atol=1e-13)
    assert out.is_contiguous()


@pytest.mark.parametrize("shape", [(257,), (1, 257), (4, 257), (2, 1, 257), (1, 1, 3, 257)])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_those_of_a_plain_linear_map(shape, bias):
    torch.manual_seed(0)
    ours = Linear(*WIDE, bias=bias)
    judge = nn.Linear(*WIDE, bias=bias, dtype=torch.float64)
    judge.load_state_dict({name: value.double() for name, value in ours.state_dict().items()})
    x = torch.randn(shape, requires_grad=True)
    y = x.detach().double().requires_grad_()
    out, wanted = ours(x), judge(y)
    assert out.shape == wanted.shape == (*shape[:-1], 263)
    cotangent = torch.randn(out.shape)
    out.backward(cotangent)
    wanted.backward(cotangent.double())
    pairs = [
        (out, wanted),
        (x.grad, y.grad),
        *((p.grad, q.grad) for p, q in zip(ours.parameters(), judge.parameters(), strict=True)),
    ]
    for found, right in pairs:
        torch.testing.assert_close(found, right.float(), rtol=1e-5, atol=1e-5)


def test_second_derivatives_are_those_of_a_plain_linear_map():
    layer, x = Linear(*WIDE), torch.randn(2, 257, requires_grad=True)

    def curvature(call):
        (slope,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    torch.testing.assert_close(curvature(layer), curvature(lambda x: nn.functional.linear(x, layer.weight, layer.bias)))


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "in_halves"),
    [
        (1, 256, 256, True),
        (MOST_ROWS, 256, 256, True),
        (MOST_ROWS + 1, 256, 256, False),
        (0, 256, 256, False),
        (1, 256, LEAST_WEIGHTS // 256 - 1, False),
    ],
)
def test_few_rows_and_many_weights_take_halves(rows, inputs, outputs, in_halves):
    layer, x = Linear(inputs, outputs), torch.randn(rows, inputs)
    assert (products(lambda: layer(x))[0] > 0) is in_halves
    assert layer(x).shape == (rows, outputs)


def test_other_kinds_of_numbers_and_weights_take_the_usual_product():
    x, layer = torch.randn(1, 257), Linear(*WIDE)
    assert products(lambda: layer(x))[0] == 1
    double = copy.deepcopy(layer).double()
    assert products(lambda: double(x.double()))[0] == 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert products(lambda: layer(x))[0] == 0
    strided = copy.deepcopy(layer)
    strided.weight = nn.Parameter(torch.randn(257, 263).t())
    assert products(lambda: strided(x))[0] == 0
    batched = torch.func.vmap(lambda weight: torch.func.functional_call(layer, {"weight": weight}, (x,)))
    weights = torch.randn(3, 263, 257)
    torch.testing.assert_close(batched(weights), torch.stack([x @ weight.t() + layer.bias for weight in weights]))
    with pytest.raises(RuntimeError, match=r"same dtype|expected"):
        layer(x.double())


def test_rows_under_vmap_give_what_they_give_alone():
    layer, rows = Linear(*WIDE), torch.randn(7, 2, 257)
    torch.testing.assert_close(torch.func.vmap(layer)(rows), torch.stack([layer(row) for row in rows]))


def test_one_graph_with_the_usual_product_serves_any_number_of_rows():
    layer, graphs = Linear(*WIDE), []

    def keep(graph, inputs):
        graphs.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=keep)
    for rows in (2, 3, 4, 5, 7):
        x = torch.randn(rows, 257)
        torch.testing.assert_close(compiled(x), layer(x))
    assert graphs == [{torch._C._nn.linear}]


def test_every_product_of_a_decoding_step_is_made_in_halves():
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=521, embed_dim=256, num_heads=4, num_layers=2, max_len=32, tie_embeddings=False)
    model, counted = DecoderLM(config).eval(), []
    for name in ("q_proj", "k_proj", "v_proj", "out_proj", "up_proj", "down_proj", "head"):
        for module in (m for path, m in model.named_modules() if path.split(".")[-1] == name):
            module.register_forward_pre_hook(lambda m, args: counted.append(args[0].numel() // args[0].shape[-1]))
    with Products() as step:
        generate(model, torch.tensor([[1, 2, 3, 5, 7]]), max_new_tokens=3, stop=())
    few = sum(rows <= MOST_ROWS for rows in counted)
    assert few == 2 * 13 + 1  # two tokens after the prompt through 13 products, and the head for the prompt's last position
    assert step.in_halves == few
