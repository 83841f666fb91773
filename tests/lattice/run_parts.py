"""What the command lines of the run lattice name by ``_target_``: a model, and callbacks that record a run or end it."""

from __future__ import annotations

import copy
import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn

from minitx.data.task import Task
from tests.lattice.inside import network_of, train_or_refuse

Batch = dict[str, Any]


class PowerCut(BaseException):
    """The end of a run that nobody expects. It is no ``Exception``: nothing may tidy up after it."""


class OwnModel(nn.Module):
    """A language model without attention: each token alone."""

    def __init__(self, vocab_size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)
        self.inner, self.norm, self.drop = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(dropout)

    def forward(self, input_ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        return self.head(self.norm(x + self.drop(self.inner(x).tanh())))


class NoisyRows:
    """Rows whose tokens are drawn when they are read, as augmentations are, with the generators of NumPy, Python and torch."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> dict[str, Any]:
        drawn = [np.random.randint(9), random.randrange(9), *torch.randint(9, (5,)).tolist()]
        return {"input_ids": [row % 9, *drawn[:-1]], "labels": [label if torch.rand(()) < 0.8 else -100 for label in drawn]}


def noisy() -> Task:
    """A task of ``NoisyRows``."""
    return Task(
        name="noisy", kind="language_model", train=NoisyRows(), val=NoisyRows(), longest=7, model_fields={"vocab_size": 9}
    )


class TwoModes(torch.optim.SGD):
    """An optimizer that has other weights for evaluation than for training, as schedule-free ones have."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@dataclass
class Record:
    """What a run did: its first weights, the batches of each step, and those of its last validation and of its test."""

    start: nn.Module
    batches: list[tuple[int, Batch]] = field(default_factory=list)
    validation: list[Batch] = field(default_factory=list)
    test: list[Batch] = field(default_factory=list)

    def steps(self) -> dict[int, list[Batch]]:
        """The micro-batches of each step."""
        by_step: dict[int, list[Batch]] = {}
        for step, batch in self.batches:
            by_step.setdefault(step, []).append(batch)
        return by_step


RECORDS: list[Record] = []
"""Of the runs of this process that had a ``Recorder``, the last one last."""


class Recorder(L.Callback):
    """Records a run in ``RECORDS``."""

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        RECORDS.append(Record(copy.deepcopy(network_of(module))))

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Batch, batch_idx: int) -> None:
        RECORDS[-1].batches.append((trainer.global_step, _copied(batch)))

    def on_validation_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        RECORDS[-1].validation = []

    def on_validation_batch_start(self, trainer: L.Trainer, module: Any, batch: Batch, batch_idx: int, *_: Any) -> None:
        RECORDS[-1].validation.append(_copied(batch))

    def on_test_batch_start(self, trainer: L.Trainer, module: Any, batch: Batch, batch_idx: int, *_: Any) -> None:
        if RECORDS:  # a run that is over begins no record
            RECORDS[-1].test.append(_copied(batch))


def _copied(batch: Batch) -> Batch:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}


def train_on_pretended(words: list[str], folder: Path) -> Any:
    """``train_or_refuse`` in a process with the pretended accelerator."""
    from tests import pretend

    pretend.register()
    return train_or_refuse(words, folder)


SIGNALS = {"term_first": (signal.SIGTERM, 1), "term": (signal.SIGTERM, 3), "int": (signal.SIGINT, 5)}
"""Signals, and the step in whose last micro-batch they come."""


class Hit(Checkpoint):
    """Ends a run.

    It is a ``Checkpoint``, because Lightning calls those last, in the order of the config: after ``best.ckpt``, before ``last.ckpt``.

    Args:
        how: a key of ``SIGNALS``. ``crash_before``: the power goes between the two files of step 4. ``crash_inside``: while the first
            file of step 4 is written. ``crash_after``: in step 5. Then each file of rows ends in the middle of a line.
            ``nonfinite``: the weights are not finite before ``step``.
        step: see ``nonfinite``.
    """

    def __init__(self, how: str, step: int = 4) -> None:
        self.how, self.step, self.is_done = how, step, False

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Batch, batch_idx: int) -> None:
        step, is_last = trainer.global_step + 1, (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self.how in SIGNALS and step == SIGNALS[self.how][1] and is_last and not self.is_done:
            self.is_done = True
            os.kill(os.getpid(), SIGNALS[self.how][0])
        if self.how == "crash_after" and step == 5:
            crash(trainer)
        if self.how == "nonfinite" and step == self.step:
            with torch.no_grad():
                next(p for p in network_of(module).parameters() if p.requires_grad).fill_(float("nan"))

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        if self.how == "crash_before" and trainer.global_step >= 4:
            crash(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.how == "crash_before" and trainer.global_step == 5:  # without a validation after step 4
            crash(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.how == "crash_inside" and trainer.global_step >= 4:
            checkpoint["the end"] = _Unwritable(trainer)


def crash(trainer: L.Trainer) -> None:
    """The power goes while a row is written to each file."""
    folder = Path(trainer.default_root_dir)
    for path in (*folder.glob("*.jsonl"), folder / "metrics.csv"):
        with path.open("a", encoding="utf-8") as file:
            file.write("9,0.5" if path.suffix == ".csv" else '{"step": 9, "laye')
    raise PowerCut


class _Unwritable:
    """Cannot be pickled: the file is cut short here."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer

    def __reduce__(self) -> Any:
        return crash(self.trainer)
