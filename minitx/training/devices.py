"""The devices of a run: hardware of this machine, faster products on CPUs, and sums over processes. Lightning is not imported."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
import resource
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from minitx.config import ConfigError, TrainerConfig
from minitx.config.schema import check_choice, require
from minitx.data.seeding import kept_generators
from minitx.nn.precision import widest_float
from minitx.training import kept_environment, local_rank

if TYPE_CHECKING:
    import lightning.pytorch as L
    from torch.distributed.tensor import DTensor

log = logging.getLogger(__name__)


# --- hardware

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""Dense bfloat16 TFLOP/s from NVIDIA's data sheets, by a part of the device name. The first match is used."""


def check_count(options: TrainerConfig) -> torch.device:
    """Check that this machine has the devices of the config, and return the first of them.

    Raises:
        ConfigError: the accelerator is not registered, there are fewer devices than required, or ``trainer.precision`` is
            ``64-true`` and the device does not support float64.
    """
    accelerator = options.accelerator
    if accelerator in _BUILT_IN:
        count, limit = count_devices(accelerator, torch.cuda.device_count(), torch.backends.mps.is_available())
    else:
        registered = _registered(accelerator)
        count = limit = registered.auto_device_count() if registered.is_available() else 0
    kind = "GPUs" if accelerator in _BUILT_IN else f"devices of {accelerator}"
    require(
        options.devices <= limit,
        f"trainer.accelerator={accelerator} with trainer.devices={options.devices}: this machine has {count} usable {kind}; "
        "to run the processes on the CPU, set trainer.accelerator=cpu",
    )
    device = device_of(accelerator)
    if options.precision == "64-true" and widest_float(device) != torch.float64:
        raise ConfigError(
            f"trainer.precision=64-true: {device_name(device)} does not support float64: set trainer.accelerator=cpu"
        )
    return device


def count_devices(accelerator: str, num_cuda: int, has_mps: bool) -> tuple[int, float]:
    """Return the number of GPUs that ``trainer.accelerator`` can use, and the upper limit of ``trainer.devices``.

    Args:
        accelerator: ``auto``, ``cpu``, ``gpu`` or ``mps``.
        num_cuda: number of CUDA devices.
        has_mps: whether the machine has an Apple GPU.

    >>> count_devices("gpu", 2, False), count_devices("auto", 0, False), count_devices("cpu", 2, False)
    ((2, 2), (0, 1), (2, inf))
    """
    count = int(has_mps) if accelerator == "mps" else num_cuda or int(has_mps)
    return count, {"cpu": math.inf, "auto": max(count, 1)}.get(accelerator, count)


def kind_of_device(accelerator: str, num_cuda: int, has_mps: bool) -> str:
    """Return the type of device that a run uses, in Lightning's order of preference. For the arguments, see ``count_devices``.

    >>> [kind_of_device("auto", num_cuda, has_mps) for num_cuda, has_mps in ((0, False), (1, False), (1, True))]
    ['cpu', 'cuda', 'mps']
    """
    if accelerator == "cpu":
        return "cpu"
    return "mps" if has_mps else "cuda" if num_cuda else "cpu"


def device_of(accelerator: str = "auto", number: int = 0) -> torch.device:
    """Return a device for ``trainer.accelerator`` on this machine. Programs with ``device=auto`` use the first.

    Args:
        accelerator: ``auto`` is an Apple GPU, else CUDA, else the CPU, in Lightning's order. Names other than ``cpu``, ``gpu``
            and ``mps`` are looked up in Lightning's registry of accelerators.
        number: the number of this process on this machine. A process that sees fewer devices counts from the first again.
    """
    if accelerator not in _BUILT_IN:
        registered = _registered(accelerator)
        devices = registered.get_parallel_devices(registered.parse_devices(number + 1))
        return devices[number]
    kind = kind_of_device(accelerator, torch.cuda.device_count(), torch.backends.mps.is_available())
    if kind == "cuda":
        return torch.device(kind, number % torch.cuda.device_count())
    return torch.device(kind) if kind == "cpu" else torch.device(kind, 0)


_BUILT_IN = ("auto", "cpu", "gpu", "mps")

_OF_LIGHTNING = ("cpu", "cuda", "mps", "tpu")
"""Accelerators that Lightning itself registers. Here ``gpu`` stands for CUDA. TPUs are not supported, because they need their own strategy."""


def check_accelerator(accelerator: str) -> None:
    """Check a value of ``trainer.accelerator``. This machine need not have such a device.

    Raises:
        ConfigError: nobody has registered an accelerator of this name.
    """
    if accelerator not in _BUILT_IN:
        _registered(accelerator)


