"""The tables of the encoders BERT, RoBERTa and ViT, and of T5, an encoder–decoder."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from minitx.config import TransformerConfig
from minitx.interop.config_json import SIZES, TEXT, WORDS_OF_ACTIVATION
from minitx.interop.family import Architecture, ConfigTable, Family, Shape, TensorTable, Values

# --- BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019; its positions begin at pad_token_id + 1)

KEYS = {**SIZES, "dropout": "hidden_dropout_prob", "norm_eps": "layer_norm_eps", "num_labels": "num_labels"}
BERT_KEYS = {**KEYS, **TEXT, "max_len": "max_position_embeddings", "type_vocab_size": "type_vocab_size"}
BERT_DEFAULTS = {
    **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "hidden_act": "gelu"},
    **{"hidden_dropout_prob": 0.1, "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12},
    **{"tie_word_embeddings": True, "num_labels": 2},
}
BERT_BLOCK = {
    "blocks.*.attention.q_proj": "encoder.layer.*.attention.self.query",
    "blocks.*.attention.k_proj": "encoder.layer.*.attention.self.key",
    "blocks.*.attention.v_proj": "encoder.layer.*.attention.self.value",
    "blocks.*.attention.out_proj": "encoder.layer.*.attention.output.dense",
    "blocks.*.attention_residual.norm": "encoder.layer.*.attention.output.LayerNorm",
    "blocks.*.feedforward.up_proj": "encoder.layer.*.intermediate.dense",
    "blocks.*.feedforward.down_proj": "encoder.layer.*.output.dense",
    "blocks.*.feedforward_residual.norm": "encoder.layer.*.output.LayerNorm",
}


def untidy_dropout(values: Values) -> Values:
    """Write the dropout of the attention weights, too."""
    return {**values, "attention_probs_dropout_prob": values["hidden_dropout_prob"]}


NO_HEAD: Values = {"head": "none", "pooler": True, "num_labels": None}


def _bert_family(
    model_type: str, name: str, head: str, transform: str, norm: str, sequence: dict[str, str], defaults: Values, **more: Any
) -> Family:
    """Return a family like BERT. ``head``, ``transform`` and ``norm`` are the names of modules of the masked head."""
    masked = {
        "head.dense": transform,
        "head.norm": norm,
        "head.head.weight": f"{head}.decoder.weight",
        "head.head.bias": f"{head}.bias",
    }
    fields: Values = {"head": "lm", "head_bias": True, "head_transform": True, "num_labels": None}
    others = ("pooler.*", "cls.seq_relationship.*")  # in files of BertForPreTraining; BertForMaskedLM can load them
    twice = {f"{head}.decoder.bias": f"{head}.bias"}
    return Family(
        model_type=model_type,
        architectures={
            f"{name}ForMaskedLM": Architecture(fields, masked, others, twice),
            f"{name}ForSequenceClassification": Architecture({"head": "sequence", "pooler": True}, sequence),
            f"{name}ForTokenClassification": Architecture({"head": "token"}, {"head": "classifier"}, others),
            f"{name}Model": Architecture(NO_HEAD, {}, is_base=True),
        },
        config=ConfigTable(
            defaults={**BERT_DEFAULTS, **defaults},
            words={"hidden_act": WORDS_OF_ACTIVATION},
            fields={"architecture": "encoder", "norm_position": "post", "embed_norm": True},
            required={"position_embedding_type": "absolute"},
            **{"keys": BERT_KEYS, "untidy": untidy_dropout, **more},
        ),
        tensors=TensorTable(
            names={
                "embeddings.token": "embeddings.word_embeddings",
                "embeddings.position.table": "embeddings.position_embeddings",
                "embeddings.token_type": "embeddings.token_type_embeddings",
                "embeddings.norm": "embeddings.LayerNorm",
                **BERT_BLOCK,
                "pool.dense": "pooler.dense",
            },
            prefix=f"{model_type}.",
            ignored=("embeddings.position_ids", "embeddings.token_type_ids"),
            copies={f"{head}.decoder.weight": "embeddings.word_embeddings.weight", **twice},
            renames={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        ),
    )


def tidy_roberta(values: Values, names: Collection[str]) -> tuple[Values, list[str]]:
    """Split RoBERTa's ``max_position_embeddings`` into the unused first rows of the table and the length."""
    pad_id = values.get("pad_token_id", 1)
    if not isinstance(pad_id, int):
        raise ValueError(f"pad_token_id={pad_id!r} must be a number: RoBERTa counts positions from pad_token_id + 1")
    activation = values.get("hidden_act", "gelu")
    unsupported = list[str]()
    if activation != "gelu" and (values.get("architectures") or ["RobertaForMaskedLM"])[0] == "RobertaForMaskedLM":
        unsupported = [
            f"hidden_act={activation!r} is not supported here: the head of RobertaForMaskedLM always computes 'gelu'"
        ]
    rows = values.get("max_position_embeddings", 512)
    return {**values, "max_position_embeddings": rows - pad_id - 1, "position_offset": pad_id + 1}, unsupported


