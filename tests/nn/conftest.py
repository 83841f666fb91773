"""What several tests of ``minitx.nn`` set up alike."""

import pytest
import torch

from minitx.nn import backends
from minitx.nn.backends import chunked


@pytest.fixture
def tiny_tiles(monkeypatch):
    """Tiles of 2 x 2 for ``chunked``, so that five queries and seven keys are twelve of them."""
    monkeypatch.setattr(chunked, "LARGEST", 2)
    monkeypatch.setattr(chunked, "SMALLEST", 2)


@pytest.fixture
def chunked_from_the_start(monkeypatch):
    """``auto`` takes ``chunked`` for small calls, too."""
    for name, value in {"CHUNKED_FROM": 1, "CHUNKED_FROM_OVER_PLAIN": 1, "FEW_TILES": 1.0}.items():
        monkeypatch.setattr(backends, name, value)


@pytest.fixture
def default_bfloat16():
    """The default dtype in the steps of ``trainer.precision=bf16-true``, but not in their backward passes."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)
