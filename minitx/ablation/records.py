"""Records of finished cells, held against the cells that were expected, and the score of one cell.

A record is one line of ``cells.jsonl``: ``study``, ``arm``, ``factors`` (name → level), ``seed``, ``overrides``,
``command``, ``status``, ``error``, ``seconds`` and ``result`` (``None`` for a failed cell). Records are sorted first,
so that the order in which cells finished never shows. What was expected and did not come back is counted and named.

Scores: accuracy of a recall cell is what was measured, or chance where the run left nothing to measure; the loss of a
cell that is NONFINITE or DIVERGED is its loss at init. No seed is dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from minitx.ablation.grid import settings
from minitx.config import (
    AblationConfig,
    InductionDataConfig,
    KeyValueDataConfig,
    MultiQueryDataConfig,
    StudyConfig,
    TextDataConfig,
)

REFERENCE, TREATMENT, FOLD, FLOOR, NULL = "inv_sqrt", "unscaled", "init_fold", "uniform", "full_fold"
ARMS = (REFERENCE, TREATMENT)
"""What is compared first: unscaled − inv_sqrt."""
RECALL, TEXT, LADDER, INIT_SWEEP, NULL_CONTROL = "recall", "text", "ladder", "init_sweep", "null_control"
FLOOR_STUDY, DOSE, TWO_BY_TWO = "floor", "dose", "two_by_two"
RATE, WIDTH, INIT, RUNG = "lr", "head_dim", "init", "rung"
PRIMARY_INIT, SMALL_INIT = "lecun", "gpt2"
Record = Mapping[str, Any]
Condition = Mapping[str, str]


class CellKey(NamedTuple):
    """What identifies a cell in a grid."""

    study: str
    arm: str
    factors: tuple[tuple[str, str], ...]
    seed: int

    def __str__(self) -> str:
        levels = "".join(f", {name} {level}" for name, level in self.factors)
        return f"{self.study}: {self.arm}{levels}, seed {self.seed}"


def key_of(cell: Record) -> CellKey:
    """The key of a record or of an expected cell."""
    factors = tuple(sorted((str(k), str(v)) for k, v in cell.get("factors", {}).items()))
    return CellKey(str(cell["study"]), str(cell["arm"]), factors, int(cell["seed"]))


def as_number(level: str) -> float | None:
    """A level as a number, or ``None`` where it is a word."""
    try:
        return float(level)
    except ValueError:
        return None


def width_of(condition: Condition) -> float:
    """d_k of a condition, 0 where it has none."""
    return as_number(condition.get(WIDTH, "")) or 0.0


def finite(value: Any) -> float | None:
    """``value`` as a float, or ``None`` where nothing finite was measured."""
    if value is None or isinstance(value, str) or not math.isfinite(value):
        return None
    return float(value)


def quotient(top: Any, bottom: Any) -> float | None:
    """``top`` / ``bottom``, or ``None`` where one of them was not measured or ``bottom`` is 0."""
    a, b = finite(top), finite(bottom)
    return a / b if a is not None and b else None


# --- counting


@dataclass(frozen=True)
class Cells:
    """The cells of a grid: what was expected, and what came back of it.

    ``done`` and ``failed`` map keys to records; ``missing`` never came back; ``unexpected`` came back, belongs to no
    cell of the grid and is left out of every table.
    """

    grid: AblationConfig
    expected: tuple[CellKey, ...]
    done: Mapping[CellKey, Record]
    failed: Mapping[CellKey, Record]
    missing: tuple[CellKey, ...]
    unexpected: tuple[CellKey, ...]

    def keys(self, study: str, arm: str | None = None, **levels: str) -> list[CellKey]:
        """The expected cells with these levels."""
        wanted = set(levels.items())
        return [k for k in self.expected if k.study == study and arm in (None, k.arm) and wanted <= set(k.factors)]

    def select(self, study: str, arm: str | None = None, **levels: str) -> list[Record]:
        """The finished records with these levels, in the order of their keys."""
        return [self.done[k] for k in self.keys(study, arm, **levels) if k in self.done]

    def levels(self, study: str, factor: str, **levels: str) -> tuple[str, ...]:
        """Levels of a factor: ascending where all are numbers, else in the order of the grid."""
        found = {level for k in self.keys(study, **levels) for name, level in k.factors if name == factor}
        if all(as_number(level) is not None for level in found):
            return tuple(sorted(found, key=lambda level: (float(level), level)))
        return _in_order(found, self.planned(study).factors.get(factor, ()))

    def arms(self, study: str, **levels: str) -> tuple[str, ...]:
        """Arms of a study that have these levels, in the order of the grid."""
        return _in_order({k.arm for k in self.keys(study, **levels)}, self.planned(study).arms)

    def seeds(self, study: str, arm: str, **levels: str) -> tuple[int, ...]:
        """Seeds that are judged, of these levels."""
        tuned_on = self.planned(study).tune_seeds
        return tuple(sorted({k.seed for k in self.keys(study, arm, **levels)} - set(tuned_on)))

    def score(self, study: str) -> Score | None:
        """What a study is judged by, ``None`` where it is not judged."""
        word = self.planned(study).score
        return None if word is None else SCORES[word]

    def conditions(self, study: str, *arms: str) -> tuple[Condition, ...]:
        """Every combination of the levels of the factors but the learning rate that has these arms, smallest d_k first."""
        places = {tuple((n, v) for n, v in k.factors if n != RATE) for k in self.keys(study)}
        order = {name: self.levels(study, name) for place in places for name, _ in place}

        def rank(place: tuple[tuple[str, str], ...]) -> list[int]:
            return [order[n].index(v) for n, v in sorted(place, key=lambda p: (p[0] != INIT, p[0]))]

        ranked = (dict(place) for place in sorted(places, key=rank))
        return tuple(c for c in ranked if set(arms) <= set(self.arms(study, **c)))

    def planned(self, study: str) -> StudyConfig:
        """A study as the grid plans it; an empty one where the grid has none of this name."""
        return self.grid.studies.get(study, StudyConfig())


def _in_order(found: Iterable[str], planned: Iterable[str]) -> tuple[str, ...]:
    rank = {name: i for i, name in enumerate(planned)}
    return tuple(sorted(found, key=lambda name: (rank.get(name, len(rank)), name)))


def collect(records: Iterable[Record], grid: AblationConfig, expected: Iterable[Record]) -> Cells:
    """Sort the records, set what is not finite to ``None``, and hold them against what was expected.

    Of several records of one cell a finished one wins over a failed one, and of equals the first in the order of their
    JSON text: the result never depends on the order of the lines.
    """
    keys = tuple(sorted({key_of(cell) for cell in expected}))
    wanted = set(keys)
    ranked = sorted(map(_plain, records), key=lambda r: (r["status"] != "done", json.dumps(r, sort_keys=True)))
    best = dict(sorted({key_of(record): record for record in reversed(ranked)}.items()))
    return Cells(
        grid=grid,
        expected=keys,
        done={k: r for k, r in best.items() if k in wanted and r["status"] == "done"},
        failed={k: r for k, r in best.items() if k in wanted and r["status"] != "done"},
        missing=tuple(k for k in keys if k not in best),
        unexpected=tuple(k for k in best if k not in wanted),
    )


def _plain(value: Any) -> Any:
    """JSON data in which every number that is not finite is ``None``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return {str(k): _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


# --- scores


class Score(NamedTuple):
    """What a study is judged by: of a record a number, whether large is good (1) or small (−1), and its name in words."""

    of: Callable[[Record], float]
    better: int
    name: str


_RECALL: dict[str, type[Any]] = {kind.name: kind for kind in (KeyValueDataConfig, MultiQueryDataConfig, InductionDataConfig)}


def data_of(record: Record) -> Any:
    """The data of a cell, read off its overrides: one of the recall tasks, else text; only numbers are filled in."""
    given = settings(record.get("overrides", ()))
    kind = _RECALL.get(given.get("data", given.get("data.name", "")), TextDataConfig)
    numbers = {field.name: as_number(given.get(f"data.{field.name}", "")) for field in fields(kind)}
    return kind(**{name: int(number) for name, number in numbers.items() if number is not None})


def accuracy_of(record: Record) -> float:
    """Accuracy of a cell; where the run left none, chance: ``result.chance``, else that of the data in its overrides."""
    measured = finite(record["result"]["accuracy"])
    if measured is not None:
        return measured
    return finite(record["result"].get("chance")) or float(getattr(data_of(record), "chance", 0.0))


def loss_of(record: Record) -> float:
    """Validation loss in nats; the loss at init where the run is NONFINITE, DIVERGED or left none (NaN: not even that)."""
    result = record["result"]
    diverged = result["outcome"] in ("NONFINITE", "DIVERGED")
    measured = None if diverged else finite(result["val_loss"])
    initial = finite(result["initial_loss"])
    return next((loss for loss in (measured, initial) if loss is not None), math.nan)


SCORES = {"accuracy": Score(accuracy_of, 1, "accuracy"), "loss": Score(loss_of, -1, "validation loss (nats)")}


def measure(name: str) -> Score:
    """A number of ``result.measures``, small is good; NaN where there is none, but the loss at init for a loss of a run that
    diverged."""

    def of(record: Record) -> float:
        measured = finite((record["result"].get("measures") or {}).get(name))
        if measured is not None:
            return measured
        failed = record["result"]["outcome"] in ("NONFINITE", "DIVERGED")
        return loss_of(record) if failed and name.startswith("loss") else math.nan

    return Score(of, -1, name.replace("_", " "))


def visible_keys(record: Record) -> int:
    """n of the last row: the tokens of a row of the cell's data."""
    return int(data_of(record).max_tokens)
