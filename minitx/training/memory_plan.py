"""The plan of a run: what each of its processes will hold of parameters, gradients and optimizer states.

Nothing is looked up in a table, and none of the devices is needed. The network of the run is copied without its numbers, to torch's
device ``meta``. With sharding, the first process takes its part of it, in a process group that sends nothing. The optimizer of the run
then makes two steps, and the tensors are counted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.swa_utils import AveragedModel

from minitx.config import ConfigError, Part, RunConfig, TrainerConfig
from minitx.config.schema import first_line, require
from minitx.data.datamodule import DataModule
from minitx.training.devices import cpu_precision, device_of, local_parts, parallelize
from minitx.training.net import Net, build_network
from minitx.training.optimizers import build_optimizer, check_strategy


@dataclass(frozen=True)
class Plan:
    """Bytes that a process holds from its first step to its last. With sharding, the first process holds the most, and the plan is its.

    Attributes:
        parameters: the parameters, trained or frozen.
        buffers: the buffers, whole on every process.
        gradients: the gradients of the trained parameters.
        optimizer_states: the states of the optimizer.
        averaged_weights: the copies of callbacks that average the weights.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_states: int
    averaged_weights: int

    @property
    def total(self) -> int:
        """The sum."""
        return sum(vars(self).values())

    def table(self) -> str:
        """Return the rows that are not zero, and their sum.

        >>> print(Plan(2**30, 0, 2**29, 2**31, 0).table())
        parameters          1,073,741,824 bytes       1.00 GiB
        gradients             536,870,912 bytes     512.00 MiB
        optimizer states    2,147,483,648 bytes       2.00 GiB
        together            3,758,096,384 bytes       3.50 GiB
        """
        rows = {name.replace("_", " "): size for name, size in vars(self).items() if size} | {"together": self.total}
        return "\n".join(f"{name:16}{size:>17,} bytes  {_in_units(size):>13}" for name, size in rows.items())


