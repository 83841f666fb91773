"""The memory plan of a run: the size of parameters, gradients and optimizer states in each of its processes.

The sizes are counted, and this machine need not have the devices. The network of the run is copied without its numbers, to
torch's device ``meta``. With sharding, it is sharded as on rank 0, in a fake process group that sends nothing. Then the
optimizer of the run makes two steps, and the bytes of all tensors are summed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.swa_utils import AveragedModel

from minitx.config import ConfigError, Part, RunConfig, TrainerConfig
from minitx.config.schema import first_line, require
from minitx.config.training import LOADING
from minitx.data.datamodule import DataModule
from minitx.data.seeding import kept_generators
from minitx.data.task import Task
from minitx.nn.transfer import tensors_in
from minitx.training.checkpoint_callbacks import check_whole_weights
from minitx.training.devices import check_accelerator, cpu_precision, device_of
from minitx.training.fit import build_all, log_on_rank_zero
from minitx.training.net import Net
from minitx.training.network_building import build_network
from minitx.training.optimizers import build_optimizer, check_strategy, describe_decay, freeze
from minitx.training.processes import local_parts
from minitx.training.run import check_evaluation, open_parts, with_objects
from minitx.training.sharding import layers_to_shard, parallelize
from minitx.training.summary import describe_part
from minitx.training.trainer import quiet_lightning


def show_plan(
    config: RunConfig,
    *,
    model: nn.Module | None = None,
    data: Task | L.LightningDataModule | None = None,
    batch_size: int = LOADING["batch_size"][1],
) -> dict[str, int]:
    """Log the memory plan of the run that ``train`` would make of these arguments, and return its bytes by name."""
    config = with_objects(config, batch_size, model=model, data=data)
    options = config.trainer
    check_accelerator(options.accelerator)
    is_sharded = options.strategy == "sharded"
    count = options.world_size
    with quiet_lightning(), kept_generators(torch.device("cpu")):
        config, datamodule, network = open_parts(config, build_without_numbers)
        net = Net.of(network)
        check_evaluation(config, datamodule.task, net)
        callbacks = build_all(config.callbacks, "callbacks", L.Callback, folder=Path(), rows=datamodule, seed=config.seed)
        check_whole_weights(callbacks, is_sharded=is_sharded)
        freeze(network, config.optimizer)
        decay = describe_decay(build_optimizer(config.optimizer, network, head_dim=net.head_dim), network)
        plan = make_plan(network, config.optimizer, options, [*callbacks.values()])
    processes = f"{count} processes, {'sharded' if is_sharded else 'ddp'}" if count > 1 else "one process"
    gathered = ", layers that FSDP gathers for their computation" if is_sharded else ""
    lines = {
        "model": net.describe(),
        "training": " · ".join(filter(None, (describe_part(config.optimizer), decay))),
        "plan": f"{processes}, {precision_of(options)}; each process holds{' at most' if is_sharded else ''}",
        "": plan.table(),
        "excludes": f"activations (they grow with the rows of a micro-batch){gathered}, and the memory of the device's libraries",
    }
    log_on_rank_zero("\n".join(f"{name:9}  {line}" if name else line for name, line in lines.items()))
    return vars(plan)


@dataclass(frozen=True)
class Plan:
    """Number of bytes that a process holds during training. With sharding, these are the numbers of rank 0, the largest of all ranks.

    Attributes:
        parameters: the parameters, trained or frozen.
        buffers: the buffers. They are not sharded.
        gradients: the gradients of the trained parameters.
        optimizer_states: the states of the optimizer.
        averaged_weights: the copies that weight-averaging callbacks keep.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_states: int
    averaged_weights: int

    @property
    def total(self) -> int:
        """The total number of bytes."""
        return sum(vars(self).values())

    def table(self) -> str:
        """Return a table of the nonzero sizes and their sum.

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


def make_plan(network: nn.Module, optimizer: Part, options: TrainerConfig, callbacks: Sequence[L.Callback] = ()) -> Plan:
    """Return the memory plan of a run.

    Args:
        network: the network of the run. It is copied without its numbers.
        optimizer: the optimizer of the run.
        options: the options of the trainer.
        callbacks: the callbacks of the run. Lightning's ``WeightAveraging`` keeps a copy of the weights.

    Raises:
        ConfigError: the layers that FSDP shards are unknown, or the optimizer cannot be built or cannot make a step.
    """
    network = without_numbers(network)
    # Lightning copies the network before converting it
    copies = [AveragedModel(network) for callback in callbacks if isinstance(callback, WeightAveraging)]
    if precision_of(options) == "bf16-true":
        network.to(torch.bfloat16)
    if options.strategy != "sharded":
        return _plan_of(network, optimizer, options.strategy, copies)
    layers = layers_to_shard(Net.of(network).network, options.shard)
    with fake_processes(options.world_size) as mesh:
        parallelize(network, mesh, layers)
        return _plan_of(network, optimizer, options.strategy, copies)


def _plan_of(network: nn.Module, optimizer: Part, strategy: str, copies: Sequence[nn.Module]) -> Plan:
    states = optimizer_states(network, optimizer, strategy)
    return Plan(
        parameters=size_of(network.parameters()),
        buffers=size_of(network.buffers()),
        gradients=size_of(parameter for parameter in network.parameters() if parameter.requires_grad),
        optimizer_states=size_of(states),
        averaged_weights=sum(size_of([*average.parameters(), *average.buffers()]) for average in copies),
    )


def optimizer_states(network: nn.Module, part: Part, strategy: str) -> list[Tensor]:
    """Return the tensors in the states of an optimizer after two steps. ``network`` is on the device ``meta``.

    Some optimizers read numbers (Adafactor reads the norm of a weight). For these, the shard of this process is moved to the
    CPU.

    Raises:
        ConfigError: the optimizer cannot be built, cannot train with ``strategy``, or has states that grow from step to step.
    """
    try:
        states = _states(network, part, strategy)
    except RuntimeError:
        network.zero_grad(set_to_none=True)  # on the device of the old weights
        network.to_empty(device="cpu")
        for parameter in network.parameters():
            nn.init.zeros_(parameter)
        try:
            states = _states(network, part, strategy)
        except RuntimeError as error:
            where = f"with trainer.strategy={strategy}"
            raise ConfigError(f"optimizer: {part.name} cannot make a step {where}: {first_line(error)}") from error
    first, second = states
    require(
        size_of(first) == size_of(second),
        f"optimizer: the states of {part.name} grow from step to step, so trainer.plan=true cannot count them",
    )
    return second


def _states(network: nn.Module, part: Part, strategy: str) -> list[list[Tensor]]:
    """Return the tensors in the states of an optimizer after the first and after the second step."""
    optimizer = build_optimizer(part, network, head_dim=Net.of(network).head_dim)
    check_strategy(optimizer, strategy)
    for group in optimizer.param_groups:
        if group.get("fused"):  # not fused: the states are the same, but a fused kernel needs a real device
            group["fused"] = False
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    loss = torch.zeros(())

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


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the number of bytes of this process's shards of ``tensors``, counting each tensor once."""
    return sum(part.nbytes for part in local_parts(list({id(tensor): tensor for tensor in tensors}.values())))


