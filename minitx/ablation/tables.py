"""One table a study: how every arm ended, the rungs of the ladder, attention at step 0, and the null control."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from minitx.ablation import records as rec
from minitx.ablation.effects import Paired
from minitx.ablation.records import CellKey, Cells, Condition, Record
from minitx.ablation.statistics import Interval, fit_interval, usable_window

FAILED_OUTCOMES = ("NONFINITE", "DIVERGED", "COLLAPSED")
"""A language model that did not learn: no number, no better than at init, or no better than unigrams."""
SEPARATION = 0.1
"""Nats of validation loss between two single runs of the ladder that count as apart; there is one seed a rung."""
GRADIENT_RATIO = 3.0
"""Median or largest gradient norm that counts as several times that of the scaled arm."""


# --- arms


@dataclass(frozen=True)
class ArmRow:
    """One arm of a study under one condition: what ran, how it ended, which rates were chosen.

    ``chosen`` counts the seeds of a rate, ``on_edge`` those whose rate is on the edge; ``largest`` is the largest usable rate of
    each seed. They are empty where there is no choice between rates.
    """

    study: str
    arm: str
    condition: Condition
    expected: int
    done: int
    outcomes: Mapping[str, int]
    chosen: Mapping[str, int] = field(default_factory=dict)
    on_edge: int = 0
    largest: tuple[str | None, ...] = ()


def arm_rows(cells: Cells) -> list[ArmRow]:
    """Every arm of every study, none left out."""
    rows = []
    for study in sorted({k.study for k in cells.expected}):
        for condition in cells.conditions(study) if cells.score(study) else ({},):
            rows += [_arm_row(cells, study, arm, condition) for arm in cells.arms(study, **condition)]
    return rows


def _arm_row(cells: Cells, study: str, arm: str, condition: Condition) -> ArmRow:
    finished, score = cells.select(study, arm, **condition), cells.score(study)
    outcomes = dict(sorted(Counter(r["result"]["outcome"] for r in finished).items()))
    row = ArmRow(study, arm, condition, len(cells.keys(study, arm, **condition)), len(finished), outcomes)
    runs = Paired(cells, study, (arm,), condition, score) if score else None
    if runs is None or len(runs.rates) < 2 or not runs.usable:
        return row
    choices = runs.choices(0, plateau=cells.grid.margin)
    chosen = {runs.rates[i]: choices.picks.count(i) for i in sorted(set(choices.picks))}
    windows = usable_window(runs.values[0], cells.planned(study).solved).largest if runs.score.better > 0 else ()
    largest = tuple(runs.rates[i] if i >= 0 else None for i in windows)
    return replace(row, chosen=chosen, on_edge=sum(choices.on_edge), largest=largest)


# --- the budget


def budget_text(cells: Cells) -> str:
    """After how many steps each judged study and the ladder were scored: ``recall 200, text 250``."""
    judged = [study for study in cells.grid.studies if cells.score(study) or study == rec.LADDER]
    return ", ".join(f"{study} {steps}" for study in judged if (steps := steps_of(cells, study)))


def steps_of(cells: Cells, study: str) -> str:
    """The steps of a study's finished runs, leaving out those that a non-finite number ended."""
    whole = {r["result"]["steps"] for r in cells.select(study) if r["result"]["outcome"] != "NONFINITE"}
    return " or ".join(map(str, sorted(whole)))


# --- the ladder


@dataclass(frozen=True)
class LadderRow:
    """One rung: the runs of both arms, and what only the unscaled one shows where the scaled one trains.

    ``difference`` is unscaled − scaled in nats. ``gradient_ratio`` is the ratio of the median gradient norms.
    """

    rung: str
    seed: int
    runs: tuple[Record | None, Record | None]
    difference: float | None = None
    gradient_ratio: float | None = None
    signs: tuple[str, ...] = ()
    both_fail: bool = False

    @property
    def separated(self) -> bool:
        """The unscaled arm is worse by more than ``SEPARATION`` nats."""
        return self.difference is not None and self.difference > SEPARATION

    @property
    def label(self) -> str:
        """The rung, with the seed where it is not the first."""
        return self.rung if self.seed == 0 else f"{self.rung}, seed {self.seed}"


