"""Documents through ``datasets``: rows, packing, token counts and caches."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minitx.config import ConfigError
from minitx.data import documents, hf
from minitx.data.documents import BLANK, DocumentRows, Ragged
from minitx.data.tokenizer import fingerprint, train_tokenizer
from tests.data.conftest import batch_of, split_of, total_left_out

pytestmark = pytest.mark.usefixtures("offline_datasets")
DOCUMENTS = [f"{n} " + "abc" * (n % 23) for n in range(61)]


def examples(lengths, *, packing=True):
    """Documents with the mark 1 around them; every other token is its own number from 2 on."""
    cuts = np.cumsum([0, *lengths])
    rows = [np.array([1, *range(2 + first, 2 + last), 1]) for first, last in itertools.pairwise(cuts)]
    return DocumentRows(Ragged.of(rows), context_len=11, packing=packing)


@settings(max_examples=40)
@example(lengths=[3, 2], packing=True)
@given(lengths=st.lists(st.integers(1, 47), min_size=1, max_size=40), packing=st.booleans())
def test_every_token_and_every_end_is_asked_for_once_and_documents_of_a_row_are_told_apart(lengths, packing):
    found = examples(lengths, packing=packing)
    batch = batch_of(split_of(found))
    counted = batch["labels"][batch["labels"] != -100]
    assert sorted(counted.tolist()) == sorted([*range(2, 2 + sum(lengths)), *[1] * len(lengths)])
    assert sum(found.num_targets(row) for row in range(len(found))) == len(counted)
    assert torch.equal(batch["key_mask"], batch["labels"] != -100)
    assert batch["input_ids"].shape[1] <= 11
    follows = (batch["labels"] == batch["input_ids"] + 1) | (batch["labels"] == 1) | (batch["input_ids"] == 1)
    assert follows[batch["key_mask"]].all()
    assert ("document_ids" in batch) == packing
    if packing:
        assert len(found) == 1 or sum(lengths) + len(lengths) > 11, "what fits into one row is one"
        owner = np.repeat(np.arange(len(lengths)), lengths)
        for ids, numbers in zip(batch["input_ids"].tolist(), batch["document_ids"].tolist(), strict=True):
            pairs = {(number, owner[i - 2]) for i, number in zip(ids, numbers, strict=True) if i > 1}
            assert len({number for number, _ in pairs}) == len(pairs)  # pieces of one document may differ, documents must


@pytest.fixture
def path(write_text):
    return write_text("\n\n".join(DOCUMENTS), "a.txt")


@pytest.fixture
def load(cache):
    def load(path, **values):
        options = {"tokenizer": "char", "context_len": 31, "packing": False, "cache_dir": str(cache)}
        return hf(path=path, **{**options, **values})

    return load


def texts_of(task, rows):
    ids = [rows.pieces[piece][:-1] for piece in range(len(rows.pieces))]
    return "".join(map(task.tokenizer.decode, ids)).split("<eos>")[1:]


@pytest.mark.parametrize("marks", [None, ("bos",), ("bos", "eos")])
def test_every_document_is_in_one_split(path, load, marks):
    given = train_tokenizer("char", DOCUMENTS, marks=marks) if marks else None
    task = load(path, context_len=101, tokenizer=given or "bpe")
    train, val = ([task.tokenizer.decode(row["input_ids"][1:]) for row in rows] for rows in (task.train, task.val))
    assert sorted(train + val) == sorted(DOCUMENTS)
    assert len(train) > len(val) > 0
    ids = task.tokenizer.mark_ids
    begin, end = ids.get("bos", ids.get("eos")), ids.get("eos", ids.get("bos"))
    assert all((row["input_ids"][0], row["labels"][-1]) == (begin, end) for row in task.train)
    assert task.model_fields == {"vocab_size": task.tokenizer.vocab_size, "eos_id": end}


@pytest.mark.parametrize("names", ["n,text", "only"])
def test_documents_that_look_like_numbers_stay_as_they_are_written(load, write_text, names):
    texts = ["007", "1e5", "2.50"]
    rows = [f"{n},{text}" if "," in names else text for n, text in enumerate(texts)]
    known = train_tokenizer("char", texts, marks=("eos",))
    task = load(write_text("\n".join([names, *rows]), "a.csv"), tokenizer=known)
    assert sorted(texts_of(task, task.train) + texts_of(task, task.val)) == texts


def test_bits_per_byte_count_every_end_and_a_second_run_reads_the_cache(path, load, monkeypatch):
    task = load(path, packing=True)
    val = [text for text in DOCUMENTS if text not in texts_of(task, task.train)]
    characters = sum(map(len, val))
    assert task.bits_per["character"] == task.bits_per["byte"] == (characters + len(val)) / characters / math.log(2)
    monkeypatch.setattr(documents, "write_ids", None)
    second = load(path)
    assert fingerprint(second.tokenizer) == fingerprint(task.tokenizer)
    assert texts_of(second, second.val) == texts_of(task, task.val)


def test_a_changed_file_and_a_given_tokenizer_are_tokenised_anew(path, load, write_text):
    load(path)
    given = train_tokenizer("char", ["abc"], marks=("eos",))
    assert fingerprint(load(path, tokenizer=given).tokenizer) == fingerprint(given)
    write_text("new\ntexts\nhere", "a.txt")
    task = load(path)
    train = texts_of(task, task.train)
    assert len(train) == 2 and set(train) < {"here", "new", "texts"}


def test_tables_that_datasets_keeps_in_memory_have_tokens_of_their_own(load, monkeypatch):
    found = []
    for word in ("one", "two"):
        table = Dataset.from_dict({"text": [f"{word} {i}" for i in range(20)]})
        monkeypatch.setattr(documents, "load_tables", lambda *_, table=table, **__: [table])
        task = load("memory")
        found.append(texts_of(task, task.train)[0].split()[0])
    assert found == ["one", "two"]


NONE = [
    ({"id": 1, "story": "a"}, {}, "text_column"),
    ({"story": 1}, {"text_column": "story"}, "text_column"),
    ({"text": "a"}, {"split": "test"}, "split"),
    ({"text": " "}, {}, "path"),
]


@pytest.mark.parametrize(("row", "values", "key"), NONE)
def test_files_without_documents_are_refused_by_name(load, write_text, row, values, key):
    with pytest.raises(ConfigError, match=rf"^data\.{key}="):
        load(write_text("\n".join([json.dumps(row)] * 3), "a.jsonl"), **values)


def test_documents_without_text_are_counted_by_split_at_each_start(load, write_text):
    rows = [json.dumps({"text": text}) for text in [*DOCUMENTS, None, "", " ", None]]
    path = write_text("\n".join(rows), "null.jsonl")
    for _ in range(2):  # the second from the cache
        assert total_left_out(load(path)) == 4
        assert load(path, val_path=path).left_out == {split: [f"4 of 65 {BLANK}"] for split in ("train", "val")}
    with_blanks = write_text("\n".join([json.dumps({"text": " "}), *rows]), "other.jsonl")
    assert load(with_blanks, streaming=True, val_rows=7).left_out == {"val": [f"1 of 8 {BLANK}"]}
    assert load(path, streaming=True, val_path=with_blanks, val_rows=3).left_out == {"val": [f"1 of 4 {BLANK}"]}
