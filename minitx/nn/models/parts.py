"""From a ``TransformerConfig`` to built parts; the only place where the models read it field by field."""

from __future__ import annotations

from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.nn.attention import DotProductAttention, MultiHeadAttention
from minitx.nn.blocks import DecoderBlock, EncoderBlock
from minitx.nn.feedforward import FeedForward
from minitx.nn.norms import QKNorm, make_norm
from minitx.nn.positions import LearnedPositions, Rotary, SinusoidalPositions
from minitx.nn.scale import ScoreScale


class Embeddings(nn.Module):
    """Token + position + token-type embeddings, then dropout: (B, L) -> (B, L, E)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.token = nn.Embedding(config.vocab_size, config.embed_dim)
        self.token_type = nn.Embedding(config.type_vocab_size, config.embed_dim) if config.type_vocab_size else None
        self.position: nn.Module | None = None
        if config.position == "learned":
            self.position = LearnedPositions(config.max_len, config.embed_dim)
        elif config.position == "sinusoidal":
            self.position = SinusoidalPositions(config.embed_dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        x = self.token(input_ids)
        if self.position is not None:
            x = x + self.position(position_ids, x.dtype)
        if (token_type_ids is None) != (self.token_type is None):
            wanted = "has none (type_vocab_size=0)" if self.token_type is None else "needs token_type_ids"
            raise ValueError(f"token_type_ids: the model {wanted}, got {'None' if token_type_ids is None else 'a tensor'}")
        if self.token_type is not None:
            x = x + self.token_type(token_type_ids)
        return self.dropout(x)


def build_attention(config: TransformerConfig, *, rotary: bool = True) -> MultiHeadAttention:
    """One attention layer; cross-attention takes no rotary positions."""
    D = config.width_per_head
    scale = ScoreScale(config.scale, head_dim=D, num_heads=config.num_heads, max_len=config.max_len, factor=config.scale_factor)
    return MultiHeadAttention(
        config.embed_dim,
        config.num_heads,
        num_kv_heads=config.kv_heads,
        head_dim=D,
        bias=config.bias,
        scale=scale,
        qk_norm=QKNorm(config.qk_norm, D, num_kv_heads=config.kv_heads) if config.qk_norm else None,
        rotary=Rotary(D, base=config.rotary_base) if rotary and config.position == "rotary" else None,
        core=DotProductAttention(dropout=config.dropout, softcap=config.softcap, backend=config.backend),
    )


def build_block(config: TransformerConfig, *, decoder: bool, cross: bool = False) -> EncoderBlock:
    """One encoder or decoder block. DeepNorm's α is (2N)^¼ (Wang et al. 2022, arXiv:2203.00555, Table 1)."""
    parts = {
        "attention": build_attention(config),
        "feedforward": FeedForward(
            config.embed_dim,
            config.ffn_width,
            activation=config.activation,
            bias=config.bias,
            dropout=config.dropout,
        ),
        "norm": lambda: make_norm(config.norm, config.embed_dim, config.norm_eps),
        "norm_position": config.norm_position,
        "parallel": config.parallel,
        "dropout": config.dropout,
        "residual_scale": (2 * config.num_layers) ** 0.25 if config.norm_position == "deepnorm" else 1.0,
    }
    if not decoder:
        return EncoderBlock(**parts)  # type: ignore[arg-type]
    return DecoderBlock(**parts, cross_attention=build_attention(config, rotary=False) if cross else None)  # type: ignore[arg-type]
