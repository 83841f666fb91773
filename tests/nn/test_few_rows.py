"""``FewRows`` changes which product runs, never what it gives: when it does, and that both agree."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minitx.config import TransformerConfig
from minitx.generation import generate
from minitx.nn import DecoderLM, FewRows
from minitx.nn.few_rows import LEAST_WEIGHTS, MOST_ROWS, faster_in_halves, linear_in_halves

WIDE = 733, 719  # more weights than LEAST_WEIGHTS


class Products(TorchDispatchMode):
    """Counts batched products, and all others."""

    def __init__(self):
        super().__init__()
        self.in_halves = self.whole = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.in_halves += func is torch.ops.aten.bmm.default
        self.whole += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.mv.default)
        return func(*args, **(kwargs or {}))


def halves_of(model, *inputs, grad=False):
    """How many products of a call are made in halves, without a gradient unless it is asked for."""
    with Products() as counted, FewRows(model), torch.set_grad_enabled(grad):
        model(*inputs)
    return counted.in_halves


@given(st.integers(1, 4), st.integers(1, 13), st.integers(1, 11), st.booleans(), st.integers(0, 2**31))
def test_halves_give_the_product_of_the_whole_matrix(num_rows, width, outputs, has_bias, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, weight = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (num_rows, outputs))
    bias = torch.randn(outputs, generator=generator, dtype=torch.float64) if has_bias else None
    out = linear_in_halves(rows, weight, bias)
    torch.testing.assert_close(out, F.linear(rows, weight, bias), rtol=1e-13, atol=1e-13)
    assert out.is_contiguous()


@pytest.mark.parametrize("shape", [(733,), (1, 733), (4, 733), (2, 1, 733), (1, 1, 3, 733)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_answers_as_without_the_context(shape, bias):
    torch.manual_seed(0)
    layer, x = nn.Linear(*WIDE, bias=bias), torch.randn(shape)
    judge = copy.deepcopy(layer).double()
    with torch.no_grad(), FewRows(layer):
        out = layer(x)
    assert halves_of(layer, x) == 1
    assert out.shape == (*shape[:-1], 719) and out.dtype == torch.float32
    torch.testing.assert_close(out, judge(x.double()).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "in_halves"),
    [
        (1, 512, LEAST_WEIGHTS // 512, True),
        (MOST_ROWS, 512, LEAST_WEIGHTS // 512, True),
        (MOST_ROWS + 1, 512, LEAST_WEIGHTS // 512, False),
        (0, 512, LEAST_WEIGHTS // 512, False),
        (1, 512, LEAST_WEIGHTS // 512 - 1, False),
    ],
)
def test_few_rows_and_many_weights_take_halves(rows, inputs, outputs, in_halves):
    layer = nn.Linear(inputs, outputs, bias=False)
    assert (halves_of(layer, torch.randn(rows, inputs)) > 0) is in_halves


def test_a_call_of_which_a_gradient_is_wanted_is_left_alone():
    layer, x = nn.Linear(*WIDE), torch.randn(1, 733)
    assert halves_of(layer, x, grad=True) == 0
    frozen = copy.deepcopy(layer).requires_grad_(False)
    assert halves_of(frozen, x, grad=True) == 1
    assert halves_of(frozen, x.clone().requires_grad_(), grad=True) == 0


def test_it_lasts_as_long_as_the_context_and_leaves_what_has_a_forward_of_its_own():
    layer, x = nn.Linear(*WIDE), torch.randn(1, 733)
    model = nn.Sequential(layer, nn.ReLU())
    fast = FewRows(model)
    for _ in range(2):  # again and again
        with torch.no_grad(), fast, Products() as inside:
            with FewRows(model), fast:  # one in the other
                model(x)
            model(x)
        with torch.no_grad(), Products() as outside:
            model(x)
        assert (inside.in_halves, outside.in_halves) == (2, 0)
    with pytest.raises(ZeroDivisionError), fast:
        _ = 1 / 0
    assert vars(layer).keys() == vars(nn.Linear(*WIDE)).keys()
    layer.forward = lambda x: x  # as some who wrap layers do
    with fast:
        assert layer(x) is x
    assert "forward" in vars(layer)


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_layer_that_computes_something_else_is_left_alone():
    layer, x = Twice(*WIDE), torch.randn(1, 733)
    assert halves_of(layer, x) == 0
    with torch.no_grad(), FewRows(layer):
        assert torch.equal(layer(x), 2 * F.linear(x, layer.weight, layer.bias))


def test_other_kinds_of_numbers_and_tensors_are_left_alone():
    layer, x = nn.Linear(*WIDE).requires_grad_(False), torch.randn(1, 733)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    assert faster_in_halves(x, weight, bias)
    assert not faster_in_halves(x.double(), weight.double(), bias.double())
    assert not faster_in_halves(x.to("meta"), weight.to("meta"), bias.to("meta"))
    assert not faster_in_halves(x, torch.randn(733, 719).t(), bias)
    assert not faster_in_halves(x, weight.to_sparse(), bias)
    assert not faster_in_halves(x.as_subclass(type("Own", (torch.Tensor,), {})), weight, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16), FewRows(layer):
        assert layer(x).dtype == torch.bfloat16
        assert not faster_in_halves(x, weight, bias)
    samples = torch.randn(7, 2, 733)
    with torch.no_grad(), FewRows(layer), Products() as step:
        torch.func.vmap(layer)(samples)
    assert step.in_halves == 0


@pytest.mark.parametrize("change", [{"input": (1, 500)}, {"input": ()}, {"bias": (3,)}, {"weight": (720, 730)}])
def test_what_does_not_fit_is_refused_in_the_words_of_torch(change):
    shapes = {"input": (1, 733), "weight": (719, 733), "bias": (719,), **change}
    input, weight, bias = (torch.zeros(shape) for shape in shapes.values())
    layer = nn.Linear(*WIDE)
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    with torch.no_grad(), pytest.raises(RuntimeError) as plain:
        layer(input)
    with torch.no_grad(), pytest.raises(RuntimeError) as ours, FewRows(layer):
        layer(input)
    assert str(ours.value) == str(plain.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_what_is_traced_or_compiled_serves_any_number_of_rows():
    layer, graphs = nn.Linear(*WIDE).requires_grad_(False), []

    def keep(graph, inputs):
        graphs.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=keep)
    with FewRows(layer):
        traced = torch.jit.trace(layer, torch.randn(3, 733))
        for rows in (2, 3, 5, 7):
            x = torch.randn(rows, 733)
            torch.testing.assert_close(compiled(x), layer(x))
            torch.testing.assert_close(traced(x), layer(x))
    assert graphs and all(graph == {torch._C._nn.linear} for graph in graphs)


def decoder(embed_dim):
    torch.manual_seed(0)
    sizes = {"vocab_size": 997, "embed_dim": embed_dim, "num_heads": 4, "num_layers": 2, "max_len": 32}
    return DecoderLM(TransformerConfig(**sizes, tie_embeddings=False)).eval()


def test_every_product_of_a_decoding_step_is_made_in_halves():
    model, rows, prompt = decoder(768), [], torch.tensor([[1, 2, 3, 5, 7]])
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda m, args: rows.append(args[0].numel() // args[0].shape[-1]))
    plain = [torch.cat([prompt[0]])]
    with torch.no_grad():
        for _ in range(3):
            plain.append(model(torch.cat(plain)[None])[0, -1].argmax()[None])
    rows.clear()
    with Products() as step:
        (answer,) = generate(model, prompt, max_new_tokens=3, stop=())
    assert answer.tolist() == torch.cat(plain[1:]).tolist()
    few = sum(number <= MOST_ROWS for number in rows)
    assert few == 2 * 13 + 1  # two tokens after the prompt through 13 products, and the head for the prompt's last position
    assert step.in_halves == few


def test_only_large_matrices_on_a_cpu_are_asked():
    assert [len(FewRows(model).layers) for model in (decoder(768), decoder(64), decoder(768).to("meta"))] == [13, 0, 0]
