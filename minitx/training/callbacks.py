"""Callbacks: progress, checkpoints, and stopping on a signal."""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from minitx.training.module import TrainingModule
from minitx.training.steps import StepCallback, StepLog

log = logging.getLogger(__name__)


class PlainProgress(StepCallback):
    """Print a line every few seconds if the output is not a terminal: step, loss, steps and tokens per second, time left."""

    def __init__(self, every_seconds: float = 5.0) -> None:
        self.every_seconds = every_seconds
        self.last = self.started = 0.0
        self.first_step = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.started = self.last = time.perf_counter()
        self.first_step = trainer.global_step

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        now, (row, unit) = time.perf_counter(), logged(trainer)
        if row and trainer.is_global_zero and (now - self.last >= self.every_seconds or step == trainer.max_steps):
            self.last = now
            rate = (step - self.first_step) / max(now - self.started, 1e-9)
            log.info(
                "step %d/%d  loss %.4f  %.1f steps/s  %.0f %s/s  %s left",
                *(step, trainer.max_steps, row["train_loss"], rate, row["tokens_per_second"], unit),
                timedelta(seconds=round((trainer.max_steps - step) / rate)),
            )

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        found = trainer.callback_metrics
        names = {"val_loss": "loss", "val_accuracy": "accuracy"}
        said = "  ".join(f"{word} {float(found[name]):.4f}" for name, word in names.items() if name in found)
        if said and trainer.is_global_zero:
            log.info("step %d/%d  validation %s", trainer.global_step, trainer.max_steps, said)


class BarProgress(TQDMProgressBar):
    """Lightning's progress bar with the loss and tokens per second of the last row of ``metrics.csv``. This needs no device sync."""

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        row, unit = logged(trainer)
        return {"loss": f"{row['train_loss']:.4f}", f"{unit}/s": f"{row['tokens_per_second']:.0f}"} if row else {}

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        super().on_train_epoch_start(trainer)
        self.train_progress_bar.initial = trainer.fit_loop.batch_idx + 1  # of a resumed run, whose rate counts from there


def logged(trainer: L.Trainer) -> tuple[dict[str, Any], str]:
    """Return the last row of ``metrics.csv`` that this process logged, and what its ``tokens`` are: tokens or rows."""
    return next(((each.row, each.unit) for each in trainer.callbacks if isinstance(each, StepLog)), ({}, ""))  # type: ignore[attr-defined]


def progress() -> L.Callback:
    """Return a bar for a terminal, and plain lines for other outputs."""
    return BarProgress(refresh_rate=10) if sys.stderr.isatty() else PlainProgress()


class StoppedError(Exception):
    """The run was stopped by a signal, after writing its checkpoint."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.number = number


class LastCheckpoint(StepCallback, Checkpoint):
    """Write ``last.ckpt`` at intervals, at the end, and on SIGINT or SIGTERM. After a signal, raise ``StoppedError``.

    A step and its validation are finished before a checkpoint is written. A second signal stops the run at once. This class is
    a ``Checkpoint``, because Lightning calls those after all other callbacks: everything that belongs to the step is then
    logged and in the checkpoint. Each process has its own signals and clock. Several processes agree on them with a small
    collective every ``agree_every`` steps and after each validation.

    At step ``max_steps`` it sets ``trainer.should_stop``, so that Lightning validates inside ``fit``. ``best.ckpt`` and all
    other callbacks then see the last validation too.

    Args:
        path: the path of the checkpoint. None: no checkpoint. Signals still stop the run.
        every: steps between checkpoints.
        minutes: minutes between checkpoints. None: off.
        agree_every: steps between the collectives of several processes.
    """

    def __init__(self, path: Path | None, every: int, minutes: float | None, agree_every: int) -> None:
        self.path, self.every, self.agree_every = path, every, agree_every
        self.seconds = math.inf if minutes is None else 60.0 * minutes
        self.saved_at, self.saved_step = time.monotonic(), -1
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
        if step == trainer.max_steps:
            trainer.should_stop = True
        every = trainer.val_check_batch
        due = trainer.should_stop or (every is not None and (trainer.fit_loop.total_batch_idx + 1) % every == 0)
        if not (due and trainer.enable_validation):  # else after the validation
            self._save_or_stop(trainer, agree=step % self.agree_every == 0 or trainer.world_size == 1)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._save_or_stop(trainer, agree=True)

    def _save_or_stop(self, trainer: L.Trainer, *, agree: bool) -> None:
        any_process = partial(trainer.strategy.reduce_boolean_decision, all=False)
        late = agree and any_process(time.monotonic() - self.saved_at >= self.seconds)
        stop = agree and any_process(self._received is not None)
        if self.path is not None and (late or stop or trainer.should_stop or trainer.global_step % self.every == 0):
            self._save(trainer, self.path)
        if stop:
            raise StoppedError(self._received or signal.SIGTERM, trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.path is not None and self.saved_step != trainer.global_step:
            self._save(trainer, self.path)  # a run that ended without a validation

    def _save(self, trainer: L.Trainer, path: Path) -> None:
        trainer.save_checkpoint(path)
        self.saved_at, self.saved_step = time.monotonic(), trainer.global_step


class BestCheckpoint(ModelCheckpoint):
    """Write ``best.ckpt`` to ``folder`` at the lowest ``val_loss``. It is a class of its own, so that its state has its own key."""

    def __init__(self, folder: Path) -> None:
        super().__init__(dirpath=folder, filename="best", monitor="val_loss", mode="min", enable_version_counter=False)
