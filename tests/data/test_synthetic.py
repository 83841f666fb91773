import pytest
import torch

from minitx.config import KeyValueDataConfig
from minitx.data.addressing import Address, generator
from minitx.data.synthetic import KeyValueSource, KeyValueValidation, key_value_examples

CONFIG = KeyValueDataConfig(num_keys=13, num_values=5, num_pairs=7, batch_size=12, val_size=41)


def look_up(batch):
    """Solve the task by its definition: the value that stands beside the asked key."""
    keys, asked = batch["input_ids"][:, :-1], batch["input_ids"][:, -1:]
    found = keys == asked
    assert (found.sum(dim=1) == 1).all()
    return CONFIG.num_keys + (batch["token_type_ids"][:, :-1] * found).sum(dim=1) - 1


def test_the_label_is_the_value_of_the_asked_key():
    batch = KeyValueSource(CONFIG, seed=0)[Address(3)]
    assert batch["labels"].shape == batch["input_ids"].shape == batch["token_type_ids"].shape == (12, 8)
    assert torch.equal(batch["labels"][:, -1], look_up(batch))
    assert (batch["labels"][:, :-1] == -100).all()
    assert batch["num_targets"] == 12


def test_ids_stay_in_their_ranges_and_keys_are_distinct():
    batch = key_value_examples(CONFIG, 2003, generator(0))
    keys, values, labels = batch["input_ids"], batch["token_type_ids"], batch["labels"][:, -1]
    assert all(len(set(row.tolist())) == 7 for row in keys[:, :-1])
    assert set(keys.unique().tolist()) == set(range(13))
    assert set(values[:, :-1].unique().tolist()) == {1, 2, 3, 4, 5}
    assert (values[:, -1] == 0).all()
    assert set(labels.unique().tolist()) == {13, 14, 15, 16, 17}


def test_keys_values_and_the_asked_pair_are_uniform():
    batch = key_value_examples(CONFIG, 20011, generator(1))
    asked = (batch["input_ids"][:, :-1] == batch["input_ids"][:, -1:]).int().argmax(dim=1)
    for drawn, kinds in [(asked, 7), (batch["labels"][:, -1] - 13, 5), (batch["input_ids"][:, 0], 13)]:
        share = torch.bincount(drawn, minlength=kinds) / len(drawn)
        assert share.sub(1 / kinds).abs().max() < 4.5 * (1 / kinds / len(drawn)) ** 0.5


def test_as_many_pairs_as_keys_use_every_key():
    batch = key_value_examples(KeyValueDataConfig(num_keys=7, num_pairs=7), 3, generator(0))
    assert batch["input_ids"][:, :-1].sort(dim=1).values.tolist() == [list(range(7))] * 3


@pytest.mark.parametrize(("accumulate", "world"), [(1, 1), (2, 3), (4, 1)])
def test_any_split_over_micro_batches_and_ranks_gives_the_same_global_batch(accumulate, world):
    whole = KeyValueSource(CONFIG, seed=5)[Address(11)]
    parts = KeyValueSource(CONFIG, seed=5, accumulate=accumulate, world=world)
    slices = [parts[Address(11, micro, rank)] for micro in range(accumulate) for rank in range(world)]
    for key in ("input_ids", "token_type_ids", "labels"):
        assert torch.equal(torch.cat([part[key] for part in slices]), whole[key])
    assert {part["num_targets"].item() for part in slices} == {12}


def test_steps_and_seeds_give_fresh_examples():
    batches = [KeyValueSource(CONFIG, seed=seed)[Address(step)]["input_ids"] for seed in (0, 1) for step in (0, 1)]
    assert len({batch.numpy().tobytes() for batch in batches}) == 4


@pytest.mark.parametrize(("batch_size", "world"), [(41, 1), (10, 1), (12, 3), (14, 7)])
def test_validation_gives_the_same_examples_once_each_however_they_are_cut(batch_size, world):
    val = KeyValueValidation(CONFIG, batch_size=batch_size, world=world)
    batches = [val[Address(step, rank=rank, split="val")] for step in range(len(val)) for rank in range(world)]
    counted = [batch["input_ids"][batch["labels"][:, -1] != -100] for batch in batches]
    whole = KeyValueValidation(CONFIG, batch_size=41)
    assert torch.equal(torch.cat(counted), whole.rows(range(41))["input_ids"])
    assert sum(batch["num_targets"].item() for batch in batches) == 41 * world


def test_what_a_caller_does_to_a_validation_batch_does_not_change_the_next():
    val = KeyValueValidation(CONFIG, batch_size=7)
    val.rows(range(7))["labels"].fill_(0)
    assert torch.equal(val.rows(range(7))["labels"][:, -1], look_up(val.rows(range(7))))
