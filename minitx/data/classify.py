"""Classification of the texts of a table."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minitx.config import ClassifyDataConfig, ConfigError
from minitx.data.baselines import bag_of_words_accuracy, majority_accuracy
from minitx.data.tables import labels_of, load_splits, texts_of
from minitx.data.task import Task, hold_out, name_of, tokenizer_of
from minitx.data.tokenizers import Tokenizer, require_marks

log = logging.getLogger(__name__)
MARKS = ("pad", "cls")
Texts = Sequence[tuple[str, ...]]
Examples = tuple[Texts, np.ndarray]
"""The one or two texts of each row, and its label."""
Both = tuple[Examples, Examples, tuple[str, ...]]
"""The examples of training and of validation, and the names of the labels."""


def load_classes(config: ClassifyDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """Return the classification task of ``config``. A row is the class token and the text, cut at ``max_len`` tokens.

    Raises:
        ConfigError: a file or a column is missing, or a split would be empty.
    """
    train, val, label_names = _table(config)
    tokenizer = tokenizer_of(config, tokenizer, (text for row in train[0] for text in row), MARKS)
    pad_id, _ = require_marks(tokenizer, *MARKS)
    words = [[" ".join(row) for row in rows] for rows, _ in (train, val)]
    return Task(
        name=name_of(config),
        kind="classify",
        train=_rows(train, tokenizer, config.max_len),
        val=_rows(val, tokenizer, config.max_len),
        pad={"input_ids": pad_id},
        bucket=config.bucket,
        tokenizer=tokenizer,
        model_fields={"vocab_size": tokenizer.vocab_size, "num_labels": len(label_names), "pad_id": pad_id},
        val_examples=[(text, label_names[label]) for text, label in zip(words[1], val[1], strict=True)],
        label_names=label_names,
        baselines=lambda: {
            "majority_accuracy": majority_accuracy(train[1], val[1]),
            "bag_of_words_accuracy": bag_of_words_accuracy(words[0], train[1], words[1], val[1]),
        },
    )


def _rows(examples: Examples, tokenizer: Tokenizer, max_len: int) -> list[dict[str, Any]]:
    """The rows of a split; an end mark, or the class token again, stands between two texts."""
    (texts, labels), cls = examples, tokenizer.mark_ids["cls"]
    rows: list[list[Any]] = [[[cls]] for _ in texts]
    for side in zip(*texts, strict=True):
        for row, ids in zip(rows, tokenizer.encode_batch(side), strict=True):
            row += [ids] if len(row) == 1 else [[tokenizer.mark_ids.get("eos", cls)], ids]
    both = zip(rows, labels.tolist(), strict=True)
    return [{"input_ids": np.concatenate(row)[:max_len].astype(np.int64), "labels": label} for row, label in both]


def _table(config: ClassifyDataConfig) -> Both:
    keys = ["text_column", "second_column"] if config.second_column else ["text_column"]
    columns = [getattr(config, key) for key in keys]

    def texts(table: Any) -> Texts:
        return list(zip(*(texts_of(table, column, key) for column, key in zip(columns, keys, strict=True)), strict=True))

    splits = load_splits(config, lambda table: hold_out(texts(table), config.val_fraction), texts=columns)
    labels, names = labels_of(splits, config.label_column)
    train, val = (_with_text(texts(table), own, config) for table, own in zip(splits, labels, strict=True))
    return train, val, names


def _with_text(texts: Texts, labels: np.ndarray, config: ClassifyDataConfig) -> Examples:
    """The rows of a split that have a text."""
    kept = np.array([any(row) for row in texts])
    if not kept.any():
        raise ConfigError(f"data.text_column={config.text_column} has no text in a split of data.path={config.path}")
    if not kept.all():
        log.info("left out %d of %d rows of data.path=%s: without text", (~kept).sum(), len(kept), config.path)
    return [row for row, keep in zip(texts, kept, strict=True) if keep], labels[kept]
