"""Where a run runs: devices, strategy, precision, and what of it cannot be."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from minitx.config import ConfigError, TrainerConfig, TransformerConfig
from minitx.config.checks import first_line
from minitx.training.checkpoint import AtomicCheckpointIO
from minitx.training.hardware import check_count, cpu_precision, runs_on_cpu
from minitx.training.parallel import Sharded


def place_of(options: TrainerConfig) -> dict[str, Any]:
    """Where, in which precision and with which checkpoints a trainer runs."""
    precision: str | None = cpu_precision(options.precision) if runs_on_cpu(options) else options.precision
    plugins: list[Any] = [AtomicCheckpointIO()]
    if options.strategy == "sharded" and precision == "64-true":  # which Lightning refuses by name, not as a plugin
        plugins, precision = [*plugins, DoublePrecision()], None
    where = {"accelerator": options.accelerator, "devices": options.devices, "num_nodes": options.num_nodes}
    return {**where, "strategy": build_strategy(options), "plugins": plugins, "precision": precision}


def check_devices(options: TrainerConfig) -> None:
    """Refuse what this machine lacks or Lightning does not take.

    Raises:
        ConfigError: no GPU, or fewer than asked for; a strategy that does not fit the rest.
    """
    check_count(options)
    try:
        L.Trainer(**place_of(options), logger=False, enable_checkpointing=False, enable_progress_bar=False)
    except (ValueError, MisconfigurationException, ImportError) as error:
        said = f"trainer.strategy={options.strategy} with trainer.accelerator={options.accelerator}"
        raise ConfigError(f"{said} and trainer.devices={options.devices} cannot be used: {first_line(error)}") from error


def build_strategy(options: TrainerConfig) -> Strategy | str:
    """What Lightning takes as ``strategy``: ``ddp`` for several devices unless ``trainer.strategy`` says otherwise."""
    if options.strategy == "sharded":
        return Sharded(
            data_parallel_size=options.num_replicas,
            tensor_parallel_size=options.tensor_parallel,
            save_distributed_checkpoint=options.sharded_ckpt,
        )
    if options.strategy == "ddp" or options.num_replicas > 1:
        return DDPStrategy(gradient_as_bucket_view=True)
    return "auto"


def check_parallel(model: TransformerConfig, options: TrainerConfig, *, probes: bool) -> None:
    """Refuse what cannot be cut over devices.

    Raises:
        ConfigError: a part of the model that tensor parallelism has no plan for, heads or hidden units that do not divide,
            probes of weights that no single device holds.
    """
    if options.strategy == "sharded" and probes:
        raise ConfigError("callbacks.probe.every needs whole weights on one device: set it to 0 with trainer.strategy=sharded")
    size = options.tensor_parallel
    if size == 1:
        return
    without_plan = {
        f"model.architecture={model.architecture}": model.architecture == "vision",
        f"model.attention={model.attention}": model.attention not in ("exact", "sliding_window"),
        f"model.position={model.position}": model.position in ("alibi", "t5"),  # one slope or table a head
        f"model.scale={model.scale}": model.scale == "learned",
        f"model.sinks={model.sinks}": model.sinks,
        f"model.embed_shortcut={model.embed_shortcut}": model.embed_shortcut,
        f"model.value_residual={model.value_residual}": model.value_residual,
        f"model.qk_norm={model.qk_norm}": model.qk_norm == "l2",
        f"model.num_experts={model.num_experts}": bool(model.num_experts),
    }
    for name, refused in without_plan.items():
        if refused:
            raise ConfigError(f"{name} has no tensor-parallel plan: set trainer.tensor_parallel=1 (FSDP can serve it)")
    for name, count in {"num_heads": model.num_heads, "num_kv_heads": model.kv_heads, "ffn_dim": model.ffn_width}.items():
        if count % size:
            raise ConfigError(f"model.{name}={count} must be divisible by trainer.tensor_parallel={size}")
