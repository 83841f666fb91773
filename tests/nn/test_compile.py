"""One graph for all lengths: no breaks, no recompiling, the same numbers; and export."""

import itertools

import pytest
import torch
from sizes import tokens
from test_every_model import IMAGES, MODELS
from test_every_model import model as built
from torch._dynamo.testing import CompileCounter
from torch.export import Dim

from minitx.nn import KVCache, scaled_dot_product_attention

LENGTHS = (3, 4, 5, 7, 11, 16, 22)
YARN = {"rotary_interleaved": True, "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_len": 8}
KINDS = {  # a model of test_every_model.py, and what is changed in it
    "llama": {},
    "bert": {},
    "t5": {},
    "vision": {},
    "gpt2": {"checkpointing": True, "dropout": 0.1, "stochastic_depth": 0.3, "layer_scale": 0.1},
    "llama, yarn": {**YARN, "norm_position": "post"},
    "decoder with alibi and a window": {"parallel": True},
    "gpt2, learned scale": {"scale": "learned", "qk_norm": "l2", "norm_position": "deepnorm"},
    "gpt2, log_length": {"scale": "log_length", "softcap": 3.0, "sinks": True},
    "gpt2, performer": {"attention": "performer"},
    "bert, linformer": {"attention": "linformer", "num_slots": 3},
}


def model(kind):
    return built(kind if kind in MODELS else kind.partition(",")[0], num_layers=1, **KINDS[kind])


def batch(network, rows, length):
    """Inputs by name; padding is anywhere, and of pictures there are ``length``."""
    architecture = network.config.architecture
    if architecture == "vision":
        return {"pixel_values": torch.randn(length, IMAGES["num_channels"], 6, 6, dtype=torch.float64)}
    given = {"input_ids": tokens(rows, length), "key_mask": torch.rand(rows, length) < 0.8}
    if architecture == "encoder_decoder":
        target = {"decoder_input_ids": tokens(rows, length + 2), "decoder_key_mask": torch.rand(rows, length + 2) < 0.8}
        given = {**given, **target}
    return given


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_compiles_whole_and_at_most_twice_for_several_sizes(kind):
    network, graphs = model(kind), CompileCounter()
    compiled = torch.compile(network, backend=graphs, fullgraph=True)
    for rows, length in zip(itertools.cycle((2, 3, 5)), LENGTHS):
        given, results = batch(network, rows, length), []
        for run in (network, compiled):
            torch.manual_seed(1)  # dropout draws alike
            results.append(run(**given))
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-10)
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.release] * (kind != "llama")) for kind in KINDS])
def test_a_model_is_exported_with_dynamic_batch_and_length(kind):
    network = model(kind).eval()
    given = batch(network, 2, 5)
    dynamic = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} if "input_ids" in given else {0: Dim.DYNAMIC}
    exported = torch.export.export(network, (), kwargs=given, dynamic_shapes=dict.fromkeys(given, dynamic)).module()
    for rows, length in ((2, 5), (3, 7), (5, 19)):
        given = batch(network, rows, length)
        torch.testing.assert_close(exported(**given), network(**given), rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("position", ["rotary", "t5"])
def test_decoding_with_a_cache_compiles_whole_and_at_most_twice(position):
    network, graphs = built("gpt2", position=position).eval(), CompileCounter()
    compiled = torch.compile(network, backend=graphs, fullgraph=True)
    ids, cache = tokens(2, 30), KVCache(32, num_layers=2)
    with torch.no_grad():
        got = [compiled(piece, cache=cache) for piece in ids.split([10] + [1] * 20, dim=1)]
        torch.testing.assert_close(torch.cat(got, dim=1), network(ids), rtol=0, atol=1e-10)
    assert graphs.frame_count <= 2


def test_a_scale_that_changes_from_call_to_call_compiles_whole():
    def call(q, scale):
        return scaled_dot_product_attention(q, q, q, is_causal=True, scale=scale, backend="math")

    compiled, q = torch.compile(call, backend="eager", fullgraph=True), torch.randn(1, 2, 5, 4)
    for scale in (0.5, 0.25, 1.0):
        torch.testing.assert_close(compiled(q, scale), call(q, scale), rtol=0, atol=1e-6)
