"""From the records of finished cells to the tables of the report: counts, scores, effects, ladder, init, null control.

A record is one line of ``cells.jsonl``: ``study``, ``arm``, ``factors`` (name → level), ``seed``, ``overrides``,
``command``, ``status``, ``error``, ``seconds`` and ``result`` (``None`` for a failed cell). Records are sorted first,
so that the order in which cells finished never shows. What was expected and did not come back is counted and named.

Scores: accuracy of a recall cell is what was measured, or chance where the run left nothing to measure; the loss of a
cell that is NONFINITE or DIVERGED is its loss at init. No seed is dropped.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from minitx.ablation.statistics import Floats, Interval, leave_one_out, paired_t_interval, usable_window
from minitx.config import AblationConfig, KeyValueDataConfig, TextDataConfig

REFERENCE, TREATMENT, FOLD, FLOOR, NULL = "inv_sqrt", "unscaled", "init_fold", "uniform", "full_fold"
RECALL, TEXT, LADDER, INIT_SWEEP, NULL_CONTROL = "recall", "text", "ladder", "init_sweep", "null_control"
RATE, WIDTH, INIT, RUNG = "lr", "head_dim", "init", "rung"

SOLVED = 0.99
"""Recall is solved at this accuracy."""
FAILED_OUTCOMES = ("NONFINITE", "DIVERGED", "COLLAPSED")
"""A language model that did not learn: no number, no better than at init, or no better than unigrams."""
SEPARATION = 0.1
"""Nats of validation loss between two single runs of the ladder that count as apart; there is one seed a rung."""
GRADIENT_RATIO = 3.0
"""Median or largest gradient norm that counts as several times that of the scaled arm."""

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


def condition_text(condition: Condition) -> str:
    """``{"head_dim": "128", "init": "lecun"}`` as ``init lecun, d_k 128``."""
    words = {WIDTH: "d_k"}
    names = sorted(condition, key=lambda name: (name != INIT, name))
    return ", ".join(f"{words.get(name, name)} {condition[name]}" for name in names) or "all cells"


def finite(value: Any) -> float | None:
    """``value`` as a float, or ``None`` where nothing finite was measured."""
    if value is None or isinstance(value, str) or not math.isfinite(value):
        return None
    return float(value)


def _plain(value: Any) -> Any:
    """JSON data in which every number that is not finite is ``None``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return {str(k): _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


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

    def select(self, study: str, arm: str | None = None, **factors: str) -> list[Record]:
        """The finished records with these levels, in the order of their keys."""
        wanted = set(factors.items())
        keys = [k for k in self.done if k.study == study and arm in (None, k.arm) and wanted <= set(k.factors)]
        return [self.done[k] for k in keys]

    def has(self, study: str, *arms: str) -> bool:
        """Whether the grid has the study, with all of these arms."""
        present = {k.arm for k in self.expected if k.study == study}
        return bool(present) and present >= set(arms)

    def levels(self, study: str, factor: str, **factors: str) -> tuple[str, ...]:
        """Levels of a factor: ascending where all are numbers, else in the order of the grid."""
        wanted = set(factors.items())
        keys = (k for k in self.expected if k.study == study and wanted <= set(k.factors))
        found = {dict(k.factors).get(factor) for k in keys} - {None}
        planned = list(self.grid.studies[study].factors.get(factor, ())) if study in self.grid.studies else []
        numbers = {level: as_number(level) for level in found if level is not None}
        if all(number is not None for number in numbers.values()):
            return tuple(sorted(numbers, key=lambda level: (numbers[level], level)))
        return tuple(sorted(numbers, key=lambda level: (planned.index(level) if level in planned else 10**6, level)))

    def arms(self, study: str, **factors: str) -> tuple[str, ...]:
        """Arms of a study that have these levels, in the order of the grid."""
        wanted = set(factors.items())
        found = {k.arm for k in self.expected if k.study == study and wanted <= set(k.factors)}
        planned = list(self.grid.studies[study].arms) if study in self.grid.studies else []
        return tuple(sorted(found, key=lambda arm: (planned.index(arm) if arm in planned else 10**6, arm)))

    def conditions(self, study: str) -> tuple[Condition, ...]:
        """Every combination of the levels of the factors but the learning rate, smallest d_k first."""
        names = sorted({n for k in self.expected if k.study == study for n, _ in k.factors} - {RATE})
        order = {n: {level: i for i, level in enumerate(self.levels(study, n))} for n in names}
        keys = {tuple((n, v) for n, v in k.factors if n != RATE) for k in self.expected if k.study == study}
        ranked = sorted(keys, key=lambda c: [order[n][v] for n, v in sorted(c, key=lambda p: (p[0] != INIT, p[0]))])
        return tuple(dict(c) for c in ranked)

    def seeds(self, study: str, arm: str, **factors: str) -> tuple[int, ...]:
        """Seeds that the grid wants for these levels."""
        wanted = set(factors.items())
        return tuple(sorted({k.seed for k in self.expected if k[:2] == (study, arm) and wanted <= set(k.factors)}))


def collect(records: Iterable[Record], grid: AblationConfig, expected: Iterable[Record]) -> Cells:
    """Sort the records, set what is not finite to ``None``, and hold them against what was expected.

    Of several records of one cell a finished one wins over a failed one, and of equals the first in the order of their
    JSON text: the result never depends on the order of the lines.
    """
    keys = tuple(sorted({key_of(cell) for cell in expected}))
    wanted = set(keys)
    attempts: dict[CellKey, list[Record]] = {}
    for record in records:
        attempts.setdefault(key_of(record), []).append(_plain(record))
    best = {key: min(found, key=_rank) if len(found) > 1 else found[0] for key, found in attempts.items()}
    ordered = {key: best[key] for key in sorted(best)}
    return Cells(
        grid=grid,
        expected=keys,
        done={k: r for k, r in ordered.items() if k in wanted and r["status"] == "done"},
        failed={k: r for k, r in ordered.items() if k in wanted and r["status"] != "done"},
        missing=tuple(k for k in keys if k not in best),
        unexpected=tuple(k for k in ordered if k not in wanted),
    )


def _rank(record: Record) -> tuple[bool, str]:
    return record["status"] != "done", json.dumps(record, sort_keys=True)


# --- scores


def _override(record: Record, key: str, default: float) -> float:
    """The last value that the overrides of a cell give to ``key``."""
    given = (override.lstrip("+").partition("=") for override in record.get("overrides", ()))
    values = [as_number(value) for name, _, value in given if name == key]
    return (values[-1] or default) if values else default


def chance_of(record: Record) -> float:
    """Accuracy of guessing: ``floors.chance`` where the run says so, else 1 / number of values."""
    stated = finite(record["result"]["floors"].get("chance"))
    return stated or 1.0 / _override(record, "data.num_values", KeyValueDataConfig().num_values)


def accuracy_of(record: Record) -> float:
    """Accuracy of a recall cell; chance where the run left none."""
    measured = finite(record["result"]["accuracy"])
    return chance_of(record) if measured is None else measured


def loss_of(record: Record) -> float:
    """Validation loss in nats; the loss at init where the run is NONFINITE, DIVERGED or left none (NaN: not even that)."""
    result = record["result"]
    diverged = result["outcome"] in ("NONFINITE", "DIVERGED")
    measured = None if diverged else finite(result["val_loss"])
    initial = finite(result["initial_loss"])
    return next((loss for loss in (measured, initial) if loss is not None), math.nan)


@dataclass(frozen=True)
class Scores:
    """Scores of one arm under one condition: ``values`` is (seeds, rates), NaN where the cell is missing or failed."""

    seeds: tuple[int, ...]
    rates: tuple[str, ...]
    values: Floats

    def without(self, seeds: Iterable[int]) -> Scores:
        keep = [i for i, seed in enumerate(self.seeds) if seed not in set(seeds)]
        return Scores(tuple(self.seeds[i] for i in keep), self.rates, self.values[keep])

    @property
    def incomplete(self) -> tuple[int, ...]:
        """Seeds with a missing cell."""
        return tuple(seed for seed, row in zip(self.seeds, self.values, strict=True) if np.isnan(row).any())


def scores(
    cells: Cells, study: str, arm: str, condition: Condition, rates: Sequence[str], score: Callable[[Record], float]
) -> Scores:
    """The scores of an arm on these rates, every seed that the grid wants."""
    seeds = cells.seeds(study, arm, **condition)
    found = {(r["seed"], r["factors"].get(RATE, "")): score(r) for r in cells.select(study, arm, **condition)}
    values = [[found.get((seed, rate), math.nan) for rate in rates] for seed in seeds]
    return Scores(seeds, tuple(rates), np.array(values, dtype=float).reshape(len(seeds), len(rates)))


# --- effects and arms


@dataclass(frozen=True)
class Effect:
    """Scores of two arms, a pair a seed. The interval is Student's 95 %, ``None`` under two pairs."""

    label: str
    reference: tuple[float, ...]
    treatment: tuple[float, ...]

    @property
    def difference(self) -> float:
        """Mean of treatment − reference."""
        return float(np.mean(self.differences))

    @property
    def differences(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(self.reference, self.treatment, strict=True))

    @property
    def interval(self) -> Interval | None:
        return paired_t_interval(self.differences) if len(self.reference) > 1 else None


def rate_effects(cells: Cells, study: str, condition: Condition, score: Callable[[Record], float]) -> list[Effect]:
    """Unscaled − inv_sqrt at the same rate, one effect a rate, on the seeds that both arms finished."""
    effects = []
    for rate in cells.levels(study, RATE, **condition):
        a, b = (
            {r["seed"]: score(r) for r in cells.select(study, arm, **{**condition, RATE: rate})}
            for arm in (REFERENCE, TREATMENT)
        )
        both = sorted(s for s in a.keys() & b.keys() if math.isfinite(a[s] + b[s]))
        if both:
            effects.append(Effect(f"lr {rate}", tuple(a[s] for s in both), tuple(b[s] for s in both)))
    return effects


def best_rate_effect(cells: Cells, study: str, condition: Condition, score: Callable[[Record], float]) -> Effect | None:
    """Unscaled − inv_sqrt of a loss, each arm at the rate that the other seeds like best."""
    rates = cells.levels(study, RATE, **condition)
    tables = [scores(cells, study, arm, condition, rates, score) for arm in (REFERENCE, TREATMENT)]
    gone = {seed for table in tables for seed in table.incomplete}
    a, b = (table.without(gone) for table in tables)
    if not rates or not a.seeds or a.seeds != b.seeds:
        return None
    best = [tuple(t.values[range(len(t.seeds)), leave_one_out(-t.values).picks].tolist()) for t in (a, b)]
    return Effect("own best rate" + (" (tuned on itself)" if len(a.seeds) < 2 else ""), best[0], best[1])


@dataclass(frozen=True)
class ArmRow:
    """One arm of a study under one condition: what ran, how it ended, which rates were chosen."""

    study: str
    arm: str
    condition: Condition
    expected: int
    done: int
    outcomes: Mapping[str, int]
    chosen: Mapping[str, int]
    on_edge: int
    largest: tuple[str | None, ...]


def arm_rows(cells: Cells) -> list[ArmRow]:
    """Every arm of every study, none left out."""
    rows = []
    for study in sorted({k.study for k in cells.expected}):
        for condition in cells.conditions(study) if study in (RECALL, TEXT) else ({},):
            rows += [_arm_row(cells, study, arm, condition) for arm in cells.arms(study, **condition)]
    return rows


def _arm_row(cells: Cells, study: str, arm: str, condition: Condition) -> ArmRow:
    wanted = set(condition.items())
    keys = [k for k in cells.expected if k[:2] == (study, arm) and wanted <= set(k.factors)]
    finished = cells.select(study, arm, **condition)
    rates = sorted({dict(k.factors)[RATE] for k in keys if RATE in dict(k.factors)}, key=lambda r: as_number(r) or 0.0)
    chosen: Counter[str] = Counter()
    on_edge = 0
    largest: tuple[str | None, ...] = ()
    if study in (RECALL, TEXT) and len(rates) > 1:
        table = scores(cells, study, arm, condition, rates, accuracy_of if study == RECALL else lambda r: -loss_of(r))
        table = table.without(table.incomplete)
        if table.seeds:
            choices = leave_one_out(table.values, plateau=cells.grid.margin)
            chosen, on_edge = Counter(rates[i] for i in choices.picks), sum(choices.on_edge)
            if study == RECALL:
                largest = tuple(rates[i] if i >= 0 else None for i in usable_window(table.values, SOLVED).largest)
    outcomes = Counter(r["result"]["outcome"] for r in finished)
    ordered = {rate: chosen[rate] for rate in rates if chosen[rate]}
    ended = dict(sorted(outcomes.items()))
    return ArmRow(study, arm, condition, len(keys), len(finished), ended, ordered, on_edge, largest)


# --- the ladder


@dataclass(frozen=True)
class LadderRow:
    """One rung: both arms, and the signs of instability of the unscaled one where the scaled one trains.

    ``difference`` is unscaled − scaled in nats. ``gradient_ratio`` is the ratio of the median gradient norms.
    """

    rung: str
    seed: int
    reference: Record | None
    treatment: Record | None
    difference: float | None
    gradient_ratio: float | None
    signs: tuple[str, ...]
    both_fail: bool

    @property
    def separated(self) -> bool:
        """The unscaled arm is worse by more than ``SEPARATION`` nats."""
        return self.difference is not None and self.difference > SEPARATION


def failed_to_learn(record: Record) -> bool:
    return record["result"]["outcome"] in FAILED_OUTCOMES


def ladder_rows(cells: Cells) -> list[LadderRow]:
    """Every rung of the ladder, whole, in the order of the grid."""
    rows = []
    for rung in cells.levels(LADDER, RUNG):
        seeds = {s for arm in (REFERENCE, TREATMENT) for s in cells.seeds(LADDER, arm, rung=rung)}
        for seed in sorted(seeds):
            pair = [
                next((r for r in cells.select(LADDER, arm, rung=rung) if r["seed"] == seed), None)
                for arm in (REFERENCE, TREATMENT)
            ]
            rows.append(_ladder_row(rung, seed, pair[0], pair[1]))
    return rows


def _ladder_row(rung: str, seed: int, a: Record | None, b: Record | None) -> LadderRow:
    if a is None or b is None:
        return LadderRow(rung, seed, a, b, None, None, (), False)
    return LadderRow(
        rung=rung,
        seed=seed,
        reference=a,
        treatment=b,
        difference=finite(loss_of(b) - loss_of(a)),
        gradient_ratio=_ratio(b, a, "grad_norm_median"),
        signs=() if failed_to_learn(a) else tuple(_instability(a, b)),
        both_fail=failed_to_learn(a) and failed_to_learn(b),
    )


def _ratio(b: Record, a: Record, name: str) -> float | None:
    top, bottom = finite(b["result"][name]), finite(a["result"][name])
    return top / bottom if top is not None and bottom else None


def _instability(a: Record, b: Record) -> Iterable[str]:
    """Signs of instability of run ``b`` that the trained run ``a`` does not show."""
    outcome = b["result"]["outcome"]
    if failed_to_learn(b):
        yield {"COLLAPSED": "failure to learn (no better than unigrams)"}.get(outcome, outcome.lower())
    elif outcome == "NO-CONTEXT" and a["result"]["outcome"] == "OK":
        yield "no context used (no better than bigrams)"
    for name, words in (("grad_norm_median", "median"), ("grad_norm_max", "largest")):
        ratio = _ratio(b, a, name)
        if ratio is not None and ratio >= GRADIENT_RATIO:
            yield f"{words} gradient norm {ratio:.1f} times larger"
    spikes, base = finite(b["result"]["spike_share"]) or 0.0, finite(a["result"]["spike_share"]) or 0.0
    if spikes > base:
        yield f"loss spikes in {100 * spikes:.1f} % of the steps against {100 * base:.1f} %"


def unstable(rows: Sequence[LadderRow]) -> list[LadderRow]:
    """Rungs on which the scaled arm trains and the unscaled one shows a sign of instability."""
    return [row for row in rows if row.signs]


def ladder_sentence(rows: Sequence[LadderRow]) -> str:
    """What the stress ladder shows, in one or two sentences."""
    compared = [row for row in rows if row.reference and row.treatment]
    if not compared:
        return "Ladder: not run."
    apart = [row.rung for row in compared if row.separated]
    shaky = unstable(compared)
    both = [row.rung for row in compared if row.both_fail]
    start = f"separation first at {apart[0]}" if apart else "no rung separates the arms"
    middle = (
        f"training instability without the scale, where the scaled arm trains, at {', '.join(r.rung for r in shaky)} "
        f"(first: {'; '.join(shaky[0].signs)})"
        if shaky
        else "no rung shows instability without the scale where the scaled arm trains"
    )
    end = f"; both arms fail at {', '.join(both)}" if both else ""
    return f"Ladder of {len(compared)} of {len(rows)} rungs: {start}; {middle}{end}."


# --- statistics at init, and the null control


def layer_mean(layers: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Mean over layers of a probed statistic, ``None`` where no layer has it."""
    values = [v for v in (finite(layer.get(name)) for layer in layers) if v is not None]
    return float(np.mean(values)) if values else None


def visible_keys(record: Record) -> int:
    """n of the last row: the length of a row of the cell's data."""
    text = TextDataConfig()
    pairs = _override(record, "data.num_pairs", KeyValueDataConfig().num_pairs)
    is_recall = any(o.split("=", 1) in (["data", "kv_lookup"], ["data.name", "kv_lookup"]) for o in record["overrides"])
    return int(pairs + 1 if is_recall else _override(record, "data.context_len", text.context_len))


@dataclass(frozen=True)
class InitRow:
    """Attention at step 0 of one arm, init and d_k: means over seeds and layers. ``threshold`` is √(2 ln n)."""

    arm: str
    init: str
    head_dim: str
    runs: int
    threshold: float
    values: Mapping[str, float | None]


INIT_STATISTICS = ("row_std", "logit_std", "dot_product_variance", "entropy", "saturation_99", "grad_q")


def init_rows(cells: Cells) -> list[InitRow]:
    """Statistics at step 0 of every init, d_k and arm of the init sweep."""
    rows = []
    for init in cells.levels(INIT_SWEEP, INIT):
        for width in cells.levels(INIT_SWEEP, WIDTH, init=init):
            for arm in cells.arms(INIT_SWEEP, init=init, head_dim=width):
                runs = [r for r in cells.select(INIT_SWEEP, arm, init=init, head_dim=width) if r["result"]["probes"]]
                if runs:
                    rows.append(_init_row(arm, init, width, runs))
    return rows


def _init_row(arm: str, init: str, width: str, runs: Sequence[Record]) -> InitRow:
    first = [min(r["result"]["probes"], key=lambda p: p["step"])["layers"] for r in runs]
    values: dict[str, float | None] = {}
    for name in INIT_STATISTICS:
        found = [v for v in (layer_mean(layers, name) for layers in first) if v is not None]
        values[name] = float(np.mean(found)) if found else None
    return InitRow(arm, init, width, len(runs), math.sqrt(2 * math.log(visible_keys(runs[0]))), values)


@dataclass(frozen=True)
class NullPair:
    """``inv_sqrt`` and ``full_fold`` of one condition and seed; ``equal`` is ``None`` where one of them is missing."""

    label: str
    steps: int | None
    equal: bool | None


def null_pairs(cells: Cells) -> list[NullPair]:
    """The exact null control: the training-loss series of both arms must be equal bit by bit."""
    keys = sorted({(k.factors, k.seed) for k in cells.expected if k.study == NULL_CONTROL and k.arm == NULL})
    pairs = []
    for factors, seed in keys:
        found = [cells.done.get(CellKey(NULL_CONTROL, arm, factors, seed)) for arm in (REFERENCE, NULL)]
        label = ", ".join([f"{n} {v}" for n, v in factors] + [f"seed {seed}"])
        a, b = (r["result"] if r else None for r in found)
        same = None if a is None or b is None else (a["loss_digest"], a["steps"]) == (b["loss_digest"], b["steps"])
        pairs.append(NullPair(label, a["steps"] if a else None, same))
    return pairs
