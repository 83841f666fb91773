"""Fabricated grids and records whose truth is known: what the judge, the figures and the report are tested on."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minitx.ablation.design import (
    AblationConfig,
    ComparisonConfig,
    ExpectedConfig,
    LawConfig,
    PredictionConfig,
    Stable,
    StartConfig,
    StudyConfig,
)
from minitx.ablation.execution import Rules
from minitx.ablation.grid import cells
from minitx.ablation.judge import judge
from minitx.ablation.records import Runs

SCALED, UNSCALED, FOLD, UNIFORM = "inv_sqrt", "unscaled", "full_fold", "uniform"
BOTH, WIDE = (SCALED, UNSCALED), {"head_dim": "128"}
RATES = ("1e-3", "1.8e-3", "3.2e-3", "5.6e-3", "1e-2")
ADAMW_RATES = (*RATES, "1.8e-2", "3.2e-2")
SGD_RATES = ("3.2e-3", "5.6e-3", "1e-2", "1.8e-2", "3.2e-2", "5.6e-2", "1e-1", "1.8e-1", "3.2e-1")
TEXT_RATES = ("1e-3", "3.2e-3", "1e-2")
CONTINUED_RATES = ("3.2e-3", "5.6e-3", "1e-2", "1.8e-2")
TUNE_SEEDS, SEEDS = (0, 1), (10, 11, 12, 13, 14, 15)
CHANCE, INITIAL, UNIGRAM, UNIFORM_LEVEL = 1 / 16, 4.2, 3.3, 2.2
WINDOW = 16
WORDS = {SCALED: "with the scale", UNSCALED: "without the scale", FOLD: "scale in the weights", UNIFORM: "plain average",
         "head_dim": "d_k", "stability_adamw": "trained on with AdamW", "stability_sgd": "trained on with SGD", "null": "null control"}  # fmt: skip
META = {"commit": "c0ffee", "command": "make ablation", "date": "2026-01-02", "hardware": "2 cores",
        "versions": {"torch": "2.13"}, "wall_seconds": 301.5}  # fmt: skip
OPTIONS = {
    **{"where": {}, "task": "look up a value", "last_row": "", "asserted": ["R1"], "published": {}},
    **{"settings": {"128": "one head, d_k = 128"}, "chance": CHANCE, "time": "recall", "text": ["text_stability"]},
    "continued": {
        "AdamW": {"study": "stability_adamw", "shown": "stability_adamw", "rate": "1e-2"},
        "SGD": {"study": "stability_sgd", "shown": "stability_sgd", "rate": "3.2e-2"},
    },
    **{"attention": {"shown": "stability_adamw", "rate": "1e-2"}, "scratch": ["text"]},
}
"""Of the scaling ablation."""


def studies(*names):
    """The studies of the protocol's ``record`` grid in small; given names, those and what they start from."""
    dims = levels("model.attention.head_dim", ("8", "128"))
    three, once = (SCALED, UNSCALED, FOLD), {"start": StartConfig(study="solved", arm=SCALED), "scores": ("stability",)}
    from_text = {**once, "start": StartConfig(study="text_first", arm=SCALED, solved=False)}
    loss = Stable(metric="train_loss", value=0.3, window=30)

    def study(title, steps, arms, dims=None, rates=(), **rest):
        factors = ({"head_dim": dims} if dims else {}) | ({"lr": levels("optimizer.lr", rates)} if rates else {})
        return StudyConfig(title=title, base=(f"trainer.max_steps={steps}",), arms=arms, factors=factors, seeds=SEEDS, **rest)

    found = {
        "recall": study(
            "Recall from scratch", 1500, BOTH, dims, RATES, tune_seeds=TUNE_SEEDS, prune="unsolved", scores=("time",)
        ),
        "solved": study("Models that solved recall", 1500, (SCALED,), dims),
        "stability_adamw": study("From a solved model", 200, three, dims, ADAMW_RATES, prune="lost", **once),
        "stability_sgd": study("From a solved model", 200, three, dims, SGD_RATES, prune="lost", **once),
        "text": study("Text from scratch", 120, (*BOTH, UNIFORM), None, TEXT_RATES, scores=("loss",)),
        "text_first": study("Models trained on text", 80, (SCALED,)),
        "text_stability": study("From a model trained on text", 150, BOTH, None, CONTINUED_RATES, stable=loss, **from_text),
        "null": study("Null control", 30, (SCALED, FOLD), scores=("equal",)),
    }
    return {name: one for name, one in found.items() if not names or name in (*names, "solved", "text_first")}


def levels(key, values):
    """The levels of a factor that sets one key."""
    return {value: (f"{key}={value}",) for value in values}


