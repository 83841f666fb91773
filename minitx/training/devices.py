"""The devices of a run: what this machine has, faster products on CPUs, and sums over several processes. Lightning is not imported."""

from __future__ import annotations

import ctypes
import logging
import math
import resource
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from minitx.config import ConfigError, TrainerConfig
from minitx.config.schema import check_choice, require
from minitx.data.task import kept_generators
from minitx.nn.precision import widest_float
from minitx.training import kept_environment

if TYPE_CHECKING:
    import lightning.pytorch as L
    from torch.distributed.device_mesh import DeviceMesh
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
"""Dense bfloat16 TFLOP/s from NVIDIA's data sheets, by a part of the device's name. The first match counts."""


def check_count(options: TrainerConfig) -> None:
    """Check that this machine has the devices.

    Raises:
        ConfigError: nobody has registered the accelerator, there are fewer devices than required, or the device has no float64 and
            ``trainer.precision`` is ``64-true``.
    """
    asked = options.accelerator
    if asked in _BUILT_IN:
        found, most = count_devices(asked, torch.cuda.device_count(), torch.backends.mps.is_available())
    else:
        registered = _registered(asked)
        found = most = registered.auto_device_count() if registered.is_available() else 0
    kind = "GPUs" if asked in _BUILT_IN else f"devices of {asked}"
    require(
        options.devices <= most,
        f"trainer.accelerator={asked} with trainer.devices={options.devices}: this machine has {found} usable {kind}; "
        "trainer.accelerator=cpu runs as many processes on the CPU",
    )
    device = device_of(asked)
    if options.precision == "64-true" and widest_float(device) != torch.float64:
        raise ConfigError(f"trainer.precision=64-true: {device_name(device)} has no float64; set trainer.accelerator=cpu")


def count_devices(accelerator: str, num_cuda: int, has_mps: bool) -> tuple[int, float]:
    """Return the GPUs of a machine that ``trainer.accelerator`` takes, and the largest ``trainer.devices`` there.

    Args:
        accelerator: ``auto``, ``cpu``, ``gpu`` or ``mps``.
        num_cuda: CUDA's devices. has_mps: whether Apple's GPU is there.

    >>> count_devices("gpu", 2, False), count_devices("auto", 0, False), count_devices("cpu", 2, False)
    ((2, 2), (0, 1), (2, inf))
    """
    found = int(has_mps) if accelerator == "mps" else num_cuda or int(has_mps)
    return found, {"cpu": math.inf, "auto": max(found, 1)}.get(accelerator, found)


def kind_of_device(accelerator: str, num_cuda: int, has_mps: bool) -> str:
    """Return the kind of device that a run takes on a machine, in Lightning's order. For the arguments, see ``count_devices``.

    >>> [kind_of_device("auto", num_cuda, has_mps) for num_cuda, has_mps in ((0, False), (1, False), (1, True))]
    ['cpu', 'cuda', 'mps']
    """
    if accelerator == "cpu":
        return "cpu"
    return "mps" if has_mps else "cuda" if num_cuda else "cpu"


def device_of(accelerator: str = "auto") -> torch.device:
    """Return the first device that ``trainer.accelerator`` takes on this machine. Programs with ``device=auto`` take the same device.

    Args:
        accelerator: ``auto`` takes Apple's GPU, else CUDA, else the CPU, in Lightning's order. Names other than ``cpu``, ``gpu`` and
            ``mps`` are looked up in Lightning's registry of accelerators.
    """
    if accelerator not in _BUILT_IN:
        registered = _registered(accelerator)
        return registered.get_parallel_devices(registered.parse_devices(1))[0]
    kind = kind_of_device(accelerator, torch.cuda.device_count(), torch.backends.mps.is_available())
    return torch.device(kind) if kind == "cpu" else torch.device(kind, 0)


_BUILT_IN = ("auto", "cpu", "gpu", "mps")

