"""A family of foreign models is a table: which key of their config is which field of ours, and where each tensor lies.

Every key of a ``config.json`` is read by the table, must have one value (``required``), or is passed over because it does
not change what the model computes. Any other key is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from minitx.config import ConfigError, TransformerConfig, from_dict, to_dict

Values = dict[str, Any]
Tidy = Callable[[Values, Collection[str]], Values]

# Names and patterns of keys that do not change what a trained model computes, in any family.
HARMLESS = (
    *("_*", "name_or_path", "transformers.js_config", "unsloth_*", "is_llama_config", "auto_map", "*version"),
    *("dtype", "torch_dtype", "torchscript", "attn_implementation", "use_cache", "cache_implementation"),
    *("initializer_range", "initializer_factor", "*dropout*", "gradient_checkpointing", "chunk_size_feed_forward"),
    *("output_attentions", "output_hidden_states", "output_past", "return_dict", "use_return_dict", "tf_legacy_loss"),
    *("finetuning_task", "problem_type", "num_labels", "id2label", "label2id", "summary_*"),
    *("tokenizer_class", "prefix", "*_token_id", "*_token_ids", "task_specific_params"),
    *("max_length", "min_length", "do_sample", "num_beams", "temperature", "top_k", "top_p"),
    *("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "early_stopping"),
)
# Fields that do not change what a trained model computes.
TRAINING = ("dropout", "stochastic_depth", "checkpointing", "backend", "init", "init_fold", "init_zero_outputs")
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2"}


@dataclass(frozen=True)
class Key:
    """``key`` of their config is the field ``name`` of ours.

    Args:
        default: what an absent key means.
        words: their value -> our value, where they differ. Of two that mean the same, the first is written.
    """

    key: str
    name: str
    default: Any = None
    words: Mapping[Any, Any] | None = None

    def read(self, values: Mapping[str, Any]) -> Any:
        """Return the value of our field."""
        theirs = values.get(self.key, self.default)
        if self.words is None:
            return theirs
        for word, meaning in self.words.items():
            if word == theirs:
                return meaning
        raise ValueError(f"{self.key}={theirs!r} cannot be honoured: one of {', '.join(map(repr, self.words))}")

    def write(self, fields: Mapping[str, Any]) -> Values:
        """Return their key and value, or nothing where no word says it."""
        ours = fields[self.name]
        if self.words is None:
            return {self.key: ours}
        found = [word for word, meaning in self.words.items() if meaning == ours]
        return {self.key: found[0]} if found else {}


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in their file, and how its layout differs.

    Args:
        name: of a module (its weight and bias go with it) or of a tensor, with ``*`` for the number of the layer; a
            function of the config where it depends on that.
        transposed: a matrix is (in, out), as in ``Conv1D``.
        part: (i, n): the i-th of n equal parts of the output axis.
        shape: their shape, where the same numbers have another one.
        shift: ours minus theirs: 1 for a norm that multiplies by 1 + weight.
    """

    name: str | Callable[[TransformerConfig], str]
    transposed: bool = False
    part: tuple[int, int] = (0, 1)
    shape: Callable[[TransformerConfig], tuple[int, ...]] | None = None
    shift: float = 0.0


Tensors = Mapping[str, str | Place]


@dataclass(frozen=True)
class Architecture:
    """One class of a family.

    Args:
        fields: fields of ours that this class decides.
        tensors: of its head, by our names.
        ignored: patterns of tensors that its file may hold for another class.
        twice: second names of tensors, which an untied model writes too.
        is_base: whether tensors have no prefix.
    """

    fields: Values
    tensors: Tensors
    ignored: tuple[str, ...] = ()
    twice: Mapping[str, str] = field(default_factory=dict)
    is_base: bool = False


@dataclass(frozen=True)
class Family:
    """A ``model_type``.

    Args:
        keys: what can vary.
        fields: fields of ours that are the same in all models of the family.
        required: keys with one allowed value.
        architectures: by class name; the first is the default.
        tensors: our names -> places, without ``prefix``.
        harmless: more patterns of keys that change nothing. ignored: of tensors that no model uses.
        copies: tensors that may repeat another one.
        renames: old parts of tensor names -> new ones.
        tidy: (config, tensor names) -> config with flat keys in one spelling; untidy: the way back.
    """

    model_type: str
    keys: tuple[Key, ...]
    architectures: Mapping[str, Architecture]
    fields: Values
    tensors: Tensors
    required: Values = field(default_factory=dict)
    prefix: str = ""
    harmless: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    tidy: Tidy = lambda values, names: values
    untidy: Callable[[Values], Values] = lambda values: values