def ladder_rows(cells: Cells) -> list[LadderRow]:
    """Every rung of the ladder, whole, in the order of the grid."""
    rows = []
    for rung in cells.levels(rec.LADDER, rec.RUNG):
        runs = {(r["arm"], r["seed"]): r for r in cells.select(rec.LADDER, rung=rung)}
        for seed in sorted({s for arm in rec.ARMS for s in cells.seeds(rec.LADDER, arm, rung=rung)}):
            rows.append(_ladder_row(rung, seed, runs.get((rec.REFERENCE, seed)), runs.get((rec.TREATMENT, seed))))
    return rows


def _ladder_row(rung: str, seed: int, a: Record | None, b: Record | None) -> LadderRow:
    if a is None or b is None:
        return LadderRow(rung, seed, (a, b))
    return LadderRow(
        rung=rung,
        seed=seed,
        runs=(a, b),
        difference=rec.finite(rec.loss_of(b) - rec.loss_of(a)),
        gradient_ratio=_ratio(b, a, "grad_norm_median"),
        signs=() if _failed_to_learn(a) else tuple(_signs(a, b)),
        both_fail=_failed_to_learn(a) and _failed_to_learn(b),
    )


def _failed_to_learn(record: Record) -> bool:
    return record["result"]["outcome"] in FAILED_OUTCOMES


def _ratio(b: Record, a: Record, name: str) -> float | None:
    return rec.quotient(b["result"][name], a["result"][name])


def _signs(a: Record, b: Record) -> Iterable[str]:
    """Failure to learn, larger gradients and spikes of run ``b`` that the trained run ``a`` does not show."""
    outcome = b["result"]["outcome"]
    if _failed_to_learn(b):
        yield {"COLLAPSED": "failure to learn (no better than unigrams)"}.get(outcome, outcome.lower())
    elif outcome == "NO-CONTEXT" and a["result"]["outcome"] == "OK":
        yield "no context used (no better than bigrams)"
    for name, words in (("grad_norm_median", "median"), ("grad_norm_max", "largest")):
        ratio = _ratio(b, a, name)
        if ratio is not None and ratio >= GRADIENT_RATIO:
            yield f"{words} gradient norm {ratio:.1f} times larger"
    spikes, base = (rec.finite(run["result"]["spike_share"]) or 0.0 for run in (b, a))
    if spikes > base:
        yield f"loss spikes in {100 * spikes:.1f} % of the steps against {100 * base:.1f} %"


def ladder_sentence(rows: Sequence[LadderRow]) -> str:
    """What the stress ladder shows, in one or two sentences."""
    compared = [row for row in rows if None not in row.runs]
    if not compared:
        return "Ladder: not run."
    apart = _rungs(compared, lambda row: row.separated)
    shaky = _rungs(compared, lambda row: bool(row.signs))
    both = _rungs(compared, lambda row: row.both_fail)
    first = next((row.signs for row in compared if row.signs), ())
    start = f"separation first at {apart[0]}" if apart else "no rung separates the arms"
    middle = (
        f"larger gradients, spikes or failure to learn without the scale, where the scaled arm trains, at {', '.join(shaky)} "
        f"(first: {'; '.join(first)})"
        if shaky
        else "no rung shows larger gradients, spikes or failure to learn in the unscaled arm alone"
    )
    end = f"; both arms fail at {', '.join(both)}" if both else ""
    counts = (len({row.rung for row in some}) for some in (compared, rows))
    return f"Ladder of {' of '.join(map(str, counts))} rungs: {start}; {middle}{end}."


