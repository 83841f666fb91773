"""Build the network of a run: from the config, with the fields that the data determines, in training mode."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from minitx.config import ConfigError, Part, TransformerConfig
from minitx.config.schema import require
from minitx.data.seeding import seed_device
from minitx.data.task import Task
from minitx.data.task_loading import lightning_base, overrides
from minitx.nn.config_differences import hooked_modules, joined
from minitx.training.net import Net

if TYPE_CHECKING:
    from minitx.data.datamodule import DataModule

log = logging.getLogger(__name__)

# possible (architecture, head) for each kind of task
_MODELS_OF = {
    "language_model": (("decoder", "lm"),),
    "masked_lm": (("encoder", "lm"),),
    "seq2seq": (("encoder_decoder", "lm"),),
    "classify": (("encoder", "sequence"), ("vision", "sequence")),
    "tag": (("encoder", "token"),),
}

_LENGTHS = ("max_source_len", "max_target_len")
"""Fields of data in pairs: the longest row on each side."""


def build_network(part: Part, data: DataModule, precision: str = "32-true") -> nn.Module:
    """Return the network of a run. Its weights depend only on the seed, ``data.seed``.

    Raises:
        ConfigError: the model cannot be built, does not match the data, or is a LightningModule with its own training step; or
            the data has fewer rows than a batch.
    """
    data.check_batch()
    seed_device(data.seed)
    model = network_of(part, data)
    base = lightning_base(model, "LightningModule")
    if base is not None and overrides(model, base, "training_step"):
        raise ConfigError(
            f"model: {type(model).__name__} is a LightningModule with its own training_step, but minitx does not call it: "
            "train it with Lightning's Trainer and import blocks of minitx, or pass its network as model"
        )
    net = Net.of(model)
    data.number_labels_as(net.label_names)
    fields = decided_fields(data.task)
    net.check_sizes(fields, max(data.task.longest or 0, *(fields.get(name, 0) for name in _LENGTHS)))
    if parts := put_into_training(model):
        log.info("model: stays in evaluation mode: %s", joined(parts, ", "))
    if part.is_object and (changes := net.changes()):
        log.info("model: load its checkpoints with load_model(path, model=...), because %s", joined(changes))
    if net.config is not None and (hooked := hooked_modules(model)):
        log.info("model: checkpoints do not contain the hooks of %s", joined(hooked, ", "))
    if precision == "64-true":
        model.double()  # Lightning does this only after loading a checkpoint in float32
    return model


def network_of(part: Part, data: DataModule | None = None) -> nn.Module:
    """Build the network of a part. If ``data`` is not None, it determines some of the fields.

    Raises:
        ConfigError: the model cannot be built, does not match the data, or is not a ``torch.nn.Module``.
    """
    offered: dict[str, Any] = {}
    if data is not None and isinstance(part.fields, TransformerConfig):
        part = part.with_fields(fitted(part.fields, data))
    elif data is not None:
        offered = {**decided_fields(data.task), "task": data.task.kind, "tokenizer": data.task.tokenizer}
    model = part.build(**offered)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model._target_={part.name} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def decided_fields(task: Task) -> dict[str, Any]:
    """Return the fields of a model that the data determines, under common names such as ``num_classes``."""
    fields = dict(task.model_fields)
    for name, other in (("num_labels", "num_classes"), ("num_classes", "num_labels")):
        if name in fields:
            fields.setdefault(other, fields[name])
    return fields


def fitted(model: TransformerConfig, data: DataModule) -> TransformerConfig:
    """Return the config of one of our models with the fields that the data determines: vocabulary, labels, images, special ids.

    A field of the config that is set stays. It must equal the data's, but a vocabulary may be larger, and an id may be another. A text
    ends at the end token of the data, and at the model's.

    Raises:
        ConfigError: the model is for another task, or its fields differ from the data's.
    """
    fields = decided_fields(data.task)
    _check_kind(model, data.task, fields)
    changes = {}
    known = [field.name for field in dataclasses.fields(model)]
    for name, value in fields.items():
        if name in ("num_classes", *_LENGTHS):
            continue
        if name not in known:
            from minitx.config.unknown_keys import nearest  # only errors need it

            raise ConfigError(
                f"the data sets model.{name}={value}, but a model has no such field{nearest(name, known, 'model.')}"
            )
        typed, is_id = getattr(model, name), name.endswith("_id")
        if typed is None or (typed == 0 and not is_id):  # 0 is an id, but not a size
            changes[name] = value
        elif name == "eos_id":
            ends = dict.fromkeys(id for ids in (typed, value) for id in (ids if isinstance(ids, tuple | list) else [ids]))
            changes[name] = tuple(ends) if len(ends) > 1 else value
        elif name == "vocab_size":
            require(typed >= value, f"model.vocab_size={typed} is smaller than the vocabulary of the data, {value}")
        elif not is_id:
            require(typed == value, f"model.{name}={typed} differs from {name} of the data, {value}")
    return dataclasses.replace(model, **changes)


def _check_kind(model: TransformerConfig, task: Task, fields: Mapping[str, Any]) -> None:
    """Refuse a model for another kind of task. A kind of task that is not ours accepts any model."""
    if task.kind not in _MODELS_OF:
        return
    kinds = [kind for kind in _MODELS_OF[task.kind] if (kind[0] == "vision") == ("image_size" in fields)]
    pair = model.architecture, model.head
    if pair not in kinds:
        actual, *possible = (f"model.architecture={kind} with model.head={head}" for kind, head in (pair, *kinds))
        raise ConfigError(f"{actual} does not fit {task.name}: it needs {' or '.join(possible)}")


def put_into_training(network: nn.Module) -> list[str]:
    """Put a network into training mode, and return the names of the modules that stay in evaluation mode (``_kept_in_eval``).

    PEFT freezes the whole model, so with PEFT all modules are put into training mode.
    """
    kept = [] if hasattr(network, "get_base_model") else _kept_in_eval(network)
    network.train()
    for name in kept:
        network.get_submodule(name).eval()
    return kept


def _kept_in_eval(module: nn.Module, name: str = "", parent: nn.Module | None = None) -> list[str]:
    """Return the names of the outermost modules in evaluation mode that a run leaves in it.

    A module in evaluation mode was put there on purpose if all of its parameters are frozen, or if it is a single layer, such as
    a batch norm, inside a module in training mode. Other modules are there because ``from_pretrained`` of transformers returns
    models in evaluation mode, without dropout.
    """
    if not module.training:
        trained = [parameter.requires_grad for parameter in module.parameters()]
        is_frozen = bool(trained) and not any(trained)
        is_single_layer = next(module.children(), None) is None and parent is not None and parent.training
        if is_frozen or is_single_layer:
            return [name]
    children = [(f"{name}.{child}".removeprefix("."), part) for child, part in module.named_children()]
    return [kept for child, part in children for kept in _kept_in_eval(part, child, module)]
