"""Build the network of a run, and call it with a batch."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from minitx.config import ConfigError, Part, TransformerConfig
from minitx.config.schema import nearest, require, stated
from minitx.data.loaders import INPUTS, lightning_base, overrides
from minitx.data.task import Batch, Task, num_targets, seed_device
from minitx.nn.modes import evaluating

if TYPE_CHECKING:
    from minitx.data.datamodule import DataModule

log = logging.getLogger(__name__)


# --- calling a network with a batch: one of ours, or any ``nn.Module`` of the user's

NOT_FOR_THE_NETWORK = ("labels", "num_targets")

MASKS = {"key_mask": "attention_mask", "decoder_key_mask": "decoder_attention_mask"}
"""Our names of masks, and those of transformers, whose values are 0 and 1."""


def network_inputs(batch: Batch) -> Batch:
    """Return the keys of a batch that are not targets."""
    return {name: tensor for name, tensor in batch.items() if name not in NOT_FOR_THE_NETWORK}


def rows_of_batch(batch: Batch, rows: slice | list[int]) -> Batch:
    """Return some rows of every tensor that has as many rows as ``labels``, with their ``num_targets`` if the batch has it."""
    size = len(batch["labels"])
    found = {name: x[rows] if isinstance(x, Tensor) and x.dim() and len(x) == size else x for name, x in batch.items()}
    return found | ({"num_targets": num_targets(found["labels"])} if "num_targets" in found else {})


def config_of(network: nn.Module) -> TransformerConfig | None:
    """Return the config of one of our models, or None for a model of the user's."""
    found = getattr(network, "config", None)
    return found if isinstance(found, TransformerConfig) else None


def title_of(network: nn.Module) -> str:
    """Return what a picture says of a model: its architecture, the width of its heads and their scale, or the name of its class."""
    shape = config_of(unwrapped(network))
    if shape is None:
        return type(unwrapped(network)).__name__
    return f"{shape.architecture.replace('_', '–')}, heads of width {shape.width_per_head}, scale {shape.scale}"


def unwrapped(network: Any) -> nn.Module:
    """Return the model inside the wrappers of ``torch.compile`` and PEFT, which pass on all arguments."""
    while True:
        inner = dict(network.named_children()).get("_orig_mod")  # so the state_dict of a compiled module names it
        if inner is None and hasattr(network, "get_base_model"):
            inner = network.get_base_model()
        if inner is None:
            return network
        network = inner


def is_of_transformers(network: nn.Module) -> bool:
    """Return whether a model is one of transformers, which is not imported for the question."""
    return any(base.__module__ == "transformers.modeling_utils" for base in type(network).__mro__)


