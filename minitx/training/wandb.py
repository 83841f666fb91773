"""What Weights & Biases gets in addition to the rows of ``metrics.csv``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loggers import WandbLogger

from minitx.config import ConfigError
from minitx.training.probes import read_probes


class WandbExtras(L.Callback):
    """Send config, command and commit to wandb, and after training the probe's figure, the viewer and a checkpoint.

    Curves, system metrics and samples come from the loggers themselves. Without a ``WandbLogger`` nothing happens.

    Args:
        config: plain data, shown as the run's config.
        folder: the run's folder. The command is read from its ``command.txt``.
        viewer: send the attention viewer's page of the first recorded row (``callbacks.probe.weights_every``), and a picture of
            all heads for each recorded step.
        checkpoint: ``last`` or ``best``: send that checkpoint as an artifact. None: send none.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, *, viewer: bool = False, checkpoint: str | None = None) -> None:
        self.config, self.folder, self.viewer, self.checkpoint = config, folder, viewer, checkpoint

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        written = self.folder / "command.txt"
        facts = {"command": written.read_text(encoding="utf-8").strip() if written.exists() else None, "commit": git_commit()}
        for logger in _wandb_loggers(trainer):
            logger.log_hyperparams({**self.config, **{name: text for name, text in facts.items() if text}})
            logger.experiment.define_metric("val_loss", summary="min")

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for logger in _wandb_loggers(trainer):
            self._send(logger)

    def _send(self, logger: WandbLogger) -> None:
        from minitx.analysis.figures import heatmap_grid, saturation_over_steps  # matplotlib takes a second
        from minitx.analysis.snapshot import read_snapshots
        from minitx.analysis.viewer import Trace, viewer_page

        run: Any = logger.experiment
        if records := read_probes(self.folder / "probes.jsonl"):
            logger.log_image("probe", [saturation_over_steps(records)])
        if self.viewer and (self.folder / "attention").exists():
            wandb, shots = sys.modules["wandb"], [shot.sentence(0) for shot in read_snapshots(self.folder)]
            run.log({"attention": wandb.Html(viewer_page([Trace(run.name or "model", shots)]))})
            run.define_metric("heads", step_metric="attention_step")
            for shot in shots:
                run.log({"heads": wandb.Image(heatmap_grid(shot)), "attention_step": shot.step})
        path = self.folder / "checkpoints" / f"{self.checkpoint}.ckpt"
        if path.exists():
            run.log_artifact(str(path), name=f"model-{run.id}", type="model", aliases=[str(self.checkpoint)])


def _wandb_loggers(trainer: L.Trainer) -> list[WandbLogger]:
    """Those of the process that writes."""
    return [logger for logger in trainer.loggers if trainer.is_global_zero and isinstance(logger, WandbLogger)]


def git_commit(folder: Path | None = None) -> str | None:
    """Return the commit of ``folder`` from ``git describe``, with ``-dirty`` for uncommitted changes. None outside of git.

    Args:
        folder: the folder. Default: the current one.
    """
    try:
        command = ["git", "describe", "--always", "--dirty", "--tags"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, cwd=folder).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@contextmanager
def finish_wandb() -> Iterator[None]:
    """A context that finishes wandb's run with the exit code of the program: 0, 2 (a mistake in the config), 3, or that of a signal.

    A run that the caller has open before is left open.
    """
    before, code = _wandb_run(), 3
    try:
        yield
        code = 0
    except BaseException as error:
        signal_number = 2 if isinstance(error, KeyboardInterrupt) else getattr(error, "number", None)
        code = 2 if isinstance(error, ConfigError) else 3 if signal_number is None else 128 + signal_number
        raise
    finally:
        if _wandb_run() is not None and before is None:
            sys.modules["wandb"].finish(exit_code=code)


def _wandb_run() -> Any:
    return getattr(sys.modules.get("wandb"), "run", None)
