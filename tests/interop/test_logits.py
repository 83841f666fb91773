"""Other people's weights answer here what they answer there: every family, shape and side of padding, in two precisions."""

import pytest
import torch
import transformers
from foreign import BERT, CASES, GPT2, PAD, UNPADDED, answers, batch, build, in_float64, save, widen, worst

from minitx.interop import load_hf

GRID = [(name, padding) for name in CASES for padding in (("none",) if name in UNPADDED else ("none", "left", "right"))]


def inputs(name, padding):
    return (torch.randn(3, 2, 12, 12), None) if name.startswith("vit") else batch(padding)


def test_there_are_at_least_thirty_cases():
    assert len(GRID) >= 90


@pytest.mark.parametrize(("name", "padding"), GRID)
def test_logits_are_theirs_in_float32_and_float64(name, padding, tmp_path, monkeypatch):
    theirs = build(name)
    ours = load_hf(save(theirs, tmp_path))
    given = inputs(name, padding)
    pairs = answers(theirs, ours, given)
    assert worst(pairs) < 1e-5
    assert all(one.std() > 0.05 for one, _ in pairs)  # there is something to compare
    with in_float64(monkeypatch):
        wide = given[0].double() if given[0].is_floating_point() else given[0]
        assert worst(answers(widen(theirs), ours.double(), (wide, given[1]))) < 1e-10


def test_images_of_another_size_get_the_positions_that_they_get_there(tmp_path):
    theirs = build("vit")
    ours, pixels = load_hf(save(theirs, tmp_path)), torch.randn(2, 2, 18, 9)
    with torch.no_grad():
        want = theirs(pixel_values=pixels, interpolate_pos_encoding=True).logits
        assert (ours(pixels) - want).abs().max() < 1e-5


def test_a_base_model_without_a_pooler_and_a_gpt2_without_a_head_load(tmp_path):
    torch.manual_seed(7)
    bare = transformers.BertModel(transformers.BertConfig(**BERT), add_pooling_layer=False).eval()
    ours, (ids, _) = load_hf(save(bare, tmp_path / "bert")), batch("none")
    with torch.no_grad():
        hidden, extras = ours(ids, token_type_ids=torch.zeros_like(ids), return_extras=True)
        assert (hidden - bare(ids).last_hidden_state).abs().max() < 1e-5
    assert extras == {} and ours.pool is None
    headless = transformers.GPT2Model(transformers.GPT2Config(**GPT2)).eval()
    ours = load_hf(save(headless, tmp_path / "gpt2"))
    with torch.no_grad():
        assert (ours(ids, return_extras=True)[0] - headless(ids).last_hidden_state).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["bert sequence", "roberta sequence", "bert pooler"])
def test_a_left_padded_row_is_pooled_as_if_it_were_alone(name, tmp_path):
    """There the padding in the first column answers for the row."""
    theirs = build(name)
    ours = load_hf(save(theirs, tmp_path))
    row, types = torch.tensor([[5, 7, 11, 13]]), torch.zeros(1, 7, dtype=torch.long)
    padded = torch.cat((torch.full((1, 3), PAD), row), dim=1)
    with torch.no_grad():
        hidden, extras = ours(padded, key_mask=padded != PAD, token_type_ids=types, return_extras=True)
        alone = theirs(row)
        if name == "bert pooler":
            assert (extras["pooled"] - alone.pooler_output).abs().max() < 1e-5
        else:
            assert (ours.head(hidden) - alone.logits).abs().max() < 1e-5
