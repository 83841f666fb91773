"""Splits of a ``Task`` that make whole batches."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from minitx.config import IGNORED, ConfigError
from minitx.config.schema import require
from minitx.data.seeding import CPU, Draw, generator, kept_generators, seed_device
from minitx.data.task import KEY_MASKS, Batch, Task

log = logging.getLogger(__name__)

PAD = {
    "labels": IGNORED,  # these positions do not count
    "document_ids": -1,  # no document has this number
    "token_type_ids": 0,  # every model has type 0 and position 0, and the mask of input_ids hides padding
    "position_ids": 0,
    **dict.fromkeys(("key_mask", "decoder_key_mask", "attention_mask", "decoder_attention_mask"), 0),  # hidden
}
"""Padding values that are right for every model. Other keys need ``Task.pad`` or ``Task.key_masks``."""


class Split(ABC):
    """A split that makes whole batches at once.

    ``lengths`` (N,) are the lengths of the rows, for ``Task.bucket``. ``key_masks`` is as in ``Task``, if the split makes masks.
    """

    lengths: np.ndarray
    key_masks: Mapping[str, str] = {}

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    def order(self, epoch: int, random: np.random.Generator) -> np.ndarray:
        """Return the items of a training epoch in order, (N,) int64. All random numbers come from ``random``."""
        return random.permutation(len(self))

    def count(self, items: np.ndarray) -> int | None:
        """Return the number of labels that count in these items, or ``None`` if the items must be read to know it."""
        return None

    @abstractmethod
    def collate(self, items: np.ndarray, draw: Draw) -> Batch:
        """Return the items (B,) as a batch without ``num_targets``. ``draw(i)`` is the random generator of row i."""


class MapSplit(Split):
    """A map-style data set as a ``Split``. See ``Task``."""

    _has_warned = False

    def __init__(self, rows: Any, task: Task) -> None:
        # the task is not stored, because its baselines are lambdas and cannot be pickled
        self.rows, self.name, self.pad, self.key_masks = rows, task.name, task.pad, task.key_masks
        self.label_numbers = torch.tensor(task.label_numbers)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def lengths(self) -> np.ndarray:  # type: ignore[override]
        """The lengths of the data set, measured if it has none."""
        if hasattr(self.rows, "lengths"):
            return np.asarray(self.rows.lengths)
        rows = (self._read(np.array([i]), lambda _: generator(0))[0] for i in range(len(self)))
        return np.array([sum(len(row[key]) for key in self.key_masks if key in row) for row in rows])

    def count(self, items: np.ndarray) -> int | None:
        """See ``Split``."""
        has_counts = hasattr(self.rows, "num_targets")
        return sum(int(self.rows.num_targets(int(i))) for i in items) if has_counts else None

    def collate(self, items: np.ndarray, draw: Draw) -> Batch:
        """See ``Split``."""
        rows = self._read(items, draw)
        require(
            isinstance(rows[0], Mapping),
            f"{self.name}: rows must be dicts of arrays, such as {{'input_ids': ..., 'labels': ...}}, got a {type(rows[0]).__name__}",
        )
        other = next((row for row in rows if row.keys() != rows[0].keys()), rows[0])
        require(
            other is rows[0],
            f"{self.name}: rows must have the same keys, got {', '.join(map(str, rows[0]))} and {', '.join(map(str, other))}",
        )
        batch = {key: self._tensor(key, [row.get(key) for row in rows]) for key in rows[0]}
        for key, mask in self.key_masks.items():
            if key in batch and batch[key].dim() == 2 and mask not in rows[0]:
                lengths = torch.tensor([len(row[key]) for row in rows])
                batch[mask] = torch.arange(batch[key].shape[1]) < lengths[:, None]
        require("labels" in batch, f"{self.name}: rows must have labels, got {', '.join(map(str, batch))}")
        if len(self.label_numbers):
            labels = batch["labels"]
            batch["labels"] = torch.where(labels < 0, labels, self.label_numbers[labels.clamp(min=0)])
        return batch

    def _tensor(self, key: str, values: list[Any]) -> Tensor:
        """The values of a key, one for each row: whole numbers as int64, Python's floats as float32."""
        first = values[0]
        try:
            rows = [_array(value) for value in values]
            other = next((row.shape for row in rows if row.shape != rows[0].shape and row.ndim == rows[0].ndim > 1), None)
            require(
                other is None,
                f"{self.name}: rows have {key} of shapes {rows[0].shape} and {other}: pad them in the data set, or use a "
                "LightningDataModule, whose loaders have a collate_fn",
            )
            if key == "labels" and not self._has_warned and any(row.dtype.kind == "f" and np.isnan(row).any() for row in rows):
                log.warning("%s: labels that are NaN do not count", self.name)
                self._has_warned = True
            array = self._padded(key, rows) if rows[0].ndim == 1 else np.stack(rows)
        except ConfigError:
            raise
        except (TypeError, ValueError):
            array = np.array(None)
        if array.dtype.kind not in "biuf":
            raise ConfigError(
                f"{self.name}: {key} must be tensors, numbers or lists of numbers whose shapes differ only in the length of lists, "
                f"got {first!r:.60}"
            )
        if array.dtype.kind in "iu" and array.ndim < 3:
            array = array.astype(np.int64, copy=False)
        elif array.dtype.kind == "f" and isinstance(first, int | float | list):
            array = array.astype(np.float32)
        return torch.from_numpy(array)

    def _padded(self, key: str, rows: list[np.ndarray]) -> np.ndarray:
        """The 1-D rows of a key in one array. Whole numbers, and bools whose padding value is not a bool, become int64.

        Raises:
            ConfigError: the padding value is not known, or cannot be stored with the numbers.
        """
        fill = self._fill(key, rows)
        kind = np.result_type(*{row.dtype for row in rows if len(row)} or [np.int64])  # an empty Python list would be float64
        if kind.kind in "iu" or (kind.kind == "b" and fill not in (0, 1)):
            kind = np.dtype(np.int64)
            rows = [row.astype(kind) for row in rows]
        require(
            key != "labels" or kind.kind != "f" or "labels" in self.pad or len({len(row) for row in rows}) == 1,
            f"{self.name}: {fill} can be a label, because labels are {kind}: set Task(pad={{'labels': math.nan}}), because NaN does not count",
        )
        require(_can_store(kind, fill), f"{self.name}: {key} is {kind}, so its padding value in Task.pad cannot be {fill}")
        return padded(rows, fill)

    def _fill(self, key: str, rows: Sequence[np.ndarray]) -> float:
        """The padding value of a key.

        Raises:
            ConfigError: the rows have different lengths, and no value is known.
        """
        fills = {**dict.fromkeys((*self.key_masks, *self.key_masks.values()), 0), **PAD, **self.pad}
        lengths = [len(row) for row in rows]
        if key not in fills and len(set(lengths)) > 1:
            mask = KEY_MASKS.get(key, f"{key}_mask")
            raise ConfigError(
                f"{self.name}: rows have {min(lengths)} to {max(lengths)} values of {key}, but no padding value is known: pass "
                f"Task(key_masks={{{key!r}: {mask!r}}}) if forward has a parameter {mask} (True = real), or Task(pad={{{key!r}: VALUE}}) "
                "if the model recognises padding by this value"
            )
        return fills.get(key, 0)

    def _read(self, items: np.ndarray, draw: Draw) -> list[Mapping[str, Any]]:
        if hasattr(self.rows, "row"):
            return [self.rows.row(int(i), draw(place)) for place, i in enumerate(items)]
        if isinstance(self.rows, list):
            return [self.rows[i] for i in items]
        rows = []
        with kept_generators(CPU):
            for place, i in enumerate(items):  # not ``__getitems__``: a row's draws must not depend on the rows before it
                seed_device(int(draw(place).integers(2**63)), CPU)
                rows.append(self.rows[int(i)])
        return rows


