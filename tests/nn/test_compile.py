"""One graph for all lengths: no breaks, no recompiling, the same numbers; and export."""

import pytest
import torch
from sizes import small_model, tokens
from torch import nn
from torch.export import Dim

from minitx.config import TransformerConfig
from minitx.nn import KVCache, MultiHeadAttention, Padding, SlidingWindow, scaled_dot_product_attention
from minitx.nn.efficient import LinearAttention, LinformerAttention, PerformerAttention
from minitx.nn.models.parts import build_bias, build_block

V, E, H, LENGTHS = 13, 12, 3, (3, 4, 5, 7, 11, 16, 22)
LLAMA = {"position": "rotary", "num_kv_heads": 1, "norm": "rms", "activation": "swiglu", "bias": False}
BLOCKS = {
    "pre": {},
    "llama": LLAMA,
    "interleaved yarn, post": {
        "position": "rotary", "rotary_interleaved": True, "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_len": 8, "norm_position": "post",
    },
    "alibi, parallel, window": {"position": "alibi", "parallel": True, "window": 8},
    "t5, sandwich": {"position": "t5", "norm_position": "sandwich"},
    "learned scale, qk-norm, deepnorm": {"scale": "learned", "qk_norm": "l2", "norm_position": "deepnorm"},
    "log_length, soft-cap, sinks": {"scale": "log_length", "softcap": 3.0, "sinks": True},
    "dropout, layer scale": {"dropout": 0.1, "stochastic_depth": 0.3, "layer_scale": 0.1},
    "experts in parallel": {"num_experts": 4, "parallel": True},
    "chunked": {"backend": "chunked"},
}  # fmt: skip


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


def built(kind, training=True):
    torch.manual_seed(0)
    settings = TransformerConfig(vocab_size=V, embed_dim=E, num_heads=H, num_layers=1, max_len=32, **BLOCKS[kind])
    block = build_block(settings, 0, 1, causal="parallel" not in kind)
    return WithMask(block, settings).train(training)


def same_in_one_or_two_graphs(module, batches, tolerance=1e-6):
    """Compiled without a break, at most twice for all batches, with the numbers of the plain module."""
    graphs = Graphs()
    compiled = torch.compile(module, backend=graphs, fullgraph=True)
    for arguments, options in batches:
        results = []
        for run in (module, compiled):
            torch.manual_seed(1)  # dropout draws alike
            results.append(run(*arguments, **options))
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=tolerance)
    assert graphs.count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_compiles_whole_and_at_most_twice_for_several_lengths(kind):
    batches = (((torch.randn(2, length, E), torch.rand(2, length) < 0.8), {}) for length in LENGTHS)
    same_in_one_or_two_graphs(built(kind), batches)


@pytest.mark.parametrize(
    "backend", ["math", pytest.param("sdpa", marks=pytest.mark.slow), pytest.param("chunked", marks=pytest.mark.slow)]
)
def test_a_scale_that_changes_from_call_to_call_compiles_whole(backend):
    def call(q, scale):
        return scaled_dot_product_attention(q, q, q, is_causal=True, scale=scale, backend=backend)

    compiled, q = torch.compile(call, backend="eager", fullgraph=True), torch.randn(1, 2, 5, 4)
    for scale in (0.5, 0.25, 1.0):
        torch.testing.assert_close(compiled(q, scale), call(q, scale), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pre", "experts in parallel", "t5, sandwich", "chunked"])
def test_compiled_gradients_are_those_of_the_plain_block(kind):
    module, results = built(kind), []
    x, real = torch.randn(2, 7, E), torch.rand(2, 7) < 0.8
    for run in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        module.zero_grad()
        run(x, real).square().sum().backward()
        results.append({name: p.grad.clone() for name, p in module.named_parameters()})
    for name, grad in results[0].items():
        torch.testing.assert_close(results[1][name], grad, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        LLAMA,
        *(pytest.param(o, marks=pytest.mark.slow) for o in ({"checkpointing": True}, {"num_experts": 4, "position": "t5"})),
    ],
)
def test_a_model_compiles_whole_and_at_most_twice_for_several_lengths(options):
    batches = (((tokens(2, length),), {"key_mask": torch.rand(2, length) < 0.8}) for length in LENGTHS)
    same_in_one_or_two_graphs(small_model(**options), batches)


@pytest.mark.slow
@pytest.mark.parametrize("position", ["learned", "rotary", "t5"])
def test_decoding_with_a_cache_compiles_whole_and_at_most_twice(position):
    model, graphs = small_model(position=position).eval(), Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    ids, cache = tokens(2, 30), KVCache(32, num_layers=2)
    with torch.no_grad():
        got = [compiled(piece, cache=cache) for piece in ids.split([10] + [1] * 20, dim=1)]
        torch.testing.assert_close(torch.cat(got, dim=1), model(ids), rtol=0, atol=1e-6)
    assert graphs.count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_is_exported_with_dynamic_batch_and_length(kind):
    module = built(kind, training=False)
    shapes = {"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, "key_mask": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}
    example = torch.randn(2, 5, E), torch.ones(2, 5, dtype=torch.bool)
    exported = torch.export.export(module, example, dynamic_shapes=shapes).module()
    for batch, length in ((2, 5), (3, 7), (5, 19), (2, 31)):
        x, real = torch.randn(batch, length, E), torch.rand(batch, length) < 0.8
        torch.testing.assert_close(exported(x, real), module(x, real), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [LLAMA, pytest.param({"num_experts": 4}, marks=pytest.mark.slow)])
def test_a_model_is_exported_with_dynamic_batch_and_length(options):
    model, dynamic = small_model(**options).eval(), {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    shapes = {"input_ids": dynamic, "key_mask": dynamic}
    described = {"key_mask": torch.ones(2, 5, dtype=torch.bool)}
    exported = torch.export.export(model, (tokens(2, 5),), kwargs=described, dynamic_shapes=shapes).module()
    for batch, length in ((2, 5), (3, 7), (5, 19)):
        ids, real = tokens(batch, length), torch.rand(batch, length) < 0.8
        torch.testing.assert_close(exported(ids, key_mask=real), model(ids, key_mask=real), rtol=0, atol=1e-6)


EFFICIENT = {
    "linformer": (lambda: LinformerAttention(32, 3), False),
    "linear": (LinearAttention, False),
    "performer, causal": (lambda: PerformerAttention(4, chunk_size=32), True),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EFFICIENT)
def test_an_efficient_core_compiles_whole_and_at_most_twice_for_several_lengths(kind):
    build, causal = EFFICIENT[kind]
    attention = MultiHeadAttention(E, H, core=build())
    options = [{"key_mask": torch.rand(2, length) < 0.8, "is_causal": causal} for length in LENGTHS]
    same_in_one_or_two_graphs(attention, (((torch.randn(2, o["key_mask"].shape[1], E),), o) for o in options), 1e-5)
