"""The config of a run: its parts, and the options of the trainer, the callbacks and the evaluation."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from minitx.config.part import FROM_THE_RUN, Part, Takes, needs
from minitx.config.scale_words import evaluate_factor
from minitx.config.schema import Config, ConfigError, Count, Finite, Natural, Positive, require, shown

IGNORED = -100
"""The label of positions that the loss and the metrics ignore."""

CONFIG_DIR = "--config-dir="
"""The command-line option for a folder of user configs."""

MODEL = "minitx.nn.build_model"
"""The ``_target_`` of our models, whose arguments are the fields of ``TransformerConfig``."""

FOLDER_READER = "minitx.interop.weights.read_folder"
"""The function that reads ``init_from.path`` if it is not a checkpoint: a Hugging Face folder, or a name on the hub."""

NODES = {
    "model": MODEL,
    "data": "minitx.data.kjv",
    "objective": "minitx.training.objectives.CrossEntropy",
    "optimizer": "minitx.training.optimizers.adamw",
    "schedule": "minitx.training.schedules.cosine",
}
"""The parts of a run, and the default ``_target_`` of each."""

LOADING = {"batch_size": (Count, 32), "num_workers": (Natural, 0)}
"""Keys of ``data`` that every data set has, with hint and default. Our configs set their own batch_size: 32 is for a user's data set."""

REPLACED = {
    "accumulate_grad_batches": "trainer.accumulate",
    "callbacks": "callbacks",
    "default_root_dir": "output_dir",
    "enable_checkpointing": "trainer.ckpt_every",
    "enable_progress_bar": "callbacks.progress",
    "gradient_clip_val": "trainer.clip",
    "limit_val_batches": "trainer.val_batches",
    "log_every_n_steps": "trainer.log_every",
    "logger": "logger",
    "overfit_batches": "trainer.overfit",
    "val_check_interval": "trainer.val_every",
}
"""Arguments of Lightning's Trainer whose key has another name."""


def _of_group(name: str, **takes: Any) -> Takes:
    return Takes(expects=f"what to build: choose an option, {name}=OPTION", **takes)


CALLBACKS = {
    "progress": {"_target_": "minitx.training.progress.progress"},
    "probe": {"_target_": "minitx.analysis.probe.Probe", "every": 0},
    "samples": {"_target_": "minitx.training.samples.Samples", "every": 0},
}
"""The callbacks of every run. ``false``, or ``every: 0``, leaves one out."""


def _of_entries(group: str, default: str, known: Mapping[str, Any]) -> Takes:
    """How a run completes a callback or a logger. ``known`` are the entries of every run."""
    other = " (callbacks.wandb comes with 'logger=[csv,wandb]')" if group == "callbacks" else ""
    expects = f"a class: choose its option, as in '{group}=[{default},{{name}}]'{other}, or give {group}.{{name}}._target_"
    return Takes(offers=None, completes=False, expects=expects, known=known, passed_on={"WandbLogger": "wandb.init"})


_OF_TRAINER = Takes(offers=("dirpath", "filename"), completes=False, expects="a class")

Model = Annotated[Part, _of_group("model", offers=None, completes=False)]
Data = Annotated[Part, _of_group("data", offers=FROM_THE_RUN, run_keys=LOADING)]
Objective = Annotated[Part, _of_group("objective", offers=None)]
Optimizer = Annotated[Part, _of_group("optimizer", first=1, offers=FROM_THE_RUN)]
Schedule = Annotated[Part, _of_group("schedule", first=1, offers=FROM_THE_RUN)]
Callback = Annotated[Part, _of_entries("callbacks", "default", CALLBACKS)]
Logger = Annotated[Part, _of_entries("logger", "csv", {})]


def _default(name: str, **arguments: Any) -> Any:
    """A field for a part. Its default is a node, and ``read`` turns the node into a part."""
    return field(default_factory=lambda: {"_target_": NODES[name], **arguments})


