"""T5 v1.0 and v1.1 (Raffel et al. 2020): unscaled scores, a relative position bias in encoder and decoder, RMSNorm, no biases."""

from __future__ import annotations

from collections.abc import Collection

from minitx.config import TransformerConfig
from minitx.interop.table import Architecture, Family, Key, Place, Values

FEED_FORWARD = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gated-gelu": "geglu_tanh",  # T5's code computes the tanh form
    "gated-gelu_new": "geglu_tanh",
    "gated-silu": "swiglu",
    "gated-relu": "reglu",
}


def tidy(values: Values, names: Collection[str]) -> Values:
    """Find the version: the tied head of v1.0 scales the hidden states, the untied head of v1.1 does not.

    Transformers 5 writes ``tie_word_embeddings: true`` for both, and ``scale_decoder_outputs``. Its head is untied if the file
    contains ``lm_head.weight``.
    """
    tied = values.get("tie_word_embeddings") is not False
    scaled = values.setdefault("scale_decoder_outputs", tied)
    values["tie_word_embeddings"] = tied and (scaled or "lm_head.weight" not in names)
    return values


def _block(side: str, ours: str, feed: int) -> dict[str, str | Place]:
    """Return the tensor names of ``side``. Self-attention is layer 0 of a block, the feed-forward network layer ``feed``."""
    theirs = f"{side}.block.*.layer"

    def up_proj(config: TransformerConfig) -> str:
        return f"{theirs}.{feed}.DenseReluDense.wi" + ("_1" if "glu" in config.activation else "")

    return {
        f"{ours}blocks.*.attention_residual.norm": f"{theirs}.0.layer_norm",
        **{f"{ours}blocks.*.attention.{one}_proj": f"{theirs}.0.SelfAttention.{one}" for one in "qkv"},
        f"{ours}blocks.*.attention.out_proj": f"{theirs}.0.SelfAttention.o",
        f"{ours}attn_bias": f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias",
        f"{ours}blocks.*.feedforward_residual.norm": f"{theirs}.{feed}.layer_norm",
        f"{ours}blocks.*.feedforward.gate_proj": f"{theirs}.{feed}.DenseReluDense.wi_0",
        f"{ours}blocks.*.feedforward.up_proj": Place(up_proj),
        f"{ours}blocks.*.feedforward.down_proj": f"{theirs}.{feed}.DenseReluDense.wo",
        f"{ours}final_norm": f"{side}.final_layer_norm",
    }


CROSS = {
    "blocks.*.cross_residual.norm": "decoder.block.*.layer.1.layer_norm",
    **{f"blocks.*.cross_attention.{one}_proj": f"decoder.block.*.layer.1.EncDecAttention.{one}" for one in "qkv"},
    "blocks.*.cross_attention.out_proj": "decoder.block.*.layer.1.EncDecAttention.o",
}
T5 = Family(
    model_type="t5",
    keys=(
        Key("vocab_size", "vocab_size", 32128),
        Key("d_model", "embed_dim", 512),
        Key("d_kv", "head_dim", 64),
        Key("d_ff", "ffn_dim", 2048),
        Key("num_layers", "num_layers", 6),
        Key("num_decoder_layers", "num_decoder_layers"),
        Key("num_heads", "num_heads", 8),
        Key("relative_attention_num_buckets", "num_buckets", 32),
        Key("relative_attention_max_distance", "max_distance", 128),
        Key("dropout_rate", "dropout", 0.1),
        Key("layer_norm_epsilon", "norm_eps", 1e-6),
        Key("feed_forward_proj", "activation", "relu", FEED_FORWARD),
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("scale_decoder_outputs", "scale_logits", True),
        Key("pad_token_id", "pad_id", 0),
        Key("eos_token_id", "eos_id", 1),
        Key("decoder_start_token_id", "bos_id", 0),
    ),
    fields={"position": "t5", "scale": "unscaled", "norm": "rms", "bias": False},
    architectures={
        "T5ForConditionalGeneration": Architecture(
            {"architecture": "encoder_decoder"},
            {**_block("encoder", "encoder.", 1), **_block("decoder", "", 2), **CROSS, "head": "lm_head"},
        ),
        "T5EncoderModel": Architecture(
            {
                "architecture": "encoder",
                "head": "none",
                "scale_logits": False,
                "tie_embeddings": True,
                "num_decoder_layers": None,
            },
            _block("encoder", "", 1),
        ),
    },
    tensors={"embeddings.token": "shared"},
    harmless=("n_positions", "is_encoder_decoder", "dense_act_fn", "is_gated_act"),  # they follow from other keys
    ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    copies={
        "lm_head.weight": "shared.weight",
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    },
    tidy=tidy,
)
