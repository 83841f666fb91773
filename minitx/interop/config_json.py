"""Translate ``config.json`` of a family of models to our config and back.

Every key of a ``config.json`` is translated, must have a certain value (``required``), or is ignored because it does not change what the
model computes: it is ``HARMLESS``, or empty, false or 0 where transformers has no other default. Any other key is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from minitx.config import ConfigError, TransformerConfig, from_dict, to_dict
from minitx.interop.family import Architecture, ConfigTable, Family, Values
from minitx.nn.positions import RotaryScaling

# patterns of keys that do not change what a trained model computes, in any family that does not read them
HARMLESS = (
    *("_*", "name_or_path", "transformers.js_config", "unsloth_*", "is_llama_config", "auto_map", "*version"),
    *("dtype", "torch_dtype", "torchscript", "attn_implementation", "use_cache", "cache_implementation"),
    *("initializer_range", "initializer_factor", "gradient_checkpointing", "chunk_size_feed_forward"),
    *("dropout", "dropout_rate", "*_dropout", "*_dropout_prob", "*_pdrop"),
    *("output_attentions", "output_hidden_states", "output_past", "return_dict", "use_return_dict", "tf_legacy_loss"),
    *("finetuning_task", "problem_type", "num_labels", "id2label", "label2id", "summary_*"),
    *("tokenizer_class", "prefix", "*_token_id", "*_token_ids", "task_specific_params"),
    *("max_length", "min_length", "do_sample", "num_beams", "temperature", "top_k", "top_p"),
    *("output_scores", "return_dict_in_generate", "remove_invalid_values", "diversity_penalty", "encoder_no_repeat_ngram_size"),
    *("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "early_stopping"),
    *("n_ctx", "n_positions", "n_special", "predict_special_tokens", "directionality", "pooler_*", "encoder_stride"),
    *("pretraining_tp", "hidden_act", "dense_act_fn", "is_gated_act", "is_encoder_decoder"),  # they follow from other keys
)
# fields of our config that do not change what a trained model computes
TRAINING = ("dropout", "stochastic_depth", "checkpointing", "backend", "init", "init_fold", "init_zero_outputs")
# fields of our config and the keys of many families
SIZES = {"embed_dim": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
SIZES |= {"ffn_dim": "intermediate_size", "activation": "hidden_act"}
TEXT = {"vocab_size": "vocab_size", "tie_embeddings": "tie_word_embeddings"}
TEXT |= {"bos_id": "bos_token_id", "eos_id": "eos_token_id", "pad_id": "pad_token_id"}
# their names of activations, and our names
WORDS_OF_ACTIVATION = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


class UnsupportedError(ValueError):
    """A ``config.json`` has an option that our blocks do not support."""


def find_architecture(family: Family, values: Values) -> Architecture:
    """Return the model class named by ``architectures`` in ``config.json``.

    Raises:
        UnsupportedError: an unknown class, or several.
    """
    listed = values.get("architectures") or [next(iter(family.architectures))]
    if len(listed) != 1 or listed[0] not in family.architectures:
        known = ", ".join(family.architectures)
        raise UnsupportedError(f"architectures={listed} is not supported for model_type={family.model_type!r}: one of {known}")
    return family.architectures[listed[0]]


def read_config(
    family: Family, architecture: Architecture, values: Values, names: Collection[str]
) -> tuple[TransformerConfig, list[str]]:
    """Translate ``config.json`` to our config.

    Args:
        family: the family of ``model_type``.
        architecture: the model class.
        values: the contents of ``config.json``.
        names: the tensor names in the weights file, without the prefix.

    Returns:
        Our config, and the keys that were ignored.

    Raises:
        UnsupportedError: a key or value that could change what the model computes. ValueError: a value of a wrong type.
    """
    fields, rest, unsupported = _read_fields(family, architecture, values, names)
    passed, unknown = _sort_rest(family, rest)
    if refused := [*unsupported, *unknown]:
        raise UnsupportedError("; ".join(refused))
    try:
        config = from_dict(TransformerConfig, fields)
    except ConfigError as error:
        theirs = family.config.keys.get(str(error).partition("=")[0])
        raise ValueError(f"{theirs}: {error}" if theirs else str(error)) from None
    return config, passed


def _read_fields(
    family: Family, architecture: Architecture, values: Values, names: Collection[str]
) -> tuple[Values, Values, list[str]]:
    """Return the fields of our config, not checked yet, the values that they were read from, and unsupported options."""
    table = family.config
    if values.get("id2label"):
        values = {**values, "num_labels": len(values["id2label"])}
    defaults = {key: table.defaults[key] for key in table.keys.values() if key in table.defaults}
    try:
        values, unsupported = table.tidy({**defaults, **values}, names)
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"config.json has a value of a wrong type: {error}") from None
    fields = {**table.fields, **{ours: _read_key(table, ours, values) for ours in table.keys}, **architecture.fields}
    if fields.get("pooler") and fields["head"] == "none":  # only the weights show whether a base model has a pooler
        fields["pooler"] = any(name.startswith("pooler.") for name in names)
    return fields, values, unsupported


def _read_key(table: ConfigTable, ours: str, values: Values) -> Any:
    """Return the value of our field from the values of ``config.json``."""
    key = table.keys[ours]
    theirs, words = values.get(key), table.words.get(key)
    if words is None:
        return theirs
    if theirs not in [*words]:  # a list cannot be a key of a dictionary
        raise UnsupportedError(f"{key}={theirs!r} is not supported here, only {', '.join(map(repr, words))}")
    return words[theirs]


def _sort_rest(family: Family, values: Values) -> tuple[list[str], list[str]]:
    """Return the keys that are ignored, and descriptions of unknown keys that could change what the model computes."""
    required_values = family.config.required
    read = {"architectures", "model_type", *family.config.keys.values()}
    passed, refused = list[str](), list[str]()
    for name, value in values.items():
        required = required_values.get(name)
        if name in read or (name in required_values and value in (required, None)):
            continue
        if name in required_values:
            refused.append(f"{name}={value!r} is not supported here, only {required!r}")
        elif any(fnmatchcase(name, pattern) for pattern in HARMLESS) or _is_off(family, name, value):
            passed.append(name)
        else:
            unknown = f"is not a known option of model_type={family.model_type!r}, and may change what the model computes"
            refused.append(f"{name}={value!r} {unknown}")
    return passed, refused


def _is_off(family: Family, name: str, value: Any) -> bool:
    """Whether a value is empty, false or 0, and the installed transformers does not have another default for this key."""
    return not value and not (value is not None and _default_options(family.model_type).get(name))


@cache
def _default_options(model_type: str) -> Values:
    """The default config of the installed transformers; {} if it is not installed or does not know the type."""
    try:
        from transformers import AutoConfig

        return AutoConfig.for_model(model_type).to_dict()  # type: ignore[no-any-return]
    except (ImportError, ValueError):
        return {}


def write_config(family: Family, name: str, config: TransformerConfig, labels: Sequence[str] = ()) -> Values:
    """Return our config as the ``config.json`` of class ``name``. Fields without a key are lost; ``unlike`` finds them.

    Args:
        labels: the names of a classifier's labels. Default: ``LABEL_0`` and so on.
    """
    fields, table = filled(config), family.config
    values: Values = {}
    for ours, key in table.keys.items():
        words = table.words.get(key)
        theirs = [fields[ours]] if words is None else [word for word, meaning in words.items() if meaning == fields[ours]]
        values.update((key, word) for word in theirs[:1])
    count = values.pop("num_labels", None)
    values = table.untidy(values)
    if count is not None and config.head in ("sequence", "token"):
        names = labels or [f"LABEL_{i}" for i in range(count)]
        values["id2label"] = {str(i): label for i, label in enumerate(names)}
        values["label2id"] = {label: i for i, label in enumerate(names)}
    return {"architectures": [name], "model_type": family.model_type, **values}


class _Unchecked(TransformerConfig):
    """A config whose fields are not checked."""

    def __post_init__(self) -> None:
        pass


def unlike(
    family: Family, architecture: Architecture, values: Values, names: Collection[str], config: TransformerConfig
) -> dict[str, str]:
    """Return, by field, the options of ``config`` that the ``values`` of ``config.json`` cannot express."""
    ours, theirs = filled(config), filled(_Unchecked(**_read_fields(family, architecture, values, names)[0]))
    reads_max_len = config.position in ("learned", "rotary") or config.scale == "log_length"
    unread = TRAINING if reads_max_len and config.architecture != "vision" else (*TRAINING, "max_len")
    differing = {name: value for name, value in ours.items() if name not in unread and theirs[name] != value}
    faults = {name: f"{name}={value!r} would be {theirs[name]!r}" for name, value in differing.items()}
    if family.config.needs_whole_heads and config.embed_dim % config.num_heads:
        faults["embed_dim"] = f"embed_dim={config.embed_dim} would be a multiple of num_heads={config.num_heads}"
    try:
        read_config(family, architecture, values, names)
    except ValueError as error:
        faults["config.json"] = str(error)
    return faults


def filled(config: TransformerConfig) -> Values:
    """Return the fields with computed defaults filled in. A field without effect gets a fixed value."""
    values = to_dict(config)
    values["num_kv_heads"], values["head_dim"] = config.kv_heads, config.width_per_head
    values["ffn_dim"], values["num_decoder_layers"] = config.ffn_width, config.decoder_layers
    values["qkv_bias"], values["out_bias"] = config.has_qkv_bias, config.has_out_bias
    values["type_vocab_size"] = config.type_vocab_size or 1  # one type whose embedding is zero has no effect
    is_lm, is_vision = config.head == "lm", config.architecture == "vision"
    values["pooler"] = config.has_pooler
    values |= {name: values[name] and is_lm for name in ("head_transform", "head_bias")}
    values["tie_embeddings"] = config.tie_embeddings or not is_lm
    values["vocab_size"] = None if is_vision else config.vocab_size
    if not (config.head == "sequence" or config.has_pooler or is_vision):
        values["pooling"] = "first"
    if config.rotary_scaling not in ("llama3", "yarn"):
        values["rotary_original_len"] = None
    if config.rotary_scaling == "llama3":  # transformers needs the numbers of turns
        values["rotary_low"], values["rotary_high"] = RotaryScaling("llama3", 1, 1, config.rotary_low, config.rotary_high).turns
    return values
