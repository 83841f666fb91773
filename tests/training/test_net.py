"""One ``Net`` for networks of every kind. What it does with the models of transformers is in ``test_foreign.py``."""

import dataclasses

import peft
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from minitx.config import ConfigError, Part, TransformerConfig, from_dict, node, to_dict
from minitx.config.part import FROM_PYTHON
from minitx.config.schema import takes_fields_of
from minitx.config.training import MODEL
from minitx.interop import pretrained_hf
from minitx.nn import DecoderLM, DotProductAttention, build_model, fold_scale, set_scale
from minitx.nn.efficient import LinearAttention
from minitx.training.net import Net
from minitx.training.sharding import layers_to_shard
from tests.interop.families import build

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
        assert [type(layer).__name__ for layer in layers_to_shard(net.network)] == ["Block", "Block"]


def test_the_node_of_one_of_our_models_builds_it_again():
    config = TransformerConfig(**SIZES, scale="unscaled", window=(3, None))
    stored = Net.of(build_model(config)).node(Part.of_object(object(), "model"), {})
    assert stored == {"_target_": MODEL, **to_dict(config)}
    assert (
        Part.of(stored, "model").fields
        == config
        == from_dict(TransformerConfig, {k: v for k, v in stored.items() if k != "_target_"})
    )


class Louder(DecoderLM):
    """A model of ours with another ``forward``."""

    def forward(self, *args, **options):
        return 2 * super().forward(*args, **options)


@takes_fields_of(TransformerConfig)
def of_mine(config):
    return Louder(config)


def test_the_node_of_a_function_of_our_keys_has_what_the_data_determined():
    part = Part.from_plain(node(of_mine, embed_dim=8, num_heads=2), "model")
    stored = Net.of(part.with_fields(dataclasses.replace(part.fields, vocab_size=7)).build()).node(part, {})
    assert (stored["_target_"], stored["vocab_size"], stored["embed_dim"]) == (f"{__name__}.of_mine", 7, 8)


def changed_core(model):
    for block in model.blocks:
        block.attention.core = LinearAttention()
    return model


def softcap(model):
    model.blocks[0].attention.softcap = 2.0
    return model


def one_layer_twice(model):
    model.blocks[1] = model.blocks[0]
    return model


def one_matrix_twice(model):
    model.blocks[1].attention.q_proj.weight = model.blocks[0].attention.q_proj.weight
    return model


def swapped_core(model):
    model = DecoderLM(dataclasses.replace(model.config, attention=node(LinearAttention)))
    model.blocks[1].attention.core = DotProductAttention()
    return model


def after(change, *arguments, part="blocks", **options):
    def changed(model):
        change(model.get_submodule(part), *arguments, **options)
        return model

    return changed


CHANGED = {
    "core": changed_core,
    "another core than that of the config": swapped_core,
    "scale of the blocks": after(set_scale, "unscaled"),
    "folded block": after(fold_scale, "unscaled", part="blocks.0"),
    "softcap": softcap,
    "shared layer": one_layer_twice,
    "shared matrix": one_matrix_twice,
    "subclass": lambda model: Louder(model.config),
    "pruned": after(prune.l1_unstructured, "weight", amount=0.5, part="head"),
    "lora": lambda model: peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])),
    "quantised": lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}),
}
SAME = {
    "as built": lambda model: model,
    "scale": after(set_scale, "unscaled", part=""),
    "folded": after(fold_scale, "unscaled", part=""),
    "core that the config names": lambda model: DecoderLM(dataclasses.replace(model.config, attention=node(LinearAttention))),
    "frozen, in bfloat16": lambda model: model.requires_grad_(False).bfloat16(),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", [*CHANGED, *SAME])
def test_the_node_of_a_model_of_ours_builds_the_same_function_or_says_that_it_cannot(name):
    """What builds a model again is ``node``; the weights are those of the model."""
    torch.manual_seed(3)
    model = DecoderLM(TransformerConfig(**SIZES))
    nn.init.normal_(model.blocks[0].attention.q_proj.weight)
    model = {**CHANGED, **SAME}[name](model).eval()
    stored = Net.of(model).node(Part.of_object(model, "model"), {})
    if name in CHANGED:
        assert stored["_target_"] == FROM_PYTHON and stored["changes"]
        return
    again = Part.of(stored, "model").build().to(next(model.parameters()).dtype).eval()
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(IDS), model(IDS), rtol=0, atol=0)


def test_the_node_of_an_adopted_model_is_not_kept_after_its_scale_or_its_parts_have_changed(tmp_path):
    build("Llama").save_pretrained(tmp_path)
    for change in (lambda model: set_scale(model, "unscaled"), lambda model: model.set_submodule("lm_head", nn.Linear(16, 99))):
        model = pretrained_hf(str(tmp_path), adopt=True, scale="inv")
        assert Net.of(model).node(Part.of_object(model, "model"), {}) == model.stored_node
        change(model)
        assert Net.of(model).node(Part.of_object(model, "model"), {})["_target_"] == FROM_PYTHON


def test_the_node_of_a_model_of_ones_own_has_what_the_data_decided():
    net, part = Net.of(Words()), Part.from_plain(node(Words), "model")
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
        layers_to_shard(net.network)
    assert [type(layer).__name__ for layer in layers_to_shard(net.network, ["Linear"])] == ["Linear"]
