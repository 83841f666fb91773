"""Every test starts from one seed, on one thread, without a network (pytest-socket, see pyproject.toml)."""

import gc
import logging
import os
import sys
import traceback
from functools import cache
from types import SimpleNamespace

import pytest
from _pytest.logging import catching_logs
from hypothesis import HealthCheck, settings

from tests.waiting import PATIENCE

os.environ["HF_HUB_OFFLINE"] = "1"  # for the programs that tests start, too, whose sockets nobody watches
os.environ |= {name: str(PATIENCE) for name in ("WANDB__SERVICE_WAIT", "WANDB_INIT_TIMEOUT")}  # 30 s and 90 s are few
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of those programs; two of them share two cores
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a thread that waits sleeps, where several are asked for
# as examples/cost.py does; torch's profiler reads it once in a process, whoever profiles first
os.environ["KINETO_LOG_LEVEL"] = "99"
gc.set_threshold(50_000, 20, 20)  # not after each 700 objects: a tenth of the time of collecting and running the tests
settings.register_profile("minitx", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("minitx")


@pytest.fixture(autouse=True)
def _seeded():
    import torch  # not above: the process that hands out the tests reads this file, and runs none

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def process_group():
    """A group of this process alone. What holds the group goes before the group does: a DDP model that outlives it takes it
    along and waits, with Python's lock, for a thread of gloo that waits for the lock (in one of some hundred tries)."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()
    distributed.destroy_process_group()


def _ask_few_loggers():
    """pytest asks each logger, six times a test, whether it is to be heard apart from the root. There are thousands, and a few are."""
    manager, enter = logging.root.manager, catching_logs.__enter__
    apart, count = {}, 0

    def enter_apart(self):
        nonlocal apart, count
        every = manager.loggerDict
        if len(every) != count:
            apart = {name: logger for name, logger in every.items() if not getattr(logger, "propagate", True)}
            count = len(every)
        manager.loggerDict = apart
        try:
            return enter(self)
        finally:
            manager.loggerDict = every

    catching_logs.__enter__ = enter_apart


def pytest_collection_finish():
    """The collected tests stay until the end: the garbage collector need not walk over them after each."""
    import torch

    if torch.version.cuda and not torch.cuda.is_available():  # it wants a driver even for fake tensors; the CPU's says no
        for kernel in ("flash", "efficient", "cudnn"):
            setattr(torch.backends.cuda, f"can_use_{kernel}_attention", lambda params, debug=False: False)
    if not torch.accelerator.is_available():  # each seeding would keep a formatted stack for each kind of device
        for module in (torch.cuda, torch.xpu, torch.mtia):
            module.traceback = SimpleNamespace(**{**vars(traceback), "format_stack": list})
    if "lightning" in sys.modules:
        from lightning.fabric.utilities import registry

        registry.entry_points = cache(registry.entry_points)  # each Trainer would read the metadata of all packages
    if "minitx.cli.compose" in sys.modules:
        from tests.composing import remember_compositions

        remember_compositions()
    _ask_few_loggers()
    gc.collect()
    gc.freeze()