@dataclass(frozen=True, kw_only=True)
class ParameterRule(Config):
    """Factors for the parameters whose names match ``match``.

    The first rule that matches a parameter's name applies. A factor is a number, or ``head_dim^p`` (d_k to the power p).

    Attributes:
        match: a regular expression that is searched in the parameter's name.
        lr: factor on the optimizer's lr: a number, or head_dim^p.
        weight_decay: factor on its weight_decay.
        eps: factor on its eps.
        trainable: ``false`` freezes the parameter.
    """

    match: str
    lr: float | str = 1.0
    weight_decay: float | str = 1.0
    eps: float | str = 1.0
    trainable: bool = True

    def check(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ConfigError(f"match={self.match} is not a regular expression: {error}") from None
        for name in ("lr", "weight_decay", "eps"):
            evaluate_factor(getattr(self, name), head_dim=1, key=name)


@dataclass(frozen=True, kw_only=True)
class WindowConfig(Config):
    """A value that the mean of a training metric over the last ``window`` steps must reach.

    Attributes:
        metric: train_accuracy (must rise to value) or train_loss (must fall to it).
        value: the value that the mean must reach.
        window: steps in the mean.
    """

    metric: Literal["train_accuracy", "train_loss"] = "train_accuracy"
    value: Finite = 0.9
    window: Count = 16

    def check(self) -> None:
        if self.metric == "train_accuracy" and not 0 < self.value <= 1:
            raise ConfigError(f"value={self.value:g} must lie in (0, 1], because metric=train_accuracy is a share")


@dataclass(frozen=True, kw_only=True)
class StopAtConfig(WindowConfig):
    """End a run when the mean of a training metric over the last ``window`` steps reaches ``value``.

    Attributes:
        extra_steps: further steps after that.
    """

    value: Finite = 0.99
    extra_steps: Natural = 0


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Config):
    """Steps, devices, precision and checkpoints. All intervals except ``ckpt_minutes`` are in optimizer steps.

    Each of the ``num_nodes`` machines runs ``devices`` processes, one per device. ``data.batch_size`` is the number of rows in
    one optimizer step, summed over all processes and over the ``accumulate`` micro-batches.

    Attributes:
        max_steps: optimizer steps; null: 1,000, or no limit with max_epochs.
        max_epochs: number of passes over the training rows; null: no limit.
        devices: processes on each machine.
        num_nodes: machines. torchrun or srun starts the processes.
        accelerator: auto, cpu, gpu, mps, or a name that a Lightning plugin registers.
        strategy: auto (ddp on several devices), ddp, ddp_find_unused_parameters_true (for parameters left out of some steps) or
            sharded (FSDP2).
        shard: with strategy=sharded: names of the classes whose modules are sharded one by one; []: the blocks of our models, or
            of a transformers model.
        precision: 32-true, 64-true, bf16-mixed or bf16-true (float32 on a CPU without instructions for bfloat16).
        accumulate: micro-batches per step. data.batch_size is the global batch; a LightningDataModule's batch is a micro-batch.
        clip: largest global gradient norm; null: off.
        val_every: steps between validations, besides one at the end; 0: only that one; null: 250, or an epoch with max_epochs.
        val_batches: validation batches, from the first row on; null: all.
        val_batch_size: rows of a validation batch; null: data.batch_size.
        log_every: steps between rows of metrics.csv.
        ckpt_every: steps between checkpoints, besides one at the end; 0: no checkpoints.
        ckpt_minutes: also write a checkpoint if the last one is this many minutes old; null: off.
        monitor: the metric of best.ckpt, and of schedules such as ReduceLROnPlateau.
        monitor_mode: min or max: best.ckpt has the smallest or largest value of monitor.
        stop_at: end the run early, as in {metric: train_accuracy, value: 0.99}; null: off.
        overfit: train on the same batch in every step.
        rehearse: try every stage of the run on two rows before the run's folder is created.
        plan: print the memory that each process will hold, and do not train.
        compile: use torch.compile. torch caches the kernels in $TORCHINDUCTOR_CACHE_DIR.
        deterministic: use only deterministic kernels; an operation without one is an error.
        threads: CPU threads per process; null: torch's default.
        flush_denormal: on a CPU, round float32 numbers below 1.2e-38 to 0.
        peak_tflops: peak TFLOP/s of the device, for mfu in metrics.csv; null: from a table of some GPUs.
        plugins: plugins for Lightning's Trainer, each with a _target_.
        profiler: a profiler for Lightning's Trainer, with a _target_.
        extra: further arguments of Lightning's Trainer; those that a key of minitx sets are refused.
    """

    max_steps: Count | None = None
    max_epochs: Count | None = None
    devices: Count = 1
    num_nodes: Count = 1
    accelerator: str = "auto"
    strategy: Literal["auto", "ddp", "ddp_find_unused_parameters_true", "sharded"] = "auto"
    shard: tuple[str, ...] = ()
    precision: Literal["32-true", "64-true", "bf16-mixed", "bf16-true"] = "32-true"
    accumulate: Count = 1
    clip: Positive | None = None
    val_every: Natural | None = None
    val_batches: Count | None = None
    val_batch_size: Count | None = 64
    log_every: Count = 10
    ckpt_every: Natural = 250
    ckpt_minutes: Positive | None = 10.0
    monitor: str = "val_loss"
    monitor_mode: Literal["min", "max"] = "min"
    stop_at: StopAtConfig | None = None
    overfit: bool = False
    rehearse: bool = True
    plan: bool = False
    compile: bool = False
    deterministic: bool = False
    threads: Count | None = None
    flush_denormal: bool = False
    peak_tflops: Positive | None = None
    plugins: tuple[Annotated[Part, _OF_TRAINER], ...] = ()
    profiler: Annotated[Part, _OF_TRAINER] | None = None
    extra: Mapping[str, object] = field(default_factory=dict)

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {name: f"use {key}" for name, key in REPLACED.items()}

    def derived(self) -> Mapping[str, Any]:
        if self.max_epochs is not None:
            return {}
        return {"max_steps": self.max_steps or 1000, "val_every": 250 if self.val_every is None else self.val_every}

    def check(self) -> None:
        needs(self, "shard", "strategy", "sharded")

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.devices * self.num_nodes

    def check_rows(self, rows: int) -> None:
        """Raise a ConfigError unless micro-batches and processes can share the rows of a step evenly."""
        require(
            rows % (self.accumulate * self.world_size) == 0,
            f"data.batch_size={rows} must be divisible by trainer.accumulate={self.accumulate} x trainer.devices={self.world_size}",
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Config):
    """The task's metrics after training, with 95 % intervals, as ``scripts/evaluate.py`` prints them.

    Attributes:
        test: evaluate the test split after training, with the last or best weights; null: no test.
        at_end: after training, print the metrics of the validation split and write evaluation.json (and with test
            evaluation_test.json).
        num_rows: rows of a split; null: all.
        num_beams: beams for generated answers; 1: greedy.
        num_shown: answers to show.
    """

    test: Literal["last", "best"] | None = None
    at_end: bool = False
    num_rows: Count | None = None
    num_beams: Count = 1
    num_shown: Natural = 3


