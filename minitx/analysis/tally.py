"""Counts over the rows of a snapshot: right answers, and heads that look at the key that holds the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minitx.analysis.answers import Answer

if TYPE_CHECKING:
    from minitx.analysis.snapshot import AttentionMap, Snapshot


@dataclass(frozen=True)
class Tally:
    """Counts of right answers, and of heads that look at the right key, over all rows of a batch.

    Attributes:
        row: the number of the row that is shown. rows: the number of rows.
        asked: the number of questions whose right answer is known. right: the number of right answers to them.
        keyed: the number of questions with a key that holds the answer.
        on_key: by the name of a layer's core, for each head: the number of these questions in which the key has the largest weight.
    """

    row: int
    rows: int
    asked: int
    right: int
    keyed: int
    on_key: Mapping[str, Sequence[int]]


def tally_of(snapshot: Snapshot, row: int) -> Tally | None:
    """Return the counts over all rows of a snapshot that shows ``row``; None if no right answer is known."""
    answers = snapshot.answers
    if answers is None:
        return None
    questions = [(b, answer) for b, row in enumerate(answers.rows) for answer in row if answer.right is not None]
    keyed = [(b, answer) for b, answer in questions if answer.key is not None]
    on_key = {
        layer.name: [sum(hits) for hits in zip(*(_heads_on_key(layer, b, answer) for b, answer in keyed), strict=True)]
        for layer in snapshot.maps
        if keyed and layer.queries == layer.keys == answers.axis
    }
    right = sum(bool(answer.is_right) for _, answer in questions)
    return Tally(row, snapshot.num_rows, len(questions), right, len(keyed), on_key) if questions else None


def _heads_on_key(layer: AttentionMap, row: int, answer: Answer) -> list[bool]:
    """For each head, whether the key that holds the answer has the largest weight of the question's row."""
    return [bool(favourite == answer.key) for favourite in layer.weights[row, :, answer.at].argmax(-1)]


def typical_row(runs: Sequence[Sequence[Snapshot]]) -> int | None:
    """Return the first row that ends like most rows in every run, or None if there is none.

    The end of a row is whether the answer to its last question is right at the last step, and whether a head's largest weight lies on
    the key that holds the answer, if there is such a key.

    Args:
        runs: the snapshots of each run, of the same rows.
    """
    ends = [_ends(snapshots[-1]) for snapshots in runs if snapshots[-1].answers is not None]
    usual = [Counter(of_rows).most_common(1)[0][0] for of_rows in ends]
    rows = range(min(map(len, ends), default=0))
    return next((row for row in rows if all(of_rows[row] == most for of_rows, most in zip(ends, usual, strict=True))), None)


def _ends(snapshot: Snapshot) -> list[tuple[bool, bool] | None]:
    """For each row, whether the answer to its last question is right, and whether a head found the key."""
    assert snapshot.answers is not None
    ends: list[tuple[bool, bool] | None] = []
    for row, answers in enumerate(snapshot.answers.rows):
        known = [answer for answer in answers if answer.right is not None]
        if not known:
            ends.append(None)
            continue
        maps = [layer for layer in snapshot.maps if layer.queries == layer.keys == snapshot.answers.axis]
        has_key = known[-1].key is not None and any(any(_heads_on_key(layer, row, known[-1])) for layer in maps)
        ends.append((bool(known[-1].is_right), has_key))
    return ends
