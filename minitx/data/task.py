"""A ``Task``: the two splits of a data set, and the facts that the trainer, the model and the evaluation need."""

from __future__ import annotations

import hashlib
import logging
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from minitx.config import IGNORED, ConfigError
from minitx.config.schema import Bound, Fraction, check_choice, read, require
from minitx.data.tokenizers import Tokenizer, train_tokenizer

log = logging.getLogger(__name__)
Batch = dict[str, Tensor]
CPU = torch.device("cpu")
VocabSize = Annotated[int, Bound("be at least 257: the bytes and a mark", lambda size: size > 256)]

VALIDATION_SEED = 20240229
"""The seed of all random draws of validation, so that all runs are validated on the same rows."""

Draw = Callable[[int], np.random.Generator]
"""A function from i to the random generator of row i of a batch."""

TASK_KINDS = ("language_model", "masked_lm", "seq2seq", "classify", "tag", "other")
"""The kinds of tasks. ``tag`` classifies every token, and ``other`` is any further task."""

KEY_MASKS = {"input_ids": "key_mask", "decoder_input_ids": "decoder_key_mask"}

PAD = {
    "labels": IGNORED,  # these positions do not count
    "document_ids": -1,  # no document has this number
    "token_type_ids": 0,  # every model has type 0 and position 0, and the mask of input_ids hides padding
    "position_ids": 0,
    **dict.fromkeys(("key_mask", "decoder_key_mask", "attention_mask", "decoder_attention_mask"), 0),  # hidden
}
"""Padding values that are right for every model. Other keys need ``Task.pad`` or ``Task.key_masks``."""


