import numpy as np
import pytest
import torch

from minitx.data.batches import Address, AddressedLoader, Addresses, Source, rows_of
from minitx.data.seeding import generator


class Counting(Source):
    """Rows that say where they come from: 1000 · step + row."""

    def batch(self, step, rows):
        return {"input_ids": 1000 * step + torch.arange(rows.start, rows.stop)}


def loader(num_steps=7, num_workers=0):
    return AddressedLoader(Counting(batch_size=12, accumulate=3), Addresses(num_steps, 0, 3), num_workers=num_workers)


def ids_of(batches):
    return torch.cat([batch["input_ids"] for batch in batches]).tolist()


def test_generators_depend_on_seed_and_path_alone_on_every_machine():
    draws = {path: generator(*path).random() for path in [(0, "train", 1), (0, "train", 2), (1, "train", 1), (0, "val", 1)]}
    assert len(set(draws.values())) == 4
    assert all(generator(*path).random() == draw for path, draw in draws.items())
    assert generator(np.int64(3), "train", np.int32(5)).random() == generator(3, "train", 5).random()
    assert generator(0, "train", 0).integers(1000, size=5).tolist() == [622, 257, 334, 989, 492]


@pytest.mark.parametrize(("stop", "num_workers"), [(0, 0), (3, 0), (20, 0), (8, 1)])
def test_a_resumed_loader_continues_the_uninterrupted_stream(stop, num_workers):
    whole, first = ids_of(loader()), loader(num_workers=num_workers)
    batches = iter(first)
    seen = [next(batches) for _ in range(stop)]
    state = first.state_dict()
    done = seen[: state["step"] * 3]  # an unfinished window is done again
    resumed = loader()
    resumed.load_state_dict(state)
    assert state == {"step": stop // 3}
    assert ids_of([*done, *resumed]) == whole


def test_the_first_step_may_be_repeated():
    source = Counting(batch_size=12, accumulate=3)
    batches = list(AddressedLoader(source, Addresses(5, 2, 3, repeat_first=True)))
    assert ids_of(batches) == ids_of(loader(num_steps=1)) * 3


def test_a_batch_that_cannot_be_divided_is_refused():
    with pytest.raises(ValueError, match=r"^batch_size=12 must be divisible by accumulate=5 x world=2"):
        rows_of(Address(0), 12, 5, world=2)


def test_the_length_is_that_of_the_whole_run_and_a_step_after_its_end_is_refused():
    ended = loader(num_steps=7)
    ended.load_state_dict({"step": 7})
    assert (len(ended), list(ended)) == (7 * 3, [])
    for step in (-1, 8):
        with pytest.raises(ValueError, match=f"step={step} must lie in"):
            ended.load_state_dict({"step": step})
