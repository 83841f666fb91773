import numpy as np
import pytest
import torch

from minitx.data.addressing import Address
from minitx.data.sources import TrainSource, ValSource
from minitx.data.task import Task, as_split
from minitx.data.text import TrainingWindows, ValidationWindows


def source(tokens, *, accumulate=1, world=1, seed=3, context_len=7, batch_size=12):
    windows = TrainingWindows(tokens[0], context_len)
    return TrainSource(windows, batch_size=batch_size, seed=seed, accumulate=accumulate, world=world)


def validation(tokens, context_len, **slices):
    windows = ValidationWindows(tokens, context_len)
    return ValSource(as_split(Task(name="mine", train=windows, val=windows, key_masks={}), "val"), **slices)


def test_labels_are_the_tokens_that_follow(tokens):
    batch = source(tokens)[Address(5)]
    text = tokens[0].array.astype(np.int64)
    assert batch["input_ids"].shape == batch["labels"].shape == (12, 7)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])
    for row, start in enumerate(source(tokens).items(5, range(12))):
        assert batch["input_ids"][row].tolist() == text[start : start + 7].tolist()
        assert batch["labels"][row, -1] == text[start + 7]


def test_an_epoch_covers_disjoint_windows_and_all_but_two_rows_of_the_text(tokens):
    text = source(tokens)
    for epoch in range(5):
        starts = np.sort(text.order(epoch, text.split))
        assert (np.diff(starts) == 7).all()
        assert 0 <= starts[0] < 7
        assert starts[-1] + 7 < len(tokens[0])
        assert len(tokens[0]) - len(starts) * 7 < 2 * 7


@pytest.mark.parametrize("context_len", [1, 7, 1009])
@pytest.mark.parametrize(("batch_size", "world"), [(5, 1), (6, 3), (30, 5)])
def test_validation_counts_every_token_after_the_first_exactly_once(tokens, context_len, batch_size, world):
    val = validation(tokens[1], context_len, batch_size=batch_size, world=world)
    rows = []
    for step in range(len(val)):
        batches = [val[Address(step, rank=rank)] for rank in range(world)]
        counted = [batch["labels"][batch["labels"] != -100] for batch in batches]
        rows += counted
        assert {batch["num_targets"].item() for batch in batches} == {sum(map(len, counted))}
        assert {batch["labels"].shape[1] for batch in batches} == {context_len}
        assert all(len(batch["labels"]) >= 1 for batch in batches)
    assert torch.cat(rows).tolist() == tokens[1].array[1:].tolist()
