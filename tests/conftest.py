"""Every test starts from one seed, on one thread."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("minitx", deadline=None, derandomize=True)
settings.load_profile("minitx")


@pytest.fixture(autouse=True)
def _seeded():
    torch.set_num_threads(1)
    torch.manual_seed(0)
