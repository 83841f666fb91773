"""The precision of a device: a context without autocast, and its widest floating-point type."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast. It does nothing on devices that have no autocast (``meta``)."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()


@cache
def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device, for sums: float64, or float32 if the device cannot add in float64 (Apple's GPU).

    >>> widest_float(torch.device("cpu"))
    torch.float64
    """
    try:
        torch.ones((), dtype=torch.float64, device=device).add_(1)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64
