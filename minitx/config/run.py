"""The config of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from minitx.config.model import TransformerConfig
from minitx.config.schema import Config, Part, is_part, require
from minitx.config.training import (
    CallbacksConfig,
    EvaluationConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainerConfig,
    check_parts,
)

CONFIG_DIR = "--config-dir="
"""The option of the command line that names a folder of the user's own configs."""


@dataclass(frozen=True, kw_only=True)
class InitFrom(Config):
    """Weights to start from. Optimizer, step and order of the data start from the beginning.

    Attributes:
        path: a checkpoint, a folder with config.json and weights (Hugging Face's or ours), or a name on the hub; null: new
            weights.
        overrides: keys that replace those of a Hugging Face config.json.
        ignore: names or patterns of tensors in a Hugging Face folder to ignore.
        fold_scale: allow another model.scale than that of the file. W_Q and W_K are then multiplied so that the model starts as
            the same function.
    """

    path: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    fold_scale: bool = False

    def check(self) -> None:
        require(self.path != "", "path= must name a checkpoint or a model folder")
        require(not self.fold_scale or self.path is not None, "fold_scale=true needs init_from.path, the weights to fold")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """One training run.

    ``data`` is a node: ``_target_`` names a function that returns a ``Task`` or a ``LightningDataModule``, and the other keys
    are its arguments. ``batch_size`` and ``num_workers`` belong to every data set. Each of ``model``, ``objective``,
    ``optimizer`` and ``schedule`` is one of ours, or a node, too. ``output_dir`` is relative to the current folder.

    Attributes:
        experiment: a name for the run's folder: runs/<experiment>/<date_time>/.
        tags: words about the run, for config.yaml and Weights & Biases.
        optimized_metric: the metric of result.json that a sweep optimizes.
        model: the model.
        data: the data set; batch_size and num_workers are keys of every one.
        objective: the loss.
        optimizer: the optimizer.
        schedule: the learning-rate schedule.
        trainer: steps, devices, precision, checkpoints.
        logger: loggers in addition to metrics.csv, by name.
        callbacks: callbacks of the run, by name.
        evaluation: the evaluation after training.
        seed: seed of the initial weights, the order of the rows, and dropout.
        ckpt_path: a checkpoint to continue from; last: the newest one in output_dir.
        init_from: weights to start from.
        output_dir: the run's folder, relative to the current one.
        on_nonfinite: at a loss or gradient that is not finite: stop (exit code 3, the last good checkpoint is kept) | record
            (end with exit code 0).
        imports: modules to import first, for example one that registers a backend.
        traceback: show the traceback of an error.
        trust: build any class that a checkpoint names. This can run any code.
    """

    experiment: str = "default"
    tags: tuple[str, ...] = ()
    optimized_metric: str = "val_loss"
    model: TransformerConfig | Part = TransformerConfig()
    data: Part = field(default_factory=lambda: {"_target_": "minitx.data.kjv", "batch_size": 12})
    objective: ObjectiveConfig | Part = ObjectiveConfig()
    optimizer: OptimizerConfig | Part = OptimizerConfig()
    schedule: ScheduleConfig | Part = ScheduleConfig()
    trainer: TrainerConfig = TrainerConfig()
    logger: Mapping[str, Part | None] = field(default_factory=dict)
    callbacks: CallbacksConfig = CallbacksConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    seed: int = 0
    ckpt_path: str | None = None
    init_from: InitFrom = InitFrom()
    output_dir: str | None = None
    on_nonfinite: Literal["stop", "record"] = "stop"
    imports: tuple[str, ...] = ()
    traceback: bool = False
    trust: bool = False

    def check(self) -> None:
        require(0 <= self.seed < 2**32, f"seed={self.seed} must lie in [0, 2^32)")
        for name in ("ckpt_path", "output_dir"):
            require(getattr(self, name) != "", f"{name}= must name a {'file' if name == 'ckpt_path' else 'folder'}, or be null")
        require(is_part(self.data), "data has no _target_, which names a data set: choose an option, data=OPTION")
        check_parts(self.logger, "logger")
        check_parts(self.callbacks.parts, "callbacks", ("progress", "probe", "samples", "wandb"))
        self._check_steps()
        best = self.evaluation.test == "best" and not self.trainer.ckpt_every
        require(not best, "evaluation.test=best needs best.ckpt, which trainer.ckpt_every=0 does not write")

    def _check_steps(self) -> None:
        if isinstance(self.schedule, ScheduleConfig):
            warmup, steps = self.schedule.warmup_steps, self.trainer.max_steps
            require(
                steps is None or warmup <= steps, f"schedule.warmup_steps={warmup} must not exceed trainer.max_steps={steps}"
            )
        muon = isinstance(self.optimizer, OptimizerConfig) and self.optimizer.name == "muon"
        require(
            not muon or self.trainer.strategy != "sharded",
            "optimizer.name=muon needs whole matrices, which trainer.strategy=sharded cuts: use trainer.strategy=ddp",
        )
