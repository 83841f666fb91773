"""How a model is trained: objective, optimizer, schedule, trainer, callbacks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from minitx.config.checks import ConfigError, fraction, is_part, key, needs, not_negative, positive, require

Part = Mapping[str, Any]
"""A part of the user's own: a node with ``_target_`` and the arguments of what it names."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is minimised: cross-entropy, averaged over the labels of a whole optimizer step.

    The load-balancing loss of experts is that of Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, §2.2.
    """

    name: Literal["cross_entropy"] = "cross_entropy"
    label_smoothing: float = key(0.0, "share of the target that is spread over all classes")
    chunk_tokens: int | None = key(
        None, "logits are held for so many tokens at a time (1024, say), with head=lm; null: for all"
    )
    count_correct: bool = key(True, "count the right answers of training steps, for train_accuracy")
    router_loss: float = key(0.01, "weight of the load-balancing loss, where the model has experts")

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
    """``adamw`` for every parameter, or ``muon`` for the matrices of the blocks and AdamW for the rest.

    Weight decay spares vectors (biases, norms).
    """

    name: Literal["adamw", "muon"] = key("adamw", "adamw | muon (the blocks' matrices; AdamW for the rest)")
    lr: float = key(1e-3, "the peak rate")
    matrix_lr: float = key(0.02, "of muon: the rate of the blocks' matrices; everything else takes lr")
    momentum: float = key(0.95, "of muon")
    ns_steps: int = key(5, "of muon: Newton-Schulz iterations an update")
    weight_decay: float = key(0.0, "spares vectors (biases, norms)")
    betas: tuple[float, float] = key((0.9, 0.95), "decay of the two moments")
    eps: float = key(1e-8, "added to the root of the second moment")
    rules: tuple[ParameterRule, ...] = key((), "[{match: q_proj, lr: head_dim^-0.25, trainable: true}]: factors by name")

    def __post_init__(self) -> None:
        positive(self, "lr", "matrix_lr", "ns_steps", "eps")
        not_negative(self, "weight_decay")
        fraction(self, "momentum")
        require(all(0.0 <= beta < 1.0 for beta in self.betas), f"betas={list(self.betas)} must lie in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the run: a linear warm-up, then what ``name`` says."""

    name: Literal["cosine", "linear", "constant", "trapezoid"] = key("cosine", "what follows the warm-up")
    warmup_steps: int = key(0, "steps of a linear rise from zero")
    final_lr: float = key(0.1, "the rate ends at this share of optimizer.lr")
    decay_fraction: float = key(0.2, "trapezoid only: the last part of the run, in which the rate falls")

    def __post_init__(self) -> None:
        not_negative(self, "warmup_steps", "final_lr")
        require(0.0 < self.decay_fraction <= 1.0, f"decay_fraction={self.decay_fraction} must lie in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class StopAtConfig:
    """Ends a run when the mean of a training metric over the last ``window`` steps reaches ``value``."""

    metric: Literal["train_accuracy", "train_loss"] = key("train_accuracy", "an accuracy must rise to value, a loss fall to it")
    value: float = key(0.99, "what the mean must reach")
    window: int = key(16, "steps that the mean is over")
    extra_steps: int = key(0, "steps that are still made after it was reached")

    def __post_init__(self) -> None:
        positive(self, "window")
        not_negative(self, "extra_steps")
        require(math.isfinite(self.value), f"value={self.value} must be finite")


OWNED = frozenset(
    (
        *("accelerator", "devices", "num_nodes", "strategy", "precision", "plugins", "profiler", "deterministic", "logger"),
        *("callbacks", "max_steps", "max_epochs", "min_steps", "min_epochs", "accumulate_grad_batches", "gradient_clip_val"),
        *("gradient_clip_algorithm", "val_check_interval", "check_val_every_n_epoch", "limit_val_batches", "log_every_n_steps"),
        *("num_sanity_val_steps", "default_root_dir", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
        *("use_distributed_sampler", "overfit_batches", "reload_dataloaders_every_n_epochs", "limit_train_batches"),
        *("fast_dev_run", "max_time", "barebones", "sync_batchnorm", "inference_mode"),
    )
)
"""Arguments of Lightning's Trainer that ``trainer.extra`` may not give, because a key of ours or the run itself decides them."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long and on what. Every count is in optimizer steps.

    A process runs on each of ``devices`` devices of each of ``num_nodes`` machines. ``data.batch_size`` is the number of rows
    of a step over all of them and over the ``accumulate`` micro-batches.
    """

    max_steps: int = key(1000, "optimizer steps of the run")
    devices: int = key(1, "processes on each machine")
    num_nodes: int = key(1, "machines: started by torchrun or srun")
    accelerator: Literal["auto", "cpu", "gpu", "mps"] = key("auto", "where: auto | cpu | gpu | mps")
    strategy: Literal["auto", "ddp", "sharded"] = key("auto", "auto (ddp where there are several) | ddp | sharded (FSDP2)")
    tensor_parallel: int = key(1, "devices that share the heads and hidden units of a layer (strategy=sharded)")
    precision: Literal["32-true", "64-true", "bf16-mixed", "bf16-true"] = key(
        "32-true", "32-true | 64-true | bf16-mixed | bf16-true (float32 on a CPU without instructions for bfloat16)"
    )
    accumulate: int = key(1, "micro-batches a step; data.batch_size stays the global batch")
    clip: float | None = key(None, "largest global gradient norm, whatever the optimizer; null: off")
    val_every: int = key(250, "steps between validations; there is always one at the end, and 0 means: at the end only")
    val_batches: int | None = key(100, "validation batches at most; null: the whole split")
    val_batch_size: int | None = key(64, "rows of a validation batch; null: data.batch_size")
    log_every: int = key(10, "steps between rows of metrics.csv")
    ckpt_every: int = key(250, "steps between checkpoints; there is always one at the end; 0: none at all")
    ckpt_minutes: float | None = key(10.0, "a checkpoint also when the last one is that old; null: not by the clock")
    sharded_ckpt: bool = key(False, "each process writes its own shard, into a folder (strategy=sharded)")
    stop_at: StopAtConfig | None = key(
        None, "{metric: train_accuracy, value: 0.99, window: 16, extra_steps: 0}; null: max_steps alone"
    )
    overfit: bool = key(False, "train on the batch of the first step again and again")
    compile: bool = key(False, "torch.compile of the model")
    deterministic: bool = key(False, "only kernels that give the same bits each time; one that cannot is named")
    threads: int | None = key(None, "CPU threads of a process; null: torch's own choice")
    peak_tflops: float | None = key(None, "peak of the device in TFLOP/s, for mfu in metrics.csv; null: known for some GPUs")
    plugins: tuple[Part, ...] = key((), "nodes with _target_, for Lightning's Trainer")
    profiler: Part | str | None = key(None, "simple | advanced | pytorch, or a node with _target_")
    extra: Mapping[str, Any] = key(dict, "any other argument of Lightning's Trainer")

    def __post_init__(self) -> None:
        positive(self, "max_steps", "devices", "num_nodes", "tensor_parallel", "accumulate", "log_every", "threads", "clip")
        positive(self, "val_batches", "val_batch_size", "ckpt_minutes", "peak_tflops")
        not_negative(self, "val_every", "ckpt_every")
        needs(self, "tensor_parallel", "strategy", "sharded")
        needs(self, "sharded_ckpt", "strategy", "sharded")
        require(
            self.world_size % self.tensor_parallel == 0,
            f"tensor_parallel={self.tensor_parallel} must divide devices={self.devices} x num_nodes={self.num_nodes}",
        )
        for name in sorted(OWNED & set(self.extra)):
            raise ConfigError(
                f"extra.{name}={self.extra[name]} is decided by the run or by a key of trainer, and not given here"
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
    """The task's metrics with 95 % intervals, on the validation split: what ``scripts/evaluate.py`` prints."""

    at_end: bool = key(False, "print them after training, too, and write evaluation.json")
    num_rows: int | None = key(None, "validation rows to look at; null: all")
    num_beams: int = key(1, "of generated answers; 1: greedy")
    num_shown: int = key(3, "answers to show")
    lengths: tuple[int, ...] = key((), "after training, a language model's loss on rows of these many tokens, too")
    attention_cost: bool = key(False, "after training, error and cost of the attention against exact attention, too")

    def __post_init__(self) -> None:
        positive(self, "num_rows", "num_beams")
        not_negative(self, "num_shown")
        require(all(length > 0 for length in self.lengths), f"lengths={list(self.lengths)} must be positive")


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Attention statistics on a fixed validation batch, at steps 0, 1, 2, 4, 8, … and every so many."""

    every: int = key(0, "steps between probes; 0: no probes")
    batch_size: int = key(8, "validation rows to look at")
    weights_every: int = key(0, "keep the attention weights in attention/ so often, a multiple of every; 0: never")
    weights_rows: int = key(4, "keep the weights of the first so many rows")

    def __post_init__(self) -> None:
        not_negative(self, "every", "weights_every")
        positive(self, "batch_size", "weights_rows")
        fits = not self.weights_every or bool(self.every and self.weights_every % self.every == 0)
        require(fits, f"weights_every={self.weights_every} must be a multiple of every={self.every}: a probe keeps the weights")
        seen = not self.weights_every or self.weights_rows <= self.batch_size
        require(seen, f"weights_rows={self.weights_rows} must not exceed batch_size={self.batch_size}, the rows of a probe")


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """Text that the model writes during training, to the log, ``samples.jsonl`` and Weights & Biases."""

    every: int = key(0, "steps between samples; 0: no samples")
    prompts: tuple[str, ...] = key((), "texts to continue or answer; empty: the beginnings of validation rows")
    max_new_tokens: int = key(64, "longest sample")
    temperature: float = key(0.8, "0 takes the likeliest token each time, above 0 draws one")

    def __post_init__(self) -> None:
        not_negative(self, "every", "temperature")
        positive(self, "max_new_tokens")


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """What a run with ``logger=wandb`` sends beside its curves."""

    viewer: bool = key(False, "the page of the attention viewer, where callbacks.probe.weights_every keeps weights")
    checkpoint: Literal["last", "best"] | None = key(None, "send last.ckpt or best.ckpt as an artifact; null: none")


@dataclass(frozen=True, kw_only=True)
class CallbacksConfig:
    """What happens beside the steps. Every further entry is a callback of Lightning's, or of anybody's: ``name: {_target_: …}``."""

    progress: bool = key(True, "a bar on a terminal, lines elsewhere")
    probe: ProbeConfig = key(ProbeConfig(), "attention statistics during training")
    samples: SamplesConfig = key(SamplesConfig(), "text written during training")
    wandb: WandbConfig = key(WandbConfig(), "what Weights & Biases gets")
    parts: Mapping[str, Part] = key(dict, "callbacks by name", rest=True)


def check_parts(group: Mapping[str, Any], path: str, known: tuple[str, ...] = ()) -> None:
    """Refuse an entry of a group of callbacks or loggers that is no ``{_target_: …}``; null switches one off."""
    for name, node in group.items():
        near = f"; did you mean {path}.{found[0]}?" if (found := get_close_matches(name, known, n=1)) else ""
        require(node is None or is_part(node), f"{path}.{name} has no _target_, which names a class{near}")