def grid(*names, **changes):
    """The grid with all studies, or some; comparisons and predictions of studies that it leaves out are left out too."""
    chosen = changes.setdefault("studies", studies(*names))

    def compared(study, arms=BOTH, power=None, text="", **rest):
        law = None if power is None else LawConfig(factor="head_dim", power=power, text=text)
        return ComparisonConfig(study=study, arms=arms, law=law, **rest)

    comparisons = (
        compared("recall", primary=(WIDE,)),
        compared("stability_adamw", power=0.25, text="d_k^¼", primary=(WIDE,)),
        compared("stability_sgd", power=0.5, text="√d_k", primary=(WIDE,)),
        compared("stability_adamw", (SCALED, FOLD)),
        compared("text"),
        compared("text_stability"),
        compared("null", (SCALED, FOLD)),
    )
    later = ExpectedConfig(study="recall", arms=BOTH, endpoint="time", verdict="SLOWER", ratio=(4.0, None), condition=WIDE)
    foretold = {"Q1": PredictionConfig(statement="Without the scale the task is learned four times later.", expect=(later,))}
    whole = {
        **{"name": "made_up", "question": "Does attention need the scale?", "words": WORDS},
        "arms": {SCALED: (), UNSCALED: ("model.attention.scale=1",), FOLD: ("model.attention.scale=1",), UNIFORM: ()},
        "comparisons": tuple(c for c in comparisons if c.study in chosen),
        "predictions": foretold if "recall" in chosen else {},
        **changes,
    }
    return AblationConfig(**whole)


def findings(*names, truth=None, dims=(), seeds=6, fields=None, **changes):
    """The findings of some studies (default all); with some d_k, fewer seeds, and ``fields`` of the first study changed."""
    found = studies(*names)
    for name, study in found.items():
        factors = dict(study.factors)
        if dims and "head_dim" in factors:
            factors["head_dim"] = {dim: factors["head_dim"][dim] for dim in dims}
        changed = (fields or {}) if (name,) == names[:1] else {}
        found[name] = dataclasses.replace(study, **{"factors": factors, "seeds": study.seeds[:seeds], **changed})
    config = grid(studies=found, **changes)
    return judge(config, runs(config, truth))


def of_the_scale(*names, options=None, **rest):
    """The same, with the module and the options of the scaling ablation."""
    return findings(*names, about="minitx.ablation.scaling", options={**OPTIONS, **(options or {})}, **rest)


