"""Runs of the lattice in several processes: what each process records and how it ends, put together as if it were one process.

The processes of a place stay, with their process group, and train one run after another. After an error or a power cut they are killed.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minitx.training.metrics_csv import OF_THE_MACHINE
from tests.lattice import run_parts
from tests.lattice.engine import Point
from tests.lattice.run_parts import PowerCut, Record

OF_EACH = ("logs/", "fit-profile", "test-profile")
"""Beginnings of the files that each process writes in the folder of a run."""

PATIENCE = 300.0
"""Seconds after which a run hangs: a process waits for another that does not come. Shrinking repeats each hang."""


@dataclass
class Outcome:
    """What a run came to in one process.

    Attributes:
        result: ``result.json``, or None.
        refusal: the message of a refusal, or "".
        error: the name of the error that ended the run, or "".
        changed: the names of what the run changed for the process.
        written: the files in the run's folder that the process opened to write.
    """

    result: dict[str, Any] | None = None
    refusal: str = ""
    error: str = ""
    record: Record | None = None
    changed: dict[str, Any] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)


class EndedError(Exception):
    """A run in several processes ended by the error ``name`` in each of them."""

    def __init__(self, name: str, changed: dict[str, Any]) -> None:
        super().__init__(name)
        self.name, self.changed = name, changed


_CREWS: dict[tuple[int, str, int], Any] = {}
"""The processes of this process, by their number and kind."""


def train(count: int, words: list[str], folder: Path, point: Point) -> tuple[dict[str, Any], Record | None, dict[str, Any]]:
    """Run ``train.py WORDS`` in ``count`` processes: the result, what all recorded, and what a process changed.

    Raises:
        ValueError: the run was refused.
        EndedError: the run ended by a signal or a number that is not finite.
        PowerCut: a process met one; all others are killed.
        AssertionError: a process raised (the message has the last line of its traceback), one waits for ever, or they differ.
    """
    kind = point["place"] if point["place"] == "pretended" else "cpu"
    try:
        outcomes = _crew(count, kind).call(train_in_a_rank, words, folder, point, patience=PATIENCE)
    except AssertionError as error:
        first, *_, last = str(error).strip().splitlines()
        if last.endswith(PowerCut.__name__):
            raise PowerCut from None
        raise AssertionError(f"{first} {last}") from error
    first, *others = outcomes
    for rank, outcome in enumerate(others, 1):
        for name in ("refusal", "error", "result"):
            mine, theirs = (_without_places(getattr(each, name)) for each in (first, outcome))
            assert mine == theirs, f"{name} of rank 0 is {str(mine)[:150]!r}, of rank {rank} {str(theirs)[:150]!r}"
        written = [path for path in outcome.written if not path.startswith(OF_EACH)]
        assert not written, f"rank {rank} wrote {', '.join(written[:3])}: the first process alone writes files, but for logs"
    if first.refusal:
        raise ValueError(first.refusal)
    changed = {f"rank {rank}: {name}": value for rank, each in enumerate(outcomes) for name, value in each.changed.items()}
    if first.error:
        raise EndedError(first.error, changed)
    assert first.result is not None
    return first.result, together([each.record for each in outcomes if each.record is not None]), changed


def _without_places(value: Any) -> Any:
    """A message or a result without what may differ between processes: seconds and memory."""
    if isinstance(value, dict):
        return {name: each for name, each in value.items() if name not in OF_THE_MACHINE}
    return re.sub(r"/tmp/\S+", "", value) if isinstance(value, str) else value


def _crew(count: int, kind: str) -> Any:
    """The processes for a run. A fork makes its own."""
    from tests.training.ranks import Ranks

    key = (count, kind, os.getpid())
    if key not in _CREWS or not _CREWS[key].is_open:
        _CREWS[key] = Ranks(count)
    return _CREWS[key]


@atexit.register
def close() -> None:
    """End all processes."""
    for (*_, owner), crew in _CREWS.items():
        if owner == os.getpid():
            crew.close()
    _CREWS.clear()


def train_in_a_rank(words: list[str], folder: Path, point: Point) -> Outcome:
    """Run ``train.py WORDS`` in this process, one of several."""
    from tests.lattice import inside, runs

    if point["place"] == "pretended":
        from tests import pretend

        pretend.register()
    del run_parts.RECORDS[:]
    before, outcome = runs.state_of_the_process(), Outcome()
    is_first = os.environ.get("RANK", "0") == "0"
    _LATE[:] = [(point["late"], runs.expected_steps(point))] if is_first == (point["late"] == "writing") else []
    _note_written_files(folder)
    try:
        with runs._surroundings(point):
            outcome.result = inside.train_by(words, folder)
    except ValueError as error:
        outcome.refusal = str(error)
    except Exception as error:
        if type(error).__name__ not in ("StoppedError", "NonFiniteError"):
            raise
        outcome.error = type(error).__name__
    outcome.written = sorted(set(_WRITTEN))
    changed = runs.changes_between(before, runs.state_of_the_process())
    outcome.changed = {name: str(values)[:300] for name, values in changed.items()}
    if run_parts.RECORDS:
        outcome.record = run_parts.RECORDS[-1]
        if point["network"] in runs.OF_TRANSFORMERS or int(os.environ.get("RANK", "0")):
            outcome.record.start = None  # it needs what it was made of, or is the same as that of the first process
    return outcome


_WRITTEN: list[str] = []
"""The files that this process opened to write in the folder of the run, without the folder."""

_FOLDERS: list[str] = []

_LATE: list[tuple[str, int]] = []
"""What this process does later than the others (``writing`` or ``reading`` the files of the run), and the number of steps."""

DELAY = 0.1
"""Seconds by which a process opens a file later: long enough for another one that does not wait to be there first."""


def _note_written_files(folder: Path) -> None:
    """From now on, note in ``_WRITTEN`` which files of ``folder`` this process opens to write."""
    if not _FOLDERS:
        sys.addaudithook(_note)
    _FOLDERS[:], _WRITTEN[:] = [f"{folder}/"], []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        path, mode, flags = arguments
        names = [str(path).removeprefix(folder) for folder in _FOLDERS if str(path).startswith(folder)]
        writes = bool((mode or "").strip("brt") or (mode is None and flags & (os.O_WRONLY | os.O_RDWR)))
        _WRITTEN.extend(names if writes else ())
        if names and any(how == ("writing" if writes else "reading") and _begins_or_ends(steps) for how, steps in _LATE):
            time.sleep(DELAY)


def _begins_or_ends(steps: int) -> bool:
    """Whether a run of so many steps has read no batch yet, or is in its last step. In between, its steps keep processes together."""
    batches = [batch for record in run_parts.RECORDS[-1:] for batch in record.batches]
    return not batches or batches[-1][0] + 1 >= steps


def together(records: list[Record]) -> Record | None:
    """What several processes recorded, as if one had read all batches: by micro-batch, then by rank.

    A batch of validation without a label that counts is left out: a process without rows reads one.

    Raises:
        AssertionError: the processes read another number of batches, or batches of other steps.
    """
    if len(records) < 2:
        return records[0] if records else None
    found = Record(records[0].start)
    for name in ("batches", "validation", "test", "seeds"):
        lists = [getattr(record, name) for record in records]
        numbers = [len(each) for each in lists]
        assert len(set(numbers)) == 1, f"the processes read {numbers} batches ({name})"
        for row in zip(*lists, strict=True):
            if name == "batches":
                assert len({step for step, _ in row}) == 1, f"the processes read batches of steps {[step for step, _ in row]}"
            kept = [batch for batch in row if (batch["labels"] != -100).any()] if name in ("validation", "test") else row
            getattr(found, name).extend(kept)
    return found