def _in_units(size: int) -> str:
    power = min(3, max(0, size.bit_length() - 1) // 10)
    return f"{size / 2 ** (10 * power):.2f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def make_plan(config: RunConfig, network: nn.Module, callbacks: Sequence[L.Callback] = ()) -> Plan:
    """Return the plan of a run.

    Args:
        config: the config of the run.
        network: the network of the run. It is copied without its numbers.
        callbacks: callbacks of the run. Those of Lightning that average weights keep a copy of them.

    Raises:
        ConfigError: the layers that FSDP shards are not known, or the optimizer cannot be built or takes no step.
    """
    options, network = config.trainer, without_numbers(network)
    # Lightning copies the network before it converts it
    copies = [AveragedModel(network) for callback in callbacks if isinstance(callback, WeightAveraging)]
    if precision_of(options) == "bf16-true":
        network.to(torch.bfloat16)
    if options.strategy != "sharded":
        return _plan_of(network, config, copies)
    layers = Net.of(network).layers(options.shard)
    with imagined_processes(options.world_size) as mesh:
        parallelize(network, mesh, layers)
        return _plan_of(network, config, copies)


def _plan_of(network: nn.Module, config: RunConfig, copies: Sequence[nn.Module]) -> Plan:
    states = optimizer_states(network, config.optimizer, config.trainer.strategy)
    return Plan(
        parameters=size_of(network.parameters()),
        buffers=size_of(network.buffers()),
        gradients=size_of(parameter for parameter in network.parameters() if parameter.requires_grad),
        optimizer_states=size_of(states),
        averaged_weights=sum(size_of([*average.parameters(), *average.buffers()]) for average in copies),
    )


def optimizer_states(network: nn.Module, part: Part, strategy: str) -> list[Tensor]:
    """Return the tensors in the states of an optimizer after two steps. ``network`` is on the device ``meta``.

    An optimizer that reads a number (Adafactor the norm of a weight) gets numbers, in the part of this process alone.

    Raises:
        ConfigError: the optimizer cannot be built, or cannot train with ``strategy``; or its states grow from step to step.
    """
    try:
        states = _states(network, part, strategy)
    except RuntimeError:
        network.zero_grad(set_to_none=True)  # on another device than the weights will be
        network.to_empty(device="cpu")
        for parameter in network.parameters():
            nn.init.zeros_(parameter)
        try:
            states = _states(network, part, strategy)
        except RuntimeError as error:
            where = f"with trainer.strategy={strategy}"
            raise ConfigError(f"optimizer: {part.name} makes no step {where}: {first_line(error)}") from error
    first, second = states
    require(
        size_of(first) == size_of(second), f"optimizer: the states of {part.name} grow from step to step: they have no plan"
    )
    return second


def _states(network: nn.Module, part: Part, strategy: str) -> list[list[Tensor]]:
    """The tensors in the states of an optimizer after the first step and after the second."""
    optimizer = build_optimizer(part, network, head_dim=Net.of(network).head_dim)
    check_strategy(optimizer, strategy)
    for group in optimizer.param_groups:
        if group.get("fused"):  # a fused kernel has the same states, and needs a real device
            group["fused"] = False
    trained, loss = [parameter for parameter in network.parameters() if parameter.requires_grad], torch.zeros(())

    def closure() -> Any:
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad * 0.5
        return loss

    states = []
    for _ in range(2):
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(closure)
        states.append(list(tensors_in(list(optimizer.state.values()))))
    return states


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists and dicts.

    >>> [tensor.shape[0] for tensor in tensors_in({"a": [torch.zeros(2)], "b": 3.0, "c": torch.zeros(5)})]
    [2, 5]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(entry)


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of this process's parts of ``tensors``, each tensor once."""
    return sum(part.nbytes for part in local_parts(list({id(tensor): tensor for tensor in tensors}.values())))


def precision_of(options: TrainerConfig) -> str:
    """Return the precision that a run has on its devices. This machine need not have them."""
    on_cpu = options.accelerator == "cpu" or (options.accelerator == "auto" and device_of().type == "cpu")
    return cpu_precision(options.precision) if on_cpu else options.precision


def build_without_numbers(config: RunConfig, data: DataModule) -> nn.Module:
    """Return the network of a run on the device ``meta``.

    A network that reads its own numbers or files while it is built is built on the CPU, and copied without its numbers.

    Raises:
        ConfigError: the model cannot be built, or does not fit the data.
    """
    part, precision = config.model, config.trainer.precision
    if part.is_given:  # the object is not changed
        part = Part.given(without_numbers(part.build()), "model")
    try:
        with torch.device("meta"):
            network = build_network(part, data, precision=precision, seed=config.seed)
    except Exception:
        network = build_network(part, data, precision=precision, seed=config.seed)
    return without_numbers(network)


def without_numbers(network: nn.Module) -> nn.Module:
    """Return a copy of a network whose parameters and buffers are on the device ``meta``. Nothing of their size is copied.

    >>> copied = without_numbers(nn.Linear(2, 3))
    >>> copied.weight.device, copied.weight.shape, copied.weight.requires_grad
    (device(type='meta'), torch.Size([3, 2]), True)
    """
    memo: dict[int, Any] = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in network.buffers()}
    for parameter in network.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    return copy.deepcopy(network, memo)


@contextmanager
def imagined_processes(count: int, rank: int = 0) -> Iterator[DeviceMesh]:
    """A context that makes this process one of ``count``. The others do not exist: nothing is sent, so sums over processes are wrong.

    Raises:
        ConfigError: this process belongs to a group of processes already.
    """
    # torch has no public name for this group. FSDP needs a group to shard.
    import torch.testing._internal.distributed.fake_pg

    is_free = not torch.distributed.is_initialized()
    require(is_free, "trainer.plan=true needs a program that has no torch.distributed process group")
    torch.distributed.init_process_group("fake", rank=rank, world_size=count, store=torch.distributed.HashStore())
    try:
        yield init_device_mesh("cpu", (count,), mesh_dim_names=("data_parallel",))
    finally:
        torch.distributed.destroy_process_group()
