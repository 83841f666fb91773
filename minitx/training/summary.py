"""The summary of a run, printed before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn

from minitx.config import OptimizerConfig, RunConfig, ScheduleConfig
from minitx.data.module import DataModule
from minitx.training.calling import config_of
from minitx.training.module import TrainingModule
from minitx.training.steps import unit_of


def summary(trainer: L.Trainer, config: RunConfig, module: TrainingModule, data: L.LightningDataModule, folder: Path) -> str:
    """Return the lines to log before the first step: model, device, data, training, steps, folder, and limitations of this run.

    Args:
        trainer: the run's trainer. module: the unsharded model and its objective. data: the run's data. folder: the run's folder.
    """
    every = int(trainer.val_check_interval) // trainer.accumulate_grad_batches
    tokenizer = data.task.tokenizer if isinstance(data, DataModule) else None
    lines = {
        "model": describe_model(module.network),
        "device": describe_device(trainer),
        "data": describe_data(data, config.trainer.val_batches),
        "tokenizer": f"{tokenizer.vocab_size:,} tokens" if tokenizer else None,
        "training": describe_training(config, module.objective, data),
        "steps": f"{trainer.max_steps:,}, validation every {every:,}",
        "folder": str(folder),
    }
    text = [f"{name:9}  {said}" for name, said in lines.items() if said is not None]
    if config.ckpt_path is not None and not isinstance(data, DataModule):
        text.append("the order of the data starts anew: the data module is not ours, and its loader may keep no state")
    return "\n".join(text)


def describe_model(network: nn.Module) -> str:
    """Return the class and the number of parameters of a model, and the sizes of one of ours.

    >>> describe_model(nn.Linear(2, 3))
    'Linear, 9 parameters'
    """
    total = sum(p.numel() for p in network.parameters())
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    text = f"{type(network).__name__}, {total:,} parameters" + (f" ({trained:,} trained)" if trained != total else "")
    model = config_of(network)
    if model is None:
        return text
    return f"{text}: num_layers {model.num_layers}, num_heads {model.num_heads}, embed_dim {model.embed_dim}"


def describe_training(config: RunConfig, objective: Any, data: L.LightningDataModule) -> str:
    """Return the objective with the divisor of its sum, the optimizer with what it excludes, the schedule and the clipping."""
    loss = getattr(objective, "loss", getattr(objective, "func", objective))  # a loss of torch, or a partial function
    divisor = "mean of each micro-batch"
    if isinstance(data, DataModule):
        divisor = f"sum / {'rows' if unit_of(data.probe_batch(1)['labels']) == 'rows' else 'labels'} of a step"
    optimizer, schedule, clip = config.optimizer, config.schedule, config.trainer.clip
    if isinstance(optimizer, OptimizerConfig):
        rates = {"lr": optimizer.lr, **({"matrix_lr": optimizer.matrix_lr} if optimizer.name == "muon" else {})}
        said = [optimizer.name, *(f"{name} {rate:g}" for name, rate in rates.items())]
        said += [f"weight_decay {optimizer.weight_decay:g} (not of vectors)"] if optimizer.weight_decay else []
        said += [f"without {rule.match}" for rule in optimizer.rules if not rule.trainable]
    else:
        said = _describe_part(optimizer)
    curve = _describe_part(schedule)
    if isinstance(schedule, ScheduleConfig):
        curve = [schedule.name, *([f"warmup_steps {schedule.warmup_steps}"] if schedule.warmup_steps else [])]
    name = getattr(loss, "__name__", type(loss).__name__)
    parts = (f"{name}, {divisor}", ", ".join(said), ", ".join(curve), f"clip {clip:g}" if clip else "no clip")
    return " · ".join(parts)


def _describe_part(node: Any) -> list[str]:
    """The last name of a target of the user's, and its arguments that are numbers or words."""
    if not isinstance(node, Mapping):
        return []
    given = [f"{name} {value}" for name, value in node.items() if name[0] != "_" and isinstance(value, str | int | float)]
    return [str(node["_target_"]).rpartition(".")[2], *given]


def describe_data(data: L.LightningDataModule, val_batches: int | None = None) -> str:
    """Return the name and the sizes of a task, or the class of a data module of the user's, and how much of it is validated on."""
    if not isinstance(data, DataModule):
        return type(data).__name__ + (f", the first {val_batches:,} batches to validate" if val_batches else "")
    rows = f"{len(data.task.train):,} rows" if hasattr(data.task.train, "__len__") else "new examples at every step"
    parts = f" in {data.accumulate} parts" if data.accumulate > 1 else ""
    whole = data.val_source().num_rows
    read = min(whole, (val_batches or whole) * data.val_batch_size(1))
    validated = f"{whole:,}" if read == whole else f"the first {read:,} of {whole:,}"
    return f"{data.task.name}: {rows}, {validated} to validate; {data.batch_size} a step{parts}"


def describe_device(trainer: L.Trainer) -> str:
    """Return the processes, the kind of device, the precision and the strategy of a run."""
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    count = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    strategy = f", {type(trainer.strategy).__name__}" if trainer.world_size > 1 else ""
    number = torch.get_num_threads()
    threads = f", {number} thread{'s' * (number > 1)}" if device.type == "cpu" else ""
    return f"{count}{name}{threads}, {trainer.precision}{strategy}"
