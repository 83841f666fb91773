"""``trainer.compile``: the same training."""

import functools

import pytest
import torch
from extra import losses_of

from minitx.training.run import train


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A folder for compiled kernels, and a compiler that needs no C++."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield tmp_path / "kept"
    torch.compiler.reset()


@pytest.mark.slow
def test_a_compiled_run_learns_as_a_plain_one(kept, make_config, tmp_path):
    for name in ("plain", "compiled"):
        train(make_config(trainer__max_steps=3, trainer__compile=name == "compiled"), tmp_path / name)
    assert losses_of(tmp_path / "compiled") == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-5)
