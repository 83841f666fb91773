"""``config.attention`` names a core or a whole layer: a subclass of ``MultiHeadAttention`` with its own ``project`` or ``merge``."""

import pytest
import torch

from minitx.config import TransformerConfig, node
from minitx.config.schema import Positive
from minitx.nn import DecoderLM, DotProductAttention, MultiHeadAttention, build_model
from minitx.nn.config_differences import changes_of


class Numbered(MultiHeadAttention):
    """Multiplies its output by ``factor``, and its values by its number."""

    def __init__(self, embed_dim, num_heads, *, layer: int, factor: Positive = 3.0, **options):
        super().__init__(embed_dim, num_heads, **options)
        self.layer, self.factor = layer, factor

    def project(self, query, key, value, rotation):
        q, k, v = super().project(query, key, value, rotation)
        return q, k, None if v is None else v * (self.layer + 1)

    def merge(self, heads, query):
        return self.factor * super().merge(heads, query) + query


OF_OWN = {"vocab_size": 11, "embed_dim": 12, "num_heads": 3, "num_layers": 2, "init": "lecun"}


def same_weights(config, **changes):
    models = []
    for fields in ({}, changes):
        torch.manual_seed(0)
        models.append(build_model(TransformerConfig(**config, **fields)).double().eval())
    return models


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"position": "rotary", "qk_norm": "rms", "num_kv_heads": 1, "bias": False}], ids=str)
def test_a_config_names_a_whole_layer_which_gets_the_models_options_and_its_own_keys(options):
    plain, model = same_weights({**OF_OWN, **options}, attention=node(Numbered, factor=2.0))
    ids = torch.tensor([[1, 2, 3, 5, 7]])
    for number, block in enumerate(model.blocks):
        theirs, ours = plain.blocks[number].attention, block.attention
        assert (type(ours), ours.layer, ours.factor) == (Numbered, number, 2.0)
        x = torch.randn(2, 5, 12, dtype=torch.float64)
        bias = 0.0 if ours.out_proj.bias is None else ours.out_proj.bias
        expected = 2.0 * ((number + 1) * (theirs(x, is_causal=True) - bias) + bias) + x
        torch.testing.assert_close(ours(x, is_causal=True), expected, rtol=0, atol=1e-12)
    assert changes_of(model) == []
    model.blocks[1].attention.factor = 5.0
    assert changes_of(model) == ["blocks.1.attention.factor is 5.0, not 2.0"]
    cache, pieces = model.make_cache(5), []
    model.blocks[1].attention.factor = 2.0
    for piece in (ids[:, :2], ids[:, 2:3], ids[:, 3:]):
        pieces.append(model(piece, cache=cache))
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids), rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_layer_of_ones_own_is_also_the_cross_attention_and_remembers_the_memory():
    model = same_weights({**OF_OWN, "architecture": "encoder_decoder"}, attention=node(Numbered))[1]
    assert [block.cross_attention.layer for block in model.blocks] == [0, 1]
    source, target = torch.tensor([[1, 2, 3, 5, 7]]), torch.tensor([[2, 3, 4]])
    memory, cache, keys = model.encode(source), model.make_cache(3), []
    projected = model.blocks[0].cross_attention.k_proj.register_forward_hook(lambda *call: keys.append(call[-1]))
    with projected:
        steps = [model(None, target[:, i : i + 1], memory=memory, cache=cache) for i in range(3)]
    assert len(keys) == 1  # of the memory, in the first step
    torch.testing.assert_close(torch.cat(steps, dim=1), model(source, target), rtol=0, atol=1e-12)


def numbered_core(layer: int, embed_dim: int, head_dim: int):
    core = DotProductAttention(backend="math")
    core.sizes = layer, embed_dim, head_dim
    return core


def test_a_core_of_ones_own_gets_its_layer_and_the_sizes_that_it_names():
    model = DecoderLM(TransformerConfig(**OF_OWN, attention=node(numbered_core)))
    assert [block.attention.core.sizes for block in model.blocks] == [(0, 12, 4), (1, 12, 4)]


@pytest.mark.parametrize(("keys", "message"), [
    ({"factor": -1.0}, r"attention\.factor=-1\.0 must be"), ({"dropout": 0.1}, r"attention\.dropout is set by the model"),
    ({"num_heads": 2}, r"attention\.num_heads is set by the model"), ({"factr": 2.0}, "factr"),
])  # fmt: skip
def test_a_key_of_a_layer_that_is_wrong_or_belongs_to_the_model_is_refused_by_name(keys, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build_model(TransformerConfig(**OF_OWN, attention=node(Numbered, **keys)))
