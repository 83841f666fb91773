"""Classification of texts: which language a name is written in, which book a verse is from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minitx.config import ClassifyDataConfig, ConfigError
from minitx.data.addressing import Batch
from minitx.data.baselines import bag_of_words_accuracy, majority_accuracy
from minitx.data.bible import book_names, read_verses
from minitx.data.dates import babel_locale
from minitx.data.examples import Draw, Examples, Ragged, Task, hold_out
from minitx.data.tokenizers import Tokenizer, require_marks, train_tokenizer

MARKS = ("pad", "cls")


class LabelledTexts(Examples):
    """Texts with a label each: ``input_ids`` begins with ``cls_id``; ``labels`` (B,).

    Args:
        texts: ids of the texts, cut at ``max_len`` tokens with the first one.
        labels: (N,).
    """

    def __init__(self, texts: Sequence[np.ndarray], labels: np.ndarray, *, cls_id: int, pad_id: int, max_len: int) -> None:
        self.texts = Ragged.of([np.concatenate([[cls_id], text[: max_len - 1]]) for text in texts])
        self.labels, self.pad_id = labels.astype(np.int64), pad_id
        self.lengths, self.targets = self.texts.lengths, np.ones(len(labels), np.int64)

    def collate(self, index: np.ndarray, draw: Draw) -> Batch:
        """See ``Examples``; nothing is drawn."""
        input_ids, key_mask = self.texts.padded(index, self.pad_id)
        return {"input_ids": input_ids, "key_mask": key_mask, "labels": torch.from_numpy(self.labels[index])}


def load_classes(config: ClassifyDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """The classification that ``config`` names.

    Raises:
        ConfigError: a package or a language is missing, or a split would be empty.
    """
    if config.name == "books":
        rows, names, kept = _verses()
    else:
        rows, names, kept = language_names(config.languages), config.languages, set()
    texts, labels = [text for _, text, _ in rows], np.array([label for _, _, label in rows])
    try:
        train, val = hold_out([group for group, _, _ in rows], config.val_fraction, kept)
    except ValueError:
        raise ConfigError(f"data={config.name} has too few texts for a training and a validation split") from None
    train_texts, val_texts = [texts[i] for i in train], [texts[i] for i in val]
    if tokenizer is None:
        tokenizer = train_tokenizer(config.tokenizer, train_texts, vocab_size=config.bpe_vocab_size, marks=MARKS)
    pad_id, cls_id = require_marks(tokenizer, *MARKS)
    options = {"cls_id": cls_id, "pad_id": pad_id, "max_len": config.max_len}
    return Task(
        kind="classify",
        train=LabelledTexts(tokenizer.encode_batch(train_texts), labels[train], **options),
        val=LabelledTexts(tokenizer.encode_batch(val_texts), labels[val], **options),
        tokenizer=tokenizer,
        model_fields={"vocab_size": tokenizer.vocab_size, "num_labels": len(names), "pad_id": pad_id},
        val_examples=[(text, names[label]) for text, label in zip(val_texts, labels[val], strict=True)],
        label_names=names,
        baselines=lambda: {
            "majority_accuracy": majority_accuracy(labels[train], labels[val]),
            "bag_of_words_accuracy": bag_of_words_accuracy(train_texts, labels[train], val_texts, labels[val]),
        },
    )


Rows = list[tuple[Any, str, int]]
"""(group, text, label): a group never lies in both splits."""


def _verses() -> tuple[Rows, tuple[str, ...], set[int]]:
    """Verses by chapter; the chapter of a book that has only one is always for training."""
    verses = read_verses("kjv", needed_by="data=books")
    chapters = sorted({verse // 1000 for verse in verses})
    books = [chapter // 1000 for chapter in chapters]
    single = {chapter for chapter, book in zip(chapters, books, strict=True) if books.count(book) == 1}
    rows = [(verse // 1000, text, verse // 1_000_000 - 1) for verse, text in verses.items()]
    return rows, book_names(needed_by="data=books"), single


def language_names(languages: Sequence[str]) -> Rows:
    """Names of territories, languages, scripts, currencies, months and days in ``languages``, by item.

    A string that two languages share says nothing and is left out; one that two items share is kept once, so that no
    string is in both splits.

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
