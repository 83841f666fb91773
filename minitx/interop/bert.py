"""BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019). RoBERTa counts positions from ``pad_token_id + 1``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from minitx.interop.table import ACTIVATIONS, Architecture, Family, Key, Values


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


def _family(model_type: str, vocab_size: int, ids: tuple[Any, Any, Any], keys: tuple[Key, ...] = (), **more: Any) -> Family:
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


def tidy(values: Values, names: Collection[str]) -> Values:
    """Split RoBERTa's ``max_position_embeddings`` into the unused first rows of the table and the length."""
    pad_id = values.get("pad_token_id", 1)
    if not isinstance(pad_id, int):
        raise ValueError(f"pad_token_id={pad_id!r} must be a number: RoBERTa counts positions from pad_token_id + 1")
    rows = values.get("max_position_embeddings", 512)
    return {**values, "max_position_embeddings": rows - pad_id - 1, "position_offset": pad_id + 1}


def untidy(values: Values) -> Values:
    """Add the unused rows to ``max_position_embeddings`` again."""
    offset = values.pop("position_offset")
    rows = values["max_position_embeddings"] + offset
    return {**values, "max_position_embeddings": rows, "pad_token_id": offset - 1}


BERT = _family(
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
ROBERTA = _family(
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
    tidy=tidy,
    untidy=untidy,
)
