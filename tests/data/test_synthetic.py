import pytest
import torch

from minitx.config import InductionDataConfig, KeyValueDataConfig, MultiQueryDataConfig
from minitx.data.addressing import Address, generator
from minitx.data.load import load_task
from minitx.data.sources import TrainSource
from minitx.data.synthetic import (
    answer_positions,
    induction_examples,
    multi_query_examples,
)

CONFIG = KeyValueDataConfig(num_keys=13, num_values=5, num_pairs=7, batch_size=12, val_size=41)
QUERIES = MultiQueryDataConfig(num_keys=13, num_values=5, num_pairs=7, num_queries=3, batch_size=12, val_size=41)
INDUCTION = InductionDataConfig(num_tokens=19, segment_len=5, max_gap=7, batch_size=12, val_size=41)


def train(config, *, seed=0, **slices):
    return TrainSource(load_task(config).train, seed=seed, batch_size=config.batch_size, **slices)


EVERY_TASK = pytest.mark.parametrize("config", [CONFIG, QUERIES, INDUCTION], ids=["kv_lookup", "multi_query", "induction"])


def look_up(batch):
    """Solve kv-lookup by its definition: the value that stands beside the asked key."""
    keys, asked = batch["input_ids"][:, :-1], batch["input_ids"][:, -1:]
    found = keys == asked
    assert (found.sum(dim=1) == 1).all()
    return CONFIG.num_keys + (batch["token_type_ids"][:, :-1] * found).sum(dim=1) - 1


def accuracy_of_looking_back(batch, distance):
    """Of a head that copies the token ``distance`` positions before, whatever the tokens are."""
    asked = (batch["labels"] != -100).nonzero()
    return (batch["input_ids"][asked[:, 0], asked[:, 1] - distance] == batch["labels"][batch["labels"] != -100]).double().mean()


def within_noise(shares, probability, count):
    return bool((torch.as_tensor(shares) - probability).abs().max() < 4.5 * (probability / count) ** 0.5)


# T1, kv-lookup


def test_the_label_is_the_value_of_the_asked_key():
    batch = train(CONFIG, seed=0)[Address(3)]
    assert batch["labels"].shape == batch["input_ids"].shape == batch["token_type_ids"].shape == (12, 8)
    assert torch.equal(batch["labels"][:, -1], look_up(batch))
    assert (batch["labels"][:, :-1] == -100).all()
    assert batch["num_targets"] == 12


# T2, multi-query recall


def test_every_query_asks_for_the_value_after_its_key():
    batch = multi_query_examples(QUERIES, 503, generator(0))
    assert batch["input_ids"].shape == batch["labels"].shape == (503, 17)
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        value_of = dict(zip(ids[0:14:2], ids[1:14:2], strict=True))
        assert labels == [-100] * 14 + [value_of[key] for key in ids[14:]]
        assert len(value_of) == 7, "keys are distinct"
        assert len(set(ids[14:])) == 3, "queries are distinct"
        assert all(0 <= key < 13 for key in value_of)
        assert all(13 <= value < 18 for value in value_of.values())


def test_no_fixed_distance_answers_more_queries_than_a_value_of_the_row_at_random():
    batch = multi_query_examples(QUERIES, 5003, generator(2))
    by_chance = 1 / 7 + 6 / 7 / 5  # the right pair, or another one with the same value
    assert all(accuracy_of_looking_back(batch, distance) < by_chance + 0.02 for distance in range(1, 15))


# T3, induction


def test_the_second_copy_asks_for_the_token_that_came_next_in_the_first():
    batch = induction_examples(INDUCTION, 503, generator(0))
    assert batch["input_ids"].shape == batch["labels"].shape == (503, 16)
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        assert len(set(ids[:12])) == 12, "the tokens before the copy are distinct"
        first = ids.index(ids[12])
        assert ids[12:] == ids[first : first + 4]
        assert labels == [-100] * 12 + ids[first + 1 : first + 5]
        assert all(0 <= token < 19 for token in ids)


def test_a_head_that_looks_a_fixed_distance_back_solves_induction_only_without_gaps():
    without = induction_examples(InductionDataConfig(num_tokens=19, segment_len=5, max_gap=0), 101, generator(2))
    assert accuracy_of_looking_back(without, 4) == 1.0
    batch = induction_examples(INDUCTION, 5003, generator(2))
    found = [accuracy_of_looking_back(batch, distance) for distance in range(12)]
    assert within_noise(found[4:], 1 / 8, 5003)
    assert max(found[:4]) == 0.0


# where the answer is


@EVERY_TASK
def test_the_answer_stands_at_its_position_and_only_labels_have_one(config):
    batch = train(config, seed=0)[Address(2)]
    position, asked = answer_positions(batch), batch["labels"] != -100
    assert torch.equal(position >= 0, asked)
    assert (position <= torch.arange(position.shape[1]))[asked].all(), "a causal head can look there"
    shown = config.num_keys - 1 + batch["token_type_ids"] if config is CONFIG else batch["input_ids"]
    assert torch.equal(shown.gather(1, position.clamp(min=0))[asked], batch["labels"][asked])
