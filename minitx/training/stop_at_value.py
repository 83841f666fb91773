"""Ending a run when a training metric reaches a value."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as L

from minitx.training.metrics_rows import step_means
from minitx.training.module import TrainingModule
from minitx.training.step_callback import StepCallback
from minitx.training.window import Window

log = logging.getLogger(__name__)


class StopAt(StepCallback):
    """End the run when a training metric reaches a value. The run is then validated and saved like any finished run.

    The metric is read at every step, even between log points. On an accelerator, this waits for the device.

    Args:
        metric: ``train_accuracy`` (must rise to ``value``) or ``train_loss`` (must fall to ``value``).
        value: the target for the mean of the metric over the last ``window`` steps.
        window: the number of steps to average. The run does not end before step ``window``.
        extra_steps: number of further steps after the value is reached.

    Attributes:
        reached: the step at which the value was reached, or None.

    Raises:
        ConfigError: ``metric`` is another word; or in training, the objective does not count correct answers for
            ``train_accuracy``.
    """

    def __init__(self, metric: str, value: float, window: int = 1, extra_steps: int = 0) -> None:
        self.window, self.extra_steps = Window(metric, value, window, "trainer.stop_at"), extra_steps
        self.reached: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"reached": self.reached, "last": self.window.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reached, self.window.last = state_dict["reached"], list(state_dict["last"])

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._stop_if_over(trainer)  # the checkpoint may come from a run that StopAt ended here

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        rule = self.window
        mean = rule.add(step_means(trainer, module))
        if self.reached is None and rule.reaches(mean):
            self.reached = step
            log.info("%s reached %g at step %d (mean of %d steps: %g)", rule.metric, rule.value, step, rule.window, mean)
        self._stop_if_over(trainer)

    def _stop_if_over(self, trainer: L.Trainer) -> None:
        if self.reached is not None and trainer.global_step >= self.reached + self.extra_steps:
            trainer.should_stop = True
