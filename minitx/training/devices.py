"""The devices, the strategy and the precision of a run, with checks of combinations that cannot work."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy

from minitx.config import ConfigError, TrainerConfig, TransformerConfig
from minitx.training.checkpoint_io import AtomicCheckpointIO
from minitx.training.hardware import cpu_precision, device_type
from minitx.training.parallel import Sharded


def place_of(options: TrainerConfig) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer for devices, strategy, precision and checkpoints."""
    precision: str | None = cpu_precision(options.precision) if device_type(options) == "cpu" else options.precision
    plugins: list[Any] = [AtomicCheckpointIO()]
    if options.strategy == "sharded" and precision == "64-true":  # which Lightning refuses by name, not as a plugin
        plugins, precision = [*plugins, DoublePrecision()], None
    where = {"accelerator": options.accelerator, "devices": options.devices, "num_nodes": options.num_nodes}
    return {**where, "strategy": build_strategy(options), "plugins": plugins, "precision": precision}


def check_processes(trainer: L.Trainer) -> None:
    """Check conditions that are known only when all processes run.

    Raises:
        ConfigError: the precision differs between machines, or averaged weights are used with a sharded model.
    """
    own = str(trainer.precision)
    if trainer.strategy.reduce_boolean_decision(trainer.strategy.broadcast(own) != own, all=False):
        raise ConfigError(f"trainer.precision={own} differs between the machines of this run; set trainer.precision=32-true")
    averaged = any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if averaged and isinstance(trainer.strategy, Sharded):
        raise ConfigError("callbacks.ema needs whole weights on one device, got trainer.strategy=sharded")


def build_strategy(options: TrainerConfig) -> Strategy | str:
    """Return Lightning's ``strategy``: DDP for several devices, unless ``trainer.strategy`` is another one."""
    if options.strategy == "sharded":
        return Sharded(options.world_size)
    if options.strategy == "ddp" or options.world_size > 1:
        return DDPStrategy(gradient_as_bucket_view=True)
    return "auto"


def check_parallel(model: TransformerConfig | None, options: TrainerConfig, *, probes: bool) -> None:
    """Check that a model can be sharded with these options. ``model`` is None if it is not one of ours.

    Raises:
        ConfigError: with ``trainer.strategy=sharded``, the model is not ours, or probes are on, which need whole weights on one
            device.
    """
    if options.strategy == "sharded" and model is None:
        raise ConfigError("trainer.strategy=sharded cuts the blocks of our models only: use trainer.strategy=ddp")
    if options.strategy == "sharded" and probes:
        raise ConfigError("callbacks.probe.every needs whole weights on one device: set it to 0 with trainer.strategy=sharded")
