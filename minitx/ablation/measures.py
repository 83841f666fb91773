"""Measurements in the runs of a grid: Lightning callbacks for any training run. ``result_of`` reads a finished run.

Add a callback with an override::

    +callbacks.measures={_target_: minitx.ablation.measures.Measures, attention: true}
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from minitx.ablation.design import AblationConfig
from minitx.config import ConfigError, EvaluationConfig, InitFrom, TransformerConfig, from_dict
from minitx.config.schema import read, require
from minitx.config.training import MODEL, Data, Model
from minitx.data.datamodule import DataModule
from minitx.data.seeding import kept_generators
from minitx.data.task import Batch, without_targets
from minitx.data.task_loading import load_task
from minitx.nn.attention import MultiHeadAttention
from minitx.nn.counting import flop_counter
from minitx.nn.functional import AttentionCall, reference_attention
from minitx.nn.masks import Mask, SlidingWindow, intersect
from minitx.nn.modes import evaluating
from minitx.training.checkpoint_callbacks import LastCheckpoint
from minitx.training.checkpoints import load_model
from minitx.training.evaluation import evaluate
from minitx.training.init_from import load_start
from minitx.training.json_lines import read_probes
from minitx.training.metrics_csv import finite, read_metrics
from minitx.training.net import Net
from minitx.training.network_building import network_of
from minitx.training.trust import check_trusted

START_FILE, MEASURES_FILE = "start.json", "measures.json"
LARGEST_ERROR = 1e-5
MEASURES = ("loss_at_N", "attention_error", "attention_cost", "operations")
"""Names of the numbers that ``Measures`` can write, for ``measures`` of a study. N is a length."""
_ROWS = 8
_COUNTED = 3  # the first step without a probe; probes come after updates 1, 2, 4, 8, …


def check_measures(grid: AblationConfig) -> None:
    """Raise a ConfigError if a study names a measure that is not in ``MEASURES``."""
    known = re.compile("|".join(MEASURES).replace("_N", r"_\d+"))
    for name, study in grid.studies.items():
        if not all(map(known.fullmatch, study.measures)):
            raise ConfigError(f"ablation.studies.{name}.measures={list(study.measures)} must be among {', '.join(MEASURES)}")


class SameStart(L.Callback):
    """Check that the model starts as the same function as the model at ``path``, even if its scale differs.

    Both networks compute the outputs for a validation batch. The largest difference, divided by the largest output, is written
    to ``start.json`` in the folder of the run.

    Args:
        path: the value of ``init_from.path`` (a checkpoint, a folder, or a name on the hub), or of ``model.path``.
        model: for a model that is loaded by its own target, such as ``minitx.interop.pretrained_hf``: a function of ``task``
            and ``num_labels`` that loads the model at ``path`` again.
        trust: execute the code that a checkpoint names, as the run does with ``trust=true``.

    Raises:
        ConfigError: in training, if this number is above 1e-5.
    """

    def __init__(self, path: str, model: Callable[..., nn.Module] | None = None, trust: bool = False) -> None:
        self.path, self.model, self.trust = path, model, trust

    @torch.no_grad()
    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        batch = {name: tensor.to(module.device) for name, tensor in trainer.datamodule.probe_batch(_ROWS).items()}  # type: ignore[attr-defined]
        before, network = self._start(trainer, module).to(next(module.network.parameters())), module.network
        with evaluating(before), evaluating(network):
            expected, actual = Net.of(before)(batch), module.net(batch)
        error = float((actual - expected).abs().max() / expected.abs().max())
        Path(trainer.default_root_dir, START_FILE).write_text(json.dumps({"error": error}) + "\n", encoding="utf-8")
        if not error <= LARGEST_ERROR:
            raise ConfigError(
                f"the outputs differ from the outputs of {self.path} by {error:.1e} of the largest output, more than {LARGEST_ERROR:g}"
            )

    def _start(self, trainer: L.Trainer, module: Any) -> nn.Module:
        """Return the network that the run starts from. A head that the folder does not contain is initialised as in the run."""
        if self.model is not None:
            kind, fields = trainer.datamodule.task.kind, trainer.datamodule.task.model_fields  # type: ignore[attr-defined]
            with kept_generators(module.device):
                torch.manual_seed(module.seed)
                return self.model(task=kind, num_labels=fields.get("num_labels"))
        if Path(self.path).is_file():
            builds_itself = self.trust or module.net.stored_node is not None
            return load_model(self.path, None if builds_itself else copy.deepcopy(module.network), self.trust)[0]
        start = load_start(InitFrom(path=self.path))
        if start is None or start.model_config is None:
            raise ConfigError(f"init_from.fold_scale=true needs a model of minitx, but {self.path} contains another model")
        node = {"_target_": MODEL, **start.model_config}
        check_trusted(node, "model")
        network = network_of(read(Model, node, "model"))
        network.load_state_dict(start.weights)
        return network


class Measures(L.Callback):
    """Measure the trained network after the last step, and write the numbers to ``measures.json`` in the run's folder.

    =====================  ======================================================================================
    ``loss_at_N``          for each of ``lengths``: loss in nats per token on validation rows of N tokens. The number of tokens
                           is the same for every N: ``evaluation.num_rows`` rows of the training length
    ``attention_error``    ||core - exact||_F / ||exact||_F of the trained attention, averaged over layers, on 8 validation
                           rows (exact: softmax attention with the same scale and mask, without a window)
    ``attention_cost``     FLOPs of the cores in a forward pass, divided by the ``math`` backend's FLOPs on the same rows
    ``operations``         FLOPs of training step 3: forward and backward pass, hooks and the optimizer. A probe in this step
                           (``callbacks.probe.every`` 1 or 3) counts too
    =====================  ======================================================================================

    Args:
        lengths: row lengths for the validation text of a language model.
        attention: whether to measure ``attention_error`` and ``attention_cost``.
        operations: whether to measure ``operations``.

    Raises:
        ConfigError: before training, if ``lengths`` are set and the data is not text or a length exceeds a position table, or if
            ``attention`` is set and the model has a bias, sinks, a soft-cap or cross-attention.
    """

    def __init__(self, lengths: tuple[int, ...] = (), attention: bool = False, operations: bool = False) -> None:
        self.lengths, self.attention, self.operations = tuple(lengths), attention, operations
        self._counter: FlopCounterMode | None = None
        self._stack = ExitStack()

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        model, data = module.net.config, trainer.datamodule  # type: ignore[attr-defined]
        if model is None:
            raise ConfigError("callbacks: Measures needs a model of minitx")
        if self.attention:
            _check_attention(model)
        if self.lengths:
            _check_lengths(max(self.lengths), model, data)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self.operations and self._counter is None and trainer.global_step == _COUNTED - 1:
            self._counter = self._stack.enter_context(flop_counter())

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == _COUNTED:
            self._stack.close()

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        self._stack.close()

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        data, network = trainer.datamodule, module.network  # type: ignore[attr-defined]
        stored = next(callback.state for callback in trainer.callbacks if isinstance(callback, LastCheckpoint))  # type: ignore[attr-defined]
        config = stored["config"]
        options = from_dict(EvaluationConfig, config["evaluation"])
        numbers: dict[str, float] = {}
        if self._counter is not None:
            numbers["operations"] = self._counter.get_total_flops()
        for length in self.lengths:
            rows = options.num_rows and max(1, options.num_rows * data.task.longest // length)
            part = read(Data, {**config["data"], "context_len": length}, "data")
            longer, _ = load_task(part, seed=config["seed"], tokenizer=data.task.tokenizer)
            length_options = dataclasses.replace(options, num_rows=rows)
            measured = evaluate(network, longer, length_options, batch_size=data.val_batch_size(1))
            numbers[f"loss_at_{length}"] = measured.metrics["loss"].value
        if self.attention:
            numbers |= _attention_numbers(network, data.probe_batch(_ROWS))
        Path(trainer.default_root_dir, MEASURES_FILE).write_text(json.dumps(numbers) + "\n", encoding="utf-8")


def _check_attention(model: TransformerConfig) -> None:
    extra: list[str] = [model.position] if model.position in ("alibi", "t5") else []
    extra += [name for name in ("sinks", "softcap") if getattr(model, name)]
    extra += ["cross-attention"] if model.architecture == "encoder_decoder" else []
    require(not extra, f"callbacks: attention=true compares with plain self-attention, but the model has {', '.join(extra)}")


def _check_lengths(longest: int, model: TransformerConfig, data: DataModule) -> None:
    if data.task.kind != "language_model" or data.task.tokenizer is None or data.task.longest is None:
        raise ConfigError(f"callbacks: lengths needs a language model of text, got {data.task.kind}")
    if model.position in ("learned", "sinusoidal") and longest > model.max_len:
        raise ConfigError(
            f"callbacks: lengths={longest} exceeds model.max_len={model.max_len}, the limit of position={model.position}"
        )


@torch.no_grad()
def _attention_numbers(network: nn.Module, batch: Batch) -> dict[str, float]:
    """Call each core again with its recorded arguments, and return its error and its cost."""
    calls: list[tuple[nn.Module, AttentionCall]] = []
    device = next(network.parameters()).device
    with evaluating(network):
        with ExitStack() as hooks:
            for module in network.modules():
                if isinstance(module, MultiHeadAttention):
                    hook = module.core.register_forward_pre_hook(lambda core, args: calls.append((core, args[0])))
                    hooks.enter_context(hook)
            network(**{name: tensor.to(device) for name, tensor in without_targets(batch).items()})
        errors, flops, exact = zip(*(_against_exact(core, call) for core, call in calls), strict=True)
    return {"attention_error": mean(errors), "attention_cost": sum(flops) / sum(exact)}


def _against_exact(core: nn.Module, call: AttentionCall) -> tuple[float, int, int]:
    """Return (error, FLOPs, FLOPs of exact attention) of a core. Exact attention has no window."""
    with flop_counter() as counter:
        out = core(call)
    with flop_counter() as plain:
        exact = reference_attention(dataclasses.replace(call, mask=_without_window(call.mask)))
    return float((out - exact).norm() / exact.norm()), counter.get_total_flops(), plain.get_total_flops()


def _without_window(mask: Mask | None) -> Mask | None:
    return mask and intersect(*(part for part in mask.parts() if not isinstance(part, SlidingWindow)))


def result_of(folder: Path, trained: Mapping[str, Any], cap: int) -> dict[str, Any]:
    """Return the ``result`` of a record (see ``grid``) as plain data without NaN.

    Args:
        folder: the folder of the run.
        trained: the result of ``train``.
        cap: ``trainer.max_steps``.
    """
    table = read_metrics(folder / "metrics.csv")
    rows = [row for row in table if row["train_loss"] is not None]
    losses, accuracies = [row["train_loss"] for row in rows], [short(row.get("train_accuracy")) for row in rows]
    return {
        "steps": rows[-1]["step"] if rows else 0,
        "cap": cap,
        "loss": [short(loss) for loss in losses],
        "accuracy": None if set(accuracies) <= {None} else accuracies,
        "nonfinite_step": trained["steps"] + 1 if trained["nonfinite_phase"] else None,
        "validation": [[row["step"], finite(row["val_loss"])] for row in table if row.get("val_loss") is not None],
        "val_loss": trained["val_loss"],
        "val_accuracy": trained["val_accuracy"],
        "floors": dict(trained["floors"]),
        "digest": hashlib.sha256(b"".join(struct.pack("<d", loss) for loss in losses)).hexdigest(),
        "parameters": trained["num_parameters"],
        "start_error": read_numbers(folder / START_FILE).get("error"),
        "measures": {name: finite(value) for name, value in read_numbers(folder / MEASURES_FILE).items()},
        "probes": [
            {"step": probe["step"], "layers": [_plain_layer(layer) for layer in probe["layers"]]}
            for probe in read_probes(folder / "probes.jsonl")
        ],
        "attention": {},
    }


def short(value: float | None) -> float | None:
    """Round to five significant digits. They are enough for figures, and keep records small."""
    return None if finite(value) is None else float(f"{value:.5g}")


def read_numbers(path: Path) -> dict[str, Any]:
    """Read a JSON file; {} if it does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}  # type: ignore[no-any-return]


def _plain_layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a layer without histograms."""
    plain = {name: value for name, value in layer.items() if not isinstance(value, list | dict)}
    return {name: short(value) if isinstance(value, float) else value for name, value in plain.items()}
