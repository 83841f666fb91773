"""Rows of a text: windows and masked tokens."""

import numpy as np
import pytest
import torch

from minitx.data import masked
from minitx.data.baselines import unigram_nll
from minitx.data.batches import Address, TrainSource, ValSource
from minitx.data.corpus import MaskedRows, TrainingWindows, ValidationWindows
from minitx.data.splits import as_split
from minitx.data.token_cache import TokenArray
from tests.data.conftest import batch_of, split_of


def test_an_epoch_covers_disjoint_windows_and_all_but_two_rows_of_the_text_from_another_place_each_time(tokens):
    stream = TrainSource(TrainingWindows(tokens[0], 7), batch_size=12, seed=3)
    starts = [np.sort(stream.order(epoch)) for epoch in range(5)]
    for found in starts:
        assert (np.diff(found) == 7).all()
        assert 0 <= found[0] < 7 and found[-1] + 7 < len(tokens[0])
        assert len(tokens[0]) - len(found) * 7 < 2 * 7
    assert len({found[0] for found in starts}) > 2


@pytest.mark.parametrize("context_len", [1, 7, 1009])
@pytest.mark.parametrize(("batch_size", "world"), [(5, 1), (30, 5)])
def test_validation_counts_every_token_after_the_first_exactly_once(tokens, context_len, batch_size, world):
    split = split_of(ValidationWindows(tokens[1], context_len), key_masks={})
    val, rows = ValSource(split, batch_size=batch_size, world=world), []
    for step in range(len(val)):
        batches = [val[Address(step, rank=rank)] for rank in range(world)]
        counted = [batch["labels"][batch["labels"] != -100] for batch in batches]
        rows += counted
        assert {batch["num_targets"].item() for batch in batches} == {sum(map(len, counted))}
        assert {batch["labels"].shape[1] for batch in batches} == {context_len}
    assert torch.cat(rows).tolist() == tokens[1].array[1:].tolist()


# --- masked tokens: how many, which, and what they show


LENGTH, VOCAB = 53, 89


@pytest.fixture
def whole(examples):
    return batch_of(examples)


@pytest.fixture
def examples(tmp_path):
    ids = np.random.default_rng(0).integers(VOCAB, size=LENGTH * 200 + 2).astype("<u2")
    (tmp_path / "ids.bin").write_bytes(ids.tobytes())
    rows = MaskedRows(TokenArray(tmp_path / "ids.bin", "<u2", 0, len(ids)), LENGTH, 0.15, VOCAB, np.arange(VOCAB))
    return split_of(rows, pad={"input_ids": VOCAB + 1})


def test_a_fixed_share_of_every_row_is_hidden_and_the_rest_is_shown(examples, whole):
    asked, true = whole["labels"] != -100, torch.full((201, LENGTH), VOCAB + 1)
    true.view(-1)[: LENGTH * 200 + 2] = torch.from_numpy(examples.rows.tokens.array.astype(np.int64))
    assert asked.sum(dim=1).tolist() == [8] * 200 + [1]  # round(0.15 * 53), and one of the last two tokens
    assert asked.sum(dim=1).tolist() == [examples.count(np.array([row])) for row in range(201)]
    assert torch.equal(whole["labels"], true.where(asked, -100))
    assert torch.equal(whole["input_ids"][~asked], true[~asked])


def test_eight_of_ten_show_the_mask_one_another_token_and_one_itself(whole):
    shown, true = (whole[key][whole["labels"] != -100] for key in ("input_ids", "labels"))
    shares = [(shown == VOCAB).float().mean(), (shown == true).float().mean()]
    assert shares == pytest.approx([0.8, 0.1 + 0.1 / VOCAB], abs=4 * (0.8 * 0.2 / len(shown)) ** 0.5)
    others = shown[(shown != VOCAB) & (shown != true)]
    assert len(others.unique()) > VOCAB / 2 and others.max() < VOCAB


def test_masks_change_from_epoch_to_epoch_and_stay_in_validation(examples):
    stream = TrainSource(examples, batch_size=201, seed=0)
    orders = [stream.items(step, range(201)) for step in (0, 1)]
    labels = [stream[Address(step)]["labels"][order.argsort()] for step, order in enumerate(orders)]
    assert ((labels[0] != -100) == (labels[1] != -100)).all(dim=1).sum() < 20
    val = ValSource(examples, batch_size=5)
    assert torch.equal(val.rows(range(10))["labels"][3:7], val.rows(range(3, 7))["labels"])


def test_masked_text_becomes_a_task(write_text, cache):
    task = masked(path=write_text("the raven never flitting " * 41), context_len=17, cache_dir=str(cache))
    assert task.longest == 17
    assert task.model_fields == {"vocab_size": task.tokenizer.vocab_size, "pad_id": task.tokenizer.mark_ids["pad"]}
    text = ValSource(as_split(task, "val"), batch_size=3).rows(range(len(task.val)))
    true = torch.where(text["labels"] == -100, text["input_ids"], text["labels"])[text["key_mask"]]
    assert task.tokenizer.decode(true) == ("the raven never flitting " * 41)[int(41 * 25 * 0.9) :]
    nll = unigram_nll(task.train.tokens.array, task.val.tokens.array, task.tokenizer.vocab_size)
    assert task.baselines() == {"unigram_perplexity": pytest.approx(np.exp(nll))}
