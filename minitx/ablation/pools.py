"""Pools that compute the runs of a grid: worker processes of this machine, or Slurm jobs through submitit.

A pool has ``workers``, ``submit(function, *arguments)`` and ``close()``. ``submit`` returns an object with ``done()`` and
``result()``, like a future or a job of submitit. ``result()`` raises an error if the process or job died. The caller must submit
at most ``workers`` calls at the same time. Functions and arguments are pickled. ``close`` stops all running calls.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from minitx.config import ConfigError

SLURM_JOBS = 16
"""The default of ``ablation.workers`` on Slurm."""


class LocalPool:
    """Worker processes that live for the whole grid, because importing torch and Lightning costs seconds.

    If a worker dies, its call is lost and the worker is replaced. Workers end with this process, even if it is killed.

    Args:
        workers: the number of processes.
        devices: values of ``CUDA_VISIBLE_DEVICES``. Each worker gets one of them, in turn.
    """

    def __init__(self, workers: int, devices: Sequence[str] = ()) -> None:
        self.workers, self.devices = workers, tuple(devices) or (None,)
        self._executors: dict[int, ProcessPoolExecutor] = {}  # one process each, so that a death breaks no other
        self._calls: dict[int, Future[Any]] = {}

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Start ``function(*arguments)`` in a free worker."""
        free = next(i for i in range(self.workers) if i not in self._calls or self._calls[i].done())
        try:
            if free not in self._executors:
                spawn, device = multiprocessing.get_context("spawn"), self.devices[free % len(self.devices)]
                self._executors[free] = ProcessPoolExecutor(1, spawn, initializer=_start_worker, initargs=(device,))
            self._calls[free] = self._executors[free].submit(function, *arguments)
        except BrokenProcessPool:
            del self._executors[free]
            return self.submit(function, *arguments)
        return self._calls[free]

    def close(self) -> None:
        """Kill the workers."""
        for executor in self._executors.values():
            processes = list((executor._processes or {}).values())  # shutdown forgets them, and waits for what they do
            executor.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
        self._executors.clear()


def _start_worker(device: str | None) -> None:
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device  # torch is not imported yet
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, and kills its workers
    logging.disable(logging.INFO)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


class SlurmPool:
    """Slurm jobs through submitit (https://github.com/facebookincubator/submitit), one job per call.

    Args:
        workers: the number of jobs at the same time.
        folder: the folder for submitit's files. All nodes must see it.
        options: options of submitit's ``update_parameters`` (``slurm_partition``, ``timeout_min``, ...). The default limit is
            one hour per job. ``cluster`` is ``slurm``, or ``local`` to try it with processes of this machine.

    Raises:
        ConfigError: submitit is not installed, there is no Slurm, or submitit does not accept an option.
    """

    def __init__(self, workers: int, folder: Path, options: Mapping[str, Any]) -> None:
        self.workers = workers
        try:
            import submitit
        except ImportError:
            raise ConfigError("ablation.launcher=slurm needs submitit: install minitx with the extra slurm") from None
        parameters = {"name": "minitx", "timeout_min": 60, **options}
        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=parameters.pop("cluster", "slurm"))
            self._executor.update_parameters(**parameters)
        except (RuntimeError, NameError, ValueError, AssertionError) as error:
            raise ConfigError(f"ablation.launcher=slurm with launcher_options={dict(options)}: {error}") from None
        self._jobs: list[Any] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Start ``function(*arguments)`` as a job."""
        self._jobs.append(self._executor.submit(function, *arguments))
        return self._jobs[-1]

    def close(self) -> None:
        """Cancel the running jobs."""
        for job in self._jobs:
            if not job.done():
                job.cancel(check=False)


Pool = LocalPool | SlurmPool
