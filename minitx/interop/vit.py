"""ViT (Dosovitskiy et al. 2021). Its patch embedding is a convolution; the kernel is our matrix in another shape."""

from __future__ import annotations

from collections.abc import Collection

from minitx.config import TransformerConfig
from minitx.interop.bert import block
from minitx.interop.table import ACTIVATIONS, Architecture, Family, Key, Place, Values


def tidy(values: Values, names: Collection[str]) -> Values:
    """Replace [side, side] by the side. Images and patches must be square."""
    for name in ("image_size", "patch_size"):
        sides = values.get(name)
        if isinstance(sides, list) and len(set(sides)) == 1:
            values[name] = sides[0]
        elif isinstance(sides, list):
            raise ValueError(f"{name}={sides} is not supported: images and patches must be square")
    return values


def _kernel(config: TransformerConfig) -> tuple[int, ...]:
    assert config.num_channels is not None
    return config.embed_dim, config.num_channels, config.patch_size, config.patch_size


def _positions(config: TransformerConfig) -> tuple[int, ...]:
    assert config.image_size is not None
    return 1, (config.image_size // config.patch_size) ** 2 + 1, config.embed_dim


VIT = Family(
    model_type="vit",
    keys=(
        Key("hidden_size", "embed_dim", 768),
        Key("num_hidden_layers", "num_layers", 12),
        Key("num_attention_heads", "num_heads", 12),
        Key("intermediate_size", "ffn_dim", 3072),
        Key("hidden_act", "activation", "gelu", ACTIVATIONS),
        *(Key(name, "dropout", 0.0) for name in ("attention_probs_dropout_prob", "hidden_dropout_prob")),
        Key("layer_norm_eps", "norm_eps", 1e-12),
        Key("image_size", "image_size", 224),
        Key("patch_size", "patch_size", 16),
        Key("num_channels", "num_channels", 3),
        Key("qkv_bias", "qkv_bias", True),
        Key("num_labels", "num_labels", 2),
    ),
    fields={"architecture": "vision"},
    required={"pooler_act": "tanh"},
    architectures={
        "ViTForImageClassification": Architecture({"head": "sequence"}, {"head": "classifier"}, ignored=("pooler.*",)),
        "ViTModel": Architecture({"head": "none", "pooler": True, "num_labels": None}, {}, is_base=True),
    },
    prefix="vit.",
    tensors={
        "embeddings.class_token": "embeddings.cls_token",
        "embeddings.position.weight": Place("embeddings.position_embeddings", shape=_positions),
        "embeddings.patch_proj.weight": Place("embeddings.patch_embeddings.projection.weight", shape=_kernel),
        "embeddings.patch_proj.bias": "embeddings.patch_embeddings.projection.bias",
        **block("attention", "layernorm_before", "layernorm_after"),
        "final_norm": "layernorm",
        "pool.dense": "pooler.dense",
    },
    harmless=("encoder_stride", "pooler_output_size"),  # they do not change the output
    tidy=tidy,
)
