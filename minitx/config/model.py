"""What defines a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from minitx.config.checks import ConfigError, fraction, not_negative, positive, require

SCALE_WORDS = ("inv_sqrt", "unscaled", "inv", "learned", "log_length")


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
        positive(self, "vocab_size", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "num_layers", "ffn_dim")
        positive(self, "max_len", "window", "softcap", "norm_eps", "rotary_base", "rotary_original_len", "layer_scale")
        positive(self, "num_experts", "experts_per_token")
        not_negative(self, "type_vocab_size")
        fraction(self, "dropout", "stochastic_depth")
        require(
            self.head_dim is not None or self.embed_dim % self.num_heads == 0,
            f"embed_dim={self.embed_dim} is not divisible by num_heads={self.num_heads}; "
            "choose another number of heads or set head_dim",
        )
        require(
            self.num_heads % self.kv_heads == 0,
            f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}",
        )
        check_scale(self.scale)
        require(math.isfinite(self.scale_factor), f"scale_factor={self.scale_factor} must be a finite number")
        require(
            self.scale != "log_length" or self.max_len > 1,
            f"max_len={self.max_len} must exceed 1 with scale=log_length, which divides by ln(max_len)",
        )
        require(
            self.position != "rotary" or self.width_per_head % 2 == 0,
            f"head_dim={self.width_per_head} must be even with position=rotary",
        )
        require(
            not self.parallel or self.norm_position == "pre",
            f"parallel={self.parallel} needs norm_position=pre, got norm_position={self.norm_position}",
        )
        self._check_rotary_scaling()
        require(
            self.num_experts is None or self.experts_per_token <= self.num_experts,
            f"experts_per_token={self.experts_per_token} must not exceed num_experts={self.num_experts}",
        )

    def _check_rotary_scaling(self) -> None:
        kind = self.rotary_scaling
        require(
            kind is None or self.position == "rotary",
            f"rotary_scaling={kind} needs position=rotary, got position={self.position}",
        )
        require(1.0 <= self.rotary_factor < math.inf, f"rotary_factor={self.rotary_factor} must be a number from 1")
        require(
            kind is not None or self.rotary_factor == 1.0,
            f"rotary_factor={self.rotary_factor} needs rotary_scaling, got rotary_scaling=null",
        )
        require(
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
