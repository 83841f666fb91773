"""What the command lines of the run lattice name by ``_target_``: a model, and callbacks that record a run or end it."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader

from minitx.analysis import capture, intervene
from minitx.data.task import Task
from tests.lattice.inside import network_of

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


class Normed(OwnModel):
    """A model whose forward pass in training changes buffers: running statistics, and a mean of the user's on which its output depends."""

    mean: Tensor

    def __init__(self, vocab_size: int, dropout: float = 0.0) -> None:
        super().__init__(vocab_size, dropout)
        self.batch_norm = nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, input_ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.5)
        x = self.batch_norm(x.flatten(0, 1)).view_as(x) + self.mean
        return self.head(self.norm(x + self.drop(self.inner(x).tanh())))


class NoisyRows:
    """Rows whose tokens are drawn when they are read, as augmentations are, with the generators of NumPy, Python and torch."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> dict[str, Any]:
        drawn = [np.random.randint(9), random.randrange(9), *torch.randint(9, (5,)).tolist()]
        return {"input_ids": [row % 9, *drawn[:-1]], "labels": [label if torch.rand(()) < 0.8 else -100 for label in drawn]}


def noisy() -> Task:
    """A task of ``NoisyRows``. Of the last batch of validation, the first process has one row, and the others none."""
    return Task(
        name="noisy", kind="language_model", train=NoisyRows(40), val=NoisyRows(5), longest=7, model_fields={"vocab_size": 9}
    )


class OwnModule(L.LightningDataModule):
    """A user's data module: every other row has no label that counts, and validation has one row.

    Args:
        batch_size: rows of a micro-batch of one process.
    """

    model_fields: ClassVar = {"vocab_size": 9}

    def __init__(self, batch_size: int, num_workers: int = 0) -> None:
        super().__init__()
        self.loading = {"batch_size": batch_size, "num_workers": num_workers}

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(cast(Any, OwnRows(40)), shuffle=True, **cast(Any, self.loading))

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(cast(Any, OwnRows(1)), **cast(Any, self.loading))


class OwnRows:
    """Rows of tokens that are the same at each reading."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids = torch.tensor([(row * place + row // 9) % 9 for place in range(7)])
        return {"input_ids": ids[:-1], "labels": ids[1:] if row % 2 == 0 else torch.full((6,), -100)}


def own_objective(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    """A user's objective: cross-entropy, and the numbers of right answers and of rows beside it."""
    real = batch["labels"] != -100
    correct = (logits[real].argmax(-1) == batch["labels"][real]).sum()
    loss = nn.functional.cross_entropy(
        logits[real].to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, logits.shape[-1]),
        batch["labels"][real],
        reduction="sum",
    )
    return {"loss": loss, "correct": correct.to(loss.dtype), "rows": loss.new_tensor(float(len(batch["labels"])))}


class Counter(L.Callback):
    """A user's callback: counts the rows of all processes with a sum over them, and keeps the number in the checkpoint."""

    def __init__(self) -> None:
        self.rows = 0

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        rows = torch.tensor(float(len(batch["labels"])), device=module.device)
        self.rows += int(trainer.strategy.reduce(rows, reduce_op="sum"))

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = state_dict["rows"]


class Averager(L.Callback):
    """A user's callback: logs the mean over all processes of the labels of validation that count."""

    def on_validation_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Batch, *_: Any) -> None:
        counted = batch["labels"] != -100
        mean = torch.where(counted, batch["labels"], 0).sum().double() / counted.sum().clamp(min=1)
        module.log("val_label", mean, on_epoch=True, sync_dist=True, batch_size=int(counted.sum()))


class Looker(L.Callback):
    """A user's callback: looks into the network of a run, whole or sharded, and changes heads, after each validation. Keeps what it saw."""

    def __init__(self, rows: Any) -> None:
        self.batch, self.seen = rows.probe_batch(3), dict[str, float]()

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        network = network_of(module)
        batch = {name: value.to(module.device) for name, value in self.batch.items()}
        with capture(network, what="residual") as stream:
            module(batch)
        self.seen = {name: float(seen[0].double().square().mean()) for name, seen in stream.items()}
        changes = {"heads": 0.0, "scores": lambda scores: scores / 2, "feedforward": 0.0}
        for what, change in changes.items():
            with intervene(network, what, cast(Any, change)):
                self.seen[what] = float(module(batch).double().square().mean())

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict


class Diary(Logger):
    """A user's logger: a file for each step, which the first process writes."""

    name, version = "diary", 0

    def __init__(self, save_dir: str) -> None:
        super().__init__()
        self.folder = Path(save_dir) / "diary"

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        known = {name: float(value) for name, value in metrics.items() if name.startswith(("train_", "val_"))}
        if not known:  # of a test, which Lightning logs at another step after resuming
            return
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"{step}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | known))

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        pass


