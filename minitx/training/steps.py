"""Callbacks for every step: rows of ``metrics.csv``, and stopping by a training metric."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from minitx.analysis.flops import train_flops
from minitx.config import ConfigError, TransformerConfig
from minitx.training.devices import check_processes
from minitx.training.hardware import memory_mb, peak_tflops, widest_float
from minitx.training.module import NonFiniteError, TrainingModule
from minitx.training.parallel import sum_over_rows

log = logging.getLogger(__name__)


class StepCallback(L.Callback):
    """Call ``on_step`` after each optimizer step, with the number of updates so far."""

    _steps_before = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._steps_before = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > self._steps_before:
            self.on_step(trainer, module, trainer.global_step, batch)

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        """Called after update ``step``, counted from 1."""
        raise NotImplementedError


def unit_of(labels: Tensor) -> str:
    """Return what the targets of a batch are: ``rows`` where a row has one label, ``labels`` where they are no whole numbers, else ``tokens``."""
    if labels.dim() < 2:
        return "rows"
    return "labels" if labels.is_floating_point() else "tokens"


class StepLog(StepCallback):
    """Log a row of ``metrics.csv`` every ``log_every`` steps. On accelerators nothing else waits for the device during training.

    ``tokens`` are targets. ``tokens_per_second`` and ``mfu`` cover the steps since the last row, without validation. ``mfu``
    is this device's share of the training FLOPs (``train_flops``, padding included) divided by its peak.

    Args:
        log_every: steps between rows. The first and the last step always have one, also where a run is stopped early.
        model: the config of one of our models, for ``mfu``. None for a model of the user's: no ``mfu``.
        peak: the device's peak in TFLOP/s. None: from ``PEAK_TFLOPS`` by the device's name. If it is unknown, there is no
            ``mfu``.
    """

    def __init__(self, log_every: int, model: TransformerConfig | None = None, peak: float | None = None) -> None:
        self.log_every, self.model, self.peak = log_every, model, peak
        self.row: dict[str, float] = {}  # the last one, for progress
        self.unit = "tokens"
        self.tokens: Any = 0  # a device tensor between rows: steps differ in their number of targets
        self.started = self._mark = self._paused = 0.0
        self._flops, self._lr, self._tokens_then = 0.0, 0.0, 0
        self._open: tuple[int, Any] | None = None  # the last step and the names in its batch, if it has no row

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": int(self.tokens)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens = self._tokens_then = state_dict["tokens"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        check_processes(trainer)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.started = self._mark = time.perf_counter()
        self.peak = self.peak or peak_tflops(module.device)

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self._lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.model is not None and self.peak:
            self._flops += batch_flops(self.model, batch)
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        ranks = 1 if "num_targets" in batch else trainer.world_size  # else this process's own, and others have as many
        self.tokens = self.tokens + module.step_targets * ranks
        self._open, self.unit = (step, dict.fromkeys(batch)), unit_of(batch["labels"])
        if step % self.log_every == 0 or step in (1, trainer.max_steps):
            self._write(trainer, module, step, batch)

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        if self._open is not None:  # the run was stopped before max_steps
            self._write(trainer, module, *self._open)

    def _write(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        self._open = None
        if module.device.type != "cpu":
            module.raise_if_nonfinite()
        means = step_means(trainer, module, batch)
        if trainer.world_size > 1 and not math.isfinite(means["train_loss"]):
            raise NonFiniteError(step - 1, means["train_loss"], float(module.grad_norm))
        self.tokens = int(self.tokens)
        now = time.perf_counter()
        self.row = {
            **means,
            "lr": self._lr,
            "grad_norm": float(module.grad_norm),
            "tokens": self.tokens,
            "seconds": now - self.started,
            "tokens_per_second": (self.tokens - self._tokens_then) / (now - self._mark),
            "memory_mb": memory_mb(module.device),
        }
        self.row |= {"mfu": self._flops / (now - self._mark) / (1e12 * self.peak)} if self._flops and self.peak else {}
        self._mark, self._tokens_then, self._flops = now, self.tokens, 0.0
        for logger in trainer.loggers:
            logger.log_metrics(self.row, step)

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._mark += time.perf_counter() - self._paused
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val_")}
        for logger in trainer.loggers:
            logger.log_metrics(values, trainer.global_step)


def batch_flops(model: TransformerConfig, batch: dict[str, Tensor]) -> float:
    """Return the training FLOPs of one micro-batch of one of our models, padding included."""
    if not isinstance(model.attention, str):
        return 0.0  # nothing is known of a core of one's own
    if model.architecture == "vision":
        return len(batch["pixel_values"]) * train_flops(model)
    rows, length = batch["input_ids"].shape
    target = batch["decoder_input_ids"].shape[1] if model.architecture == "encoder_decoder" else None
    return rows * train_flops(model, length, target)


def step_means(trainer: L.Trainer, module: TrainingModule, batch: Any) -> dict[str, float]:
    """Return ``train_loss``, ``train_accuracy`` (if the objective counts right answers) and the means of its other sums.

    The means are over the whole step on all processes. This is a collective and waits for the device.
    """
    wide, ranks = widest_float(module.device), trainer.world_size
    device, own = torch.as_tensor(module.step_loss).device, [module.step_loss, module.step_targets, *module.step_sums.values()]
    values = torch.stack([torch.as_tensor(value, device=device).to(wide) for value in own])
    loss, targets, *sums = sum_over_rows(trainer, values).tolist()
    if "num_targets" in batch:
        targets /= ranks  # each process knows the number of all
    else:
        loss /= ranks  # a mean over each process's own rows
    names = ("accuracy" if name == "correct" else name for name in module.step_sums)
    return {"train_loss": loss, **{f"train_{name}": value / targets for name, value in zip(names, sums, strict=True)}}


class StopAt(StepCallback):
    """End the run when a training metric has reached a value. The run is then validated and saved like any finished run.

    The metric is read at every step, also between log points. On an accelerator this waits for the device.

    Args:
        metric: ``train_accuracy``, which must rise to ``value``, or ``train_loss``, which must fall to it.
        value: what the mean of the metric over the last ``window`` steps must reach.
        window: the number of steps to average. The run cannot end earlier.
        extra_steps: further steps after the value is reached.

    Attributes:
        reached: the step at which the value was reached, or None.

    Raises:
        ConfigError: in training, if the metric is ``train_accuracy`` and the objective counts no right answers.
    """

    def __init__(self, metric: str, value: float, window: int = 1, extra_steps: int = 0) -> None:
        self.metric, self.value, self.window, self.extra_steps = metric, value, window, extra_steps
        self.reached: int | None = None
        self._last: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"reached": self.reached, "last": self._last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reached, self._last = state_dict["reached"], list(state_dict["last"])

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._stop_if_over(trainer)  # the checkpoint may be of a run that ended here

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        value = step_means(trainer, module, batch).get(self.metric)
        if value is None:
            raise ConfigError("trainer.stop_at.metric=train_accuracy: the objective counts no right answers; use train_loss")
        self._last = [*self._last, value][-self.window :]
        mean = math.fsum(self._last) / len(self._last)
        enough = mean <= self.value if self.metric == "train_loss" else mean >= self.value
        if self.reached is None and enough and len(self._last) == self.window:
            self.reached = step
            log.info("%s reached %g at step %d (mean of %d steps: %g)", self.metric, self.value, step, self.window, mean)
        self._stop_if_over(trainer)

    def _stop_if_over(self, trainer: L.Trainer) -> None:
        if self.reached is not None and trainer.global_step >= self.reached + self.extra_steps:
            trainer.should_stop = True
