"""How a model is trained: objective, optimizer, schedule, trainer, callbacks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from minitx.config.checks import ConfigError, fraction, needs, not_negative, positive, require


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is minimised, averaged over the labels of a whole optimizer step; the name of a function in ``training.objectives``.

    ``chunk_tokens``: logits of so many tokens are held at a time, where the model has an ``lm`` head; ``null`` holds all.
    ``router_loss`` is the weight of the experts' load-balancing loss, where a model has experts (0.01: Fedus et al. 2021,
    "Switch Transformers", arXiv:2101.03961, §2.2).
    """

    name: Literal["cross_entropy"] = "cross_entropy"
    label_smoothing: float = 0.0
    chunk_tokens: int | None = None
    router_loss: float = 0.01

    def __post_init__(self) -> None:
        fraction(self, "label_smoothing")
        positive(self, "chunk_tokens")
        not_negative(self, "router_loss")


@dataclass(frozen=True, kw_only=True)
class ParameterRule:
    """Factors for the parameters whose name matches ``match`` (a regular expression, searched).

    A parameter takes the first rule that matches it. A factor is a number, or ``head_dim^p`` (d_k to the power p).

    Attributes:
        match: a regular expression, searched in the parameter's name.
        lr: factor of the optimizer's.
        weight_decay: factor of the optimizer's.
        eps: factor of the optimizer's.
        trainable: ``false`` freezes the parameter.
    """

    match: str
    lr: float | str = 1.0
    weight_decay: float | str = 1.0
    eps: float | str = 1.0
    trainable: bool = True

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ConfigError(f"match={self.match} is not a regular expression: {error}") from None
        for name in ("lr", "weight_decay", "eps"):
            evaluate_factor(getattr(self, name), head_dim=1, key=name)


