"""Classification of the texts of a table: rows, splits and baselines."""

from dataclasses import replace

import numpy as np
import pytest

from minitx.config import ConfigError
from minitx.data import classify
from minitx.data.baselines import bag_of_words_accuracy
from minitx.data.classification import numbered_as
from minitx.data.splits import as_split
from tests.data.conftest import total_left_out


@pytest.fixture
def reviews(write_text, offline_datasets):
    """A csv file: the label is the first letter of the second text; texts that look like numbers are among them."""
    rows = [f'"{n}, ""{n % 7}""",{"abc"[n % 3]}{n},{"abc"[n % 3]}' for n in range(61)]
    return write_text("\n".join(["one,two,label", *rows]), "a.csv")


def test_a_table_becomes_a_task(reviews):
    task = classify(path=reviews, text_column="two", tokenizer="char", val_fraction=0.2)
    assert (task.name, task.label_names) == (f"data.path={reviews}", ("a", "b", "c"))
    assert (len(task.train), len(task.val)) == (49, 12)
    fields = {"vocab_size": task.tokenizer.vocab_size, "num_labels": 3, "pad_id": task.tokenizer.mark_ids["pad"]}
    assert task.model_fields == fields
    found = task.baselines()
    assert 0 < found["majority_accuracy"] < 0.7 and found["bag_of_words_accuracy"] <= 1
    for row, (text, name) in zip(task.val, task.val_examples, strict=True):
        assert task.tokenizer.decode(row["input_ids"]) == f"<cls>{text}"
        assert task.label_names[row["labels"]] == name == text[0]


def test_two_texts_share_a_row_and_a_file_of_its_own_validates(reviews, write_text):
    task = classify(path=reviews, text_column="one", second_column="two", tokenizer="char", max_len=11)
    for row, (text, _) in zip(task.val, task.val_examples, strict=True):
        first, _, second = text.rpartition(" ")
        assert task.tokenizer.decode(row["input_ids"]) == f"<cls>{first}<cls>{second}"[: 11 + 8]
        assert len(row["input_ids"]) <= 11
    val = write_text("two,label\nx1,x\na2,a\n", "val.csv")
    task = classify(path=reviews, val_path=val, text_column="two", tokenizer="char")
    assert (task.label_names, len(task.train)) == (("a", "b", "c", "x"), 61)
    assert [row["labels"] for row in task.val] == [3, 0]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["01", "1", "2"], ("01", "1", "2")),
        (["10", "9", "01"], ("1", "9", "10")),
        (["true", "True", "false"], ("False", "True")),
    ],
)
def test_two_labels_of_a_csv_file_that_are_one_number_are_two_classes(write_text, offline_datasets, labels, names):
    path = write_text("\n".join(["text,label", *(f"word {n},{labels[n % 3]}" for n in range(40))]), "a.csv")
    assert classify(path=path, tokenizer="char").label_names == names
    path = write_text("text,label\none,0.5\ntwo,0.50\n", "a.csv")
    with pytest.raises(ConfigError, match=r"must have words or whole numbers, got float \(0\.5\)"):
        classify(path=path, tokenizer="char")


def test_labels_of_a_csv_file_are_those_of_the_whole_file_and_not_of_a_split(write_text, offline_datasets):
    rows = ["text,label", *(f"word {n},{n % 2}" for n in range(40)), *(9 * ["the same,maybe"])]  # a group: in one split
    task = classify(path=write_text("\n".join(rows), "a.csv"), tokenizer="char")
    assert task.label_names == ("0", "1", "maybe")
    labels = ["01", "02"], ["1", "2"]
    train, val = (
        write_text("\n".join(["text,label", *(f"{n},{each[n % 2]}" for n in range(9))]), f"{each[0]}.csv") for each in labels
    )
    assert classify(path=train, val_path=val, tokenizer="char").label_names == ("1", "2")


def test_the_same_text_is_never_in_both_splits(write_text, offline_datasets):
    path = write_text("\n".join(["text,label", *(f"{n % 23},{n % 2}" for n in range(101))]), "a.csv")
    task = classify(path=path, tokenizer="char", val_fraction=0.4)
    val = {text for text, _ in task.val_examples}
    assert len(task.train) + len(task.val) == 101
    assert len(val) == 9 and not val & {task.tokenizer.decode(row["input_ids"], skip_marks=True) for row in task.train}


