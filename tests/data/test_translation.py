"""Pairs of texts: their layout, the dates, and files of the user's."""

import datetime
import itertools

import pytest

from minitx.config import ConfigError
from minitx.data import dates, pairs
from minitx.data.splits import as_split
from minitx.data.translation import LOCALES, date_patterns, write_date
from tests.data.conftest import batch_of, total_left_out


def test_the_layout_by_hand(write_text, offline_datasets):
    path, val = write_text("aab\tc\na\tcd\n", "a.tsv"), write_text("b\td\n", "val.tsv")
    task = pairs(path=path, val_path=val, tokenizer="char")
    a, b, c, d, (pad, bos, eos) = 1, 2, 3, 4, (task.tokenizer.mark_ids[name] for name in ("pad", "bos", "eos"))
    split = as_split(task, "train")
    assert {key: tensor.tolist() for key, tensor in batch_of(split).items()} == {
        "input_ids": [[a, a, b], [a, pad, pad]],
        "key_mask": [[True, True, True], [True, False, False]],
        "decoder_input_ids": [[bos, c, pad], [bos, c, d]],
        "decoder_key_mask": [[True, True, False], [True, True, True]],
        "labels": [[c, eos, -100], [c, d, eos]],
    }
    assert split.lengths.tolist() == [5, 4]


@pytest.mark.parametrize("tag", LOCALES)
def test_no_way_to_write_a_date_means_two_days(tag):
    from babel import Locale

    locale, means = Locale.parse(tag), {}
    days = [datetime.date(2003, 1, 1) + datetime.timedelta(days=n) for n in range(366)]
    for pattern, day in itertools.product(date_patterns(locale), days):
        text = write_date(day, tag, locale, pattern)
        assert means.setdefault(text, day) == day
        assert "2003" in text or "2004" in text  # two digits would mean any century
    assert len(means) >= 4 * 366  # four ways at least


def test_dates_become_a_task_whose_validation_asks_for_days_that_training_never_sees():
    task = dates(train_size=2003, val_size=101)
    train, val = both_of(task)
    assert (len(train), len(val), len({day for _, day in val})) == (2003, 101, 101)
    assert not {day for _, day in val} & {day for _, day in train}
    assert {source.split(":")[0] for source, _ in train} == set(LOCALES)
    sizes = {"vocab_size": task.tokenizer.vocab_size, "max_target_len": len("1999-03-07") + 1}
    sizes["max_source_len"] = max(len(source) for source, _ in train + val)
    assert task.model_fields == {**sizes, **{f"{name}_id": id for name, id in task.tokenizer.mark_ids.items()}}


def test_an_unknown_locale_is_named():
    with pytest.raises(ConfigError, match=r"^data\.locales=xx"):
        dates(locales=("en", "xx"))


SOURCES, TARGETS = [f"one {n}" for n in range(31)], [f"eins {n}" for n in range(31)]
CONTENTS = {
    "a.tsv": "\n".join(f"{s}\t{t}\tmore" for s, t in zip(SOURCES, TARGETS, strict=True)),
    "a.csv": "\ufeff" + "\n".join(f'"{s}",{t}' for s, t in zip(SOURCES, TARGETS, strict=True)),
    "head.csv": "id,de,en\n" + "\n".join(f"{n},{t},{s}" for n, (s, t) in enumerate(zip(SOURCES, TARGETS, strict=True))),
    "a.en": "\n".join([*SOURCES, "blank there"]),
    "a.de": "\n".join([*TARGETS, " "]),
    "short.de": "eins\n",
    "comma.txt": "one,eins\n",
}


@pytest.fixture
def file(write_text, offline_datasets):
    return {name: write_text(content, name) for name, content in CONTENTS.items()}


def load(**values):
    return pairs(**{"tokenizer": "char", **values})


def both_of(task):
    """The pairs of both splits as texts."""

    def read(row, key):
        return task.tokenizer.decode(row[key], skip_marks=True)

    return [[(read(row, "input_ids"), read(row, "labels")) for row in rows] for rows in (task.train, task.val)]


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "head.csv", "a.en"])
def test_files_of_pairs_are_read(file, name):
    extra = {"head.csv": {"source_column": "en", "target_column": "de"}, "a.en": {"target_path": file["a.de"]}}
    train, val = both_of(load(path=file[name], **extra.get(name, {})))
    assert sorted(train + val) == sorted(zip(SOURCES, TARGETS, strict=True))
    assert len(val) == 3


def test_a_file_of_its_own_validates_in_its_order_and_a_source_lies_in_one_split(file, write_text):
    values = {"path": file["a.en"], "target_path": file["a.de"], "val_path": file["a.en"], "val_target_path": file["a.de"]}
    task = load(**values)
    assert (len(task.train), len(task.val)) == (31, 31)
    assert task.val_examples == list(zip(SOURCES, TARGETS, strict=True))
    path = write_text("\n".join(f"{n // 3}\t{n}" for n in range(99)), "several.tsv")
    train, val = both_of(load(path=path, val_fraction=0.5))
    assert not {source for source, _ in train} & {source for source, _ in val}


