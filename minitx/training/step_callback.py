"""The base of callbacks that act after optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as L

if TYPE_CHECKING:
    from minitx.training.module import TrainingModule


class StepCallback(L.Callback):
    """Call ``on_step`` after each optimizer step, with the number of updates so far.

    On an accelerator, the update of this step may have been skipped. A callback that writes results of a step must therefore
    first call ``module.raise_if_nonfinite()``, in all processes.
    """

    _steps_before = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._steps_before = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > self._steps_before:
            self.on_step(trainer, module, trainer.global_step, batch)

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        """Handle update ``step``, counted from 1."""
        raise NotImplementedError
