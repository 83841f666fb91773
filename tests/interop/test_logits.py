"""Other people's weights answer here what they answer there: every family, shape and side of padding, in two precisions."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from foreign import BERT, CASES, GPT2, PAD, V, answers, batch, build, in_float64, random_model, saved, widen, worst

from minitx.interop import load_hf

CONFIGS = Path(__file__).with_name("configs")
POPULAR = sorted(path.stem for path in CONFIGS.glob("*.json"))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_theirs_in_float32_and_float64(name, tmp_path, monkeypatch):
    theirs = build(name)
    ours, wide_ours = load_hf(saved(theirs, tmp_path)), load_hf(tmp_path, dtype=torch.double)
    given = [batch(padding, name) for padding in ("none", "left", "right")]
    for one in given:
        pairs = answers(theirs, ours, one)
        assert worst(pairs) < 1e-5
        assert all(answer.std() > 0.05 for answer, _ in pairs)  # there is something to compare
    with in_float64(monkeypatch):
        wide_theirs = widen(theirs)
        for ids, real in given:
            wide = ids.double() if ids.is_floating_point() else ids
            assert worst(answers(wide_theirs, wide_ours, (wide, real))) < 1e-10


def test_images_of_another_size_get_the_positions_that_they_get_there(tmp_path):
    theirs, pixels = build("vit"), torch.randn(2, 2, 18, 9)
    with torch.no_grad():
        want = theirs(pixel_values=pixels, interpolate_pos_encoding=True).logits
        assert (load_hf(saved(theirs, tmp_path))(pixels) - want).abs().max() < 1e-5


def test_a_bert_without_a_pooler_and_a_gpt2_without_a_head_load(tmp_path):
    torch.manual_seed(7)
    bert = transformers.BertModel(transformers.BertConfig(**BERT), add_pooling_layer=False).eval()
    gpt2 = transformers.GPT2Model(transformers.GPT2Config(**GPT2)).eval()
    ids, _ = batch("none")
    for theirs in (bert, gpt2):
        with torch.no_grad():
            ours = load_hf(saved(theirs, tmp_path / type(theirs).__name__))
            assert (ours(ids, return_hidden=True) - theirs(ids).last_hidden_state).abs().max() < 1e-5
        assert getattr(ours, "pool", None) is None


@pytest.mark.parametrize("name", ["bert masked", "bert sequence"])
def test_token_types_are_0_where_none_are_given(name, tmp_path):
    theirs, (ids, real) = build(name), batch("right")
    with torch.no_grad():
        want, got = theirs(ids, attention_mask=real.long()).logits, load_hf(saved(theirs, tmp_path))(ids, key_mask=real)
    seen = real if got.dim() == 3 else real[:, 0]
    assert (got - want)[seen].abs().max() < 1e-5


@pytest.mark.parametrize("name", ["roberta sequence", "bert pooler"])
def test_a_left_padded_row_is_pooled_as_if_it_were_alone(name, tmp_path):
    """There the padding in the first column answers for the row."""
    theirs, row = build(name), torch.tensor([[5, 7, 11, 13]])
    ours, padded = load_hf(saved(theirs, tmp_path)), torch.cat((torch.full((1, 3), PAD), row), dim=1)
    with torch.no_grad():
        out, alone = ours(padded, key_mask=padded != PAD), theirs(row)
        got, want = (ours.pool(out, padded != PAD), alone.pooler_output) if name == "bert pooler" else (out, alone.logits)
    assert (got - want).abs().max() < 1e-5


# configs of popular checkpoints: sizes shrunk, every other key kept

SMALL = {
    **{"vocab_size": V, "max_position_embeddings": 43, "sliding_window": 5, "max_window_layers": 7},
    **{"hidden_size": 40, "intermediate_size": 53, "num_attention_heads": 4, "head_dim": 14, "query_pre_attn_scalar": 14},
    **{"n_embd": 40, "n_head": 4, "n_positions": 43, "n_ctx": 43, "original_max_position_embeddings": 13},
    **{"d_model": 40, "d_kv": 7, "d_ff": 53, "num_heads": 3, "image_size": 12, "patch_size": 3, "num_channels": 2},
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 7),
}


def shrunk(values):
    """The config with small sizes; heads keep whether keys are shared."""
    values = {key: SMALL.get(key, value) if value is not None else None for key, value in values.items()}
    if values.get("num_key_value_heads", 1) > 1:
        values["num_key_value_heads"] = 2
    if values.get("rope_scaling"):
        values["rope_scaling"] = shrunk(values["rope_scaling"])
    return values


def popular(name, folder, **changed):
    """A reference model of a config, and its folder with the config as it was given."""
    values = {**shrunk(json.loads((CONFIGS / f"{name}.json").read_text())), **changed}
    (kind,) = values["architectures"]
    numbers = {key: value for key, value in values.items() if "dtype" not in key}
    theirs = random_model(kind, getattr(transformers, kind).config_class.from_dict(numbers).to_dict())
    theirs.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values))
    return theirs, values


@pytest.mark.parametrize("name", POPULAR)
def test_a_popular_config_loads_with_one_note_and_its_logits_are_theirs(name, tmp_path, caplog):
    caplog.set_level("INFO", "minitx.interop")
    theirs, values = popular(name, tmp_path)
    pairs = answers(theirs, load_hf(tmp_path), batch("right", name))
    assert worst(pairs) < 1e-5
    assert all(one.std() > 0.05 for one, _ in pairs)
    (note,) = [record.getMessage() for record in caplog.records if record.name.startswith("minitx")]
    for key in ("use_mrope", "rope_interleaved", "is_llama_config", "cache_implementation", "task_specific_params"):
        assert (key in note) == (key in values)


@pytest.mark.parametrize("ends", [[3, 5], [3]])
def test_all_ends_of_a_text_are_kept(ends, tmp_path):
    popular("llama-3.1-8b-instruct", tmp_path, eos_token_id=ends)
    assert load_hf(tmp_path).config.eos_id == tuple(ends)
