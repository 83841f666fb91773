"""``trainer.compile``: what torch compiles is kept on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from minitx.data.corpus import data_dir


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile(function)``, whose kernels are kept across runs: in ``$TORCHINDUCTOR_CACHE_DIR``, by default with our data."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(data_dir() / "compiled"))
    return torch.compile(function)
