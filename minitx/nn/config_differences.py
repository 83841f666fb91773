"""Whether a model still is what its config built: its parts, shapes, settings and score scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minitx.config.transformer import TransformerConfig
from minitx.nn.core_bases import OtherScale
from minitx.nn.models import TransformerModel, build_model

# names of parts and settings that do not change what a trained model computes (cores are compared by their parts)
TRAINING_ONLY = ("training", "dropout", "p", "inplace", "backend", "strict")
SHOWN = 3
"""The largest number of differences in a message."""


def changes_of(model: nn.Module) -> list[str]:
    """Return the parts and settings of ``model`` that differ from what its config builds, outermost parts only.

    One of our models is compared with what ``model.config`` builds. Any other model is compared with its attribute
    ``stored_structure``, which has the result of ``structure_of`` from the time when the model was built. Without this attribute, [] is
    returned. Hooks are ignored.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> changes_of(model)
    []
    >>> model.blocks[1].attention.softcap = 2.0
    >>> changes_of(model)
    ['blocks.1.attention.softcap is 2.0, not None']
    """
    parts = structure_of(model)
    if isinstance(model, TransformerModel):
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            built = build_model(model.config)
        return _differences({**_settings(model), **parts}, {**_settings(built), **structure_of(built)}, parts)
    if isinstance(getattr(model, "config", None), TransformerConfig):
        return [f"{type(model).__name__} is not a model of minitx.nn"]
    expected = getattr(model, "stored_structure", None)
    return _differences(parts, expected, parts) if isinstance(expected, Mapping) else []


def hooked_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules of ``model`` with a forward hook."""
    # torch has no public list of a module's hooks
    hooked = [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]
    return [name or "the model" for name in hooked]


def joined(words: Sequence[str], separator: str = "; ") -> str:
    """Return words as text for a message. Only the first ones are shown.

    >>> joined("abcde", ", ")
    'a, b, c and 2 more'
    """
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return f"{separator.join(words[:SHOWN])}{more}"


def structure_of(model: nn.Module) -> dict[str, Any]:
    """Return, by name, the class of each module and the shape of each parameter and buffer.

    A further name of a module or tensor has its first name. A core under attention that is not ours (``OtherScale``) isn't a part; its
    score scale is, if it was changed.
    """
    first: dict[Any, str] = {}

    def described(entry: nn.Module | Tensor, name: str, description: Any) -> Any:
        kind = "module" if isinstance(entry, nn.Module) else "tensor"
        return description if first.setdefault(entry, name) == name else f"the {kind} {first[entry]}"

    structure: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, OtherScale):
            structure[name or "the model"] = described(module, name, f"{type(module).__module__}.{type(module).__name__}")
        elif module.scale is not None:
            structure[f"{name.rpartition('.')[0]}.scale"] = module.scale
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {**structure, **{name: described(tensor, name, tuple(tensor.shape)) for name, tensor in named}}


def _settings(model: nn.Module) -> dict[str, Any]:
    """The numbers, strings, tuples and dataclasses among the attributes of each module."""
    return {
        f"{name}.{key}".removeprefix("."): str(value) if is_dataclass(value) else value
        for name, module in model.named_modules(remove_duplicate=False)
        for key, value in vars(module).items()
        if not key.startswith("_") and (value is None or isinstance(value, str | float | int | tuple) or is_dataclass(value))
    }


def _differences(actual: Mapping[str, Any], expected: Mapping[str, Any], parts: Mapping[str, Any]) -> list[str]:
    """Sentences about the outermost entries that differ. An additional entry of ``actual`` counts only if it is one of ``parts``."""
    differing: dict[str, str] = {}
    for name in sorted({*expected, *parts}):
        ours, theirs = actual.get(name, "missing"), expected.get(name, "a part of the config")
        is_inside = any(name.startswith(f"{outer}.") for outer in differing)
        if ours != theirs and not is_inside and name.rpartition(".")[2] not in TRAINING_ONLY:
            differing[name] = f"{name} is {ours}, not {theirs}"
    return [*differing.values()]
