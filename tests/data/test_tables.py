"""Where tables come from: files, several files, folders, the hub; and what is said where there is none."""

import gzip
import json
import os
import re

import numpy as np
import pytest
from datasets import ClassLabel, Dataset

from minitx.config import ConfigError
from minitx.data import classify, hf, pairs
from minitx.data.tables import labels_of, load_table

pytestmark = pytest.mark.usefixtures("offline_datasets")
TEXTS = [f"{n} ünder" for n in range(17)]


def contents():
    rows = [{"id": n, "text": text} for n, text in enumerate(TEXTS)]
    return {
        "a.jsonl": "\n".join(map(json.dumps, rows)),
        "a.txt": "\ufeff" + "\r\n".join(TEXTS),
        "a.csv": "\ufeffid,text\n" + "\n".join(f"{n},{text}" for n, text in enumerate(TEXTS)),
        "a.tsv": "id\ttext\n" + "\n".join(f"{n}\t{text}" for n, text in enumerate(TEXTS)),
    }


@pytest.mark.parametrize("name", contents())
def test_every_kind_of_file_is_read(write_text, name):
    path = write_text(contents()[name], name)
    for streaming in (False, True):
        assert [row["text"] for row in load_table(path, streaming=streaming)] == TEXTS
    assert list(load_table(path, split="train[3:5]")["text"]) == TEXTS[3:5]


def test_several_files_are_one_table_in_the_order_of_their_names(tmp_path, write_text):
    for part in (2, 0, 1):
        write_text("\n".join(TEXTS[part * 5 : part * 5 + 5]), f"part-{part}.txt")
    path = str(tmp_path / "**/part-?.txt")
    assert list(load_table(path)["text"]) == TEXTS[:15]
    assert load_table(path, streaming=True).num_shards == 3


@pytest.mark.parametrize(("name", "header"), [("a.csv", True), ("a.tsv", True), ("a.tsv", False), ("a.txt", True)])
def test_a_folder_is_read_as_its_files_are(write_text, tmp_path, name, header):
    content = {"a.csv": "text,id\nNA,1\n007,2\n", "a.tsv": 'text\tid\n"one\t1\ntwo\t2\n', "a.txt": "\ufeffone\ntwo"}[name]
    (tmp_path / "data").mkdir()
    path, options = write_text(content, f"data/{name}"), {"texts": ["text"], "header": header}
    assert load_table(str(tmp_path / "data"), **options)[:] == load_table(path, **options)[:] != {}


def test_files_of_a_folder_that_are_not_read_are_named(write_text, tmp_path, caplog):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        write_text(name, f"data/{name}")
    assert list(load_table(str(folder))["text"]) == ["a.txt", "b.txt"] and not caplog.messages
    write_text("{}", "data/other.jsonl")
    load_table(str(folder))
    assert caplog.messages == [f"data.path={folder}: 2 files are read, and 1 are not: other.jsonl"]


