"""What an installation puts on the path: ``minitx-train`` and its sisters, which may lack what ``minitx[train]`` brings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _told(program: str) -> Iterator[None]:
    """Exit with 2 and one sentence where a package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "minitx"):
            raise
        sys.stderr.write(
            f"error: minitx-{program} needs the package {package}, which is not installed: pip install minitx[train]\n"
        )
        raise SystemExit(2) from None


def train() -> int:
    """``minitx-train``: a training run, or a grid of them."""
    with _told("train"):
        from minitx.cli.train import main

        return main()


def evaluate() -> int:
    """``minitx-evaluate``: judge a trained model."""
    with _told("evaluate"):
        from minitx.cli.evaluate import main

        return main()


def generate() -> int:
    """``minitx-generate``: let a trained model write."""
    with _told("generate"):
        from minitx.cli.generate import main

        return main()


def cost() -> int:
    """``minitx-cost``: count what a model costs."""
    with _told("cost"):
        from minitx.cli.cost import main

        return main()


def view() -> int:
    """``minitx-view``: look at a model's attention."""
    with _told("view"):
        from minitx.cli.view import main

        return main()


def atlas() -> int:
    """``minitx-atlas``: what every attention head does."""
    with _told("atlas"):
        from minitx.cli.atlas import main

        return main()
