"""Addressed batches: the global batch is a pure function of (seed, optimizer step).

An optimizer step sees one *global* batch of ``batch_size`` rows. Its ``accumulate`` micro-batches and ``world`` ranks are
slices of it. Resuming, accumulating and adding devices therefore never change which rows a step trains on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Batch = dict[str, Tensor]

VALIDATION_SEED = 20240229
"""The seed of all random draws of validation, so that all runs are validated on the same rows."""


@dataclass(frozen=True)
class Address:
    """The address of a slice: optimizer step (or validation batch), micro-batch within it, and rank."""

    step: int
    micro: int = 0
    rank: int = 0


def rows_of(address: Address, batch_size: int, accumulate: int = 1, world: int = 1) -> range:
    """Return the rows of the global batch that belong to one micro-batch of one rank.

    With b = batch_size / (accumulate · world), these are the b rows from (micro · world + rank) · b on. All slices of a step,
    ordered by micro-batch and then by rank, are the global batch in order.

    Raises:
        ValueError: the batch cannot be divided into equal slices, or there is no such slice.

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
    """Return a random generator that depends only on ``seed`` and ``path``, not on the platform or the order of calls.

    The SHA-256 of (seed, path) is the key of a Philox counter (Salmon et al. 2011, "Parallel random numbers: as easy as
    1, 2, 3"), so the streams of neighbouring seeds and steps are independent.

    >>> bool(generator(0, "train", 3).random() == generator(0, "train", 3).random())
    True
    """
    name = repr((int(seed), *(part if isinstance(part, str) else int(part) for part in path)))
    key = hashlib.sha256(name.encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


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


class WorkerError(RuntimeError):
    """A process that loads batches has died."""


class AddressedLoader(DataLoader[Batch]):
    """A ``DataLoader`` of whole batches. Its state is the number of the next optimizer step.

    The state counts the batches that were used, not those that workers have prepared. A run that stops in the middle of an
    accumulation resumes at its start. ``len`` is the number of micro-batches of the *whole* run, because Lightning restores its
    own batch counter on resume and compares it with this length.

    Args:
        source: ``source[address]`` is a batch. A source that is read in order adds ``position``, a pair (part, position in it
            after the batch), and has ``state_dict(rank, positions)`` and ``load_state_dict``.
        addresses: the addresses of this rank.
        num_workers: number of processes that load batches. They live for the whole run.
        pin_memory: copy batches to page-locked memory, for an accelerator.

    Raises:
        WorkerError: a worker was killed during iteration.
    """

    def __init__(self, source: Dataset[Batch], addresses: Addresses, *, num_workers: int = 0, pin_memory: bool = False) -> None:
        self.addresses, self._handed_out = addresses, 0
        self._positions: dict[int, str] = {}  # of the parts of the source, after the last whole step
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
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            said = f"data.num_workers={self.num_workers}: a process that makes batches was killed, often because memory ran out"
            raise WorkerError(f"{said}; use fewer, or 0 to make batches in the training process ({error})") from error

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"step": the next optimizer step}`` and the state of the source at that step."""
        step = self.addresses.step + self._handed_out // self.addresses.accumulate
        source: Any = self.dataset
        known = hasattr(source, "state_dict")
        return {"step": step, **(source.state_dict(self.addresses.rank, self._positions) if known else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter`` begin at ``state["step"]``.

        Raises:
            ValueError: the run has no such step.
        """
        step = int(state["step"])
        if not 0 <= step <= self.addresses.num_steps:
            raise ValueError(f"step={step} must lie in [0, {self.addresses.num_steps}], the steps of this run")
        self.addresses.step, self._handed_out, self._positions = step, 0, {}
        if hasattr(self.dataset, "load_state_dict"):
            self.dataset.load_state_dict(state)