@dataclass(frozen=True, kw_only=True)
class InitFrom(Config):
    """Weights to start from. The optimizer, the step count and the order of the data start anew.

    Attributes:
        path: a checkpoint, a Hugging Face folder, or a name on the hub; null: new weights.
        overrides: values that replace keys of a Hugging Face config.json.
        ignore: names or patterns of tensors of a Hugging Face folder to leave out.
        fold_scale: allow another model.scale, and multiply W_Q and W_K so that the model starts as the same function.
    """

    path: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    fold_scale: bool = False

    def check(self) -> None:
        require(self.path != "", "path= must name a checkpoint or a model folder")
        for name in ("overrides", "ignore", "fold_scale"):
            value = getattr(self, name)
            require(self.path is not None or not value, f"{name}={shown(value)} needs init_from.path, weights to start from")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """One training run.

    ``model``, ``data``, ``objective``, ``optimizer`` and ``schedule`` are parts: ``_target_`` names a function or class, and
    the other keys are its arguments (``minitx.config.node`` makes a part in Python). ``batch_size`` and ``num_workers`` belong
    to every data set. ``output_dir`` is relative to the current folder.

    Attributes:
        experiment: a name for the run's folder.
        tags: words for config.yaml and Weights & Biases.
        optimized_metric: the metric of result.json that a sweep optimizes.
        model: the model.
        data: the data set; batch_size and num_workers are keys of every data set.
        objective: the loss.
        optimizer: the optimizer.
        schedule: the learning-rate schedule.
        trainer: steps, devices, precision, checkpoints.
        logger: loggers in addition to metrics.csv, by name.
        callbacks: callbacks of the run, by name. Each is a class of minitx, of Lightning or your own; null or false leaves one out.
        evaluation: the evaluation after training.
        seed: seed of the initial weights, the order of rows, and dropout.
        ckpt_path: a checkpoint to resume from; last: last.ckpt of the run in output_dir.
        init_from: weights to start from.
        output_dir: the run's folder; null: runs/<experiment>/<date_time>/.
        on_nonfinite: after a loss, gradient or validation loss that is not finite: stop (exit code 3, the last good checkpoint
            stays) or record (exit code 0).
        imports: modules to import first, such as one that registers a backend.
        traceback: show the traceback of an error.
        trust: build any class that a checkpoint names. This can run arbitrary code.
    """

    experiment: str = "default"
    tags: tuple[str, ...] = ()
    optimized_metric: str = "val_loss"
    model: Model = _default("model")
    data: Data = _default("data", batch_size=12)
    objective: Objective = _default("objective")
    optimizer: Optimizer = _default("optimizer")
    schedule: Schedule = _default("schedule")
    trainer: TrainerConfig = TrainerConfig()
    logger: Mapping[str, Logger | None] = field(default_factory=dict)
    callbacks: Mapping[str, Callback | None] = field(default_factory=lambda: dict[str, Any](CALLBACKS))
    evaluation: EvaluationConfig = EvaluationConfig()
    seed: int = 0
    ckpt_path: str | None = None
    init_from: InitFrom = InitFrom()
    output_dir: str | None = None
    on_nonfinite: Literal["stop", "record"] = "stop"
    imports: tuple[str, ...] = ()
    traceback: bool = False
    trust: bool = False

    def derived(self) -> Mapping[str, Any]:
        paths = {name: getattr(self, name) for name in ("ckpt_path", "output_dir")}
        return {name: path and os.path.expanduser(path) for name, path in paths.items()}

    def check(self) -> None:
        require(0 <= self.seed < 2**32, f"seed={self.seed} must lie in [0, 2^32)")
        for name in ("ckpt_path", "output_dir"):
            kind = "file" if name == "ckpt_path" else "folder"
            require(getattr(self, name) != "", f"{name}= must name a {kind}, or be null")
        if self.trainer.plan and self.ckpt_path is not None:
            raise ConfigError("trainer.plan=true describes a new run, but ckpt_path resumes one: remove one of them")
        if self.evaluation.test == "best" and not self.trainer.ckpt_every:
            raise ConfigError("evaluation.test=best needs best.ckpt, but trainer.ckpt_every=0 writes none")
        for part in (self.optimizer, self.schedule):
            require(not part.is_partial, f"{part.path}._partial_=true must be removed: the run itself builds {part.name}")
