"""A fabricated grid and records whose truth is known: what the judge, the figures and the report are tested on."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minitx.ablation import design
from minitx.ablation.design import ComparisonConfig, LawConfig
from minitx.ablation.grid import Runs, cells
from minitx.ablation.judge import judge

SCALED, UNSCALED, FOLD = "inv_sqrt", "unscaled", "full_fold"
BOTH = (SCALED, UNSCALED)
RATES = ("1e-3", "1.8e-3", "3.2e-3", "5.6e-3", "1e-2")
SEEDS = (10, 11, 12, 13, 14, 15)
CHANCE, WINDOW, BRACKET = 1 / 16, 16, 2 ** (1 / 32)
WORDS = {SCALED: "with the scale", UNSCALED: "without the scale", FOLD: "scale in the weights", "head_dim": "d_k", "init": "weights",
         "lecun": "of LeCun", "gpt2": "of GPT-2", "trained": "trained", "qk": "W_Q and W_K", "rest": "all else"}  # fmt: skip
META = {"commit": "c0ffee", "command": "make ablation", "date": "2026-01-02", "hardware": "2 cores",
        "versions": {"torch": "2.13"}, "wall_seconds": 301.5}  # fmt: skip
OPTIONS = {
    **{"widths": {"wide": "128", "narrow": "8"}, "optimizers": {"AdamW": "adamw", "SGD": "sgd"}, "time": {"AdamW": "recall"}},
    **{"inits": {"large": "lecun", "small": "gpt2"}, "curves": {"SGD": "shown"}, "shown": {"SGD": "1e-2"}},
    **{"attention": "shown", "text": ["text"]},
}
"""Of the report about the scale."""


def levels(key, values):
    """The levels of a factor that sets one key."""
    return {value: (f"{key}={value}",) for value in values}


def studies(*names):
    """The studies of a grid about the scale in small; given names, those and what they start from."""
    dims = {"head_dim": levels("model.num_heads", ("8", "128"))}
    start, rates = design.StartConfig(study="solved", arm=SCALED), {"lr": levels("optimizer.lr", RATES)}
    threshold = design.ThresholdConfig(first={SCALED: 0.01, UNSCALED: 0.01})

    def study(title, steps, arms, factors, **rest):
        return design.StudyConfig(
            title=title, base=(f"trainer.max_steps={steps}",), arms=arms, factors=factors, seeds=SEEDS, **rest
        )

    parts = {"trained": levels("optimizer.rules", ("all", "qk", "rest"))}
    skip = ({"arm": (UNSCALED,), "trained": ("qk", "rest")},)
    found = {
        "recall": study("Recall", 1500, BOTH, {"init": levels("model.init", ("lecun", "gpt2")), **rates}, scores=("time",)),
        "solved": study("Models that solved recall", 1500, (SCALED,), dims),
        "adamw": study("AdamW", 200, BOTH, {**dims, **parts}, start=start, threshold=threshold, skip=skip),
        "sgd": study("SGD", 200, BOTH, dims, start=start, threshold=threshold),
        "shown": study("Shown", 20, BOTH, {**dims, "lr": rates["lr"]}, start=start, keep_attention=True),
        "text": study("Text", 120, BOTH, rates, scores=("loss",)),
        "null": study("Null control", 30, (SCALED, FOLD), {}, scores=("equal",)),
    }
    return {name: one for name, one in found.items() if not names or name in (*names, "solved")}


def grid(*names, **changes):
    """The grid with all studies, or some; comparisons and predictions of studies that it leaves out are left out too."""
    chosen = changes.setdefault("studies", studies(*names))
    laws = {
        "adamw": LawConfig(factor="head_dim", power=0.25, text="d_k^¼", parts="trained"),
        "sgd": LawConfig(factor="head_dim", power=0.5, text="√d_k"),
    }
    compared = (name for name in ("recall", "adamw", "sgd", "text", "null") if name in chosen)
    whole = {
        **{"name": "made_up", "question": "Does attention need the scale?", "words": WORDS},
        "arms": {SCALED: (), UNSCALED: ("model.scale=1",), FOLD: ("model.scale=1",)},
        "comparisons": tuple(ComparisonConfig(study=name, arms=chosen[name].arms, law=laws.get(name)) for name in compared),
        **changes,
    }
    return design.AblationConfig(**whole)


def foretold(study, endpoint, low, high, over=None, **rest):
    """A prediction of one range."""
    over = over and design.OverConfig(study=over[0], arms=BOTH, condition=over[1])
    expected = design.ExpectedConfig(study=study, arms=BOTH, endpoint=endpoint, range=(low, high), over=over, **rest)
    return {"P": design.PredictionConfig(statement="It is so.", expect=(expected,))}


def findings(*names, truth=None, seeds=6, fields=None, **changes):
    """The findings of some studies (default all), with fewer seeds, and ``fields`` of the first study changed."""
    found = studies(*names)
    for name, study in found.items():
        changed = (fields or {}) if (name,) == names[:1] else {}
        found[name] = dataclasses.replace(study, **{"seeds": study.seeds[:seeds], **changed})
    config = grid(studies=found, **changes)
    return judge(config, runs(config, truth))


def of_the_scale(*names, options=None, **rest):
    """The same, with the module and the options of the scale."""
    return findings(*names, about="minitx.ablation.scaling", options={**OPTIONS, **(options or {})}, **rest)


def by_rate(rows):
    """A row of values, one for each rate, by (what stands before it, rate)."""
    return {(*place, rate): value for place, row in rows.items() for rate, value in zip(RATES, row, strict=True)}


TIMES = by_rate({
    (SCALED, "lecun"): (117, 90, 67, 90, 180), (UNSCALED, "lecun"): (469, 700, None, None, None),
    (SCALED, "gpt2"): (280, 200, 134, 200, 316), (UNSCALED, "gpt2"): (220, 160, 100, 160, None),
})  # fmt: skip
"""Steps to solve, None for never."""
REFERENCE = (("adamw", "all", 0.012), ("adamw", "qk", 0.015), ("adamw", "rest", 0.06), ("sgd", "", 0.09))
STABLE = {(study, SCALED, dim, part): rate for study, part, rate in REFERENCE for dim in ("8", "128")}
STABLE |= {("adamw", UNSCALED, "8", "all"): 0.012 / 1.55, ("adamw", UNSCALED, "128", "all"): 0.012 / 2.9,
           ("sgd", UNSCALED, "8", ""): 0.09 / 2.4, ("sgd", UNSCALED, "128", ""): 0.09 / 10.3}  # fmt: skip
"""Largest stable rates."""
LOSSES = by_rate({(SCALED,): (1.68, 1.6, 1.56, 1.7, 1.8), (UNSCALED,): (2.42, 2.42, 2.43, 2.45, 2.46)})


@dataclass(frozen=True)
class Truth:
    """What the fabricated runs do. Give a mapping in part: what it does not name is taken from the tables above.

    Attributes:
        times: (arm, init, rate) to the median steps to solve ``recall``, None for never; or a mapping from seed to it.
        stable: (study, arm, head_dim, trained) to the median largest stable rate; or a mapping from seed to it.
        losses: (arm, rate) to the last loss of ``text``. None: the run is not finite.
        statuses: (study, arm, rate, seed) to ``failed``, ``not run`` or ``missing``; None in a place stands for any.
        spread: a seed's own factor on times and largest stable rates lies between 1 / spread and spread.
        equal: whether the arms of ``null`` have the same losses.
    """

    times: Mapping[tuple, Any] = field(default_factory=dict)
    stable: Mapping[tuple, Any] = field(default_factory=dict)
    losses: Mapping[tuple, Any] = field(default_factory=dict)
    statuses: Mapping[tuple, str] = field(default_factory=dict)
    spread: float = 1.06
    equal: bool = True

    def jitter(self, *key):
        """A factor that is the same whenever it is asked for."""
        return float(self.spread ** random.Random(repr(key)).uniform(-1, 1))

    def time(self, arm, init, rate, seed, cap):
        found = self.times.get((arm, init, rate), TIMES.get((arm, init, rate)))
        if isinstance(found, Mapping):
            found = found[seed]
        elif found is not None:
            found = round(found * self.jitter("time", arm, init, seed))
        return found if found is not None and found <= cap else None

    def largest_stable(self, *place, seed):
        found = self.stable.get(place, STABLE.get(place))
        return float(found[seed]) if isinstance(found, Mapping) else found * self.jitter("stable", *place, seed)

    def last_loss(self, arm, rate, seed):
        found = self.losses.get((arm, rate), LOSSES.get((arm, rate), 2.0))
        return None if found is None else found + 0.01 * (self.jitter("loss", arm, seed) - 1)

    def status(self, place):
        own = (place.study, place.arm, place.rate, place.seed)
        fits = (s for key, s in self.statuses.items() if all(k in (None, o) for k, o in zip(key, own, strict=True)))
        return next(fits, "done")


def records(grid, truth=None):
    """A record for every run of the grid that is not missing."""
    truth, found = truth or Truth(), []
    for cell in cells(grid):
        status = truth.status(cell.place)
        of = _threshold if grid.studies[cell.place.study].threshold else _result
        result = of(cell.place, cell.steps(), truth) if status == "done" else None
        reason = None if result else "RuntimeError: out of memory"
        what = {"status": status, "reason": reason, "seconds": 1.5, "result": result}
        found.append({**cell.describe(Path("runs/made_up")), **what})
    return [record for record in found if record["status"] != "missing"]


def runs(grid, truth=None):
    """The runs of the grid with ``records`` of it."""
    return Runs.of([cell.place for cell in cells(grid)], records(grid, truth))


def _threshold(place, cap, truth):
    factors = dict(place.factors)
    largest = truth.largest_stable(place.study, place.arm, factors["head_dim"], factors.get("trained", ""), seed=place.seed)
    ends = {"low": largest / BRACKET, "high": largest * BRACKET, "above": [], "start": None}
    return {**ends, "cap": cap, "parameters": 122_496, "start_error": 3e-7, "runs": []}


def _result(place, cap, truth):
    rng, accuracy, broken = np.random.default_rng(list(str(place).encode())), None, None
    if place.study == "recall":
        accuracy = learning_curve(truth.time(place.arm, dict(place.factors)["init"], place.rate, place.seed, cap), cap)
    elif place.study == "solved":
        accuracy = learning_curve(100 + place.seed, cap)
    elif place.study == "null":
        rng = np.random.default_rng(place.seed + (0 if truth.equal or place.arm == SCALED else 1000))
        accuracy = learning_curve(None, cap)
    if accuracy is not None:
        loss = 2.77 * (1 - accuracy) / (1 - CHANCE) + 0.02 * rng.random(len(accuracy))
    else:
        end = truth.last_loss(place.arm, place.rate, place.seed) if place.study == "text" else 1.6
        loss = np.linspace(4.2, 4.2 if end is None else end, cap)
        broken = cap // 2 if end is None else None
    numbers, rights = loss.round(5).tolist()[: broken or cap], None if accuracy is None else accuracy.tolist()
    rows = np.random.default_rng(place.seed).dirichlet(np.ones(17), size=(2, 17)).round(4).tolist()
    return {
        **{"steps": len(numbers), "cap": cap, "loss": numbers, "accuracy": rights, "nonfinite_step": broken},
        "val_loss": None if broken else float(loss[-1].round(5)),
        "val_accuracy": None if broken or rights is None else float(np.mean(rights[-8:])),
        "floors": {"unigram": 3.3} if place.study == "text" else {},
        "digest": hashlib.sha256(np.array(numbers, dtype=np.float64).tobytes()).hexdigest(),
        **{"parameters": 122_496, "measures": {}, "start_error": None, "probes": []},
        "attention": {"0": rows, str(len(numbers)): rows} if place.study == "shown" else {},
    }


def learning_curve(solved_at, cap):
    """Accuracy whose mean over 16 steps first reaches .9 at step ``solved_at`` (at least 17) and .99 15 steps later; 16 more follow."""
    if solved_at is None:
        return np.linspace(CHANCE, 0.15, cap)
    before = np.linspace(CHANCE, 0.7, solved_at - WINDOW)
    return np.concatenate([before, np.full(WINDOW, 0.91), np.ones(2 * WINDOW - 1)])[:cap]