def find_architecture(family: Family, values: Values) -> Architecture:
    """Return the class that ``architectures`` of ``config.json`` names.

    Raises:
        ValueError: another class, or several.
    """
    listed = values.get("architectures") or [next(iter(family.architectures))]
    if len(listed) != 1 or listed[0] not in family.architectures:
        known = ", ".join(family.architectures)
        raise ValueError(f"architectures={listed} is not known for model_type={family.model_type!r}: one of {known}")
    return family.architectures[listed[0]]


def read_config(
    family: Family, architecture: Architecture, values: Values, names: Collection[str]
) -> tuple[TransformerConfig, list[str]]:
    """Translate ``config.json``.

    Args:
        values: its contents. names: of the tensors beside it, without the prefix; some classes need to look.

    Returns:
        Our config, and the keys that were passed over.

    Raises:
        ValueError: keys that cannot be honoured, by name and value.
    """
    if values.get("id2label"):
        values = {**values, "num_labels": len(values["id2label"])}
    try:
        values = family.tidy(dict(values), names)
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"a key has a value of a wrong type: {error}") from None
    fields = {**family.fields, **{key.name: key.read(values) for key in family.keys}, **architecture.fields}
    if fields.get("pooler") and fields["head"] == "none":  # a base model may lack it, and its config does not say so
        fields["pooler"] = any(name.startswith("pooler.") for name in names)
    try:
        config = from_dict(TransformerConfig, fields)
    except ConfigError as error:
        name = str(error).partition("=")[0]
        theirs = "".join(f"{key.key}: " for key in family.keys if key.name == name)
        raise ValueError(f"{theirs}{error}") from None
    return config, _check_rest(family, values)


def _check_rest(family: Family, values: Values) -> list[str]:
    """Return the keys that are passed over; refuse those that could change the answer."""
    read = {"architectures", "model_type", *(key.key for key in family.keys)}
    passed, refused = [], []
    for name, value in values.items():
        wanted = family.required.get(name)
        if name in read or (name in family.required and value in (wanted, None)):
            continue
        if name in family.required:
            refused.append(f"{name}={value!r} cannot be honoured: it must be {wanted!r}")
        elif not value or any(fnmatchcase(name, pattern) for pattern in (*HARMLESS, *family.harmless)):
            passed.append(name)
        else:
            way_out = f"overrides={{{name!r}: None}} loads the model without it"
            refused.append(f"{name}={value!r} is not a known option of model_type={family.model_type!r}; {way_out}")
    if refused:
        raise ValueError("; ".join(refused))
    return passed


def write_config(family: Family, name: str, config: TransformerConfig) -> Values:
    """Write our config as the ``config.json`` of class ``name``. ``unlike`` tells whether it means the same."""
    fields = filled(config)
    values: Values = {}
    for key in family.keys:
        values.update(key.write(fields))
    labels = values.pop("num_labels", None)
    values = family.untidy(values)
    if labels is not None and config.head in ("sequence", "token"):
        values["id2label"] = {str(i): f"LABEL_{i}" for i in range(labels)}
        values["label2id"] = {f"LABEL_{i}": i for i in range(labels)}
    return {"architectures": [name], "model_type": family.model_type, **values}


def unlike(
    family: Family, architecture: Architecture, values: Values, names: Collection[str], config: TransformerConfig
) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which ``config.json`` ``values`` do not mean ``config``: (here, there)."""
    try:
        again = filled(read_config(family, architecture, values, names)[0])
    except ValueError as error:
        return {"architecture": (config.architecture, str(error))}
    reads_max_len = config.position in ("learned", "rotary") or config.scale == "log_length"
    unread = TRAINING if reads_max_len and config.architecture != "vision" else (*TRAINING, "max_len")
    ours = {name: value for name, value in filled(config).items() if name not in unread}
    return {name: (value, again[name]) for name, value in ours.items() if again[name] != value}


def filled(config: TransformerConfig) -> Values:
    """Return the fields with their defaults filled in."""
    values = to_dict(config)
    values["num_kv_heads"], values["head_dim"] = config.kv_heads, config.width_per_head
    values["ffn_dim"], values["num_decoder_layers"] = config.ffn_width, config.decoder_layers
    values["qkv_bias"], values["out_bias"] = config.has_qkv_bias, config.has_out_bias
    return values
