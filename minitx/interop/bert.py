"""BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019), whose positions start behind the row of the padding token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from minitx.interop.table import ACTIVATIONS, Architecture, Family, Key, Values

LABELS = Key("num_labels", "num_labels", 2)
NO_LABELS: Values = {"num_labels": None}


def block(core: str, attention_norm: str, feedforward_norm: str) -> dict[str, str]:
    """The tensors of a block as BERT calls them: ``core`` holds the three projections, and the two norms have these names."""
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
    """The four classes of a family; the parts of its masked head lie under ``head`` and are called ``transform``, ``norm``."""
    masked = {
        "head.dense": transform,
        "head.norm": norm,
        "head.head.weight": f"{head}.decoder.weight",
        "head.head.bias": f"{head}.bias",
    }
    fields = {"head": "lm", "head_bias": True, "head_transform": True, **NO_LABELS}
    return {
        f"{name}ForMaskedLM": Architecture(fields, masked, {f"{head}.decoder.bias": f"{head}.bias"}),
        f"{name}ForSequenceClassification": Architecture({"head": "sequence", "pooler": True}, sequence),
        f"{name}ForTokenClassification": Architecture({"head": "token"}, {"head": "classifier"}),
        f"{name}Model": Architecture({"head": "none", "pooler": True, **NO_LABELS}, {}, is_base=True),
    }


def _family(model_type: str, ids: tuple[Any, Any, Any], **more: Any) -> Family:
    bos_id, pad_id, eos_id = ids
    return Family(
        model_type=model_type,
        keys=(
            Key("vocab_size", "vocab_size", 30522 if model_type == "bert" else 50265),
            Key("hidden_size", "embed_dim", 768),
            Key("num_hidden_layers", "num_layers", 12),
            Key("num_attention_heads", "num_heads", 12),
            Key("intermediate_size", "ffn_dim", 3072),
            Key("hidden_act", "activation", "gelu", ACTIVATIONS),
            *(Key(name, "dropout", 0.1) for name in ("hidden_dropout_prob", "attention_probs_dropout_prob")),
            Key("max_position_embeddings", "max_len", 512),
            Key("position_offset", "position_offset", 0),
            Key("type_vocab_size", "type_vocab_size", 2),
            Key("layer_norm_eps", "norm_eps", 1e-12),
            Key("tie_word_embeddings", "tie_embeddings", True),
            Key("bos_token_id", "bos_id", bos_id),
            Key("pad_token_id", "pad_id", pad_id),
            Key("eos_token_id", "eos_id", eos_id),
            LABELS,
        ),
        fields={"architecture": "encoder", "norm_position": "post", "embed_norm": True},
        constants={"position_embedding_type": "absolute", "classifier_dropout": None},
        prefix=f"{model_type}.",
        tensors={
            "embeddings.token": "embeddings.word_embeddings",
            "embeddings.position.table": "embeddings.position_embeddings",
            "embeddings.token_type": "embeddings.token_type_embeddings",
            "embeddings.norm": "embeddings.LayerNorm",
            **block("self", "attention.output.LayerNorm", "output.LayerNorm"),
            "pool.dense": "pooler.dense",
        },
        harmless=(
            *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
            *("pooler_size_per_head", "pooler_type"),
        ),
        ignored=("embeddings.position_ids", "embeddings.token_type_ids"),
        renames={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        **more,
    )


def tidy(values: Values, names: Collection[str]) -> Values:
    """RoBERTa's table has ``pad_token_id + 1`` rows before the first position."""
    pad_id = values.get("pad_token_id", 1)
    if not isinstance(pad_id, int):
        raise ValueError(f"pad_token_id={pad_id!r} must be a number in a RoBERTa: its positions start behind it")
    rows = values.get("max_position_embeddings", 512)
    return {**values, "max_position_embeddings": rows - pad_id - 1, "position_offset": pad_id + 1}


def untidy(values: Values) -> Values:
    """Our values as RoBERTa's config states them: its table has the rows before the offset, too."""
    offset = values["position_offset"]
    rows = (values["max_position_embeddings"] or 0) + offset
    values = {key: value for key, value in values.items() if key != "position_offset"}
    return {**values, "max_position_embeddings": rows, "pad_token_id": offset - 1}


BERT = _family(
    "bert",
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
    untidy=lambda values: {key: value for key, value in values.items() if key != "position_offset"},
)
ROBERTA = _family(
    "roberta",
    (0, 1, 2),
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
    tidy=tidy,
    untidy=untidy,
)