def _registered(accelerator: str) -> Any:
    """Return an accelerator that a plugin has registered with Lightning."""
    from lightning.pytorch.accelerators import AcceleratorRegistry

    names = AcceleratorRegistry.available_accelerators() - {*_OF_LIGHTNING}
    check_choice("trainer.accelerator", accelerator, (*_BUILT_IN, *sorted(names)))
    return AcceleratorRegistry.get(accelerator)


@cache
def cpu_precision(precision: str) -> str:
    """Return the precision to use on this CPU for ``trainer.precision``.

    bfloat16 is used if the processor has instructions for it (AMX, AVX-512 BF16, or Arm's). On other processors torch emulates
    it, which is many times slower than float32, so float32 is used instead, with a line in the log. The choice does not depend
    on timings: equal processors give equal results.
    """
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # missing in torch 2.10
    if not precision.startswith("bf16") or any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16")):
        return precision
    log.info("trainer.precision=%s runs as 32-true: this CPU has no instructions for bfloat16", precision)
    return "32-true"


def device_name(device: torch.device) -> str:
    """Return the name of a device, such as ``NVIDIA H100 PCIe``, or its type (``CPU``, ``MPS``) if torch has no name for it."""
    get_name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return get_name(device) if get_name else device.type.upper()


def peak_tflops(device: torch.device) -> float | None:
    """Return the dense bfloat16 peak of a device in TFLOP/s from ``PEAK_TFLOPS``, or None if it is unknown, as for a CPU."""
    return peak_of(device_name(device))


def peak_of(name: str) -> float | None:
    """Return ``peak_tflops`` of a device with this name.

    >>> peak_of("NVIDIA H100 PCIe"), peak_of("NVIDIA H100 80GB HBM3"), peak_of("CPU")
    (756.0, 989.0, None)
    """
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def memory_mb(device: torch.device) -> float:
    """Return the largest memory use of this process so far, in MiB.

    On devices whose torch module counts allocations (CUDA, XPU), this is the peak memory of tensors; on an Apple GPU, the
    current memory of the driver; elsewhere, the peak resident set size of the process.
    """
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "max_memory_allocated"):
        return module.max_memory_allocated(device) / 2**20
    if hasattr(module, "driver_allocated_memory"):
        return module.driver_allocated_memory() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


# --- CPUs: faster matrix products on AMD processors, and reuse of freed memory

LARGE = 2**21
"""Products with at least this number of multiplications use oneDNN. For smaller products, the overhead exceeds the gain."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

_setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]

_active = False

_library: torch.library.Library | None = None
"""The functions around torch's kernels, while there are any. Each costs a small product 2 µs."""


@contextmanager
def onednn_products(enabled: bool = True) -> Iterator[bool]:
    """A context that lets oneDNN compute large float32 matrix products on AMD processors with AVX-512. Yields whether it does.

    On a CPU, torch computes float32 products with Intel's MKL. On AMD processors, MKL uses only AVX2. oneDNN is also part of
    torch, and uses AVX-512. It is about twice as fast on Zen 5, and a tenth faster on Zen 4 (``docs/dev/decisions.md`` has the
    numbers). The results differ from MKL's by rounding. On other processors, for other dtypes, or if
    ``torch.backends.mkldnn.matmul.fp32_precision`` is set, this context has no effect.

    torch calls oneDNN for float32 products only if this setting is ``bf16``. This *allows* rounding to bfloat16. Processors
    without AMX do not round; one product is compared with float64 before the first use. The setting is changed for one product
    at a time, because it slows down attention on a CPU.

    Args:
        enabled: whether to use oneDNN. False restores torch's own kernels within another such context.

    >>> with onednn_products() as faster:
    ...     product = torch.randn(128, 128) @ torch.randn(128, 128)
    """
    global _active, _library
    before, _active = _active, enabled and _is_faster() and _setting.fp32_precision == "none"
    replaces = _active and _library is None
    if replaces:
        _library = _replaced_kernels()
    try:
        yield _active
    finally:
        _active = before
        if replaces:
            _library = None  # the last reference: torch's own kernels are back


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep up to 1 GiB of freed memory in this process, and return whether this succeeded.

    By default, glibc returns large blocks to the system as soon as they are freed. Each training step allocates the same blocks
    again, and the system clears their pages. In a small model, this takes a sixth of a step. Blocks of 32 MiB and more are
    still returned. Other C libraries are not changed. ``man 3 mallopt`` describes both settings.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_TRIM_THRESHOLD, 2**30) and mallopt(_M_MMAP_THRESHOLD, 2**25))


