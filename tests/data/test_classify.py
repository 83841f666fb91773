"""Classification of texts: languages, books and tables, their splits and their baselines."""

import pytest

from minitx.config import BooksDataConfig, ClassifyDataConfig, ConfigError, LanguagesDataConfig
from minitx.data import classify
from minitx.data.classify import language_names, load_classes
from minitx.data.task import hold_out

FEW = LanguagesDataConfig(languages=("de", "nl", "ru"))


def test_names_of_languages_are_told_apart_by_nothing_but_language():
    rows = language_names(FEW.languages)
    texts = [text for _, text, _ in rows]
    assert len(texts) == len(set(texts)) > 1000
    assert ("territories/DE", "Deutschland", 0) in rows
    assert ("months/5", "мая", 2) in rows
    assert not any(text == "Europa" for text in texts)  # German and Dutch alike
    assert {label for _, _, label in rows} == {0, 1, 2}
    with pytest.raises(ConfigError, match=r"^data\.languages=klingon"):
        language_names(["de", "klingon"])


def test_languages_become_a_task_with_each_item_and_string_in_one_split():
    task = load_classes(FEW, None, None)
    items = {(text, FEW.languages[label]): item for item, text, label in language_names(FEW.languages)}
    val = {items[pair] for pair in task.val_examples}
    assert sum(item in val for item in items.values()) == len(task.val)
    assert len(task.train) + len(task.val) == len(items)
    assert len(val) == pytest.approx(len(set(items.values())) / 10, abs=1)
    fields = {"vocab_size": task.tokenizer.vocab_size, "num_labels": 3, "pad_id": task.tokenizer.mark_ids["pad"]}
    assert (task.model_fields, task.label_names) == (fields, FEW.languages)
    for row, (text, name) in zip(task.val, task.val_examples, strict=True):
        assert task.tokenizer.decode(row["input_ids"], skip_marks=True) == text[: FEW.max_len - 1]
        assert task.label_names[row["labels"]] == name
    found = task.baselines()
    assert 1 / 3 < found["majority_accuracy"] < 0.5 < found["bag_of_words_accuracy"] < 1


def test_every_book_is_in_training_and_verses_of_a_chapter_lie_in_one_split(monkeypatch):
    seen = []
    monkeypatch.setattr(classify, "hold_out", lambda *arguments: seen.append(arguments) or hold_out(*arguments))
    train, val, names = classify._books(BooksDataConfig())
    ((chapters, *_),) = seen
    assert (len(chapters), len(set(chapters)), len(names), names[0], names[65]) == (31102, 1189, 66, "Genesis", "Revelation")
    assert set(train[1]) == set(range(66))
    assert len(train[1]) + len(val[1]) == 31102


@pytest.fixture
def reviews(write_text, offline_datasets):
    """A csv file: the label is the first letter of the second text; texts that look like numbers are among them."""
    rows = [f'"{n}, ""{n % 7}""",{"abc"[n % 3]}{n},{"abc"[n % 3]}' for n in range(61)]
    return write_text("\n".join(["one,two,label", *rows]), "a.csv")


def test_a_table_becomes_a_task(reviews):
    task = load_classes(ClassifyDataConfig(path=reviews, text_column="two", tokenizer="char", val_fraction=0.2), None, None)
    assert (task.name, task.label_names) == (f"data.path={reviews}", ("a", "b", "c"))
    assert (len(task.train), len(task.val)) == (49, 12)
    for row, (text, name) in zip(task.val, task.val_examples, strict=True):
        assert task.tokenizer.decode(row["input_ids"]) == f"<cls>{text}"
        assert task.label_names[row["labels"]] == name == text[0]


def test_two_texts_share_a_row_and_a_file_of_its_own_validates(reviews, write_text):
    config = ClassifyDataConfig(path=reviews, text_column="one", second_column="two", tokenizer="char", max_len=11)
    task = load_classes(config, None, None)
    for row, (text, _) in zip(task.val, task.val_examples, strict=True):
        first, _, second = text.rpartition(" ")
        assert task.tokenizer.decode(row["input_ids"]) == f"<cls>{first}<cls>{second}"[: 11 + 8]
        assert len(row["input_ids"]) <= 11
    val = write_text("two,label\nx1,x\na2,a\n", "val.csv")
    task = load_classes(ClassifyDataConfig(path=reviews, val_path=val, text_column="two", tokenizer="char"), None, None)
    assert (task.label_names, len(task.train)) == (("a", "b", "c", "x"), 61)
    assert [row["labels"] for row in task.val] == [3, 0]


def test_the_same_text_is_never_in_both_splits(write_text, offline_datasets):
    path = write_text("\n".join(["text,label", *(f"{n % 23},{n % 2}" for n in range(101))]), "a.csv")
    task = load_classes(ClassifyDataConfig(path=path, tokenizer="char", val_fraction=0.4), None, None)
    val = {text for text, _ in task.val_examples}
    assert len(task.train) + len(task.val) == 101
    assert len(val) == 9 and not val & {task.tokenizer.decode(row["input_ids"], skip_marks=True) for row in task.train}


@pytest.mark.parametrize("column", ["text_column", "label_column"])
def test_a_column_that_is_not_there_is_named(reviews, column):
    with pytest.raises(ConfigError, match=rf"^data\.{column}=.*one, two, label$"):
        load_classes(ClassifyDataConfig(**{"path": reviews, "text_column": "one", column: "three"}), None, None)
