"""Counts over the rows of a snapshot: right answers, and heads that look at the key that holds the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minitx.analysis.answers import Answer, Answers
from minitx.analysis.attention_map import AttentionMap


@dataclass(frozen=True)
class Tally:
    """Counts of right answers, and of heads that look at the right key, over all rows of a batch.

    Attributes:
        row: the number of the row that is shown. rows: the number of rows.
        asked: the number of questions whose right answer is known. right: the number of right answers to them.
        keyed: the number of questions with a key that holds the answer.
        on_key: by the name of a layer's core, for each head: the number of these questions whose key has the largest weight.
    """

    row: int
    rows: int
    asked: int
    right: int
    keyed: int
    on_key: Mapping[str, Sequence[int]]


def tally_of(maps: Sequence[AttentionMap], answers: Answers | None, row: int) -> Tally | None:
    """Return the counts over all rows of a snapshot that shows ``row``; None if no right answer is known."""
    if answers is None:
        return None
    questions = [(b, answer) for b, row in enumerate(answers.rows) for answer in row if answer.right is not None]
    keyed = [(b, answer) for b, answer in questions if answer.key is not None]
    on_key = {
        layer.name: [sum(hits) for hits in zip(*(heads_on_key(layer, b, answer) for b, answer in keyed), strict=True)]
        for layer in maps
        if keyed and layer.queries == layer.keys == answers.axis
    }
    right = sum(bool(answer.is_right) for _, answer in questions)
    return Tally(row, len(answers.rows), len(questions), right, len(keyed), on_key) if questions else None


def heads_on_key(layer: AttentionMap, row: int, answer: Answer) -> list[bool]:
    """For each head, whether the key that holds the answer has the largest weight of the question's row."""
    return [bool(favourite == answer.key) for favourite in layer.weights[row, :, answer.at].argmax(-1)]
