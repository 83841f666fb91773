"""Call a network with a batch: one of ours, or any ``nn.Module`` of the user's."""

from __future__ import annotations

import inspect
from typing import Any, get_args

from torch import Tensor, nn

from minitx.config import ConfigError, TransformerConfig
from minitx.data.addressing import Batch
from minitx.data.task import num_targets

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

    * With ``**kwargs``, the keys of their annotation ``Unpack[...]`` count, too. Other keys are not passed.
    * ``key_mask`` goes to a parameter ``attention_mask`` if there is none of its own name, and ``decoder_key_mask`` to
      ``decoder_attention_mask``, as 0 and 1.
    * A model of transformers gets no ``labels``, because it would compute a loss of its own, and ``use_cache=False``.

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

    def _key_of(self, name: str, batch: Batch) -> str | None:
        """The key of the batch for a parameter, if it has one."""
        ours = next((key for key, theirs in MASKS.items() if theirs == name and key not in self.names), None)
        return next((key for key in (name, ours) if key in batch), None)

    def inputs(self, batch: Batch) -> Batch:
        """Return what the network gets of ``batch``.

        Raises:
            ConfigError: ``forward`` requires a key that the batch does not have, or names none of its keys.
        """
        keys = {name: key for name in self.names if (key := self._key_of(name, batch)) is not None}
        missing = [name for name in self.needed if name not in keys]
        if missing or not keys:
            what = f"needs {missing[0]}" if missing else "names none of the keys of a batch as a parameter"
            raise ConfigError(f"model: {self.kind}.forward {what}, but a batch has: {', '.join(batch)}")
        return {name: batch[key] if key == name else batch[key].long() for name, key in keys.items()}

    def dropped(self, batch: Batch) -> list[str]:
        """Return the inputs of ``batch`` that the network does not get."""
        taken = {self._key_of(name, batch) for name in self.names}
        return [name for name in network_inputs(batch) if name not in taken]

    def check(self, batch: Batch) -> None:
        """Refuse a batch with padding or several documents in a row, of which the network would not learn.

        Raises:
            ConfigError: a mask that hides a token, or ``document_ids`` that differ within a row, are not passed.
        """
        for name in self.dropped(batch):
            if name in (*MASKS, *MASKS.values()) and not batch[name].all():
                raise ConfigError(
                    f"model: {self.kind}.forward does not name {name}{f' or {MASKS[name]}' if name in MASKS else ''}, so it would read "
                    "padding as data. Name it in forward, or give Task(key_masks={}) if the model finds padding by itself"
                )
            ids = batch[name]
            if name == "document_ids" and ((ids != ids[:, :1]) & (ids >= 0)).any():
                raise ConfigError(
                    f"model: {self.kind}.forward does not name document_ids, so attention would cross the documents of a row. "
                    "Set data.packing=false, which puts one document into a row"
                )

    def __call__(self, batch: Batch) -> Tensor:
        """The logits of a batch."""
        return logits_of(self.network(**self.inputs(batch), **self.options), self.network)


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
    """Return the logits: the output of a network, or its attribute ``logits``.

    Raises:
        ConfigError: neither of them is a tensor.
    """
    logits = getattr(found, "logits", found)
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f"model: {type(network).__name__} must return logits, or an object with logits; got {type(found).__name__}"
        )
    return logits
