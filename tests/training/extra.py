"""Runs with callbacks and loggers that are objects of the test's own."""

import dataclasses
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

import minitx.training.fit as fit_module
import minitx.training.run as run_module
from minitx.config import RunConfig, TrainerConfig
from minitx.training.checkpoint_files import read_checkpoint
from minitx.training.metrics_csv import read_metrics

QUIET = ["trainer.accelerator=cpu", "trainer.threads=1", "trainer.log_every=1", "callbacks.progress=false"]


class AddLoggers(L.Callback):
    """Adds loggers to those of the run."""

    def __init__(self, *loggers: Any) -> None:
        self.loggers = loggers

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        trainer.loggers = [*trainer.loggers, *self.loggers]


class Layer(nn.Module):
    """A residual layer of a model of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.inner(x).tanh())


class Layered(nn.Module):
    """A model of one's own: each token alone, through two layers."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(input_ids)))


def of_digits(config: RunConfig, **changes: Any) -> RunConfig:
    """``config`` on pictures of digits."""
    model = config.model.with_(architecture="vision", head="sequence", image_size=8, patch_size=4)
    return dataclasses.replace(config, data={"_target_": "minitx.data.digits", "batch_size": 12}, model=model, **changes)


def train_with(config: RunConfig, folder: Path, *callbacks: L.Callback, **options: Any) -> dict[str, Any]:
    """``train`` with ``callbacks`` after the run's own."""
    own = fit_module.build_callbacks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_module, "build_callbacks", lambda *arguments: [*own(*arguments), *callbacks])
        return run_module.train(config, folder, **options)


OF_THE_RUN = {field.name for field in dataclasses.fields(RunConfig)}


def fit(
    folder: Path, data: Any, *, model: nn.Module, objective: Any = None, batch_size: int = 2, **options: Any
) -> dict[str, Any]:
    """A run of objects on the CPU; options are keys of the run or of its trainer."""
    parts = {"callbacks": {}}
    parts |= {name: value for name, value in options.items() if name in OF_THE_RUN}
    trainer = {name: value for name, value in options.items() if name not in OF_THE_RUN}
    config = RunConfig(trainer=TrainerConfig(**{"accelerator": "cpu", "log_every": 1, "rehearse": False, **trainer}), **parts)
    return run_module.train(config, folder, model=model, data=data, objective=objective, batch_size=batch_size)


def last(folder: Path, name: str = "last") -> dict[str, Any]:
    """The last checkpoint of a run, or its best one."""
    return read_checkpoint(folder / "checkpoints" / f"{name}.ckpt")


def losses_of(folder: Path) -> list[float]:
    """The training loss of every step of a run, as it was computed."""
    return [row["train_loss"] for row in read_metrics(folder / "metrics.csv") if row["train_loss"] is not None]
