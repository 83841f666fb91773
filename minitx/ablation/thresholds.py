"""The largest stable learning rate of a trained model, by doubling and then bisection. Each rate is tried with one training run.

The runs are the same as with ``scripts/train.py``, ``optimizer.lr=RATE`` and the other overrides of the cell: they use the same
data, network, ``TrainingModule`` and Lightning loop. Data, network and starting weights are loaded once for all rates. A run is
not logged, saved or validated, and ends when it fails.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from minitx.ablation.design import ThresholdConfig
from minitx.ablation.measures import START_FILE, read_numbers, short
from minitx.config import RunConfig
from minitx.config.training import CALLBACKS
from minitx.training.devices import process_settings
from minitx.training.fit import build_all
from minitx.training.input_dtype import PURE, in_own_dtype
from minitx.training.json_lines import end_last_line, read_json_lines
from minitx.training.metrics_rows import step_means
from minitx.training.module import TrainingModule, build_module
from minitx.training.nonfinite import NonFiniteError
from minitx.training.run import open_parts
from minitx.training.step_callback import StepCallback
from minitx.training.trainer import build_trainer, quiet_lightning
from minitx.training.window import Window

RUNS_FILE = "runs.jsonl"
"""The file with the finished runs of an unfinished threshold, one per line, in the folder of its cell."""

MOST_DOUBLINGS = 40
"""The number of doublings or halvings of the first rate after which a search gives up."""


@dataclasses.dataclass(frozen=True)
class Bracket:
    """The result of ``search``: ``low`` is stable and ``high`` is not. ``above`` lists rates above ``high`` that were stable anyway."""

    low: float
    high: float
    above: list[float] = dataclasses.field(default_factory=list)


def search(is_stable: Callable[[float], bool], first: float, bisections: int) -> Bracket:
    """Find the largest stable rate. Double ``first`` until a rate fails (or halve it until one is stable), then bisect the logarithm.

    ``high / low`` is 2^(1 / 2^bisections): 1.044 with four bisections. Afterwards the rate 2 · ``high`` is tried, unless a
    rate that large was tried before, because there may be a second crossing. Rates are rounded to six significant digits.

    Raises:
        ArithmeticError: between ``first`` · 2^-40 and ``first`` · 2^40, no rate fails or no rate is stable.

    >>> search(lambda rate: rate < 3.0, first=1.0, bisections=2)
    Bracket(low=2.82843, high=3.36359, above=[])
    """
    tried: dict[float, bool] = {}

    def holds(power: float) -> bool:
        rate = float(f"{first * 2.0**power:.6g}")
        if rate not in tried:
            tried[rate] = is_stable(rate)
        return tried[rate]

    begins_stable = holds(0.0)
    step = 1 if begins_stable else -1
    crossing = next((power for power in range(step, step * (MOST_DOUBLINGS + 1), step) if holds(power) != begins_stable), None)
    if crossing is None:
        raise ArithmeticError(f"every rate from {min(tried):g} to {max(tried):g} is {'' if begins_stable else 'not '}stable")
    low, high = sorted((float(crossing), float(crossing - step)))
    for _ in range(bisections):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    if max(tried) < first * 2.0 ** (high + 1) * 0.999:
        holds(high + 1)
    lowest, highest = (float(f"{first * 2.0**power:.6g}") for power in (low, high))
    return Bracket(lowest, highest, sorted(rate for rate, stable in tried.items() if stable and rate > highest))


class Watch(StepCallback):
    """Record the curves of a run, and end the run when it fails.

    Args:
        rule: the definition of a failure. ``train_accuracy``: the mean over ``window`` steps falls below ``value``.
            ``train_loss``: the mean rises above ``start`` + ``value``, or with ``above: minimum`` above the lowest mean + ``value``.
        start: the mean loss of the model that the run starts from, on the first ``window`` batches.
    """

    def __init__(self, rule: ThresholdConfig, start: float) -> None:
        is_loss = rule.metric == "train_loss"
        self.window = Window(rule.metric, start + rule.value if is_loss else rule.value, rule.window, "threshold")
        self._worse = max if is_loss else min
        self._rise = rule.value if rule.above == "minimum" else None
        self._lowest = start
        self.losses: list[float] = []
        self.accuracies: list[float] = []
        self.worst: float | None = None
        self.failed = False

    def on_step(self, trainer: Any, module: TrainingModule, step: int, batch: Any) -> None:
        """Handle update ``step``, counted from 1."""
        means = step_means(trainer, module)
        self.losses.append(means["train_loss"])
        if "train_accuracy" in means:
            self.accuracies.append(means["train_accuracy"])
        mean = self.window.add(means)
        if mean is not None:
            judged = mean
            if self._rise is not None:
                self._lowest = mean if mean < self._lowest else self._lowest
                self.window.value, judged = self._lowest + self._rise, mean - self._lowest
            self.worst = judged if self.worst is None else self._worse(self.worst, judged)
            self.failed = not self.window.reaches(mean)
            trainer.should_stop = trainer.should_stop or self.failed


def measure_threshold(config: RunConfig, folder: Path, rule: ThresholdConfig) -> dict[str, Any]:
    """Return the ``result`` in the record of a threshold (see ``grid``). Finished runs are saved in ``folder`` and not repeated.

    Args:
        config: the config of the runs. The search starts at ``optimizer.lr``.
        rule: the definition of a stable run, and the number of bisections.

    Raises:
        ConfigError: the config cannot be run.
        ArithmeticError: see ``search``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUNS_FILE
    known = {run["rate"]: run for run in read_json_lines(path, ["rate", "stable"])}
    end_last_line(path)
    with quiet_lightning(), process_settings(config.trainer):
        runs = RateRuns(config, folder, rule)

        def is_stable(rate: float) -> bool:
            if rate not in known:
                known[rate] = runs.run(rate)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[rate]) + "\n")
            return bool(known[rate]["stable"])

        return {
            **vars(search(is_stable, config.optimizer.get("lr"), rule.bisections)),
            "first": config.optimizer.get("lr"),
            "start": short(runs.start),
            "cap": runs.config.trainer.max_steps,
            "parameters": sum(p.numel() for p in runs.network.parameters()),
            "start_error": read_numbers(folder / START_FILE).get("error"),
            "runs": [known[rate] for rate in sorted(known)],
        }


