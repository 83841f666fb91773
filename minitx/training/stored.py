"""Build the contents of a checkpoint again: model, tokenizer, data, objective."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from minitx.config import ConfigError, RunConfig, TransformerConfig, from_dict, is_part
from minitx.config.checks import first_line
from minitx.data import tokenizers
from minitx.data.load import load_task
from minitx.data.task import Task
from minitx.data.tokenizers import Tokenizer
from minitx.nn.models import build_model
from minitx.training.checkpoint import network_weights, read_checkpoint
from minitx.training.objectives import Objective, build_objective
from minitx.training.parts import GIVEN, build, check_trusted, core_of, import_modules

if TYPE_CHECKING:
    import lightning.pytorch as L


@dataclasses.dataclass
class Stored:
    """A trained network, in evaluation mode on the CPU, and the config, data and objective of its training.

    Attributes:
        config: the config of the run, without loggers, callbacks and grid.
        state: the plain data that the run stored: ``config``, ``model`` and ``tokenizer``.
        untrusted: nodes from the checkpoint. They may name only classes of torch and minitx.
    """

    path: str
    network: nn.Module
    tokenizer: Tokenizer | None
    config: RunConfig
    state: dict[str, Any]
    untrusted: dict[str, Any]

    def data(self, batch_size: int | None = None) -> L.LightningDataModule:
        """Open the data of the run. ``batch_size`` is that of validation.

        Raises:
            ConfigError: the data do not exist, or no longer fit the model's vocabulary.
        """
        from minitx.training.building import open_data

        self._check_not_given("data")
        check_trusted(self.untrusted.get("data"), "data")
        trainer = dataclasses.replace(self.config.trainer, val_batch_size=batch_size or self.config.trainer.val_batch_size)
        data = open_data(dataclasses.replace(self.config, trainer=trainer), tokenizer=self.tokenizer)
        self._check_vocabulary(getattr(data, "task", None))
        return data

    def task(self) -> Task:
        """Load the task of the run. If it is one of ours, lightning is not imported, which takes seconds.

        Raises:
            ConfigError: as ``data``; or the data are not a ``Task``.
        """
        if not isinstance(self.config.data, Mapping):
            check_trusted(self.untrusted.get("data"), "data")
            task = load_task(self.config.data, self.tokenizer)
            self._check_vocabulary(task)
            return task
        opened = getattr(self.data(), "task", None)
        if not isinstance(opened, Task):
            raise ConfigError("row is for the data of a Task; give text=TEXT instead")
        return opened

    def _check_not_given(self, name: str) -> None:
        node = getattr(self.config, name)
        if is_part(node) and node["_target_"] == GIVEN:
            raise ConfigError(
                f"ckpt_path={self.path} was trained with {name} given from Python, which no checkpoint holds: give evaluate.py "
                f"{name}._target_=MODULE.NAME (the viewer reads text=TEXT), or call evaluate() from Python"
            )

    def _check_vocabulary(self, task: Task | None) -> None:
        size = getattr(getattr(self.network, "config", None), "vocab_size", None)
        if size is not None and task is not None and task.model_fields.get("vocab_size", 0) > size:
            raise ConfigError(f"ckpt_path={self.path} was trained on other data than {task.name} is now")

    def objective(self) -> Objective:
        """Build the objective of the run."""
        self._check_not_given("objective")
        check_trusted(self.untrusted.get("objective"), "objective")
        return build_objective(self.config.objective)


def load_stored(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    trust: bool = False,
    changes: Mapping[str, Any] | None = None,
    model_only: bool = False,
) -> Stored:
    """Read a checkpoint and build its model. Nothing in it is executed without ``trust``.

    Args:
        model: a network for the weights, instead of the one that the checkpoint names.
        trust: build any ``_target_`` of the checkpoint, and import its ``imports``. Otherwise only classes of ``torch.nn``,
            ``torch.optim`` and a list of minitx are allowed.
        changes: nodes that replace stored ones (``model``, ``data``, ``objective``), or keys of ``data``. They need no trust.
        model_only: check data and objective only when they are built.

    Raises:
        ConfigError: the file does not exist or is not a checkpoint of minitx, a target is not trusted, or the model cannot be
            built.
    """
    checkpoint = read_checkpoint(path, verb="read")
    state = checkpoint["minitx"]
    values = {**state["config"], "logger": {}, "callbacks": {}}
    values |= {"ckpt_path": None, "init_from": {}, "output_dir": None}
    trainer = {key: value for key, value in values["trainer"].items() if key not in ("plugins", "profiler", "extra")}
    values |= {"trainer": trainer, "model": state["model"]}
    for name in ("optimizer", "schedule"):
        values.pop(name, None)
    changes = dict(changes or {})
    untrusted = {}
    for name in ("model", "data", "objective"):
        change, given = changes.get(name) or {}, values[name].get("_target_") == GIVEN
        if not trust and "_target_" not in change and not given:
            untrusted[name] = values[name]
        values[name] = dict(change) if "_target_" in change or (given and change) else {**values[name], **change}
    own = () if model is not None else ("model",)
    for name in own if model_only else (*own, "data", "objective"):
        check_trusted(untrusted.get(name), name)
    if not trust:
        values["imports"] = []
    import_modules(values.get("imports", ()))
    try:
        tokenizer = None if state["tokenizer"] is None else tokenizers.from_dict(state["tokenizer"])
        if model is None:
            model = build_stored(values["model"])
        model.load_state_dict(network_weights(checkpoint))
    except ConfigError:
        raise
    except Exception as error:  # an unknown field, weights of other shapes, a tokenizer of another kind
        raise ConfigError(f"ckpt_path={path} holds a model that cannot be built: {first_line(error)}") from error
    return Stored(str(path), model.eval(), tokenizer, from_dict(RunConfig, values), state, untrusted)


def build_stored(node: Mapping[str, Any]) -> nn.Module:
    """Build the network of a stored node, with new weights."""
    if is_part(node):
        return build(node, "model")
    config = TransformerConfig(**node)
    return build_model(config, core_of(config))


def load_model(
    path: str | Path, model: nn.Module | None = None, trust: bool = False
) -> tuple[nn.Module, Tokenizer | None, dict[str, Any]]:
    """Load a checkpoint: the trained network in evaluation mode on the CPU, its tokenizer (or None), and the stored plain data.

    Args:
        model: a network for the weights. Default: the one that the checkpoint names.
        trust: whether to build any code that the checkpoint names.

    Raises:
        ConfigError: see ``load_stored``.
    """
    found = load_stored(path, model=model, trust=trust, model_only=True)
    return found.network, found.tokenizer, found.state


Network = TypeVar("Network", bound=nn.Module)


def place(model: Network, device: str) -> Network:
    """Move ``model`` to ``device``, a name of torch or ``auto``, which uses a GPU if there is one.

    Raises:
        ConfigError: the name or the device does not exist.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device={device} cannot be used: {first_line(error)}") from error