class Caller:
    """Call a network with the keys of a batch that are parameters of its ``forward``.

    * ``inputs`` goes to the first parameter if no other key of the batch is called like it.
    * With ``**kwargs``, the keys of their annotation ``Unpack[...]`` count, too. Other keys are not passed.
    * ``key_mask`` goes to a parameter ``attention_mask`` if there is none of its own name, and ``decoder_key_mask`` to
      ``decoder_attention_mask``, as 0 and 1.
    * A model of transformers gets no ``labels``, because it would compute a loss of its own, and ``use_cache=False``. If it takes
      ``position_ids``, it gets ``document_ids`` as positions that start again with each document, and no ``attention_mask``: its own
      mask then separates the documents, of which padding is one.

    Args:
        network: the network. The ``forward`` of the model inside the wrappers of ``torch.compile`` and PEFT decides the keys.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network, model = network, unwrapped(network)
        self.kind = type(model).__name__
        parameters = list(inspect.signature(model.forward).parameters.values())
        named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        self.names = [one.name for one in named]
        self.needed = [one.name for one in named if one.default is one.empty]
        for one in parameters:
            if one.kind is one.VAR_KEYWORD:
                self.names += [name for keys in get_args(one.annotation) for name in getattr(keys, "__annotations__", ())]
        self.options = {}
        if is_of_transformers(model):
            self.options = {"use_cache": False} if "use_cache" in self.names else {}
            self.names = [name for name in self.names if name != "labels"]
        self.packs = is_of_transformers(model) and "position_ids" in self.names

    def _key_of(self, name: str, batch: Batch) -> str | None:
        """The key of the batch for a parameter, if it has one."""
        mask = next((key for key, theirs in MASKS.items() if theirs == name and key not in self.names), None)
        first = INPUTS if name == self.names[0] else None
        return next((key for key in (name, mask, first) if key in batch), None)

    def inputs(self, batch: Batch) -> Batch:
        """Return what the network gets of ``batch``.

        Raises:
            ConfigError: ``forward`` requires a key that the batch does not have, or names none of its keys.
        """
        if self.packs and "document_ids" in batch:
            batch = {
                name: tensor for name, tensor in batch.items() if name not in ("key_mask", "document_ids", "attention_mask")
            } | {"position_ids": positions_in_documents(batch["document_ids"])}
        keys = {name: key for name in self.names if (key := self._key_of(name, batch)) is not None}
        missing = [name for name in self.needed if name not in keys]
        if missing or not keys:
            what = f"needs {missing[0]}" if missing else "names none of the keys of a batch as a parameter"
            raise ConfigError(f"model: {self.kind}.forward {what}, but a batch has: {', '.join(batch)}")
        return {name: batch[key].long() if key in MASKS and key != name else batch[key] for name, key in keys.items()}

    def dropped(self, batch: Batch) -> list[str]:
        """Return the inputs of ``batch`` that the network does not get."""
        taken = {self._key_of(name, batch) for name in self.names} | ({"document_ids"} if self.packs else set())
        return [name for name in network_inputs(batch) if name not in taken]

    def check(self, batch: Batch, masks: Iterable[str] = ()) -> None:
        """Refuse a batch with padding or several documents in a row, of which the network would not learn.

        Args:
            masks: the names of the masks in ``Task.key_masks``. ``forward`` must have a parameter for a name that the user chose.

        Raises:
            ConfigError: a mask that hides a token, ``document_ids`` that differ within a row, or a mask with a name that the user
                chose are not passed.
        """
        known = (*MASKS, *MASKS.values())
        for name in self.dropped(batch):
            if (name in known and not batch[name].all()) or (name in masks and name not in known):
                raise ConfigError(
                    f"model: {self.kind}.forward does not name {name}{f' or {MASKS[name]}' if name in MASKS else ''}, so it would read "
                    "padding as data. Name it in forward, or give Task(key_masks={}, pad=...) if the model knows padding by its value"
                )
            ids = batch[name]
            if name == "document_ids" and ((ids != ids[:, :1]) & (ids >= 0)).any():
                raise ConfigError(
                    f"model: {self.kind}.forward does not name document_ids, so attention would cross the documents of a row. "
                    "Set data.packing=false, which puts one document into a row"
                )

    @torch.no_grad()
    def check_documents(self, input_ids: Tensor) -> None:
        """Check on a few tokens that a model which gets ``document_ids`` as positions does not look into other documents.

        Args:
            input_ids: (B, L). The first row is used.

        Raises:
            ConfigError: a token of one document changes the logits of another.
        """
        ids = input_ids[:1, :8]
        documents = (torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] // 2).long()[None]
        other = torch.where(documents == 0, (ids + 1) % (ids.max() + 2), ids)
        with evaluating(self.network):
            one, two = (self({"input_ids": each, "document_ids": documents})[documents == 1] for each in (ids, other))
        if not torch.allclose(one, two, rtol=1e-4, atol=1e-4 * float(one.abs().max())):
            raise ConfigError(
                f"model: attention of {self.kind} crosses the documents of a row, which its positions do not separate. "
                "Set data.packing=false, which puts one document into a row"
            )

    def __call__(self, batch: Batch) -> Tensor:
        """The logits of a batch."""
        return logits_of(self.network(**self.inputs(batch), **self.options), self.network)


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """Return the position of each token in its document, (B, L), from the numbers of the documents.

    >>> positions_in_documents(torch.tensor([[4, 4, 4, 5, 5, -1]]))
    tensor([[0, 1, 2, 0, 1, 0]])
    """
    place = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = document_ids.diff(dim=1, prepend=document_ids[:, :1]) != 0
    return place - torch.where(starts, place, 0).cummax(dim=1).values


def set_training(network: nn.Module) -> list[str]:
    """Put a network into training mode, and return the names of the parts that stay in evaluation mode.

    ``from_pretrained`` of transformers returns models in evaluation mode, without dropout. A part in evaluation mode stays in it
    if all of its parameters are frozen, or if it is a single layer, such as a batch norm, of a part in training mode. An
    adapter of PEFT freezes its model, so there the frozen parts train.
    """
    kept: list[str] = []

    def visit(name: str, part: nn.Module, parent: nn.Module | None) -> None:
        trained = [parameter.requires_grad for parameter in part.parameters()]
        leaf = parent is not None and parent.training and not any(True for _ in part.children())
        if not part.training and ((trained and not any(trained)) or leaf):
            kept.append(name)
            return
        for child, module in part.named_children():
            visit(f"{name}.{child}" if name else child, module, part)

    if not hasattr(network, "get_base_model"):
        visit("", network, None)
    network.train()
    for name in kept:
        network.get_submodule(name).eval()
    return kept


def logits_of(found: Any, network: nn.Module) -> Tensor:
    """Return the logits: the output of a network, or its attribute or key ``logits``.

    Raises:
        ConfigError: neither of them is a tensor.
    """
    logits = found.get("logits") if isinstance(found, Mapping) else getattr(found, "logits", found)
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f"model: {type(network).__name__} must return logits, or an object or dict with logits; got {type(found).__name__}"
        )
    return logits


# --- network

# what a task asks of a model: architecture and head
_MODELS_OF = {
    "language_model": (("decoder", "lm"),),
    "masked_lm": (("encoder", "lm"),),
    "seq2seq": (("encoder_decoder", "lm"),),
    "classify": (("encoder", "sequence"), ("vision", "sequence")),
    "tag": (("encoder", "token"),),
}


def build_network(part: Part, data: DataModule, *, precision: str = "32-true", seed: int = 0) -> nn.Module:
    """Return the network of a run. Its weights depend only on the seed.

    Raises:
        ConfigError: the model cannot be built, does not fit the data, or is a LightningModule with a training step of its own.
    """
    seed_device(seed)
    model = network_of(part, data)
    base = lightning_base(model, "LightningModule")
    if base is not None and overrides(model, base, "training_step"):
        raise ConfigError(
            f"model: {type(model).__name__} is a LightningModule with a training_step of its own, which minitx does not call: "
            "train it with Lightning's Trainer and import blocks of minitx into it, or give its network as model"
        )
    check_network(model, decided_fields(data))
    if parts := set_training(model):
        log.info("model: in evaluation mode, as given: %s", ", ".join(parts[:3]) + (", ..." if len(parts) > 3 else ""))
    if precision == "64-true":
        model.double()  # Lightning would, after it has loaded a checkpoint into float32
    return in_own_dtype(model) if precision in ("64-true", "bf16-true") else model


def network_of(part: Part, data: DataModule | None = None) -> nn.Module:
    """Build the network of a part, with the fields that the data decide if ``data`` is given.

    Raises:
        ConfigError: the model cannot be built, does not fit the data, or is no ``torch.nn.Module``.
    """
    offered: dict[str, Any] = {}
    if data is not None and isinstance(part.fields, TransformerConfig):
        part = part.with_fields(fitted(part.fields, data))
    elif data is not None:
        offered = {**decided_fields(data), "task": data.task.kind, "tokenizer": data.task.tokenizer}
    model = part.build(**offered)
    said = f"model._target_={part.name} must give a torch.nn.Module, got {type(model).__name__}"
    require(isinstance(model, nn.Module), said)
    return model


def check_network(network: nn.Module, fields: Mapping[str, Any]) -> None:
    """Refuse a network that cannot be trained as it is, and say what of it does not take part.

    Args:
        fields: what the data decide, such as ``vocab_size`` and ``num_labels``.

    Raises:
        ConfigError: its vocabulary or number of labels is smaller than that of the data.
    """
    network = unwrapped(network)
    name, config = type(network).__name__, getattr(network, "config", None)
    for key, what in (("vocab_size", "the vocabulary"), ("num_labels", "the number of labels")):
        known, wanted = stated(config, key, int), fields.get(key)
        # a wrapper may show the config of a part, with another head
        if key == "num_labels" and not is_of_transformers(network):
            continue
        if known and wanted and known < wanted:
            raise ConfigError(f"model: {what} of {name}, {known:,}, is smaller than that of the data, {wanted:,}")
        if known and wanted and known > wanted:
            log.info("model: %s of %s, %s, is larger than that of the data, %s", what, name, f"{known:,}", f"{wanted:,}")
    if stated(config, "output_router_logits", bool) is not None:
        log.info("model: %s is a mixture of experts, and its router loss is not part of the objective", name)


def in_own_dtype(network: nn.Module) -> nn.Module:
    """Let a network convert the numbers that it gets, such as pixels, to the dtype of its weights, and return it: Lightning converts
    only the batches of its own loops."""
    network.register_forward_pre_hook(_to_own_dtype, with_kwargs=True)
    return network


def _to_own_dtype(module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a network, with numbers in the dtype of its largest weight: a norm may keep another."""
    # sorted, because torch.compile traces no max with a key; empty for a network without such weights
    largest = sorted((weight for weight in module.parameters() if weight.is_floating_point()), key=torch.Tensor.numel)[-1:]
    numbers = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return args, {**inputs, **{name: x.to(weight.dtype) for weight in largest for name, x in numbers.items()}}


