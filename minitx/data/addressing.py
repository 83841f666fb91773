"""Addressed batches: the global batch is a pure function of (seed, optimizer step).

An optimizer step sees one *global* batch of ``batch_size`` rows. Its ``accumulate`` micro-batches and ``world`` ranks
take slices of it. So resuming, accumulating and adding devices never change which rows a step trains on.
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
"""Random draws of validation use this constant instead of the run's seed, so that all runs are judged on the same rows."""


@dataclass(frozen=True)
class Address:
    """Which slice of which batch: optimizer step (or validation batch), micro-batch within it, and rank."""

    step: int
    micro: int = 0
    rank: int = 0


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
    """A random generator that depends on ``seed`` and ``path`` alone, not on the platform or the order of calls.

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
    """The addresses of one rank: steps [``step``, ``num_steps``), each with ``accumulate`` micro-batches.

    With ``repeat_first``, each of them has the rows of step 0.
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
    """A process that makes batches has died."""


class AddressedLoader(DataLoader[Batch]):
    """A ``DataLoader`` of whole batches whose state is the optimizer step that comes next.

    The state counts the batches that were handed out, not those that workers have made ahead; a stop inside of an
    accumulation window resumes at the start of the window. ``len`` counts the micro-batches of the *whole* run, because
    Lightning restores its own batch counter on resume and compares it with this length.

    Args:
        source: ``source[address]`` is a batch. The state of a source that has ``state_dict(step)`` is stored as well.
        addresses: of this rank.
        num_workers: processes that make batches; kept alive between epochs.
        pin_memory: copy to page-locked memory, for an accelerator.

    Raises:
        WorkerError: while iterating, where a worker was killed.
    """

    def __init__(self, source: Dataset[Batch], addresses: Addresses, *, num_workers: int = 0, pin_memory: bool = False) -> None:
        self.addresses, self._handed_out = addresses, 0
        options: dict[str, Any] = {"batch_size": None, "num_workers": num_workers, "persistent_workers": num_workers > 0}
        super().__init__(source, sampler=addresses, pin_memory=pin_memory, **options)

    def __len__(self) -> int:
        return self.addresses.num_steps * self.addresses.accumulate

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self._handed_out = 0
        try:
            for batch in super().__iter__():
                self._handed_out += 1
                yield batch
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            said = f"data.num_workers={self.num_workers}: a process that makes batches was killed, often because memory ran out"
            raise WorkerError(f"{said}; use fewer, or 0 to make batches in the training process ({error})") from error

    def state_dict(self) -> dict[str, Any]:
        """``{"step": the next optimizer step}``, and what the source adds for that step."""
        step = self.addresses.step + self._handed_out // self.addresses.accumulate
        return {"step": step, **(self.dataset.state_dict(step) if hasattr(self.dataset, "state_dict") else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next ``iter`` at ``state["step"]``.

        Raises:
            ValueError: it is not a step of this run.
        """
        step = int(state["step"])
        if not 0 <= step <= self.addresses.num_steps:
            raise ValueError(f"step={step} must lie in [0, {self.addresses.num_steps}], the steps of this run")
        self.addresses.step, self._handed_out = step, 0
        if hasattr(self.dataset, "load_state_dict"):
            self.dataset.load_state_dict(state)
