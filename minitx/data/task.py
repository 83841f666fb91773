"""A ``Task``: the two splits of a data set, and the facts that the trainer, the model and the evaluation need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from torch import Tensor

from minitx.config import IGNORED
from minitx.config.schema import Bound, check_choice
from minitx.data.tokenizer import Tokenizer

Batch = dict[str, Tensor]
VocabSize = Annotated[int, Bound("be at least 257: the bytes and a mark", lambda size: size > 256)]

TASK_KINDS = ("language_model", "masked_lm", "seq2seq", "classify", "tag", "other")
"""The kinds of tasks. ``tag`` classifies every token, and ``other`` is any further task."""

KEY_MASKS = {"input_ids": "key_mask", "decoder_input_ids": "decoder_key_mask"}


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
            ``minitx.data.splits.PAD`` (``labels``: −100 for whole numbers; ``token_type_ids`` ...). A key of ``key_masks`` without an entry here is
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
        label_numbers: the number in ``label_names`` of each label of the rows; (): the same. A ``Split`` ignores it.
        baselines: a function that computes the results of simple methods, by name.
        bits_per: for a language model, factors from nats per token to bits per ``byte`` and ``character``.
        floors: cross-entropies in nats of simple language models (``unigram``, ``bigram``), for comparison.
        recall: whether each row contains its answers.
        checksum: a checksum of texts and labels, or None: unknown. A run resumes only on data with the same checksum. It must not
            depend on the data's files, their cache, the process or the machine.

    >>> import numpy as np
    >>> from minitx.data.seeding import generator
    >>> from minitx.data.splits import as_split
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
    label_numbers: Sequence[int] = ()
    baselines: Callable[[], dict[str, float]] = dict
    bits_per: Mapping[str, float] = field(default_factory=dict)
    floors: Mapping[str, float] = field(default_factory=dict)
    recall: bool = False
    checksum: str | None = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, TASK_KINDS)


def counting(labels: Tensor) -> Tensor:
    """Return which elements of ``labels`` count, bool in their shape: all but -100, or of floating-point labels all but NaN."""
    return ~labels.isnan() if labels.is_floating_point() else labels != IGNORED


def num_targets(labels: Tensor) -> Tensor:
    """Return the number of elements of ``labels`` that count, 0-d int64. Losses are divided by it.

    >>> import torch
    >>> int(num_targets(torch.tensor([[1, -100], [2, 3]]))), int(num_targets(torch.tensor([-100.0, torch.nan])))
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
