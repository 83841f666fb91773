"""Batches of a split by address, for training and for validation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from minitx.config import IGNORED
from minitx.data.addressing import VALIDATION_SEED, Address, Batch, generator, rows_of
from minitx.data.task import Draw, Split, num_targets

BATCHES_IN_A_WINDOW = 50


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
        split: the rows, or a function (count, generator) → batch, which draws new rows in each step from (seed, step).
        batch_size, accumulate, world: see ``Source``.
        seed: the seed of the order and of random draws.
        bucket: put rows of similar length into the same batch.
    """

    def __init__(self, split: Split | Callable[..., Batch], *, seed: int, bucket: bool = False, **slices: Any) -> None:
        super().__init__(**slices)
        self.split, self.seed, self.bucket = split, seed, bucket
        self._orders: dict[int, np.ndarray] = {}
        self._counted = (-1, 0)  # a step, and its labels

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
        assert isinstance(self.split, Split)
        positions = np.arange(step * self.batch_size + rows.start, step * self.batch_size + rows.stop)
        epochs, index = np.divmod(positions, len(self.split))
        items = np.empty_like(positions)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            of_epoch = epochs == epoch
            items[of_epoch] = self.order(epoch, self.split)[index[of_epoch]]
        return items

    def order(self, epoch: int, split: Split) -> np.ndarray:
        """Return the items of an epoch in order, (N,) int64. The latest two epochs are cached."""
        if epoch not in self._orders:
            while len(self._orders) > 1:
                del self._orders[min(self._orders)]
            random = generator(self.seed, "epoch", epoch)
            order = split.order(epoch, random)
            self._orders[epoch] = self._bucketed(order, epoch, split.lengths, random) if self.bucket else order
        return self._orders[epoch]

    def _bucketed(self, order: np.ndarray, epoch: int, lengths: np.ndarray, random: np.random.Generator) -> np.ndarray:
        size, window_size = self.batch_size, BATCHES_IN_A_WINDOW * self.batch_size
        first = -epoch * len(order) % size  # the first rows fill up the batch that the last epoch began
        stop = first + (len(order) - first) // size * size
        if stop <= first:
            return order
        for start in range(first, stop, window_size):
            window = order[start : min(start + window_size, stop)]
            window[:] = window[np.argsort(lengths[window], kind="stable")]
        order[first:stop] = random.permutation(order[first:stop].reshape(-1, size)).ravel()
        return order

    def _draw(self, step: int, start: int) -> Draw:
        return lambda row: generator(self.seed, "draw", step, start + row)


class ValSource(Source):
    """Validation batches: every row once over all ranks, in order. Random draws depend only on the number of the row.

    Every rank gets the same number of batches, so that no collective waits for ever. The last batches may have fewer rows. A
    rank without rows gets one row whose labels are all ignored (or no row, if labels are not whole numbers).

    Args:
        split: the rows.
        batch_size, world: see ``Source``.
    """

    def __init__(self, split: Split, *, batch_size: int, world: int = 1) -> None:
        super().__init__(batch_size=batch_size, world=world)
        self.split, self.num_rows = split, len(split)

    def __len__(self) -> int:
        """The number of (global) batches."""
        return -(-self.num_rows // self.batch_size)

    def batch(self, step: int, rows: range) -> Batch:
        """See ``Source``. ``num_targets`` is the number of labels of the batch over all ranks."""
        first, last = step * self.batch_size, min((step + 1) * self.batch_size, self.num_rows)
        wanted = range(first + rows.start, min(first + rows.stop, last))
        batch = self.rows(wanted if wanted else range(1))
        if not wanted and batch["labels"].is_floating_point():
            batch = {key: tensor[:0] if tensor.dim() else tensor for key, tensor in batch.items()}
        elif not wanted:
            batch["labels"].fill_(IGNORED)
        if wanted != range(first, last):
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
    """Return the number of labels that count in these items. ``batch`` is the batch of these items, if it exists already."""
    known = split.count(items)
    return int(num_targets((batch or split.collate(items, draw))["labels"])) if known is None else known
