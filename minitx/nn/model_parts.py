"""The parts of a model, built from a ``TransformerConfig``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.config.transformer import of_layer
from minitx.nn.attention import DotProductAttention, MultiHeadAttention
from minitx.nn.bias import ALiBi, Bias, T5RelativeBias
from minitx.nn.blocks import Block, LayerScale, StochasticDepth
from minitx.nn.feedforward import ACTIVATIONS, FeedForward
from minitx.nn.functional import require_tensor
from minitx.nn.norms import QKNorm, make_norm
from minitx.nn.positions import (
    ID_DTYPES,
    LearnedPositions,
    Rotary,
    RotaryScaling,
    SinusoidalPositions,
    check_position_ids,
    check_range,
    num_rows,
)
from minitx.nn.scale import ScoreScale


class Embeddings(nn.Module):
    """Sum of token, position and token-type embeddings, then an optional norm and dropout: (B, L) to (B, L, E)."""

    def __init__(self, config: TransformerConfig, token: nn.Embedding | None = None) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError(f"vocab_size=None: architecture={config.architecture} needs the vocabulary size")
        self.token = nn.Embedding(config.vocab_size, config.embed_dim) if token is None else token
        self.gain = config.embed_dim**0.5 if config.scale_embeddings else None
        self.token_type = nn.Embedding(config.type_vocab_size, config.embed_dim) if config.type_vocab_size else None
        embedding = POSITIONS[config.position].embedding
        self.position = None if embedding is None else embedding(config)
        self.offset = config.position_offset
        self.norm = make_norm(config.norm, config.embed_dim, config.norm_eps) if config.embed_norm else None
        self.dropout = nn.Dropout(config.dropout) if config.dropout != 0.0 else None

    def forward(self, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        check_position_ids(position_ids, *input_ids.shape)
        check_range("input_ids", input_ids, num_rows(self.token))
        x = self.token(input_ids)
        if self.gain is not None:
            x = x * self.gain
        if self.position is not None:
            x = x + self.position(position_ids + self.offset if self.offset else position_ids, x.dtype)
        if token_type_ids is not None:
            if self.token_type is None:
                raise ValueError("token_type_ids cannot be used: the model has type_vocab_size=0")
            if token_type_ids.shape != input_ids.shape or token_type_ids.dtype not in ID_DTYPES:
                raise ValueError(
                    f"token_type_ids must be int32 or int64 of the shape of input_ids, {tuple(input_ids.shape)}, "
                    f"got {token_type_ids.dtype} {tuple(token_type_ids.shape)}"
                )
            check_range("token_type_ids", token_type_ids, num_rows(self.token_type))
            x = x + self.token_type(token_type_ids)
        elif self.token_type is not None:
            x = x + self.token_type(torch.zeros_like(input_ids))
        x = x if self.norm is None else self.norm(x)
        return x if self.dropout is None else self.dropout(x)


class PatchEmbeddings(nn.Module):
    """Embed the patches of images: (B, C, h, w) to (B, tokens, E). The class token comes first. Positions are added."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        for name in ("image_size", "num_channels"):
            if getattr(config, name) is None:
                raise ValueError(f"{name}=None: VisionTransformer needs {name}")
        assert config.image_size is not None and config.num_channels is not None
        E = config.embed_dim
        P = config.patch_size
        self.num_channels = config.num_channels
        self.patch_size = P
        self.side = config.image_size // P
        self.num_class_tokens = config.num_class_tokens
        self.num_tokens = self.side**2 + self.num_class_tokens
        self.patch_proj = nn.Linear(self.num_channels * P * P, E)
        self.class_token = nn.Parameter(torch.zeros(1, 1, E)) if self.num_class_tokens else None
        self.position = nn.Embedding(self.num_tokens, E) if config.position == "learned" else None
        self.norm = make_norm(config.norm, E, config.norm_eps) if config.embed_norm else None
        self.dropout = nn.Dropout(config.dropout)

    def reset_parameters(self) -> None:
        """Set the class token to zero."""
        if self.class_token is not None:
            nn.init.zeros_(self.class_token)

    def forward(self, pixel_values: Tensor) -> Tensor:
        require_tensor("pixel_values", pixel_values)
        P = self.patch_size
        shape = tuple(pixel_values.shape)
        if len(shape) != 4 or shape[1] != self.num_channels or shape[2] % P or shape[3] % P or 0 in shape:
            raise ValueError(
                f"pixel_values must have shape (B, {self.num_channels}, h, w) with h and w multiples of patch_size={P}, got {shape}"
            )
        if not pixel_values.is_floating_point():
            raise TypeError(f"pixel_values must be floating-point, got {pixel_values.dtype}")
        grid = shape[2] // P, shape[3] // P
        patches = pixel_values.unfold(2, P, P).unfold(3, P, P)  # (B, C, rows, columns, P, P)
        x = self.patch_proj(patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2))  # (B, rows * columns, E)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(shape[0], -1, -1), x), dim=1)
        if self.position is not None:
            x = x + self.positions(*grid)
        return self.dropout(x if self.norm is None else self.norm(x))

    def positions(self, rows: int, columns: int) -> Tensor:
        """Return the position table (tokens, E), with bicubic interpolation for a grid of another size."""
        assert self.position is not None
        table = self.position.weight
        n = self.num_class_tokens
        if (rows, columns) == (self.side, self.side):
            return table
        square = table[n:].T.view(1, -1, self.side, self.side)
        high = square.to(torch.promote_types(square.dtype, torch.float32))
        resized = F.interpolate(high, size=(rows, columns), mode="bicubic", align_corners=False).to(table.dtype)
        return torch.cat((table[:n], resized[0].flatten(1).T))