def package(name: str, option: str, distribution: str = "", extra: str = "train") -> Any:
    """Import a module that an extra installs. If it is missing, raise a ConfigError that names the package."""
    try:
        return import_module(name)
    except ImportError:
        hint = f"install minitx with the extra {extra}"
        raise ConfigError(f"{option} needs the package {distribution or name}: {hint}") from None


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set for training and validation. The functions of this package return a ``Task``, and your own function can, too.

    A split is a map-style data set: a list, a torch ``Dataset`` or a ``datasets.Dataset``. ``split[i]`` is a dict of tensors,
    arrays, numbers or lists of numbers. It must contain ``labels``, with −100 at positions that do not count (NaN if labels are
    floating-point numbers); bools in a list of labels become 0 and 1. A split may also have:

    * ``row(i, generator)``, used instead of ``[i]``, with a ``numpy.random.Generator`` for random draws. Draws from it, and draws of
      ``[i]`` from the generators of Python, NumPy and torch, depend on (seed, step, row), or in validation only on the row.
    * ``num_targets(i)``, the number of labels that count in row i. Without it, all labels of a step are read to count them.
    * ``lengths`` (N,): ``bucket`` sorts by it. Without it, every row is read once to measure the keys of ``key_masks``.

    Three kinds of splits make whole batches and are faster: a ``Split``, and for training a function ``(count, generator) →
    Batch`` that draws new examples in every step, or a stream: an object whose ``source(seed=, num_workers=, batch_size=,
    accumulate=, world=)`` returns a ``minitx.data.batches.Source``.

    Attributes:
        name: the name of the data in messages, such as ``data=kjv`` or ``data.path=my.txt``.
        kind: ``language_model``, ``masked_lm``, ``seq2seq``, ``classify``, ``tag`` (a label for every token) or ``other``. It
            determines the metrics of an evaluation, and the models that fit.
        train, val: the splits. test: a third split, for ``evaluation.test``, or None.
        pad: padding values by key, for rows of different lengths. A key needs an entry here, in ``key_masks`` or in the table
            ``PAD`` (``labels``: −100 for whole numbers; ``token_type_ids`` ...). A key of ``key_masks`` without an entry here is
            padded with 0.
        key_masks: the keys that get a bool mask (True = real), and the names of the masks in the batch.
        bucket: put rows of similar length into the same batch.
        longest: the number of tokens of the longest row. A model with learned positions needs at least this many. ``None``: unknown.
        tokenizer: the tokenizer of the texts.
        first_id: the token that begins every text in training, and therefore a prompt. None: no token.
        encode_prompt: a function from a user's text to the ids before the answer, or None: ``first_id`` and ``tokenizer.encode``. A
            chat puts the text into its template.
        model_fields: fields of the model's config that the data decide (``vocab_size``, ``num_labels``, ``pad_id`` ...).
        left_out: for each split, sentences about rows that were left out or cut, with their number and the reason. A run shows them
            before the first step, an evaluation after its metrics.
        val_examples: (source text, reference text or label) of the validation rows, in order, if the task has both.
        test_examples: the same for the rows of ``test``. Without examples, an evaluation has no generated answers.
        label_names: the names of the labels of a classification.
        baselines: a function that computes the results of simple methods, by name.
        bits_per: for a language model, factors from nats per token to bits per ``byte`` and ``character``.
        floors: cross-entropies in nats of simple language models (``unigram``, ``bigram``), for comparison.
        recall: whether each row contains its answers.

    >>> rows = [{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, {"input_ids": [4, 5], "labels": [5, 6]}]
    >>> task = Task(name="mine", train=rows, val=rows, model_fields={"vocab_size": 11})
    >>> batch = as_split(task, "train").collate(np.array([1, 0]), lambda row: generator(0, row))
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[4, 5, 0], [1, 2, 3]], [[5, 6, -100], [2, 3, -100]])
    >>> batch["key_mask"].tolist()
    [[True, True, False], [True, True, True]]

    Raises:
        ConfigError: ``kind`` is unknown. When a batch is made: its rows have different keys or shapes, or different lengths of a key
            without a padding value, or the dtype of a key cannot store its padding value.
    """

    name: str
    kind: str = "other"
    train: Any
    val: Any
    test: Any = None
    pad: Mapping[str, float] = field(default_factory=dict)
    key_masks: Mapping[str, str] = field(default_factory=lambda: KEY_MASKS)
    bucket: bool = False
    longest: int | None = None
    tokenizer: Tokenizer | None = None
    first_id: int | None = None
    encode_prompt: Callable[[str], list[int]] | None = None
    model_fields: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    val_examples: Sequence[tuple[str, str]] = ()
    test_examples: Sequence[tuple[str, str]] = ()
    label_names: tuple[str, ...] = ()
    baselines: Callable[[], dict[str, float]] = dict
    bits_per: Mapping[str, float] = field(default_factory=dict)
    floors: Mapping[str, float] = field(default_factory=dict)
    recall: bool = False

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, TASK_KINDS)


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
        known = hasattr(self.rows, "num_targets")
        return sum(int(self.rows.num_targets(int(i))) for i in items) if known else None

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
        except (TypeError, ValueError, RuntimeError):
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
        known = {**dict.fromkeys((*self.key_masks, *self.key_masks.values()), 0), **PAD, **self.pad}
        lengths = [len(row) for row in rows]
        if key not in known and len(set(lengths)) > 1:
            mask = KEY_MASKS.get(key, f"{key}_mask")
            raise ConfigError(
                f"{self.name}: rows have {min(lengths)} to {max(lengths)} values of {key}, but no padding value is known: pass "
                f"Task(key_masks={{{key!r}: {mask!r}}}) if forward has a parameter {mask} (True = real), or Task(pad={{{key!r}: VALUE}}) "
                "if the model recognises padding by this value"
            )
        return known.get(key, 0)

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


def counting(labels: Tensor) -> Tensor:
    """Return which elements of ``labels`` count, bool in their shape: all but -100, or of floating-point labels all but NaN."""
    return ~labels.isnan() if labels.is_floating_point() else labels != IGNORED


def num_targets(labels: Tensor) -> Tensor:
    """Return the number of elements of ``labels`` that count, 0-d int64. Losses are divided by it.

    >>> int(num_targets(torch.tensor([[1, -100], [2, 3]]))), int(num_targets(torch.tensor([-100.0, math.nan])))
    (3, 1)
    """
    return counting(labels).sum()


def without_targets(batch: Batch) -> Batch:
    """Return the keys of a batch that are inputs of a network."""
    return {name: tensor for name, tensor in batch.items() if name not in ("labels", "num_targets")}


def select_rows(batch: Batch, rows: slice | list[int]) -> Batch:
    """Return some rows of every tensor that has as many rows as ``labels``, with their ``num_targets`` if the batch has it."""
    size = len(batch["labels"])
    chosen = {name: x[rows] if isinstance(x, Tensor) and x.dim() and len(x) == size else x for name, x in batch.items()}
    return chosen | ({"num_targets": num_targets(chosen["labels"])} if "num_targets" in chosen else {})


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


class Ragged:
    """Rows of ids of different lengths in one array: row i is ``values[starts[i] : starts[i] + lengths[i]]``."""

    def __init__(self, values: Any, starts: np.ndarray, lengths: np.ndarray) -> None:
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


def seed_device(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of Python, NumPy and torch: a user's data and model may draw from any of them.

    Args:
        device: seed this device and the CPU. None: all devices, by ``torch.manual_seed``. Before CUDA is initialised, each call of that
            function queues another seeding with a formatted stack trace.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if device is None:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
        module: Any = getattr(torch, device.type, None)
        if hasattr(module, "manual_seed"):  # torch.cuda, but not torch.cpu
            module.manual_seed(seed)


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch at the end, on the CPU and on all devices of this type."""
    module: Any = getattr(torch, device.type, None)
    count = module.device_count() if hasattr(module, "get_rng_state") else 0
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(count), device_type=device.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def num_held_out(count: int, fraction: float) -> int:
    """Return the number of ``count`` groups to hold out for validation: the fraction, but at least one, and never all."""
    return min(max(1, round(fraction * count)), count - 1)