_OF_LIGHTNING = ("cpu", "cuda", "mps", "tpu")
"""What Lightning itself registers. ``gpu`` is the name of CUDA here, and TPUs need a strategy of their own."""


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

    bfloat16 is used if the processor has instructions for it (AMX, AVX-512 BF16, or Arm's). On others torch emulates it, many
    times slower than float32. float32 then replaces it, and a line of the log says so. Nothing is timed, so equal processors
    give equal results.
    """
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # newer than torch 2.10
    if not precision.startswith("bf16") or any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16")):
        return precision
    log.info("trainer.precision=%s runs as 32-true: this CPU has no instructions for bfloat16", precision)
    return "32-true"


def device_name(device: torch.device) -> str:
    """Return the name of a device, such as ``NVIDIA H100 PCIe``, or its type (``CPU``, ``MPS``) where torch knows no name."""
    get_name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return get_name(device) if get_name else device.type.upper()


def peak_tflops(device: torch.device) -> float | None:
    """Return the device's dense bfloat16 peak in TFLOP/s from ``PEAK_TFLOPS``, or None if it is unknown, as on a CPU."""
    return peak_of(device_name(device))


def peak_of(name: str) -> float | None:
    """Return ``peak_tflops`` of a device with this name.

    >>> peak_of("NVIDIA H100 PCIe"), peak_of("NVIDIA H100 80GB HBM3"), peak_of("CPU")
    (756.0, 989.0, None)
    """
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def memory_mb(device: torch.device) -> float:
    """Return the largest memory use of this process so far, in MiB.

    On a device whose torch module counts allocations (CUDA, XPU) this is the memory of tensors, on Apple's GPU the present memory of
    the driver, elsewhere the resident set of the process.
    """
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "max_memory_allocated"):
        return module.max_memory_allocated(device) / 2**20
    if hasattr(module, "driver_allocated_memory"):
        return module.driver_allocated_memory() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


# --- CPUs: faster matrix products on processors of AMD, and memory that is kept for the next step

LARGE = 2**21
"""Products of at least so many multiplications go to oneDNN; the call of a smaller one costs more than it saves."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

_setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]

_active = False

_library: torch.library.Library | None = None
"""The functions around torch's kernels, while there are any. Each costs a small product 2 µs."""


@contextmanager
def onednn_products(wanted: bool = True) -> Iterator[bool]:
    """While this lasts, oneDNN computes large float32 matrix products on AMD processors with AVX-512. Yields whether it does.

    torch computes float32 products on a CPU with Intel's MKL, and MKL uses only AVX2 on AMD processors. oneDNN, also a part of torch,
    uses AVX-512. It is about twice as fast on Zen 5, and a tenth faster on Zen 4 (512 bits in two halves;
    ``docs/dev/decisions.md`` has the figures). The results differ from MKL's by rounding. Nothing changes on other processors, for other types, after the block, or where
    ``torch.backends.mkldnn.matmul.fp32_precision`` was set.

    torch calls oneDNN for float32 products only while that setting is ``bf16``; this *allows* rounding to bfloat16. No processor
    without AMX does so; one product is compared with float64 before the first use. The setting holds for one product at a time,
    because attention on a CPU is slower under it.

    Args:
        wanted: False to use torch's own kernels while this lasts, inside a run, say.

    >>> with onednn_products() as faster:
    ...     product = torch.randn(128, 128) @ torch.randn(128, 128)
    """
    global _active, _library
    before, _active = _active, wanted and _is_faster() and _setting.fp32_precision == "none"
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
    """Let glibc keep up to 1 GiB of freed memory in this process, and return whether it will.

    By default glibc returns large blocks to the system as soon as they are free. A training step frees and takes the same blocks
    again, and the system has to clear each page of them: a sixth of a small model's step. Blocks of 32 MiB and more are given
    back as before. Nothing changes where the C library is another one. ``man 3 mallopt`` describes both settings.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_TRIM_THRESHOLD, 2**30) and mallopt(_M_MMAP_THRESHOLD, 2**25))


@cache
def _is_faster() -> bool:
    """Whether MKL is slow on this processor, and oneDNN is as exact."""
    cpuinfo = Path("/proc/cpuinfo")
    is_amd = cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text(errors="replace")
    has_parts = torch.backends.mkldnn.is_available() and hasattr(torch.library, "get_kernel")
    return is_amd and has_parts and torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_exact()


def _is_exact() -> bool:
    """Whether oneDNN keeps float32 where it is allowed to use bfloat16."""
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
        warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced
        for name, first in {"mm": 0, "mm.out": 0, "addmm": 1, "addmm.out": 1}.items():
            _replace_kernel(library, name, first)
    return library


def _replace_kernel(library: torch.library.Library, name: str, first: int) -> None:
    """Put a function around torch's kernel. Its factors are the arguments ``first`` and ``first + 1``."""
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
def flush_denormal(wanted: bool = True) -> Iterator[None]:
    """A context where this processor takes float32 numbers below 1.2e-38 for 0. The setting is restored afterwards.

    Such numbers are slow: some processors take a hundred cycles for each. A softmax that is nearly one-hot makes many of them in
    its backward pass. Nothing changes on a GPU, or on a processor that cannot do it (``torch.set_flush_denormal``).

    >>> with flush_denormal():
    ...     print(torch.tensor(1e-39) * 1)
    tensor(0.)
    """
    changed = wanted and bool(torch.tensor([1e-39]) * 1 != 0) and torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if changed:
            torch.set_flush_denormal(False)


