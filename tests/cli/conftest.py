"""The command line in this process: arguments in, exit code and output out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from minitx.cli import atlas, cost, evaluate, generate, train, view

PROGRAMS = {"train": train, "evaluate": evaluate, "generate": generate, "cost": cost, "view": view, "atlas": atlas}


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def shared_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_data: Path) -> Path:
    """An empty current folder; data caches lie elsewhere."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("minitx.data.load.data_dir", lambda: shared_data)
    return folder


@pytest.fixture
def cli(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """``cli("model.scale=inv", ...)`` runs ``train.py``, or another ``program``, in this process."""

    def run(*arguments: str, program: str = "train") -> Said:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [f"{program}.py", *arguments])
            for name in ("HYDRA_FULL_ERROR",):
                patch.setenv(name, os.environ.get(name, "0"))
            code = PROGRAMS[program].main()
        out, err = capfd.readouterr()
        return Said(code, out, err)

    return run
