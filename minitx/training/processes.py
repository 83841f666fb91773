"""Sums over the processes of a run, and tensors with a shard in each process. Lightning is not imported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from minitx.training import kept_environment, local_rank

if TYPE_CHECKING:
    import lightning.pytorch as L
    from torch.distributed.tensor import DTensor


_OF_CLUSTERS = re.compile(r"(SLURM|TORCHELASTIC|JSM|LSB)_.*|(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE")


@contextmanager
def as_one_process() -> Iterator[int]:
    """A context that hides the other processes of a run from this one. Yields the number of this process on its machine.

    The environment variables of torchrun and Slurm are hidden, and Lightning lets this process write files.
    """
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    number, lightning = local_rank(), cast(Any, rank_zero_only)
    rank = lightning.rank
    with kept_environment(*filter(_OF_CLUSTERS.fullmatch, os.environ)):
        for name in filter(_OF_CLUSTERS.fullmatch, [*os.environ]):
            del os.environ[name]
        lightning.rank = 0
        try:
            yield number
        finally:
            lightning.rank = rank


def sum_over_processes(trainer: L.Trainer, value: Tensor) -> Tensor:
    """Return the sum of a value over all processes, on every process. This is a collective operation."""
    if trainer.world_size == 1:
        return value
    total = value.clone()  # not trainer.strategy.reduce, whose barrier makes the host wait for the device
    torch.distributed.all_reduce(total)
    return total


def largest_of_all(trainer: L.Trainer, *numbers: int) -> list[int]:
    """Return the largest of each number over all processes, on every process. This is a collective operation that waits for the device."""
    if trainer.world_size == 1:
        return [*numbers]
    largest = torch.tensor(numbers, device=trainer.strategy.root_device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return largest.tolist()


def set_gradient_sync(network: nn.Module, enabled: bool) -> None:
    """Make FSDP reduce gradients only after the last micro-batch of a step, as in DDP, instead of after every backward pass."""
    if set_sync := getattr(network, "set_requires_gradient_sync", None):  # an FSDPModule
        set_sync(enabled)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a ``DTensor``. The class is not imported, because that takes a second."""
    return hasattr(tensor, "full_tensor")


def _whole_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the local part of each tensor."""
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients of the whole model, on every process."""
    return _whole_tensor(torch.nn.utils.get_total_norm(gradients))


def whole_state(network: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with unsharded tensors on the CPU. This is a collective operation: all ranks must call it."""
    state = network.state_dict().items()
    return {name: _whole_tensor(tensor).cpu() for name, tensor in state}


def part_of(whole: Tensor, local: Tensor) -> Tensor:
    """Return this process's shard of ``whole``, with the sharding of ``local``."""
    if is_sharded(local):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(whole, local.device_mesh, local.placements, src_data_rank=None)
    return whole
