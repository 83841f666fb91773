"""Call a network with a batch: one of ours, or any ``nn.Module`` of the user's."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from minitx.config import ConfigError, TransformerConfig
from minitx.data.addressing import Batch

NOT_FOR_THE_NETWORK = ("labels", "num_targets")


def network_inputs(batch: Batch) -> Batch:
    """Return the keys of a batch that are not targets."""
    return {name: tensor for name, tensor in batch.items() if name not in NOT_FOR_THE_NETWORK}


def config_of(network: nn.Module) -> TransformerConfig | None:
    """Return the config of one of our models, or None for a model of the user's."""
    found = getattr(network, "config", None)
    return found if isinstance(found, TransformerConfig) else None


class Caller:
    """Call a network with the keys of a batch that are parameters of its ``forward``. With ``**kwargs``, with all but ``num_targets``.

    Args:
        network: the network. Its ``forward`` decides the keys.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        parameters = list(inspect.signature(network.forward).parameters.values())
        self.names = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        self.needed = [one.name for one in parameters if one.name in self.names and one.default is one.empty]
        self.takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)

    def inputs(self, batch: Batch) -> Batch:
        """Return the keys of ``batch`` that are passed to the network.

        Raises:
            ConfigError: ``forward`` requires a key that the batch does not have.
        """
        missing = [name for name in self.needed if name not in batch]
        if missing:
            raise ConfigError(
                f"model: {type(self.network).__name__}.forward needs {missing[0]}, but a batch has: {', '.join(batch)}"
            )
        if self.takes_all:
            return {name: value for name, value in batch.items() if name != "num_targets" or name in self.names}
        return {name: batch[name] for name in self.names if name in batch}

    def dropped(self, batch: Batch) -> list[str]:
        """Return the inputs of ``batch`` that the network does not use."""
        taken = self.inputs(batch)
        return [name for name in network_inputs(batch) if name not in taken]

    def __call__(self, batch: Batch) -> Tensor:
        """The logits of a batch."""
        return logits_of(self.network(**self.inputs(batch)), self.network)


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
