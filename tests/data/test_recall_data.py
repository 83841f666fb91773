import pytest
import torch

from minitx.data import induction, kv_lookup, multi_query_recall
from minitx.data.batches import Address, TrainSource
from minitx.data.recall import answer_positions
from minitx.data.task import generator

KEYS, OPTIONS = 13, {"num_keys": 13, "num_values": 5, "num_pairs": 7, "val_size": 41}
LOOKUP, QUERIES = kv_lookup(**OPTIONS), multi_query_recall(**OPTIONS, num_queries=3)
INDUCTION = induction(num_tokens=19, segment_len=5, max_gap=7, val_size=41)


def train(task):
    return TrainSource(task.train, seed=0, batch_size=12)


# T1, kv-lookup


def test_the_label_is_the_value_beside_the_asked_key():
    batch = train(LOOKUP)[Address(3)]
    assert batch["labels"].shape == batch["input_ids"].shape == (12, 8)
    found = batch["input_ids"][:, :-1] == batch["input_ids"][:, -1:]
    assert (found.sum(dim=1) == 1).all()
    values = KEYS - 1 + (batch["token_type_ids"][:, :-1] * found).sum(dim=1)
    assert torch.equal(batch["labels"][:, -1], values)
    assert (batch["labels"][:, :-1] == -100).all()


# T2, multi-query recall


def test_every_query_asks_for_the_value_after_its_key():
    batch = QUERIES.train(503, generator(0))
    assert batch["input_ids"].shape == batch["labels"].shape == (503, 17)
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        value_of = dict(zip(ids[0:14:2], ids[1:14:2], strict=True))
        assert labels == [-100] * 14 + [value_of[key] for key in ids[14:]]
        assert (len(value_of), len(set(ids[14:]))) == (7, 3), "keys and queries are distinct"
        assert max(value_of) < 13 <= min(value_of.values())


# T3, induction


def test_the_second_copy_asks_for_the_token_that_came_next_in_the_first():
    batch = INDUCTION.train(503, generator(0))
    assert batch["input_ids"].shape == batch["labels"].shape == (503, 16)
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        assert len(set(ids[:12])) == 12, "the tokens before the copy are distinct"
        first = ids.index(ids[12])
        assert ids[12:] == ids[first : first + 4]
        assert labels == [-100] * 12 + ids[first + 1 : first + 5]
        assert all(0 <= token < 19 for token in ids)


# where the answer is


@pytest.mark.parametrize("task", [LOOKUP, QUERIES, INDUCTION], ids=lambda task: task.name)
def test_the_answer_stands_at_its_position_and_only_labels_have_one(task):
    batch = train(task)[Address(2)]
    position, asked = answer_positions(batch), batch["labels"] != -100
    assert torch.equal(position >= 0, asked)
    assert (position <= torch.arange(position.shape[1]))[asked].all(), "a causal head can look there"
    shown = KEYS - 1 + batch["token_type_ids"] if task is LOOKUP else batch["input_ids"]
    assert torch.equal(shown.gather(1, position.clamp(min=0))[asked], batch["labels"][asked])
