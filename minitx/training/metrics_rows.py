"""The rows of ``metrics.csv``: means over a step, speed and memory. ``metrics_csv`` writes them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from minitx.config import TransformerConfig
from minitx.nn.precision import widest_float
from minitx.nn.transfer import to_host
from minitx.training import StoppedError
from minitx.training.devices import device_name, memory_mb, peak_of
from minitx.training.metrics_csv import MetricsFile
from minitx.training.module import TrainingModule
from minitx.training.nonfinite import NonFiniteError
from minitx.training.processes import sum_over_processes
from minitx.training.step_callback import StepCallback
from minitx.training.summary import unit_of

log = logging.getLogger(__name__)


class StepLog(StepCallback):
    """Log a row of ``metrics.csv`` every ``log_every`` steps. On accelerators, training waits for the device only here.

    ``lr`` is the current learning rate of parameters without a rule. ``tokens`` is the number of targets so far.
    ``tokens_per_second`` and ``mfu`` cover the steps since the last row, without validation. ``mfu`` is the number of training
    FLOPs of this device (``train_flops``, padding included) per second, divided by its peak. Frozen weights are counted as if
    they were trained, although their gradients are not computed (LoRA).

    Args:
        log_every: steps between rows. The first and the last step always have a row, even if a run is stopped early.
        model: the config of one of our models, for ``mfu``. None: ``mfu`` is not logged.
        peak: the peak speed of the device in TFLOP/s. None: taken from ``PEAK_TFLOPS`` by the name of the device; if it is
            unknown, ``mfu`` is not logged.
    """

    def __init__(self, log_every: int, model: TransformerConfig | None = None, peak: float | None = None) -> None:
        self.log_every, self.model, self.peak = log_every, model, peak
        self.row: dict[str, float] = {}  # the last row, for progress
        self.unit = "tokens"
        self.tokens: Any = 0  # on the device between rows, because the number of targets differs between steps
        self.started = self._mark = self._paused = 0.0
        self._flops, self._lr, self._tokens_then = 0.0, 0.0, 0
        self._open: int | None = None  # the last step, if it has no row yet
        self._has_reported_empty = False

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": int(self.tokens)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens = self._tokens_then = state_dict["tokens"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            from minitx.training.sharding import check_same

            check_same(trainer, f"trainer.precision={trainer.precision}", trainer.precision, "set trainer.precision=32-true")
        for logger in trainer.loggers if stage == "fit" else ():
            if isinstance(logger, MetricsFile):
                logger.begin()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.started = self._mark = time.perf_counter()
        self.peak = self.peak or peak_of(device_name(module.device))

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        peak = optimizer.defaults.get("lr")
        self._lr = next((group for group in groups if group.get("initial_lr") == peak), groups[0])["lr"]

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.model is not None and self.peak:
            self._flops += batch_flops(self.model, batch)
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        self.tokens = self.tokens + module.step_targets
        self._open, self.unit = step, unit_of(batch["labels"])
        if step % self.log_every == 0 or step in (1, trainer.max_steps):
            self._write(trainer, module, step)
            _publish(trainer, self.row)

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        if self._open is not None:  # the run was stopped before max_steps
            self._write(trainer, module, self._open)

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        if isinstance(exception, StoppedError) and trainer.should_stop:  # by a signal in its last step
            self.on_train_end(trainer, module)

    def _write(self, trainer: L.Trainer, module: TrainingModule, step: int) -> None:
        self._open = None
        on_device = summed(trainer, module), module.latch.step, self.tokens, module.grad_norm
        sums, bad_step, tokens, grad_norm = to_host(on_device)  # the only wait for the device
        if module.device.type != "cpu":
            module.latch.note(int(bad_step))
            module.raise_if_nonfinite()
        if not sums[1] and not self._has_reported_empty:
            log.warning("step %d has no loss: none of its labels counts", step)
            self._has_reported_empty = True
        means = means_of(sums.tolist(), trainer, module)
        if trainer.world_size > 1 and not math.isfinite(means["train_loss"]):
            raise NonFiniteError(step - 1, means["train_loss"], float(grad_norm))
        self.tokens = int(tokens)
        now = time.perf_counter()
        self.row = {
            **means,
            "lr": self._lr,
            "grad_norm": float(grad_norm),
            "tokens": self.tokens,
            "seconds": now - self.started,
            "tokens_per_second": (self.tokens - self._tokens_then) / (now - self._mark),
            "memory_mb": memory_mb(module.device),
        }
        self.row |= {"mfu": self._flops / (now - self._mark) / (1e12 * self.peak)} if self._flops and self.peak else {}
        self._mark, self._tokens_then, self._flops = now, self.tokens, 0.0
        for logger in trainer.loggers:
            logger.log_metrics(self.row, step)

    def on_validation_start(self, trainer: L.Trainer, module: Any) -> None:
        self._paused = time.perf_counter()
        if self._open is not None:  # monitored metrics must not depend on log_every
            _publish(trainer, means_of(summed(trainer, module).unbind(), trainer, module))  # on the device, without a wait

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._mark += time.perf_counter() - self._paused
        if trainer.sanity_checking:
            return
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val_")}
        for logger in trainer.loggers:
            logger.log_metrics(values, trainer.global_step)


def _publish(trainer: L.Trainer, values: Mapping[str, Any]) -> None:
    """Make metrics visible to other callbacks, such as EarlyStopping, without the cost of ``self.log`` in every later step."""
    kind = torch.get_default_dtype()
    trainer.callback_metrics.update({name: torch.as_tensor(value, dtype=kind) for name, value in values.items()})


def batch_flops(model: TransformerConfig, batch: dict[str, Tensor]) -> float:
    """Return the training FLOPs of one micro-batch of one of our models, padding included."""
    if not isinstance(model.attention, str):
        return 0.0  # custom cores have no FLOP count
    if model.architecture == "vision":
        return len(batch["pixel_values"]) * _flops_of_row(model)
    rows, length = batch["input_ids"].shape
    target = batch["decoder_input_ids"].shape[1] if model.architecture == "encoder_decoder" else None
    return rows * _flops_of_row(model, length, target)


@cache
def _flops_of_row(*arguments: Any) -> float:
    """``train_flops``, computed once for each shape."""
    from minitx.nn.counting import train_flops  # only a device of known peak needs it

    return train_flops(*arguments)


def step_means(trainer: L.Trainer, module: TrainingModule) -> dict[str, float]:
    """Return ``train_loss``, ``train_accuracy`` (if the objective counts correct answers) and the means of other sums.

    The means are over the whole step, on all processes. This is a collective operation, and waits for the device.
    """
    return means_of(summed(trainer, module).tolist(), trainer, module)


def summed(trainer: L.Trainer, module: TrainingModule) -> Tensor:
    """Return loss, targets and the other sums of the step over all processes, on the device. This is a collective operation."""
    wide = widest_float(module.device)
    device = torch.as_tensor(module.step_loss).device
    local = [module.step_loss, module.step_targets, *module.step_sums.values()]
    return sum_over_processes(trainer, torch.stack([torch.as_tensor(value, device=device).to(wide) for value in local]))


def means_of(sums: Sequence[Any], trainer: L.Trainer, module: TrainingModule) -> dict[str, Any]:
    """Return the means of a step by name, as numbers or as 0-d tensors, from the entries of ``summed``."""
    loss, targets, *others = sums
    targets = targets / trainer.world_size  # every process has added the global number
    targets = targets.clamp(min=1) if isinstance(targets, Tensor) else max(targets, 1)
    names = ("accuracy" if name == "correct" else name for name in module.step_sums)
    return {"train_loss": loss, **{f"train_{name}": value / targets for name, value in zip(names, others, strict=True)}}
