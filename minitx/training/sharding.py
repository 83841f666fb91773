"""What only runs of several processes need: the order of DDP's gradients, and FSDP2 with the checkpoints of a run on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from minitx.config.schema import require
from minitx.config.signatures import parameter_names
from minitx.nn.blocks import is_block
from minitx.nn.precision import widest_float
from minitx.training.checkpoint_files import read_checkpoint
from minitx.training.processes import part_of

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class _ExactMeans(Strategy):
    """Reduce whole numbers to their mean without rounding.

    Lightning rounds this mean down. It divides a metric that a callback logs with ``sync_dist=True`` by the mean number of rows.
    """

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        is_rounded = isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg")
        value = tensor.to(widest_float(tensor.device)) if is_rounded else tensor
        return super().reduce(value, group, reduce_op)  # type: ignore[safe-super]


class _Copies(_ExactMeans, DDPStrategy):
    """Lightning's strategy for DDP."""


def ddp(*, find_unused: bool) -> DDPStrategy:
    """Return the strategy for DDP, without Lightning's broadcast of buffers (``share_buffers``)."""
    # torch 2.13 has renamed this argument
    no_buffers = max(parameter_names(DistributedDataParallel) & {"forward_sync_buffers", "broadcast_buffers"})
    arguments: dict[str, Any] = {no_buffers: False, "find_unused_parameters": find_unused}
    return _Copies(gradient_as_bucket_view=True, **arguments)


class Sharded(_ExactMeans, ModelParallelStrategy):
    """Lightning's strategy for FSDP2, with one unsharded checkpoint that a run on one device can also read and write.

    As in torch, optimizer states are numbered in the order of the parameter groups. Lightning numbers them in the order of the
    module's parameters. With several groups the orders differ, and moments would be assigned to the wrong parameters.
    """

    def __init__(self, num_processes: int) -> None:
        super().__init__(data_parallel_size=num_processes, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        assert self.model is not None
        state = get_optimizer_state_dict(self.model, _torch_optimizer(optimizer), options=_WHOLE)
        return by_number(state) if state else state  # empty except on rank 0

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint into the sharded model and optimizers."""
        assert self.model is not None
        checkpoint = read_checkpoint(checkpoint_path)
        whole = StateDictOptions(full_state_dict=True)
        load_whole(self.model, checkpoint["state_dict"])
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if not state["state"]:  # SGD without momentum: set_optimizer_state_dict fails without tensors
                for group, stored in zip(_torch_optimizer(optimizer).param_groups, state["param_groups"], strict=True):
                    group.update({name: value for name, value in stored.items() if name != "params"})
                continue
            names: Any = get_optimizer_state_dict(self.model, _torch_optimizer(optimizer), options=whole)["param_groups"]
            set_optimizer_state_dict(self.model, _torch_optimizer(optimizer), by_name(state, names), options=whole)
        return checkpoint


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an optimizer's state from parameter names to numbers, counted from 0 through the groups as in torch."""
    return _renamed(state, {name: number for number, name in enumerate(_parameters_of(state["param_groups"]))})


def by_name(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Convert an optimizer's state from numbers to the parameter names in ``groups``. The inverse of ``by_number``."""
    return _renamed(state, dict(zip(_parameters_of(state["param_groups"]), _parameters_of(groups), strict=True)))


def _parameters_of(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [parameter for group in groups for parameter in group["params"]]


def _renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    groups = [{**group, "params": [names[old] for old in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[old]: moments for old, moments in state["state"].items()}, "param_groups": groups}


def _torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


@torch.no_grad()
def load_whole(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load unsharded tensors (the same on all processes). Each process copies its shard. The inverse of ``whole_state``."""
    for name, local in network.state_dict().items():  # torch's set_model_state_dict skips shared parameters
        local.copy_(part_of(state[name].to(local.device, local.dtype), local))


def layers_to_shard(network: nn.Module, classes: Sequence[str] = ()) -> list[nn.Module]:
    """Return the modules that FSDP shards one by one, innermost first: modules of ``classes``, by default the layers of the network.

    Raises:
        ConfigError: there are no such modules, or one shares a weight with another part of the network.
    """

    def is_layer(module: nn.Module) -> bool:
        kinds = {kind.__name__ for kind in type(module).__mro__}
        theirs = "GradientCheckpointingLayer" in kinds  # transformers' layers, without importing it here
        return type(module).__name__ in classes if classes else is_block(module) or theirs

    name = type(network).__name__
    layers = [module for module in network.modules() if is_layer(module)]
    missing = sorted(set(classes) - {type(module).__name__ for module in layers})
    require(not missing, f"trainer.shard={', '.join(missing[:1])} is not the class of any module of {name}")
    require(bool(layers), f"trainer.strategy=sharded does not know the layers of {name}: set trainer.shard=[CLASS]")
    _check_shared(network, layers, classes)
    return layers[::-1]


def _check_shared(network: nn.Module, layers: Sequence[nn.Module], classes: Sequence[str]) -> None:
    modules = network.named_modules(remove_duplicate=False)
    units = {"": network} | {path: module for path, module in modules if module in layers}
    homes: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for name, weight in network.named_parameters(remove_duplicate=False):
        unit = units[max((path for path in units if name.startswith(f"{path}.")), key=len, default="")]
        other, home = homes.setdefault(weight, (name, unit))
        require(
            unit is home, f"trainer.shard={[*classes]}: {other} and {name} are one weight, and must be in one module of these"
        )


def parallelize(network: nn.Module, mesh: DeviceMesh, layers: Sequence[nn.Module]) -> None:
    """Shard ``layers``, innermost first, and then the rest of ``network``, in place, with FSDP2 (Zhao et al. 2023, arXiv:2304.11277)."""
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)


@torch.no_grad()
def share_buffers(module: nn.Module) -> None:
    """Give every process the first one's buffers, as in a checkpoint. This is a collective operation.

    DDP's own broadcast is not used: it leaves out the step after a validation, although averages were exchanged with the weights there.
    """
    buffers = [*module.buffers()]
    if buffers:
        parts = [buffer.flatten().view(torch.uint8) for buffer in buffers]
        together = torch.cat(parts)
        torch.distributed.broadcast(together, src=0)
        for buffer, part in zip(buffers, together.split([len(part) for part in parts]), strict=True):
            buffer.copy_(part.clone().view(buffer.dtype).view_as(buffer))  # a copy, because a view must be aligned


def check_same(trainer: L.Trainer, name: str, value: Any, remedy: str) -> None:
    """Check that a value, or the number in a tensor, is the same in all processes. This is a collective operation.

    Raises:
        ConfigError: it differs. Every process raises the error.
    """
    text = str(value.item() if isinstance(value, Tensor) else value)
    differs = trainer.strategy.reduce_boolean_decision(trainer.strategy.broadcast(text) != text, all=False)
    require(not differs, f"{name} differs between the processes: {remedy}")


def fix_buckets(model: nn.Module | None) -> None:
    """Let DDP keep gradients in the reverse order of the parameters, from the first step of this process on.

    By default, DDP has this order in the first step of a process, and then the order of gradients as they became ready. A gradient's place
    in a bucket decides the order of the sum over three processes or more. A resumed run would therefore differ by rounding.
    """
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters:  # which has one order
        return
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    model.reducer.prepare_for_backward([])  # DDP calls it after a forward pass
    for weight in reversed(weights):
        weight.view_as(weight).backward(torch.zeros_like(weight))
    for weight in weights:
        weight.grad = None
