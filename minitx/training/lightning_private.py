"""What a run uses of Lightning without a public name. Check this file at each upgrade; pyproject.toml bounds Lightning's version."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch.optim.swa_utils import AveragedModel


def share_no_sigterm(trainer: L.Trainer) -> None:
    """Stop Lightning from broadcasting before every micro-batch whether SIGTERM was received, because this waits for the device.

    ``LastCheckpoint`` shares signals at fewer steps.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def saves_by_step(callback: ModelCheckpoint) -> bool:
    """Whether a callback saves after a number of steps or after a time, and not only after a validation."""
    return bool(callback._every_n_train_steps or callback._train_time_interval)


def average_of(callback: WeightAveraging) -> AveragedModel | None:
    """Return the averaged weights: a copy of the LightningModule in ``module``. None before training."""
    return callback._average_model


def has_own_device(callback: WeightAveraging) -> bool:
    """Whether the average stays on the ``device`` of the callback."""
    return callback._device is not None


def drop_average(callback: WeightAveraging) -> None:
    """Remove the average, because a test would use it instead of the weights of the module."""
    callback._average_model = None


def set_micro_batches(checkpoint: dict[str, Any], done: int) -> None:
    """Set the number of past micro-batches in a checkpoint."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["current"], progress["total"]):
        counts.update(dict.fromkeys(counts, done))
