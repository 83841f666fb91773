"""Addressed batches: the global batch is a pure function of (seed, optimizer step).

An optimizer step sees one *global* batch of ``batch_size`` rows. Its ``accumulate`` micro-batches and ``world`` ranks
take slices of it, so that resuming, accumulating and adding devices never change which rows a step trains on.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from minitx.config import IGNORED

Split = Literal["train", "val"]
Batch = dict[str, Tensor]

VALIDATION_SEED = 20240229
"""What is drawn for validation depends on this constant instead of the run's seed: all runs are judged on the same."""


@dataclass(frozen=True)
class Address:
    """Which slice of which batch: optimizer step (or validation batch), micro-batch within it, rank, and split."""

    step: int
    micro: int = 0
    rank: int = 0
    split: Split = "train"


def rows_of(address: Address, batch_size: int, accumulate: int = 1, world: int = 1) -> range:
    """The rows of the global batch that one micro-batch of one rank takes.

    With b = batch_size / (accumulate · world), (micro, rank) takes the b rows from (micro · world + rank) · b on;
    all slices of a step, micro-batch by micro-batch and rank by rank, give the global batch in order.

    Raises:
        ValueError: the batch does not divide into slices, or the address lies outside of them.

    >>> rows_of(Address(step=7, micro=1, rank=0), batch_size=12, accumulate=2, world=2)
    range(6, 9)
    """
    slices = accumulate * world
    if batch_size % slices:
        raise ValueError(f"batch_size={batch_size} must be divisible by accumulate={accumulate} x world={world}")
    if not (0 <= address.micro < accumulate and 0 <= address.rank < world and address.step >= 0):
        raise ValueError(f"{address} must have step >= 0, micro in [0, {accumulate}) and rank in [0, {world})")
    rows = batch_size // slices
    first = (address.micro * world + address.rank) * rows
    return range(first, first + rows)


