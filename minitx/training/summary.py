"""The summary of a run before its first step."""

from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as L
import torch
from torch import Tensor

from minitx.config import Part
from minitx.data.datamodule import DataModule
from minitx.training.devices import device_name
from minitx.training.module import TrainingModule
from minitx.training.optimizers import describe_decay


def summary(
    trainer: L.Trainer, module: TrainingModule, data: DataModule, training: str, folder: Path, resumed_step: int
) -> str:
    """Return the lines to log before the first step: model, device, data, training, steps and folder.

    Args:
        trainer: the trainer of the run.
        module: the module of the run, with the unsharded model.
        data: the data of the run.
        training: the result of ``describe_training``.
        folder: the folder of the run.
        resumed_step: the number of steps before the checkpoint that is resumed, or 0.
    """
    options = module.options
    tokenizer = data.task.tokenizer
    every = f"every {options.val_every:,}" if options.val_every else "at the end"
    lines = {
        "model": module.net.describe(),
        "device": describe_device(trainer),
        "data": describe_data(data, options.val_batches, trainer.world_size),
        **{f"  {split}": "; ".join(sentences) for split, sentences in data.task.left_out.items() if sentences},
        "tokenizer": f"{tokenizer.vocab_size:,} tokens" if tokenizer else None,
        "training": training,
        "steps": f"{options.max_steps:,}{f' ({resumed_step:,} done)' if resumed_step else ''}, validation {every}",
        "folder": str(folder),
    }
    return "\n".join(f"{name:9}  {line}" for name, line in lines.items() if line is not None)


def describe_training(module: TrainingModule, data: DataModule, optimizer: Part, schedule: Part) -> str:
    """Return the objective with the divisor of its sum, the optimizer, its frozen weights and decays, the schedule and the clipping."""
    objective = module.objective
    clip = module.options.clip
    loss = getattr(objective, "loss", getattr(objective, "func", objective))  # a loss of torch, or a partial function
    divisor = f"sum / {'rows' if unit_of(data.probe_batch(1)['labels']) == 'rows' else 'labels'} of a step"
    name = getattr(loss, "__name__", type(loss).__name__)
    parts = (
        f"{name}, {divisor}",
        describe_part(optimizer),
        describe_decay(module.make_optimizer(module.network), module.network),
        describe_part(schedule),
        f"clip {clip:g}" if clip else "no clip",
    )
    return " · ".join(filter(None, parts))


def describe_part(part: Part) -> str:
    """Return the last name of the target of a part, its nonzero numbers and strings, and the weights that its rules freeze.

    >>> from minitx.config.part import Takes
    >>> describe_part(Part.of({"_target_": "torch.optim.SGD", "lr": 0.1}, "optimizer", Takes(first=1)))
    'SGD, lr 0.1'
    """
    plain = part.plain()
    values = {name: value for name, value in plain.items() if name[0] != "_" and value and not isinstance(value, bool)}
    words = [f"{name} {value:g}" for name, value in values.items() if isinstance(value, int | float)]
    words += [f"{name} {value}" for name, value in values.items() if isinstance(value, str)]
    words += [f"without {rule['match']}" for rule in plain.get("rules", ()) if not rule.get("trainable", True)]
    return ", ".join([part.name.rpartition(".")[2], *words])


def describe_data(data: DataModule, val_batches: int | None = None, world: int = 1) -> str:
    """Return the name and the sizes of a task, and the number of rows of one validation by ``world`` processes."""
    rows = f"{len(data.task.train):,} rows" if hasattr(data.task.train, "__len__") else "new examples at every step"
    parts = f" in {data.accumulate} parts" if data.accumulate > 1 else ""
    total = data.val_source().num_rows
    read = min(total, (val_batches or total) * data.val_batch_size(world))
    validated = f"{total:,}" if read == total else f"the first {read:,} of {total:,}"
    return f"{data.task.name}: {rows}, {validated} to validate; {data.batch_size} a step{parts}"


def describe_device(trainer: L.Trainer) -> str:
    """Return the processes, the device, the precision and the strategy of a run, and a warning if the CPU is busy.

    The threads of a step wait for each other at every product. If another program occupies one of their cores, all of them
    wait: with 2 threads on 2 busy cores, ``kv_lookup`` was 70 times slower than with 1 thread.
    """
    device = trainer.strategy.root_device
    count = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    strategy = f", {type(trainer.strategy).__name__}" if trainer.world_size > 1 else ""
    number = torch.get_num_threads()
    threads = f", {number} thread{'s' * (number > 1)}" if device.type == "cpu" else ""
    load = os.getloadavg()[0] if device.type == "cpu" and number > 1 and hasattr(os, "getloadavg") else 0.0
    is_crowded = load + number > (os.cpu_count() or number) + 0.5
    busy = f"; other programs use these cores (load {load:.1f}): trainer.threads=1 may be many times faster"
    return f"{count}{device_name(device)}{threads}, {trainer.precision}{strategy}{busy if is_crowded else ''}"


def unit_of(labels: Tensor) -> str:
    """Return the unit of a batch's targets: ``rows`` if a row has one label, ``labels`` if labels are floating-point, else ``tokens``."""
    if labels.dim() < 2:
        return "rows"
    return "labels" if labels.is_floating_point() else "tokens"
