"""Attention, Transformer blocks and models. This package needs torch and the standard library only.

The letters of shapes are the same everywhere: **B** batch, **H** query heads, **Hkv** key/value heads, **L** query length,
**S** key length, **D** head_dim (the papers' d_k), **Dv** value head_dim, **E** embed_dim (d_model), **V** vocabulary.
Queries inside attention have shape (B, H, L, D). Hidden states between layers have shape (B, L, E). Masks are bool, True = may
attend.

Additive, linear, Performer and Linformer attention are in ``minitx.nn.efficient``.
"""

from typing import TYPE_CHECKING

from minitx.config.lazy import on_first_use

if TYPE_CHECKING:
    from minitx.nn.attention import DotProductAttention, MultiHeadAttention
    from minitx.nn.backends import (
        backend_names,
        explain_backends,
        register_backend,
        scaled_dot_product_attention,
        unregister_backend,
    )
    from minitx.nn.bias import ALiBi, Bias, T5RelativeBias, TensorBias
    from minitx.nn.blocks import Block, LayerScale, Residual, StochasticDepth, is_recomputing
    from minitx.nn.cache import KVCache, LayerCache
    from minitx.nn.drop_in import DropInAttention, swap_attention
    from minitx.nn.feedforward import FeedForward
    from minitx.nn.folding import fold_scale, set_scale
    from minitx.nn.functional import AttentionCall, attention_scores, attention_weights, masked_softmax, reference_attention
    from minitx.nn.init import init_weights
    from minitx.nn.masks import (
        BlockSparse,
        Causal,
        Dense,
        Documents,
        Mask,
        Padding,
        PrefixLM,
        SlidingWindow,
        from_key_padding_mask,
        intersect,
    )
    from minitx.nn.models import DecoderLM, Encoder, EncoderDecoder, VisionTransformer, build_model
    from minitx.nn.norms import QKNorm, make_norm
    from minitx.nn.positions import LearnedPositions, Rotary, RotaryScaling, SinusoidalPositions
    from minitx.nn.scale import ScoreScale, scale_multiplier

__all__ = [
    "ALiBi",
    "AttentionCall",
    "Bias",
    "Block",
    "BlockSparse",
    "Causal",
    "DecoderLM",
    "Dense",
    "Documents",
    "DotProductAttention",
    "DropInAttention",
    "Encoder",
    "EncoderDecoder",
    "FeedForward",
    "KVCache",
    "LayerCache",
    "LayerScale",
    "LearnedPositions",
    "Mask",
    "MultiHeadAttention",
    "Padding",
    "PrefixLM",
    "QKNorm",
    "Residual",
    "Rotary",
    "RotaryScaling",
    "ScoreScale",
    "SinusoidalPositions",
    "SlidingWindow",
    "StochasticDepth",
    "T5RelativeBias",
    "TensorBias",
    "VisionTransformer",
    "attention_scores",
    "attention_weights",
    "backend_names",
    "build_model",
    "explain_backends",
    "fold_scale",
    "from_key_padding_mask",
    "init_weights",
    "intersect",
    "is_recomputing",
    "make_norm",
    "masked_softmax",
    "reference_attention",
    "register_backend",
    "scale_multiplier",
    "scaled_dot_product_attention",
    "set_scale",
    "swap_attention",
    "unregister_backend",
]

__getattr__, __dir__ = on_first_use(__name__)
