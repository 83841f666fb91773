"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """``model`` in evaluation mode (no dropout); afterwards every part of it is in the mode that it was in.

    ``model.train()`` would put all parts into one mode, also a frozen one that its owner keeps in evaluation mode.

    >>> model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5).eval())
    >>> with evaluating(model):
    ...     model[0].training
    False
    >>> model.training, model[0].training, model[1].training
    (True, True, False)
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            if module.training != training:
                module.train(training)  # a module may do more than note its mode, and puts its parts into its own
        for module, training in modes.items():
            module.training = training