def build_attention(config: TransformerConfig, layer: int = 0, *, rotary: bool = True) -> MultiHeadAttention:
    """Build the attention of block number ``layer``. Cross-attention has ``rotary=False``.

    ``config.attention`` may name a subclass of ``MultiHeadAttention``. It gets the arguments of its base class, and ``layer`` if it
    has this parameter.
    """
    D, sizes = config.width_per_head, (config.embed_dim, config.num_heads)
    scale = ScoreScale(config.scale, head_dim=D, num_heads=config.num_heads, max_len=config.max_len, factor=config.scale_factor)
    options: dict[str, Any] = {
        "num_kv_heads": config.kv_heads,
        "head_dim": D,
        "bias": config.has_qkv_bias,
        "out_bias": config.has_out_bias,
        "dropout": config.dropout,
        "softcap": config.softcap,
        "scale": scale,
        "qk_norm": QKNorm(config.qk_norm, D, num_kv_heads=config.kv_heads, eps=config.qk_norm_eps) if config.qk_norm else None,
        "rotary": build_rotary(config, layer) if rotary and POSITIONS[config.position].rotary else None,
        "sinks": config.sinks,
    }
    part: Any = config.attention
    target = getattr(part, "target", None)
    if not (isinstance(target, type) and issubclass(target, MultiHeadAttention)):
        return MultiHeadAttention(*sizes, **options, core=build_attention_core(config, layer))
    if both := sorted({"embed_dim", "num_heads", "max_len", *options} & {*part.arguments}):
        raise ValueError(f"attention.{both[0]} is set by the model: remove it, and set the model's own key")
    if "layer" in part.names:
        options["layer"] = layer
    return replace(part, is_partial=True).build()(*sizes, **options)


