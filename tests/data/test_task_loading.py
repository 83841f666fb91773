"""Loaders of a ``LightningDataModule`` as a ``Task``: the data set and ``collate_fn`` stay, the rows of a step are ours."""

import pickle
import random

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler, default_collate

from minitx.config import ConfigError
from minitx.data.datamodule import DataModule
from minitx.data.seeding import generator
from minitx.data.splits import as_split
from minitx.data.task_loading import task_of_loaders

PICTURES, LABELS = torch.arange(33.0).view(11, 3), torch.arange(11)


class Pairs(L.LightningDataModule):
    """Eleven rows as pairs, in batches of 4."""

    def __init__(self, rows=None, **options):
        super().__init__()
        self.rows = TensorDataset(PICTURES, LABELS) if rows is None else rows
        self.options = {"batch_size": 4, "shuffle": True, **options}

    def train_dataloader(self):
        return DataLoader(self.rows, **self.options)

    def val_dataloader(self):
        return DataLoader(self.rows, batch_size=3)


def dicts(rows):
    return {**default_collate([{"x": x, "labels": y} for x, y in rows]), "extra": torch.zeros(len(rows))}


def batch_of(split, items):
    return split.collate(np.array(items), lambda row: generator(0, row))


def test_a_pair_has_inputs_and_labels_and_a_mapping_keeps_its_keys():
    task, loading = task_of_loaders(Pairs(num_workers=2))
    batch = batch_of(task.train, [5, 2])
    assert (list(batch), loading) == (["inputs", "labels"], {"batch_size": 4, "num_workers": 2})
    assert batch["inputs"].equal(PICTURES[[5, 2]]) and batch["labels"].tolist() == [5, 2]
    batch = batch_of(task_of_loaders(Pairs(collate_fn=dicts))[0].train, [0, 1, 2])
    assert list(batch) == ["x", "labels", "extra"] and batch["x"].equal(PICTURES[:3])


def test_every_training_row_comes_once_an_epoch_and_every_validation_row_once_in_order():
    data = DataModule(task_of_loaders(Pairs())[0], batch_size=2, accumulate=2, max_steps=11, val_batch_size=4)
    drawn = torch.cat([batch["labels"] for batch in data.train_dataloader()])
    assert drawn.view(2, 11).sort(dim=1).values.equal(LABELS.expand(2, 11)) and not drawn[:11].equal(LABELS)
    assert torch.cat([batch["labels"] for batch in data.val_dataloader()]).equal(LABELS)
    assert [int(batch["num_targets"]) for batch in data.train_dataloader()][:2] == [2, 2]


def test_stages_are_set_up_as_lightning_does_with_the_number_of_processes_and_a_test_split_where_there_is_one():
    calls = []

    class Staged(Pairs):
        def prepare_data(self):
            calls.append("prepare_data")

        def setup(self, stage):
            calls.append((stage, self.trainer.world_size))

        def test_dataloader(self):
            return DataLoader(TensorDataset(PICTURES[:2], LABELS[:2]))

    data = Staged()
    task, _ = task_of_loaders(data, world=3)
    assert calls == ["prepare_data", ("fit", 3), ("test", 3)] and data.trainer is None
    assert len(as_split(task, "test")) == 2 and task_of_loaders(Pairs())[0].test is None


