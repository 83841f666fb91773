"""The progress of a run: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import math
import sys
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import TQDMProgressBar

from minitx.training.metrics_rows import StepLog
from minitx.training.module import TrainingModule
from minitx.training.step_callback import StepCallback

log = logging.getLogger(__name__)


class PlainProgress(StepCallback):
    """Print a line every five seconds if the output is not a terminal: step, loss, speed and remaining time."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.started = self.last = time.perf_counter()
        self.first_step = trainer.global_step

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        now = time.perf_counter()
        figures = figures_of(trainer)
        steps = trainer.estimated_stepping_batches
        if figures and trainer.is_global_zero and (now - self.last >= 5.0 or step == steps):
            self.last = now
            rate = (step - self.first_step) / max(now - self.started, 1e-9)
            text = "  ".join(f"{name} {value}" for name, value in figures.items())
            left = timedelta(seconds=round((steps - step) / rate)) if step <= steps < math.inf else "unknown time"
            log.info("step %d/%s  %s  %.1f steps/s  %s left", step, steps, text, rate, left)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        metrics = trainer.callback_metrics
        names = {"val_loss": "loss", "val_accuracy": "accuracy"}
        figures = {word: f"{float(metrics[name]):.4f}" for name, word in names.items() if name in metrics}
        text = "  ".join(f"{name} {value}" for name, value in (figures or figures_of(trainer)).items())
        if text and trainer.is_global_zero and not trainer.sanity_checking:
            log.info("step %d/%s  validation %s", trainer.global_step, trainer.estimated_stepping_batches, text)


class BarProgress(TQDMProgressBar):
    """Lightning's progress bar, showing the result of ``figures_of``."""

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        return figures_of(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        super().on_train_epoch_start(trainer)
        self.train_progress_bar.initial = trainer.fit_loop.batch_idx + 1  # the rate of a resumed run counts from here


def figures_of(trainer: L.Trainer) -> dict[str, str]:
    """Return the loss and the tokens (or rows) per second in the last row of ``metrics.csv``, without waiting for the device."""
    step_log = next(callback for callback in trainer.callbacks if isinstance(callback, StepLog))  # type: ignore[attr-defined]
    row = step_log.row
    return {"loss": f"{row['train_loss']:.4f}", f"{step_log.unit}/s": f"{row['tokens_per_second']:.0f}"} if row else {}


def progress() -> L.Callback:
    """Return a progress bar for a terminal, and plain lines for other outputs."""
    return BarProgress(refresh_rate=10) if sys.stderr.isatty() else PlainProgress()
