"""Load the data of a run as a ``Task``. For a ``LightningDataModule``, its data sets and ``collate_fn`` are used, and minitx chooses the rows."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from minitx.config import ConfigError, Part, TrainerConfig
from minitx.config.schema import require
from minitx.data.seeding import CPU, Draw, kept_generators, seed_device
from minitx.data.splits import Split, rows_at
from minitx.data.task import Batch, Task
from minitx.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FIRST_INPUT = "inputs"
"""The key of the first tensor of a pair. It is passed to the first parameter of a network's ``forward``."""

_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def lightning_base(part: Any, kind: str) -> type | None:
    """Return the class named ``kind`` of ``lightning`` or ``pytorch_lightning`` that ``part`` inherits from, or None. Neither is imported."""
    packages = ("lightning.", "pytorch_lightning.")
    return next((base for base in type(part).__mro__ if base.__name__ == kind and base.__module__.startswith(packages)), None)


def overrides(part: Any, base: type, name: str) -> bool:
    """Return whether a method of ``base`` is replaced in the class of ``part``, or in ``part`` itself."""
    return name in vars(part) or getattr(type(part), name) is not getattr(base, name)


class Collated(Split):
    """A map-style data set and the function that makes a batch from its rows.

    A batch must be a mapping with ``labels``, or a pair of tensors (``inputs``, ``labels``). If the data set or the function draws from
    the generators of Python, NumPy or torch, the draws depend on (seed, step, first row).

    Raises:
        ConfigError: the loader is not a plain ``DataLoader`` over a map-style data set.
    """

    def __init__(self, loader: Any, method: str) -> None:
        place = f"data: {method}"
        require(
            isinstance(loader, DataLoader),
            f"{place} must return one torch.utils.data.DataLoader, got {type(loader).__name__}: join several data sets with "
            "torch.utils.data.ConcatDataset",
        )
        rows, sampler = loader.dataset, loader.sampler
        if isinstance(rows, IterableDataset) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
            raise ConfigError(
                f"{place} reads {type(rows).__name__} without len() or [i], but minitx chooses the rows of a step by their number"
            )
        chooser = sampler if loader.batch_size is not None else loader.batch_sampler
        repeats = isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(rows))
        if type(chooser) not in (RandomSampler, SequentialSampler) or repeats:
            raise ConfigError(
                f"{place} chooses rows by {type(chooser).__name__}, but minitx chooses the rows of a step: repeat or drop rows in the data set"
            )
        changes = [name for name in ("__iter__", "__len__") if overrides(loader, DataLoader, name)]
        require(not changes, f"{place} returns a {type(loader).__name__} with its own {', '.join(changes)}: use collate_fn")
        require(
            loader.worker_init_fn is None, f"minitx does not call the worker_init_fn of {method}: do its work in the data set"
        )
        self.rows, self.make, self.method = rows, loader.collate_fn, method

    def __len__(self) -> int:
        return len(self.rows)

    def collate(self, items: np.ndarray, draw: Draw) -> Batch:
        """See ``Split``."""
        with kept_generators(CPU):
            seed_device(int(draw(0).integers(2**63)), CPU)
            batch = self.make(rows_at(self.rows, items))
        if isinstance(batch, tuple | list) and [isinstance(part, Tensor) for part in batch] == [True, True]:
            return {FIRST_INPUT: batch[0], "labels": batch[1]}
        if not isinstance(batch, Mapping) or "labels" not in batch:
            got = f"a mapping with {', '.join(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise ConfigError(
                f"data: a batch of {self.method} must be a mapping of tensors with labels, or a pair (inputs, labels), got {got}"
            )
        others = [name for name, value in batch.items() if not isinstance(value, Tensor)]
        require(not others, f"data: {', '.join(others)} in a batch of {self.method} must be tensors")
        return dict(batch)


def task_of_loaders(data: Any, world: int = 1) -> tuple[Task, dict[str, int]]:
    """Convert a ``LightningDataModule`` to a task. Also return ``batch_size`` and ``num_workers`` of its training loader.

    ``prepare_data`` and ``setup`` are called as in Lightning. While they run, ``data.trainer.world_size`` is the number of processes.
    ``teardown`` is not called. The task gets the attributes ``tokenizer`` and ``model_fields``, if there are any.

    Args:
        data: a data module of ``lightning`` or ``pytorch_lightning``.
        world: number of processes of the run.

    Raises:
        ConfigError: ``data`` is not a ``LightningDataModule``, its loaders use a custom sampler, it changes batches after the loader, or
            it has a state that a checkpoint would have to store.
    """
    from filelock import FileLock

    base = lightning_base(data, "LightningDataModule")
    name = type(data).__name__
    if base is None:
        raise ConfigError(f"data must be a Task or a LightningDataModule, got {name}")
    hooks = [hook for hook in _BATCH_HOOKS if overrides(data, base, hook)]
    require(not hooks, f"data: minitx does not call {name}.{', '.join(hooks)}: change batches in collate_fn")
    require(overrides(data, base, "val_dataloader"), f"data: {name} needs a val_dataloader")
    trainer, data.trainer = data.trainer, SimpleNamespace(world_size=world)
    try:
        with FileLock(Path(tempfile.gettempdir()) / f"minitx-{os.getuid()}-{name}.lock"):  # processes prepare one after another
            data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
        splits: dict[str, Any] = {
            "train": Collated(loader, "train_dataloader"),
            "val": Collated(data.val_dataloader(), "val_dataloader"),
        }
        if overrides(data, base, "test_dataloader"):
            data.setup("test")
            splits["test"] = Collated(data.test_dataloader(), "test_dataloader")
    finally:
        data.trainer = trainer
    require(not data.state_dict(), f"data: {name}.state_dict is not empty, but minitx does not save it")
    if isinstance(loader.sampler, SequentialSampler):
        log.info("data: minitx shuffles the rows of %s.train_dataloader despite shuffle=False", name)
    fields = dict(getattr(data, "model_fields", {}))
    task = Task(name=name, model_fields=fields, tokenizer=getattr(data, "tokenizer", None), **splits)
    return task, {"batch_size": loader.batch_size, "num_workers": loader.num_workers}


def load_task(
    part: Part, *, seed: int = 0, tokenizer: Tokenizer | None = None, trainer: TrainerConfig | None = None
) -> tuple[Task, dict[str, int]]:
    """Load the data of a part as a task. Also return ``batch_size``, the number of rows of a step, and ``num_workers``.

    A target with a parameter ``batch_size``, ``num_workers``, ``seed`` or ``tokenizer`` gets its value. A batch of the training loader
    of a ``LightningDataModule`` is a micro-batch of one process, as in Lightning.

    Args:
        tokenizer: a tokenizer to use instead of the one in ``part``, for example the tokenizer of a checkpoint.
        trainer: the options of the run, for the number of processes and micro-batches. Default: one.

    Raises:
        ConfigError: the data cannot be read, or are neither a ``Task`` nor a ``LightningDataModule``.
    """
    seed_device(seed)
    if tokenizer is not None and "tokenizer" in part.names:
        part = part.with_(tokenizer=tokenizer)
    data = part.build(**part.run_values, seed=seed)
    if isinstance(data, Task):
        return data, dict(part.run_values)
    world, accumulate = (trainer.world_size, trainer.accumulate) if trainer is not None else (1, 1)
    task, loading = task_of_loaders(data, world)
    return task, {**loading, "batch_size": loading["batch_size"] * accumulate * world}
