"""The questions that the labels of a batch pose, in words. The viewer shows the model's answers above the maps."""

from __future__ import annotations

from torch import Tensor

from minitx.analysis.answers import Question, Questions, which_follows
from minitx.analysis.snapshot import PIXELS, SOURCE, TARGET
from minitx.config import IGNORED
from minitx.data.recall import answer_positions
from minitx.data.task import Batch, Task
from minitx.data.token_labels import token_namer

WHICH_CLASS = "Which class?"


def questions_of(task: Task, batch: Batch) -> Questions | None:
    """Return a question for each counted label of a batch, or None if ``task.kind`` does not define the meaning of labels."""
    axis = next((axis for axis in (TARGET, SOURCE, PIXELS) if axis in batch), None)
    labels, size = batch.get("labels"), task.model_fields.get("num_labels" if task.kind == "classify" else "vocab_size")
    if axis is None or size is None or labels is None:
        return None
    if task.kind == "classify" and labels.dim() == 1:
        name = dict(enumerate(task.label_names)).get
        rows = [[Question(WHICH_CLASS, None, label)] for label in labels.tolist()]
        return Questions(axis, rows, size, lambda i: name(i) or str(i))
    if task.kind not in ("language_model", "masked_lm", "seq2seq") or labels.shape != batch[axis].shape:
        return None
    if task.recall:
        return _recall(task, batch, size)
    name_of = token_namer(task.tokenizer)
    if task.kind == "masked_lm":
        rows = [[Question(f"Which token is hidden at position {i}?", i, y) for i, y in _labelled(row)] for row in labels]
    else:
        pairs = zip(labels, batch[axis].tolist(), strict=True)
        rows = [[Question(which_follows(name_of(ids[i])), i, label) for i, label in _labelled(row)] for row, ids in pairs]
    return Questions(axis, rows, size, name_of)


def _labelled(labels: Tensor) -> list[tuple[int, int]]:
    """Return (position, label) of the counted labels in a row."""
    return [(i, label) for i, label in enumerate(labels.tolist()) if label != IGNORED]


def _recall(task: Task, batch: Batch, size: int) -> Questions:
    """Return the questions of a recall task. If a batch has ``token_type_ids``, values are counted from 1, as on the axes."""
    ids = batch[SOURCE].tolist()
    places = answer_positions(batch).tolist()
    rows = []
    for keys, where, labels in zip(ids, places, batch["labels"], strict=True):
        words = "Which value has key {}?" if "token_type_ids" in batch else "What came after {} before?"
        rows.append([Question(words.format(keys[i]), i, label, where[i]) for i, label in _labelled(labels)])
    if "token_type_ids" not in batch:
        return Questions(SOURCE, rows, size, str)
    first = size - task.model_fields["type_vocab_size"] + 1  # ids of values follow ids of keys
    return Questions(SOURCE, rows, size, lambda i: str(i - first + 1) if i >= first else f"key {i}")
