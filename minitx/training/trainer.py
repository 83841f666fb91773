"""Lightning's Trainer for the options of a run, with the arguments that it may not have, and without its notices."""

from __future__ import annotations

import difflib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from minitx.config import ConfigError, TrainerConfig
from minitx.config.part import defaults
from minitx.config.schema import first_line
from minitx.config.signatures import parameter_names
from minitx.config.training import REPLACED
from minitx.training.checkpoint_files import read_checkpoint, write_checkpoint
from minitx.training.devices import cpu_precision, device_of
from minitx.training.metrics_csv import MetricsFile
from minitx.training.module import FIND_UNUSED


class AtomicCheckpointIO(CheckpointIO):
    """Read and write Lightning's checkpoints atomically, and without pickled code (``read_checkpoint``, ``write_checkpoint``)."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_checkpoint(checkpoint, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        return read_checkpoint(path)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def build_trainer(
    options: TrainerConfig,
    folder: Path,
    loggers: Sequence[Any],
    callbacks: Sequence[L.Callback],
    resumed_step: int,
    checkpoints: CheckpointIO | None = None,
) -> L.Trainer:
    """Build Lightning's Trainer. It logs to ``metrics.csv`` from row ``resumed_step`` on, and to ``loggers``.

    ``TrainingModule`` does its own clipping and logging, and the loaders of ``DataModule`` give each process its own batches.

    Raises:
        ConfigError: Lightning does not accept the arguments. The message names ``trainer.extra`` if Lightning accepts them without it.
    """
    check_callbacks(callbacks)
    on_devices = device_arguments(options)
    plugins = [part.at(f"trainer.plugins[{i}]").build() for i, part in enumerate(options.plugins)]
    on_devices["plugins"] += [checkpoints or AtomicCheckpointIO(), *plugins]
    arguments = {
        **on_devices,
        "max_steps": options.max_steps,
        "accumulate_grad_batches": options.accumulate,
        **validation_of(options),
        "limit_val_batches": options.val_batches,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "deterministic": options.deterministic or None,  # False would override torch.use_deterministic_algorithms
        "use_distributed_sampler": False,
        "logger": [MetricsFile(folder / "metrics.csv", resumed_step), *loggers],
        "callbacks": list(callbacks),
        "enable_progress_bar": any(isinstance(callback, L.callbacks.ProgressBar) for callback in callbacks),
        "enable_model_summary": False,
        "default_root_dir": folder,
        "profiler": options.profiler and options.profiler.at("trainer.profiler").build(dirpath=folder, filename="profile"),
    }
    try:
        trainer = L.Trainer(**{**arguments, **options.extra})
    except Exception as error:
        key = "trainer"
        with suppress(ConfigError):
            if options.extra:
                build_trainer(replace(options, extra={}), folder, loggers, callbacks, resumed_step, checkpoints)
                key = "trainer.extra"
        raise ConfigError(f"{key}: {first_line(error)}") from error
    # Before every micro-batch, Lightning waits for the device and broadcasts whether SIGTERM was received. LastCheckpoint shares
    # signals at fewer steps. There is no public switch for this; pyproject.toml bounds the version of lightning.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return trainer


def key_of_argument(name: str) -> str | None:
    """Return the key for an argument of Lightning's Trainer, or None if the Trainer has no such argument.

    >>> key_of_argument("gradient_clip_val"), key_of_argument("devices"), key_of_argument("benchmark"), key_of_argument("foo")
    ('trainer.clip', 'trainer.devices', 'trainer.extra.benchmark', None)
    """
    if name not in parameter_names(L.Trainer):
        return None
    return REPLACED.get(name, f"trainer.{name}" if name in defaults(TrainerConfig) else f"trainer.extra.{name}")


def check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse entries of ``trainer.extra`` that Lightning's Trainer does not know, that have a key, or that have no effect.

    Raises:
        ConfigError: ``extra`` has such an entry. The message names the key, or a similar argument.
    """
    for name in sorted(extra):
        key = key_of_argument(name)
        if key is None:
            near = difflib.get_close_matches(name, sorted(parameter_names(L.Trainer)), n=1)
            meant = f" (did you mean {key_of_argument(near[0])}?)" if near else ""
            raise ConfigError(f"trainer.extra.{name} is not an argument of Lightning's Trainer{meant}")
        if key != f"trainer.extra.{name}":
            raise ConfigError(f"trainer.extra.{name} is not allowed: use {key}")
        if name in NO_EFFECT:
            raise ConfigError(f"trainer.extra.{name} has no effect{NO_EFFECT[name]}")


_OF_EPOCHS = ("limit_train_batches", "check_val_every_n_epoch", "min_epochs", "reload_dataloaders_every_n_epochs")

NO_EFFECT = {
    "gradient_clip_algorithm": ": the training step clips by norm",
    **dict.fromkeys(("use_distributed_sampler", *_OF_EPOCHS), " on the data of a Task"),
}
"""Arguments of Lightning's Trainer that have no effect on our training step or data, with the reason."""