def hold_out(groups: Sequence[Any], fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split rows by group. The result does not depend on the run's seed.

    Args:
        groups: the group of every row. All rows of a group are in the same split.
        fraction: the fraction of groups for validation; see ``num_held_out``.

    Returns:
        The rows of training, in order, and of validation. Validation rows are shuffled, so that the first rows represent all.

    Raises:
        ConfigError: there are fewer than two groups, or ``fraction`` is not in (0, 1).

    >>> train, val = hold_out(["a", "b", "a", "c"], 0.3)
    >>> sorted([*train.tolist(), *val.tolist()])
    [0, 1, 2, 3]
    """
    fraction = read(Fraction, fraction, "data.val_fraction")
    distinct = sorted(set(groups))
    require(len(distinct) > 1, f"data.val_fraction={fraction} leaves a split of {len(distinct)} different rows empty")
    random = generator(VALIDATION_SEED, "hold_out")
    chosen = {distinct[i] for i in random.permutation(len(distinct))[: num_held_out(len(distinct), fraction)]}
    validates = np.array([group in chosen for group in groups])
    return np.flatnonzero(~validates), random.permutation(np.flatnonzero(validates))


def find_tokenizer(name: str | Tokenizer) -> Tokenizer | None:
    """Return the tokenizer that ``data.tokenizer`` names, or None for ``char`` and ``bpe``, which are trained on the data.

    Args:
        name: ``char``, ``bpe``, a ``tokenizer.json``, a folder that contains one, or a name on the Hugging Face hub. A file from the hub
            stays in the hub's cache (``HF_HOME``) and is read from there without a network. A ``Tokenizer`` is returned unchanged.

    Raises:
        ConfigError: nothing has this name, or its file cannot be read.
    """
    if isinstance(name, Tokenizer):
        return name
    if name in ("char", "bpe"):
        return None
    from minitx.data.tokenizer_folder import open_tokenizer  # the characters and bytes of a text need no folder

    return open_tokenizer(name)


def find_or_train_tokenizer(
    tokenizer: str | Tokenizer, bpe_vocab_size: int, texts: Iterable[str], marks: Sequence[str]
) -> Tokenizer:
    """Return a tokenizer.

    Args:
        tokenizer: ``char`` (one id per character) or ``bpe`` (byte-level), learned from the training split (``bpe`` from at most
            67 million characters of a text file, spread over it); a ``tokenizer.json``, a folder with one, or a name on the
            Hugging Face hub.
        bpe_vocab_size: largest vocabulary of ``tokenizer=bpe``.
        texts: the texts that ``char`` and ``bpe`` are learned from.
        marks: the marks of a tokenizer that is learned.
    """
    known = find_tokenizer(tokenizer)
    return known or train_tokenizer(str(tokenizer), texts, vocab_size=bpe_vocab_size, marks=marks)


def key_value_texts(input_ids: Sequence[int], token_type_ids: Sequence[int]) -> list[str]:
    """Return a readable text for each position: ``key:value``, with values from 1 as in ``token_type_ids``, or only the key.

    >>> key_value_texts([12, 3, 12], [5, 1, 0])
    ['12:5', '3:1', '12']
    """
    return [f"{key}:{value}" if value else str(key) for key, value in zip(input_ids, token_type_ids, strict=True)]


def position_texts(task: Task, inputs: Batch) -> dict[str, list[list[str]]]:
    """Return a text for each position of a batch: its token, or ``KEY:VALUE`` in a recall task. {} in other tasks."""
    ids = {axis: inputs[axis] for axis in ("input_ids", "decoder_input_ids") if axis in inputs}
    if task.tokenizer is not None:
        from minitx.data.token_labels import token_texts  # for looking only

        return {axis: [token_texts(task.tokenizer, row) for row in rows.tolist()] for axis, rows in ids.items()}
    if not task.recall:
        return {}
    types = inputs.get("token_type_ids", torch.zeros_like(ids["input_ids"]))
    rows = zip(ids["input_ids"].tolist(), types.tolist(), strict=True)
    return {"input_ids": [key_value_texts(*row) for row in rows]}
