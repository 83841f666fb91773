"""What a batch asks a model, in words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minitx.analysis.answers import next_tokens
from minitx.analysis.questions import questions_of
from minitx.data.recall import induction, kv_lookup, multi_query_recall
from minitx.data.seeding import generator
from minitx.data.splits import as_split
from minitx.data.task import Task
from minitx.data.token_labels import position_texts, token_namer
from minitx.data.tokenizer import train_tokenizer

LETTERS = train_tokenizer("char", ["abcde"])
FOLLOWS = ("Which token follows “a”?", 0), ("Which token follows “b”?", 1)


def batch_of(task, count=3):
    return as_split(task, "val").collate(np.arange(count), lambda row: generator(0, row))


def task_of(kind, **fields):
    rows, fields = [{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}], {"model_fields": {"vocab_size": 6}, **fields}
    return Task(name="mine", kind=kind, train=rows, val=rows, tokenizer=LETTERS, **fields)


def test_a_lookup_asks_for_the_value_of_its_last_key_and_the_axis_has_the_answer():
    task = kv_lookup(num_keys=9, num_values=7, num_pairs=4, val_size=20)
    batch = batch_of(task, 20)
    asked, texts = questions_of(task, batch), position_texts(task, batch)["input_ids"]
    for (question,), row in zip(asked.rows, texts, strict=True):
        assert question.text == f"Which value has key {row[-1]}?"
        assert question.at == 4
        assert row[question.key] == f"{row[-1]}:{asked.name(question.right)}"
    assert (asked.size, asked.name(8), asked.name(9)) == (16, "key 8", "1")


@pytest.mark.parametrize("task", [multi_query_recall(num_pairs=3, num_queries=2), induction(segment_len=3, max_gap=2)])
def test_other_tasks_of_recall_ask_what_came_after_a_token(task):
    batch = batch_of(task)
    for row, ids in zip(questions_of(task, batch).rows, batch["input_ids"].tolist(), strict=True):
        assert len(row) == 2
        for question in row:
            assert question.text == f"What came after {ids[question.at]} before?"
            assert ids[question.key] == question.right


def test_tasks_of_text_ask_for_the_token_that_follows_or_is_hidden():
    task = task_of("language_model")
    asked = questions_of(task, batch_of(task, 1))
    assert [(one.text, one.at, asked.name(one.right)) for one in asked.rows[0]] == [(*FOLLOWS[0], "b"), (*FOLLOWS[1], "c")]
    asked = questions_of(task_of("masked_lm"), batch_of(task, 1))
    assert [one.text for one in asked.rows[0]] == [f"Which token is hidden at position {i}?" for i in (0, 1)]
    target = {"input_ids": torch.zeros(1, 9, dtype=torch.long), "decoder_input_ids": torch.tensor([[4, 5]])}
    asked = questions_of(task_of("seq2seq"), {**target, "labels": torch.tensor([[5, -100]])})
    assert (asked.axis, [one.text for one in asked.rows[0]]) == ("decoder_input_ids", ["Which token follows “d”?"])


def test_a_classification_asks_once_for_the_whole_row():
    task = task_of("classify", model_fields={"num_labels": 3}, label_names=("cat", "dog"))
    asked = questions_of(task, {"pixel_values": torch.zeros(2, 1, 8, 8), "labels": torch.tensor([1, 2])})
    assert [(row[0].at, asked.name(row[0].right)) for row in asked.rows] == [(None, "dog"), (None, "2")]
    assert (asked.axis, asked.size) == ("pixel_values", 3)


def test_nothing_is_asked_where_nothing_is_known():
    batch = batch_of(task_of("language_model"), 1)
    assert questions_of(task_of("other"), batch) is None
    assert questions_of(task_of("language_model", model_fields={}), batch) is None
    assert questions_of(task_of("classify", model_fields={"num_labels": 3}), batch) is None


def test_a_text_asks_at_each_token_and_has_no_answer_for_its_last():
    (row,) = next_tokens("input_ids", [[1, 2]], token_namer(LETTERS), 6).rows
    assert [(one.text, one.at, one.right) for one in row] == [(*FOLLOWS[0], 2), (*FOLLOWS[1], None)]
    assert token_namer(None)(3) == "3"
