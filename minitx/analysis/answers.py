"""The answers of a model on a batch, and whether they are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

from torch import Tensor

TOP = 5
"""The number of most probable answers that are kept."""


@dataclass(frozen=True)
class Question:
    """The question of a row of the batch.

    Attributes:
        text: the question in words.
        at: the position whose logits answer it, or None if the model gives one answer for the whole row.
        right: the id of the right answer, or None if it is not known.
        key: the position that holds the answer, if there is one.
    """

    text: str
    at: int | None
    right: int | None = None
    key: int | None = None


@dataclass(frozen=True)
class Questions:
    """The questions of a batch.

    Attributes:
        axis: the axis of the positions, as in ``Snapshot.tokens``.
        rows: the questions of each row, B of them.
        size: the number of possible answers, V.
        name: a function from the id of an answer to its text.
    """

    axis: str
    rows: Sequence[Sequence[Question]]
    size: int
    name: Callable[[int], str]


@dataclass(frozen=True)
class Answer:
    """The answer of a model to one question.

    Attributes:
        text, at, key: as in ``Question``. right: the text of the right answer, or None if it is not known.
        is_right: whether the most probable answer is the right one, or None.
        loss: −ln p of the right answer in nats, or None.
        top: the most probable answers and their probabilities, the largest first.
    """

    text: str
    at: int | None
    key: int | None
    right: str | None
    is_right: bool | None
    loss: float | None
    top: tuple[tuple[str, float], ...]


def next_tokens(axis: str, rows: Sequence[Sequence[int]], name: Callable[[int], str], size: int) -> Questions:
    """Return the question of a language model for each position of each row of ids. The right answer is the next id of the row."""

    def ask(ids: Sequence[int]) -> list[Question]:
        pairs = zip(ids, [*ids[1:], None], strict=True)
        return [Question(which_follows(name(token)), i, right) for i, (token, right) in enumerate(pairs)]

    return Questions(axis, list(map(ask, rows)), size, name)


def which_follows(token: str) -> str:
    """Return the question of a language model."""
    return f"Which token follows “{token}”?"


AnswerRows = list[list[Answer]]
"""The answers of each row of a batch."""


@dataclass(frozen=True)
class Answers:
    """The answers of a model on a batch.

    Attributes:
        axis: as in ``Questions``. rows: the answers of each row.
        without: by the name of a layer's core, the answers without head 0, 1, …; empty unless they were computed
            (``answers_without_heads``).
    """

    axis: str
    rows: AnswerRows
    without: Mapping[str, Sequence[AnswerRows]] = field(default_factory=dict)

    def of_row(self, row: int, real: Sequence[bool]) -> Answers:
        """Return the answers of one row (B = 1), with positions counted among its ``real`` tokens."""
        place = {old: new for new, old in enumerate(compress(range(len(real)), real))}

        def cut(rows: AnswerRows) -> AnswerRows:
            return [[replace(a, at=place.get(a.at), key=place.get(a.key)) for a in rows[row]]]  # type: ignore[arg-type]

        return Answers(self.axis, cut(self.rows), {name: [cut(rows) for rows in heads] for name, heads in self.without.items()})


def logits_of(output: Any) -> Any:
    """Return the logits in a model's output: its ``logits`` (an attribute or a key), else the output."""
    return output.get("logits", output) if isinstance(output, Mapping) else getattr(output, "logits", output)


def read_answers(output: Any, asked: Questions) -> AnswerRows | None:
    """Return the answers in a model's output, or None if it has no logits for these questions.

    Args:
        output: logits (B, L, V), or (B, V) for questions about whole rows; or an object or a dict with ``logits``.
    """
    logits = logits_of(output)
    whole = all(question.at is None for row in asked.rows for question in row)
    if not isinstance(logits, Tensor) or logits.dim() != (2 if whole else 3) or logits.shape[-1] != asked.size:
        return None
    log_probs = logits.detach().float().log_softmax(-1).cpu()
    pairs = zip(asked.rows, log_probs, strict=True)
    return [
        [_answer_at(question, row if question.at is None else row[question.at], asked) for question in questions]
        for questions, row in pairs
    ]


def _answer_at(question: Question, logs: Tensor, asked: Questions) -> Answer:
    """Return the answer to a question from ``logs``, ln p of every possible answer (V,)."""
    best = logs.topk(min(TOP, asked.size))
    ids = best.indices.tolist()
    right = question.right
    top = tuple((asked.name(i), p) for i, p in zip(ids, best.values.exp().tolist(), strict=True))
    if right is None:
        return Answer(question.text, question.at, question.key, None, None, None, top)
    loss, is_right = -float(logs[right]), ids[0] == right and not bool(logs.isnan().any())
    return Answer(question.text, question.at, question.key, asked.name(right), is_right, loss, top)
