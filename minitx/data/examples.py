"""Data sets that are lists of examples: how a step draws, buckets, pads and slices them.

A task says what its examples are (``Examples``) and what a model must know of them (``Task``); everything else is here.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from minitx.data.addressing import VALIDATION_SEED, Batch, EpochSource, FiniteSource, generator
from minitx.data.tokenizers import Tokenizer
from minitx.data.tokens import TokenArray

TaskName = Literal["language_model", "seq2seq", "masked_lm", "classify"]
Draw = Callable[[int], np.random.Generator]
BATCHES_IN_A_WINDOW = 50


class Ragged:
    """Rows of ids of different lengths in one array: row i is ``values[starts[i] : starts[i] + lengths[i]]``.

    >>> ids, real = Ragged.of([np.array([5, 6, 7]), np.array([8])]).padded(np.array([1, 0]), fill=0)
    >>> ids.tolist(), real.tolist()
    ([[8, 0, 0], [5, 6, 7]], [[True, False, False], [True, True, True]])
    """

    def __init__(self, values: np.ndarray | TokenArray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self.values, self.starts, self.lengths = values, starts, lengths

    @classmethod
    def of(cls, rows: Iterable[np.ndarray]) -> Ragged:
        """Copy ``rows`` into one array."""
        rows = list(rows)
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        values = np.concatenate([np.zeros(0, np.uint32), *rows]).astype(np.uint32)
        return cls(values, np.cumsum(lengths) - lengths, lengths)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> np.ndarray:
        values = self.values.array if isinstance(self.values, TokenArray) else self.values
        return values[self.starts[row] : self.starts[row] + self.lengths[row]]

    def padded(self, index: np.ndarray, fill: int) -> tuple[Tensor, Tensor]:
        """The rows ``index`` as long as the longest of them: ids (B, L) int64, ``fill`` behind the end, and bool (B, L),
        True on the rows' own."""
        lengths = self.lengths[index]
        real = np.arange(max(1, lengths.max(initial=0))) < lengths[:, None]  # (B, L)
        ids = np.full(real.shape, fill, np.int64)
        ids[real] = np.concatenate([self[row] for row in index])
        return torch.from_numpy(ids), torch.from_numpy(real)


class Examples(ABC):
    """The examples of one split.

    Attributes:
        lengths: (N,), what a row of each takes; rows of similar length share a batch.
        targets: (N,), the labels that count in each, whatever is drawn at random.
    """

    lengths: np.ndarray
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.targets)

    @abstractmethod
    def collate(self, index: np.ndarray, draw: Draw) -> Batch:
        """The examples ``index`` (B,) as a batch without ``num_targets``; ``draw(i)`` is the generator of its row i."""


class ExampleSource(EpochSource):
    """Training batches: every example once an epoch, in an order that depends on (seed, epoch) alone.

    With ``bucket`` an epoch is permuted, cut into windows of 50 batches, each window sorted by length and cut into
    batches, and the batches permuted. Batches that touch two epochs stay unsorted. A slice is as long as its longest row.

    Args:
        examples: of the training split.
        bucket: batches of rows of similar length.
        batch_size, seed, accumulate, world: see ``EpochSource``.
    """

    def __init__(
        self, examples: Examples, *, batch_size: int, seed: int, bucket: bool = True, accumulate: int = 1, world: int = 1
    ) -> None:
        super().__init__(len(examples), batch_size=batch_size, seed=seed, accumulate=accumulate, world=world)
        self.examples, self.bucket = examples, bucket

    def order(self, epoch: int, random: np.random.Generator) -> np.ndarray:
        """See ``EpochSource``."""
        order, size = random.permutation(self.epoch_len), self.batch_size
        first = -epoch * self.epoch_len % size  # the first rows fill up the batch that the last epoch began
        stop = first + (self.epoch_len - first) // size * size
        if not self.bucket or stop <= first:
            return order
        for start in range(first, stop, BATCHES_IN_A_WINDOW * size):
            window = order[start : min(start + BATCHES_IN_A_WINDOW * size, stop)]
            window[:] = window[np.argsort(self.examples.lengths[window], kind="stable")]
        order[first:stop] = random.permutation(order[first:stop].reshape(-1, size)).ravel()
        return order

    def batch(self, step: int, rows: range) -> Batch:
        """See ``BatchSource``."""
        whole = self.items(step, range(self.batch_size))
        batch = self.examples.collate(
            whole[rows.start : rows.stop], lambda row: generator(self.seed, "draw", step, rows.start + row)
        )
        return {**batch, "num_targets": torch.tensor(int(self.examples.targets[whole].sum()))}


class ExampleValidation(FiniteSource):
    """Every example of the validation split once, in order; what is drawn depends on the number of the row alone."""

    def __init__(self, examples: Examples, *, batch_size: int, world: int = 1) -> None:
        super().__init__(batch_size, world=world, split="val")
        self.examples, self.num_rows = examples, len(examples)

    def rows(self, rows: range) -> Batch:
        """See ``FiniteSource``."""
        batch = self.examples.collate(np.array(rows), lambda row: generator(VALIDATION_SEED, "draw", rows.start + row))
        return {**batch, "num_targets": self.count(rows)}

    def count(self, rows: range) -> Tensor:
        """See ``FiniteSource``."""
        return torch.tensor(int(self.examples.targets[rows.start : rows.stop].sum()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a data set of examples comes to.

    Attributes:
        kind: which task a model is trained for.
        train, val: the examples, or (``TextDataModule``) the ids of the text.
        model_fields: what the model's config must say (``vocab_size``, ``num_labels``, ``pad_id`` ...).
        tokenizer: of every text in it.
        val_examples: (source text, reference text or label) of the validation rows, in order.
        label_names: of a classification.
        baselines: computes what a model must beat, by name.
        bits_per: factors from nats per token to bits per ``byte`` and ``character`` (language models).
        floors: cross-entropies in nats that a model must beat (language models).
    """

    kind: TaskName
    train: Any
    val: Any
    model_fields: dict[str, Any]
    tokenizer: Tokenizer | None = None
    val_examples: Sequence[tuple[str, str]] = ()
    label_names: tuple[str, ...] = ()
    baselines: Callable[[], dict[str, float]] = dict
    bits_per: dict[str, float] = dataclasses.field(default_factory=dict)
    floors: dict[str, float] = dataclasses.field(default_factory=dict)


def hold_out(groups: Sequence[Any], fraction: float, always_train: Iterable[Any] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Split rows by group, the same whatever the run's seed.

    Args:
        groups: the group of every row; a group lies in one split as a whole.
        fraction: of the groups that validate: at least one of them, and never all.
        always_train: groups that never validate.

    Returns:
        The rows of training, in order, and of validation, shuffled, so that the first ones stand for all.

    Raises:
        ValueError: fewer than two groups, or none that may validate.

    >>> train, val = hold_out(["a", "b", "a", "c"], 0.3)
    >>> sorted([*train.tolist(), *val.tolist()])
    [0, 1, 2, 3]
    """
    kept = set(always_train)
    free = sorted(set(groups) - kept)
    if not free or len(set(groups)) < 2:
        raise ValueError(f"{len(set(groups))} groups cannot be split, {len(free)} of them free to validate")
    random = generator(VALIDATION_SEED, "hold_out")
    count = min(max(1, round(fraction * len(free))), len(free) if kept else len(free) - 1)
    chosen = {free[i] for i in random.permutation(len(free))[:count]}
    validates = np.array([group in chosen for group in groups])
    return np.flatnonzero(~validates), random.permutation(np.flatnonzero(validates))
