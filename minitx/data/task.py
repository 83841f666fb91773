"""A ``Task``: the two splits of a data set, and what a trainer, a model and an evaluation must know about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minitx.config import IGNORED, ConfigError
from minitx.data.addressing import VALIDATION_SEED, Batch, generator
from minitx.data.tokenizers import Tokenizer, find_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from minitx.data.tokens import TokenArray

Draw = Callable[[int], np.random.Generator]
"""The generator of row i of a batch."""


KEY_MASKS = {"input_ids": "key_mask", "decoder_input_ids": "decoder_key_mask"}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set to train on and to validate on. Our own loaders return one; so may a function of yours.

    A split is a map-style data set: a list, a torch ``Dataset`` or a ``datasets.Dataset``. ``split[i]`` is a dict of tensors,
    arrays, numbers or lists of numbers, with ``labels`` among them: −100 where a label does not count. It may have more:

    * ``row(i, generator)`` takes the place of ``[i]`` where rows are drawn at random. ``generator`` is a
      ``numpy.random.Generator`` that depends on (seed, step, row), or in validation on the row alone.
    * ``num_targets(i)``, the labels that count in row i. Without it, the labels of a whole step are read to count them.
    * ``lengths`` (N,), by which ``bucket`` sorts. Without it, every row is read once; the keys of ``key_masks`` count.

    There are faster splits that make whole batches: a ``Split``, or for training a function ``(count, generator) → Batch`` that
    draws the examples of every step anew.

    Attributes:
        name: what messages call the data, such as ``data=kjv`` or ``data.path=my.txt``.
        kind: ``language_model``, ``masked_lm``, ``seq2seq``, ``classify`` or ``other``; it chooses the metrics of an evaluation.
        train, val: the splits.
        pad: with what a 1-D key is filled up to the longest row of a batch; 0 for keys that are not named, −100 for ``labels``.
        key_masks: which padded key gets a bool mask, True where real, and what the mask is called.
        bucket: batches of rows of similar length.
        tokenizer: of the texts.
        model_fields: what the model's config must say (``vocab_size``, ``num_labels``, ``pad_id`` ...).
        val_examples: (source text, reference text or label) of the validation rows in order, where the task has both.
        label_names: of a classification.
        baselines: computes what a model must beat, by name.
        bits_per: factors from nats per token to bits per ``byte`` and ``character``, of a language model.
        floors: cross-entropies in nats that a model must beat (``unigram``, ``bigram``), of a language model.
        recall: every answer stands in its row.

    >>> rows = [{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, {"input_ids": [4, 5], "labels": [5, 6]}]
    >>> task = Task(name="mine", train=rows, val=rows, model_fields={"vocab_size": 11})
    >>> batch = as_split(task, "train").collate(np.array([1, 0]), lambda row: generator(0, row))
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[4, 5, 0], [1, 2, 3]], [[5, 6, -100], [2, 3, -100]])
    >>> batch["key_mask"].tolist()
    [[True, True, False], [True, True, True]]
    """

    name: str
    kind: str = "other"
    train: Any
    val: Any
    pad: Mapping[str, float] = field(default_factory=dict)
    key_masks: Mapping[str, str] = field(default_factory=lambda: KEY_MASKS)
    bucket: bool = False
    tokenizer: Tokenizer | None = None
    model_fields: Mapping[str, Any] = field(default_factory=dict)
    val_examples: Sequence[tuple[str, str]] = ()
    label_names: tuple[str, ...] = ()
    baselines: Callable[[], dict[str, float]] = dict
    bits_per: Mapping[str, float] = field(default_factory=dict)
    floors: Mapping[str, float] = field(default_factory=dict)
    recall: bool = False


class Split(ABC):
    """A split that makes whole batches at once. ``lengths`` (N,) is what each row takes, for ``Task.bucket``."""

    lengths: np.ndarray

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    def order(self, epoch: int, random: np.random.Generator) -> np.ndarray:
        """The items of a training epoch in their order, (N,) int64, drawn from ``random`` alone."""
        return random.permutation(len(self))

    def count(self, items: np.ndarray) -> int | None:
        """The labels that count in these items; ``None`` where the items must be read to know."""
        return None

    @abstractmethod
    def collate(self, items: np.ndarray, draw: Draw) -> Batch:
        """The items (B,) as a batch without ``num_targets``; ``draw(i)`` is the generator of its row i."""