class Pool(nn.Module):
    """Pool (B, L, E) to (B, E): take the first real token or the mean of the real tokens, then apply BERT's tanh layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pooling = config.pooling
        # the mean of an image leaves out class tokens
        self.start = config.num_class_tokens if config.architecture == "vision" and config.pooling == "mean" else 0
        self.dense = nn.Linear(config.embed_dim, config.embed_dim) if config.has_pooler else None

    def forward(self, hidden: Tensor, key_mask: Tensor | None = None) -> Tensor:
        hidden = hidden[:, self.start :]
        if key_mask is None:
            pooled = hidden[:, 0] if self.pooling == "first" else hidden.mean(1)
        elif self.pooling == "first":
            first = key_mask.int().argmax(-1)  # not 0 in a left-padded row
            pooled = hidden.gather(1, first.view(-1, 1, 1).expand(-1, 1, hidden.shape[-1]))[:, 0]
        else:
            real = key_mask.unsqueeze(-1)
            pooled = hidden.masked_fill(~real, 0.0).sum(1) / real.sum(1).clamp(min=1)
        return pooled if self.dense is None else torch.tanh(self.dense(pooled))


class CappedHead(nn.Linear):
    """A linear head with soft-capped logits, t · tanh((xW + b) / t) (Gemma 2, arXiv:2408.00118, §2).

    >>> bool(CappedHead(3, 5, softcap=2.0)(torch.full((1, 3), 100.0)).abs().max() <= 2.0)
    True
    """

    def __init__(self, in_features: int, out_features: int, *, softcap: float, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.softcap = softcap

    def forward(self, x: Tensor) -> Tensor:
        return self.softcap * torch.tanh(super().forward(x) / self.softcap)


class MaskedHead(nn.Module):
    """BERT's head for masked tokens: norm(a(W x)), then a linear layer to V (``cls/predictions`` in the authors' code)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.dense = nn.Linear(config.embed_dim, config.embed_dim)
        self.activation = config.activation
        self.norm = make_norm(config.norm, config.embed_dim, config.norm_eps)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=config.head_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(ACTIVATIONS[self.activation](self.dense(hidden))))


def build_head(config: TransformerConfig, token: nn.Embedding | None = None) -> nn.Module:
    """Build the head of ``config.head``. An ``lm`` head may be soft-capped, and may share its weight with the ``token`` table.

    Raises:
        ValueError: the head needs ``num_labels``, but it is None.
    """
    E, V = config.embed_dim, config.vocab_size
    if config.head == "none":
        return nn.Identity()
    if config.head != "lm":
        if config.num_labels is None:
            raise ValueError(f"num_labels=None: head={config.head} needs the number of labels")
        return nn.Linear(E, config.num_labels)
    assert V is not None and token is not None
    if config.head_transform:
        head: nn.Module = MaskedHead(config)
    elif config.logit_softcap is not None:
        head = CappedHead(E, V, softcap=config.logit_softcap, bias=config.head_bias)
    else:
        head = nn.Linear(E, V, bias=config.head_bias)
    if config.tie_embeddings:
        (head.head if isinstance(head, MaskedHead) else head).weight = token.weight
    return head


def build_attention_core(config: TransformerConfig, layer: int = 0) -> nn.Module:
    """Build the attention core of block number ``layer``."""
    if not isinstance(config.attention, str):
        sizes = {"head_dim": config.width_per_head, "num_heads": config.num_heads, "max_len": config.max_len}
        return config.attention.build(**sizes, embed_dim=config.embed_dim, layer=layer)
    if config.attention == "exact":
        return DotProductAttention(backend=config.backend)
    from minitx.nn.efficient import build_core

    sizes = {name: getattr(config, name) for name in ("max_len", "num_features", "num_slots")}
    return build_core(config.attention, head_dim=config.width_per_head, **sizes)


def build_rotary(config: TransformerConfig, layer: int = 0) -> Rotary:
    """Build the rotary positions of block number ``layer``."""
    scaling = None
    if config.rotary_scaling is not None:
        turns = config.rotary_low, config.rotary_high
        factor = of_layer(config.rotary_factor, layer)
        scaling = RotaryScaling(config.rotary_scaling, factor, config.rotary_original_len, *turns)
    base = of_layer(config.rotary_base, layer)
    return Rotary(config.width_per_head, base=base, interleaved=config.rotary_interleaved, scaling=scaling)


