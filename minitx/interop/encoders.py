"""The tables of the encoders BERT, RoBERTa and ViT, and of T5, an encoder–decoder."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from minitx.config import TransformerConfig
from minitx.interop.families import ACTIVATIONS, Architecture, Family, Key, Place, Values

# --- BERT and RoBERTa


def block(core: str, attention_norm: str, feedforward_norm: str) -> dict[str, str]:
    """Return the tensor names of a block. ``core`` is the module with the three projections."""
    layer = "encoder.layer.*"
    return {
        **{f"blocks.*.attention.{word[0]}_proj": f"{layer}.attention.{core}.{word}" for word in ("query", "key", "value")},
        "blocks.*.attention.out_proj": f"{layer}.attention.output.dense",
        "blocks.*.attention_residual.norm": f"{layer}.{attention_norm}",
        "blocks.*.feedforward.up_proj": f"{layer}.intermediate.dense",
        "blocks.*.feedforward.down_proj": f"{layer}.output.dense",
        "blocks.*.feedforward_residual.norm": f"{layer}.{feedforward_norm}",
    }


def _heads(name: str, head: str, transform: str, norm: str, sequence: dict[str, str]) -> dict[str, Architecture]:
    """Return the four classes of a family. ``head``, ``transform`` and ``norm`` are the names of modules of the masked head."""
    masked = {
        "head.dense": transform,
        "head.norm": norm,
        "head.head.weight": f"{head}.decoder.weight",
        "head.head.bias": f"{head}.bias",
    }
    fields: Values = {"head": "lm", "head_bias": True, "head_transform": True, "num_labels": None}
    others = ("pooler.*", "cls.seq_relationship.*")  # in files of BertForPreTraining, which BertForMaskedLM can load
    twice = {f"{head}.decoder.bias": f"{head}.bias"}
    return {
        f"{name}ForMaskedLM": Architecture(fields, masked, others, twice),
        f"{name}ForSequenceClassification": Architecture({"head": "sequence", "pooler": True}, sequence),
        f"{name}ForTokenClassification": Architecture({"head": "token"}, {"head": "classifier"}, others),
        f"{name}Model": Architecture({"head": "none", "pooler": True, "num_labels": None}, {}, is_base=True),
    }


def _bert_family(
    model_type: str, vocab_size: int, ids: tuple[Any, Any, Any], keys: tuple[Key, ...] = (), **more: Any
) -> Family:
    bos_id, pad_id, eos_id = ids
    return Family(
        model_type=model_type,
        keys=(
            Key("vocab_size", "vocab_size", vocab_size),
            Key("hidden_size", "embed_dim", 768),
            Key("num_hidden_layers", "num_layers", 12),
            Key("num_attention_heads", "num_heads", 12),
            Key("intermediate_size", "ffn_dim", 3072),
            Key("hidden_act", "activation", "gelu", ACTIVATIONS),
            *(Key(name, "dropout", 0.1) for name in ("attention_probs_dropout_prob", "hidden_dropout_prob")),
            Key("max_position_embeddings", "max_len", 512),
            Key("type_vocab_size", "type_vocab_size", 2),
            Key("layer_norm_eps", "norm_eps", 1e-12),
            Key("tie_word_embeddings", "tie_embeddings", True),
            Key("bos_token_id", "bos_id", bos_id),
            Key("pad_token_id", "pad_id", pad_id),
            Key("eos_token_id", "eos_id", eos_id),
            Key("num_labels", "num_labels", 2),
            *keys,
        ),
        fields={"architecture": "encoder", "norm_position": "post", "embed_norm": True},
        required={"position_embedding_type": "absolute"},
        prefix=f"{model_type}.",
        tensors={
            "embeddings.token": "embeddings.word_embeddings",
            "embeddings.position.table": "embeddings.position_embeddings",
            "embeddings.token_type": "embeddings.token_type_embeddings",
            "embeddings.norm": "embeddings.LayerNorm",
            **block("self", "attention.output.LayerNorm", "output.LayerNorm"),
            "pool.dense": "pooler.dense",
        },
        harmless=("directionality", "pooler_*"),
        ignored=("embeddings.position_ids", "embeddings.token_type_ids"),
        renames={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        **more,
    )


def tidy_roberta(values: Values, names: Collection[str]) -> Values:
    """Split RoBERTa's ``max_position_embeddings`` into the unused first rows of the table and the length."""
    pad_id = values.get("pad_token_id", 1)
    if not isinstance(pad_id, int):
        raise ValueError(f"pad_token_id={pad_id!r} must be a number: RoBERTa counts positions from pad_token_id + 1")
    rows = values.get("max_position_embeddings", 512)
    return {**values, "max_position_embeddings": rows - pad_id - 1, "position_offset": pad_id + 1}


def untidy_roberta(values: Values) -> Values:
    """Add the unused rows to ``max_position_embeddings`` again."""
    offset = values.pop("position_offset")
    rows = values["max_position_embeddings"] + offset
    return {**values, "max_position_embeddings": rows, "pad_token_id": offset - 1}


BERT = _bert_family(
    "bert",
    30522,
    (None, 0, None),
    architectures=_heads(
        "Bert",
        "cls.predictions",
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        {"head": "classifier"},
    ),
    copies={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
)
ROBERTA = _bert_family(
    "roberta",
    50265,
    (0, 1, 2),
    (Key("position_offset", "position_offset"),),
    architectures=_heads(
        "Roberta",
        "lm_head",
        "lm_head.dense",
        "lm_head.layer_norm",
        {"pool.dense": "classifier.dense", "head": "classifier.out_proj"},
    ),
    copies={
        "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    tidy=tidy_roberta,
    untidy=untidy_roberta,
)

# --- ViT


def tidy_vit(values: Values, names: Collection[str]) -> Values:
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
    tidy=tidy_vit,
)

# --- T5

FEED_FORWARD = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gated-gelu": "geglu_tanh",  # T5's code computes the tanh form
    "gated-gelu_new": "geglu_tanh",
    "gated-silu": "swiglu",
    "gated-relu": "reglu",
}


def tidy_t5(values: Values, names: Collection[str]) -> Values:
    """Find the version: the tied head of v1.0 scales the hidden states, the untied head of v1.1 does not.

    Transformers 5 writes ``tie_word_embeddings: true`` for both, and ``scale_decoder_outputs``. Its head is untied if the file
    contains ``lm_head.weight``.
    """
    tied = values.get("tie_word_embeddings") is not False
    scaled = values.setdefault("scale_decoder_outputs", tied)
    values["tie_word_embeddings"] = tied and (scaled or "lm_head.weight" not in names)
    return values


def t5_block(side: str, ours: str, feed: int) -> dict[str, str | Place]:
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
            {**t5_block("encoder", "encoder.", 1), **t5_block("decoder", "", 2), **CROSS, "head": "lm_head"},
        ),
        "T5EncoderModel": Architecture(
            {
                "architecture": "encoder",
                "head": "none",
                "scale_logits": False,
                "tie_embeddings": True,
                "num_decoder_layers": None,
            },
            t5_block("encoder", "", 1),
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
    tidy=tidy_t5,
)
