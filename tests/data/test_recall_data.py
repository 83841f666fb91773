import pytest
import torch

from minitx.config import ConfigError
from minitx.data import induction, kv_lookup, multi_query_recall
from minitx.data.batches import Address, TrainSource
from minitx.data.recall import answer_positions

KEYS, OPTIONS = 13, {"num_keys": 13, "num_values": 5, "num_pairs": 7, "val_size": 41}
LOOKUP, QUERIES = kv_lookup(**OPTIONS), multi_query_recall(**OPTIONS, num_queries=3)
INDUCTION = induction(num_tokens=19, segment_len=5, max_gap=7, val_size=41)


@pytest.mark.parametrize(("task", "length", "last"), [(LOOKUP, 8, 1), (QUERIES, 17, 3), (INDUCTION, 16, 4)])
def test_the_last_positions_are_asked_for_and_only_they_have_an_answer_which_stands_at_its_position(task, length, last):
    batch = TrainSource(task.train, seed=0, batch_size=503)[Address(2)]
    position, asked = answer_positions(batch), batch["labels"] != -100
    assert torch.equal(asked, (torch.arange(length) >= length - last).expand(503, length))
    assert torch.equal(position >= 0, asked)
    assert (position <= torch.arange(position.shape[1]))[asked].all(), "a causal head can look there"
    shown = KEYS - 1 + batch["token_type_ids"] if task is LOOKUP else batch["input_ids"]
    assert torch.equal(shown.gather(1, position.clamp(min=0))[asked], batch["labels"][asked])


def test_a_row_without_pairs_is_refused_from_python_too():
    with pytest.raises(ConfigError, match=r"^data\.num_pairs=0 must lie in \[1, "):
        kv_lookup(num_pairs=0)
