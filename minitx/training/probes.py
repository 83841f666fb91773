"""Attention statistics of a fixed validation batch during training, beside the run and without touching it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from minitx.analysis import capture
from minitx.nn.attention import MultiHeadAttention
from minitx.training.callbacks import StepCallback
from minitx.training.module import Batch, TrainingModule


class Probe(StepCallback):
    """Writes one JSON line a probed step: statistics of every layer, averaged over heads, and gradient norms.

    Probes run before update 0 and after updates 1, 2, 4, 8, … and every ``every`` steps, in eval mode, without
    gradients, in float32, on the plain module. No random number is drawn and no state of the run is touched. The
    gradient norms are those of ‖∇W_Q‖, ‖∇W_K‖, ‖∇W_V‖ in the step that is being made.
    """

    def __init__(self, path: Path, batch: Batch, every: int) -> None:
        self.path, self.batch, self.every = path, batch, every
        self._first_favourites: list[Tensor] | None = None
        self._gradients: list[dict[str, float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"first_favourites": self._first_favourites}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._first_favourites = state_dict["first_favourites"]

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero and self.path.exists():  # what came after the checkpoint that goes on comes again
            kept = [record for record in read_probes(self.path) if record["step"] <= trainer.global_step > 0]
            self.path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")

    def due(self, step: int) -> bool:
        """Whether to look after ``step`` updates: powers of two and multiples of ``every``."""
        return step & (step - 1) == 0 or step % self.every == 0

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        step = trainer.global_step
        if step == 0:  # gradients at initialisation belong to step 0, before its update
            self._gradients = gradient_norms(module.network)
            self._write(trainer, module, 0)
        elif self.due(step + 1):
            self._gradients = gradient_norms(module.network)

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        if self.due(step):
            self._write(trainer, module, step)

    def _write(self, trainer: L.Trainer, module: TrainingModule, step: int) -> None:
        if not trainer.is_global_zero:
            return
        layers = self._look(module)
        for layer, gradients in zip(layers, self._gradients, strict=True):
            layer.update(gradients)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "layers": layers}) + "\n")

    @torch.no_grad()
    def _look(self, module: TrainingModule) -> list[dict[str, Any]]:
        network, training = module.network, module.network.training
        network.eval()
        with capture(network, what="statistics") as seen, torch.autocast(module.device.type, enabled=False):
            module({name: tensor.to(module.device) for name, tensor in self.batch.items()})
        network.train(training)
        records = [entries[0] for entries in seen.values()]
        favourites = [record.pop("favourite") for record in records]
        if self._first_favourites is None:
            self._first_favourites = favourites
        layers = [{name: float(value.mean()) for name, value in record.items()} for record in records]
        for layer, first, now in zip(layers, self._first_favourites, favourites, strict=True):
            counted = first >= 0
            layer["argmax_retention"] = float((first == now)[counted].double().mean())
        return layers


def gradient_norms(network: nn.Module) -> list[dict[str, float]]:
    """‖∇W_Q‖, ‖∇W_K‖, ‖∇W_V‖ of every attention layer, in the order of ``network.modules()``."""
    layers = [module for module in network.modules() if isinstance(module, MultiHeadAttention)]
    names = {"grad_q": "q_proj", "grad_k": "k_proj", "grad_v": "v_proj"}
    return [{name: _norm(getattr(layer, part).weight) for name, part in names.items()} for layer in layers]


def _norm(weight: Tensor) -> float:
    return 0.0 if weight.grad is None else float(weight.grad.norm())


def read_probes(path: Path) -> list[dict[str, Any]]:
    """The records of a probe file; [] where there is none. A last line cut short by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
