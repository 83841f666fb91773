import numpy as np
import pytest
import torch

from minitx.data.batches import Address, TrainSource, ValSource
from minitx.data.corpus import TrainingWindows, ValidationWindows
from minitx.data.task import Task, as_split


def source(tokens, seed=3):
    return TrainSource(TrainingWindows(tokens[0], 7), batch_size=12, seed=seed)


def test_labels_are_the_tokens_that_follow(tokens):
    batch, text = source(tokens)[Address(5)], tokens[0].array.astype(np.int64)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    for row, start in enumerate(source(tokens).items(5, range(12))):
        assert batch["input_ids"][row].tolist() == text[start : start + 7].tolist()
        assert batch["labels"][row].tolist() == text[start + 1 : start + 8].tolist()


def test_an_epoch_covers_disjoint_windows_and_all_but_two_rows_of_the_text_from_another_place_each_time(tokens):
    starts = [np.sort(source(tokens).order(epoch)) for epoch in range(5)]
    for found in starts:
        assert (np.diff(found) == 7).all()
        assert 0 <= found[0] < 7 and found[-1] + 7 < len(tokens[0])
        assert len(tokens[0]) - len(found) * 7 < 2 * 7
    assert len({found[0] for found in starts}) > 2


@pytest.mark.parametrize("context_len", [1, 7, 1009])
@pytest.mark.parametrize(("batch_size", "world"), [(5, 1), (30, 5)])
def test_validation_counts_every_token_after_the_first_exactly_once(tokens, context_len, batch_size, world):
    task = Task(name="mine", train=[0], val=ValidationWindows(tokens[1], context_len), key_masks={})
    val, rows = ValSource(as_split(task, "val"), batch_size=batch_size, world=world), []
    for step in range(len(val)):
        batches = [val[Address(step, rank=rank)] for rank in range(world)]
        counted = [batch["labels"][batch["labels"] != -100] for batch in batches]
        rows += counted
        assert {batch["num_targets"].item() for batch in batches} == {sum(map(len, counted))}
        assert {batch["labels"].shape[1] for batch in batches} == {context_len}
    assert torch.cat(rows).tolist() == tokens[1].array[1:].tolist()
