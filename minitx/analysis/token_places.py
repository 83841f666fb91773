"""Which position of its text does a token of a call have? Two things move it:

* Padding on the left: a transformers model with a table of positions counts it as tokens, unless it gets ``position_ids``
  (``models_that_count``, ``real_positions``). ``with_positions`` adds them, and ``PaddingWarner`` warns without them.
* A cache: the call begins after the tokens that were read before (``modules_with_caches``, ``length_before``, ``innermost``).

In a model of several parts, the text is that of the innermost transformers model (``home_of``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from minitx.nn.arguments import Arguments
from minitx.nn.attention import MultiHeadAttention
from minitx.nn.blocks import is_block
from minitx.nn.positions import position_ids_from

OFFSETS = range(3)
"""The number of rows of a table before its first position: 2 in OPT and BioGPT."""


def home_of(model: nn.Module, name: str) -> str:
    """Return the name of the innermost transformers model around the module ``name``, such as the vision model of LLaVA."""
    around = [name[:end] for end, letter in enumerate(name) if letter == "."]
    return next((path for path in reversed(around) if _is_hf(model.get_submodule(path))), "")


def _is_hf(module: nn.Module) -> bool:
    return hasattr(type(module), "base_model_prefix")


def models_that_count(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, the transformers models with absolute positions that count padding as tokens without ``position_ids``.

    Such a model has an ``nn.Embedding``, other than the table of the tokens, with a row for each of ``max_position_embeddings``. If
    the table has a row for padding (``padding_idx``), the model counts only tokens (RoBERTa). Rotary positions have no table: only
    distances matter there.
    """
    counting: dict[str, nn.Module] = {}
    for name, table in model.named_modules():
        if not isinstance(table, nn.Embedding) or table.padding_idx is not None:
            continue
        reader: Any = model.get_submodule(home_of(model, name))
        if not _is_hf(reader) or not {"input_ids", "position_ids"} <= {*Arguments(reader).names}:
            continue
        longest = getattr(reader.config, "max_position_embeddings", None)
        if longest and table.num_embeddings - longest in OFFSETS and table is not reader.get_input_embeddings():
            counting[home_of(model, name)] = reader
    return counting


def with_positions(model: nn.Module, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call, with ``position_ids`` if the model would count padding on the left as tokens.

    The first real token gets position 0, as in transformers' ``generate``. The arguments are unchanged for other models, if they
    already have ``position_ids``, and without padding before a token.
    """
    arguments = Arguments(model)
    takes = "position_ids" in arguments.names or arguments.takes_any
    places = real_positions(inputs)
    if places is None or not takes or not models_that_count(model):
        return inputs
    return {**inputs, "position_ids": places}


def real_positions(arguments: Mapping[str, Any]) -> Tensor | None:
    """Return the positions among the real tokens, int (B, L). None if they equal the columns, or if ``position_ids`` are given."""
    mask, tokens = arguments.get("attention_mask"), arguments.get("input_ids", arguments.get("inputs_embeds"))
    if arguments.get("position_ids") is not None or not isinstance(mask, Tensor) or not isinstance(tokens, Tensor):
        return None
    if mask.dim() != 2 or mask.shape != tokens.shape[:2]:  # with a cache, the mask covers all tokens
        return None
    real = mask != 0
    places = position_ids_from(real, None, mask.shape[1], mask.device)
    columns = position_ids_from(None, None, mask.shape[1], mask.device)
    return places if bool(((places != columns) & real).any()) else None


class PaddingWarner:
    """Warns once of padding on the left that a model counts as tokens."""

    def __init__(self) -> None:
        self.has_warned = False

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Warn once if the model ``module`` is called with padding before a token and without positions."""
        arguments = Arguments(module).of_call(args, options)
        if not self.has_warned and real_positions(arguments) is not None:
            self.has_warned = True
            warnings.warn(
                f"{type(module).__name__} counts the padding on the left as tokens, so its positions are wrong: pass "
                "position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0), as generate does",
                stacklevel=2,
            )


def modules_with_caches(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, the modules whose arguments show how much of a text was read before.

    They are transformers models, our blocks, and our attention outside of blocks. Attention inside a block is left out, because
    cross-attention runs when the block's cache already counts the new tokens.
    """
    with_caches: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_ours = (is_block(module) or isinstance(module, MultiHeadAttention)) and "cache" in Arguments(module).names
        if _is_hf(module) or (is_ours and not any(is_block(model.get_submodule(m)) for m in _enclosing(name, with_caches))):
            with_caches[name] = module
    return with_caches


def length_before(module: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> int:
    """Return the number of positions in the cache of a call of a module of ``modules_with_caches``."""
    arguments = Arguments(module).of_call(args, options)
    if not _is_hf(module):
        return getattr(arguments.get("cache"), "length", 0)
    cache: Any = arguments.get("past_key_values")
    return int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0


def innermost(name: str, of_modules: Mapping[str, int]) -> int:
    """Return the number of the innermost module around ``name``, or 0 if there is none."""
    return max(((len(module), of_modules[module]) for module in _enclosing(name, of_modules)), default=(0, 0))[1]


def _enclosing(name: str, modules: Iterable[str]) -> Iterator[str]:
    """The ``modules`` that contain the module ``name``, including the module itself."""
    return (module for module in modules if not module or f"{name}.".startswith(f"{module}."))
