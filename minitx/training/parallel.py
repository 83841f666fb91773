"""Several devices: Lightning strategies, FSDP2, and sums over processes. The models contain no code for this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from minitx.nn.blocks import Block
from minitx.training.checkpoint import read_checkpoint

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Sharded(ModelParallelStrategy):
    """Lightning's strategy for FSDP2. It writes one whole checkpoint, which a run on one device can read, and the reverse.

    The optimizer's states are numbered in the order of the parameter groups, as in torch. Lightning uses the order of the
    module, which differs if there are several groups: the moments would then go to the wrong parameters.
    """

    def __init__(self, num_processes: int) -> None:
        super().__init__(data_parallel_size=num_processes, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        assert self.model is not None
        state = get_optimizer_state_dict(self.model, _plain(optimizer), options=_WHOLE)
        return by_number(state) if state else state  # only the first process has it

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint into the sharded model and optimizers."""
        assert self.model is not None
        checkpoint = read_checkpoint(self.broadcast(checkpoint_path))
        whole = StateDictOptions(full_state_dict=True)
        load_whole(self.model, checkpoint.pop("state_dict"))
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            names: Any = get_optimizer_state_dict(self.model, _plain(optimizer), options=whole)["param_groups"]
            set_optimizer_state_dict(self.model, _plain(optimizer), by_name(state, names), options=whole)
        return checkpoint


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an optimizer's state from parameter names to numbers, as in torch: counted through the groups, from 0."""
    return _renamed(state, {name: number for number, name in enumerate(_parameters(state["param_groups"]))})


def by_name(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The inverse of ``by_number``. ``groups`` contain the names."""
    return _renamed(state, dict(zip(_parameters(state["param_groups"]), _parameters(groups), strict=True)))


def _parameters(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [parameter for group in groups for parameter in group["params"]]


def _renamed(state: Mapping[str, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    groups = [{**group, "params": [new[old] for old in group["params"]]} for group in state["param_groups"]]
    return {"state": {new[old]: moments for old, moments in state["state"].items()}, "param_groups": groups}


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def sum_over_rows(trainer: L.Trainer, value: Tensor) -> Tensor:
    """Return the sum of a value over the rows of all processes, on every process."""
    if trainer.world_size == 1:
        return value
    return trainer.strategy.reduce(value.clone(), reduce_op="sum")  # which works in place


def parallelize(network: nn.Module, mesh: DeviceMesh) -> None:
    """Shard every block of ``network`` and the rest of it in place by FSDP2 (Zhao et al. 2023, arXiv:2304.11277)."""
    for block in [module for module in network.modules() if isinstance(module, Block)]:
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)


def set_gradient_sync(network: nn.Module, enabled: bool) -> None:
    """Make FSDP reduce gradients only after the last micro-batch of a step, like DDP. Its default is after every backward pass."""
    if isinstance(network, FSDPModule):
        network.set_requires_gradient_sync(enabled)


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the local part of each tensor."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients of the whole model, on every process."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def load_whole(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load whole tensors: each process takes its part of every tensor. ``state`` is the same on all processes. This is the inverse of ``whole_state``."""
    for name, own in network.state_dict().items():  # torch's set_model_state_dict passes over parameters that two modules share
        whole = state[name].to(own.device, own.dtype)
        cut = isinstance(own, DTensor)
        own.copy_(distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None) if cut else whole)


def whole_state(network: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with whole tensors on the CPU. This is a collective: all ranks must call it."""
    state = network.state_dict().items()
    return {name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu() for name, tensor in state}
