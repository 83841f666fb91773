"""What an installation puts on the path: ``minitx-train`` and its sisters, which may lack what ``minitx[train]`` brings."""

from __future__ import annotations

import sys
from importlib import import_module


def _start(program: str) -> int:
    """The program's exit code; 2 and one sentence where a package is missing."""
    try:
        return import_module(f"minitx.cli.{program}").main()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "minitx"):
            raise
        sys.stderr.write(f"error: minitx-{program} needs the package {package}, which is not installed: pip install minitx[train]\n")
        return 2


def train() -> int:
    """``minitx-train``: a training run, or a grid of them."""
    return _start("train")


def evaluate() -> int:
    """``minitx-evaluate``: judge a trained model."""
    return _start("evaluate")


def generate() -> int:
    """``minitx-generate``: let a trained model write."""
    return _start("generate")


def cost() -> int:
    """``minitx-cost``: count what a model costs."""
    return _start("cost")


def view() -> int:
    """``minitx-view``: look at a model's attention."""
    return _start("view")


def atlas() -> int:
    """``minitx-atlas``: what every attention head does."""
    return _start("atlas")