def test_rows_without_text_are_left_out_and_long_ones_cut_and_both_are_counted_by_split(write_text, offline_datasets):
    rows = [f"{'' if n % 7 == 0 else f'word {n}'},{'ab'[n % 2]}" for n in range(43)]
    options = {"path": write_text("\n".join(["text,label", *rows]), "a.csv"), "tokenizer": "char", "val_fraction": 0.3}
    task = classify(**options)
    assert len(task.train) + len(task.val) == 43 - 7
    assert total_left_out(task) == 7
    cut = classify(**options, max_len=len("word 1") + 1)  # the class token, and one digit
    assert total_left_out(cut, "are cut at data.max_len=7") == sum(n % 7 != 0 for n in range(10, 43))
    assert all(len(row["input_ids"]) > 1 for row in [*task.train, *task.val])
    write_text("text,label\n" + ",a\n" * 5 + "b,b\n", "a.csv")
    with pytest.raises(ConfigError, match=r"^data\.text_column=text has no text in a split"):
        classify(**options)


def test_naive_bayes_agrees_with_scikit_learn():
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.naive_bayes import MultinomialNB

    random = np.random.default_rng(0)
    labels = random.integers(5, size=307)
    texts = [" ".join(f"W{w}" for w in random.poisson(3 + 2 * label, size=random.integers(1, 6))) for label in labels]
    cut = 211
    vectors = CountVectorizer(token_pattern=r"\w+").fit(texts[:cut])
    judge = MultinomialNB(alpha=1.0).fit(vectors.transform(texts[:cut]), labels[:cut])
    wanted = judge.score(vectors.transform(texts[cut:]), labels[cut:])
    assert bag_of_words_accuracy(texts[:cut], labels[:cut], texts[cut:], labels[cut:]) == pytest.approx(wanted)
    assert 0.25 < wanted < 0.9


@pytest.mark.parametrize(
    ("ours", "head", "wanted"),
    [
        ("negative positive", "POSITIVE neutral NEGATIVE", [2, 0]),
        ("0 2", "red green blue", [0, 2]),  # the numbers of a head's labels
        ("0 2", "LABEL_0 LABEL_1 LABEL_2", [0, 2]),
        ("a b", "LABEL_0 LABEL_1", [0, 1]),  # these state no order
        ("1 3", "1 2 3", [0, 2]),
        ("a b c", "b a", None),
        ("0 1 2", "b a", None),
        ("0 1", "1 2", None),
        ("1 2 3 4", "one-star two-stars three-stars four-stars five-stars", None),  # counted from 1
        ("0 1 2 3 4", "one-star two-stars three-stars four-stars five-stars", [0, 1, 2, 3, 4]),
        ("Yes no", "Yes yes no", [0, 2]),
        ("YES no", "Yes yes no", None),
        ("Yes yes", "no yes", None),  # two labels of the data would be one
        ("a b c", "LABEL_0 LABEL_1", None),
    ],
)
def test_labels_are_numbered_as_in_a_trained_head(write_text, offline_datasets, ours, head, wanted):
    names, head = ours.split(), head.split()
    lines = "\n".join(f"word {n},{names[n % len(names)]}" for n in range(40))
    plain = classify(path=write_text(f"text,label\n{lines}\n", "a.csv"), tokenizer="char", val_fraction=0.2)
    if wanted is None:
        with pytest.raises(
            ConfigError, match=rf"has {len(names)} labels .*, but the trained head has {len(head)} .*new_head=true"
        ):
            numbered_as(plain, head)
        return
    if wanted != [*range(len(wanted))]:
        with pytest.raises(ConfigError, match="a Split makes batches of its own, so number its labels as the"):
            numbered_as(replace(plain, val=as_split(plain, "val")), head)
    task = numbered_as(plain, head)
    for split in ("train", "val"):
        both = [as_split(each, split) for each in (plain, task)]
        before, after = (each.collate(np.arange(len(each)), None)["labels"].tolist() for each in both)
        assert after == [wanted[label] for label in before]
    assert [name for _, name in task.val_examples] == [task.label_names[label] for label in after]
    assert task.model_fields["num_labels"] == len(head)
