"""``trainer.compile``: what torch compiles is kept on disk, and the log says how long compiling took the last time."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from minitx.data.corpus import data_dir, replacing

log = logging.getLogger(__name__)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile(function)``, whose kernels are kept across runs: in ``$TORCHINDUCTOR_CACHE_DIR``, by default with our data."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(data_dir() / "compiled"))
    return torch.compile(function)


class CompileTime(L.Callback):
    """Says before the first step that the run compiles, with the seconds that this took last time, and afterwards how long it took.

    Args:
        name: what the seconds are remembered by, in ``seconds.json`` beside the kernels: the model, the batch and the device, in words.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.file = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "seconds.json"  # set by ``compiled``
        self._started: float | None = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        last = self._remembered().get(self.name)
        past = "this is the first time" if last is None else f"the last time it took {last:.0f} s"
        log.info("compiling network and loss in the first step: %s", past)
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._started is None:
            return
        seconds, self._started = time.perf_counter() - self._started, None
        log.info("compiled, and the first step made, in %.0f s", seconds)
        if trainer.is_global_zero:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.file) as file:
                file.write(json.dumps(self._remembered() | {self.name: round(seconds, 1)}, indent=1).encode())

    def _remembered(self) -> dict[str, float]:
        try:
            return dict(json.loads(self.file.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}
