"""What a run does not support of Lightning: some arguments of its Trainer, callbacks and hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint

from minitx.config import ConfigError, TrainerConfig
from minitx.config.part import defaults
from minitx.config.schema import require
from minitx.config.signatures import parameter_names
from minitx.config.training import REPLACED
from minitx.training.lightning_private import saves_by_step

_OF_EPOCHS = ("limit_train_batches", "check_val_every_n_epoch", "min_epochs", "reload_dataloaders_every_n_epochs")

UNSUPPORTED = {
    "gradient_clip_algorithm": "has no effect: the training step clips by norm",
    **dict.fromkeys(("use_distributed_sampler", *_OF_EPOCHS), "has no effect on the data of a Task"),
    "StochasticWeightAveraging": "averages at the end of the last epoch, after the last validation and checkpoint, so its result would not "
    "be saved: use 'callbacks=[default,ema]' to average by step",
    "GradientAccumulationScheduler": "changes the micro-batches of a step by epoch, but the data of a Task has only one epoch: set "
    "trainer.accumulate",
    "BatchSizeFinder": "changes the batch during the run, and its trials would not end: set data.batch_size",
    "LearningRateFinder": "trains before the run with rates of its own: try rates with -m optimizer.lr=1e-3,3e-3",
    "BaseFinetuning": "unfreezes layers by epoch, but the whole run is one epoch: freeze weights with optimizer.rules (trainable: false), "
    "and start a second run from the first with init_from.path, or set requires_grad in a callback of yours, by trainer.global_step",
}
"""Arguments of Lightning's Trainer, and Lightning's callbacks, with the reason and what to use instead."""


def check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse entries of ``trainer.extra`` that Lightning's Trainer does not know, that have a key, or that have no effect.

    Raises:
        ConfigError: ``extra`` has such an entry. The message names the key, or a similar argument.
    """
    arguments = parameter_names(L.Trainer)
    keys = {name: f"trainer.{name}" for name in defaults(TrainerConfig)} | REPLACED
    for name in sorted(extra):
        entry = f"trainer.extra.{name}"
        if name not in arguments:
            from minitx.config.unknown_keys import nearest  # only errors need it

            raise ConfigError(f"{entry} is not an argument of Lightning's Trainer{nearest(name, sorted(arguments))}")
        require(name not in keys, f"{entry} is not allowed: use {keys.get(name)}")
        require(name not in UNSUPPORTED, f"{entry} {UNSUPPORTED.get(name)}")


def check_callbacks(callbacks: Sequence[L.Callback]) -> None:
    """Raise a ConfigError if a callback is in ``UNSUPPORTED``, or saves by a validation metric before the validation of its step."""
    for callback in callbacks:
        name = type(callback).__name__
        for kind in type(callback).__mro__:
            if kind.__module__.startswith("lightning.") and kind.__name__ in UNSUPPORTED:
                raise ConfigError(f"callbacks: {name} {UNSUPPORTED[kind.__name__]}")
        if isinstance(callback, ModelCheckpoint) and saves_by_step(callback) and (callback.monitor or "").startswith("val_"):
            raise ConfigError(
                f"callbacks: {name} with every_n_train_steps or train_time_interval saves before the validation of a step, so "
                f"monitor={callback.monitor} would belong to earlier weights: remove them to save after each validation (trainer.val_every)"
            )


def epoch_hooks(callbacks: Sequence[L.Callback]) -> list[str]:
    """Return a line for each hook of a user's callback that Lightning calls once an epoch, because a run is a single epoch."""
    return [
        f"callbacks: {type(callback).__name__}.{hook} is called once, because Lightning counts the whole run as one epoch: for a call "
        "after each validation, use on_validation_end"
        for callback in callbacks
        for hook in ("on_train_epoch_start", "on_train_epoch_end")
        if getattr(type(callback), hook).__module__.partition(".")[0] not in ("lightning", "pytorch_lightning", "minitx")
    ]
