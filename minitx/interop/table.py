"""What a family of foreign models is: a table. Which key of their config is which field here, and back.

A config is read in three steps: spellings of older versions are brought into one (``tidy``), every key of the table
becomes a field of ``TransformerConfig``, and the result is written back and compared key by key. A key that does not
come back with its meaning is an option that the model here would not honour: it is an error, whether or not anybody
has thought of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from minitx.config import TransformerConfig, to_dict

Values = dict[str, Any]
Tidy = Callable[[Values, Collection[str]], Values]

# what a model computes does not depend on these: names, versions, starting weights, training, decoding, labels' names
# fmt: off
HARMLESS = frozenset((
    "architectures", "model_type", "transformers_version", "_name_or_path", "name_or_path", "torch_dtype", "dtype",
    "use_cache", "initializer_range", "initializer_factor", "output_attentions", "output_hidden_states", "output_past",
    "return_dict", "torchscript", "gradient_checkpointing", "chunk_size_feed_forward", "tokenizer_class", "prefix",
    "finetuning_task", "task_specific_params", "problem_type", "num_labels", "id2label", "label2id",
    "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "max_length", "min_length",
    "do_sample", "num_beams", "temperature", "top_k", "top_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "early_stopping", "sep_token_id", "cls_token_id", "tf_legacy_loss",
))
# fmt: on
# what older files say about options that no family here has
OFF: Values = {"is_decoder": False, "add_cross_attention": False, "is_encoder_decoder": False, "tie_encoder_decoder": False}
# fields that do not change what a trained model answers
TRAINING = ("dropout", "stochastic_depth", "checkpointing", "backend", "init", "init_fold", "init_zero_outputs")
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2"}


@dataclass(frozen=True)
class Key:
    """``key`` of their config is the fields ``names`` here (all of them take its value).

    ``default`` is what an absent key means, and a function of the other keys also what ``null`` means; ``words`` says
    which value there is which here, the spelling to write first.
    """

    key: str
    names: str | tuple[str, ...]
    default: Any = None
    words: Mapping[Any, Any] | None = None

    def meaning(self, values: Mapping[str, Any]) -> Any:
        """The value here."""
        value = values.get(self.key, None if callable(self.default) else self.default)
        if value is None and callable(self.default):
            value = self.default(values)
        if self.words is None:
            if not isinstance(value, int | float | None):
                raise ValueError(f"{self.key}={value!r} must be a number")
            return value
        if isinstance(value, list | dict) or value not in self.words:
            raise ValueError(f"{self.key}={value!r} cannot be honoured: one of {', '.join(map(repr, self.words))}")
        return self.words[value]

    def spelling(self, fields: Mapping[str, Any]) -> Values:
        """The value there, or nothing where no word says it."""
        value = fields[self.names if isinstance(self.names, str) else self.names[0]]
        if self.words is None:
            return {self.key: value}
        found = [word for word, meaning in self.words.items() if meaning == value]
        return {self.key: found[0]} if found else {}


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in their file: its name, and how its layout differs.

    Args:
        name: with ``*`` for the number of the layer; of a module (then weight and bias go with it) or of a tensor; a
            function of the config where it depends on that.
        transposed: a matrix (in, out), as in Conv1D.
        part: (i, n): the i-th of n equal parts of the output axis.
        shape: their shape, where only the shape differs.
    """

    name: str | Callable[[TransformerConfig], str]
    transposed: bool = False
    part: tuple[int, int] = (0, 1)
    shape: Callable[[TransformerConfig], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Architecture:
    """One class of a family: the fields and tensors that are its own.

    ``is_base``: no prefix before the names. ``twice``: names that tensors have beside their own where nothing is tied.
    """

    fields: Values
    tensors: Mapping[str, str | Place]
    twice: Mapping[str, str] | None = None
    is_base: bool = False
    harmless: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A ``model_type`` as a table.

    Args:
        keys: what can vary. fields: what is the same in all its models, here; constants: there (a function of the fields
            here, where it follows from them).
        architectures: by class name; the first is what a config without ``architectures`` means.
        tensors: names here -> places there, without ``prefix``.
        ignored: tensors that are no parameters, such as masks. copies: tensors that may repeat another one.
        renames: old names of parts of a tensor's name.
        tidy, untidy: older spellings and nested keys to flat ones, and back; ``tidy`` also sees the tensors' names.
    """

    model_type: str
    keys: tuple[Key, ...]
    architectures: Mapping[str, Architecture]
    fields: Values
    constants: Values
    tensors: Mapping[str, str | Place]
    prefix: str = ""
    harmless: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] | None = None
    renames: Mapping[str, str] | None = None
    tidy: Tidy = lambda values, names: values
    untidy: Callable[[Values], Values] = lambda values: values


def read_config(family: Family, values: Values, names: Collection[str] = ()) -> tuple[Architecture, TransformerConfig]:
    """Their config as one of ours.

    Args:
        values: of ``config.json``. names: of the tensors beside it, without the prefix; some classes need to look.

    Raises:
        ValueError: an option that cannot be honoured, named with its value.
    """
    listed = values.get("architectures") or [next(iter(family.architectures))]
    if len(listed) != 1 or listed[0] not in family.architectures:
        known = ", ".join(family.architectures)
        raise ValueError(f"architectures={listed} is not known for model_type={family.model_type!r}: one of {known}")
    architecture = family.architectures[listed[0]]
    if values.get("id2label"):
        values = {**values, "num_labels": len(values["id2label"])}
    if isinstance(values.get("eos_token_id"), list):
        raise ValueError(f"eos_token_id={values['eos_token_id']} cannot be honoured: the model keeps one; name it in overrides")
    try:
        values = family.tidy(dict(values), names)
        fields: Values = dict(family.fields)
        for key in family.keys:
            fields.update(dict.fromkeys((key.names,) if isinstance(key.names, str) else key.names, key.meaning(values)))
        fields.update(architecture.fields)
        if fields.get("pooler") and fields["head"] == "none":  # a base model may lack it, and its config does not say so
            fields["pooler"] = any(name.startswith("pooler.") for name in names)
        config = TransformerConfig(**fields)
    except TypeError as error:
        raise ValueError(f"config.json holds a value of a wrong type: {error}") from None
    _check_all_came_back(family, architecture, values, config)
    return architecture, config


def _check_all_came_back(family: Family, architecture: Architecture, values: Values, config: TransformerConfig) -> None:
    again = {**OFF, **write_keys(family, config)}
    keys = {key.key: key for key in family.keys}
    for name, value in values.items():
        if name in HARMLESS or name in family.harmless or name in architecture.harmless:
            continue
        if name not in again:
            if value not in (None, {}, []):
                raise ValueError(
                    f"{name}={value!r} is not a known option of model_type={family.model_type!r}; "
                    f"overrides={{{name!r}: None}} loads the model without it"
                )
        elif (keys[name].meaning(values) != keys[name].meaning(again)) if name in keys else value != again[name]:
            raise ValueError(
                f"{name}={value!r} cannot be honoured beside the other options; with them it must be {again[name]!r}"
            )


def write_keys(family: Family, config: TransformerConfig) -> Values:
    """Our config in their (tidy, flat) keys; what they have no word for is left out."""
    fields = filled(config)
    values: Values = {}
    for name, value in family.constants.items():
        values[name] = value(fields) if callable(value) else value
    for key in family.keys:
        values.update(key.spelling(fields))
    return values


def write_config(family: Family, name: str, config: TransformerConfig) -> Values:
    """Our config as their ``config.json``, for class ``name``; see ``unlike`` for whether it means the same."""
    values = write_keys(family, config)
    labels = values.pop("num_labels", None)
    values = family.untidy(values)
    if labels is not None and config.head in ("sequence", "token"):
        values["id2label"] = {str(i): f"LABEL_{i}" for i in range(labels)}
        values["label2id"] = {f"LABEL_{i}": i for i in range(labels)}
    return {"architectures": [name], "model_type": family.model_type, **values}


def unlike(family: Family, values: Values, config: TransformerConfig, names: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Fields in which ``config.json`` ``values`` do not mean ``config``: (here, there)."""
    try:
        again = filled(read_config(family, values, names)[1])
    except ValueError as error:
        return {"architecture": (config.architecture, str(error))}
    ours = {name: value for name, value in filled(config).items() if name not in TRAINING}
    return {name: (value, again[name]) for name, value in ours.items() if again[name] != value}


def filled(config: TransformerConfig) -> Values:
    """The fields with their defaults filled in, and without what nothing reads."""
    values = to_dict(config)
    values["num_kv_heads"], values["head_dim"] = config.kv_heads, config.width_per_head
    values["ffn_dim"], values["num_decoder_layers"] = config.ffn_width, config.decoder_layers
    values["qkv_bias"], values["out_bias"] = config.has_qkv_bias, config.has_out_bias
    if config.architecture == "vision" or (config.position not in ("learned", "rotary") and config.scale != "log_length"):
        values["max_len"] = None
    return values
