"""Fabricated grids and records whose truth is known: what the judge, the figures and the report are tested on."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minitx.ablation.config import (
    AblationConfig,
    ComparisonConfig,
    ExpectedConfig,
    LawConfig,
    PredictionConfig,
    Stable,
    StartConfig,
    StudyConfig,
)
from minitx.ablation.grid import Cell, cells
from minitx.ablation.records import Place, Record, Runs

SCALED, UNSCALED, FOLD, UNIFORM = "inv_sqrt", "unscaled", "full_fold", "uniform"
RATES = ("1e-3", "1.8e-3", "3.2e-3", "5.6e-3", "1e-2")
ADAMW_RATES = ("1e-3", "1.8e-3", "3.2e-3", "5.6e-3", "1e-2", "1.8e-2", "3.2e-2")
SGD_RATES = ("3.2e-3", "5.6e-3", "1e-2", "1.8e-2", "3.2e-2", "5.6e-2", "1e-1", "1.8e-1", "3.2e-1")
TEXT_RATES = ("1e-3", "3.2e-3", "1e-2")
CONTINUED_RATES = ("3.2e-3", "5.6e-3", "1e-2", "1.8e-2")
TUNE_SEEDS, SEEDS = (0, 1), (10, 11, 12, 13, 14, 15)
CHANCE, INITIAL, UNIGRAM, BIGRAM, UNIFORM_LEVEL = 1 / 16, 4.2, 3.3, 2.49, 2.2
WINDOW = 16


def studies() -> dict[str, StudyConfig]:
    """The studies of the protocol's ``record`` grid, in small."""
    dims = levels("model.attention.head_dim", ("8", "128"))
    recall = {"head_dim": dims, "lr": levels("optimizer.lr", RATES)}
    text = {"lr": levels("optimizer.lr", TEXT_RATES)}
    start, from_text = StartConfig(study="solved", arm=SCALED), StartConfig(study="text_first", arm=SCALED, solved=False)
    two, three = (SCALED, UNSCALED), (SCALED, UNSCALED, FOLD)

    def continued(rates: tuple[str, ...]) -> StudyConfig:
        factors = {"head_dim": dims, "lr": levels("optimizer.lr", rates)}
        return study("From a solved model", 200, three, factors, start=start, prune="lost", scores=("stability",))

    loss = Stable(metric="train_loss", value=0.3, window=30)
    return {
        "recall": study("Recall from scratch", 1500, two, recall, tune_seeds=TUNE_SEEDS, prune="unsolved", scores=("time",)),
        "solved": study("Models that solved recall", 1500, (SCALED,), {"head_dim": dims}),
        "stability_adamw": continued(ADAMW_RATES),
        "stability_sgd": continued(SGD_RATES),
        "text": study("Text from scratch", 120, (*two, UNIFORM), text, scores=("loss",)),
        "text_first": study("Models trained on text", 80, (SCALED,), {}),
        "text_stability": study(
            "From a model trained on text",
            150,
            two,
            {"lr": levels("optimizer.lr", CONTINUED_RATES)},
            start=from_text,
            stable=loss,
            scores=("stability",),
        ),
        "null": study("Null control", 30, (SCALED, FOLD), {}, scores=("equal",)),
    }


def study(title: str, steps: int, arms: tuple[str, ...], factors: Mapping[str, Any], **rest: Any) -> StudyConfig:
    """A study of ``SEEDS``; ``rest`` are its other fields."""
    return StudyConfig(
        title=title, base=(f"trainer.max_steps={steps}",), arms=arms, factors=factors, **{"seeds": SEEDS, **rest}
    )