def test_a_test_split_has_all_pairs_of_its_file_or_files_in_their_order(file, write_text):
    wanted = list(zip(SOURCES, TARGETS, strict=True))
    others = {"a.tsv": {"test_path": file["a.csv"]}, "a.en": {"test_path": file["a.en"], "test_target_path": file["a.de"]}}
    for name, test in others.items():
        first = {"path": file[name]} | ({"target_path": file["a.de"]} if name == "a.en" else {})
        task, without = load(**first, **test), load(**first)
        assert (task.test_examples, len(task.test)) == (wanted, len(wanted))
        assert (without.test, without.test_examples) == (None, [])
        assert task.val_examples == without.val_examples
    test = write_text("\n".join(f"{'1234'[: n % 5]}\t{'xyyxxyy'[: n % 7]}" for n in range(1, 35)), "test.tsv")
    many = write_text("\n".join(f"{n}\tx" for n in range(10, 40)), "a_few.tsv")
    task = load(path=many, test_path=test, max_source_len=3, max_target_len=5)
    both = [(n % 5, n % 7) for n in range(1, 35) if n % 5 and n % 7]
    assert [tuple(map(len, pair)) for pair in task.test_examples] == both and len(task.test) == len(both)
    assert max(len(row["input_ids"]) for row in task.test) == task.model_fields["max_source_len"] == 3
    assert [said.partition(" pairs are ")[2][:8] for said in task.left_out["test"]] == ["left out", "cut: the"]


def test_long_pairs_do_not_train_and_all_of_them_validate_and_what_is_left_out_or_cut_is_counted(write_text, offline_datasets):
    path = write_text("\n".join(f"{n}\t{'x' * (n % 7)}" for n in range(100)), "a.tsv")
    val = write_text("\n".join(f"{'1234'[: n % 5]}\t{'xyyxxyy'[: n % 7]}" for n in range(1, 35)), "val.tsv")
    blank = sum(n % 7 == 0 for n in range(100))
    task = load(path=path, val_path=val, max_source_len=3, max_target_len=5)
    kept, long = (sum(n % 7 in sizes for n in range(100)) for sizes in ((1, 2, 3, 4), (5, 6)))  # the end is the fifth
    assert (len(task.train), task.model_fields["max_source_len"], task.model_fields["max_target_len"]) == (kept, 3, 5)
    limits = "longer than data.max_source_len=3 and data.max_target_len=5 allow"
    assert task.left_out["train"] == [
        f"{blank} of 100 pairs are left out: a side is blank",
        f"{long} of {100 - blank} pairs are left out: {limits}",
    ]
    sides = [(n % 5, n % 7) for n in range(1, 35) if n % 5 and n % 7]
    cut = sum(source > 3 or target > 4 for source, target in sides)
    assert task.left_out["val"] == [
        f"{34 - len(sides)} of 34 pairs are left out: a side is blank",
        f"{cut} of {len(sides)} pairs are cut: they are {limits}",
    ]
    for row, pair, (source, target) in zip(task.val, task.val_examples, sides, strict=True):
        assert pair == ("1234"[:source], "xyyxxyy"[:target]), "an answer is compared with the whole reference"
        assert len(row["input_ids"]) == min(source, 3)
        assert len(row["labels"]) == len(row["decoder_input_ids"]) == min(target + 1, 5)
        ends = row["labels"][-1] == task.tokenizer.mark_ids["eos"]
        assert ends == (target < 5) and (row["labels"][:-1] == row["decoder_input_ids"][1:]).all()
    assert total_left_out(load(path=path, max_target_len=5), "a side is blank") == blank


def test_two_files_of_lines_are_read_as_the_table_of_their_lines(file, write_text):
    lines = zip(CONTENTS["a.en"].split("\n"), CONTENTS["a.de"].split("\n"), strict=True)
    table = load(path=write_text("\n".join(map("\t".join, lines)), "table.tsv"))
    two = load(path=file["a.en"], target_path=file["a.de"])
    assert both_of(two) == both_of(table) and two.left_out == table.left_out and total_left_out(two, "a side is blank") == 1
    slices = {"split": "train[:20]", "val_split": "train[20:25]"}
    assert len(load(path=file["a.en"], target_path=file["a.de"], **slices).val) == 5


REFUSED = {
    "data.target_path=.*short.de has 1 .*32": {"path": "a.en", "target_path": "short.de"},
    "data.path=.*comma.txt .*data.target_path": {"path": "comma.txt"},
    "data.source_column=fr .*id, de, en": {"path": "head.csv", "source_column": "fr", "target_column": "de"},
    "data.max_source_len=3": {"path": "a.tsv", "max_source_len": 3},
}


@pytest.mark.parametrize("said", REFUSED)
def test_files_that_have_no_pairs_are_refused_by_name(file, said):
    given = {key: file.get(value, value) for key, value in REFUSED[said].items()}
    with pytest.raises(ConfigError, match=f"^{said}"):
        load(**given)


def test_texts_that_look_like_numbers_or_nothing_stay_texts(write_text, offline_datasets):
    path = write_text('007\t-1\nNA\tnull\n1e3\t"x\n', "a.tsv")
    train, val = both_of(load(path=path, tokenizer="bpe", bpe_vocab_size=300))  # which knows every character
    assert sorted(train + val) == [("007", "-1"), ("1e3", '"x'), ("NA", "null")]
