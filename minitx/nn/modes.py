"""A context manager for evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode (no dropout), and restore the mode of each submodule afterwards.

    ``model.train()`` would not be enough: it would also change submodules that were in evaluation mode before.

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
                module.train(training)  # not only the flag: a module may override train()
        for module, training in modes.items():  # train() has also changed submodules
            module.training = training
