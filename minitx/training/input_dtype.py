"""Floating-point inputs, such as pixels, in the dtype of a network's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

PURE = ("64-true", "bf16-true")
"""The precisions with one dtype, other than float32, for weights and computations."""


def in_own_dtype(network: nn.Module) -> RemovableHandle:
    """Make a network convert floating-point inputs, such as pixels, to the dtype of its weights. The handle undoes it.

    Lightning converts only batches of Lightning's loops.
    """
    return network.register_forward_pre_hook(_to_own_dtype, with_kwargs=True)


@contextmanager
def prepared_network(network: nn.Module, precision: str) -> Iterator[None]:
    """A context for the run of a network that may be the user's: it converts inputs to its dtype.

    Afterwards, this hook is removed, and the same parameters are trainable as before.
    """
    trainable = {name: parameter.requires_grad for name, parameter in network.named_parameters()}
    hook = in_own_dtype(network) if precision in PURE else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(trainable.get(name, parameter.requires_grad))


def _to_own_dtype(module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a network, floating-point ones in the dtype of its largest weight. Norms may have another dtype."""
    # sorted, because torch.compile cannot trace max with a key; empty for a network without floating-point weights
    largest = sorted((weight for weight in module.parameters() if weight.is_floating_point()), key=torch.Tensor.numel)[-1:]
    numbers = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return args, {**inputs, **{name: x.to(weight.dtype) for weight in largest for name, x in numbers.items()}}
