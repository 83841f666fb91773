"""The hardware of this machine. Only torch is imported, so that a program can check it before it starts processes."""

from __future__ import annotations

import logging
import resource
import sys
from functools import cache

import torch

from minitx.config import ConfigError, TrainerConfig

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
"""Dense bfloat16 TFLOP/s from NVIDIA's data sheets, by a part of the device's name. The first match counts."""


def check_count(options: TrainerConfig) -> None:
    """Check that this machine has the devices.

    Raises:
        ConfigError: there are fewer GPUs than required, fewer devices than required with ``auto``, or float64 is used on
            Apple's GPU.
    """
    mps = int(torch.backends.mps.is_available())
    asked, devices = options.accelerator, options.devices
    found = mps if asked == "mps" else torch.cuda.device_count() or mps
    if asked in ("gpu", "mps") and devices > found:
        raise ConfigError(f"trainer.accelerator={asked} with trainer.devices={devices}: this machine has {found} usable GPUs")
    if asked == "auto" and devices > max(found, 1):
        raise ConfigError(
            f"trainer.devices={devices} with trainer.accelerator=auto: this machine has {found} usable GPUs; "
            "trainer.accelerator=cpu runs as many processes on the CPU"
        )
    if options.precision == "64-true" and device_type(options) == "mps":
        raise ConfigError("trainer.precision=64-true: Apple's GPU has no float64; set trainer.accelerator=cpu")


def device_type(options: TrainerConfig) -> str:
    """Return the device of ``trainer.accelerator`` on this machine: ``cpu``, ``cuda`` or ``mps``."""
    if options.accelerator == "cpu":
        return "cpu"
    if torch.backends.mps.is_available():  # Lightning's order
        return "mps"
    return "cuda" if torch.cuda.is_available() else "cpu"


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


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of this device, for sums: float64, or float32 on Apple's GPU."""
    return torch.float32 if device.type == "mps" else torch.float64


def peak_tflops(device: torch.device) -> float | None:
    """Return the device's dense bfloat16 peak in TFLOP/s from ``PEAK_TFLOPS``, or None if it is unknown, as on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def memory_mb(device: torch.device) -> float:
    """Return the largest memory use of this process so far, in MiB.

    On a CUDA device this is the memory of tensors, on Apple's GPU the present memory of the driver, on a CPU the resident set.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
