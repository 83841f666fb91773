"""The devices of a run: their number, type, name and peak speed, and the settings of this process. Lightning is not imported."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from minitx.config import ConfigError, TrainerConfig
from minitx.config.schema import check_choice, require
from minitx.data.seeding import kept_generators
from minitx.nn.precision import widest_float
from minitx.training import kept_environment
from minitx.training.onednn import onednn_products

log = logging.getLogger(__name__)


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
    it, many times slower than float32, so float32 is used instead, with a line in the log. The choice does not depend
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


def peak_of(name: str) -> float | None:
    """Return the dense bfloat16 peak of a device with this name in TFLOP/s, or None if it is unknown, as for a CPU.

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


# --- the settings of this process


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


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


@contextmanager
def flush_denormal(enabled: bool = True) -> Iterator[None]:
    """A context that makes this processor round float32 numbers below 1.2e-38 to 0. The setting is restored afterwards.

    Such numbers are slow: some processors need a hundred cycles for each. A softmax that is nearly one-hot produces many of
    them in its backward pass. This has no effect on a GPU, or on a processor that does not support it
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
def process_settings(options: TrainerConfig) -> Iterator[None]:
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
