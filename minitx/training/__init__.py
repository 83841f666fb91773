"""Training of models. This file imports only the standard library.

Who calls whom:

    run_job(composed)                     a command line, or a job of ``-m``: one run, or a grid (cli/train.py)
      run_one(config)                     a run in this process, or started on several devices
        run_training(config, folder)      writes config.yaml, command.txt and result.json (cli/launch.py); a grid calls it for each cell
          train(config, folder)           a run, also from Python (run.py)
            build_run(config) -> Run      reads data and weights, and checks that the parts fit each other
            rehearse(run)                 ``Run.fit`` on two rows in a temporary folder (rehearse.py)
            Run.fit(folder) -> result     makes the folder, callbacks and trainer; trains, evaluates, summarises (fit.py)
              Run._train(trainer)         Lightning's loop around ``TrainingModule``, and how it ended
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class StoppedError(Exception):
    """A signal, ``number``, stopped a run or a program. ``ending`` completes the message."""

    def __init__(self, number: int, ending: str) -> None:
        super().__init__(number, ending)  # unchanged arguments, so that the error can be pickled
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code of the program, as shells report signals."""
        return 128 + self.number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}{self.args[1]}"


def rank() -> int:
    """Return the rank of this process, from environment variables; 0 for a single process."""
    return int(next((os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ), "0"))


def local_rank() -> int:
    """Return the number of this process on its machine, from environment variables; 0 for a single process."""
    return int(next((os.environ[name] for name in ("LOCAL_RANK", "SLURM_LOCALID") if name in os.environ), "0"))


@contextmanager
def kept_environment(*names: str) -> Iterator[None]:
    """A context that restores the environment variables ``names`` at its end."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: signals of a terminal and of cluster schedulers, without SIGHUP if it is ignored (nohup)."""
    is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    stops = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
    return stops if is_kept else [*stops, signal.SIGHUP]
