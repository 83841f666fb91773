"""LoRA for Hugging Face models, with the package ``peft``: adapters, the weights that they untie, and their merge."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from minitx.config.packages import package
from minitx.config.schema import Config, Count, Share

log = logging.getLogger(__name__)

PLACE_OF_ADAPTER = re.compile(r"\.(base_layer|original_module)\.")
"""The part that PEFT inserts into the name of a weight with an adapter or a trained copy."""


@dataclass(frozen=True, kw_only=True)
class Lora(Config):
    """Arguments of ``peft.LoraConfig`` for ``pretrained_hf``.

    Attributes:
        r: the rank.
        lora_alpha: the factor of the adapter, divided by r; ``null``: 2r.
        lora_dropout: probability of dropout before the adapter.
        target_modules: names of the layers with an adapter, a regular expression for them, or ``all-linear`` (all but the head).
            An adapter on tied embeddings or their head unties both; on a head with a soft-cap, it is added after the cap and
            cannot be merged.
        modules_to_save: other modules to train. The new head of a classifier always is.
        use_rslora: divide by √r instead of r (Kalajdzievski 2023, arXiv:2312.03732).
        use_dora: learn direction and magnitude separately (Liu et al. 2024, arXiv:2402.09353).
    """

    r: Count = 8
    lora_alpha: Count | None = None
    lora_dropout: Share = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    modules_to_save: tuple[str, ...] = ()
    use_rslora: bool = False
    use_dora: bool = False


def with_lora(model: Any, lora: Lora, task: str | None, level: int) -> Any:
    """Add an adapter to the model. Warnings of PEFT are logged at ``level``."""
    peft = package("peft", "lora")
    arguments = dataclasses.asdict(lora)
    arguments["lora_alpha"] = 2 * arguments["r"] if arguments["lora_alpha"] is None else arguments["lora_alpha"]
    arguments["modules_to_save"] = list(arguments["modules_to_save"]) or None
    kind = {"classify": "SEQ_CLS", "tag": "TOKEN_CLS"}.get(task or "")  # for these PEFT also trains the new head
    with logging_warnings(level):
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type=kind, **arguments))
    for names in adapted_ties(adapted):
        if any(not {*tie}.isdisjoint(names) for tie in _ties_without_config(model)):
            raise ValueError(
                f"model.lora: {type(model).__name__} always ties {' and '.join(names)}, but the adapter would change only one of "
                "them: choose other target_modules"
            )
        log.log(
            level,
            "model.lora: %s are tied, and the adapter changes only one of them: an exported model is untied",
            " and ".join(names),
        )
    return adapted


@contextmanager
def logging_warnings(level: int) -> Iterator[None]:
    """Log the warnings of PEFT in this context, without deprecations."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield
    texts = [" ".join(str(warning.message).split()) for warning in caught if issubclass(warning.category, UserWarning)]
    for text in dict.fromkeys(texts):
        log.log(level, "model.lora: %s", text)


def adapted_ties(model: nn.Module) -> list[list[str]]:
    """Return the names of each tied weight that a PEFT adapter changes under one name only, as in the model without adapters."""
    ties = [names for names in _names_of_weights(model) if any(PLACE_OF_ADAPTER.search(name) for name in names)]
    return [[PLACE_OF_ADAPTER.sub(".", name.removeprefix("base_model.model.")) for name in names] for names in ties]


def _names_of_weights(model: nn.Module) -> list[list[str]]:
    """The names of each weight with several names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _ties_without_config(model: Any) -> list[list[str]]:
    """The names of the weights that this class of model ties even with ``tie_word_embeddings=False``."""
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    with torch.device("meta"):
        return _names_of_weights(type(model)(config))


@torch.no_grad()
def merged(model: Any) -> Any:
    """Merge the adapters of a PEFT model into its weights, in place, and return the model.

    Tied weights are untied if an adapter changes them under one name only.

    Raises:
        ValueError: an adapted layer has a soft-cap. PEFT adds the adapter after the cap, but merging would add it before.
    """
    for name, module in model.named_modules():
        softcap = getattr(getattr(module, "base_layer", None), "softcap", None)
        if softcap is not None:
            raise ValueError(
                f"{name} cannot be merged: its adapter is added after the soft-cap of {softcap}, and would then be added before it; "
                "train the adapter without this layer (target_modules)"
            )
    if adapted_ties(model):
        _untie(model)
    with logging_warnings(logging.INFO):
        return model.merge_and_unload()


def _untie(model: nn.Module) -> None:
    """Untie all weights: each name gets a separate copy, and the configs are changed."""
    shared = {model.get_parameter(names[0]) for names in _names_of_weights(model)}
    for module in model.modules():
        if hasattr(module, "base_layer") and not shared.isdisjoint(module.base_layer.parameters()):  # type: ignore[union-attr]
            module.base_layer = copy.deepcopy(module.base_layer)  # it may also be used elsewhere without an adapter
    seen = set[nn.Parameter]()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                setattr(module, name, nn.Parameter(parameter.clone(), requires_grad=parameter.requires_grad))
            seen.add(parameter)
    set_untied(model)


def set_untied(model: nn.Module) -> None:
    """Set ``tie_word_embeddings=False`` in the configs of a Hugging Face model."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            module.config.tie_word_embeddings = False  # type: ignore[union-attr]
