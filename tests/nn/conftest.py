"""What several tests of ``minitx.nn`` set up alike."""

import pytest

from minitx.nn.backends import chunked


@pytest.fixture
def tiny_tiles(monkeypatch):
    """Tiles of 2 x 2 for ``chunked``, so that five queries and seven keys are twelve of them."""
    monkeypatch.setattr(chunked, "LARGEST", 2)
    monkeypatch.setattr(chunked, "SMALLEST", 2)
