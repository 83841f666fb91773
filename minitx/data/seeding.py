"""Random generators that depend only on a seed and a path, and the seeds of other libraries' generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

CPU = torch.device("cpu")

VALIDATION_SEED = 20240229
"""The seed of all random draws of validation, so that all runs are validated on the same rows."""

Draw = Callable[[int], np.random.Generator]
"""A function from i to the random generator of row i of a batch."""


def generator(seed: int, *path: int | str) -> np.random.Generator:
    """Return a random generator that depends only on ``seed`` and ``path``, not on the platform or the order of calls.

    The SHA-256 of (seed, path) is the key of a Philox counter (Salmon et al. 2011, "Parallel random numbers: as easy as
    1, 2, 3"), so the streams of neighbouring seeds and steps are independent.

    >>> bool(generator(0, "train", 3).random() == generator(0, "train", 3).random())
    True
    """
    name = repr((int(seed), *(part if isinstance(part, str) else int(part) for part in path)))
    key = hashlib.sha256(name.encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def seed_device(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of Python, NumPy and torch: a user's data and model may draw from any of them.

    Args:
        device: seed this device and the CPU. None: all devices, by ``torch.manual_seed``. Before CUDA is initialised, each call of that
            function queues another seeding with a formatted stack trace.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if device is None:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
        module: Any = getattr(torch, device.type, None)
        if hasattr(module, "manual_seed"):  # torch.cuda, but not torch.cpu
            module.manual_seed(seed)


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch at the end, on the CPU and on all devices of this type."""
    module: Any = getattr(torch, device.type, None)
    count = module.device_count() if hasattr(module, "get_rng_state") else 0
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(count), device_type=device.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