@pytest.mark.parametrize("name", ["reviews [1].txt", "[all]/a.txt", "really?.txt", "*.txt"])
def test_a_file_with_the_signs_of_a_pattern_in_its_name_is_read(write_text, tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write_text("other", "other.txt")
    path = write_text("\n".join(TEXTS), name)
    for streaming in (False, True):
        assert [row["text"] for row in load_table(path, streaming=streaming)] == TEXTS


@pytest.mark.parametrize("name", ["folder[1]", "folder?"])
def test_a_folder_with_the_signs_of_a_pattern_in_its_path_is_not_taken_for_another(write_text, tmp_path, monkeypatch, name):
    for folder, lines in ((name, TEXTS), ("folder1", ["other"])):
        (tmp_path / folder).mkdir()
        write_text("\n".join(lines), f"{folder}/a.txt")
    with pytest.raises(ConfigError, match=rf"^data\.path={re.escape(str(tmp_path / name))}: a folder with \* \? or \["):
        load_table(str(tmp_path / name))
    monkeypatch.chdir(tmp_path / name)
    assert list(load_table("a.txt")["text"]) == TEXTS


@pytest.mark.parametrize("name", ["absent.txt", "absent/*.txt", "a.pdf", "empty.txt", "bad.jsonl", "a.txt", ""])
def test_what_is_missing_or_cannot_be_read_is_refused(write_text, tmp_path, name):
    content = {"a.pdf": "x", "empty.txt": "", "bad.jsonl": "{nope", "a.txt": b"\xff\xfea\0"}.get(name)
    if content is not None:
        write_text(content, name)
    path = str(tmp_path / name) if name else "someone/was-not-fetched"
    with pytest.raises(ConfigError, match=rf"^data\.path={re.escape(path)}"):
        load_table(path)
    with pytest.raises(ConfigError, match=r"^data\.val_path=no\.txt"):
        load_table("no.txt", "val_path", split_key="val_split")


def test_only_a_wrong_split_is_blamed_on_the_split(write_text, tmp_path):
    (tmp_path / "a split").mkdir()
    path = write_text("a\nb\n", "a split/of.txt")
    for split, streaming in (("tset", False), ("tset", True), ("a b", False)):
        with pytest.raises(ConfigError, match=f"^data.split={split} cannot be read"):
            load_table(path, split=split, streaming=streaming)
    for folder, subset in (("someone/split_data", None), (tmp_path / "a split", "the_split")):
        with pytest.raises(ConfigError, match=f"^data.path={re.escape(str(folder))} cannot be read: .*split"):
            load_table(str(folder), subset=subset)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_rows_with_more_fields_than_names_are_refused_not_moved_by_a_column(write_text, name, streaming):
    rows = "text,label\nfine, yes,good\nno, never,bad\n"
    path = write_text(rows.replace(",", "\t") if name == "a.tsv" else rows, name)
    with pytest.raises(ConfigError, match=rf"^data\.path={re.escape(path)} has rows with more fields than .*text, label"):
        load_table(path, streaming=streaming)


def test_other_first_lines_and_packed_files_are_not_taken_for_such_rows(write_text, tmp_path):
    rows = "text,label\nfine,good\n"
    for content in ("text,__index_level_0__,label\nfine,1,good\n", gzip.compress(rows.encode())):
        assert load_table(write_text(content, "a.csv"))["label"][:] == ["good"]
    (tmp_path / "data").mkdir()
    write_text("---\nconfigs:\n- config_name: default\n  data_files: b.csv\n  skiprows: 1\n---\n", "data/README.md")
    write_text(f"a line before\n{rows}", "data/b.csv")
    assert load_table(str(tmp_path / "data"))["label"][:] == ["good"]


def labels(*parts):
    return labels_of([part if isinstance(part, Dataset) else Dataset.from_dict({"label": part}) for part in parts], "label")


def named(*numbers):
    return Dataset.from_dict({"label": numbers}).cast_column("label", ClassLabel(names=["c", "a", "b"]))


NAMED = named(2, 0)


def test_labels_are_numbered_by_name():
    (train, val), names = labels(NAMED, ["a", "c"])
    assert (train.tolist(), val.tolist(), names) == ([2, 0], [1, 0], ("c", "a", "b"))
    (train, val), names = labels([10, 9], [11])
    assert (train.tolist(), val.tolist(), names) == ([1, 0], [2], ("9", "10", "11"))
    assert train.dtype == np.int64
    (found,), names = labels(["pos", "neg", "pos ", " neg"])  # white space makes no class
    assert (found.tolist(), names) == ([1, 0, 1, 0], ("neg", "pos"))


NO_LABELS = [
    ((NAMED, ["a", "d"]), "must have the same labels in both splits, got d in one split only"),
    ((NAMED, [0, 1]), "must .* in one split only"),
    ((["a"], [1]), "must .* words and numbers"),
    (([4.5, 3.0],), r"must have words or whole numbers, got float \(4\.5\)"),
    (([["a"], ["a", "b"]],), r"must have words or whole numbers, got list \(\['a'\]\)"),
    (([4.5, float("nan")],), "has 1 of 2 rows without a label"),
    ((named(2, -1, 0),), "has 1 of 3 rows without a label"),
    *(((["a", empty, "b", empty, "a"],), "has 2 of 5 rows without a label") for empty in ("", " ", None)),
]


@pytest.mark.parametrize(("parts", "said"), NO_LABELS)
def test_what_is_no_label_is_refused(parts, said):
    with pytest.raises(ConfigError, match=rf"^data\.label_column=label {said}"):
        labels(*parts)


TABLE = "text,label,answer\n" + "\n".join(f"word {n} of many,{'ab'[n % 2]},{n}" for n in range(40))
DATA_SETS = {
    "hf": lambda **options: hf(**options, text_column="text", tokenizer="char", context_len=7),
    "classify": lambda path, **_: classify(path=path, tokenizer="char", max_len=7),
    "pairs": lambda path, **_: pairs(path=path, source_column="text", target_column="answer", tokenizer="char"),
}


@pytest.mark.parametrize("name", DATA_SETS)
def test_the_checksum_of_a_data_set_changes_with_its_rows_alone(write_text, cache, tmp_path, name):
    def checksum(path, cache_dir=cache):
        return DATA_SETS[name](path=path, cache_dir=str(cache_dir)).checksum

    (tmp_path / "elsewhere").mkdir()
    first, moved = write_text(TABLE, "table.csv"), write_text(TABLE, "elsewhere/moved.csv")
    whole = checksum(first)
    os.utime(first, (1, 1))
    assert checksum(first) == checksum(moved, tmp_path / "rebuilt") == whole is not None
    for value, other in (("word 3 of", "word 4 of"), (",b,5", ",a,5"), (",b,5", ",b,6")):
        is_read = name == "pairs" if other.endswith("6") else name == "classify" if value.startswith(",") else True
        assert (checksum(write_text(TABLE.replace(value, other, 1), "other.csv")) != whole) == is_read
