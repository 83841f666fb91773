"""A snapshot holds what attention did, and comes back from its file as it was."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from minitx.analysis import read_snapshots, take_snapshot
from minitx.analysis.answers import Answer, Answers
from minitx.analysis.snapshot import AnswerCounts, read_snapshot, typical_row, write_snapshot
from minitx.analysis.snapshot_sources import snapshot_of_weights
from minitx.config import TransformerConfig
from minitx.nn import MultiHeadAttention, Padding, build_model
from tests.analysis.models import model_of, translation_of

SOURCE, TARGET = torch.tensor([[1, 2, 3, 5, 7], [4, 4, 8, 0, 0]]), torch.tensor([[2, 4, 6], [2, 9, 0]])
MASKS = {
    "key_mask": torch.arange(5)[None] < torch.tensor([[5], [3]]),
    "decoder_key_mask": torch.arange(3)[None] < torch.tensor([[3], [2]]),
}


def translation():
    return translation_of(), {"input_ids": SOURCE, "decoder_input_ids": TARGET, **MASKS}


def test_each_map_names_its_axes_and_its_weights_are_those_of_need_weights():
    model, inputs = translation()
    snapshot = take_snapshot(model, inputs, step=3)
    axes = {(m.kind, m.queries, m.keys, tuple(m.weights.shape)) for m in snapshot.maps}
    assert axes == {
        ("causal", "decoder_input_ids", "decoder_input_ids", (2, 3, 3, 3)),
        ("cross", "decoder_input_ids", "input_ids", (2, 3, 3, 5)),
        ("self", "input_ids", "input_ids", (2, 3, 5, 5)),
    }
    for layer in snapshot.maps:
        torch.testing.assert_close(layer.weights.sum(-1), torch.ones_like(layer.max_logit))
        assert (layer.weights[~layer.visible] == 0).all()


def test_looking_leaves_every_part_in_the_mode_that_it_was_in():
    model, inputs = translation()
    model.train().encoder.eval()
    modes = {name: part.training for name, part in model.named_modules()}
    take_snapshot(model, inputs)
    with pytest.raises(TypeError):
        take_snapshot(model, {**inputs, "colour": inputs["input_ids"]})
    assert {name: part.training for name, part in model.named_modules()} == modes
    assert set(modes.values()) == {True, False}


class OfOnesOwn(nn.Module):
    """Tokens and padding have names of its own."""

    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Embedding(11, 12), MultiHeadAttention(12, 3)

    def forward(self, tokens, attention_mask):
        return self.attention(self.embed(tokens), attn_mask=Padding(attention_mask), is_causal=True)


def test_tokens_and_padding_of_a_model_of_ones_own_are_known_by_its_calls():
    inputs = {"tokens": torch.arange(9).expand(2, 9), "attention_mask": torch.arange(9) < torch.tensor([[9], [4]])}
    snapshot = take_snapshot(OfOnesOwn(), inputs, tokens={"tokens": [list("abcdefghi")] * 2})
    assert snapshot.sentence(1).tokens == {"tokens": [list("abcd")]}
    assert torch.equal(snapshot.ids["tokens"], inputs["tokens"])
    assert torch.equal(snapshot.real["tokens"], inputs["attention_mask"])
    ours = take_snapshot(model_of(), {"input_ids": SOURCE, "mask": Padding(MASKS["key_mask"])})
    assert torch.equal(ours.real["input_ids"], MASKS["key_mask"])
    with pytest.raises(ValueError, match=r"tokens=\['inputs_ids'\] must be among tokens"):
        take_snapshot(OfOnesOwn(), inputs, tokens={"inputs_ids": []})


def test_a_tensor_is_the_first_argument_of_a_model_or_a_layer():
    model, layer, x = model_of(), MultiHeadAttention(12, 3), torch.randn(2, 5, 12)
    for module, given, named in (
        (model, SOURCE, {"input_ids": SOURCE}),
        (model, SOURCE[0], {"input_ids": SOURCE[:1]}),
        (layer, x, {"query": x}),
        (nn.Sequential(layer), x, {"input": x}),
    ):
        one, other = take_snapshot(module, given), take_snapshot(module, named)
        assert (one.tokens, list(one.ids)) == (other.tokens, list(other.ids))
        assert all(torch.equal(a.weights, b.weights) for a, b in zip(one.maps, other.maps, strict=True))
    assert take_snapshot(model, SOURCE).ids["input_ids"].data_ptr() != SOURCE.data_ptr()
    cross = take_snapshot(layer, {"query": x, "key": torch.randn(2, 7, 12)})
    assert cross.sentence(1).maps[0].weights.shape == (1, 3, 5, 7) and set(cross.tokens) == {"query", "key"}


def test_patches_have_no_place_where_changed_pixels_move_other_tokens():
    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3, "embed_dim": 12, "num_heads": 3}
    model = build_model(TransformerConfig(architecture="vision", head="sequence", **sizes))
    pixels = torch.randn(1, 1, 8, 12)
    assert take_snapshot(model, {"pixel_values": pixels}).tokens["pixel_values"][0][-1] == "1,2"
    model.embeddings.register_forward_hook(lambda module, args, tokens: tokens.flip(1))  # another order of the patches
    assert take_snapshot(model, {"pixel_values": pixels}).tokens["pixel_values"][0] == [str(number) for number in range(7)]


def test_a_sentence_without_its_padding_is_what_the_model_does_with_it_alone():
    model, inputs = translation()
    model.double()
    cut = take_snapshot(model, inputs).sentence(1)
    alone = take_snapshot(model, {"input_ids": SOURCE[1:, :3], "decoder_input_ids": TARGET[1:, :2]})
    assert cut.tokens == alone.tokens == {"input_ids": [["4", "4", "8"]], "decoder_input_ids": [["2", "9"]]}
    for one, other in zip(cut.maps, alone.maps, strict=True):
        torch.testing.assert_close(one.weights, other.weights)
        torch.testing.assert_close(one.max_logit, other.max_logit)
        assert torch.equal(one.visible, other.visible)
        torch.testing.assert_close(one.entropy(), other.entropy(), equal_nan=True)


def test_a_file_gives_the_snapshot_back_to_half_precision(tmp_path):
    model, inputs = translation()
    texts = {"input_ids": [["你", "好", "<script>", "\n", "é"]] * 2}
    for step in (100_000_000, 99_999_999, 10, 2):
        path = write_snapshot(take_snapshot(model, inputs, tokens=texts, step=step, title="a"), tmp_path / "attention")
    assert [snapshot.step for snapshot in read_snapshots(str(tmp_path))] == [2, 10, 99_999_999, 100_000_000]
    again, whole = read_snapshot(path), take_snapshot(model, inputs, tokens=texts, step=2, title="a")
    assert (again.step, again.title, again.tokens) == (2, "a", whole.tokens)
    for one, other in zip(again.maps, whole.maps, strict=True):
        assert (one.name, one.kind, one.queries, one.keys) == (other.name, other.kind, other.queries, other.keys)
        torch.testing.assert_close(one.weights, other.weights, rtol=2**-11, atol=2**-24)
        assert torch.equal(one.visible, other.visible)
    for axis in whole.ids:
        assert torch.equal(again.ids[axis], whole.ids[axis]) and torch.equal(again.real[axis], whole.real[axis])


def test_what_is_no_snapshot_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"has no snapshots of attention: train with callbacks\.probe\.weights_every"):
        read_snapshots(tmp_path)
    with pytest.raises(ValueError, match=r"inputs must be a tensor, such as ids .*, got list"):
        take_snapshot(model_of(), [[1, 2, 3]])
    (tmp_path / "step_00000001.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"step_00000001\.safetensors is not a snapshot of attention"):
        read_snapshots(tmp_path)


def recall_of(found, right):
    """A snapshot of rows of two queries over three keys; each row asks for key 2, whether it is found and answered right as told."""
    B = len(found)
    weights = torch.zeros(B, 2, 3, 3)
    weights[:, :, :, 0] = 1.0
    for b, has_key in enumerate(found):
        if has_key:
            weights[b, 1, 1] = torch.tensor([0.2, 0.3, 0.5])
    answers = [[Answer("?", 1, 2, "16", is_right, 0.5, (("16", 0.6),))] for is_right in right]
    whole = snapshot_of_weights([weights])
    return replace(whole, answers=Answers("query", answers))


def test_a_row_that_is_cut_out_keeps_the_counts_of_all_rows():
    whole = recall_of(found=[True, True, False, True], right=[True, False, False, False])
    tally = whole.sentence(2).sentence(0).tally
    assert tally == AnswerCounts(row=2, rows=4, asked=4, right=1, keyed=4, on_key={"0": [0, 3]})
    assert replace(whole, answers=None).sentence(2).tally is None


def test_the_typical_row_ends_in_every_run_as_most_rows_do():
    learned = recall_of(found=[False, True, True, True], right=[False, True, True, True])
    lost = recall_of(found=[False, True, False, False], right=[False, False, False, False])
    early = recall_of(found=[True] * 4, right=[False] * 4)
    assert typical_row([[early, learned], [early, lost]]) == 2
    assert typical_row([[learned]]) == 1
    near = recall_of(found=[True, True, False, False], right=[True, True, False, True])
    far = recall_of(found=[False, True, True, True], right=[False, False, True, True])
    assert typical_row([[near], [far]]) is None
