"""What this machine has: torch alone, so that a program can ask before it starts others."""

from __future__ import annotations

import torch

from minitx.config import ConfigError, TrainerConfig


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
