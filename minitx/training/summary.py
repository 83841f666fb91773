"""The summary of a run, printed before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lightning.pytorch as L
import torch
from torch import nn

from minitx.config import RunConfig
from minitx.data.module import DataModule
from minitx.training.calling import config_of


def summary(trainer: L.Trainer, config: RunConfig, network: nn.Module, data: L.LightningDataModule, folder: Path) -> str:
    """Return the lines to log before the first step: model, device, data, steps, folder, and limitations of this run.

    Args:
        trainer: the run's trainer. network: the unsharded model. data: the run's data. folder: the run's folder.
    """
    every = int(trainer.val_check_interval) // trainer.accumulate_grad_batches
    tokenizer = data.task.tokenizer if isinstance(data, DataModule) else None
    lines = {
        "model": describe_model(network),
        "device": describe_device(trainer),
        "data": describe_data(data, config.trainer.val_batches),
        "tokenizer": f"{tokenizer.vocab_size:,} tokens" if tokenizer else None,
        "steps": f"{trainer.max_steps:,}, validation every {every:,}",
        "folder": str(folder),
    }
    text = [f"{name:9}  {said}" for name, said in lines.items() if said is not None]
    if config.ckpt_path is not None and not isinstance(data, DataModule):
        text.append("the order of the data starts anew: the data module is not ours, and its loader may keep no state")
    if isinstance(config.optimizer, Mapping):
        text.append("every step is checked for numbers that are not finite on the host: the optimizer is not ours")
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
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return f"{count}{name}{threads}, {trainer.precision}{strategy}"
