"""One ``Net`` for networks of every kind. What it does with the models of transformers is in ``test_foreign.py``."""

import pytest
import torch
from torch import nn

from minitx.config import ConfigError, Part, TransformerConfig, from_dict, node, to_dict
from minitx.config.training import MODEL
from minitx.nn import build_model
from minitx.training.net import Net

SIZES = {"vocab_size": 11, "embed_dim": 12, "num_heads": 3, "num_layers": 2, "max_len": 16}
IDS = torch.tensor([[1, 5, 2, 7]])


class Words(nn.Module):
    """A model of one's own."""

    def __init__(self, vocab_size: int = 11) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, 4), nn.Linear(4, vocab_size)

    def forward(self, input_ids):
        return {"logits": self.head(self.embed(input_ids))}


def test_the_net_of_one_of_our_models_is_the_same_inside_of_a_compiled_one():
    network = build_model(TransformerConfig(**SIZES))
    for net in (Net.of(network), Net.of(torch.compile(network, backend="eager"))):
        assert (net.kind, net.config, net.head_dim) == ("DecoderLM", network.config, 4)
        assert (net.title, net.head) == ("decoder, heads of width 4, scale inv_sqrt", network.head)
        assert net.describe().endswith("num_layers 2, num_heads 3, embed_dim 12")
        assert net.inputs({"input_ids": IDS, "labels": IDS}).keys() == {"input_ids"}
        assert [type(layer).__name__ for layer in net.layers()] == ["Block", "Block"]


def test_the_node_of_one_of_our_models_builds_it_again():
    config = TransformerConfig(**SIZES, scale="unscaled", window=(3, None))
    stored = Net.of(build_model(config)).node(Part.of_object(object(), "model"), {})
    assert stored == {"_target_": MODEL, **to_dict(config)}
    assert (
        Part.of(stored, "model").fields
        == config
        == from_dict(TransformerConfig, {k: v for k, v in stored.items() if k != "_target_"})
    )


def test_the_node_of_a_model_of_ones_own_has_what_the_data_decided():
    net, part = Net.of(Words()), Part.read(node(Words), "model")
    assert net.node(part, {"vocab_size": 11, "num_labels": 3}) == {"_target_": f"{__name__}.Words", "vocab_size": 11}
    assert net.node(Part.of_object(net.network, "model"), {}) == {"_target_": f"{__name__}.Words"}


def test_a_model_of_ones_own_writes_text_through_its_logits_and_is_a_decoder_of_any_length():
    net = Net.of(Words())
    assert (net.config, net.head, net.title, net.shape.architecture) == (None, None, "Words", "decoder")
    torch.testing.assert_close(net.writer(11, "a.ckpt")(IDS), net({"input_ids": IDS}))
    assert net.shape.max_len > 10**9
    flat = Net.of(type("Flat", (Words,), {"forward": lambda self, input_ids: self.embed(input_ids).sum((1, 2))})())
    with pytest.raises(ConfigError, match=r"^ckpt_path=a\.ckpt: generating text needs logits \(B, L, V\)"):
        flat.writer(11, "a.ckpt")(IDS)
    with pytest.raises(ConfigError, match="does not know the layers of Words"):
        net.layers()
    assert [type(layer).__name__ for layer in net.layers(["Linear"])] == ["Linear"]
