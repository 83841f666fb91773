"""The config of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from minitx.config.part import Part, Takes, needs
from minitx.config.scale_words import Scale
from minitx.config.schema import Config, ConfigError, Count, Finite, Natural, Positive, Share, require

OwnAttention = Annotated[Part, Takes(offers=("embed_dim", "num_heads", "head_dim", "max_len", "layer"), completes=False)]
"""An attention core (a function or class that returns a module), or a subclass of ``minitx.nn.MultiHeadAttention``."""


@dataclass(frozen=True)
class _Belonging:
    """The fields ``names`` have an effect only if the field ``to`` has one of ``values``."""

    names: tuple[str, ...]
    to: str
    values: tuple[str, ...]


_BELONG_TO = (
    _Belonging(("head",), to="architecture", values=("encoder", "vision")),
    _Belonging(("num_decoder_layers",), to="architecture", values=("encoder_decoder",)),
    _Belonging(("logit_softcap", "scale_logits"), to="architecture", values=("decoder", "encoder_decoder")),
    _Belonging(("head_transform",), to="architecture", values=("encoder",)),
    _Belonging(("scale_embeddings", "type_vocab_size"), to="architecture", values=("decoder", "encoder", "encoder_decoder")),
    _Belonging(("image_size", "num_channels", "patch_size"), to="architecture", values=("vision",)),
    _Belonging(("pooler",), to="head", values=("sequence", "none")),
    _Belonging(("head_transform",), to="head", values=("lm", "sequence")),
    _Belonging(("num_features",), to="attention", values=("performer",)),
    _Belonging(("num_slots",), to="attention", values=("linformer",)),
    _Belonging(("backend",), to="attention", values=("exact",)),
    _Belonging(
        ("rotary_base", "rotary_interleaved", "rotary_scaling", "rotary_original_len"), to="position", values=("rotary",)
    ),
    _Belonging(("position_offset",), to="position", values=("learned", "sinusoidal")),
    _Belonging(("num_buckets", "max_distance"), to="position", values=("t5",)),
    _Belonging(("rotary_factor",), to="rotary_scaling", values=("linear", "ntk", "yarn", "llama3")),
    _Belonging(("rotary_low", "rotary_high"), to="rotary_scaling", values=("yarn", "llama3")),
    _Belonging(("qk_norm_eps",), to="qk_norm", values=("rms", "layer", "l2")),
)


@dataclass(frozen=True)
class _Limit:
    """The field ``name`` must have one of ``values`` while the field ``other`` has one of ``kinds``."""

    name: str
    values: tuple[str | bool | None, ...]
    other: str
    kinds: tuple[str, ...]
    reason: str


_EFFICIENT = ("linear", "performer", "linformer")
_LIMITS = (
    _Limit("architecture", ("decoder", "encoder", "vision"), "attention", _EFFICIENT, "it does not support cross-attention"),
    _Limit("window", (None,), "attention", _EFFICIENT, "it cannot hide single keys from a query"),
    _Limit("position", ("learned", "sinusoidal", "rotary", "none"), "attention", _EFFICIENT, "it has no scores to add to"),
    _Limit(
        "architecture", ("encoder", "vision"), "attention", ("linformer",), "its slots mix all positions, so it is not causal"
    ),
    _Limit("sinks", (False,), "attention", ("linear", "performer"), "it has no softmax over keys"),
    _Limit("head", ("sequence", "none"), "architecture", ("vision",), "its head is sequence or none"),
    _Limit("position", ("learned", "none"), "architecture", ("vision",), "its patches have position=learned or none"),
    _Limit("window", (None,), "architecture", ("vision",), "it counts neighbours in a row, but patches form a grid"),
)
"""Limits with reasons. Some of these faults would appear only in the first step."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Config):
    """Everything that defines a model. It is stored with the weights.

    Attributes:
        architecture: decoder, encoder, encoder_decoder or vision.
        vocab_size: V, the number of tokens; null: the data's.
        type_vocab_size: number of token types; 0: the data's.
        pad_id: the padding token; null: the data's.
        bos_id: the first token of an encoder-decoder's target; null: the data's.
        eos_id: the token, or list of tokens, that ends a text, besides the data's.
        embed_dim: E, the width of a token.
        num_heads: H, query heads.
        num_kv_heads: Hkv, key and value heads, a divisor of num_heads; null: num_heads.
        head_dim: D (d_k), the width of a head; null: embed_dim // num_heads.
        num_layers: blocks, on each side of an encoder-decoder.
        num_decoder_layers: decoder blocks of an encoder-decoder; null: num_layers.
        ffn_dim: hidden units of the feed-forward; null: 4 * embed_dim (if gated: 8/3 of embed_dim, rounded up to a multiple of 8).
        max_len: longest context in generation, longest row with position=learned, length in scale=log_length.
        dropout: probability of dropping activations and attention weights.
        attention: exact, or a core of minitx.nn.efficient: additive, linear, performer or linformer; or, with _target_, your own
            core or layer (a subclass of MultiHeadAttention).
        window: visible keys, including the query's own; null: all. A list repeats over the layers: [4096, null].
        num_features: random features of attention=performer; null: d_k ln d_k.
        num_slots: slots of attention=linformer (required).
        scale: the factor on q.k: inv_sqrt (1/sqrt(d_k)), unscaled (1), inv (1/d_k), learned (exp of one log-scale per head),
            log_length (ln(n)/ln(max_len)/sqrt(d_k) for n keys), 'head_dim^p' (d_k to the power p) or a number.
        scale_factor: multiplies the scale.
        backend: the kernel: auto, math, sdpa, chunked, flex or a registered name.
        qk_norm: norm of queries and keys: rms, layer or l2; null: none.
        qk_norm_eps: its eps, under the square root; for l2, the smallest norm to divide by.
        softcap: t in t * tanh(z / t); null: off.
        sinks: one learned logit per head that has no value.
        position: learned, sinusoidal, rotary, alibi, t5 or none.
        position_offset: the first row of a learned table (2 in RoBERTa).
        rotary_base: base of the frequencies (larger: slower). A list repeats over the layers.
        rotary_interleaved: pairs of channels (2i, 2i+1); false: (i, i + d_k/2), as in Llama.
        rotary_scaling: linear, ntk, yarn or llama3 (see RotaryScaling), for long contexts; null: off.
        rotary_factor: new length divided by the length in training. A list repeats over the layers.
        rotary_original_len: the length in training, required by yarn and llama3.
        rotary_low: with yarn, llama3: fewer turns are interpolated; null: the paper's value.
        rotary_high: with yarn, llama3: more turns are unchanged; null: the paper's value.
        num_buckets: buckets of position=t5.
        max_distance: with position=t5: keys from this distance on share a bucket.
        norm: layer or rms.
        norm_eps: eps of the norms under the square root.
        norm_position: pre, post, sandwich or deepnorm (also multiplies the initial W_V, W_O and feed-forward weights by its beta).
        embed_norm: a norm after the embeddings, as in BERT.
        scale_embeddings: multiply token embeddings by sqrt(embed_dim) (Vaswani et al. 2017, §3.4).
        scale_logits: divide the last hidden states by sqrt(embed_dim) (T5 with a tied head).
        parallel: attention and feed-forward read the same input; both outputs are added.
        layer_scale: initial value of a learned gain per channel of a sublayer's output; null: off.
        stochastic_depth: probability per sample of dropping a sublayer of the last block; it grows linearly with depth.
        checkpointing: recompute activations in the backward pass to save memory.
        activation: gelu, gelu_tanh, relu, relu2, swiglu, geglu, geglu_tanh or reglu.
        bias: biases in the linear layers of attention and feed-forward.
        qkv_bias: biases in the query, key and value projections; null: as bias.
        out_bias: a bias in attention's output projection; null: as bias.
        init: initial weights: gpt2 (N(0, 0.02^2)), lecun (variance 1/fan-in), xavier, torch_mha, torch_linear (as torch's layers)
            or t5 (lecun, 1/sqrt(d_k) in W_Q).
        init_fold: 1/sqrt(d_k) in the initial weights: query (W_Q x d_k^-1/2) or symmetric (W_Q and W_K x d_k^-1/4), each with its
            bias; null: off.
        init_zero_outputs: start every sublayer with the output 0; with norm_position=pre or sandwich, a block is then the
            identity.
        tie_embeddings: use the embedding table as the weight of the lm head.
        head: output of an encoder: lm (logits over the vocabulary per token, to predict masked tokens), sequence (num_labels per
            row), token (num_labels per token) or none (hidden states).
        head_bias: a bias in an lm head.
        logit_softcap: t in t * tanh(logits / t), for decoder and encoder_decoder (Gemma 2, arXiv:2408.00118, §2); null: off.
        head_transform: BERT's layer before the head: dense, activation and norm for lm; the pooler's for sequence.
        num_labels: labels, for head=sequence and token; null: the data's.
        pooling: for head=sequence: first (the first real token) or mean.
        pooler: BERT's tanh layer after pooling, for head=sequence and none (there in model.pool).
        image_size: side of the images, in pixels; null: the data's.
        num_channels: colour channels; null: the data's.
        patch_size: side of a patch in pixels, for architecture=vision.

    Raises:
        ConfigError: a field out of its bounds, or a combination of fields that would have no effect or fail later. Constructors
            in ``minitx.nn`` make further checks when the model is built.
    """

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {
        "d_k": "d_k is {path}embed_dim / {path}num_heads (d_model / heads). Set {path}num_heads, or {path}head_dim, which changes d_k alone",
        "d_model": "d_model is called {path}embed_dim",
        "d_ff": "d_ff is called {path}ffn_dim",
    }
    architecture: Literal["decoder", "encoder", "encoder_decoder", "vision"] = "decoder"
    vocab_size: Count | None = None
    type_vocab_size: Natural = 0
    pad_id: Natural | None = None
    bos_id: Natural | None = None
    eos_id: Natural | tuple[Natural, ...] | None = None
    embed_dim: Count = 128
    num_heads: Count = 4
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    num_layers: Count = 4
    num_decoder_layers: Count | None = None
    ffn_dim: Count | None = None
    max_len: Count = 256
    dropout: Share = 0.0
    attention: Literal["exact", "additive", "linear", "performer", "linformer"] | OwnAttention = "exact"
    window: Count | tuple[Count | None, ...] | None = None
    num_features: Count | None = None
    num_slots: Count | None = None
    scale: Scale = "inv_sqrt"
    scale_factor: Finite = 1.0
    backend: str = "auto"
    qk_norm: Literal["rms", "layer", "l2"] | None = None
    qk_norm_eps: Positive = 1e-6
    softcap: Positive | None = None
    sinks: bool = False
    position: Literal["learned", "sinusoidal", "rotary", "alibi", "t5", "none"] = "learned"
    position_offset: Natural = 0
    rotary_base: Positive | tuple[Positive, ...] = 10000.0
    rotary_interleaved: bool = False
    rotary_scaling: Literal["linear", "ntk", "yarn", "llama3"] | None = None
    rotary_factor: Positive | tuple[Positive, ...] = 1.0
    rotary_original_len: Count | None = None
    rotary_low: float | None = None
    rotary_high: float | None = None
    num_buckets: Count = 32
    max_distance: Count = 128
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: Positive = 1e-5
    norm_position: Literal["pre", "post", "sandwich", "deepnorm"] = "pre"
    embed_norm: bool = False
    scale_embeddings: bool = False
    scale_logits: bool = False
    parallel: bool = False
    layer_scale: Positive | None = None
    stochastic_depth: Share = 0.0
    checkpointing: bool = False
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "swiglu", "geglu", "geglu_tanh", "reglu"] = "gelu"
    bias: bool = True
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    init: Literal["gpt2", "lecun", "xavier", "torch_mha", "torch_linear", "t5"] = "gpt2"
    init_fold: Literal["query", "symmetric"] | None = None
    init_zero_outputs: bool = False
    tie_embeddings: bool = True
    head: Literal["lm", "sequence", "token", "none"] = "lm"
    head_bias: bool = False
    logit_softcap: Positive | None = None
    head_transform: bool = False
    num_labels: Count | None = None
    pooling: Literal["first", "mean"] = "first"
    pooler: bool = False
    image_size: Count | None = None
    num_channels: Count | None = None
    patch_size: Count = 2

    def check(self) -> None:
        require(
            self.head_dim is not None or self.embed_dim % self.num_heads == 0,
            f"embed_dim={self.embed_dim} is not divisible by num_heads={self.num_heads}; "
            "choose another number of heads or set head_dim",
        )
        require(self.num_heads % self.kv_heads == 0, f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        for name in ("window", "rotary_base", "rotary_factor"):
            require(getattr(self, name) != (), f"{name}=[] must have at least one entry, as a pattern over the layers")
        for belonging in _BELONG_TO:
            for name in belonging.names:
                needs(self, name, belonging.to, *belonging.values)
        for limit in _LIMITS:
            value = getattr(self, limit.name)
            kind = getattr(self, limit.other)
            if kind in limit.kinds and value not in limit.values:
                raise ConfigError(f"{limit.name}={value} is not supported with {limit.other}={kind}: {limit.reason}")
        if self.image_size is not None and self.image_size % self.patch_size:
            raise ConfigError(f"image_size={self.image_size} is not divisible by patch_size={self.patch_size}")

    def check_length(self, longest: int) -> None:
        """Raise a ConfigError if the longest row of the data is longer than the table of learned positions."""
        if self.position == "learned" and longest > self.max_len:
            raise ConfigError(
                f"model.max_len={self.max_len} is smaller than the longest row of the data, {longest} tokens: raise it or shorten the rows"
            )

    def window_of(self, layer: int) -> int | None:
        """Return the window of block number ``layer``."""
        return of_layer(self.window, layer)

    @property
    def decoder_layers(self) -> int:
        """The number of decoder blocks, with the default filled in."""
        return self.num_decoder_layers or self.num_layers

    @property
    def kv_heads(self) -> int:
        """Hkv with the default filled in."""
        return self.num_kv_heads or self.num_heads

    @property
    def has_qkv_bias(self) -> bool:
        """``qkv_bias`` with the default filled in."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def has_out_bias(self) -> bool:
        """``out_bias`` with the default filled in."""
        return self.bias if self.out_bias is None else self.out_bias

    @property
    def has_pooler(self) -> bool:
        """Whether BERT's tanh layer follows the pooling."""
        return self.pooler or (self.head_transform and self.head == "sequence")

    @property
    def num_class_tokens(self) -> int:
        """The number of class tokens of an image: 1 or 0."""
        return int(self.pooling == "first" or self.head == "none")

    @property
    def width_per_head(self) -> int:
        """D (d_k) with the default filled in."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def ffn_width(self) -> int:
        """F with the default filled in."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        return 8 * math.ceil(self.embed_dim / 3) if "glu" in self.activation else 4 * self.embed_dim


def of_layer(value: Any, layer: int) -> Any:
    """Return the entry of block number ``layer`` if ``value`` is a pattern over the layers, else ``value``. Patterns repeat.

    >>> [of_layer((4, None), layer) for layer in range(3)], of_layer(4, 1)
    ([4, None, 4], 4)
    """
    return value[layer % len(value)] if isinstance(value, tuple) else value