def levels(key: str, values: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The levels of a factor that sets one key."""
    return {value: (f"{key}={value}",) for value in values}


def grid(**changes: Any) -> AblationConfig:
    """The grid with all studies; comparisons and predictions of studies that ``changes`` leaves out are left out too."""
    chosen = changes.setdefault("studies", studies())
    two, wide = (SCALED, UNSCALED), ({"head_dim": "128"},)
    compared = (
        ComparisonConfig(study="recall", arms=two, primary=wide),
        ComparisonConfig(study="stability_adamw", arms=two, primary=wide, law=LawConfig(factor="head_dim", power=0.25)),
        ComparisonConfig(study="stability_sgd", arms=two, primary=wide, law=LawConfig(factor="head_dim", power=0.5)),
        ComparisonConfig(study="stability_adamw", arms=(SCALED, FOLD)),
        ComparisonConfig(study="text", arms=two),
        ComparisonConfig(study="text_stability", arms=two),
        ComparisonConfig(study="null", arms=(SCALED, FOLD)),
    )
    later = ExpectedConfig(
        study="recall", arms=two, endpoint="time", verdict="SLOWER", ratio=(4.0, None), condition={"head_dim": "128"}
    )
    foretold = {"Q1": PredictionConfig(statement="Without the scale the task is learned four times later.", expect=(later,))}
    whole = {
        "name": "made_up",
        "question": "Does attention need the scale?",
        "arms": {SCALED: (), UNSCALED: ("model.attention.scale=1",), FOLD: ("model.attention.scale=1",), UNIFORM: ()},
        "comparisons": tuple(c for c in compared if c.study in chosen),
        "predictions": foretold if "recall" in chosen else {},
        **changes,
    }
    return AblationConfig(**whole)


Steps = int | None
"""Steps to solve, None for never."""

TIMES: dict[tuple[str, str, str], Steps] = {
    **{(SCALED, "128", rate): steps for rate, steps in zip(RATES, (117, 90, 67, 90, 180), strict=True)},
    **{(UNSCALED, "128", rate): steps for rate, steps in zip(RATES, (469, 700, None, None, None), strict=True)},
    **{(SCALED, "8", rate): steps for rate, steps in zip(RATES, (280, 200, 134, 200, 316), strict=True)},
    **{(UNSCALED, "8", rate): steps for rate, steps in zip(RATES, (294, 230, 177, 260, None), strict=True)},
}
STABLE: dict[tuple[str, str, str], float] = {
    **{("stability_adamw", SCALED, dim): 0.0125 for dim in ("8", "128")},
    **{("stability_adamw", FOLD, dim): 0.0125 for dim in ("8", "128")},
    ("stability_adamw", UNSCALED, "8"): 0.0125 / 1.6,
    ("stability_adamw", UNSCALED, "128"): 0.0125 / 3.2,
    **{("stability_sgd", arm, dim): 0.09 for arm in (SCALED, FOLD) for dim in ("8", "128")},
    ("stability_sgd", UNSCALED, "8"): 0.09 / 2.4,
    ("stability_sgd", UNSCALED, "128"): 0.09 / 11.3,
    ("text_stability", SCALED, ""): 0.012,
    ("text_stability", UNSCALED, ""): 0.005,
}
LOSSES: dict[tuple[str, str], float] = {
    **{(SCALED, rate): loss for rate, loss in zip(TEXT_RATES, (1.68, 1.56, 1.80), strict=True)},
    **{(UNSCALED, rate): loss for rate, loss in zip(TEXT_RATES, (2.42, 2.43, 2.46), strict=True)},
    **{(UNIFORM, rate): loss for rate, loss in zip(TEXT_RATES, (2.24, UNIFORM_LEVEL, 2.3), strict=True)},
}


@dataclass(frozen=True)
class Truth:
    """What the fabricated runs do. Give a mapping in part: what it does not name is taken from the tables above.

    Attributes:
        times: (arm, head_dim, rate) to the median steps to solve ``recall``, None for never; or a mapping from seed to it.
        stable: (study, arm, head_dim or "") to the median largest stable rate; or a mapping from seed to it.
        losses: (arm, rate) to the last loss of ``text``; or a mapping from seed to it.
        outcomes: (study, arm, rate) to an outcome of the protocol, which then gives the run's curve.
        statuses: (study, arm, rate, seed) to ``failed``, ``not run`` or ``missing``; None in a place stands for any.
        spread: a seed's own factor on times and largest stable rates lies between 1 / spread and spread.
        equal: whether the arms of ``null`` have the same losses.
        prune: leave runs out as the study's ``prune`` says.
    """

    times: Mapping[tuple[str, str, str], Any] = field(default_factory=dict)
    stable: Mapping[tuple[str, str, str], Any] = field(default_factory=dict)
    losses: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    outcomes: Mapping[tuple[str, str, str], str] = field(default_factory=dict)
    statuses: Mapping[tuple[str | None, str | None, str | None, int | None], str] = field(default_factory=dict)
    spread: float = 1.06
    equal: bool = True
    prune: bool = True

    def jitter(self, *key: object) -> float:
        """A factor that is the same whenever it is asked for."""
        return float(self.spread ** random.Random(repr(key)).uniform(-1, 1))

    def time(self, arm: str, dim: str, rate: str, seed: int, cap: int) -> Steps:
        found = self.times.get((arm, dim, rate), TIMES.get((arm, dim, rate)))
        if isinstance(found, Mapping):
            found = found[seed]
        elif found is not None:
            found = round(found * self.jitter("time", arm, dim, seed))
        return found if found is not None and found <= cap else None

    def largest_stable(self, study: str, arm: str, dim: str, seed: int) -> float:
        found = self.stable.get((study, arm, dim), STABLE.get((study, arm, dim), 1.0))
        return float(found[seed]) if isinstance(found, Mapping) else found * self.jitter("stable", study, arm, dim, seed)

    def last_loss(self, arm: str, rate: str, seed: int) -> float:
        found = self.losses.get((arm, rate), LOSSES.get((arm, rate), 2.0))
        return float(found[seed]) if isinstance(found, Mapping) else found + 0.01 * (self.jitter("loss", arm, seed) - 1)

    def status(self, place: Place) -> str:
        own = (place.study, place.arm, dict(place.factors).get("lr", ""), place.seed)
        fits = (s for key, s in self.statuses.items() if all(k in (None, o) for k, o in zip(key, own, strict=True)))
        return next(fits, "done")


def places(grid: AblationConfig) -> list[Place]:
    """Every place of a grid."""
    return [cell.place for cell in cells(grid)]


def cap_of(config: StudyConfig) -> int:
    """``trainer.max_steps`` of a study."""
    return int(next(item.partition("=")[2] for item in config.base if item.startswith("trainer.max_steps=")))


def records(grid: AblationConfig, truth: Truth | None = None) -> list[Record]:
    """A record for every run of the grid that is not missing."""
    truth = truth or Truth()
    return [record for cell in cells(grid) for record in _record(grid, cell, truth)]


def runs(grid: AblationConfig, truth: Truth | None = None) -> Runs:
    """The runs of the grid with ``records`` of it."""
    return Runs.of(places(grid), records(grid, truth))


def _record(grid: AblationConfig, cell: Cell, truth: Truth) -> Iterator[Record]:
    status = truth.status(cell.place)
    if truth.prune and status == "done" and _is_pruned(grid, cell.place, truth):
        status = "not run"
    if status == "missing":
        return
    reasons = {"failed": "RuntimeError: out of memory", "not run": "a lower rate did not work"}
    result = _result(cell.place, cell.steps(), truth) if status == "done" else None
    what = {"status": status, "reason": reasons.get(status, ""), "seconds": 1.5, "result": result}
    yield {**cell.describe(Path("runs/made_up")), **what}


def _is_pruned(grid: AblationConfig, place: Place, truth: Truth) -> bool:
    config, factors = grid.studies[place.study], dict(place.factors)
    lower = [rate for rate in config.factors.get("lr", {}) if float(rate) < float(factors["lr"])]
    if config.prune == "lost":
        largest = truth.largest_stable(place.study, place.arm, factors.get("head_dim", ""), place.seed)
        return any(worst_accuracy(float(rate), largest) < config.stable.lost for rate in lower)
    if config.prune == "unsolved":
        cap, dim = cap_of(config), factors["head_dim"]
        solved = [any(truth.time(place.arm, dim, rate, seed, cap) for seed in config.tune_seeds) for rate in lower]
        ends = [i for i in range(1, len(solved)) if not solved[i - 1] and not solved[i] and any(solved[:i])]
        return bool(ends)
    return False


def _result(place: Place, cap: int, truth: Truth) -> dict[str, Any]:
    factors = dict(place.factors)
    rate, dim = factors.get("lr", ""), factors.get("head_dim", "")
    outcome = truth.outcomes.get((place.study, place.arm, rate))
    rng = np.random.default_rng(list(str(place).encode()))
    accuracy: np.ndarray | None = None
    if place.study in ("recall", "solved"):
        steps = truth.time(place.arm, dim, rate, place.seed, cap) if place.study == "recall" else 100 + place.seed
        accuracy = learning_curve(steps, cap)
    elif place.study.startswith("stability"):
        largest = truth.largest_stable(place.study, place.arm, dim, place.seed)
        accuracy = continued_curve(worst_accuracy(float(rate), largest), cap)
    elif place.study == "null":
        rng = np.random.default_rng(place.seed + (0 if truth.equal or place.arm == SCALED else 1000))
        accuracy = learning_curve(None, cap)
    if accuracy is not None:
        loss = 2.77 * (1 - accuracy) / (1 - CHANCE) + 0.02 * rng.random(len(accuracy))
    elif place.study == "text_stability":
        largest = truth.largest_stable(place.study, place.arm, dim, place.seed)
        loss = text_curve(outcome or "TRAINED", 1.6 + 0.3 + 1.2 * np.log10(float(rate) / largest), cap, start=1.6)
    else:
        end = truth.last_loss(place.arm, rate, place.seed) if place.study == "text" else 1.6
        loss = text_curve(outcome or "TRAINED", end, cap)
    numbers: list[float | None] = [float(f"{value:.5g}") for value in loss]
    rights = None if accuracy is None else [float(value) for value in accuracy]
    broken = None
    if outcome == "NONFINITE":
        broken = max(2, len(numbers) // 2)
        numbers = [*numbers[: broken - 1], None]
        rights = rights and rights[:broken]
    last = sum(loss[-8:]) / len(loss[-8:])
    return {
        "steps": len(numbers),
        "cap": cap,
        "loss": numbers,
        "accuracy": rights,
        "gradient": [float(f"{0.5 + value:.5g}") for value in rng.random(len(numbers))],
        "nonfinite_step": broken,
        "val_loss": None if broken else float(f"{last:.5g}"),
        "val_accuracy": None if broken or rights is None else float(np.mean(rights[-8:])),
        "floors": {"unigram": UNIGRAM, "bigram": BIGRAM} if place.study.startswith("text") else {},
        "digest": hashlib.sha256(np.array(numbers, dtype=np.float64).tobytes()).hexdigest(),
        "parameters": 199_168,
        "start_error": 3e-7 if place.study.startswith(("stability", "text_s")) else None,
        "measures": {},
        "probes": [_probe(step, place.arm) for step in range(1, len(numbers) + 1, 20)],
        "attention": _attention(len(numbers), place) if place.study.startswith("stability") else {},
    }


def learning_curve(solved_at: Steps, cap: int) -> np.ndarray:
    """Accuracy whose mean over 16 steps first reaches .9 at step ``solved_at`` (at least 17) and .99 15 steps later; 16 more follow."""
    if solved_at is None:
        return np.linspace(CHANCE, 0.15, cap)
    before = np.linspace(CHANCE, 0.7, solved_at - WINDOW)
    return np.concatenate([before, np.full(WINDOW, 0.91), np.ones(2 * WINDOW - 1)])[:cap]


def worst_accuracy(rate: float, largest: float) -> float:
    """A worst accuracy that falls by .3 a decade of the rate near the largest stable one, where it is .9, and steeply above."""
    above = np.log10(rate / largest)
    return float(np.clip(0.9 - 0.3 * above - 2.0 * max(0.0, above - 0.25), CHANCE, 0.999))


def continued_curve(worst: float, steps: int) -> np.ndarray:
    """Accuracy that is ``worst`` from step 20 to 28; below one half it stays there."""
    curve = np.full(steps, 0.999)
    curve[20 : 29 if worst >= 0.5 else steps] = worst
    return curve


def text_curve(outcome: str, end: float, steps: int, start: float = INITIAL) -> np.ndarray:
    """Loss of ``outcome`` (section 5a) that ends at ``end``, or where the outcome must end; from ``start``."""
    ends = {
        "DIVERGED": INITIAL + 1.0,
        "NEVER LEARNED": UNIGRAM - 0.05,
        "LEARNED AND LOST": UNIFORM_LEVEL + 0.1,
        "STUCK": UNIFORM_LEVEL,
    }
    end = ends.get(outcome, end)
    curve = end + (start - end) * np.exp(-np.arange(steps) / (steps / 25))
    middle = slice(int(0.4 * steps), int(0.5 * steps))
    if outcome == "LEARNED AND LOST":
        curve[steps // 5 : middle.stop] = UNIFORM_LEVEL - 0.5
    if outcome == "SPIKED, RECOVERED":
        curve[middle] += 1.0
    if outcome == "SPIKED, NOT RECOVERED":
        curve[: middle.start] = np.minimum(curve[: middle.start], end)
        curve[middle.start :] = end
        curve[5 : middle.start] = end - 0.7
    return curve


def _probe(step: int, arm: str) -> dict[str, Any]:
    large = arm == UNSCALED
    layer = {
        "max_logit": 30.0 if large else 5.0,
        "entropy": 0.2 if large else 0.8,
        "saturation_90": 0.7 if large else 0.1,
        "logit_std": 11.3 if large else 1.0,
        "max_weight": 0.9 if large else 0.3,
    }
    return {"step": step, "layers": [layer]}


def _attention(steps: int, place: Place) -> dict[str, Any]:
    rng = np.random.default_rng(place.seed)
    rows = rng.dirichlet(np.ones(17), size=(2, 17)).round(4)
    return {"0": rows.tolist(), str(steps): rows.tolist()}
