"""One graph for all lengths: no breaks, no recompiling, the same numbers; and export."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.export import Dim

from minitx.config import TransformerConfig
from minitx.nn import (
    Block,
    DecoderLM,
    FeedForward,
    KVCache,
    MultiHeadAttention,
    Padding,
    SlidingWindow,
    scaled_dot_product_attention,
)
from minitx.nn.efficient import LinearAttention, LinformerAttention, PerformerAttention
from minitx.nn.models.parts import build_bias, build_block

V, E, H, LENGTHS = 13, 12, 3, range(3, 23)
BLOCKS = {
    "pre": {},
    **{kind: {"norm_position": kind} for kind in ("post", "sandwich", "deepnorm")},
    "parallel": {"parallel": True},
    "rms and swiglu": {"norm": "rms", "activation": "swiglu", "bias": False},
    "rotary": {"position": "rotary", "num_kv_heads": 1},
    "interleaved yarn": {
        "position": "rotary", "rotary_interleaved": True, "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_len": 8,
    },
    "alibi": {"position": "alibi"},
    "t5": {"position": "t5"},
    "window": {"window": 8},
    "learned scale": {"scale": "learned"},
    "log_length": {"scale": "log_length"},
    "qk-norm": {"qk_norm": "l2"},
    "soft-cap and sinks": {"softcap": 3.0, "sinks": True},
    "dropout": {"dropout": 0.1, "stochastic_depth": 0.3},
    "layer scale": {"layer_scale": 0.1},
    "experts": {"num_experts": 4},
    "experts in parallel": {"num_experts": 4, "parallel": True},
    **{backend: {"backend": backend} for backend in ("math", "sdpa", "chunked")},
}  # fmt: skip


# a compilation takes a second: these as decoder blocks by default, these and some more in the slow tier, the rest in the long one
QUICK = {"pre", "rotary"}
SLOW = {*QUICK, "window", "experts", "dropout"}


def cases(*, decoder):
    def marks(kind):
        if decoder and kind in QUICK:
            return ()
        return pytest.mark.slow if kind in SLOW else pytest.mark.long

    return [pytest.param(kind, decoder, marks=marks(kind)) for kind in BLOCKS]


def config(**options):
    return TransformerConfig(**{"vocab_size": V, "embed_dim": E, "num_heads": H, "num_layers": 1, "max_len": 32, **options})


class Graphs:
    """A backend that counts what it is given to compile."""

    def __init__(self):
        self.count = 0

    def __call__(self, module, inputs):
        self.count += 1
        return module.forward


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class WithMask(nn.Module):
    """A block as a model calls it: the mask and the bias are made from tensors inside."""

    def __init__(self, block, config):
        super().__init__()
        self.block, self.window = block, config.window
        self.attn_bias = build_bias(config, decoder=block.causal)

    def forward(self, x, key_mask):
        mask = Padding(key_mask) if self.window is None else Padding(key_mask) & SlidingWindow(self.window)
        return self.block(x, attn_mask=mask, attn_bias=self.attn_bias)


def built(kind, decoder, training=True):
    torch.manual_seed(0)
    settings = config(**BLOCKS[kind])
    return WithMask(build_block(settings, 0, 1, causal=decoder), settings).train(training)


@pytest.mark.parametrize(("kind", "decoder"), [*cases(decoder=True), *cases(decoder=False)])
def test_a_block_compiles_whole_and_at_most_twice_for_twenty_lengths(kind, decoder):
    module, graphs = built(kind, decoder), Graphs()
    compiled = torch.compile(module, backend=graphs, fullgraph=True)
    for length in LENGTHS:
        x, real = torch.randn(2, length, E), torch.rand(2, length) < 0.8
        results = []
        for run in (module, compiled):
            torch.manual_seed(1)  # dropout draws alike
            results.append(run(x, real))
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-6)
    assert graphs.count <= 2


@pytest.mark.parametrize("backend", ["math", "sdpa", "chunked"])
def test_a_scale_that_changes_from_call_to_call_compiles_whole(backend):
    def call(q, scale):
        return scaled_dot_product_attention(q, q, q, is_causal=True, scale=scale, backend=backend)

    compiled, q = torch.compile(call, backend="eager", fullgraph=True), torch.randn(1, 2, 5, 4)
    for scale in (0.5, 0.25, 1.0):
        torch.testing.assert_close(compiled(q, scale), call(q, scale), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["pre", "experts", "t5", "chunked", "sandwich"])
@pytest.mark.slow
def test_compiled_gradients_are_those_of_the_plain_block(kind):
    module, results = built(kind, True), []
    x, real = torch.randn(2, 7, E), torch.rand(2, 7) < 0.8
    for run in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        module.zero_grad()
        run(x, real).square().sum().backward()
        results.append({name: p.grad.clone() for name, p in module.named_parameters()})
    for name, grad in results[0].items():
        torch.testing.assert_close(results[1][name], grad, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_block_with_cross_attention_compiles_whole():
    cross = MultiHeadAttention(E, H, kdim=8, vdim=8)
    norm = partial(nn.LayerNorm, E)
    block = Block(MultiHeadAttention(E, H), FeedForward(E, 16), norm=norm, causal=True, cross_attention=cross)
    graphs = Graphs()
    compiled = torch.compile(block, backend=graphs, fullgraph=True)
    for length in LENGTHS:
        x, memory = torch.randn(2, length, E), torch.randn(2, length + 5, 8)
        torch.testing.assert_close(compiled(x, memory=memory), block(x, memory=memory), rtol=0, atol=1e-6)
    assert graphs.count <= 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"checkpointing": True, "position": "rotary"}, marks=pytest.mark.long),
        pytest.param({"num_experts": 4, "position": "t5"}, marks=pytest.mark.long),
    ],
)
def test_a_model_compiles_whole_and_at_most_twice_for_twenty_lengths(options):
    model, graphs = DecoderLM(config(num_layers=2, **options)), Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for length in LENGTHS:
        ids, real = torch.randint(1, V, (2, length)), torch.rand(2, length) < 0.8
        torch.testing.assert_close(compiled(ids, key_mask=real), model(ids, key_mask=real), rtol=0, atol=1e-6)
    assert graphs.count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("position", ["learned", "rotary", "t5"])
def test_decoding_with_a_cache_compiles_whole_and_at_most_twice(position):
    model, graphs = DecoderLM(config(num_layers=2, position=position)).eval(), Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    ids, cache = torch.randint(1, V, (2, 30)), KVCache(32, num_layers=2)
    with torch.no_grad():
        got = [compiled(piece, cache=cache) for piece in ids.split([10] + [1] * 20, dim=1)]
        torch.testing.assert_close(torch.cat(got, dim=1), model(ids), rtol=0, atol=1e-6)
    assert graphs.count <= 2


@pytest.mark.parametrize(
    "kind",
    [
        "pre",
        *(pytest.param(k, marks=pytest.mark.slow) for k in BLOCKS if k != "pre"),
    ],
)
def test_a_block_is_exported_with_dynamic_batch_and_length(kind):
    module = built(kind, True, training=False)
    shapes = {"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, "key_mask": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}
    example = torch.randn(2, 5, E), torch.ones(2, 5, dtype=torch.bool)
    exported = torch.export.export(module, example, dynamic_shapes=shapes).module()
    for batch, length in ((2, 5), (3, 7), (5, 19), (2, 31)):
        x, real = torch.randn(batch, length, E), torch.rand(batch, length) < 0.8
        torch.testing.assert_close(exported(x, real), module(x, real), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"position": "rotary", "num_kv_heads": 1, "activation": "swiglu"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"num_experts": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_model_is_exported_with_dynamic_batch_and_length(options):
    model = DecoderLM(config(num_layers=2, **options)).eval()
    dynamic = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    example = torch.randint(1, V, (2, 5)), {"key_mask": torch.ones(2, 5, dtype=torch.bool)}
    shapes = {"input_ids": dynamic, "key_mask": dynamic}
    exported = torch.export.export(model, example[:1], kwargs=example[1], dynamic_shapes=shapes).module()
    for batch, length in ((2, 5), (3, 7), (5, 19)):
        ids, real = torch.randint(1, V, (batch, length)), torch.rand(batch, length) < 0.8
        torch.testing.assert_close(exported(ids, key_mask=real), model(ids, key_mask=real), rtol=0, atol=1e-6)


EFFICIENT = {
    "linformer": (lambda: LinformerAttention(32, 3), False),
    "linear": (LinearAttention, False),
    "linear, causal": (lambda: LinearAttention(chunk_size=32), True),
    "performer, causal": (lambda: PerformerAttention(4, chunk_size=32), True),
}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == "linformer" else pytest.mark.long) for k in EFFICIENT])
def test_an_efficient_core_compiles_whole_and_at_most_twice_for_twenty_lengths_gradients_included(kind):
    build, causal = EFFICIENT[kind]
    attention, graphs = MultiHeadAttention(E, H, core=build()), Graphs()

    def call(x, real):
        return attention(x, key_mask=real, is_causal=causal)

    compiled = torch.compile(call, backend=graphs, fullgraph=True)
    for length in LENGTHS:
        x, real = torch.randn(2, length, E), torch.rand(2, length) < 0.8
        grads = []
        for run in (call, compiled):
            out = run(x, real)
            grads.append([out, *torch.autograd.grad(out.square().sum(), list(attention.parameters()))])
        for one, two in zip(*grads, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)
    assert graphs.count <= 2
