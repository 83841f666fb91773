"""chunked: many tiles, no L x S matrix, replayed dropout, outside of compiled graphs."""

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from sizes import assert_same_with_gradients
from torch._dynamo.testing import CompileCounterWithBackend

import minitx.nn as mx
from minitx.nn import scaled_dot_product_attention as attention
from minitx.nn.backends import chunked
from minitx.nn.bias import Bias
from minitx.nn.counting import allocations, count_flops
from minitx.nn.functional import make_call


@pytest.mark.parametrize("kind", ["padded, grouped, fewer queries", "documents", "alibi", "t5, dropout, soft-cap and sinks"])
def test_no_tensor_is_as_large_as_an_eighth_of_the_scores_and_the_peak_is_below_one_matrix_of_them(kind):
    H, L, S, D = 4, 768 if "fewer" in kind else 1024, 1024, 8
    kv_heads = 1 if "grouped" in kind else H
    q, k, v = (torch.randn(1, heads, n, D, requires_grad=True) for heads, n in ((H, L), (kv_heads, S), (kv_heads, S)))
    bias, sinks = mx.T5RelativeBias(H), torch.randn(H, requires_grad=True)
    options = {
        "padded, grouped, fewer queries": {"attn_mask": mx.Padding(torch.arange(S)[None] >= 9), "is_causal": True},
        "documents": {"attn_mask": mx.Documents(torch.arange(S)[None] // 100) | mx.SlidingWindow(5)},
        "alibi": {"attn_bias": mx.ALiBi(slopes=torch.rand(H, requires_grad=True))},
        "t5, dropout, soft-cap and sinks": {"attn_bias": bias, "dropout_p": 0.1, "softcap": 5.0, "sinks": sinks},
    }[kind]
    largest, peak = allocations(lambda: attention(q, k, v, **options, backend="chunked").sum().backward())
    assert largest * 8 <= 4 * H * L * S
    math_largest, math_peak = allocations(lambda: attention(q, k, v, **options, backend="math").sum().backward())
    assert math_largest >= 4 * H * L * S and math_peak >= 3 * 4 * H * L * S  # the recorder would have seen it
    assert peak <= (0.75 if "t5" in kind else 0.5) * 4 * H * L * S


def test_tiles_that_a_rule_hides_are_skipped_in_both_passes(monkeypatch):
    monkeypatch.setattr(chunked, "LARGEST", 64)
    q = torch.randn(1, 1, 320, 4, requires_grad=True)

    def flops(mask):
        return count_flops(lambda: attention(q, q, q, mask, backend="chunked").sum().backward())

    tile = flops(None) / 25
    assert flops(mx.Causal()) == 15 * tile
    assert flops(mx.Causal() & mx.SlidingWindow(64)) == 9 * tile  # linear in the length
    assert flops(mx.Causal() & mx.Padding(torch.arange(320)[None] < 130)) == 12 * tile  # the last two columns are padding
    assert flops(mx.Causal() & mx.Documents(torch.arange(320)[None] // 64)) == 5 * tile
    assert 5 * tile <= flops(mx.BlockSparse(torch.eye(5, dtype=torch.bool), 64)) < 5.1 * tile  # and a product of small patterns
    assert flops(mx.Dense(torch.eye(320, dtype=torch.bool))) == 5 * tile


NARROW = {
    "window": mx.SlidingWindow(20),
    "window or prefix": mx.SlidingWindow(40) | mx.PrefixLM(40),
    "blocks": mx.BlockSparse(torch.ones(9, 9, dtype=torch.bool).tril(1).triu(-3), 16),
    "blocks and dense": mx.BlockSparse(torch.ones(9, 9, dtype=torch.bool).tril(2), 16)
    & ((7 * torch.arange(131)[:, None] + 3 * torch.arange(131)) % 11 > 0),
}


@pytest.mark.parametrize("name", NARROW)
def test_neighbours_of_a_fine_grain_are_one_product_and_the_answer_is_maths(monkeypatch, name):
    monkeypatch.setattr(chunked, "LARGEST", 128)
    monkeypatch.setattr(chunked, "SMALLEST", 32)
    shape, mask = (1, 2, 131, 131), NARROW[name]
    q, k, v = (torch.randn(*shape[:3], 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    states = chunked.tile_states(mask, shape, q.device)
    products = [part for _, strip in chunked.tiles(mask, shape, states) for part in strip]
    assert len(products) < (states > 0).sum() < states.numel()
    got, wanted = (attention(q, k, v, mask, backend=backend) for backend in ("chunked", "math"))
    assert_same_with_gradients(got, wanted, (q, k, v))


def factors_of(call, seed):
    """The whole matrix of dropout factors that the tiles of a call draw."""
    settings = chunked.Settings.of(call, seed)
    problem = chunked.Problem(settings, call.query, call.key, call.value, None, ())
    whole = torch.full(call.shape, torch.nan, dtype=call.query.dtype)
    for rows, strip in settings.plan:
        for keys, _ in strip:
            whole[:, :, rows, keys] = problem.dropout(rows, keys)
    return whole


@pytest.mark.usefixtures("tiny_tiles", "default_bfloat16")
def test_dropout_is_replayed_in_the_backward_pass():
    q, k, v = (torch.randn(2, 2, n, 5, dtype=torch.float64, requires_grad=True) for n in (9, 11, 11))
    torch.manual_seed(7)
    factors = factors_of(make_call(q, k, v, None, 0.4), int(torch.randint(2**31, ()))).detach()
    assert set(factors.unique().tolist()) == {0.0, 1 / 0.6}
    torch.manual_seed(7)
    got = attention(q, k, v, None, 0.4, True, scale=0.3, backend="chunked")
    scores = (q @ k.mT * 0.3).masked_fill(~mx.Causal().dense(9, 11), -torch.inf)
    want = (scores.softmax(-1) * factors.where(mx.Causal().dense(9, 11), 0.0)) @ v
    torch.set_default_dtype(torch.float32)
    assert_same_with_gradients(got, want, (q, k, v), tolerance=1e-14)


def test_dropout_follows_torchs_seed_and_differs_from_tile_to_tile_and_call_to_call():
    q = torch.randn(1, 1, 600, 4)
    seeded = (torch.manual_seed(1) for _ in range(2))
    first, again = ([attention(q, q, q, None, 0.5, backend="chunked") for _ in range(2)] for _ in seeded)
    assert torch.equal(first[0], again[0]) and not torch.equal(*first)
    factors = factors_of(make_call(q, q, q, None, 0.5), 7)[0, 0, :512, :512]
    assert abs((factors > 0).float().mean() - 0.5) < 5 * 0.5 / 512
    tiles = [tile for rows in factors.split(256) for tile in rows.split(256, dim=1)]
    assert len({tuple(tile.flatten().tolist()) for tile in tiles}) == 4


def test_it_says_that_it_is_not_twice_differentiable():
    q, head = torch.randn(1, 1, 3, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    output = attention(q, q, q, backend="chunked") @ head
    grad, of_head = torch.autograd.grad(output.square().sum(), (q, head), create_graph=True)
    torch.autograd.grad(of_head.sum(), (q, head), retain_graph=True)  # needs the first derivative only
    with pytest.raises(RuntimeError, match="backend='math'"):
        grad.sum().backward()


def test_a_mask_made_in_inference_mode_serves_training():
    q = torch.randn(1, 1, 5, 2, requires_grad=True)
    with torch.inference_mode():
        mask = mx.Padding(torch.tensor([[True, True, True, False, False]]))
    got, want = (torch.autograd.grad(attention(q, q, q, mask, backend=name).sum(), q)[0] for name in ("chunked", "math"))
    torch.testing.assert_close(got, want)


def test_a_mask_that_changes_before_the_backward_pass_is_refused():
    q, real = torch.randn(1, 1, 5, 2, requires_grad=True), torch.tensor([[True, True, True, False, False]])
    out = attention(q, q, q, mx.Padding(real) & mx.Causal(), backend="chunked").sum()
    real.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("kind", ["a rule", "a tensor"])
def test_a_bias_made_in_a_checkpointed_function_is_not_kept_and_gets_its_gradient(kind):
    q, weight, kept = torch.randn(1, 3, 7, 5, requires_grad=True), torch.randn(3, requires_grad=True), []

    def call(q, weight):
        slopes = weight.exp()
        made = mx.ALiBi(slopes=slopes) if kind == "a rule" else slopes.view(1, 3, 1, 1).expand(1, 3, 7, 7).contiguous()
        kept.append(weakref.ref(slopes if kind == "a rule" else made))
        return attention(q, q, q, attn_bias=made, backend="chunked")

    out = torch.utils.checkpoint.checkpoint(call, q, weight, use_reentrant=False)
    gc.collect()
    assert kept[0]() is None
    assert_same_with_gradients(out, call(q, weight), (q, weight), tolerance=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo asks for it where a graph goes on after a break
def test_a_compiled_graph_breaks_at_it_and_the_answer_is_the_same():
    counter, bias = CompileCounterWithBackend("aot_eager"), mx.T5RelativeBias(4)
    torch.nn.init.normal_(bias.weight)

    def call(q, k, v, real, sinks):
        mask = mx.Causal() & mx.Padding(real) & mx.SlidingWindow(9)
        return 2 * attention(q, k, v, mask, attn_bias=bias, softcap=5.0, sinks=sinks, backend="chunked")

    torch._dynamo.reset()
    compiled = torch.compile(call, backend=counter)
    for length in (5, 7, 24):
        leaves = [torch.randn(2, heads, length, 8, requires_grad=True) for heads in (4, 2, 2)]
        arguments = (*leaves, torch.rand(2, length) > 0.2, torch.randn(4, requires_grad=True))
        wanted = [*leaves, arguments[-1], bias.weight]
        assert_same_with_gradients(compiled(*arguments), call(*arguments), wanted, tolerance=0)
    names = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert counter.frame_count and not any("amax" in name or "matmul" in name for name in names)
    (report,) = (line for line in mx.explain_backends(*leaves, backend="chunked") if line.runs)
    assert "graph" in report.reason


@pytest.mark.usefixtures("chunked_from_the_start")
@pytest.mark.parametrize(
    "options", [{"softcap": 3.0}, {"attn_mask": mx.SlidingWindow(9) & mx.Causal()}, {"dropout_p": 0.5}], ids=str
)
def test_auto_does_without_it_while_compiling(options):
    q = torch.randn(1, 2, 37, 8)
    assert next(line.name for line in mx.explain_backends(q, q, q, **options) if line.runs) == "chunked"
    torch._dynamo.reset()
    got = torch.compile(lambda q: attention(q, q, q, **options), backend="eager", fullgraph=True)(q)
    if "dropout_p" not in options:
        torch.testing.assert_close(got, attention(q, q, q, **options, backend="math"), rtol=0, atol=1e-6)


def test_auto_takes_it_from_the_measured_sizes_on_and_they_count_as_reached(monkeypatch):
    def runs(L, S, *, heads=1, device="cpu", window=None, **options):
        q, k = torch.zeros(1, heads, L, 4, device=device), torch.zeros(1, heads, S, 4, device=device)
        mask = None if window is None else mx.SlidingWindow(window) & mx.Causal()
        return next(report.name for report in mx.explain_backends(q, k, k, mask, **options) if report.runs)

    assert (runs(512, 512, heads=8, softcap=3.0), runs(511, 511, heads=8, softcap=3.0)) == ("chunked", "math")
    assert (runs(512, 512, heads=8), runs(512, 512, heads=8, dropout_p=0.1)) == ("sdpa", "chunked")
    assert (runs(1, 9, softcap=3.0), runs(2, 9, softcap=3.0)) == ("chunked", "math")  # one query is one tile
    assert (runs(2048, 2048, window=64), runs(2048, 2048, window=300)) == ("chunked", "sdpa")  # 15 and 21 of 64 tiles
    assert (runs(2048, 2048, window=64, device="meta")) == "sdpa"  # torch's kernels elsewhere were not measured
    monkeypatch.setattr(mx.backends, "CHUNKED_FROM", 64 * 64)
    monkeypatch.setattr(mx.backends, "CHUNKED_FROM_OVER_PLAIN", 64 * 65)
    learns = torch.zeros(1, 1, 64, 65, requires_grad=True)  # torch's fused kernel has no gradient of a bias
    assert (runs(64, 64, attn_bias=learns[..., 1:]), runs(64, 65, attn_bias=learns)) == ("sdpa", "chunked")
    assert (runs(64, 64, softcap=3.0), runs(64, 63, softcap=3.0)) == ("chunked", "math")


@pytest.mark.usefixtures("tiny_tiles")
def test_the_gradient_of_a_low_precision_bias_is_rounded_once_and_not_at_every_tile():
    q, k = torch.randn(1, 1, 63, 4), torch.randn(1, 1, 5, 4)
    low = torch.randn(1, 1, 1, 5, dtype=torch.bfloat16, requires_grad=True)
    wide = low.detach().float().requires_grad_()
    for bias in (low, wide):
        attention(q, k, k, attn_bias=bias, backend="chunked").square().sum().backward()
    assert torch.equal(low.grad, wide.grad.bfloat16())


def test_a_bias_whose_tensors_are_hidden_is_refused():
    class Steep(Bias):
        def value(self, batch, head, row, key, offset):
            return 0.5 * (key - row)

    q = torch.randn(1, 1, 4, 2)
    with pytest.raises(NotImplementedError, match="Steep"):
        attention(q, q, q, attn_bias=Steep(), backend="chunked")
    assert next(line.name for line in mx.explain_backends(q, q, q, attn_bias=Steep(), softcap=1.0) if line.runs) == "math"


@dataclass(frozen=True, eq=False)
class Polynomial(mx.Bias):
    """The bias Σ_n c_n (i − j)^n."""

    coefficients: tuple[torch.Tensor, ...]

    def value(self, batch, head, row, key, offset):
        return sum(c * (row + offset - key) ** n for n, c in enumerate(self.coefficients))


def test_a_bias_with_a_tuple_of_tensors_has_the_gradients_of_math():
    q, k, v = (torch.randn(2, 3, n, 5, dtype=torch.float64) for n in (7, 11, 11))
    results = []
    for backend in ("math", "chunked"):
        coefficients = tuple(torch.tensor(c, dtype=torch.float64, requires_grad=True) for c in (0.3, -0.2, 0.1))
        out = attention(q, k, v, attn_bias=Polynomial(coefficients), backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), coefficients)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
