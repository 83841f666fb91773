"""The programs, one module each, and their common parts. Only this package imports hydra and omegaconf.

This file defines the installed commands, such as ``minitx-train``. They report missing packages of ``minitx[train]``.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def importing(library: str = "torch") -> Iterator[None]:
    """A context without garbage collection until ``library`` is loaded: the imports of a run make 700,000 objects, and little garbage.

    Then all objects are frozen: later collections skip them, and so does the collection at exit.
    """
    is_paused = gc.isenabled() and library not in sys.modules
    if is_paused:
        gc.disable()
    try:
        yield
    finally:
        if is_paused:
            gc.freeze()
            gc.enable()


def _program(name: str) -> Callable[[], int]:
    """Return the command ``minitx-NAME``: call ``minitx.cli.NAME.main``, or exit with code 2 if a package is missing."""

    def run() -> int:
        try:
            code: int = importlib.import_module(f"minitx.cli.{name}").main()
        except ModuleNotFoundError as error:
            from minitx.config.packages import package_of_extra  # only errors need it

            advice = package_of_extra(str(error.name).partition(".")[0])
            if not advice:
                raise
            sys.stderr.write(f"error: minitx-{name} needs {advice}\n")
            raise SystemExit(2) from None
        return code

    run.__doc__ = f"``minitx-{name}``: the program of ``minitx.cli.{name}``; returns its exit code."
    return run


minitx_train, minitx_evaluate, minitx_generate = map(_program, ("train", "evaluate", "generate"))
minitx_view, minitx_export, minitx_check = map(_program, ("view", "export", "check"))
