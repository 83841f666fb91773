"""Configs of popular checkpoints load as they are: sizes shrunk, every other key kept, random weights of the reference."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from foreign import V, answers, batch, random_model, worst
from safetensors.torch import save_file

from minitx.interop import load_hf

CONFIGS = Path(__file__).with_name("configs")
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
SMALL = {
    **{"vocab_size": V, "max_position_embeddings": 43, "sliding_window": 5, "max_window_layers": 7},
    **{"hidden_size": 40, "intermediate_size": 53, "num_attention_heads": 4, "head_dim": 14, "query_pre_attn_scalar": 14},
    **{"n_embd": 40, "n_head": 4, "n_positions": 43, "n_ctx": 43},
    **{"d_model": 40, "d_kv": 7, "d_ff": 53, "num_heads": 3, "image_size": 12, "patch_size": 3, "num_channels": 2},
    **{"original_max_position_embeddings": 13},
}


def shrunk(values, depth):
    """The config with small sizes; heads keep whether keys are shared."""
    values = {key: SMALL.get(key, value) if value is not None else None for key, value in values.items()}
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        if key in values:
            values[key] = depth
    if values.get("num_key_value_heads", 1) > 1:
        values["num_key_value_heads"] = 2
    if values.get("rope_scaling"):
        values["rope_scaling"] = shrunk(values["rope_scaling"], depth)
    return values


def saved(values, folder):
    """A reference model of the config, and its folder with the config as it was given."""
    (kind,) = values["architectures"]
    numbers = {key: value for key, value in values.items() if "dtype" not in key}
    theirs = random_model(kind, getattr(transformers, kind).config_class.from_dict(numbers).to_dict())
    theirs.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values))
    return theirs


@pytest.mark.parametrize("name", NAMES)
def test_a_popular_config_loads_and_its_logits_are_theirs(name, tmp_path):
    values = shrunk(json.loads((CONFIGS / f"{name}.json").read_text()), depth=7)
    theirs = saved(values, tmp_path)
    ours = load_hf(tmp_path)
    given = (torch.randn(3, 2, 12, 12), None) if name.startswith("vit") else batch("right")
    pairs = answers(theirs, ours, given)
    assert worst(pairs) < 1e-5
    assert all(one.std() > 0.05 for one, _ in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_a_popular_config_is_read_or_named_in_one_note(name, tmp_path, caplog):
    caplog.set_level("INFO", "minitx.interop")
    values = shrunk(json.loads((CONFIGS / f"{name}.json").read_text()), depth=2)
    saved(values, tmp_path)
    load_hf(tmp_path)
    (note,) = [record.getMessage() for record in caplog.records if record.name.startswith("minitx")]
    for key in ("use_mrope", "rope_interleaved", "is_llama_config", "cache_implementation", "task_specific_params"):
        assert (key in note) == (key in values)


def test_all_ends_of_a_text_are_kept(tmp_path):
    values = shrunk(json.loads((CONFIGS / "llama-3.1-8b-instruct.json").read_text()), depth=1)
    saved({**values, "eos_token_id": [3, 5]}, tmp_path)
    assert load_hf(tmp_path).config.eos_id == (3, 5)
    saved({**values, "eos_token_id": [3]}, tmp_path)
    assert load_hf(tmp_path).config.eos_id == (3,)


def test_the_file_of_bert_base_loads_with_its_old_names_and_second_head(tmp_path):
    values = shrunk(json.loads((CONFIGS / "bert-base-uncased.json").read_text()), depth=2)
    theirs = saved(values, tmp_path)
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items() if "decoder" not in name}
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    for module, rows in (("bert.pooler.dense", 40), ("cls.seq_relationship", 2)):
        tensors |= {f"{module}.weight": torch.ones(rows, 40), f"{module}.bias": torch.ones(rows)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert worst(answers(theirs, load_hf(tmp_path), batch("right"))) < 1e-5