def as_split(task: Task, name: str) -> Split:
    """Return ``task.train``, ``task.val`` or ``task.test`` as a ``Split``.

    Raises:
        ConfigError: it has no ``len()`` or ``[i]``, or it is empty.
    """
    data = getattr(task, name)
    if not hasattr(data, "__len__") or not len(data) or isinstance(data, IterableDataset):
        raise ConfigError(f"{task.name}: {name} must have rows, len() and [i], got {type(data).__name__}")
    return data if isinstance(data, Split) else MapSplit(data, task)


def rows_at(rows: Any, items: np.ndarray) -> list[Any]:
    """Return these rows of a map-style data set, read together if it supports this."""
    at_once = getattr(rows, "__getitems__", None)  # torch's name for reading many rows; ``datasets`` has it
    return at_once(items.tolist()) if at_once else [rows[int(i)] for i in items]


def _array(value: Any) -> np.ndarray:
    """Return a value of a row as an array. NumPy has no bfloat16, so such tensors become float32."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype == torch.bfloat16 else value
    return np.asarray(value)


def _can_store(kind: np.dtype, number: float) -> bool:
    """Return whether an array of a dtype can contain a number, possibly rounded if it is a float."""
    if kind.kind == "i":
        return float(number).is_integer()
    return kind.kind != "f" or not math.isfinite(number) or abs(number) <= float(np.finfo(kind).max)


def padded(rows: Sequence[np.ndarray], fill: float) -> np.ndarray:
    """Pad 1-D rows to the longest with ``fill``: (B, L).

    >>> padded([np.array([5, 6, 7]), np.array([8])], fill=0).tolist()
    [[5, 6, 7], [8, 0, 0]]
    """
    lengths = np.array([len(row) for row in rows])
    full = [row for row in rows if len(row)]  # an empty Python list would become float64
    together = np.concatenate(full or [np.zeros(0, np.int64)])
    values = np.full((len(rows), max(1, lengths.max())), fill, together.dtype)
    values[np.arange(values.shape[1]) < lengths[:, None]] = together
    return values
