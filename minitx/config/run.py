"""A whole run, or a grid of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from minitx.config.checks import positive, require
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


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """One full factorial of an ablation: ``arms`` × the levels of every factor × ``seeds``.

    ``base`` are overrides that every cell takes; ``factors`` maps a factor's name to its levels and each level to
    overrides. ``skip`` lists combinations to leave out, each a mapping from factor (or ``arm``) to a level or a list of them.
    """

    base: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    factors: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    skip: tuple[Mapping[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, kw_only=True)
class AblationConfig:
    """A grid of training runs and how it is judged: see ``docs/scaling_ablation`` and ``minitx.ablation``.

    ``arms`` names lists of overrides. ``time_limit`` (seconds) bounds the projection: over it, ``trim`` (overrides that
    shorten the runs) is applied to every cell. ``margin`` is the smallest difference that counts as harm.
    """

    name: str = "quick"
    confirmatory: bool = False
    arms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    studies: Mapping[str, StudyConfig] = field(default_factory=dict)
    predictions: Mapping[str, str] = field(default_factory=dict)
    margin: float = 0.02
    workers: int | None = None
    time_limit: float | None = None
    trim: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive(self, "margin", "workers", "time_limit")
        for name, study in self.studies.items():
            unknown = [arm for arm in study.arms if arm not in self.arms]
            require(not unknown, f"studies.{name}.arms={unknown} are not defined; ablation.arms has {', '.join(self.arms)}")


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
        warmup, steps = self.schedule.warmup_steps, self.trainer.max_steps
        require(warmup <= steps, f"schedule.warmup_steps={warmup} must not exceed trainer.max_steps={steps}")
        accumulate, ranks, rows = self.trainer.accumulate, self.trainer.devices, self.data.batch_size
        require(
            rows % (accumulate * ranks) == 0,
            f"data.batch_size={rows} must be divisible by trainer.accumulate={accumulate} x trainer.devices={ranks}",
        )
        length = self.data.max_tokens
        require(
            length is None or length <= self.model.max_len or self.model.position != "learned" or bool(self.model.pretrained),
            f"model.max_len={self.model.max_len} must reach the rows of the data, which have {length} tokens",
        )
