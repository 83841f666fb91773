"""The records of a grid's runs, and values that are computed from one run.

A record is one line of ``cells.jsonl``:

==============  ==========================================================================================================
``cell``        a hash that names the run: its place in the grid, its overrides, and the code that decides its result
``study, arm, factors, seed``  the place in the grid; ``factors`` maps a factor to its level
``overrides, command``  what was run, and the command that runs it alone
``start``       ``cell`` of the run whose weights it started from, or null
``status``      ``done``, ``failed``, or ``not run`` (a rule of the grid left it out); ``reason`` says why
``seconds``     wall time
``result``      null unless done; else what ``minitx.ablation.measures.result_of`` read from the run's folder:
==============  ==========================================================================================================

===================  =====================================================================================================
``steps, cap``       updates made, and ``trainer.max_steps``
``loss``             training loss of each step, 5 significant digits, null where it is not finite
``accuracy``         training accuracy of each step, or null where the objective counts none
``nonfinite_step``   the step whose loss or gradient was not finite, or null; after the last, if only the validation was not
``val_loss, val_accuracy``  of the validation after the last step, or null
``floors``           losses to compare with (``unigram``, ``bigram``) by name, in nats; {} where the task has none
``digest``           SHA-256 of the training losses as float64, to compare runs bit for bit
``parameters``       number of parameters
``start_error``      largest difference of the outputs to the run that it started from, over the largest output; or null
``measures``         numbers that ``evaluation`` asked for, by name
``probes``           a list of {``step``, ``layers``}: statistics of each attention layer, the mean over its heads
``attention``        {step: (rows, L, S) weights of the first layer's first head}, where the study keeps them; else {}
===================  =====================================================================================================

The ``result`` of a threshold is what ``minitx.ablation.thresholds.measure_threshold`` found:

===================  =====================================================================================================
``low, high``        the largest stable rate is between them: ``low`` is stable and ``high`` is not
``above``            rates above ``high`` that were stable all the same: a second crossing
``start``            for train_loss, the mean loss of the starting model on the first batches, else null
``cap``              ``trainer.max_steps``
``parameters, start_error``  as above
``runs``             a list of {``rate``, ``stable``, ``steps``, ``nonfinite_step``, ``worst``, ``loss``, ``accuracy``}, by rate;
                     ``worst`` is the worst mean that decided, or null if the run ended before there was one
===================  =====================================================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minitx.ablation.design import RATE, Solved
from minitx.config.schema import require

Record = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """The place of a run in its grid. ``factors`` are (factor, level), sorted by the factor's name."""

    study: str
    arm: str
    factors: tuple[tuple[str, str], ...]
    seed: int

    @property
    def rate(self) -> str:
        """The level of the factor ``lr``, or "" without it."""
        return dict(self.factors).get(RATE, "")

    @property
    def condition(self) -> dict[str, str]:
        """The levels of all factors except ``lr``."""
        return {name: level for name, level in self.factors if name != RATE}

    def __str__(self) -> str:
        levels = "".join(f", {name} {level}" for name, level in self.factors)
        return f"{self.study}: {self.arm}{levels}, seed {self.seed}"


@dataclass(frozen=True)
class Run(Place):
    """A run of the grid and its record, or {} if there is no record."""

    record: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def status(self) -> str:
        """The status in the record, or ``missing``."""
        return self.record.get("status", "missing")  # type: ignore[no-any-return]

    @property
    def result(self) -> Mapping[str, Any]:
        """The measured values. Only a finished run has them."""
        assert self.status == "done", self
        return self.record["result"]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Runs:
    """The runs of a grid, in the order of its cells."""

    all: tuple[Run, ...]

    @classmethod
    def of(cls, places: Iterable[Place], records: Iterable[Record]) -> Runs:
        """Return the runs at ``places``. Records of other places are ignored. If a place has several records, the last finished one counts."""
        found = {}
        for record in sorted(records, key=lambda record: record["status"] == "done"):
            factors = tuple(sorted(record["factors"].items()))
            found[Place(record["study"], record["arm"], factors, record["seed"])] = record
        return cls(tuple(Run(**vars(place), record=found.get(place, {})) for place in places))

    def select(
        self, study: str, arm: str = "", condition: Mapping[str, str] = {}, *, rate: str = "", status: str = ""
    ) -> list[Run]:
        """Return the runs of a study that match all arguments. ``condition`` may contain some of the factors."""
        of_study = (run for run in self.all if run.study == study and condition.items() <= dict(run.factors).items())
        return [run for run in of_study if arm in ("", run.arm) and rate in ("", run.rate) and status in ("", run.status)]


KEYS = ("cell", "study", "arm", "factors", "seed", "overrides", "status", "result")
"""What each record of a grid has."""


def read_records(path: Path, keys: Iterable[str] = KEYS) -> list[Record]:
    """Read the records of a ``cells.jsonl``, or return [] without a file. An incomplete line, written during a crash, is left out.

    Raises:
        ConfigError: a line is whole, and lacks one of ``keys``.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else [], 1):
        with suppress(json.JSONDecodeError):
            record = json.loads(line)
            require(isinstance(record, dict) and record.keys() >= {*keys}, f"{path}: line {number} is no record of a run")
            found.append(record)
    return found


def solved_step(result: Mapping[str, Any], solved: Solved) -> int | None:
    """Return the first step t at which the mean of the metric over steps t - window + 1 ... t reaches the value.

    Return None if there is none, and for a NONFINITE run.

    >>> solved_step({"accuracy": [0.0, 1.0, 1.0], "nonfinite_step": None}, Solved(value=0.9, window=2))
    3
    """
    if result["nonfinite_step"] is not None:
        return None
    for step, value in enumerate(_means(result, solved.metric, solved.window), solved.window):
        if value >= solved.value if solved.metric == "train_accuracy" else value <= solved.value:
            return step
    return None


def _means(result: Mapping[str, Any], metric: str, window: int) -> list[float]:
    """Means over ``window`` consecutive steps. A step that is missing counts as the worst: accuracy 0, an infinite loss."""
    worst = 0.0 if metric == "train_accuracy" else math.inf
    values = [worst if value is None else value for value in result[metric.removeprefix("train_")] or []]
    return [math.fsum(values[i : i + window]) / window for i in range(len(values) - window + 1)]
