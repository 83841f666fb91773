"""Attention statistics on a fixed validation batch during training, without any effect on the run."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from minitx.analysis.gradients import gradient_statistics, projections
from minitx.analysis.questions import questions_of
from minitx.analysis.recorder import ObservedCall, warn_of_calls, watch
from minitx.analysis.snapshot import SOURCE, TARGET, write_snapshot
from minitx.analysis.snapshot_sources import take_snapshot
from minitx.analysis.statistics import (
    logit_step_of,
    logit_step_sums,
    statistic_sums,
    statistics_of,
    token_cosine_of,
    token_cosine_sums,
)
from minitx.config.schema import Config, Count, Natural, require, takes_fields_of
from minitx.crash_safe import naming
from minitx.data.datamodule import DataModule
from minitx.data.task import Batch, counting
from minitx.nn.attention import attention_cores
from minitx.nn.blocks import is_block
from minitx.nn.modes import evaluating
from minitx.nn.precision import full_precision
from minitx.nn.rules import tensors_of
from minitx.nn.transfer import to_host
from minitx.training.json_lines import add_records, drop_records, over_heads
from minitx.training.metrics_csv import MetricsFile
from minitx.training.module import TrainingModule
from minitx.training.objectives import checked_sums
from minitx.training.step_callback import StepCallback

_LOGGED = ("entropy", "row_std", "max_logit", "saturation_99", "grad_query_rms", "logit_step")
_PARTS = 4  # of the probe batch, for the signal-to-noise ratio


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(Config):
    """The keys of ``callbacks.probe``.

    Attributes:
        every: steps between probes, besides steps 0, 1, 2, 4, 8, …; 0: none.
        batch_size: validation rows.
        weights_every: steps between files of attention weights in attention/, a multiple of every; 0: none.
        weights_rows: rows whose weights are saved.
    """

    every: Natural = 0
    batch_size: Count = 8
    weights_every: Natural = 0
    weights_rows: Count = 4

    def check(self) -> None:
        every, weights_every, rows = self.every, self.weights_every, self.weights_rows
        require(
            not weights_every or bool(every and weights_every % every == 0),
            f"weights_every={weights_every} must be a multiple of every={every}: probes save the weights",
        )
        require(
            not weights_every or rows <= self.batch_size,
            f"weights_rows={rows} must not exceed batch_size={self.batch_size}, the number of rows in a probe",
        )


@takes_fields_of(ProbeOptions)
class Probe(StepCallback):
    """Write one JSON line per probed step to ``probes.jsonl``, with statistics of every attention layer.

    Probes run before the first update, after updates 1, 2, 4, 8, … and every ``every`` steps, in evaluation mode and float32, on the
    uncompiled module. They draw no random numbers and do not change the state of the run. In addition to ``attention_statistics`` for
    each head, the record of a layer contains

    ==================  =====================================================================================
    ``argmax_retention``  share of rows with the same most attended key as at step 0 (for each head)
    ``logit_step``      RMS of the change of the scores z by this update (for each head); not at step 0
    ``token_cosine``    mean cosine of two different tokens after the layer's block, a measure of rank collapse
    ``grad_q, grad_k, grad_v``  ‖∇W_Q‖, ‖∇W_K‖, ‖∇W_V‖ of the training step
    ``grad_query_rms, grad_query_median``  RMS and median of ‖dL/dq_i‖ on the probe batch, with L summed over targets
    ``grad_query_histogram``  histogram of log10 ‖dL/dq_i‖, see ``gradient_statistics``
    ``snr_q, snr_k, snr_v``  signal-to-noise ratio of gradients in four parts of the batch, see ``gradient_statistics``
    ==================  =====================================================================================

    Every ``weights_every`` steps, the attention weights on the first ``weights_rows`` rows, and the model's answers there, are saved to
    ``attention/step_N.safetensors``. Layer means of some statistics are sent to the run's loggers as ``attention/LAYER/NAME``.
    ``grad_q``, ``grad_k`` and ``grad_v`` are only computed if W_Q, W_K and W_V are three matrices.

    Args:
        options: the keys of ``callbacks.probe``.
        folder: the run's folder.
        rows: the data. The first validation rows are probed.
    """

    needs_whole_weights = True

    def __init__(self, options: ProbeOptions, *, folder: Path, rows: DataModule) -> None:
        self.folder, self.path, self.options, self.rows = folder, folder / "probes.jsonl", options, rows
        self.batch = rows.probe_batch(options.batch_size)
        self._first_favourites: dict[str, Tensor] | None = None
        self._gradients: dict[str, dict[str, Any]] = {}
        self._before: dict[str, ObservedCall] = {}
        self._batch_there: Batch | None = None  # the batch on the device of the model

    def state_dict(self) -> dict[str, Any]:
        return {"first_favourites": self._first_favourites}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._first_favourites = state_dict["first_favourites"]

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        require(
            bool(attention_cores(module.network)),
            "callbacks.probe.every: the model has no attention weights to record: set it to 0, or set model.adopt=true for model=hf",
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
        if step == 0:  # gradients at initialisation are recorded as step 0, before the update
            self._write(trainer, module, 0)
        elif self.due(step + 1) and not self._before:
            self._before = self._look(module)

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        if not self.due(step):
            return
        module.raise_if_nonfinite()
        if trainer.is_global_zero:
            self._write(trainer, module, step)

    def _write(self, trainer: L.Trainer, module: TrainingModule, step: int) -> None:
        looks: dict[str, ObservedCall] = {}
        hidden: dict[str, Tensor] = {}

        def loss(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            with _looking(module.network, looks, hidden):
                return self._loss(module, batch)

        with full_precision(module.device):  # one forward pass for all
            gradients = gradient_statistics(module.network, self._on(module.device), loss, num_parts=_PARTS)
            with torch.no_grad():
                sums = {name: _sums_of(name, look, hidden) for name, look in looks.items()}
                for name in looks.keys() & self._before.keys():
                    before, after = self._before[name].call, looks[name].call
                    sums[name]["logit_step"] = logit_step_sums(before, after, looks[name].real_queries)
        sums, norms = to_host((sums, self._gradients))  # one copy for all layers
        layers = {name: _statistics_of(sums[name], look) for name, look in looks.items()}
        self._retention(layers)
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
    def _look(self, module: TrainingModule) -> dict[str, ObservedCall]:
        """Return the call of every core by name."""
        looks: dict[str, ObservedCall] = {}
        with evaluating(module.network), full_precision(module.device), _looking(module.network, looks, {}):
            module.net(self._on(module.device))
        return looks

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
        """Return the summed loss of the batch, and a mask of queries with a target if there is a target per query."""
        loss = checked_sums(module.objective(module.net(batch), batch))["loss"]
        axis = TARGET if TARGET in batch else SOURCE
        has_target = axis in batch and batch["labels"].shape == batch[axis].shape
        return loss, {axis: counting(batch["labels"])} if has_target else {}

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
        tokens = self.rows.texts(module.net.inputs(rows))
        asked = questions_of(self.rows.task, rows)
        inputs = module.net.inputs(rows_there)
        snapshot = take_snapshot(module.network, inputs, step=step, title=module.net.title, tokens=tokens, asked=asked)
        with naming(self.folder / "attention"):
            write_snapshot(snapshot, self.folder / "attention")


@contextmanager
def _looking(network: nn.Module, looks: dict[str, ObservedCall], hidden: dict[str, Tensor]) -> Iterator[None]:
    """At the end, ``looks`` has the first call of every core, and ``hidden`` the first output of every block, by name."""

    def leave(name: str, block: nn.Module, args: Any, out: Any) -> None:
        hidden.setdefault(name, _first(out).detach())

    with watch(network, _kept) as seen, ExitStack() as hooks:
        for name, block in network.named_modules():
            if is_block(block):
                hooks.enter_context(block.register_forward_hook(partial(leave, name)))
        yield
        warn_of_calls(seen, "first")
    looks.update({name: records[0] for name, records in seen.items() if records})


def _kept(look: ObservedCall) -> ObservedCall:
    """Return a copy of the call outside of the graph. The bias is copied, because the next update may change its table in place."""
    call = look.call
    memory = {id(tensor): tensor.detach().clone() for tensor in tensors_of(call.attn_bias)}
    vectors = {name: getattr(call, name).detach() for name in ("query", "key", "value")}
    return replace(look, call=replace(call, **vectors, attn_bias=copy.deepcopy(call.attn_bias, memory)))


def _sums_of(name: str, look: ObservedCall, hidden: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the sums of the call of a core, on the device. ``hidden`` are the outputs of blocks by name."""
    sums: dict[str, Any] = {"statistics": statistic_sums(look.call, look.real_queries)}
    block = next((tokens for block, tokens in hidden.items() if name.startswith(f"{block}.")), None)
    return sums if block is None else {**sums, "token_cosine": token_cosine_sums(block, look.real_queries)}


def _statistics_of(sums: Mapping[str, Any], look: ObservedCall) -> dict[str, Any]:
    """Return the statistics of the call of a core from its sums on the CPU."""
    layer: dict[str, Any] = statistics_of(sums["statistics"], look.call)
    if "token_cosine" in sums:
        layer["token_cosine"] = float(token_cosine_of(sums["token_cosine"]))
    return layer


def gradient_norms(network: nn.Module) -> dict[str, dict[str, Tensor | float]]:
    """Return ‖∇W_Q‖, ‖∇W_K‖, ‖∇W_V‖ of every attention layer, by the name of its core, on the device of the weights."""
    return {
        name: {f"grad_{letter}": 0.0 if (g := layer.weight.grad) is None else g.norm() for letter, layer in layers.items()}
        for name, layers in projections(network).items()
    }


def _first(out: Any) -> Tensor:
    """Return the hidden state of a block. A user's block may return a tuple."""
    return out[0] if isinstance(out, tuple) else out


def _plain(value: Any) -> Any:
    """Convert a tensor to a number, or to a list with a number per head."""
    return value.cpu().double().tolist() if isinstance(value, Tensor) else value