@cache
def _is_faster() -> bool:
    """Whether MKL is slow on this processor, and oneDNN is equally accurate."""
    cpuinfo = Path("/proc/cpuinfo")
    is_amd = cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text(errors="replace")
    has_parts = torch.backends.mkldnn.is_available() and hasattr(torch.library, "get_kernel")
    return is_amd and has_parts and torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_exact()


def _is_exact() -> bool:
    """Whether oneDNN computes in float32 even if it is allowed to use bfloat16."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(128, 128, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    error = (left @ right - exact).abs().max()
    with _onednn():
        return bool((left @ right - exact).abs().max() <= 4 * error)


@contextmanager
def _onednn() -> Iterator[None]:
    _setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        _setting.fp32_precision = "none"


def _replaced_kernels() -> torch.library.Library:
    """Replace torch's kernels for as long as the result is referred to."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that a kernel is replaced
        for name, first in {"mm": 0, "mm.out": 0, "addmm": 1, "addmm.out": 1}.items():
            _replace_kernel(library, name, first)
    return library


def _replace_kernel(library: torch.library.Library, name: str, first: int) -> None:
    """Wrap a kernel of torch. ``first`` and ``first + 1`` are the indices of the two factors among its arguments."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(keys: Any, *args: Any, **options: Any) -> Any:
        left, right = args[first], args[first + 1]
        rows = left.shape[0]
        if not _active or left.dtype is not torch.float32 or rows == 1 or rows * left.shape[1] * right.shape[1] < LARGE:
            return kernel.call_boxed(keys, *args, **options)
        _setting.fp32_precision = "bf16"
        try:
            return kernel.call_boxed(keys, *args, **options)
        finally:
            _setting.fp32_precision = "none"

    library.impl(name, product, "CPU", with_keyset=True)


@contextmanager
def flush_denormal(enabled: bool = True) -> Iterator[None]:
    """A context that makes this processor round float32 numbers below 1.2e-38 to 0. The setting is restored afterwards.

    Such numbers are slow: some processors need a hundred cycles for each. A softmax that is nearly one-hot produces many of
    them in its backward pass. There is no effect on a GPU, or on a processor that does not support it
    (``torch.set_flush_denormal``).

    >>> with flush_denormal():
    ...     print(torch.tensor(1e-39) * 1)
    tensor(0.)
    """
    changed = enabled and bool(torch.tensor([1e-39]) * 1 != 0) and torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if changed:
            torch.set_flush_denormal(False)


@contextmanager
def machine(options: TrainerConfig) -> Iterator[None]:
    """A context that checks the devices of a run and configures this process for them.

    At its end, it restores the settings that a run changes for the whole process: threads, the choice of kernels, random
    generators and environment variables. Two settings are not restored: ``keep_freed_memory``, and Lightning's variables for
    the processes of several devices, because these processes live until the program ends.

    Raises:
        ConfigError: see ``check_count``.
    """
    device = check_count(options)
    on_cpu = device.type == "cpu"
    threads, is_exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only, benchmark = torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.cudnn.benchmark
    with kept_environment(*_VARIABLES), kept_generators(device):
        if options.threads is not None:
            torch.set_num_threads(options.threads)
            os.environ["OMP_NUM_THREADS"] = str(options.threads)  # otherwise Lightning's launcher of processes chooses a number
        if on_cpu:
            keep_freed_memory()
        try:
            with onednn_products(on_cpu), flush_denormal(options.flush_denormal and on_cpu):
                yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(is_exact, warn_only=warn_only)  # Lightning's Trainer sets this and the next
            torch.backends.cudnn.benchmark = benchmark


_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS")
"""Environment variables that Lightning sets, for deterministic kernels, for GPUs and for threads."""


# --- several processes

_OF_CLUSTERS = re.compile(r"(SLURM|TORCHELASTIC|JSM|LSB)_.*|(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE")


@contextmanager
def as_one_process() -> Iterator[int]:
    """A context in which this process of a run knows of no others. Yields the number of this process on its machine.

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


def sum_over_rows(trainer: L.Trainer, value: Tensor) -> Tensor:
    """Return the sum of a value over the rows of all processes, on every process."""
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


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the local part of each tensor."""
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients of the whole model, on every process."""
    return _whole(torch.nn.utils.get_total_norm(gradients))


def whole_state(network: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with unsharded tensors on the CPU. This is a collective operation: all ranks must call it."""
    state = network.state_dict().items()
    return {name: _whole(tensor).cpu() for name, tensor in state}


def part_of(whole: Tensor, local: Tensor) -> Tensor:
    """Return this process's shard of ``whole``, with the sharding of ``local``."""
    if is_sharded(local):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(whole, local.device_mesh, local.placements, src_data_rank=None)
    return whole