class Rows(Split):
    """A map-style data set as a ``Split``; see ``Task``."""

    def __init__(self, rows: Any, task: Task) -> None:
        self.rows, self.task = rows, task

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def lengths(self) -> np.ndarray:  # type: ignore[override]
        """Those of the data set, or counted."""
        if hasattr(self.rows, "lengths"):
            return np.asarray(self.rows.lengths)
        rows = (self._read(np.array([i]), lambda _: generator(0))[0] for i in range(len(self)))
        return np.array([sum(len(row[key]) for key in self.task.key_masks if key in row) for row in rows])

    def count(self, items: np.ndarray) -> int | None:
        """See ``Split``."""
        known = hasattr(self.rows, "num_targets")
        return sum(int(self.rows.num_targets(int(i))) for i in items) if known else None

    def collate(self, items: np.ndarray, draw: Draw) -> Batch:
        """See ``Split``."""
        rows = self._read(items, draw)
        batch = {key: self._tensor(key, [row.get(key) for row in rows]) for key in rows[0]}
        for key, mask in self.task.key_masks.items():
            if key in batch and batch[key].dim() == 2 and mask not in rows[0]:
                lengths = torch.tensor([len(row[key]) for row in rows])
                batch[mask] = torch.arange(batch[key].shape[1]) < lengths[:, None]
        if "labels" not in batch:
            raise ConfigError(f"{self.task.name}: rows must have labels, got {', '.join(map(str, batch))}")
        return batch

    def _tensor(self, key: str, values: list[Any]) -> Tensor:
        """The values of a key, one for each row: whole numbers as int64, Python's floats as float32."""
        first = values[0]
        try:
            if np.ndim(first) == 1:
                fill = self.task.pad.get(key, IGNORED if key == "labels" else 0)
                array = padded([np.asarray(value) for value in values], fill)
            else:
                array = np.array(values) if np.ndim(first) == 0 else np.stack([np.asarray(value) for value in values])
        except (TypeError, ValueError):
            array = np.array(None)
        if array.dtype.kind not in "biuf":
            raise ConfigError(
                f"{self.task.name}: {key} must be tensors, numbers or lists of numbers, of one shape in every row but for the length "
                f"of lists, got {first!r:.60}"
            )
        if array.dtype.kind in "iu" and array.ndim < 3:
            return torch.from_numpy(array.astype(np.int64, copy=False))
        return torch.from_numpy(
            array.astype(np.float32) if isinstance(first, float | list) and array.dtype.kind == "f" else array
        )

    def _read(self, items: np.ndarray, draw: Draw) -> list[Mapping[str, Any]]:
        if hasattr(self.rows, "row"):
            return [self.rows.row(int(i), draw(place)) for place, i in enumerate(items)]
        at_once = getattr(self.rows, "__getitems__", None)  # torch's name for it, which ``datasets`` has, too
        return at_once(items.tolist()) if at_once else [self.rows[int(i)] for i in items]


def as_split(task: Task, which: str) -> Split:
    """``task.train`` or ``task.val`` as a ``Split``.

    Raises:
        ConfigError: it is no data set with ``len()`` and ``[i]``, or it is empty.
    """
    data = getattr(task, which)
    if not hasattr(data, "__len__") or not len(data):
        raise ConfigError(f"{task.name}: {which} must have rows, len() and [i], got {type(data).__name__}")
    return data if isinstance(data, Split) else Rows(data, task)


def count_targets(labels: Tensor) -> int:
    """Labels that count: whole numbers that are not −100; of other labels, rows."""
    return len(labels) if labels.is_floating_point() else int(np.count_nonzero(labels.numpy() != IGNORED))


def padded(rows: Sequence[np.ndarray], fill: float) -> np.ndarray:
    """1-D rows as long as the longest, (B, L), with ``fill`` behind the end.

    >>> padded([np.array([5, 6, 7]), np.array([8])], fill=0).tolist()
    [[5, 6, 7], [8, 0, 0]]
    """
    lengths, together = np.array([len(row) for row in rows]), np.concatenate(rows)
    values = np.full((len(rows), max(1, lengths.max())), fill, together.dtype)
    values[np.arange(values.shape[1]) < lengths[:, None]] = together
    return values


class Ragged:
    """Rows of ids of different lengths in one array: row i is ``values[starts[i] : starts[i] + lengths[i]]``."""

    def __init__(self, values: np.ndarray | TokenArray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self.values, self.starts, self.lengths = values, starts, lengths

    @classmethod
    def of(cls, rows: Iterable[np.ndarray]) -> Ragged:
        """Copy ``rows`` into one array."""
        rows = list(rows)
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        return cls(np.concatenate([np.zeros(0, np.uint32), *rows]).astype(np.uint32), np.cumsum(lengths) - lengths, lengths)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> np.ndarray:
        values = self.values if isinstance(self.values, np.ndarray) else self.values.array
        return values[self.starts[row] : self.starts[row] + self.lengths[row]].astype(np.int64)


def hold_out(groups: Sequence[Any], fraction: float, always_train: Iterable[Any] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Split rows by group, the same whatever the run's seed.

    Args:
        groups: the group of every row; a group lies in one split as a whole.
        fraction: of the groups that validate: at least one of them, and never all.
        always_train: groups that never validate.

    Returns:
        The rows of training, in order, and of validation, shuffled, so that the first ones represent all.

    Raises:
        ConfigError: fewer than two groups, or none that may validate.

    >>> train, val = hold_out(["a", "b", "a", "c"], 0.3)
    >>> sorted([*train.tolist(), *val.tolist()])
    [0, 1, 2, 3]
    """
    kept = set(always_train)
    free = sorted(set(groups) - kept)
    if not free or len(set(groups)) < 2:
        raise ConfigError(f"data.val_fraction={fraction} leaves a split empty: the data have {len(set(groups))} different rows")
    random = generator(VALIDATION_SEED, "hold_out")
    count = min(max(1, round(fraction * len(free))), len(free) if kept else len(free) - 1)
    chosen = {free[i] for i in random.permutation(len(free))[:count]}
    validates = np.array([group in chosen for group in groups])
    return np.flatnonzero(~validates), random.permutation(np.flatnonzero(validates))


def name_of(config: Any) -> str:
    """What messages call the data of a config."""
    path = getattr(config, "path", None)
    return f"data={config.name}" if path is None else f"data.path={path}"


def tokenizer_of(config: Any, given: Tokenizer | None, texts: Iterable[str], marks: Sequence[str]) -> Tokenizer:
    """The tokenizer ``given``, or that of ``data.tokenizer``, which ``char`` and ``bpe`` learn from ``texts``."""
    given = given or find_tokenizer(config.tokenizer)
    return given or train_tokenizer(config.tokenizer, texts, vocab_size=config.bpe_vocab_size, marks=marks)
