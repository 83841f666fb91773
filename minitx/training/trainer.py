"""Lightning's Trainer for the options of a run, without its notices."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from minitx.config import ConfigError, TrainerConfig
from minitx.config.schema import first_line
from minitx.training.checkpoint_files import read_checkpoint, write_checkpoint
from minitx.training.devices import cpu_precision, device_of
from minitx.training.lightning_private import share_no_sigterm
from minitx.training.metrics_csv import MetricsFile
from minitx.training.unsupported import check_callbacks


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
        ConfigError: Lightning does not accept the arguments, or a callback is not supported.
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
        raise ConfigError(f"trainer: {first_line(error)}") from error
    share_no_sigterm(trainer)
    return trainer


def validation_of(options: TrainerConfig) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer for ``trainer.val_every``."""
    assert options.max_steps is not None  # see ``in_steps``
    steps = min(options.val_every or options.max_steps, options.max_steps)
    return {"val_check_interval": steps * options.accumulate, "check_val_every_n_epoch": None}


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
        from minitx.training.unused_parameters import FIND_UNUSED

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
