"""What a run is about to do, on one screen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lightning.pytorch as L
import torch
from torch import nn

from minitx.config import TransformerConfig


def summary(
    trainer: L.Trainer,
    network: nn.Module,
    folder: Path,
    *,
    model: TransformerConfig | None = None,
    facts: Mapping[str, str | None] | None = None,
) -> str:
    """The lines to log before the first step: model, device, whatever ``facts`` say, steps and folder.

    Args:
        trainer: of the run. network: the model, whole.
        folder: of the run.
        model: the config of one of our models, whose sizes are shown.
        facts: further lines by their name, such as ``data`` and ``tokenizer``; None leaves a line out.
    """
    every = int(trainer.val_check_interval) // trainer.accumulate_grad_batches
    lines = {
        "model": describe_model(network, model),
        "device": describe_device(trainer),
        **(facts or {}),
        "steps": f"{trainer.max_steps:,}, validation every {every:,}",
        "folder": str(folder),
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {text}" for name, text in lines.items() if text is not None)


def describe_model(network: nn.Module, model: TransformerConfig | None = None) -> str:
    """The class and the parameters of a model, and the sizes of one of ours.

    >>> describe_model(nn.Linear(2, 3))
    'Linear, 9 parameters'
    """
    total = sum(p.numel() for p in network.parameters())
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    text = f"{type(network).__name__}, {total:,} parameters" + (f" ({trained:,} trained)" if trained != total else "")
    if model is None:
        return text
    return f"{text}: num_layers {model.num_layers}, num_heads {model.num_heads}, embed_dim {model.embed_dim}"


def describe_device(trainer: L.Trainer) -> str:
    """The processes, the kind of device, the precision and the strategy of a run."""
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    count = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    strategy = f", {type(trainer.strategy).__name__}" if trainer.world_size > 1 else ""
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return f"{count}{name}{threads}, {trainer.precision}{strategy}"
