"""Classification of texts: languages and books, their splits and their baselines."""

import sys

import numpy as np
import pytest

from minitx.config import ClassifyDataConfig, ConfigError
from minitx.data import classify
from minitx.data.classify import LabelledTexts, language_names, load_classes

FEW = ClassifyDataConfig(languages=("de", "nl", "ru"))


def test_the_layout_by_hand():
    examples = LabelledTexts([[7, 8, 9, 5], [6]], np.array([2, 0]), cls_id=1, pad_id=0, max_len=4)
    batch = {key: tensor.tolist() for key, tensor in examples.collate(np.array([1, 0]), None).items()}
    assert batch == {
        "input_ids": [[1, 6, 0, 0], [1, 7, 8, 9]],
        "key_mask": [[True, True, False, False], [True] * 4],
        "labels": [0, 2],
    }


def test_names_of_languages_are_told_apart_by_nothing_but_language():
    rows = language_names(FEW.languages)
    texts = [text for _, text, _ in rows]
    assert len(texts) == len(set(texts)) > 1000
    assert ("territories/DE", "Deutschland", 0) in rows
    assert ("months/5", "мая", 2) in rows
    assert not any(text == "Europa" for text in texts)  # German and Dutch alike
    assert {label for _, _, label in rows} == {0, 1, 2}


def test_items_and_strings_lie_in_one_split():
    task = load_classes(FEW, None, None)
    items = {(text, FEW.languages[label]): item for item, text, label in language_names(FEW.languages)}
    val = {items[pair] for pair in task.val_examples}
    train = set(items.values()) - val
    assert sum(item in val for item in items.values()) == len(task.val)
    assert len(task.train) + len(task.val) == len(items)
    assert len(val) == pytest.approx(len(train | val) / 10, abs=1)


def test_languages_become_a_task():
    task = load_classes(FEW, None, None)
    assert task.label_names == FEW.languages
    assert task.model_fields == {
        "vocab_size": task.tokenizer.vocab_size,
        "num_labels": 3,
        "pad_id": task.tokenizer.mark_ids["pad"],
    }
    batch = task.val.collate(np.arange(7), None)
    for row, (text, name) in enumerate(task.val_examples[:7]):
        assert task.tokenizer.decode(batch["input_ids"][row], skip_marks=True) == text[: FEW.max_len - 1]
        assert task.label_names[batch["labels"][row]] == name
    found = task.baselines()
    assert 1 / 3 < found["majority_accuracy"] < 0.5 < found["bag_of_words_accuracy"] < 1


def test_an_unknown_language_is_named():
    with pytest.raises(ConfigError, match=r"^data.languages=klingon is not a language that Babel knows, such as de or pt$"):
        language_names(["de", "klingon"])


def test_languages_without_babel_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(ConfigError, match=r"^data=languages needs the package Babel: pip install Babel$"):
        language_names(["de", "nl"])


def test_verses_of_a_chapter_lie_in_one_split_and_every_book_is_in_training():
    rows, names, kept = classify._verses()
    assert (len(rows), len(names), names[0], names[65]) == (31102, 66, "Genesis", "Revelation")
    assert [names[chapter // 1000 - 1] for chapter in sorted(kept)] == ["Obadiah", "Philemon", "2 John", "3 John", "Jude"]
    assert rows[0] == (1001, "In the beginning God created the heaven and the earth.", 0)
    train, val = classify.hold_out([group for group, _, _ in rows], 0.1, kept)
    assert {rows[i][2] for i in train} == set(range(66))
    assert not {rows[i][0] for i in train} & {rows[i][0] for i in val}
    assert len({rows[i][0] for i in val}) == 118  # a tenth of 1189 chapters but five


def test_books_become_a_task(monkeypatch):
    rows = [(1000 + n % 10, f"alpha {n}" if n % 10 < 5 else f"beta {n}", n % 10 // 5) for n in range(300)]
    monkeypatch.setattr(classify, "_verses", lambda: (rows, ("A", "B"), set()))
    config = ClassifyDataConfig(name="books", tokenizer="bpe", bpe_vocab_size=300, val_fraction=0.2, max_len=5)
    task = load_classes(config, None, None)
    assert (len(task.train), len(task.val)) == (240, 60)
    assert task.train.lengths.max() <= 5
    assert task.baselines()["bag_of_words_accuracy"] == 1.0


def test_too_few_texts_are_refused(monkeypatch):
    monkeypatch.setattr(classify, "_verses", lambda: ([(1, "a", 0)] * 9, ("A",), set()))
    with pytest.raises(ConfigError, match=r"^data=books has too few texts for a training and a validation split$"):
        load_classes(ClassifyDataConfig(name="books"), None, None)
