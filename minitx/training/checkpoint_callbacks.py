"""Callbacks that write checkpoints, and their weights: the last and the best checkpoint, signals, and averages."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, WeightAveraging
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from minitx.config import ConfigError, TrainerConfig
from minitx.training import StoppedError, stop_signals
from minitx.training.lightning_private import average_of, has_own_device
from minitx.training.module import TrainingModule
from minitx.training.processes import largest_of_all
from minitx.training.step_callback import StepCallback

log = logging.getLogger(__name__)


def check_whole_weights(callbacks: Mapping[str, L.Callback], *, is_sharded: bool) -> None:
    """Refuse callbacks that read all weights (``needs_whole_weights``, or Lightning's averages) if the weights are sharded.

    Raises:
        ConfigError: there is such a callback.
    """
    for name, callback in callbacks.items() if is_sharded else ():
        if isinstance(callback, WeightAveraging) or getattr(callback, "needs_whole_weights", False):
            raise ConfigError(f"callbacks.{name} needs whole weights on one device, got trainer.strategy=sharded")


class Averages(L.Callback):
    """Move averaged weights to the training device, and preserve their precision. Must come before callbacks that average weights.

    At the end of training, Lightning replaces the weights by the average. Before that, this callback lets ``last`` save the weights.

    Lightning copies the model while it is on the CPU; an average there would cost a transfer of all weights in every step. An
    average with its own ``device`` is not moved. To validate the average, Lightning swaps it with the weights of the model.
    With ``bf16-true`` this rounds the average to 16 bits, so it is copied before each validation and restored afterwards.
    """

    def __init__(self, last: LastCheckpoint) -> None:
        self.last = last
        self._kept: list[tuple[Tensor, Tensor]] = []

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.last.save_last_step(trainer)

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for callback in _averaging(trainer.callbacks):  # type: ignore[attr-defined]
            if (average := average_of(callback)) is not None and not has_own_device(callback):
                average.to(module.device)

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        averages = map(average_of, _averaging(trainer.callbacks))  # type: ignore[attr-defined]
        self._kept = [
            (average, average.detach().clone())
            for copy in averages
            if copy is not None
            for average, weight in zip(copy.module.parameters(), module.parameters(), strict=True)
            if average.dtype != weight.dtype
        ]

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        with torch.no_grad():
            for average, kept in self._kept:
                average.copy_(kept)
        self._kept = []


def _averaging(callbacks: Sequence[L.Callback]) -> list[WeightAveraging]:
    return [callback for callback in callbacks if isinstance(callback, WeightAveraging)]


class LastCheckpoint(StepCallback, Checkpoint):
    """Write ``last.ckpt`` at intervals, at the end, and on a signal of ``stop_signals``. After a signal, raise ``StoppedError``.

    A step and its validation are finished before a checkpoint is written. The same signal again stops the run at once. This
    class is a ``Checkpoint`` because Lightning calls those after all other callbacks, so that all results of the step are logged and
    in the checkpoint. Each process receives its own signals and has its own clock. Several processes agree by a small
    collective operation every ``log_every`` steps and after each validation.

    At step ``max_steps``, ``trainer.should_stop`` is set, so that Lightning validates within ``fit``. ``best.ckpt`` and all
    other callbacks then include the last validation.

    Args:
        folder: the folder of checkpoints.
        options: options of the trainer: ``ckpt_every``, ``ckpt_minutes`` and ``log_every``. With ``ckpt_every=0``, no
            checkpoint is written, but signals still stop the run.
        state: plain data to store in every checkpoint of the run (``stored_state``).
    """

    def __init__(self, folder: Path, options: TrainerConfig, state: Mapping[str, Any]) -> None:
        self.path = folder / "last.ckpt" if options.ckpt_every else None
        self.every = options.ckpt_every
        self.agree_every = options.log_every
        self.state = state
        self.seconds = math.inf if options.ckpt_minutes is None else 60.0 * options.ckpt_minutes
        self.saved_at, self.saved_step = time.monotonic(), -1
        self._received: int | None = None
        self._previous: dict[int, Any] = {}
        self._patience: dict[EarlyStopping, int] = {}

    def __enter__(self) -> LastCheckpoint:
        self._install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():  # again after a signal, because Lightning has reinstalled our handlers
            signal.signal(number, handler)
        self._previous = {}

    def _install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                current = signal.signal(number, self._receive)
                self._previous.setdefault(number, current)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number
        signal.signal(number, self._previous[number])

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        stops = [each for each in trainer.callbacks if isinstance(each, EarlyStopping)]  # type: ignore[attr-defined]
        # keep the config's patience: loading a checkpoint restores the old one
        self._patience = {each: each.patience for each in stops}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.saved_at = time.monotonic()
        for callback, patience in self._patience.items():
            callback.patience = patience
            by_patience = callback.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED
            if callback.stopping_reason_message and not (by_patience and callback.wait_count < patience):
                trainer.should_stop = True
                remedy = "raise its patience or remove it" if by_patience else "remove it"
                log.warning("EarlyStopping already ended this run: %s to resume. %s", remedy, callback.stopping_reason_message)
        if self._previous and self._received is None:
            self._install()  # replaces Lightning's handler, because it could start a collective operation during another

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        if step >= trainer.max_steps:
            trainer.should_stop = True
        if not is_validated_after(trainer, step):  # otherwise after the validation
            self._save_or_stop(trainer, agree=step % self.agree_every == 0 or trainer.world_size == 1)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._save_or_stop(trainer, agree=True)

    def _save_or_stop(self, trainer: L.Trainer, *, agree: bool) -> None:
        """Write ``last.ckpt`` if it is due, and then raise ``StoppedError`` if a process has received a signal.

        Args:
            agree: look at signals and at the time since the last checkpoint. This is a collective operation.
        """
        is_late = received = 0
        if agree:
            time_is_over = time.monotonic() - self.saved_at >= self.seconds
            is_late, received = largest_of_all(trainer, time_is_over, self._received or 0)
        if self.path is not None:
            is_due = trainer.global_step // self.every > self._steps_before // self.every
            is_last = trainer.should_stop and may_end(trainer)
            if is_due or is_late or received or is_last:
                self._save(trainer, self.path)
        if received:
            raise StoppedError(received, f" after step {trainer.global_step}")

    def save_last_step(self, trainer: L.Trainer) -> None:
        """Write ``last.ckpt`` if the run ended without a validation."""
        if self.path is not None and self.saved_step != trainer.global_step:
            self._save(trainer, self.path)

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["minitx"] = dict(self.state)

    def _save(self, trainer: L.Trainer, path: Path) -> None:
        trainer.save_checkpoint(path)
        self.saved_at, self.saved_step = time.monotonic(), trainer.global_step


def early_end(trainer: L.Trainer) -> list[str]:
    """Return why a run ended before ``trainer.max_steps``, in a line for each reason; [] if it did not."""
    if trainer.global_step >= trainer.max_steps:
        return []
    from minitx.training.stop_at_value import StopAt

    at = f"the run ended at step {trainer.global_step} of {trainer.max_steps}"
    stops: list[Any] = [each for each in trainer.callbacks if isinstance(each, EarlyStopping)]  # type: ignore[attr-defined]
    reasons = [
        f"{at}: {stop.stopping_reason_message.replace(' Signaling Trainer to stop.', '')} (patience {stop.patience})"
        for stop in stops
        if stop.stopping_reason_message
    ]
    has_reached = any(isinstance(each, StopAt) and each.reached for each in trainer.callbacks)  # type: ignore[attr-defined]
    return reasons or ([] if has_reached else [f"{at}: a callback or an argument of trainer.extra ended it"])


def may_end(trainer: L.Trainer) -> bool:
    """Return whether Lightning would end the run now if ``trainer.should_stop`` is set. ``trainer.extra.min_steps`` delays the end."""
    return trainer.global_step >= (trainer.min_steps or 0)


def is_validated_after(trainer: L.Trainer, step: int) -> bool:
    """Return whether Lightning validates after ``step``. This depends on steps alone, because the data of a task has one epoch."""
    due = step * trainer.accumulate_grad_batches % trainer.val_check_interval == 0
    return trainer.enable_validation and (due or (trainer.should_stop and may_end(trainer)))


class BestCheckpoint(ModelCheckpoint):
    """Write ``best.ckpt`` to ``folder`` at the best value of ``monitor``. A separate class, because Lightning stores state by class."""

    def __init__(self, folder: Path, monitor: str, mode: str) -> None:
        options: dict[str, Any] = {"monitor": monitor, "mode": mode, "save_on_train_epoch_end": False}
        super().__init__(dirpath=folder, filename="best", enable_version_counter=False, **options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value so far, even if the folder was moved or copied. In another folder, ``best.ckpt`` starts anew."""
        path = Path(str(self.dirpath)) / "best.ckpt"
        stored_path = state_dict["best_model_path"]
        if stored_path and path.is_file():
            score = {"best_k_models": {str(path): state_dict["best_model_score"]}, "kth_best_model_path": str(path)}
            super().load_state_dict({**state_dict, **score, "dirpath": self.dirpath, "best_model_path": str(path)})
        elif stored_path:
            log.warning("best.ckpt starts anew in this folder: the best checkpoint so far is %s", stored_path)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.monitor in trainer.callback_metrics or trainer.sanity_checking:
            super().on_validation_end(trainer, pl_module)
        else:
            names = ", ".join(trainer.callback_metrics) or "none"
            log.warning("best.ckpt is not written: trainer.monitor=%s is not logged; logged are: %s", self.monitor, names)
