"""Several devices: Lightning strategies, FSDP2, tensor parallelism, and sums over ranks. The models contain no code for this.

Data-parallel ranks see different rows. The ranks of a tensor-parallel group see the same rows and have different heads and
hidden units. Anything that is counted per row must therefore be summed over the data-parallel ranks only (``replicas``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from minitx.nn.attention import MultiHeadAttention
from minitx.nn.blocks import Block
from minitx.nn.feedforward import FeedForward
from minitx.training.checkpoint import read_checkpoint, seal_folder
from minitx.training.shards import by_name, by_number, load_shards, read_extra

DATA, TENSOR = "data_parallel", "tensor_parallel"


class Sharded(ModelParallelStrategy):
    """Lightning's strategy for FSDP2 and tensor parallelism. Its checkpoints and those of one device can be exchanged.

    A folder of shards is replaced as a whole, like a file. In a file, the optimizer's states are numbered in the order of the
    parameter groups, as in torch. Lightning uses the order of the module, which differs if there are several groups: the
    moments would then go to the wrong parameters.
    """

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        assert self.model is not None
        whole = not self._save_distributed_checkpoint
        state = get_optimizer_state_dict(
            self.model, _plain(optimizer), options=StateDictOptions(full_state_dict=whole, cpu_offload=True)
        )
        return by_number(state) if whole and state else state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if not self._save_distributed_checkpoint:
            if self.is_global_zero:  # Lightning would first remove a folder of shards that has this name
                self.checkpoint_io.save_checkpoint(checkpoint, filepath)
            return
        part = f"{filepath}.part"
        super().save_checkpoint(checkpoint, part, storage_options)
        self.barrier()  # every rank has written
        if self.is_global_zero:
            seal_folder(part, filepath)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file or a folder of shards into the sharded model and optimizers."""
        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            return self._load_shards(path)
        assert self.model is not None
        checkpoint = read_checkpoint(path)
        whole = StateDictOptions(full_state_dict=True)
        load_whole(self.model, checkpoint.pop("state_dict"))
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            names: Any = get_optimizer_state_dict(self.model, _plain(optimizer), options=whole)["param_groups"]
            set_optimizer_state_dict(self.model, _plain(optimizer), by_name(state, names), options=whole)
        return checkpoint

    def _load_shards(self, path: Path) -> dict[str, Any]:
        assert self.model is not None
        state: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        state |= {f"optimizer_{i}": get_optimizer_state_dict(self.model, _plain(o)) for i, o in enumerate(self.optimizers)}
        load_shards(state, path)
        set_model_state_dict(self.model, state["state_dict"])
        for i, optimizer in enumerate(self.optimizers):
            set_optimizer_state_dict(self.model, _plain(optimizer), state[f"optimizer_{i}"])
        return read_extra(path)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "_optimizer", optimizer)  # Lightning wraps it


def replicas(trainer: L.Trainer) -> tuple[int, int]:
    """Return (rank, number of ranks) among the ranks that see different rows: ``(0, 1)`` on one device."""
    place = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
    return int(place["rank"]), int(place["num_replicas"])


def sum_over_rows(trainer: L.Trainer, value: Tensor) -> Tensor:
    """Return the sum of a value over the rows of all ranks, on every rank. A tensor-parallel group counts once."""
    if trainer.world_size == 1:
        return value
    strategy = trainer.strategy
    group = strategy.device_mesh[DATA].get_group() if isinstance(strategy, Sharded) else None
    return strategy.reduce(value.clone(), group=group, reduce_op="sum")  # which works in place


def parallelize(network: nn.Module, mesh: DeviceMesh) -> None:
    """Shard ``network`` in place over ``mesh``, which has the axes ``data_parallel`` and ``tensor_parallel``.

    Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053, §3): each device has H / N heads of W_Q, W_K and W_V, the part of
    W_O for these heads, and F / N hidden units. There is one all-reduce after ``out_proj`` and one after ``down_proj``.
    Everything else is replicated. Then FSDP2 (Zhao et al. 2023, arXiv:2304.11277) shards every block and the rest over the
    data-parallel axis.
    """
    if mesh[TENSOR].size() > 1:
        _cut_heads(network, mesh[TENSOR])
    for block in [module for module in network.modules() if isinstance(module, Block)]:
        fully_shard(block, mesh=mesh[DATA])
    fully_shard(network, mesh=mesh[DATA])


def _cut_heads(network: nn.Module, mesh: DeviceMesh) -> None:
    tied = _tied_parameters(network)
    cut: set[nn.Module] = set()
    for module in network.modules():
        plan = _plan_of(module)
        for name, style in plan.items():
            cut.add(module.get_submodule(name))
            parallelize_module(module.get_submodule(name), mesh, style)
        if plan and isinstance(module, MultiHeadAttention):
            module.num_heads //= mesh.size()
            module.num_kv_heads //= mesh.size()
    for module in network.modules():
        if module not in cut and next(module.parameters(recurse=False), None) is not None:
            parallelize_module(module, mesh, Replicated())
    for owner, name, first_owner, first_name in tied:
        setattr(owner, name, getattr(first_owner, first_name))


def _plan_of(module: nn.Module) -> dict[str, ParallelStyle]:
    """How the projections of an attention or a feed-forward are cut; {} for any other module."""
    columns: tuple[str, ...]
    if isinstance(module, MultiHeadAttention):
        columns, row = ("q_proj", "k_proj", "v_proj"), "out_proj"
    elif isinstance(module, FeedForward):
        columns, row = ("up_proj",) if module.gate_proj is None else ("gate_proj", "up_proj"), "down_proj"
    else:
        return {}
    return {**{name: ColwiseParallel() for name in columns}, row: RowwiseParallel()}


def _tied_parameters(network: nn.Module) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """(module, name, first module, its name) of every parameter that an earlier module owns, too."""
    owners: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    tied = []
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in owners:
                tied.append((module, name, *owners[parameter]))
            else:
                owners[parameter] = (module, name)
    return tied


class Replicated(ParallelStyle):
    """A module that all devices of a tensor-parallel group run with the same input and the same weights."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()]) if isinstance(x, Tensor) else x for x in inputs)

        def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local() if isinstance(output, DTensor) else output

        return distribute_module(module, device_mesh, input_fn=enter, output_fn=leave)  # type: ignore[arg-type]


def set_gradient_sync(network: nn.Module, enabled: bool) -> None:
    """Make FSDP reduce gradients only after the last micro-batch of a step, like DDP. Its default is after every backward pass."""
    if isinstance(network, FSDPModule):
        network.set_requires_gradient_sync(enabled)


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the local part of each tensor."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients of the whole model, on every rank. DTensor sums over the ranks, once for all tensors with the same sharding."""
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        alike[gradient.placements if isinstance(gradient, DTensor) else None].append(gradient)
    norms = [torch.nn.utils.get_total_norm(group) for group in alike.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


@torch.no_grad()
def load_whole(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load whole tensors: each rank takes its part of every tensor. ``state`` is the same on all ranks. This is the inverse of ``whole_state``."""
    for name, own in network.state_dict().items():  # torch's set_model_state_dict passes over parameters that two modules share
        whole = state[name].to(own.device, own.dtype)
        cut = isinstance(own, DTensor)
        own.copy_(distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None) if cut else whole)


def whole_state(network: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with whole tensors on the CPU. This is a collective: all ranks must call it."""
    state = network.state_dict().items()
    return {name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu() for name, tensor in state}
