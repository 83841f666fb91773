"""The outcome of each run, by rules that are the same for all arms, and the size of its gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from scipy.ndimage import median_filter

from minitx.ablation.design import Solved
from minitx.ablation.records import Run, Runs, solved_step

Outcome = Literal[
    "NONFINITE",
    "DIVERGED",
    "NEVER LEARNED",
    "LEARNED AND LOST",
    "STUCK",
    "SPIKED, RECOVERED",
    "SPIKED, NOT RECOVERED",
    "TRAINED",
]

END = 50
"""The number of steps in the mean at the end of a run."""
UNIFORM_ACCURACY = 0.17
"""The accuracy in recall with uniform attention (protocol, section 5a)."""
_SMOOTHED, _SETTLED = 5, 5


@dataclass(frozen=True)
class Levels:
    """The reference values for the outcome of a run.

    Attributes:
        initial: the loss of the untrained network, also for continued runs (``initial_loss``).
        unigram: the loss of predicting each token by its frequency. None for tasks that are judged by accuracy.
        uniform: the final loss, or accuracy, of an arm with uniform attention after the same number of steps. If it is None,
            text skips the outcomes that need it, and recall uses .17.
        solved: when a task with an accuracy counts as solved.
    """

    initial: float | None
    unigram: float | None = None
    uniform: float | None = None
    solved: Solved = field(default_factory=Solved)


def outcome(run: Run, levels: Levels) -> Outcome:
    """Return the outcome of a finished run: the first rule that applies (protocol, section 5a)."""
    result = run.result
    if result["nonfinite_step"] is not None or None in result["loss"]:
        return "NONFINITE"
    if levels.initial is not None and last_mean(run, "loss") > levels.initial:
        return "DIVERGED"
    loss = median_filter(np.array(result["loss"], dtype=float), size=_SMOOTHED, mode="nearest")
    is_text = levels.unigram is not None or result["accuracy"] is None
    early = _of_loss(run, levels, float(loss.min())) if is_text else _of_accuracy(run, levels)
    return early or _of_spikes(loss)


def _of_loss(run: Run, levels: Levels, least: float) -> Outcome | None:
    if levels.unigram is not None and least > levels.unigram - 0.3:
        return "NEVER LEARNED"
    if levels.uniform is not None and last_mean(run, "loss") >= levels.uniform - 0.05:
        return "LEARNED AND LOST" if least <= levels.uniform - 0.3 else "STUCK"
    return None


def _of_accuracy(run: Run, levels: Levels) -> Outcome | None:
    solved, uniform = levels.solved, levels.uniform if levels.uniform is not None else UNIFORM_ACCURACY
    had_solved = run.record.get("start") is not None or solved_step(run.result, solved) is not None
    if not had_solved and solved_step(run.result, Solved(value=uniform + 0.1, window=solved.window)) is None:
        return "NEVER LEARNED"
    return "LEARNED AND LOST" if had_solved and last_mean(run, "accuracy") < 0.5 else None


def _of_spikes(loss: Any) -> Outcome:
    """From the smoothed loss, step 5 on."""
    loss = loss[_SETTLED - 1 :]
    least = np.minimum.accumulate(loss)
    spikes = np.flatnonzero(loss >= least + 0.5)
    if not len(spikes):
        return "TRAINED"
    last = spikes[-1]
    return "SPIKED, RECOVERED" if (loss[last:] <= least[last] + 0.1).any() else "SPIKED, NOT RECOVERED"


def initial_loss(runs: Runs, run: Run) -> float | None:
    """Return the loss of the untrained network, also for a run that started from another run's weights. None if it is not finite."""
    first = runs.start_of(run)
    return initial_loss(runs, first) if first is not None and first.status == "done" else run.result["loss"][0]


def last_mean(run: Run, curve: Literal["loss", "accuracy"], steps: int = END) -> float:
    """Return the mean of a curve over its last ``steps``. A NONFINITE run has infinite loss and accuracy 0."""
    values = run.result[curve][-steps:]
    if run.result["nonfinite_step"] is not None or None in values:
        return math.inf if curve == "loss" else 0.0
    return float(np.mean(values))


def gradient_norms(run: Run) -> tuple[float, float] | None:
    """Return the 99th percentile and the maximum of the gradient norm from step 10 on, or None if it was not logged.

    The norm leaves out W_Q and W_K, so that folding the scale into them does not change it.
    """
    norms = [norm for norm in (run.result["gradient"] or [])[9:] if norm is not None]
    return (float(np.percentile(norms, 99)), max(norms)) if norms else None
