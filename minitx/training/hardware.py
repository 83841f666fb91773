"""What this machine has: torch alone, so that a program can ask before it starts others."""

from __future__ import annotations

import logging
import time
from functools import cache

import torch

from minitx.config import ConfigError, TrainerConfig

log = logging.getLogger(__name__)
BF16_PAYS_FROM = 1.2  # times as fast: less than that may be noise, and costs precision


def check_count(options: TrainerConfig) -> None:
    """Refuse more devices than there are.

    Raises:
        ConfigError: no GPU, or fewer than asked for; several processes on a CPU that nobody asked for by name.
    """
    found = torch.cuda.device_count()
    if options.accelerator == "gpu" and found < options.devices:
        raise ConfigError(
            f"trainer.accelerator=gpu with trainer.devices={options.devices}: this machine has {found} usable GPUs"
        )
    if options.accelerator == "auto" and options.devices > max(found, 1):
        raise ConfigError(
            f"trainer.devices={options.devices} with trainer.accelerator=auto: this machine has {found} usable GPUs; "
            "trainer.accelerator=cpu runs as many processes on the CPU"
        )


def runs_on_cpu(options: TrainerConfig) -> bool:
    """Whether ``accelerator`` comes to the CPU on this machine."""
    return options.accelerator == "cpu" or not torch.cuda.is_available()


@cache
def cpu_precision(precision: str) -> str:
    """The precision that ``trainer.precision`` comes to on this CPU: bf16 where it was measured to pay, else float32.

    Both are measured once in a process (``bf16_speed``), and the choice is logged once with its reason. CPUs with AMX gain
    several times; without instructions for bf16 it is many times slower than float32. Every other precision is left as it is.
    """
    if not precision.startswith("bf16"):
        return precision
    speed = bf16_speed()
    chosen = precision if speed >= BF16_PAYS_FROM else "32-true"
    said = f"a matrix product in bfloat16 is {speed:.2g} times as fast as in float32 on this CPU"
    log.info("trainer.precision=%s runs as %s: %s (wanted: %g)", precision, chosen, said, BF16_PAYS_FROM)
    return chosen


def bf16_speed(size: int = 256, repeats: int = 5) -> float:
    """How many times as fast a product of two ``size`` × ``size`` matrices is in bfloat16 as in float32, on the CPU.

    The best of ``repeats`` each, alternately, after a first one that loads the kernel; milliseconds, or some tenths of a second where
    bfloat16 is emulated. Draws no random number.
    """
    matrices = [torch.full((size, size), 0.5, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    best = [float("inf"), float("inf")]
    for repeat in range(repeats + 1):
        for side, matrix in enumerate(matrices):
            started = time.perf_counter()
            torch.mm(matrix, matrix)
            best[side] = min(best[side], time.perf_counter() - started) if repeat else best[side]
    return best[0] / best[1]