def _rungs(rows: Sequence[LadderRow], holds: Callable[[LadderRow], bool]) -> list[str]:
    """The rungs of which ``holds`` is true in a seed; in how many, where there are several."""
    seeds = Counter(row.rung for row in rows)
    found = Counter(row.rung for row in rows if holds(row))
    return [f"{rung} ({found[rung]} of {n} seeds)" if n > 1 else rung for rung, n in seeds.items() if found[rung]]


# --- statistics at init


INIT_STATISTICS = ("row_std", "logit_std", "dot_product_variance", "entropy", "grad_q")


@dataclass(frozen=True)
class InitRow:
    """Attention at step 0 of one arm, init and d_k: means over seeds and layers. ``threshold`` is √(2 ln n)."""

    arm: str
    init: str
    head_dim: str
    threshold: float
    values: Mapping[str, float | None]


def layer_mean(layers: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Mean over layers of a probed statistic, ``None`` where no layer has it."""
    return _mean(rec.finite(layer.get(name)) for layer in layers)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def init_rows(cells: Cells) -> list[InitRow]:
    """Statistics at step 0 of every init, d_k and arm of the init sweep."""
    rows = []
    for init in cells.levels(rec.INIT_SWEEP, rec.INIT):
        for width in cells.levels(rec.INIT_SWEEP, rec.WIDTH, init=init):
            for arm in cells.arms(rec.INIT_SWEEP, init=init, head_dim=width):
                runs = [r for r in cells.select(rec.INIT_SWEEP, arm, init=init, head_dim=width) if r["result"]["probes"]]
                if runs:
                    first = [min(r["result"]["probes"], key=lambda p: p["step"])["layers"] for r in runs]
                    values = {name: _mean(layer_mean(layers, name) for layers in first) for name in INIT_STATISTICS}
                    rows.append(InitRow(arm, init, width, math.sqrt(2 * math.log(rec.visible_keys(runs[0]))), values))
    return rows


def variance_slopes(rows: Sequence[InitRow]) -> dict[str, Interval]:
    """Slope of ln Var(q·k) on ln d_k, an init each, through the unscaled arm's points (the scale comes after q·k)."""
    points: dict[str, list[list[float]]] = {}
    for row in rows:
        width, variance = rec.as_number(row.head_dim), row.values["dot_product_variance"]
        if row.arm == rec.TREATMENT and width and variance:
            points.setdefault(row.init, []).append([math.log(width), math.log(variance)])
    return {init: fit_interval(*np.transpose(found)) for init, found in points.items() if len(found) >= 3}


def gradient_ratios(rows: Sequence[InitRow], arm: str = rec.TREATMENT) -> dict[tuple[str, str], float]:
    """‖∇W_Q‖ of ``arm`` over that of inv_sqrt at step 0, by (init, d_k)."""
    norms = {(row.arm, row.init, row.head_dim): row.values["grad_q"] for row in rows}
    found = {(i, w): rec.quotient(norm, norms.get((rec.REFERENCE, i, w))) for (a, i, w), norm in norms.items() if a == arm}
    return {place: ratio for place, ratio in found.items() if ratio is not None}


# --- the null control


@dataclass(frozen=True)
class NullPair:
    """``inv_sqrt`` and ``full_fold`` of one condition and seed; ``equal`` is ``None`` where one of them is missing."""

    label: str
    steps: int | None
    equal: bool | None


def null_pairs(cells: Cells) -> list[NullPair]:
    """The exact null control: the training-loss series of both arms must be equal bit by bit."""
    pairs = []
    for key in cells.keys(rec.NULL_CONTROL, rec.NULL):
        found = [cells.done.get(CellKey(rec.NULL_CONTROL, arm, key.factors, key.seed)) for arm in (rec.REFERENCE, rec.NULL)]
        a, b = ((r["result"]["loss_digest"], r["result"]["steps"]) if r else None for r in found)
        label = ", ".join([f"{n} {v}" for n, v in key.factors] + [f"seed {key.seed}"])
        pairs.append(NullPair(label, a[1] if a else None, None if a is None or b is None else a == b))
    return pairs