def validation_of(options: TrainerConfig) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer for ``trainer.val_every``."""
    assert options.max_steps is not None  # see ``in_steps``
    steps = min(options.val_every or options.max_steps, options.max_steps)
    return {"val_check_interval": steps * options.accumulate, "check_val_every_n_epoch": None}


NOT_FOR_RUNS = {
    StochasticWeightAveraging: "averages at the end of the last epoch, after the last validation and checkpoint, so its result would not be "
    "saved: use 'callbacks=[default,ema]' to average by step",
    GradientAccumulationScheduler: "changes the micro-batches of a step by epoch, but the data of a Task has only one epoch: set "
    "trainer.accumulate",
    BatchSizeFinder: "changes the batch during the run, and its trials would not end: set data.batch_size",
    LearningRateFinder: "trains before the run with rates of its own: try rates with -m optimizer.lr=1e-3,3e-3",
    BaseFinetuning: "unfreezes layers by epoch, but the whole run is one epoch: freeze weights with optimizer.rules (trainable: false), and "
    "start a second run from the first with init_from.path, or set requires_grad in a callback of yours, by trainer.global_step",
}
"""Callbacks of Lightning that a run cannot have, with the reason and what to use instead."""


def check_callbacks(callbacks: Sequence[L.Callback]) -> None:
    """Raise a ConfigError if a callback is in ``NOT_FOR_RUNS``, or saves by a validation metric before the validation of its step."""
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and _saves_early(callback):
            raise ConfigError(
                f"callbacks: {type(callback).__name__} with every_n_train_steps or train_time_interval saves before the validation of a step, "
                f"so monitor={callback.monitor} would belong to earlier weights: remove them to save after each validation (trainer.val_every)"
            )
        for kind, reason in NOT_FOR_RUNS.items():
            if isinstance(callback, kind):
                raise ConfigError(f"callbacks: {type(callback).__name__} {reason}")


def _saves_early(callback: ModelCheckpoint) -> bool:
    """Whether a callback saves by a validation metric, but not after a validation."""
    # these have no public attribute; pyproject.toml bounds the version of lightning
    by_steps = callback._every_n_train_steps or callback._train_time_interval
    return bool(by_steps) and (callback.monitor or "").startswith("val_")


def epoch_hooks(callbacks: Sequence[L.Callback]) -> list[str]:
    """Return a line for each hook of a user's callback that Lightning calls once an epoch, because a run is a single epoch."""
    return [
        f"callbacks: {type(callback).__name__}.{hook} is called once, because Lightning counts the whole run as one epoch: for a call "
        "after each validation, use on_validation_end"
        for callback in callbacks
        for hook in ("on_train_epoch_start", "on_train_epoch_end")
        if getattr(type(callback), hook).__module__.partition(".")[0] not in ("lightning", "pytorch_lightning", "minitx")
    ]


def device_arguments(options: TrainerConfig) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer for devices, strategy, precision and checkpoints."""
    device = device_of(options.accelerator)
    precision: str | None = cpu_precision(options.precision) if device.type == "cpu" else options.precision
    plugins: list[Any] = []
    if options.strategy == "sharded" and precision == "64-true":  # Lightning refuses this by name, but not as a plugin
        plugins, precision = [*plugins, DoublePrecision()], None
    elif precision == "bf16-mixed":  # for unknown devices Lightning would use CUDA's autocast
        plugins, precision = [*plugins, MixedPrecision("bf16-mixed", device.type)], None
    strategy: Strategy = SingleDeviceStrategy(device)  # for unknown devices Lightning would use the CPU
    if options.world_size > 1 or options.strategy != "auto":
        from minitx.training import sharding

        is_sharded, find_unused = options.strategy == "sharded", options.strategy == FIND_UNUSED
        strategy = sharding.Sharded(options.world_size) if is_sharded else sharding.ddp(find_unused=find_unused)
    where = {"accelerator": options.accelerator, "devices": options.devices, "num_nodes": options.num_nodes}
    return {**where, "strategy": strategy, "plugins": plugins, "precision": precision}


_NOTICES = (
    "overridden .on_before_batch_transfer.",  # the module checks masks there, before they are copied to the device
    "does not have many workers",  # one process loads faster than our models train
    "Checkpoint directory .* exists and is not empty",  # the folder of the run that is resumed
    "dataloader is not resumable",  # it is: batches are addressed by step
    "in eval mode at the start of training",  # build_network logs these modules
    "isinstance.*LeafSpec.*is deprecated",  # in Lightning's own code, for every batch
    "FSDP2-wrapped module.*view tensor",  # no block changes its output in place
    "WeightAveraging callback with a model that overrides",  # configure_model only shards
    "WeightAveraging callback, but loading a checkpoint outside",  # evaluation uses the averaged weights
)
"""Warnings of Lightning and torch that do not help a user, each with the reason."""


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """A context that hides Lightning's notices (devices, tips, advice about workers), but not the table of ``ModelSummary``."""
    quiet = {
        "lightning.pytorch": logging.WARNING,
        "lightning.pytorch.callbacks.model_summary": logging.INFO,  # users add this callback to see its table
        "lightning.fabric": logging.WARNING,
        "torch.distributed.tensor": logging.ERROR,
    }
    levels = {name: logging.getLogger(name).level for name in quiet}
    try:
        for name, level in quiet.items():
            logging.getLogger(name).setLevel(level)
        with warnings.catch_warnings():
            for message in _NOTICES:
                warnings.filterwarnings("ignore", message=f".*{message}.*")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