def untidy_roberta(values: Values) -> Values:
    """Add the unused rows to ``max_position_embeddings`` again."""
    values = dict(values)
    offset = values.pop("position_offset")
    rows = values["max_position_embeddings"] + offset
    return {**untidy_dropout(values), "max_position_embeddings": rows, "pad_token_id": offset - 1}


BERT = _bert_family(
    *("bert", "Bert", "cls.predictions", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    {"head": "classifier"},
    {"vocab_size": 30522, "pad_token_id": 0},
)
ROBERTA = _bert_family(
    *("roberta", "Roberta", "lm_head", "lm_head.dense", "lm_head.layer_norm"),
    {"pool.dense": "classifier.dense", "head": "classifier.out_proj"},
    {"vocab_size": 50265, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2},
    keys={**BERT_KEYS, "position_offset": "position_offset"},
    tidy=tidy_roberta,
    untidy=untidy_roberta,
)

# --- ViT (Dosovitskiy et al. 2021): its patch embedding is a convolution whose kernel is our matrix in another shape


def tidy_vit(values: Values, names: Collection[str]) -> tuple[Values, list[str]]:
    """Replace [side, side] by the side."""
    sides = {name: values.get(name) for name in ("image_size", "patch_size")}
    squares = {name: side[0] for name, side in sides.items() if isinstance(side, list) and len(set(side)) == 1}
    return {**values, **squares}, []


def _patch_kernel(config: TransformerConfig, shape: Shape) -> Shape:
    side = config.patch_size
    return shape[0], shape[1] // side**2, side, side


VIT = Family(
    model_type="vit",
    architectures={
        "ViTForImageClassification": Architecture({"head": "sequence"}, {"head": "classifier"}, ignored=("pooler.*",)),
        "ViTModel": Architecture(NO_HEAD, {}, is_base=True),
    },
    config=ConfigTable(
        keys={**KEYS, **{name: name for name in ("image_size", "patch_size", "num_channels", "qkv_bias")}},
        defaults={
            **{**BERT_DEFAULTS, "hidden_dropout_prob": 0.0},
            **{"image_size": 224, "patch_size": 16, "num_channels": 3, "qkv_bias": True},
        },
        words={"hidden_act": WORDS_OF_ACTIVATION},
        fields={"architecture": "vision"},
        required={"pooler_act": "tanh"},
        tidy=tidy_vit,
        untidy=untidy_dropout,
    ),
    tensors=TensorTable(
        names={
            "embeddings.class_token": "embeddings.cls_token",
            "embeddings.position.weight": "embeddings.position_embeddings",
            "embeddings.patch_proj": "embeddings.patch_embeddings.projection",
            **{ours: theirs.replace(".self.", ".attention.") for ours, theirs in BERT_BLOCK.items()},
            "blocks.*.attention_residual.norm": "encoder.layer.*.layernorm_before",
            "blocks.*.feedforward_residual.norm": "encoder.layer.*.layernorm_after",
            "final_norm": "layernorm",
            "pool.dense": "pooler.dense",
        },
        prefix="vit.",
        shapes={"embeddings.position.weight": lambda config, shape: (1, *shape), "embeddings.patch_proj.weight": _patch_kernel},
    ),
)

# --- T5 v1.0 and v1.1 (Raffel et al. 2020): unscaled scores, a relative position bias in encoder and decoder, RMSNorm, no biases


def tidy_t5(values: Values, names: Collection[str]) -> tuple[Values, list[str]]:
    """Find the version. The tied head of v1.0 scales the hidden states, the untied head of v1.1 does not.

    Transformers 5 writes ``tie_word_embeddings: true`` for both, and ``scale_decoder_outputs``. Its head is untied if the file
    contains ``lm_head.weight``.
    """
    tied = values.get("tie_word_embeddings") is not False
    scaled = values.get("scale_decoder_outputs", tied)
    is_tied = tied and (scaled or "lm_head.weight" not in names)
    return {**values, "scale_decoder_outputs": scaled, "tie_word_embeddings": is_tied}, []


def _t5_block(side: str, ours: str, feed: int) -> dict[str, str]:
    """Return the tensor names of ``side``. Self-attention is layer 0 of a block, the feed-forward network layer ``feed``."""
    theirs = f"{side}.block.*.layer"
    return {
        f"{ours}blocks.*.attention_residual.norm": f"{theirs}.0.layer_norm",
        **{f"{ours}blocks.*.attention.{x}_proj": f"{theirs}.0.SelfAttention.{x}" for x in "qkv"},
        f"{ours}blocks.*.attention.out_proj": f"{theirs}.0.SelfAttention.o",
        f"{ours}attn_bias": f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias",
        f"{ours}blocks.*.feedforward_residual.norm": f"{theirs}.{feed}.layer_norm",
        f"{ours}blocks.*.feedforward.gate_proj": f"{theirs}.{feed}.DenseReluDense.wi_0",
        f"{ours}blocks.*.feedforward.up_proj": f"{theirs}.{feed}.DenseReluDense.wi",
        f"{ours}blocks.*.feedforward.down_proj": f"{theirs}.{feed}.DenseReluDense.wo",
        f"{ours}final_norm": f"{side}.final_layer_norm",
    }


T5_CROSS = {
    "blocks.*.cross_residual.norm": "decoder.block.*.layer.1.layer_norm",
    **{f"blocks.*.cross_attention.{x}_proj": f"decoder.block.*.layer.1.EncDecAttention.{x}" for x in "qkv"},
    "blocks.*.cross_attention.out_proj": "decoder.block.*.layer.1.EncDecAttention.o",
}
T5_ENCODER: Values = {"architecture": "encoder", "head": "none", "scale_logits": False, "tie_embeddings": True}
T5 = Family(
    model_type="t5",
    architectures={
        "T5ForConditionalGeneration": Architecture(
            {"architecture": "encoder_decoder"},
            {**_t5_block("encoder", "encoder.", 1), **_t5_block("decoder", "", 2), **T5_CROSS, "head": "lm_head"},
        ),
        "T5EncoderModel": Architecture({**T5_ENCODER, "num_decoder_layers": None}, _t5_block("encoder", "", 1)),
    },
    config=ConfigTable(
        keys={
            **TEXT,
            "embed_dim": "d_model",
            "head_dim": "d_kv",
            "ffn_dim": "d_ff",
            "num_layers": "num_layers",
            "num_decoder_layers": "num_decoder_layers",
            "num_heads": "num_heads",
            "num_buckets": "relative_attention_num_buckets",
            "max_distance": "relative_attention_max_distance",
            "dropout": "dropout_rate",
            "norm_eps": "layer_norm_epsilon",
            "activation": "feed_forward_proj",
            "scale_logits": "scale_decoder_outputs",
            "bos_id": "decoder_start_token_id",
        },
        defaults={
            **{"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
            **{"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6},
            **{
                "dropout_rate": 0.1,
                "feed_forward_proj": "relu",
                "pad_token_id": 0,
                "eos_token_id": 1,
                "decoder_start_token_id": 0,
            },
        },
        words={
            "feed_forward_proj": {
                **{"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gated-silu": "swiglu", "gated-relu": "reglu"},
                **{"gated-gelu": "geglu_tanh", "gated-gelu_new": "geglu_tanh"},  # T5's code computes the tanh form
            }
        },
        fields={"position": "t5", "scale": "unscaled", "norm": "rms", "bias": False},
        tidy=tidy_t5,
    ),
    tensors=TensorTable(
        names={"embeddings.token": "shared"},
        gated={".wi.": ".wi_1."},
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
        copies={
            "lm_head.weight": "shared.weight",
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
        },
    ),
)

ENCODERS = (BERT, ROBERTA, T5, VIT)
"""The families, in the order that ``save_hf`` tries them."""