def build_bias(config: TransformerConfig, *, decoder: bool) -> Bias | None:
    """Build the position bias on the scores, shared by all layers as in T5, or return None."""
    bias = POSITIONS[config.position].bias
    return None if bias is None else bias(config, decoder)


def _build_t5(config: TransformerConfig, decoder: bool) -> Bias:
    sizes = {"num_buckets": config.num_buckets, "max_distance": config.max_distance}
    return T5RelativeBias(config.num_heads, bidirectional=not decoder, **sizes)


class Position(NamedTuple):
    """What a word of ``config.position`` adds to a model."""

    embedding: Callable[[TransformerConfig], nn.Module] | None = None
    bias: Callable[[TransformerConfig, bool], Bias] | None = None
    rotary: bool = False

    @property
    def reads_ids(self) -> bool:
        """Whether ``position_ids`` have an effect."""
        return self.rotary or self.embedding is not None


POSITIONS = {
    "learned": Position(lambda config: LearnedPositions(config.max_len + config.position_offset, config.embed_dim)),
    "sinusoidal": Position(lambda config: SinusoidalPositions(config.embed_dim)),
    "rotary": Position(rotary=True),
    "alibi": Position(bias=lambda config, decoder: ALiBi(config.num_heads)),
    "t5": Position(bias=_build_t5),
    "none": Position(),
}


def build_block(config: TransformerConfig, layer: int, num_layers: int, *, causal: bool, cross: bool = False) -> Block:
    """Build block number ``layer`` of ``num_layers``. Later blocks have a higher probability of stochastic depth."""
    drop = config.stochastic_depth * (layer + 1) / num_layers  # Huang et al. 2016, eq. 4

    def branch() -> nn.Module:
        gain = [] if config.layer_scale is None else [LayerScale(config.embed_dim, config.layer_scale)]
        return nn.Sequential(*gain, *([StochasticDepth(drop)] if drop > 0.0 else []))

    return Block(
        build_attention(config, layer),
        FeedForward(config.embed_dim, config.ffn_width, activation=config.activation, bias=config.bias, dropout=config.dropout),
        norm=lambda: make_norm(config.norm, config.embed_dim, config.norm_eps),
        causal=causal,
        cross_attention=build_attention(config, layer, rotary=False) if cross else None,
        norm_position=config.norm_position,
        parallel=config.parallel,
        dropout=config.dropout,
        residual_scale=deepnorm_factors(config, decoder=causal)[0],
        branch=branch if config.layer_scale is not None or drop > 0.0 else None,
    )


def deepnorm_factors(config: TransformerConfig, *, decoder: bool) -> tuple[float, float]:
    """Return DeepNorm's α (on the residual stream) and β (on the initial W_V, W_O and feed-forward weights).

    For an encoder or a decoder of N layers: (2N)^¼ and (8N)^-¼. For an encoder of N layers with a decoder of M layers:
    0.81 (N⁴M)^(1/16) and 0.87 (N⁴M)^(-1/16) in the encoder, (3M)^¼ and (12M)^-¼ in the decoder. Wang et al. 2022, "DeepNet",
    arXiv:2203.00555, Figure 2. Without DeepNorm: 1 and 1.
    """
    N, M = config.num_layers, config.decoder_layers
    if config.norm_position != "deepnorm":
        return 1.0, 1.0
    if config.architecture != "encoder_decoder":
        return (2 * N) ** 0.25, (8 * N) ** -0.25
    return ((3 * M) ** 0.25, (12 * M) ** -0.25) if decoder else (0.81 * (N**4 * M) ** 0.0625, 0.87 * (N**4 * M) ** -0.0625)


def init_gains(config: TransformerConfig, *, decoder: bool) -> dict[str, float]:
    """Return the factors on the initial weights, by role."""
    gains = dict.fromkeys(("value", "up", "residual"), deepnorm_factors(config, decoder=decoder)[1])
    return {**gains, "residual": 0.0} if config.init_zero_outputs else gains