def test_random_draws_of_rows_depend_on_the_seed_the_step_and_the_first_row_and_leave_the_generators_as_they_were():
    class Noisy(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + torch.rand(1) + np.random.rand() + random.random(), y

    split = task_of_loaders(Pairs(Noisy(PICTURES, LABELS)))[0].train
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = batch_of(split, [3, 4])["inputs"]
    assert torch.get_rng_state().equal(before[0]) and random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    torch.rand(5)
    assert batch_of(split, [3, 4])["inputs"].equal(first)
    assert not split.collate(np.array([3, 4]), lambda row: generator(1, row))["inputs"].equal(first)


def test_a_split_can_be_sent_to_a_process():
    split = pickle.loads(pickle.dumps(task_of_loaders(Pairs(collate_fn=dicts))[0].val))
    assert len(split) == 11


def test_a_loader_that_does_not_shuffle_is_shuffled_and_the_log_says_so(caplog):
    caplog.set_level("INFO")
    task_of_loaders(Pairs())
    assert "shuffle" not in caplog.text
    task_of_loaders(Pairs(shuffle=False))
    assert "minitx shuffles the rows of Pairs.train_dataloader" in caplog.text


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class Twice(DataLoader):
    def __iter__(self):
        return iter([*super().__iter__()] * 2)


def changed(**methods):
    return lambda: type("Changed", (Pairs,), methods)()


SAMPLER = WeightedRandomSampler(torch.ones(11), 11)
REPEATS = RandomSampler(range(11), replacement=True)
FEWER = RandomSampler(range(11), num_samples=5)
BATCHES = [[0, 1], [2, 3]]
REFUSED = {
    "a weighted sampler": (
        lambda: Pairs(shuffle=False, sampler=SAMPLER),
        "train_dataloader chooses rows by WeightedRandomSampler",
    ),
    "rows that come twice": (lambda: Pairs(shuffle=False, sampler=REPEATS), "train_dataloader chooses rows by RandomSampler"),
    "rows left out": (lambda: Pairs(shuffle=False, sampler=FEWER), "train_dataloader chooses rows by RandomSampler"),
    "batches of its own": (
        changed(train_dataloader=lambda self: DataLoader(self.rows, batch_sampler=BATCHES)),
        "train_dataloader chooses rows by list",
    ),
    "no batches": (
        changed(train_dataloader=lambda self: DataLoader(self.rows, batch_size=None)),
        "train_dataloader chooses rows by",
    ),
    "an iterable": (
        changed(train_dataloader=lambda self: DataLoader(Stream())),
        "train_dataloader reads Stream without len",
    ),
    "a loader of its own": (
        changed(val_dataloader=lambda self: Twice(self.rows)),
        "val_dataloader returns a Twice with its own __iter__",
    ),
    "several loaders": (
        changed(val_dataloader=lambda self: [DataLoader(self.rows)] * 2),
        "one torch.utils.data.DataLoader, got list",
    ),
    "no validation": (
        lambda: type("Lone", (L.LightningDataModule,), {"train_dataloader": lambda self: DataLoader([])})(),
        "Lone needs a val_dataloader",
    ),
    "a function for workers": (lambda: Pairs(worker_init_fn=print), "does not call the worker_init_fn of train_dataloader"),
    "a hook on batches": (changed(on_after_batch_transfer=lambda self, batch, index: batch), "Changed.on_after_batch_transfer"),
    "a transfer of its own": (
        changed(transfer_batch_to_device=lambda self, batch, device, index: batch),
        "change batches in collate_fn",
    ),
    "a state": (changed(state_dict=lambda self: {"step": 3}), "state_dict is not empty"),
    "a list": (lambda: [1], "data must be a Task or a LightningDataModule, got list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_loaders_that_a_task_cannot_stand_for_are_refused_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        task_of_loaders(make())


def test_a_hook_that_is_set_on_the_object_is_found_too():
    data = Pairs()
    data.on_before_batch_transfer = lambda batch, index: batch
    with pytest.raises(ConfigError, match="on_before_batch_transfer"):
        task_of_loaders(data)


BATCHES_REFUSED = {
    "a mapping with x": lambda rows: {"x": torch.zeros(2)},
    "a Tensor": lambda rows: torch.zeros(2),
    "a tuple": lambda rows: (torch.zeros(2), torch.zeros(2), torch.zeros(2)),
    "names in a batch of train_dataloader must be tensors": lambda rows: {"names": ["a"], "labels": torch.zeros(1)},
}


@pytest.mark.parametrize("message", BATCHES_REFUSED)
def test_a_batch_of_another_form_is_refused_with_what_it_is(message):
    split = task_of_loaders(Pairs(collate_fn=BATCHES_REFUSED[message]))[0].train
    with pytest.raises(ConfigError, match=message):
        batch_of(split, [0, 1])


def test_a_data_module_of_pytorch_lightning_comes_in_by_the_same_door():
    body = {name: value for name, value in vars(L.LightningDataModule).items() if name not in ("__dict__", "__weakref__")}
    body |= {"__module__": "pytorch_lightning.core.datamodule", "__init__": lambda self: None, "trainer": None}
    base = type("LightningDataModule", L.LightningDataModule.__mro__[1:-1], body)
    other = type("Other", (base,), {name: vars(Pairs)[name] for name in ("train_dataloader", "val_dataloader")})()
    other.rows, other.options = TensorDataset(PICTURES, LABELS), {"batch_size": 4}
    assert not isinstance(other, L.LightningDataModule) and len(task_of_loaders(other)[0].train) == 11
