"""What a run sends to Weights & Biases and MLflow."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

from minitx.config import Part
from minitx.config.failures import code_of
from minitx.training import rank


def send_facts(trainer: L.Trainer, config: Mapping[str, Any], command: str | None) -> None:
    """Send the config, the command and the commit to Weights & Biases and MLflow. Curves are sent by the loggers themselves."""
    trackers = [logger for logger in trainer.loggers if not rank() and isinstance(logger, WandbLogger | MLFlowLogger)]
    facts = {"command": command, "commit": git_commit()} if trackers else {}
    for logger in trackers:
        logger.log_hyperparams({**config, **{name: text for name, text in facts.items() if text}})
        if isinstance(logger, WandbLogger):
            logger.experiment.define_metric("val_loss", summary="min")


def resuming(loggers: Mapping[str, Part | None], folder: Path) -> dict[str, Part | None]:
    """Return the parts of loggers. A ``WandbLogger`` gets the ``id`` of the last run in ``folder``, and so resumes it."""
    resumed = dict(loggers)
    for file in folder.glob("wandb/latest-run/run-*.wandb"):
        for name, part in loggers.items():
            if part is not None and isinstance(part.target, type) and issubclass(part.target, WandbLogger):
                resumed[name] = part.with_(**{"id": file.stem.removeprefix("run-"), **part.arguments})
    return resumed


def wandb_loggers(trainer: L.Trainer) -> list[WandbLogger]:
    """Return the wandb loggers on rank 0, and [] on other ranks."""
    return [logger for logger in trainer.loggers if trainer.is_global_zero and isinstance(logger, WandbLogger)]


def git_commit(folder: Path | None = None) -> str | None:
    """Return the commit of ``folder`` from ``git describe``, with ``-dirty`` for uncommitted changes; None outside of a repository.

    Args:
        folder: a folder in the repository. Default: the current folder.
    """
    try:
        command = ["git", "describe", "--always", "--dirty", "--tags"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, cwd=folder).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@contextmanager
def finish_wandb() -> Iterator[None]:
    """A context that finishes the wandb run with the exit code of the program (``code_of``).

    A run that was open before is left open.
    """
    before = _wandb_run()
    code = 0
    try:
        yield
    except BaseException as error:
        code = code_of(error)
        raise
    finally:
        if _wandb_run() is not None and before is None:
            sys.modules["wandb"].finish(exit_code=code)


def _wandb_run() -> Any:
    return getattr(sys.modules.get("wandb"), "run", None)
