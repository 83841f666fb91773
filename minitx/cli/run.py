"""One run of the command line: its files, its loggers, and what it came to in a line."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from minitx.cli.redaction import redact
from minitx.cli.targets import instantiate_all
from minitx.config import RunConfig, to_dict


def run_training(config: RunConfig, folder: Path, command: str) -> dict[str, Any]:
    """One run in ``folder``: its files, its loggers, its result."""
    from minitx.training.run import train

    if config.ckpt_path == "last":
        config = dataclasses.replace(config, ckpt_path=str(folder / "checkpoints" / "last.ckpt"))
    plain = redact(to_dict(config))
    files = {"config.yaml": OmegaConf.to_yaml(OmegaConf.create(plain)), "command.txt": command + "\n"}

    start = None
    if config.model.pretrained is not None:
        from minitx.cli.pretrained import load_pretrained

        start = load_pretrained(config.model)
    callbacks = instantiate_all(config.callbacks.extra, "callbacks.extra", folder)

    def extras() -> tuple[list[Any], list[Any]]:
        loggers = instantiate_all(config.logger, "logger", folder)
        for logger in loggers:
            logger.log_hyperparams(plain)
        return loggers, callbacks

    try:
        stored = dataclasses.replace(
            config,
            logger=plain["logger"],
            callbacks=dataclasses.replace(config.callbacks, extra=plain["callbacks"]["extra"]),
        )  # checkpoints hold it: no secret may come along
        return train(stored, folder, files=files, extras=extras, start=start)
    finally:
        if "wandb" in sys.modules and sys.modules["wandb"].run is not None:
            sys.modules["wandb"].finish()  # each run of a sweep is one of its own


def summary_line(result: Mapping[str, Any], folder: Path) -> str:
    """What a run came to, in one line."""
    values = [result["outcome"], f"{result['steps']} steps"]
    for name in ("val_loss", "accuracy"):
        if result[name] is not None:
            values.append(f"{name.replace('val_', 'validation ')} {result[name]:.4f}")
    for name, floor in result["floors"].items():
        values.append(f"{name} floor {floor:.4f}")
    return "  ".join(values) + f"\n{folder}"
