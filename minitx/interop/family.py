"""A ``Family`` of models: its classes, its table for ``config.json`` and its table for the weights.

The families themselves are in ``decoder_families.py`` and ``encoder_families.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from minitx.config import TransformerConfig

Values = dict[str, Any]
Shape = tuple[int, ...]
Tidy = Callable[[Values, Collection[str]], tuple[Values, list[str]]]


@dataclass(frozen=True)
class Architecture:
    """One model class of a family, such as ``BertForMaskedLM``.

    Args:
        fields: the fields of our config that this class determines.
        tensors: our names to theirs, for the head.
        ignored: patterns of tensors in the file that belong to other classes.
        twice: second names of tensors, and their first names. A model without tied embeddings is saved with both.
        is_base: whether its files have no prefix in tensor names.
    """

    fields: Values
    tensors: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    twice: Mapping[str, str] = field(default_factory=dict)
    is_base: bool = False


@dataclass(frozen=True, kw_only=True)
class ConfigTable:
    """How ``config.json`` of a family expresses our config.

    Args:
        keys: the fields of our config to keys of ``config.json``.
        defaults: the values of keys that are missing in ``config.json``. Default: None.
        words: for keys whose values have other names here, a table from their names to ours. Of two names with the same meaning, the
            first is written.
        fields: the fields of our config that are the same in all models.
        required: keys with only one supported value.
        needs_whole_heads: whether transformers refuses a width that is not a multiple of the number of heads.
        tidy: prepares the values of ``config.json`` for ``keys``. It also gets the tensor names. Returns new values, and descriptions of
            the options that our blocks do not support.
        untidy: the reverse of ``tidy``.
    """

    keys: Mapping[str, str]
    defaults: Values
    words: Mapping[str, Mapping[Any, Any]]
    fields: Values
    required: Values = field(default_factory=dict)
    needs_whole_heads: bool = False
    tidy: Tidy = lambda values, names: (values, [])
    untidy: Callable[[Values], Values] = lambda values: values


@dataclass(frozen=True, kw_only=True)
class TensorTable:
    """The names and shapes of our tensors in the weights of a family.

    Args:
        names: our names of tensors to theirs, without ``prefix``, or names of modules with a weight and a bias. ``*`` stands for the
            number of the layer. Several of our tensors with the same name there are equal parts of it along the output axis, in order.
        prefix: the beginning of all tensor names.
        gated: parts of their tensor names, and the replacements in a model whose feed-forward network has a gate.
        is_transposed: whether the matrices of blocks have shape (in, out), as in ``Conv1D``.
        norm_shift: the weights of our norms minus theirs: 1 for norms that multiply by 1 + weight.
        shapes: our names of tensors with another shape there, and functions from the config and our shape to that shape.
        ignored: patterns of tensors that no model uses.
        copies: tensors that may repeat another tensor, and the name of the other tensor.
        renames: parts of tensor names in older files, and the current names.
    """

    names: Mapping[str, str]
    prefix: str = ""
    gated: Mapping[str, str] = field(default_factory=dict)
    is_transposed: bool = False
    norm_shift: float = 0.0
    shapes: Mapping[str, Callable[[TransformerConfig, Shape], Shape]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Family:
    """All models of one ``model_type``.

    Args:
        model_type: the value of this key in ``config.json``.
        architectures: the model classes by name. The first is the default.
        config: the translation of ``config.json``.
        tensors: the translation of the weights.
    """

    model_type: str
    architectures: Mapping[str, Architecture]
    config: ConfigTable
    tensors: TensorTable