TIMES = {
    **{(SCALED, "128", rate): steps for rate, steps in zip(RATES, (117, 90, 67, 90, 180), strict=True)},
    **{(UNSCALED, "128", rate): steps for rate, steps in zip(RATES, (469, 700, None, None, None), strict=True)},
    **{(SCALED, "8", rate): steps for rate, steps in zip(RATES, (280, 200, 134, 200, 316), strict=True)},
    **{(UNSCALED, "8", rate): steps for rate, steps in zip(RATES, (294, 230, 177, 260, None), strict=True)},
}
"""Steps to solve, None for never."""
STABLE = {
    **{("stability_adamw", arm, dim): 0.0125 for arm in (SCALED, FOLD) for dim in ("8", "128")},
    **{("stability_adamw", UNSCALED, "8"): 0.0125 / 1.6, ("stability_adamw", UNSCALED, "128"): 0.0125 / 3.2},
    **{("stability_sgd", arm, dim): 0.09 for arm in (SCALED, FOLD) for dim in ("8", "128")},
    **{("stability_sgd", UNSCALED, "8"): 0.09 / 2.4, ("stability_sgd", UNSCALED, "128"): 0.09 / 11.3},
    **{("text_stability", SCALED, ""): 0.012, ("text_stability", UNSCALED, ""): 0.005},
}
LOSSES = {
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

    times: Mapping[tuple, Any] = field(default_factory=dict)
    stable: Mapping[tuple, Any] = field(default_factory=dict)
    losses: Mapping[tuple, Any] = field(default_factory=dict)
    outcomes: Mapping[tuple, str] = field(default_factory=dict)
    statuses: Mapping[tuple, str] = field(default_factory=dict)
    spread: float = 1.06
    equal: bool = True
    prune: bool = True

    def jitter(self, *key):
        """A factor that is the same whenever it is asked for."""
        return float(self.spread ** random.Random(repr(key)).uniform(-1, 1))

    def time(self, arm, dim, rate, seed, cap):
        found = self.times.get((arm, dim, rate), TIMES.get((arm, dim, rate)))
        if isinstance(found, Mapping):
            found = found[seed]
        elif found is not None:
            found = round(found * self.jitter("time", arm, dim, seed))
        return found if found is not None and found <= cap else None

    def largest_stable(self, study, arm, dim, seed):
        found = self.stable.get((study, arm, dim), STABLE.get((study, arm, dim), 1.0))
        return float(found[seed]) if isinstance(found, Mapping) else found * self.jitter("stable", study, arm, dim, seed)

    def last_loss(self, arm, rate, seed):
        found = self.losses.get((arm, rate), LOSSES.get((arm, rate), 2.0))
        return float(found[seed]) if isinstance(found, Mapping) else found + 0.01 * (self.jitter("loss", arm, seed) - 1)

    def status(self, place):
        own = (place.study, place.arm, place.rate, place.seed)
        fits = (s for key, s in self.statuses.items() if all(k in (None, o) for k, o in zip(key, own, strict=True)))
        return next(fits, "done")


def records(grid, truth=None):
    """A record for every run of the grid that is not missing. What a rule of the grid leaves out is not run."""
    truth, chosen, found = truth or Truth(), cells(grid), {}
    rules, reasons = Rules(grid, chosen), {"failed": "RuntimeError: out of memory", "not run": "a lower rate did not work"}

    def add(cell):
        for other in rules.waits_for(cell) if truth.prune else ():
            if other.place not in found:
                add(other)
        status = truth.status(cell.place)
        if status == "done" and truth.prune and rules.why_not(cell, found):
            status = "not run"
        result = _result(cell.place, cell.steps(), truth) if status == "done" else None
        what = {"status": status, "reason": reasons.get(status, ""), "seconds": 1.5, "result": result}
        found[cell.place] = {**cell.describe(Path("runs/made_up")), **what}

    for cell in chosen:
        add(cell)
    return [record for record in found.values() if record["status"] != "missing"]


def runs(grid, truth=None):
    """The runs of the grid with ``records`` of it."""
    return Runs.of([cell.place for cell in cells(grid)], records(grid, truth))


def _result(place, cap, truth):
    rate, dim, accuracy = place.rate, dict(place.factors).get("head_dim", ""), None
    outcome, rng = truth.outcomes.get((place.study, place.arm, rate)), np.random.default_rng(list(str(place).encode()))
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
    numbers, rights, broken = loss.round(5).tolist(), None if accuracy is None else accuracy.tolist(), None
    if outcome == "NONFINITE":
        broken = max(2, len(numbers) // 2)
        numbers = [*numbers[: broken - 1], None]
        rights = rights and rights[:broken]
    probe = {"max_logit": 5.0, "entropy": 0.8, "saturation_90": 0.1, "logit_std": 1.0, "max_weight": 0.3}
    rows = np.random.default_rng(place.seed).dirichlet(np.ones(17), size=(2, 17)).round(4).tolist()
    return {
        **{"steps": len(numbers), "cap": cap, "loss": numbers, "accuracy": rights, "nonfinite_step": broken},
        "gradient": (0.5 + rng.random(len(numbers))).round(5).tolist(),
        "val_loss": None if broken else float(loss[-8:].mean().round(5)),
        "val_accuracy": None if broken or rights is None else float(np.mean(rights[-8:])),
        "floors": {"unigram": UNIGRAM} if place.study.startswith("text") else {},
        "digest": hashlib.sha256(np.array(numbers, dtype=np.float64).tobytes()).hexdigest(),
        **{"parameters": 199_168, "measures": {}},
        "start_error": 3e-7 if place.study.startswith(("stability", "text_s")) else None,
        "probes": [{"step": step, "layers": [probe]} for step in range(1, len(numbers) + 1, 20)],
        "attention": {"0": rows, str(len(numbers)): rows} if place.study.startswith("stability") else {},
    }


def learning_curve(solved_at, cap):
    """Accuracy whose mean over 16 steps first reaches .9 at step ``solved_at`` (at least 17) and .99 15 steps later; 16 more follow."""
    if solved_at is None:
        return np.linspace(CHANCE, 0.15, cap)
    before = np.linspace(CHANCE, 0.7, solved_at - WINDOW)
    return np.concatenate([before, np.full(WINDOW, 0.91), np.ones(2 * WINDOW - 1)])[:cap]


def worst_accuracy(rate, largest):
    """A worst accuracy that falls by .3 a decade of the rate near the largest stable one, where it is .9, and steeply above."""
    above = np.log10(rate / largest)
    return float(np.clip(0.9 - 0.3 * above - 2.0 * max(0.0, above - 0.25), CHANCE, 0.999))


def continued_curve(worst, steps):
    """Accuracy that is ``worst`` from step 20 to 28; below one half it stays there."""
    curve = np.full(steps, 0.999)
    curve[20 : 29 if worst >= 0.5 else steps] = worst
    return curve


def text_curve(outcome, end, steps, start=INITIAL):
    """Loss of ``outcome`` (section 5a) that ends at ``end``, or where the outcome must end; from ``start``."""
    ends = {"DIVERGED": INITIAL + 1.0, "NEVER LEARNED": UNIGRAM - 0.05}
    ends |= {"LEARNED AND LOST": UNIFORM_LEVEL + 0.1, "STUCK": UNIFORM_LEVEL}
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
