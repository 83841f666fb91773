"""Attention statistics of a fixed validation batch during training. They do not change the run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from minitx.analysis.answers import Asked
from minitx.analysis.capture import Look, attention_cores, warn_of_calls, watch
from minitx.analysis.gradients import gradient_statistics, projection_weights
from minitx.analysis.snapshot import SOURCE, TARGET, take_snapshot, write_snapshot
from minitx.analysis.statistics import (
    logit_step_of,
    logit_step_sums,
    statistic_sums,
    statistics_of,
    token_cosine_of,
    token_cosine_sums,
)
from minitx.config import IGNORED, ProbeConfig
from minitx.config.schema import require
from minitx.data.task import Batch
from minitx.nn.blocks import is_block
from minitx.nn.modes import evaluating
from minitx.nn.precision import full_precision
from minitx.nn.transfer import to_host
from minitx.training.callbacks import StepCallback
from minitx.training.metrics_csv import MetricsFile, add_records, drop_records, naming, over_heads
from minitx.training.module import TrainingModule
from minitx.training.objectives import checked_sums

_LOGGED = ("entropy", "row_std", "max_logit", "saturation_99", "grad_query_rms", "logit_step")
_PARTS = 4  # of the probe batch, for the signal-to-noise ratio


class Probe(StepCallback):
    """Write one JSON line per probed step to ``probes.jsonl``, with statistics of every attention layer.

    Probes run before update 0, after updates 1, 2, 4, 8, … and every ``every`` steps, in eval mode and float32, on the plain
    module. No random number is drawn and no state of the run changes. In addition to ``attention_statistics``, each by head, a
    layer's record contains

    ==================  =====================================================================================
    ``argmax_retention``  share of rows with the same favourite key as at step 0 (by head)
    ``logit_step``      RMS of z after this update minus z before it (by head); none at step 0
    ``token_cosine``    mean cosine of two different tokens after the layer's block: rank collapse
    ``grad_q, grad_k, grad_v``  ‖∇W_Q‖, ‖∇W_K‖, ‖∇W_V‖ in the step that is being made
    ``grad_query_rms, grad_query_median``  of ‖dL/dq_i‖ on the probe batch, L summed over its targets
    ``grad_query_histogram``  of the same: rows by log10 of the norm, see ``gradient_statistics``
    ``snr_q, snr_k, snr_v``  signal over noise of the probe's gradients in four parts, see ``gradient_statistics``
    ==================  =====================================================================================

    Every ``weights_every`` steps, ``attention/step_N.safetensors`` keeps the weights on the first ``weights_rows`` rows, and
    the model's answers there.
    Layer means of some statistics go to the run's loggers as ``attention/LAYER/NAME``. ``grad_q``, ``grad_k`` and ``grad_v`` need
    W_Q, W_K and W_V to be three matrices.

    Args:
        folder: the run's folder.
        batch: the validation batch.
        texts: a function that returns the texts of the tokens of each axis of the batch (see ``Snapshot``). Default: numbers.
        asked: a function that returns the questions of the batch, or None.
    """

    def __init__(
        self,
        folder: Path,
        batch: Batch,
        options: ProbeConfig,
        texts: Callable[[Batch], dict[str, list[list[str]]]] = lambda inputs: {},
        asked: Callable[[Batch], Asked | None] = lambda batch: None,
    ) -> None:
        self.folder, self.path, self.batch, self.options = folder, folder / "probes.jsonl", batch, options
        self.texts, self.asked = texts, asked
        self._first_favourites: dict[str, Tensor] | None = None
        self._gradients: dict[str, dict[str, Any]] = {}
        self._before: dict[str, Look] = {}
        self._batch_there: Batch | None = None  # the batch on the device

    def state_dict(self) -> dict[str, Any]:
        return {"first_favourites": self._first_favourites}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._first_favourites = state_dict["first_favourites"]

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        require(
            bool(attention_cores(module.network)),
            "callbacks.probe.every: the model has no attention with weights to look at; set it to 0, or model.adopt=true for model=hf",
        )
        if trainer.is_global_zero:
            drop_records(self.path, trainer.global_step)

    def due(self, step: int) -> bool:
        """Return whether to probe after ``step`` updates: at powers of two and multiples of ``every``."""
        return step & (step - 1) == 0 or step % self.options.every == 0

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        if not trainer.is_global_zero:
            return
        step = trainer.global_step
        if step == 0 or self.due(step + 1):
            self._gradients = gradient_norms(module.network)
        if step == 0:  # gradients at initialisation belong to step 0, before its update
            self._write(trainer, module, 0)
        elif self.due(step + 1) and not self._before:
            self._before, _ = self._look(module, statistics=False)

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        if not self.due(step):
            return
        module.raise_if_nonfinite()
        if trainer.is_global_zero:
            self._write(trainer, module, step)

    def _write(self, trainer: L.Trainer, module: TrainingModule, step: int) -> None:
        looks, hidden = self._look(module, statistics=True)
        with torch.no_grad(), full_precision(module.device):
            sums = {name: _sums_of(name, look, hidden) for name, look in looks.items()}
        for name in looks.keys() & self._before.keys():
            before, after = self._before[name].call, looks[name].call
            sums[name]["logit_step"] = logit_step_sums(before, after, looks[name].real_queries)
        sums, norms = to_host((sums, self._gradients))  # the layers' only copy
        layers = {name: _statistics_of(sums[name], look) for name, look in looks.items()}
        self._retention(layers)
        gradients = gradient_statistics(
            module.network, self._on(module.device), lambda batch: self._loss(module, batch), num_parts=_PARTS
        )
        for name, layer in layers.items():
            layer.update(gradients[name], **{key: float(norm) for key, norm in norms.get(name, {}).items()})
            if "logit_step" in sums[name]:
                layer["logit_step"] = logit_step_of(sums[name]["logit_step"])
        self._before = looks if self.due(step + 1) else {}
        plain = [{"name": name, **{key: _plain(value) for key, value in layer.items()}} for name, layer in layers.items()]
        add_records(self.path, {"step": step, "layers": plain})
        self._log(trainer, plain, step)
        every = self.options.weights_every
        if every and (step % every == 0 or step == trainer.max_steps):
            self._keep_weights(module, step)

    @torch.no_grad()
    def _look(self, module: TrainingModule, *, statistics: bool) -> tuple[dict[str, Look], dict[str, Tensor]]:
        """Return every core's call, and for ``statistics`` the outputs of the blocks, by name."""
        network, device = module.network, module.device
        hidden: dict[str, Tensor] = {}
        with evaluating(network), watch(network, _kept) as seen, full_precision(device), ExitStack() as hooks:
            for name, block in network.named_modules():
                if statistics and is_block(block):
                    hook = block.register_forward_hook(lambda _, args, out, at=name: hidden.update({at: _first(out), **hidden}))
                    hooks.enter_context(hook)
            module.net(self._on(device))
            warn_of_calls(seen, "first")
        return {name: records[0] for name, records in seen.items() if records}, hidden

    def _retention(self, layers: dict[str, dict[str, Any]]) -> None:
        favourites = {name: layer.pop("favourite") for name, layer in layers.items()}
        if self._first_favourites is None:
            self._first_favourites = favourites
        for name, layer in layers.items():
            first, now = self._first_favourites[name], favourites[name]
            counted = first >= 0
            layer["argmax_retention"] = ((first == now) & counted).sum((0, 2)) / counted.sum((0, 2)).clamp(min=1)

    def _on(self, device: torch.device) -> Batch:
        if self._batch_there is None or self._batch_there["labels"].device != device:
            self._batch_there = {name: tensor.to(device) for name, tensor in self.batch.items()}
        return self._batch_there

    def _loss(self, module: TrainingModule, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss of the batch, and the queries that count: those with a target, where targets stand at queries."""
        loss = checked_sums(module.objective(module.net(batch), batch))["loss"]
        axis = TARGET if TARGET in batch else SOURCE
        has_target = axis in batch and batch["labels"].shape == batch[axis].shape
        return loss, {axis: batch["labels"] != IGNORED} if has_target else {}

    def _log(self, trainer: L.Trainer, layers: Sequence[Mapping[str, Any]], step: int) -> None:
        values = {
            f"attention/{layer['name'].removesuffix('.core')}/{key}": over_heads(layer[key])
            for layer in layers
            for key in _LOGGED
            if key in layer
        }
        for logger in trainer.loggers:
            if not isinstance(logger, MetricsFile):
                logger.log_metrics(values, step)

    def _keep_weights(self, module: TrainingModule, step: int) -> None:
        rows, rows_there = (
            {name: tensor[: self.options.weights_rows] for name, tensor in batch.items() if tensor.dim()}
            for batch in (self.batch, self._on(module.device))
        )
        told: dict[str, Any] = {"tokens": self.texts(module.net.inputs(rows)), "asked": self.asked(rows)}
        snapshot = take_snapshot(module.network, module.net.inputs(rows_there), step=step, title=module.net.title, **told)
        with naming(self.folder / "attention"):
            write_snapshot(snapshot, self.folder / "attention")


def _kept(look: Look) -> Look:
    """A copy of the call: a bias may be a table, and the next update changes it in place."""
    return replace(look, call=replace(look.call, attn_bias=copy.deepcopy(look.call.attn_bias)))


def _sums_of(name: str, look: Look, hidden: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the sums of one core's call, on the device. ``hidden`` are the blocks' outputs, by name."""
    sums: dict[str, Any] = {"statistics": statistic_sums(look.call, look.real_queries)}
    block = next((tokens for block, tokens in hidden.items() if name.startswith(f"{block}.")), None)
    return sums if block is None else {**sums, "token_cosine": token_cosine_sums(block, look.real_queries)}


def _statistics_of(sums: Mapping[str, Any], look: Look) -> dict[str, Any]:
    """Return the statistics of one core's call from its sums on the CPU."""
    layer: dict[str, Any] = statistics_of(sums["statistics"], look.call)
    if "token_cosine" in sums:
        layer["token_cosine"] = float(token_cosine_of(sums["token_cosine"]))
    return layer


def gradient_norms(network: nn.Module) -> dict[str, dict[str, Tensor | float]]:
    """Return ‖∇W_Q‖, ‖∇W_K‖, ‖∇W_V‖ of every attention layer, by the name of its core, on the device of the weights."""
    return {
        name: {f"grad_{letter}": 0.0 if w.grad is None else w.grad.norm() for letter, w in weights.items()}
        for name, weights in projection_weights(network).items()
    }


def _first(out: Any) -> Tensor:
    """A block's hidden state; a user's block may return a tuple."""
    return out[0] if isinstance(out, tuple) else out


def _plain(value: Any) -> Any:
    """A number, or a list with one a head."""
    return value.cpu().double().tolist() if isinstance(value, Tensor) else value