def decided_fields(data: DataModule) -> dict[str, Any]:
    """Return the fields of a model that the data decide, under common names such as ``num_classes``."""
    fields = dict(data.task.model_fields)
    for name, other in (("num_labels", "num_classes"), ("num_classes", "num_labels")):
        if name in fields:
            fields.setdefault(other, fields[name])
    return fields


def fitted(model: TransformerConfig, data: DataModule) -> TransformerConfig:
    """Return the config of one of our models with the fields that the data decide: vocabulary, labels, images, special ids.

    Raises:
        ConfigError: the model is for another task or too small for the data, or there are fewer rows than in a batch.
    """
    fields = decided_fields(data)
    fields.pop("num_classes", None)
    data.check_batch()
    _check_kind(model, data.task, fields)
    model.check_length(max(data.task.longest or 0, *(fields.pop(name, 0) for name in ("max_source_len", "max_target_len"))))
    found = {}
    known = [field.name for field in dataclasses.fields(model)]
    for name, value in fields.items():
        if name not in known:
            raise ConfigError(
                f"data decides model.{name}={value}, but a model has no such field{nearest(name, known, 'model.')}"
            )
        given = getattr(model, name)
        if given and not name.endswith("_id") and (given < value if name == "vocab_size" else given != value):
            what = {"vocab_size": "the vocabulary"}.get(name, name)
            how = "is smaller than" if name == "vocab_size" else "differs from"
            raise ConfigError(f"model.{name}={given} {how} {what} of the data, {value}")
        found[name] = value if given is None or (given == 0 and not name.endswith("_id")) else given
        if name == "eos_id" and given is not None:  # what ends the rows ends a text, also where the weights say something else
            ends = dict.fromkeys(id for ids in (given, value) for id in (ids if isinstance(ids, tuple | list) else [ids]))
            found[name] = tuple(ends) if len(ends) > 1 else value
    return dataclasses.replace(model, **found)


def _check_kind(model: TransformerConfig, task: Task, fields: Mapping[str, Any]) -> None:
    """Refuse a model for another kind of task. A task of another kind than ours takes any."""
    if task.kind not in _MODELS_OF:
        return
    kinds = [kind for kind in _MODELS_OF[task.kind] if (kind[0] == "vision") == ("image_size" in fields)]
    own = model.architecture, model.head
    given, *wanted = (f"model.architecture={kind} with model.head={head}" for kind, head in (own, *kinds))
    require(own in kinds, f"{given} does not fit {task.name}, which needs {' or '.join(wanted)}")