def generator(seed: int, *path: int | str) -> np.random.Generator:
    """A random generator that depends on ``seed`` and ``path`` alone: no state, no platform, no order of calls.

    The SHA-256 of (seed, path) keys a Philox counter (Salmon et al. 2011, "Parallel random numbers: as easy as
    1, 2, 3"), so that near seeds and near steps are independent streams.

    >>> bool(generator(0, "train", 3).random() == generator(0, "train", 3).random())
    True
    """
    name = repr((int(seed), *(part if isinstance(part, str) else int(part) for part in path)))
    key = hashlib.sha256(name.encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


class AddressSampler(Sampler[Address]):
    """The addresses of one rank: steps [``start_step``, ``num_steps``), each with ``accumulate`` micro-batches.

    ``len`` counts the addresses from ``start_step`` on. The state is the next optimizer step: a stop inside an
    accumulation window resumes at the window's start. Every ``iter`` begins at ``start_step`` again.

    Raises:
        ValueError: ``start_step`` is not in [0, num_steps], or ``accumulate`` is not positive.
    """

    def __init__(
        self, num_steps: int, *, start_step: int = 0, accumulate: int = 1, rank: int = 0, split: Split = "train"
    ) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate={accumulate} must be positive")
        self.num_steps, self.accumulate, self.rank, self.split = num_steps, accumulate, rank, split
        self.load_state_dict({"step": start_step})

    def __len__(self) -> int:
        return (self.num_steps - self.start_step) * self.accumulate

    def __iter__(self) -> Iterator[Address]:
        for step in range(self.start_step, self.num_steps):
            for micro in range(self.accumulate):
                yield Address(step, micro, self.rank, self.split)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next ``iter`` at ``state["step"]``."""
        step = int(state["step"])
        if not 0 <= step <= self.num_steps:
            raise ValueError(f"start_step={step} must lie in [0, {self.num_steps}], the steps of this run")
        self.start_step = step


class BatchSource(Dataset[Batch], ABC):
    """A map-style dataset of whole batches: ``source[address]`` is a dict of tensors, rows of one global batch.

    Keys: ``input_ids`` and ``labels`` (B, L) int64, ``labels[t]`` being the target of position t and −100 where it does
    not count; ``token_type_ids`` (B, L) int64 where the task uses them; ``num_targets``, 0-d int64, the number of
    counted labels of the *whole* step, over all of its micro-batches and ranks.

    Args:
        batch_size: rows of the global batch.
        accumulate: micro-batches a step is cut into.
        world: ranks a micro-batch is cut into.
        split: the split that this source serves; addresses of another one are refused.
    """

    def __init__(self, batch_size: int, *, accumulate: int = 1, world: int = 1, split: Split = "train") -> None:
        self.batch_size, self.accumulate, self.world, self.split = batch_size, accumulate, world, split

    def __getitem__(self, address: Address) -> Batch:
        if address.split != self.split:
            raise ValueError(f"{address} asks a source of the {self.split} split")
        return self.batch(address.step, rows_of(address, self.batch_size, self.accumulate, self.world))

    @abstractmethod
    def batch(self, step: int, rows: range) -> Batch:
        """The given rows of the global batch of ``step``."""


class EpochSource(BatchSource):
    """Training rows from an endless stream of epochs: row r of step s is item number s · batch_size + r of the stream.

    Args:
        epoch_len: items of every epoch; their order depends on (seed, epoch) alone.
        batch_size, accumulate, world: see ``BatchSource``.
        seed: of the orders.
    """

    def __init__(self, epoch_len: int, *, batch_size: int, seed: int, accumulate: int = 1, world: int = 1) -> None:
        super().__init__(batch_size, accumulate=accumulate, world=world)
        self.epoch_len, self.seed = epoch_len, seed
        self._orders: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": {}}

    @abstractmethod
    def order(self, epoch: int, random: np.random.Generator) -> np.ndarray:
        """The items of an epoch in the order of that epoch, (epoch_len,) int64, drawn from ``random`` alone."""

    def items(self, step: int, rows: range) -> np.ndarray:
        """The items of these rows of the global batch of ``step``, (rows,) int64."""
        first = step * self.batch_size
        positions = np.arange(first + rows.start, first + rows.stop)
        epochs, index = np.divmod(positions, self.epoch_len)
        items = np.empty_like(positions)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            of_epoch = epochs == epoch
            items[of_epoch] = self._order(epoch)[index[of_epoch]]
        return items

    def _order(self, epoch: int) -> np.ndarray:
        """``order`` of an epoch; the latest two are kept."""
        if epoch not in self._orders:
            while len(self._orders) > 1:
                del self._orders[min(self._orders)]
            self._orders[epoch] = self.order(epoch, generator(self.seed, "epoch", epoch))
        return self._orders[epoch]


class FiniteSource(BatchSource):
    """A source over ``num_rows`` rows in a fixed order: validation, every row exactly once over all ranks.

    Every rank gets the same number of batches, so that no collective waits for ever; the last ones may have fewer
    rows, and a rank that has none left gets one row whose labels are all ignored.
    """

    num_rows: int

    def __len__(self) -> int:
        """Number of (global) batches."""
        return -(-self.num_rows // self.batch_size)

    def batch(self, step: int, rows: range) -> Batch:
        """The given rows of batch ``step``; ``num_targets`` counts the labels of the batch over all ranks."""
        first, last = step * self.batch_size, min((step + 1) * self.batch_size, self.num_rows)
        wanted = range(first + rows.start, min(first + rows.stop, last))
        batch = self.rows(wanted if wanted else range(1))
        if not wanted:
            batch["labels"].fill_(IGNORED)
        batch["num_targets"] = self.count(range(first, last))
        return batch

    @abstractmethod
    def rows(self, rows: range) -> Batch:
        """Rows by their number in [0, ``num_rows``), with ``num_targets`` counting the labels of these rows."""

    @abstractmethod
    def count(self, rows: range) -> Tensor:
        """Number of counted labels in these rows, 0-d int64."""


class WorkerError(RuntimeError):
    """A process that makes batches has died."""


class AddressedLoader(DataLoader[Batch]):
    """A ``DataLoader`` of whole batches with a state: the optimizer step that comes next.

    The state counts the batches handed out, not those that workers have fetched ahead. ``len`` counts the micro-batches
    of the *whole* run: Lightning restores its own batch counter on resume and compares it with this length, so a
    length that shrinks with ``start_step`` would end a resumed run early.

    Args:
        source: the batches.
        sampler: the addresses of this rank.
        num_workers: processes that make batches; kept alive between epochs.
        pin_memory: copy to page-locked memory, for an accelerator.
    """

    def __init__(self, source: BatchSource, sampler: AddressSampler, *, num_workers: int = 0, pin_memory: bool = False) -> None:
        self.addresses = sampler
        self._handed_out = 0
        super().__init__(
            source,
            sampler=sampler,
            batch_size=None,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
        )

    def __len__(self) -> int:
        return self.addresses.num_steps * self.addresses.accumulate

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self._handed_out = 0
        batches = super().__iter__()
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if not str(error).startswith("DataLoader worker"):
                    raise
                raise WorkerError(
                    f"data.num_workers={self.num_workers}: a process that makes batches was ended from outside, often for "
                    f"want of memory; take fewer, or 0 to make batches in the training process ({error})"
                ) from error
            self._handed_out += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """``{"step": next optimizer step}``; inside an accumulation window that is the window's own step."""
        return {"step": self.addresses.start_step + self._handed_out // self.addresses.accumulate}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next ``iter`` at ``state["step"]``."""
        self.addresses.load_state_dict(state)
        self._handed_out = 0
