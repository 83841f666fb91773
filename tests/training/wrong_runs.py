"""Runs with one mistake each, and right runs that look like them.

``WRONG`` has, for each mistake, a function that starts the run in a folder, and the message that must come before the folder exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitx.cli.compose import compose_config
from minitx.config import EvaluationConfig, RunConfig, StopAtConfig, TrainerConfig
from minitx.data.task import Task
from minitx.training.run import train

TRAINER: dict[str, Any] = {"accelerator": "cpu", "max_steps": 4, "val_every": 2, "ckpt_every": 2, "log_every": 1}
SGD = {"_target_": "torch.optim.SGD", "lr": 0.05}
CONSTANT = {"_target_": "torch.optim.lr_scheduler.ConstantLR", "factor": 1.0}

DRAW = torch.Generator().manual_seed(0)
VECTORS = [{"input": torch.randn(3, generator=DRAW), "labels": torch.randn(2, generator=DRAW)} for _ in range(8)]
CLASSES = [{"input": torch.randn(3, generator=DRAW), "labels": i % 2} for i in range(8)]
HALF = [{"input": row["input"], "labels": torch.tensor([0, -100 if i % 2 else 1])} for i, row in enumerate(VECTORS)]
ZEROS = [{"input": row["input"], "labels": torch.zeros(2)} for row in VECTORS]


def texts(*lengths: int, **more: Any) -> list[dict[str, Any]]:
    return [{"input_ids": list(range(3, 3 + n)), "labels": list(range(3, 3 + n)), **more} for n in lengths]


# --- networks


class Reader(nn.Module):
    """Reads each token alone, and knows nothing of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(99, 8), nn.Linear(8, 99)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


class TakesAnything(Reader):
    def forward(self, **inputs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs["input_ids"])


class Normed(nn.Module):
    """A batch norm: in training, a row looks at the others. In evaluation mode, none does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        return self.last(self.norm(self.first(input)))


class Centred(nn.Linear):
    """Subtracts the mean over the rows of the batch."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input - input.mean(0))


