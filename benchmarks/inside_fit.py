"""Blocks of steps inside one running fit, by turns: how the benchmarks of the trainer measure without its set-up."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from measure import compared, turns

from minitx.config import CallbacksConfig, RunConfig, TextDataConfig, TrainerConfig, TransformerConfig
from minitx.data.module import DataModule
from minitx.training.building import build_module, build_network, open_data
from minitx.training.metrics import MetricsFile
from minitx.training.module import TrainingModule
from minitx.training.run import build_trainer, last_checkpoint, own_callbacks, quiet_lightning


class Turns(L.Callback):
    """Times blocks of ``steps`` steps, in the order of ``measure.turns``.

    A block inside the trainer lasts from the beginning of its first step to the beginning of the step after its last, so that
    all that the trainer does between two steps counts, fetching a batch and calling back included.

    Args:
        outside: what makes a block of a side instead of the trainer, called with (module, steps), and timed.
        before: called with the side before each block. warm: steps before the first.
    """

    def __init__(
        self,
        steps: int,
        pairs: int,
        *,
        outside: dict[int, Callable[[TrainingModule, int], None]] | None = None,
        before: Callable[[int], None] = lambda side: None,
        warm: int = 20,
    ) -> None:
        self.warm = warm
        self.steps, self.outside, self.before = steps, outside or {}, before
        self.left, self.blocks = turns(pairs), list[tuple[int, float]]()
        self.num_steps = self.warm + steps * sum(side not in self.outside for side in self.left) + 1
        self._running: int | None = None
        self._started = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx < self.warm or (batch_idx - self.warm) % self.steps:
            return
        if self._running is not None:
            self.blocks.append((self._running, (time.perf_counter() - self._started) / self.steps))
            self._running = None
        while self.left and self._running is None:
            side = self.left.pop(0)
            self.before(side)
            self._started = time.perf_counter()
            if side in self.outside:
                self.outside[side](module, self.steps)
                self.blocks.append((side, (time.perf_counter() - self._started) / self.steps))
            else:
                self._running = side


def run_config(batch_size: int, max_steps: int, *, context: int = 64, **callbacks: Any) -> RunConfig:
    """The small character model on the King James text, as ``experiment=char_lm`` trains it, without checkpoints."""
    return RunConfig(
        model=TransformerConfig(max_len=context),
        data=TextDataConfig(batch_size=batch_size, context_len=context),
        trainer=TrainerConfig(max_steps=max_steps, accelerator="cpu", val_every=0, val_batches=1, ckpt_every=0),
        callbacks=CallbacksConfig(**callbacks),
    )


def ready(config: RunConfig) -> tuple[TrainingModule, DataModule]:
    """Module and data of a run, as ``train`` makes them."""
    data = open_data(config)
    return build_module(config, data, build_network(config, data)), data


def fit(config: RunConfig, more: Sequence[L.Callback], change: Callable[[L.Trainer], None] = lambda trainer: None) -> None:
    """What ``train`` does up to the end of training: the run's own callbacks, ``metrics.csv`` and progress, then ``more``."""
    with quiet_lightning(), tempfile.TemporaryDirectory() as name:
        module, data = ready(config)
        folder = Path(name)
        guard = last_checkpoint(config, folder)
        callbacks = [*own_callbacks(config, module, data, folder), *more, guard]
        trainer = build_trainer(config, folder, [MetricsFile(folder / "metrics.csv")], callbacks, addressed=True)
        change(trainer)
        with guard:
            trainer.fit(module, datamodule=data)


def measured(config: RunConfig, blocks: Turns) -> dict[str, Any]:
    """The fit with ``blocks`` inside, and what they say, as ``measure.compare`` returns it."""
    fit(config, [blocks])
    return compared(blocks.blocks)
