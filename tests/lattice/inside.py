"""The only lines of the run lattice that know the inside of minitx: how a command line is run, and where a run keeps its weights."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from torch import nn


def train_by(words: list[str], folder: Path) -> dict[str, Any]:
    """Run ``train.py WORDS`` in this process and in ``folder``, and return the content of ``result.json``.

    bfloat16 is used on any CPU.
    """
    from minitx.cli.compose import compose_config
    from minitx.cli.launch import run_training

    with mock.patch("minitx.training.trainer.cpu_precision", str):
        return run_training(compose_config(words), folder, "train.py")


def program(name: str, words: list[str]) -> tuple[int, str]:
    """The exit code of ``minitx-NAME WORDS`` in this process, and what it printed."""
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [name, *words]),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        return importlib.import_module(f"minitx.cli.{name}").main(), printed.getvalue()


@contextlib.contextmanager
def reading() -> Iterator[list[list[int]]]:
    """The ids that models read inside of this context, one list for each call."""
    read: list[list[int]] = []

    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        ids = args[0].flatten().tolist() if isinstance(module, nn.Embedding) else []
        if ids != [*range(len(ids))]:  # a position is no id
            read.append(ids)

    with nn.modules.module.register_module_forward_pre_hook(record):
        yield read


def network_of(module: Any) -> nn.Module:
    """The network of Lightning's module in a callback."""
    return module.network


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint."""
    from minitx.training.checkpoint_files import read_checkpoint

    return read_checkpoint(path)


def weights_in(path: Path) -> dict[str, Any]:
    """The network's weights in a checkpoint, in the precision of the run. ``load_model`` rounds them to float32."""
    return {name.removeprefix("network."): weight for name, weight in read(path)["state_dict"].items()}


def load_network(path: Path) -> nn.Module:
    """The network that a checkpoint names, with its weights."""
    return _loaded(path)[0]


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a checkpoint."""
    return _loaded(path)[1]


def _loaded(path: Path) -> Any:
    from minitx.training.checkpoints import load_model

    return load_model(path, trust=True)
