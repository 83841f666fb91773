"""After a run that fails its process is unchanged: environment, random generators, signal handlers, warnings, logging, torch's switches.

Runs that end well, by a signal or a crash: ``nothing_global_is_changed`` in tests/lattice/runs.py.
"""

import dataclasses
import logging
import os
import random
import signal
import warnings
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from extra import train_with

from minitx.config import ConfigError

LOGGERS = (None, "lightning.pytorch", "lightning.fabric", "torch.distributed.tensor", "minitx")


def process():
    """What a run may change for its whole process, by name."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    return {
        "environment": dict(os.environ),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "warnings": list(warnings.filters),
        "logging": [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers],
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "exact": (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "matmul": (torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul.fp32_precision),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        "folder": Path.cwd(),
    }


class Fails(L.Callback):
    """Fails after the second step."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            raise ArithmeticError("in the middle")


@pytest.mark.parametrize("ending", ["refused", "error"])
def test_a_run_leaves_its_process_as_it_was(make_config, tmp_path, monkeypatch, ending):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    config = make_config(model__dropout=0.1, trainer__deterministic=True, trainer__threads=torch.get_num_threads() + 1)
    if ending == "refused":  # after data and model were made
        config = dataclasses.replace(config, optimizer=config.optimizer.with_(rules=[{"match": "nothing", "lr": 2.0}]))
    np.random.seed(3)
    before = process()
    with pytest.raises(ConfigError if ending == "refused" else ArithmeticError):
        train_with(config, tmp_path / "run", Fails())
    after = process()
    assert {name: after[name] for name in before if after[name] != before[name]} == {}
