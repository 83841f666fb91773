"""How Lightning writes and reads our checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from minitx.training.checkpoint import read_checkpoint, write_checkpoint


class AtomicCheckpointIO(CheckpointIO):
    """Writes and reads Lightning's checkpoints with ``minitx.training.checkpoint``: complete or not at all, and without code."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_checkpoint(checkpoint, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        return read_checkpoint(path)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)
