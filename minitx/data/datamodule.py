"""The Lightning data module of a ``Task``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningDataModule

from minitx.config import ConfigError, Part, TrainerConfig
from minitx.data.batches import AddressedLoader, Addresses, Source, TrainSource, ValSource
from minitx.data.splits import Split, as_split
from minitx.data.task import Batch, Task
from minitx.data.task_loading import load_task
from minitx.data.tokenizer import Tokenizer
from minitx.nn.transfer import is_pinned_for


class DataModule(LightningDataModule):
    """The addressed loaders of a task. They work with and without a Lightning trainer, and need no ``setup``.

    Args:
        task: the data.
        batch_size: rows of the global batch of one optimizer step.
        num_workers: number of processes that load batches. 0: this process loads them.
        seed: the seed of the order of training rows and of all random draws in training.
        max_steps: number of optimizer steps of the run.
        accumulate: micro-batches per step.
        val_batch_size: rows of a validation batch over all ranks, rounded up to a multiple of their number. ``None``:
            ``batch_size``.
        repeat_first: train on the batch of the first step in every step, to check that a model can learn it.

    Raises:
        ConfigError: a split of the task cannot be used.
    """

    def __init__(
        self,
        task: Task,
        *,
        batch_size: int,
        num_workers: int = 0,
        seed: int = 0,
        max_steps: int = 1,
        accumulate: int = 1,
        val_batch_size: int | None = None,
        repeat_first: bool = False,
    ) -> None:
        super().__init__()
        self.repeat_first = repeat_first
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self.max_steps, self.accumulate, self._val_batch_size = max_steps, accumulate, val_batch_size
        self._read(task)

    def _read(self, task: Task) -> None:
        self.task = task
        has_rows = not callable(task.train) and not hasattr(task.train, "source")
        self._train = as_split(task, "train") if has_rows else task.train
        self._val = as_split(task, "val")

    def number_labels_as(self, names: Sequence[str]) -> None:
        """Number the labels as in ``names``, the labels of a trained head. See ``numbered_as``."""
        if names and self.task.label_names:
            from minitx.data.classification import numbered_as

            self._read(numbered_as(self.task, names))

    def train_source(self, world: int = 1) -> Source:
        """Return the training batches for ``world`` ranks."""
        slices = {"batch_size": self.batch_size, "accumulate": self.accumulate, "world": world}
        if hasattr(self._train, "source"):
            return self._train.source(seed=self.seed, num_workers=self.num_workers, **slices)
        return TrainSource(self._train, seed=self.seed, bucket=self.task.bucket, **slices)

    def val_source(self, world: int = 1) -> ValSource:
        """Return the validation batches for ``world`` ranks."""
        return ValSource(self._val, batch_size=self.val_batch_size(world), world=world)

    def train_dataloader(self) -> AddressedLoader:
        """Return this rank's training batches, from the trainer's current optimizer step on (0 without a trainer)."""
        rank, world = self._rank_and_world()
        step = min(self.trainer.global_step, self.max_steps) if self.trainer else 0
        addresses = Addresses(self.max_steps, step, self.accumulate, rank, self.repeat_first)
        return self._loader(self.train_source(world), addresses)

    def val_dataloader(self) -> AddressedLoader:
        """Return this rank's validation batches. Over all ranks, every row appears once, and all ranks have equally many batches."""
        return self._validation(self._val)

    def test_dataloader(self) -> AddressedLoader:
        """Return this rank's batches of the test split."""
        return self._validation(as_split(self.task, "test"))

    def probe_batch(self, num_rows: int) -> Batch:
        """Return the first ``num_rows`` rows of validation, or all if there are fewer."""
        source = self.val_source()
        return source.rows(range(min(num_rows, source.num_rows)))

    def first_rows(self, num_rows: int) -> Batch:
        """Return the first ``num_rows`` rows of the first training step, or of validation if the training rows are a stream."""
        if hasattr(self._train, "source"):
            return self.probe_batch(num_rows)
        return self.train_source().batch(0, range(min(num_rows, self.batch_size)))

    def texts(self, inputs: Batch) -> dict[str, list[list[str]]]:
        """Return a text for each position of a batch; see ``position_texts``."""
        from minitx.data.token_labels import position_texts  # for looking only

        return position_texts(self.task, inputs)

    def steps_of(self, epochs: int) -> int:
        """Return the optimizer steps of ``epochs`` passes over the training rows.

        Raises:
            ConfigError: the data are new in every step, or a stream.
        """
        if not isinstance(self._train, Split):
            raise ConfigError(
                f"trainer.max_epochs={epochs} needs a fixed number of training rows, but {self.task.name} has none: set trainer.max_steps"
            )
        return math.ceil(epochs * len(self._train) / self.batch_size)

    def val_batch_size(self, world: int) -> int:
        """Return the rows of a validation batch over all ranks, rounded up to a multiple of ``world``."""
        return world * math.ceil((self._val_batch_size or self.batch_size) / world)

    def check_batch(self) -> None:
        """Check that no training batch would contain a row twice. Evaluation does not need this check.

        Raises:
            ConfigError: fewer training rows than ``data.batch_size``.
        """
        if isinstance(self._train, Split) and len(self._train) < self.batch_size:
            raise ConfigError(
                f"{self.task.name} has {len(self._train)} training rows, fewer than data.batch_size={self.batch_size}: lower it"
            )

    def _rank_and_world(self) -> tuple[int, int]:
        """The rank of this process, and the number of processes."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _validation(self, split: Split) -> AddressedLoader:
        rank, world = self._rank_and_world()
        source = ValSource(split, batch_size=self.val_batch_size(world), world=world)
        return self._loader(source, Addresses(len(source), rank=rank))

    def _loader(self, source: Source, addresses: Addresses) -> AddressedLoader:
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        return AddressedLoader(source, addresses, num_workers=self.num_workers, pin_memory=is_pinned_for(device))


def open_data(part: Part, trainer: TrainerConfig, *, seed: int = 0, tokenizer: Tokenizer | None = None) -> DataModule:
    """Return the data of a run. See ``load_task``.

    Raises:
        ConfigError: the data cannot be read, or the rows of a step cannot be divided among processes and micro-batches.
    """
    task, loading = load_task(part, seed=seed, tokenizer=tokenizer, trainer=trainer)
    trainer.check_rows(loading["batch_size"])
    return DataModule(
        task,
        **loading,
        seed=seed,
        max_steps=trainer.max_steps or 1,  # ``in_steps`` sets it later
        accumulate=trainer.accumulate,
        val_batch_size=trainer.val_batch_size,
        repeat_first=trainer.overfit,
    )


def in_steps(trainer: TrainerConfig, data: DataModule) -> TrainerConfig:
    """Return the options with epochs converted to optimizer steps, from the number of training rows."""
    if trainer.max_epochs is None:
        return trainer
    steps = data.steps_of(trainer.max_epochs)
    data.max_steps = min(steps, trainer.max_steps or steps)
    val_every = data.steps_of(1) if trainer.val_every is None else trainer.val_every
    return dataclasses.replace(trainer, max_epochs=None, max_steps=data.max_steps, val_every=val_every)