def evaluate_factor(factor: float | str, *, head_dim: int, key: str = "factor") -> float:
    """A number as it is; ``head_dim^p`` as d_k to the power p.

    >>> evaluate_factor("head_dim^-0.25", head_dim=16)
    0.5
    """
    if isinstance(factor, int | float):
        return float(factor)
    matched = re.fullmatch(r"head_dim\^(-?\d+(?:\.\d+)?)", factor.strip())
    require(matched is not None, f"{key}={factor} must be a number or head_dim^p, for example head_dim^-0.25")
    return float(head_dim) ** float(matched[1])  # type: ignore[index]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """``adamw``, or ``muon``: Muon for the matrices of the blocks, with ``matrix_lr``, ``momentum`` and ``ns_steps`` of
    Newton-Schulz, and AdamW for embeddings, heads and vectors.

    ``clip`` is the largest global gradient norm, ``null`` for none; weight decay spares vectors (biases, norms).
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-3
    matrix_lr: float = 0.02
    momentum: float = 0.95
    ns_steps: int = 5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float | None = None
    rules: tuple[ParameterRule, ...] = ()

    def __post_init__(self) -> None:
        positive(self, "lr", "matrix_lr", "ns_steps", "eps", "clip")
        not_negative(self, "weight_decay")
        fraction(self, "momentum")
        require(all(0.0 <= beta < 1.0 for beta in self.betas), f"betas={list(self.betas)} must lie in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning-rate schedule: linear warm-up over ``warmup_steps``, then ``name``, ending at ``final_lr`` (a factor of lr).

    ``trapezoid`` (WSD) stays flat and falls linearly over the last ``decay_fraction`` of the run.
    """

    name: Literal["cosine", "linear", "constant", "trapezoid"] = "cosine"
    warmup_steps: int = 0
    final_lr: float = 0.1
    decay_fraction: float = 0.2

    def __post_init__(self) -> None:
        not_negative(self, "warmup_steps", "final_lr")
        require(0.0 < self.decay_fraction <= 1.0, f"decay_fraction={self.decay_fraction} must lie in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long and on what. Every count is in optimizer steps.

    Validation runs every ``val_every`` steps and at the end (``0``: at the end only), over at most ``val_batches``
    batches of ``val_batch_size`` rows (``null``: the whole split; the training batch size). A checkpoint is written
    every ``ckpt_every`` steps, whenever the last one is ``ckpt_minutes`` old (``null``: not by the clock), and at the end
    (``ckpt_every=0``: never). ``accumulate`` micro-batches make one step (the global batch stays ``data.batch_size``);
    ``threads`` is the number of CPU threads of a process, ``null`` for torch's own choice.

    A process runs on each of ``devices`` devices of each of ``num_nodes`` machines. ``strategy``: ``ddp`` copies the model to
    each device, ``sharded`` cuts it (FSDP2), and its heads and hidden units over groups of ``tensor_parallel`` devices;
    ``auto`` is ``ddp`` where there are several. ``sharded_ckpt`` lets each process write its own shard (a folder).
    """

    max_steps: int = 1000
    devices: int = 1
    num_nodes: int = 1
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    strategy: Literal["auto", "ddp", "sharded"] = "auto"
    tensor_parallel: int = 1
    precision: Literal["32-true", "64-true", "bf16-mixed", "bf16-true"] = "32-true"
    accumulate: int = 1
    val_every: int = 250
    val_batches: int | None = None
    val_batch_size: int | None = None
    log_every: int = 10
    ckpt_every: int = 250
    ckpt_minutes: float | None = 10.0
    sharded_ckpt: bool = False
    compile: bool = False
    deterministic: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        positive(self, "max_steps", "devices", "num_nodes", "tensor_parallel", "accumulate", "log_every", "threads")
        positive(self, "val_batches", "val_batch_size", "ckpt_minutes")
        not_negative(self, "val_every", "ckpt_every")
        needs(self, "tensor_parallel", "strategy", "sharded")
        needs(self, "sharded_ckpt", "strategy", "sharded")
        require(
            self.world_size % self.tensor_parallel == 0,
            f"tensor_parallel={self.tensor_parallel} must divide devices={self.devices} x num_nodes={self.num_nodes}",
        )

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.devices * self.num_nodes

    @property
    def num_replicas(self) -> int:
        """The number of processes that see different rows."""
        return self.world_size // self.tensor_parallel


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The task's metrics with 95 % intervals, on the validation split: what ``scripts/evaluate.py`` prints.

    ``at_end`` prints them after training, too, and writes ``evaluation.json``. ``num_rows`` are the validation rows to look
    at (``null``: all), ``num_beams`` those of generated answers (1: greedy), ``num_shown`` the answers to show.
    """

    at_end: bool = False
    num_rows: int | None = None
    num_beams: int = 1
    num_shown: int = 3
    lengths: tuple[int, ...] = ()
    attention_cost: bool = False

    def __post_init__(self) -> None:
        positive(self, "num_rows", "num_beams")
        not_negative(self, "num_shown")
        require(all(length > 0 for length in self.lengths), f"lengths={list(self.lengths)} must be positive")


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Attention statistics on a fixed validation batch during training; ``every: 0`` switches the probes off.

    Probes run at steps 0, 1, 2, 4, 8, … and at every ``every`` steps, on the first ``batch_size`` validation rows. Every
    ``weights_every`` steps (0: never), a probe also keeps the weights themselves on the first ``weights_rows`` rows.
    """

    every: int = 0
    batch_size: int = 8
    weights_every: int = 0
    weights_rows: int = 4

    def __post_init__(self) -> None:
        not_negative(self, "every", "weights_every")
        positive(self, "batch_size", "weights_rows")
        fits = not self.weights_every or bool(self.every and self.weights_every % self.every == 0)
        require(fits, f"weights_every={self.weights_every} must be a multiple of every={self.every}: a probe keeps the weights")
        seen = not self.weights_every or self.weights_rows <= self.batch_size
        require(seen, f"weights_rows={self.weights_rows} must not exceed batch_size={self.batch_size}, the rows of a probe")


@dataclass(frozen=True, kw_only=True)
class CallbacksConfig:
    """What happens beside the steps: a progress bar or lines, probes, and ``extra`` ones (``name: {_target_: …}``)."""

    progress: bool = True
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    extra: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