class TwoModes(torch.optim.SGD):
    """An optimizer that has other weights for evaluation than for training, as schedule-free ones have."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@dataclass
class Record:
    """What a run did: its first weights, the batches of each step, and those of its last validation and of its test.

    ``start`` is None where a network cannot travel between processes. ``seeds`` are those of the generator after each micro-batch.
    """

    start: nn.Module | None
    batches: list[tuple[int, Batch]] = field(default_factory=list)
    validation: list[Batch] = field(default_factory=list)
    test: list[Batch] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    def steps(self) -> dict[int, list[Batch]]:
        """The micro-batches of each step."""
        by_step: dict[int, list[Batch]] = {}
        for step, batch in self.batches:
            by_step.setdefault(step, []).append(batch)
        return by_step


RECORDS: list[Record] = []
"""Of the runs of this process that had a ``Recorder``, the last one last."""


class Recorder(L.Callback):
    """Records a run in ``RECORDS``. A network that will be sharded is copied before."""

    whole: nn.Module | None = None

    def setup(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        if stage == "fit" and _is_sharded(trainer):
            self.whole = copy.deepcopy(network_of(module))

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        RECORDS.append(Record(self.whole or copy.deepcopy(network_of(module)).cpu()))

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Batch, batch_idx: int) -> None:
        RECORDS[-1].batches.append((trainer.global_step, _copied(batch)))

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        RECORDS[-1].seeds.append(torch.initial_seed())

    def on_validation_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        RECORDS[-1].validation = []

    def on_validation_batch_start(self, trainer: L.Trainer, module: Any, batch: Batch, batch_idx: int, *_: Any) -> None:
        RECORDS[-1].validation.append(_copied(batch))

    def on_test_batch_start(self, trainer: L.Trainer, module: Any, batch: Batch, batch_idx: int, *_: Any) -> None:
        if RECORDS:  # a run that is over begins no record
            RECORDS[-1].test.append(_copied(batch))


def _copied(batch: Batch) -> Batch:
    return {name: value.cpu().clone() if isinstance(value, Tensor) else value for name, value in batch.items()}


SIGNALS = {"term_first": (signal.SIGTERM, 1), "term": (signal.SIGTERM, 3), "int": (signal.SIGINT, 5)}
SIGNALS |= {"usr1": (signal.SIGUSR1, 2), "usr2": (signal.SIGUSR2, 3), "hup": (signal.SIGHUP, 4)}
"""Signals, and the step in whose last micro-batch they come."""


class Hit(Checkpoint):
    """Ends a run. Of several processes, a signal and weights that are not finite hit the last one alone, and the first meets the power cut.

    It is a ``Checkpoint``, because Lightning calls those last, in the order of the config: after ``best.ckpt``, before ``last.ckpt``.

    Args:
        how: a key of ``SIGNALS``. ``crash_before``: the power goes between the two files of step 4. ``crash_inside``: while the first
            file of step 4 is written. ``crash_after``: in step 5. Then each file of rows ends in the middle of a line.
            ``nonfinite``: the weights are not finite before ``step``, or the gradient in it, if the model is sharded.
        step: see ``nonfinite``.
    """

    def __init__(self, how: str, step: int = 4) -> None:
        self.how, self.step, self.is_done = how, step, False

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Batch, batch_idx: int) -> None:
        step, is_last = trainer.global_step + 1, (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        is_hit = trainer.global_rank == trainer.world_size - 1
        if self.how in SIGNALS and step == SIGNALS[self.how][1] and is_last and is_hit and not self.is_done:
            self.is_done = True
            os.kill(os.getpid(), SIGNALS[self.how][0])
        if self.how == "crash_after" and step == 5:
            crash(trainer)
        if self.how == "nonfinite" and step == self.step and is_hit and not _is_sharded(trainer):
            with torch.no_grad():
                for weight in network_of(module).parameters():
                    weight.fill_(float("nan"))

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        is_hit = trainer.global_rank == trainer.world_size - 1
        if self.how == "nonfinite" and trainer.global_step + 1 == self.step and is_hit and _is_sharded(trainer):
            gradients = [weight.grad for weight in network_of(module).parameters() if weight.grad is not None]
            for gradient in cast(Any, gradients):  # all processes have the weights: the parts of this one alone
                gradient.to_local().fill_(float("nan"))

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        if self.how == "crash_before" and trainer.global_step >= 4:
            crash(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.how == "crash_before" and trainer.global_step == 5:  # without a validation after step 4
            crash(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.how == "crash_inside" and trainer.global_step >= 4:
            checkpoint["the end"] = _Unwritable(trainer)


def _is_sharded(trainer: L.Trainer) -> bool:
    return isinstance(trainer.strategy, ModelParallelStrategy)


def crash(trainer: L.Trainer) -> None:
    """The power goes while a row is written to each file, which the first process does."""
    if not trainer.is_global_zero:
        return
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