class TupleOf(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return (super().forward(input),)


class NeedsMore(nn.Linear):
    def forward(self, input: Tensor, question: Tensor) -> Tensor:
        return super().forward(input)


class KeepsAnObject(nn.Linear):
    """Its checkpoint holds a class, which no checkpoint may."""

    def get_extra_state(self) -> Any:
        return {"kind": KeepsAnObject}

    def set_extra_state(self, state: Any) -> None:
        """Nothing to restore."""


class FailsInTraining(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError("the buffer is too small")
        return super().forward(input)


class Zero(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Pairs(nn.Linear):
    """Two classes for each of two places."""

    def __init__(self) -> None:
        super().__init__(3, 4)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).unflatten(1, (2, 2))


def linear() -> nn.Module:
    return nn.Linear(3, 2)


# --- objectives


def squares(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return (logits - batch["labels"]).square().sum()


def mean(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return (logits - batch["labels"]).square().mean()


TEMPERATURE = nn.Parameter(torch.ones(3, 1))


def warmed(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return squares(logits * TEMPERATURE.sum(), batch)


def mean_of_labels(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def worst_row(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return (logits - batch["labels"]).square().sum(1).amax()


def crossed(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return (logits[:, :1] - batch["labels"][:, 0]).square().sum()


def sum_and_mean(logits: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"loss": squares(logits, batch), "nll": mean(logits, batch)}


def of_several(logits: Tensor, batch: Mapping[str, Tensor]) -> Any:
    return squares(logits, batch) if len(logits) > 1 else None


def of_rows(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return (logits - batch["labels"]).square().sum(1)


# --- runs


@dataclasses.dataclass(frozen=True)
class Own:
    """A run of a network and rows of one's own. ``trainer`` changes keys of the trainer, ``more`` keys of the config."""

    rows: Sequence[Any]
    network: Callable[[], nn.Module] = linear
    objective: Any = squares
    kind: str = "other"
    task: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batch_size: int = 4

    def __call__(self, folder: Path) -> Any:
        trainer = TrainerConfig(**{**TRAINER, **self.trainer})
        config = RunConfig(trainer=trainer, **{"optimizer": SGD, "schedule": CONSTANT, "callbacks": {}, **self.more})
        task = Task(name="mine", kind=self.kind, train=self.rows, val=self.rows, **{"model_fields": {}, **self.task})
        torch.manual_seed(0)
        options: dict[str, Any] = {"model": self.network(), "data": task, "objective": self.objective}
        return train(config, folder, batch_size=self.batch_size, **options)


SMALL = (
    "trainer.accelerator=cpu",
    "trainer.max_steps=4",
    "trainer.val_every=2",
    "trainer.val_batches=1",
    "callbacks.progress=false",
    "data.batch_size=4",
    "model.embed_dim=24",
    "model.num_layers=1",
    "model.num_heads=2",
)
TEXT = "Once upon a midnight dreary, while I pondered, weak and weary,\n" * 20


@dataclasses.dataclass(frozen=True)
class Typed:
    """A run from the command line ``words``, beside a file ``text.txt`` ({text})."""

    words: str

    def __call__(self, folder: Path) -> Any:
        text = folder.parent / "text.txt"
        text.write_text(TEXT, encoding="utf-8")
        of_text = f"data=text data.path={text} data.context_len=16 data.cache_dir={folder.parent}"
        typed = (
            self.words.replace("{text}", of_text).replace("{path}", f"data.path={text} data.cache_dir={folder.parent}").split()
        )
        names = {word.partition("=")[0] for word in typed}
        return train(compose_config([*(word for word in SMALL if word.partition("=")[0] not in names), *typed]), folder)


def part(target: str, **arguments: Any) -> dict[str, Any]:
    return {"mine": {"_target_": target, **arguments}}


class LogsAMetric(L.Callback):
    """A callback of the user, which logs a metric that a monitor may wait for."""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("own", 1.0)


TWO_CLASSES = {"model_fields": {"num_labels": 2}}
TEXTS = {"model_fields": {"vocab_size": 99}}
STOPPING = "lightning.pytorch.callbacks.EarlyStopping"
PLATEAU = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}
BAD_ROW = {"input": torch.zeros(3), "labels": 2}

WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a label is no class": (Own([*CLASSES, BAD_ROW], objective=None, kind="classify", task=TWO_CLASSES), "labels must be classes"),
    "a label of a late row is no class": (
        Own([*CLASSES * 9, {**BAD_ROW, "labels": 5}], objective=None, kind="classify", task=TWO_CLASSES),
        "labels must be classes",
    ),
    "an objective returns a mean": (Own(VECTORS, objective=mean), "sums"),
    "an objective returns a mean over labels": (Own(HALF, Pairs, mean_of_labels), "sums"),
    "an objective takes the worst row": (Own(VECTORS, objective=worst_row), "sums"),
    "an objective compares columns with rows": (Own(VECTORS, objective=crossed), "sums"),
    "an objective returns a mean beside a sum": (Own(VECTORS, objective=sum_and_mean), "objective: nll"),
    "an objective returns a mean, and begins at 0": (Own(ZEROS, lambda: Zero(3, 2), mean), "sums"),
    "an objective returns a loss of each row": (Own(VECTORS, objective=of_rows), "must return a 0-d tensor"),
    "an objective has a weight": (Own(VECTORS, objective=warmed), r"weight of shape \(3, 1\) .* no optimizer trains it"),
    "labels have another shape than logits": (Own(VECTORS, lambda: nn.Linear(3, 3)), "size of tensor"),
    "padding is not read": (Own(texts(5, 3, 5, 4), Reader, None, task=TEXTS), "would read padding as data"),
    "forward names no key": (Own(texts(5, 5, 5, 5), TakesAnything, None), "no parameter of TakesAnything.forward matches a key"),
    "forward needs a key that no row has": (Own(VECTORS, lambda: NeedsMore(3, 2)), "needs question"),
    "forward returns a tuple": (Own(VECTORS, lambda: TupleOf(3, 2)), "must return logits"),
    "a row looks at the others": (Own(VECTORS, lambda: Centred(3, 2)), r"rows must not influence each other .*trainer\.rehearse=false"),
    "forward fails in training mode": (Own(VECTORS, lambda: FailsInTraining(3, 2)), "^model: fails .*too small.*wrong_runs.py:"),
    "a micro-batch of one row meets a batch norm": (Own(VECTORS, Normed, trainer={"accumulate": 4}), "more than 1 value per channel"),
    "the checkpoint cannot be read again": (Own(VECTORS, lambda: KeepsAnObject(3, 2)), "cannot be loaded"),
    "test=best with a monitor that nobody logs": (
        Own(VECTORS, task={"test": VECTORS}, trainer={"monitor": "val_accuracy"}, more={"evaluation": EvaluationConfig(test="best")}),
        "^evaluation.test=best: .*trainer.monitor=val_accuracy was never logged",
    ),
    "test without a test split": (Own(VECTORS, more={"evaluation": EvaluationConfig(test="last")}), "no test split"),
    "ReduceLROnPlateau with a monitor that nobody logs": (
        Own(VECTORS, trainer={"monitor": "nothing"}, more={"schedule": PLATEAU}),
        "trainer.monitor=nothing",
    ),
    "EarlyStopping with a monitor that nobody logs": (
        Own(VECTORS, more={"callbacks": part(STOPPING, monitor="val_los")}),
        "val_los",
    ),
    "stop_at with an accuracy that the objective does not count": (Own(VECTORS, trainer={"stop_at": StopAtConfig()}), "train_accuracy"),
    "an optimizer that refuses its arguments": (Own(VECTORS, more={"optimizer": {**SGD, "lr": -1.0}}), "^optimizer.*learning rate"),
    "a callback of Lightning that would lose its result": (
        Own(VECTORS, more={"callbacks": part("lightning.pytorch.callbacks.StochasticWeightAveraging", swa_lrs=0.1)}),
        "StochasticWeightAveraging",
    ),
    "a callback of Lightning that changes accumulation": (
        Own(VECTORS, more={"callbacks": part("lightning.pytorch.callbacks.GradientAccumulationScheduler", scheduling={0: 3})}),
        "trainer.accumulate",
    ),
    "an objective returns nothing for a single row": (Own(VECTORS, objective=of_several), "must return a 0-d tensor"),
    "samples without a tokenizer": (Typed("data=kv_lookup callbacks.samples.every=2 callbacks.samples.prompts=[a]"), "^callbacks.samples.every needs data with a tokenizer"),
    "samples of an encoder": (
        Typed("data=masked model=bert_small {path} data.context_len=16 callbacks.samples.every=2 callbacks.samples.prompts=[a]"),
        "^callbacks.samples.every needs a decoder",
    ),
    "a prompt with an unknown character": (Typed("{text} callbacks.samples.every=2 callbacks.samples.prompts=['né']"), "^callbacks.samples.prompts .*U\\+00E9"),
    "a probe of a model without weights": (Typed("{text} model.attention=linear callbacks.probe.every=2"), "^callbacks.probe.every: the model has no attention weights"),
    "a backend that cannot serve the calls": (Typed("{text} model.backend=sdpa model.softcap=5"), "^model: .*'sdpa' cannot serve this call: .*no soft-cap"),
    "a backend that does not exist": (Typed("{text} model.backend=nonsense"), "^model.*backend='nonsense'"),
    "chunk_tokens with a capped head": (Typed("{text} objective.chunk_tokens=5 model.logit_softcap=3"), "^objective.chunk_tokens=5 needs .*model.logit_softcap=3"),
    "rows longer than the model": (Typed("data=kv_lookup model.max_len=7"), "^model.max_len=7 is smaller than the longest row of the data, 17 tokens"),
    "answers longer than the model": (
        Typed("data=dates model=t5_small data.locales=[en] data.train_size=50 data.val_size=10 model.position=learned model.max_len=12 evaluation.at_end=true"),
        "^model.max_len=12 is smaller than the longest row of the data",
    ),
    "another architecture than the data need": (Typed("data=kv_lookup model.architecture=encoder"), "^model.architecture=encoder .*does not fit data=kv_lookup"),
    "a vocabulary smaller than that of the data": (Typed("{text} model.vocab_size=5"), "^model.vocab_size=5 is smaller than the vocabulary of the data"),
    "fewer rows than a batch": (Typed("{text} data.batch_size=4096"), "data.batch_size=4096"),
    "an argument that the Trainer does not have": (Typed("{text} +trainer.extra.foo=1"), "^trainer.extra.foo is not an argument"),
    "muon on weights that are cut": (Typed("{text} optimizer=muon trainer.strategy=sharded"), "^optimizer=muon needs whole matrices"),
    "a warm-up longer than the run": (Typed("{text} schedule.warmup_steps=9"), "^schedule.warmup_steps=9 must not exceed"),
}  # fmt: skip

RIGHT: dict[str, Own] = {
    "a sum": Own(VECTORS),
    "a batch norm": Own(VECTORS, Normed),
    "a batch norm with accumulation": Own(VECTORS, Normed, trainer={"accumulate": 2}),
    "a head that begins at 0": Own(VECTORS, lambda: Zero(3, 2)),
    "a warm-up that is longer than the rehearsal": Own(VECTORS, more={"schedule": {"_target_": "minitx.training.schedules.cosine", "warmup_steps": 3}}),
    "a monitor that a callback of the user logs": Own(
        VECTORS,
        more={"callbacks": {"own": {"_target_": f"{__name__}.LogsAMetric"}, "stop": {"_target_": STOPPING, "monitor": "own"}}},
    ),
    "a schedule with a monitor that a callback of the user logs": Own(
        VECTORS, trainer={"monitor": "own"}, more={"schedule": PLATEAU, "callbacks": part(f"{__name__}.LogsAMetric")}
    ),
    "test=best with a monitor that a callback of the user logs": Own(
        VECTORS,
        task={"test": VECTORS},
        trainer={"monitor": "own"},
        more={"evaluation": EvaluationConfig(test="best"), "callbacks": part(f"{__name__}.LogsAMetric")},
    ),
    "a test split": Own(VECTORS, task={"test": VECTORS}, more={"evaluation": EvaluationConfig(test="best")}),
    "one row": Own(VECTORS[:1], batch_size=1),
}  # fmt: skip