def precision_of(options: TrainerConfig) -> str:
    """Return the precision of a run on its devices. This machine need not have them."""
    on_cpu = options.accelerator == "cpu" or (options.accelerator == "auto" and device_of().type == "cpu")
    return cpu_precision(options.precision) if on_cpu else options.precision


def build_without_numbers(part: Part, data: DataModule, precision: str = "32-true") -> nn.Module:
    """Return the network of a run on the device ``meta``. For the arguments, see ``build_network``.

    A network that cannot be built on ``meta``, because its constructor reads numbers or files, is built on the CPU and copied.

    Raises:
        ConfigError: the model cannot be built, or does not match the data.
    """
    if part.is_object:  # do not change the object of the user
        part = Part.of_object(without_numbers(part.build()), "model")
    try:
        with torch.device("meta"):
            network = build_network(part, data, precision)
    except Exception:
        network = build_network(part, data, precision)
    return without_numbers(network)


def without_numbers(network: nn.Module) -> nn.Module:
    """Return a copy of a network whose parameters and buffers are on the device ``meta``, without copying their numbers.

    >>> copied = without_numbers(nn.Linear(2, 3))
    >>> copied.weight.device, copied.weight.shape, copied.weight.requires_grad
    (device(type='meta'), torch.Size([3, 2]), True)
    """
    memo: dict[int, Any] = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in network.buffers()}
    for parameter in network.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    return copy.deepcopy(network, memo)


@contextmanager
def fake_processes(count: int, rank: int = 0) -> Iterator[DeviceMesh]:
    """A context that makes this process rank ``rank`` of ``count``. The other ranks do not exist, so sums over processes are wrong.

    Raises:
        ConfigError: this process already has a process group.
    """
    if torch.distributed.is_initialized():
        raise ConfigError("trainer.plan=true does not work in a process that already has a torch.distributed process group")
    torch.distributed.init_process_group("fake", rank=rank, world_size=count)  # FSDP needs a process group
    try:
        yield init_device_mesh("cpu", (count,), mesh_dim_names=("data_parallel",))
    finally:
        torch.distributed.destroy_process_group()
