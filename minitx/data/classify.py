"""Classification of texts: which language a name is written in, which book a verse is from, or the labels of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minitx.config import BooksDataConfig, ClassifyDataConfig, LanguagesDataConfig
from minitx.data.baselines import bag_of_words_accuracy, majority_accuracy
from minitx.data.bible import book_names, read_verses
from minitx.data.dates import babel_locale
from minitx.data.tables import labels_of, load_splits, texts_of
from minitx.data.task import Task, hold_out, name_of, tokenizer_of
from minitx.data.tokenizers import Tokenizer, require_marks

MARKS = ("pad", "cls")
Texts = Sequence[tuple[str, ...]]
Examples = tuple[Texts, np.ndarray]
"""The one or two texts of each row, and its label."""
Both = tuple[Examples, Examples, tuple[str, ...]]
"""The examples of training and of validation, and the names of the labels."""


def load_classes(config: BooksDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """Return the classification task of ``config``. A row is the class token and the text, cut at ``max_len`` tokens.

    Raises:
        ConfigError: a package, a language, a file or a column is missing, or a split would be empty.
    """
    read: Any = {"books": _books, "languages": _languages, "classify": _table}[config.name]
    train, val, label_names = read(config)
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
    train, val = zip(map(texts, splits), labels, strict=True)
    return train, val, names


Rows = list[tuple[Any, str, int]]
"""(group, text, label). All rows of a group are in the same split."""


def _books(config: BooksDataConfig) -> Both:
    """Verses by chapter; the chapter of a book that has only one is always for training."""
    verses = read_verses("kjv", needed_by="data=books")
    chapters = {verse // 1000 for verse in verses}
    chapters_of = Counter(chapter // 1000 for chapter in chapters)
    single = {chapter for chapter in chapters if chapters_of[chapter // 1000] == 1}
    rows = [(verse // 1000, text, verse // 1_000_000 - 1) for verse, text in verses.items()]
    return _grouped(rows, book_names(needed_by="data=books"), config, single)


def _languages(config: LanguagesDataConfig) -> Both:
    return _grouped(language_names(config.languages), config.languages, config, set())


def _grouped(rows: Rows, names: tuple[str, ...], config: BooksDataConfig, always_train: set[int]) -> Both:
    splits = hold_out([group for group, _, _ in rows], config.val_fraction, always_train)
    train, val = (([(rows[i][1],) for i in part], np.array([rows[i][2] for i in part])) for part in splits)
    return train, val, names


def language_names(languages: Sequence[str]) -> Rows:
    """Return the names of territories, languages, scripts, currencies, months and days in ``languages``, by item.

    A string that two languages share is left out, because it has no unique answer. A string that two items share is kept once,
    so that no string is in both splits.

    Raises:
        ConfigError: Babel is missing or does not know a language.
    """
    found: dict[str, dict[int, str]] = {}  # text: {label: item}
    for label, language in enumerate(languages):
        for item, text in _items(language):
            found.setdefault(text, {}).setdefault(label, item)
    return sorted((item, text, label) for text, items in found.items() if len(items) == 1 for label, item in items.items())


def _items(language: str) -> Iterator[tuple[str, str]]:
    """(item, name in this language) of everything that has a name of at least two letters and is not its own code."""
    wanted = f"data.languages={language} is not a language that Babel knows, such as de or pt"
    locale = babel_locale(language, "languages", wanted)
    tables: dict[str, Any] = {name: getattr(locale, name) for name in ("territories", "languages", "scripts", "currencies")}
    tables |= {"months": locale.months["format"]["wide"], "days": locale.days["format"]["wide"]}
    for table, names in tables.items():
        for code, name in names.items():
            if sum(map(str.isalpha, name)) > 1 and name != str(code):
                yield f"{table}/{code}", name
