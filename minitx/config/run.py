"""A whole run, or a grid of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from minitx.config.ablation import AblationConfig
from minitx.config.checks import require
from minitx.config.data import DataConfig, TextDataConfig
from minitx.config.model import TransformerConfig
from minitx.config.training import (
    CallbacksConfig,
    EvaluationConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainerConfig,
)

CONFIG_DIR = "--config-dir="
"""How a word of a command line begins that names a folder of the user's own configs."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run, or (``ablation`` given) a grid of them. ``output_dir`` counts from the current folder."""

    experiment: str = "default"
    model: TransformerConfig = field(default_factory=TransformerConfig)
    data: DataConfig = field(default_factory=TextDataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    ablation: AblationConfig | None = None
    seed: int = 0
    ckpt_path: str | None = None
    output_dir: str | None = None
    on_nonfinite: Literal["stop", "record"] = "stop"

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**32, f"seed={self.seed} must lie in [0, 2^32)")
        for name in ("ckpt_path", "output_dir"):
            require(getattr(self, name) != "", f"{name}= must name a {'file' if name == 'ckpt_path' else 'folder'}, or be null")
        warmup, steps = self.schedule.warmup_steps, self.trainer.max_steps
        require(warmup <= steps, f"schedule.warmup_steps={warmup} must not exceed trainer.max_steps={steps}")
        require(
            self.optimizer.name != "muon" or self.trainer.strategy != "sharded",
            "optimizer.name=muon needs whole matrices, which trainer.strategy=sharded cuts: use trainer.strategy=ddp",
        )
        accumulate, ranks, rows = self.trainer.accumulate, self.trainer.num_replicas, self.data.batch_size
        counted = "" if ranks == self.trainer.devices else " (those that see different rows)"
        require(
            rows % (accumulate * ranks) == 0,
            f"data.batch_size={rows} must be divisible by trainer.accumulate={accumulate} x trainer.devices={ranks}{counted}",
        )
        length = self.data.max_tokens
        require(
            length is None or length <= self.model.max_len or self.model.position != "learned" or bool(self.model.pretrained),
            f"model.max_len={self.model.max_len} must reach the rows of the data, which have {length} tokens",
        )
