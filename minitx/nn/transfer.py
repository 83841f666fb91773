"""Copies between the CPU and a device. On an accelerator, a copy to the CPU waits for all work that was queued before it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

Tree = TypeVar("Tree")


def to_host(tree: Tree) -> Tree:
    """Return a tree of dicts, lists and tuples with its tensors on the CPU, bit for bit.

    The tensors of a device are copied together, so the host waits once. Tensors on the CPU and other values are returned unchanged.

    >>> to_host({"loss": torch.tensor(0.5), "step": 3})
    {'loss': tensor(0.5000), 'step': 3}
    """
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors_in(tree):
        if tensor.device.type != "cpu":
            by_device[tensor.device].append(tensor)
    on_host = {id(tensor): copy for tensors in by_device.values() for tensor, copy in _copies(tensors)}
    return _mapped(tree, on_host) if on_host else tree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in a tree of dicts, lists and tuples.

    >>> [tensor.shape[0] for tensor in tensors_in({"a": [torch.zeros(2)], "b": 3.0, "c": torch.zeros(5)})]
    [2, 5]
    """
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(value)


def _mapped(tree: Any, on_host: dict[int, Tensor]) -> Any:
    if isinstance(tree, dict):
        return {name: _mapped(value, on_host) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [_mapped(value, on_host) for value in tree]
        # a named tuple takes its fields one by one
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return on_host.get(id(tree), tree)


def _copies(tensors: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor of one device with its copy on the CPU."""
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)  # so that each begins at a multiple of its item size
    joined = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in ordered]).cpu()
    sizes = [tensor.numel() * tensor.dtype.itemsize for tensor in ordered]
    for tensor, piece in zip(ordered, joined.split(sizes), strict=True):
        # cloned, because saving a piece would save the whole storage
        yield tensor, piece.view(tensor.dtype).view(tensor.shape).clone()


def is_pinned_for(device: torch.device) -> bool:
    """Return whether copies from page-locked memory to ``device`` need no wait."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type != "mps"  # torch does not pin memory for Apple's GPU


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device``. The host does not wait for a copy from the CPU, if memory can be page-locked for the device."""
    is_pinned = tensor.device.type == "cpu" and is_pinned_for(device)
    return tensor.pin_memory().to(device, non_blocking=True) if is_pinned else tensor.to(device)
