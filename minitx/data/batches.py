"""Addressed batches: the global batch is a pure function of (seed, optimizer step).

An optimizer step sees one *global* batch of ``batch_size`` rows. Its ``accumulate`` micro-batches and ``world`` ranks are
slices of it. Resuming, accumulating and adding devices therefore never change which rows a step trains on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from minitx.config import IGNORED, ConfigError
from minitx.config.failures import FailedRunError
from minitx.data.seeding import VALIDATION_SEED, Draw, generator
from minitx.data.splits import Split
from minitx.data.task import Batch, num_targets

BATCHES_IN_A_WINDOW = 50


@dataclass(frozen=True)
class Address:
    """The address of a slice: optimizer step (or validation batch), micro-batch within it, and rank."""

    step: int
    micro: int = 0
    rank: int = 0


def rows_of(address: Address, batch_size: int, accumulate: int = 1, world: int = 1) -> range:
    """Return the rows of the global batch that belong to one micro-batch of one rank.

    With b = batch_size / (accumulate · world), the result is the b rows from (micro · world + rank) · b on. All slices of a step,
    ordered by micro-batch and then by rank, are the global batch in order.

    Raises:
        ValueError: the batch cannot be divided into equal slices.

    >>> rows_of(Address(step=7, micro=1, rank=0), batch_size=12, accumulate=2, world=2)
    range(6, 9)
    """
    slices = accumulate * world
    if batch_size % slices:
        raise ValueError(f"batch_size={batch_size} must be divisible by accumulate={accumulate} x world={world}")
    rows = batch_size // slices
    first = (address.micro * world + address.rank) * rows
    return range(first, first + rows)


@dataclass
class Addresses:
    """The addresses of one rank: steps ``step`` to ``num_steps - 1``, each with ``accumulate`` micro-batches.

    With ``repeat_first``, every step has the rows of step 0.
    """

    num_steps: int
    step: int = 0
    accumulate: int = 1
    rank: int = 0
    repeat_first: bool = False

    def __iter__(self) -> Iterator[Address]:
        for step in range(self.step, self.num_steps):
            for micro in range(self.accumulate):
                yield Address(0 if self.repeat_first else step, micro, self.rank)


class Source(Dataset[Batch], ABC):
    """``source[address]`` is a slice of a global batch, as a dict of tensors.

    ``num_targets`` (0-d, int64) is the number of labels of the *whole* step, over all micro-batches and ranks.

    Args:
        batch_size: rows of the global batch.
        accumulate: micro-batches per step.
        world: number of ranks that share a micro-batch.
    """

    def __init__(self, *, batch_size: int, accumulate: int = 1, world: int = 1) -> None:
        self.batch_size, self.accumulate, self.world = batch_size, accumulate, world

    def __getitem__(self, address: Address) -> Batch:
        return self.batch(address.step, rows_of(address, self.batch_size, self.accumulate, self.world))

    @abstractmethod
    def batch(self, step: int, rows: range) -> Batch:
        """Return these rows of the global batch of ``step``."""


class TrainSource(Source):
    """Training batches: row r of step s is item number s · batch_size + r of an endless stream of epochs.

    The order of an epoch depends only on (seed, epoch). With ``bucket``, an epoch is permuted and cut into windows of 50
    batches. Each window is sorted by length and cut into batches, and the batches are permuted. Batches that contain rows of
    two epochs are not sorted. A slice is padded to its longest row.

    Args:
        split: the rows, or a function (count, generator) → batch that draws new rows in each step. Its generator depends on (seed, step).
        batch_size, accumulate, world: see ``Source``.
        seed: the seed of the order and of random draws.
        bucket: put rows of similar length into the same batch.
    """

    def __init__(self, split: Split | Callable[..., Batch], *, seed: int, bucket: bool = False, **slices: Any) -> None:
        super().__init__(**slices)
        self.split: Any = split
        self.seed, self.bucket = seed, bucket
        self._orders: dict[int, np.ndarray] = {}
        self._counted = (-1, 0)  # a step, and the number of its labels

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": {}}

    def batch(self, step: int, rows: range) -> Batch:
        """See ``Source``."""
        if not isinstance(self.split, Split):
            drawn = self.split(self.batch_size, generator(self.seed, "train", step))
            batch = {key: tensor[rows.start : rows.stop] for key, tensor in drawn.items()}
            return {**batch, "num_targets": num_targets(drawn["labels"])}
        whole = self.items(step, range(self.batch_size))
        batch = self.split.collate(whole[rows.start : rows.stop], self._draw(step, rows.start))
        if self._counted[0] != step:
            self._counted = step, count(self.split, whole, self._draw(step, 0), batch if len(rows) == len(whole) else None)
        return {**batch, "num_targets": torch.tensor(self._counted[1])}

    def items(self, step: int, rows: range) -> np.ndarray:
        """Return the items for these rows of the global batch of ``step``, (rows,) int64."""
        positions = step * self.batch_size + np.arange(rows.start, rows.stop)
        epochs, index = np.divmod(positions, len(self.split))
        return np.concatenate([self.order(epoch)[index[epochs == epoch]] for epoch in range(epochs[0], epochs[-1] + 1)])

    def order(self, epoch: int) -> np.ndarray:
        """Return the items of an epoch in order, (N,) int64. The latest two epochs are cached."""
        if epoch not in self._orders:
            while len(self._orders) > 1:
                del self._orders[min(self._orders)]
            random = generator(self.seed, "epoch", epoch)
            order = self.split.order(epoch, random)
            self._orders[epoch] = self._bucketed(order, epoch, random) if self.bucket else order
        return self._orders[epoch]

    def _bucketed(self, order: np.ndarray, epoch: int, random: np.random.Generator) -> np.ndarray:
        size = self.batch_size
        lengths = self.split.lengths
        first = -epoch * len(order) % size  # the first rows complete the last batch of the previous epoch
        stop = first + (len(order) - first) // size * size
        if stop <= first:
            return order
        for start in range(first, stop, BATCHES_IN_A_WINDOW * size):
            window = order[start : min(start + BATCHES_IN_A_WINDOW * size, stop)]
            window[:] = window[np.argsort(lengths[window], kind="stable")]
        order[first:stop] = random.permutation(order[first:stop].reshape(-1, size)).ravel()
        return order

    def _draw(self, step: int, start: int) -> Draw:
        return lambda row: generator(self.seed, "draw", step, start + row)


class ValSource(Source):
    """Validation batches: every row once over all ranks, in order. Random draws depend only on the number of the row.

    Every rank gets the same number of batches, so that no collective hangs. The last batches may have fewer rows. A rank without
    rows gets one row whose labels do not count.

    Args:
        split: the rows.
        batch_size, world: see ``Source``.
    """

    def __init__(self, split: Split, *, batch_size: int, world: int = 1) -> None:
        super().__init__(batch_size=batch_size, world=world)
        self.split = split
        self.num_rows = len(split)

    def __len__(self) -> int:
        """The number of (global) batches."""
        return -(-self.num_rows // self.batch_size)

    def batch(self, step: int, rows: range) -> Batch:
        """See ``Source``. ``num_targets`` is the number of labels of the batch over all ranks."""
        first, last = step * self.batch_size, min((step + 1) * self.batch_size, self.num_rows)
        numbers = range(first + rows.start, min(first + rows.stop, last))
        batch = self.rows(numbers if numbers else range(1))
        if not numbers:
            batch["labels"].fill_(math.nan if batch["labels"].is_floating_point() else IGNORED)
        if numbers != range(first, last):
            batch["num_targets"] = torch.tensor(count(self.split, np.arange(first, last), self._draw(first)))
        return batch

    def rows(self, rows: range) -> Batch:
        """Return rows by their number in [0, ``num_rows``). ``num_targets`` is the number of labels of these rows."""
        items = np.arange(rows.start, rows.stop)
        batch = self.split.collate(items, self._draw(rows.start))
        return {**batch, "num_targets": torch.tensor(count(self.split, items, self._draw(rows.start), batch))}

    def _draw(self, start: int) -> Draw:
        return lambda row: generator(VALIDATION_SEED, "draw", start + row)


def count(split: Split, items: np.ndarray, draw: Draw, batch: Batch | None = None) -> int:
    """Return the number of labels that count in these items. ``batch`` is the batch of these items, if it already exists."""
    counted = split.count(items)
    return int(num_targets((batch or split.collate(items, draw))["labels"])) if counted is None else counted


class WorkerError(FailedRunError):
    """A worker process of the loader died."""


class AddressedLoader(DataLoader[Batch]):
    """A ``DataLoader`` of whole batches. Its state is the number of the next optimizer step.

    The state counts the batches that were used, not the batches that workers have prepared. A run that stops during accumulation
    resumes at the start of that step. ``len`` is the number of micro-batches of the *whole* run, because Lightning restores its own
    batch counter on resume and compares it with this length.

    Args:
        source: ``source[address]`` is a batch. A source that is read in order adds ``position``, a pair (part, position in it
            after the batch), and has ``state_dict(rank, positions)`` and ``load_state_dict``.
        addresses: the addresses of this rank.
        num_workers: number of processes that load batches. They live for the whole run.
        pin_memory: copy batches to page-locked memory, for an accelerator.

    Raises:
        ConfigError: rows cannot be joined to a batch, in this process or in a worker. WorkerError: a worker was killed during iteration.
    """

    def __init__(self, source: Dataset[Batch], addresses: Addresses, *, num_workers: int = 0, pin_memory: bool = False) -> None:
        self.addresses = addresses
        self._handed_out = 0
        self._positions: dict[int, str] = {}  # the position in each part of the source, after the last whole step
        options: dict[str, Any] = {"batch_size": None, "num_workers": num_workers, "persistent_workers": num_workers > 0}
        super().__init__(source, sampler=addresses, pin_memory=pin_memory, **options)

    def __len__(self) -> int:
        return self.addresses.num_steps * self.addresses.accumulate

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self._handed_out, self._positions, latest = 0, {}, dict[int, str]()
        try:
            for batch in super().__iter__():
                self._handed_out += 1
                if "position" in batch:
                    part, position = batch.pop("position")
                    latest[int(part)] = str(position)
                    if self._handed_out % self.addresses.accumulate == 0:
                        self._positions = dict(latest)
                yield batch
        except ConfigError as error:  # for a worker, torch puts the whole traceback into the message
            raise ConfigError(str(error).rpartition(f"{ConfigError.__name__}: ")[2].strip()) from error
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise WorkerError(
                f"data.num_workers={self.num_workers}: a worker process was killed, often because memory ran out; use fewer workers, "
                f"or 0 to load batches in the training process ({error})"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"step": the next optimizer step}`` and the state of the source at that step."""
        step = self.addresses.step + self._handed_out // self.addresses.accumulate
        source: Any = self.dataset
        has_state = hasattr(source, "state_dict")
        positions = {} if self.addresses.repeat_first else self._positions  # every step begins where the first did
        return {"step": step, **(source.state_dict(self.addresses.rank, positions) if has_state else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter`` begin at ``state["step"]``.

        Raises:
            ValueError: the run has no such step.
        """
        step = int(state["step"])
        if not 0 <= step <= self.addresses.num_steps:
            raise ValueError(f"step={step} must lie in [0, {self.addresses.num_steps}], the steps of this run")
        self.addresses.step, self._handed_out, self._positions = step, 0, {}
        if hasattr(self.dataset, "load_state_dict") and not self.addresses.repeat_first:
            self.dataset.load_state_dict(state)