class RateRuns:
    """The training runs of one cell. They differ only in the learning rate."""

    def __init__(self, config: RunConfig, folder: Path, rule: ThresholdConfig) -> None:
        self.folder, self.rule = folder, rule
        self.config, self.data, self.network = open_parts(config)
        if config.trainer.precision in PURE:
            in_own_dtype(self.network)
        self.weights = {name: value.clone() for name, value in self.network.state_dict().items()}
        self.start = self._loss() if rule.metric == "train_loss" else math.nan

    def module(self, rate: float) -> TrainingModule:
        """Return the module of a run, with the starting weights and a new optimizer."""
        self.network.load_state_dict(self.weights)
        config, optimizer = self.config, self.config.optimizer.with_(lr=rate)
        parts = config.objective, optimizer, config.schedule
        return build_module(self.network, self.data, *parts, config.trainer, config.seed)

    def run(self, rate: float) -> dict[str, Any]:
        """Train at ``rate`` until the run ends or fails, and return its record."""
        watch, module, nonfinite = Watch(self.rule, self.start), self.module(rate), None
        parts = {name: part for name, part in self.config.callbacks.items() if name not in CALLBACKS}
        trainer = self.trainer([*build_all(parts, "callbacks", L.Callback).values(), watch])
        try:
            trainer.fit(module, datamodule=self.data)
        except NonFiniteError as error:
            nonfinite = error.step + 1
        # moments are twice the size of the model: free them now, because a reference cycle of trainer and module delays their release
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
        return {
            "rate": rate,
            "stable": nonfinite is None and not watch.failed,
            "steps": len(watch.losses),
            "nonfinite_step": nonfinite,
            "worst": short(watch.worst),
            "loss": [short(loss) for loss in watch.losses],
            "accuracy": [short(accuracy) for accuracy in watch.accuracies] or None,
        }

    def trainer(self, callbacks: list[L.Callback]) -> L.Trainer:
        """Return a trainer with only these callbacks, without Lightning's own checkpoints and without validation."""
        trainer = build_trainer(self.config.trainer, self.folder, [], callbacks, 0)
        trainer.limit_val_batches = 0
        trainer.callbacks = callbacks  # type: ignore[attr-defined]
        return trainer

    @torch.no_grad()
    def _loss(self) -> float:
        """Return the mean loss of the starting weights on the first ``window`` batches, on the device and in the precision of training."""
        module, losses = self.module(self.config.optimizer.get("lr")), []
        strategy = self.trainer([]).strategy
        module.to(strategy.root_device)
        with strategy.precision_plugin.forward_context():
            for batch in itertools.islice(self.data.train_dataloader(), self.rule.window):
                batch = {name: value.to(module.device) for name, value in module.on_before_batch_transfer(batch, 0).items()}
                losses.append(float(module.sums(batch)["loss"] / batch["num_targets"]))
        module.cpu()
        return math.fsum(losses) / len(losses)
