"""How the tests run an example: as a reader imports it."""

import contextlib
import functools
import importlib.util
import io
import sys
from pathlib import Path

import pytest

from minitx.nn import backend_names, unregister_backend

ROOT = Path(__file__).resolve().parents[2]


def scripts(*names):
    """These files of examples/ as modules that find each other, as where Python runs one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        return [importlib.import_module(name) for name in names]


@pytest.fixture(scope="session")
def example():
    """``example(name)``: examples/NAME.py as a new module."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(ROOT / "examples"))  # an example may import another
            spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(autouse=True)
def _only_our_backends_are_left():
    """Examples register backends when they are imported."""
    before = backend_names()
    yield
    for name in set(backend_names()) - set(before):
        unregister_backend(name)


@pytest.fixture(scope="session")
def ran(example):
    """``ran(name)``: what main() of an example found, and what it printed; run once."""

    @functools.cache
    def run(name):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            return example(name).main(), printed.getvalue()

    return run
