"""``trainer.compile``: the same training, and the seconds that compiling took are remembered."""

import functools
import logging

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
def test_a_compiled_run_learns_as_a_plain_one_and_says_how_long_compiling_took(kept, make_config, tmp_path, caplog):
    caplog.set_level(logging.INFO, "minitx")
    for name in ("plain", "first", "second"):
        train(make_config(trainer__max_steps=3, trainer__compile=name != "plain"), tmp_path / name)
    assert losses_of(tmp_path / "first") == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-5)
    said = [record.message for record in caplog.records if "compiling" in record.message]
    assert "first time" in said[0] and "last time it took" in said[1] and len(said) == 2
    assert (kept / "seconds.json").is_file()
