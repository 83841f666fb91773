"""What a run uploads to Weights & Biases in addition to its curves: figures, the attention viewer, and a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as L

from minitx.analysis.figures import heatmap_grid, saturation_over_steps
from minitx.analysis.snapshot import read_snapshots
from minitx.analysis.viewer import Trace, viewer_page
from minitx.config.schema import check_choice
from minitx.training.json_lines import read_probes
from minitx.training.trackers import wandb_loggers


class WandbFiles(L.Callback):
    """After training, upload the probe's figure, the viewer and a checkpoint to every ``WandbLogger`` of the run.

    Args:
        folder: the folder of the run.
        viewer: upload the attention viewer of the first recorded row (``callbacks.probe.weights_every``), and a figure of all
            heads for each recorded step.
        checkpoint: upload the ``last`` or ``best`` checkpoint as an artifact; null: none.

    Raises:
        ConfigError: ``checkpoint`` is another word.
    """

    def __init__(self, *, folder: Path, viewer: bool = False, checkpoint: Literal["last", "best"] | None = None) -> None:
        check_choice("checkpoint", checkpoint, ("last", "best", None))
        self.folder, self.viewer, self.checkpoint = folder, viewer, checkpoint

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for logger in wandb_loggers(trainer):
            run: Any = logger.experiment
            if records := read_probes(self.folder / "probes.jsonl"):
                logger.log_image("probe", [saturation_over_steps(records)])
            if self.viewer and (self.folder / "attention").exists():
                wandb = sys.modules["wandb"]
                shots = [shot.sentence(0) for shot in read_snapshots(self.folder)]
                run.log({"attention": wandb.Html(viewer_page([Trace(run.name or "model", shots)]))})
                run.define_metric("heads", step_metric="attention_step")
                for shot in shots:
                    run.log({"heads": wandb.Image(heatmap_grid(shot)), "attention_step": shot.step})
            path = self.folder / "checkpoints" / f"{self.checkpoint}.ckpt"
            if path.exists():
                run.log_artifact(str(path), name=f"model-{run.id}", type="model", aliases=[str(self.checkpoint)])
