"""What happens around the steps: logging, progress, checkpoints, stopping on a signal."""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from minitx.nn.scale import ScoreScale
from minitx.training.module import NonFiniteError, TrainingModule
from minitx.training.parallel import any_rank, sum_over_rows

log = logging.getLogger(__name__)


class StepCallback(L.Callback):
    """Calls ``on_step`` once an optimizer step, with the number of updates made."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.on_step(trainer, module, trainer.global_step, batch)

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        """One optimizer step is over."""
        raise NotImplementedError


class StepLog(StepCallback):
    """Logs loss, rate, gradient norm, tokens and seconds every ``log_every`` steps; the only place that reads the device."""

    def __init__(self, log_every: int) -> None:
        self.log_every = log_every
        self.tokens: Any = 0  # a device tensor between log points: steps differ in their number of targets
        self.started = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": int(self.tokens)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens = state_dict["tokens"]

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.started = time.perf_counter()

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        self.tokens = self.tokens + batch["num_targets"]
        if step % self.log_every and step != 1 and step != trainer.max_steps:
            return
        if module.device.type != "cpu":
            module.raise_if_nonfinite()
        loss = float(sum_over_rows(trainer, torch.as_tensor(module.step_loss)))
        if trainer.world_size > 1 and not math.isfinite(loss):
            raise NonFiniteError(step - 1, loss, float(module.grad_norm))
        self.tokens = int(self.tokens)
        row = {
            "train_loss": loss,
            "lr": trainer.optimizers[0].param_groups[0]["initial_lr"] * module.lr_factor(step - 1),  # of this update
            "grad_norm": float(module.grad_norm),
            "tokens": self.tokens,
            "seconds": time.perf_counter() - self.started,
        }
        for logger in trainer.loggers:
            logger.log_metrics(row, step)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        values = {name: float(trainer.callback_metrics[name]) for name in ("val_loss", "val_accuracy")}
        for logger in trainer.loggers:
            logger.log_metrics(values, trainer.global_step)


class AttentionTemperature(L.Callback):
    """Divides the attention scores by ``value`` in the updates ``first`` (counted from 0) to ``last - 1``, and in no other.

    An intervention on a run, added with ``callbacks.extra``: Zhai et al. 2023 (arXiv:2303.06296, §4) make attention ten
    times sharper (``value=0.1``) early or late in training. Only the step that is made decides, so a run that goes on
    after a stop goes on with the same scores. Probes meet the scores of the last update, and so does validation between
    two updates; what comes after the last update of the run meets the model's own.

    Raises:
        ValueError: a temperature that is not a positive number, a window that is empty, or two such callbacks in a run.
    """

    def __init__(self, value: float, first: int, last: int) -> None:
        if not 0.0 < value < math.inf:
            raise ValueError(f"value={value} must be a positive temperature")
        if not 0 <= first < last:
            raise ValueError(f"first={first} and last={last} must be the ends of a window of updates")
        self.value, self.first, self.last = value, first, last
        self._factors: list[tuple[ScoreScale, float]] = []

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        if sum(isinstance(callback, AttentionTemperature) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("callbacks.extra holds several AttentionTemperature, and each would undo the others: keep one")
        self._factors = [(m, m.factor) for m in module.network.modules() if isinstance(m, ScoreScale)]

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        inside = self.first <= trainer.global_step < self.last
        self._set(1.0 / self.value if inside else 1.0)

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self._set(1.0)

    def _set(self, multiplier: float) -> None:
        for scale, factor in self._factors:
            scale.factor = factor * multiplier


class PlainProgress(StepCallback):
    """A line now and then, for output that is no terminal: step, loss, validation, rate, time left."""

    def __init__(self, every_seconds: float = 5.0) -> None:
        self.every_seconds = every_seconds
        self.last = self.started = 0.0
        self.first_step = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.started = self.last = time.perf_counter()
        self.first_step = trainer.global_step

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        now = time.perf_counter()
        if trainer.is_global_zero and (now - self.last >= self.every_seconds or step == trainer.max_steps):
            self.last = now
            rate = (step - self.first_step) / max(now - self.started, 1e-9)
            left = (trainer.max_steps - step) / rate
            tokens = rate * int(batch["num_targets"])  # of the last step
            log.info(
                "step %d/%d  loss %.4f  %.1f steps/s  %.0f tokens/s  %s left",
                *(step, trainer.max_steps, float(module.step_loss), rate, tokens, clock(left)),
            )

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            metrics = trainer.callback_metrics
            values = (trainer.global_step, trainer.max_steps, metrics["val_loss"], metrics["val_accuracy"])
            log.info("step %d/%d  validation loss %.4f  accuracy %.4f", *values)


class BarProgress(TQDMProgressBar):
    """Lightning's bar with the loss beside it; refreshed with the log, so that it costs no extra device sync."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        if self._should_update(self.train_progress_bar.n, self.train_progress_bar.total):
            self.train_progress_bar.set_postfix({"loss": f"{float(module.step_loss):.4f}"})


class StoppedError(Exception):
    """The run was asked to stop by a signal; its checkpoint is written."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.number = number


class LastCheckpoint(StepCallback, Checkpoint):
    """Writes ``last.ckpt`` every so many steps and minutes, and on SIGINT or SIGTERM, after which it raises ``StoppedError``.

    The step and its validation are finished first. A second signal acts at once. A ``Checkpoint``, because Lightning runs
    those last: whatever belongs to the step is logged by then, and the checkpoint lacks nothing. Signals and the clock are
    each process's own, so several agree on them in one small collective every ``agree_every`` steps and after validation.

    Args:
        path: None keeps no checkpoint; signals still stop the run.
        every: steps. minutes: of wall time since the last one; None: not by the clock.
    """

    def __init__(self, path: Path | None, every: int, minutes: float | None, agree_every: int) -> None:
        self.path, self.every, self.agree_every = path, every, agree_every
        self.seconds = math.inf if minutes is None else 60.0 * minutes
        self.saved_at = time.monotonic()
        self._received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> LastCheckpoint:
        self._install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                current = signal.signal(number, self._receive)
                self._previous.setdefault(number, current)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        self.__exit__()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.saved_at = time.monotonic()
        if self._previous and self._received is None:
            self._install()  # in place of Lightning's own handler, which would start a collective in the middle of another

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        every = trainer.val_check_batch
        if every is None or (trainer.fit_loop.total_batch_idx + 1) % every:  # else after the validation
            self._save_or_stop(trainer, agree=step % self.agree_every == 0 or trainer.world_size == 1)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._save_or_stop(trainer, agree=True)

    def _save_or_stop(self, trainer: L.Trainer, *, agree: bool) -> None:
        late, stop = time.monotonic() - self.saved_at >= self.seconds, self._received is not None
        late, stop = any_rank(trainer, late, stop) if agree else (False, False)
        if self.path is not None and (late or stop or trainer.global_step % self.every == 0):
            trainer.save_checkpoint(self.path)
            self.saved_at = time.monotonic()
        if stop:
            raise StoppedError(self._received or signal.SIGTERM, trainer.global_step)


def best_checkpoint(folder: Path) -> L.Callback:
    """``best.ckpt`` at the lowest validation loss."""
    options: dict[str, Any] = {"dirpath": folder, "enable_version_counter": False, "save_on_exception": False}
    return ModelCheckpoint(filename="best", monitor="val_loss", mode="min", save_top_k=1, **options)


def progress() -> L.Callback:
    """A bar in a terminal, plain lines elsewhere."""
    return BarProgress(refresh_rate=10) if sys.stderr.isatty() else PlainProgress()


def clock(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
