"""Build the parts of a checkpoint: the trained model, its tokenizer, and the data and objective of its training.

``checkpoint_files`` writes and reads the files, ``init_from`` starts a new run from their weights, and ``resume_checks`` checks
whether a run may resume from one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from minitx.config import ConfigError, Part
from minitx.config.part import FROM_PYTHON, import_modules
from minitx.config.schema import first_line, read
from minitx.config.training import Data, Model
from minitx.config.training import Objective as ObjectivePart
from minitx.data.task import Task
from minitx.data.task_loading import load_task
from minitx.data.tokenizer import Tokenizer
from minitx.nn.config_differences import joined
from minitx.training.checkpoint_files import load_weights, network_weights, read_checkpoint
from minitx.training.devices import device_of
from minitx.training.net import Net
from minitx.training.network_building import network_of
from minitx.training.objectives import Objective, build_objective

Network = TypeVar("Network", bound=nn.Module)


HINTS: dict[str, Any] = {"model": Model, "data": Data, "objective": ObjectivePart}
"""The parts of a stored config that can be rebuilt."""


@dataclasses.dataclass
class Stored:
    """A trained network, in evaluation mode on the CPU. The data and the objective of its training are built on demand.

    Attributes:
        state: the plain data that the run stored: ``config``, ``model`` and ``tokenizer``.
        nodes: the nodes of ``model``, ``data`` and ``objective``, with the changes of ``load_stored``.
        untrusted: names of the nodes that come from the checkpoint. These nodes may name only classes of torch and minitx.
        network, tokenizer: set by ``load_stored``.
    """

    path: str
    state: dict[str, Any]
    nodes: dict[str, dict[str, Any]]
    untrusted: frozenset[str]
    network: nn.Module = dataclasses.field(init=False)
    tokenizer: Tokenizer | None = dataclasses.field(init=False)
    _parts: dict[str, Part] = dataclasses.field(default_factory=dict)

    @property
    def net(self) -> Net:
        """The network as a ``Net``."""
        return Net.of(self.network)

    def part(self, name: str) -> Part:
        """Return the part ``model``, ``data`` or ``objective``. Its modules are imported only after its node is trusted.

        Raises:
            ConfigError: the part was an object from Python, is not trusted, or does not exist.
        """
        if name in self._parts:
            return self._parts[name]
        node = self.nodes[name]
        if name == "model" and node.get("_target_") == FROM_PYTHON:
            raise ConfigError(
                f"ckpt_path={self.path} contains a model that differs from its config: {joined(node['changes'])}. Build the model "
                "as for training and call load_model(path, model=...), or pass model._target_=MODULE.NAME to evaluate.py"
            )
        if node.get("_target_") == FROM_PYTHON:
            raise ConfigError(
                f"ckpt_path={self.path} was trained with {name} passed from Python, and a checkpoint cannot contain it: pass "
                f"{name}._target_=MODULE.NAME to evaluate.py (text=TEXT to the viewer), or call evaluate() from Python"
            )
        if name in self.untrusted:
            from minitx.training.trust import check_trusted

            check_trusted(node, name)
        self._parts[name] = read(HINTS[name], node, name)
        return self._parts[name]

    def task(self) -> Task:
        """Load the data of the run.

        Raises:
            ConfigError: the data does not exist, or no longer matches the vocabulary or the learned positions of the model.
        """
        task, _ = load_task(self.part("data"), seed=self.state["config"]["seed"], tokenizer=self.tokenizer)
        if task.label_names and self.state["labels"]:
            from minitx.data.classification import numbered_as

            task = numbered_as(task, self.state["labels"])
        net = self.net
        if net.vocab_size is not None and task.model_fields.get("vocab_size", 0) > net.vocab_size:
            raise ConfigError(f"ckpt_path={self.path} was trained on other data: {task.name} has more tokens than the model")
        if net.config is not None:
            net.config.check_length(task.longest or 0)
        return task

    def objective(self) -> Objective:
        """Build the objective of the run."""
        return build_objective(self.part("objective"))


def load_stored(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    trust: bool = False,
    changes: Mapping[str, Any] | None = None,
    model_only: bool = False,
) -> Stored:
    """Read a checkpoint and build its model. Without ``trust``, code that the checkpoint names is not executed.

    Args:
        model: a network to load the weights into. Default: the network that the checkpoint names.
        trust: build any ``_target_`` of the checkpoint, and import its ``imports``. Otherwise only classes of ``torch.nn`` and
            ``torch.optim``, and some of minitx, are allowed (``trust.check_trusted``).
        changes: nodes of ``model``, ``data`` and ``objective`` that replace the stored ones, or single keys of them. They are
            trusted.
        model_only: check the nodes of data and objective only when they are built.

    Raises:
        ConfigError: the file does not exist or is not a checkpoint of minitx, a target is not trusted, or the model cannot be
            built.
    """
    from minitx.training.trust import check_trusted

    checkpoint = read_checkpoint(path, verb="read")
    state = checkpoint["minitx"]
    nodes = {name: dict(state["config"][name]) for name in HINTS}
    nodes["model"] = dict(state["model"])
    untrusted = set[str]()
    for name in HINTS:
        change = (changes or {}).get(name) or {}
        is_object = nodes[name].get("_target_") == FROM_PYTHON
        if "_target_" in change or (is_object and change):
            nodes[name] = dict(change)
            continue
        if not trust and not is_object:
            untrusted.add(name)
            nodes[name].pop("cache_dir", None)  # a checkpoint must not determine where files are written
        nodes[name].update(change)
    stored = Stored(str(path), state, nodes, frozenset(untrusted))
    for name in untrusted - ({"data", "objective"} if model_only else set()) - ({"model"} if model is not None else set()):
        check_trusted(nodes[name], name)
    import_modules(state["config"].get("imports", ()) if trust else ())
    try:
        stored.tokenizer = None if state["tokenizer"] is None else Tokenizer.from_dict(state["tokenizer"])
        network = network_of(stored.part("model")) if model is None else model
        load_weights(network, network_weights(checkpoint))
    except ConfigError:
        raise
    except Exception as error:  # for example an unknown field, or weights of another shape
        raise ConfigError(f"ckpt_path={path} contains a model that cannot be built: {first_line(error)}") from error
    stored.network = network.eval()
    return stored


def load_model(
    path: str | Path, model: nn.Module | None = None, trust: bool = False
) -> tuple[nn.Module, Tokenizer | None, dict[str, Any]]:
    """Load a checkpoint: the trained network in evaluation mode on the CPU, its tokenizer (or None), and the stored plain data.

    Args:
        model: a network to load the weights into. Default: the network that the checkpoint names. It is required if a model of
            minitx was trained that differs from its config.
        trust: whether to execute any code that the checkpoint names.

    Raises:
        ConfigError: see ``load_stored``.
    """
    stored = load_stored(path, model=model, trust=trust, model_only=True)
    return stored.network, stored.tokenizer, stored.state


def move_to_device(model: Network, device: str) -> Network:
    """Move ``model`` to ``device``: a name of torch, or ``auto`` for the device that training uses (``device_of``).

    Raises:
        ConfigError: the device does not exist, or cannot hold the model.
    """
    try:
        return model.to(device_of() if device == "auto" else torch.device(device))
    except (RuntimeError, AssertionError, TypeError) as error:  # TypeError: float64 on Apple's GPU
        raise ConfigError(f"device={device} cannot be used: {first_line(error)}") from error