@contextmanager
def machine(options: TrainerConfig) -> Iterator[None]:
    """A context that checks the devices of a run and sets this process up for them.

    It restores the settings that a run changes for the whole process: threads, the choice of kernels, random generators, and
    environment variables. Two settings stay: ``keep_freed_memory``, and Lightning's variables for the processes of several
    devices, because these processes live until the program ends.

    Raises:
        ConfigError: see ``check_count``.
    """
    check_count(options)
    device = device_of(options.accelerator)
    on_cpu = device.type == "cpu"
    threads, is_exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only, benchmark = torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.cudnn.benchmark
    with kept_environment(*_VARIABLES), kept_generators(device):
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        if on_cpu:
            keep_freed_memory()
        try:
            with onednn_products(on_cpu), flush_denormal(options.flush_denormal and on_cpu):
                yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(is_exact, warn_only=warn_only)  # Lightning's trainer sets it, and the next
            torch.backends.cudnn.benchmark = benchmark


_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER")
"""Environment variables that Lightning sets, for deterministic kernels and for GPUs."""


# --- several processes


def sum_over_rows(trainer: L.Trainer, value: Tensor) -> Tensor:
    """Return the sum of a value over the rows of all processes, on every process."""
    if trainer.world_size == 1:
        return value
    total = value.clone()  # trainer.strategy.reduce has a barrier before it, at which the host waits for the device
    torch.distributed.all_reduce(total)
    return total


def parallelize(network: nn.Module, mesh: DeviceMesh, layers: Sequence[nn.Module]) -> None:
    """Shard ``layers``, inner ones first, and the rest of ``network`` in place by FSDP2 (Zhao et al. 2023, arXiv:2304.11277)."""
    from torch.distributed.fsdp import fully_shard

    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)


def set_gradient_sync(network: nn.Module, enabled: bool) -> None:
    """Make FSDP reduce gradients only after the last micro-batch of a step, like DDP. Its default is after every backward pass."""
    if set_sync := getattr(network, "set_requires_gradient_sync", None):  # an FSDPModule
        set_sync(enabled)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether it is a ``DTensor``. Its class is not asked for: importing it takes a second, which an evaluation need not wait."""
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
    """Return the state dict with whole tensors on the CPU. This is a collective: all ranks must call it."""
    state = network.state_dict().items()
    return {name: _whole(tensor).cpu() for name, tensor in state}
