"""After a run its process is unchanged: environment, random generators, signal handlers, warnings, logging, torch's switches."""

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
from minitx.training.callbacks import StoppedError

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


class Ends(L.Callback):
    """Ends the run after its second step, by an error or by a signal."""

    def __init__(self, how):
        self.how = how

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            if self.how == "signal":
                os.kill(os.getpid(), signal.SIGINT)
            else:
                raise ArithmeticError("in the middle")


ENDINGS = {"well": None, "refused": ConfigError, "error": ArithmeticError, "signal": StoppedError}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_run_leaves_its_process_as_it_was(make_config, tmp_path, monkeypatch, ending):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    config = make_config(model__dropout=0.1, trainer__deterministic=True, trainer__threads=torch.get_num_threads() + 1)
    if ending == "refused":  # after data and model were made
        config = dataclasses.replace(config, optimizer=config.optimizer.with_(rules=[{"match": "nothing", "lr": 2.0}]))
    np.random.seed(3)
    before = process()
    if (error := ENDINGS[ending]) is None:
        train_with(config, tmp_path / "run")
    else:
        with pytest.raises(error):
            train_with(config, tmp_path / "run", Ends(ending))
    after = process()
    assert {name: after[name] for name in before if after[name] != before[name]} == {}
