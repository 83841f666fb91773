"""Where cells run: worker processes of this machine, Slurm jobs (submitit) or Ray tasks, behind one small class.

A launcher takes a cell and gives a future of its ``Outcome``. The future never raises: a cell that fails, and a process,
job or node that dies with it, are outcomes. submitit and Ray are imported when they are asked for.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minitx.ablation.grid import Cell, settings
from minitx.config import ConfigError
from minitx.config.checks import first_line

RunCell = Callable[[Sequence[str], str], dict[str, Any]]
WORKER_DIED = "a worker process died"
_CLUSTERS = ("slurm", "local", "debug")


@dataclass(frozen=True)
class Outcome:
    """What came of a cell, or of a stack of them; an error travels as text, because not every exception can be sent."""

    result: Any
    error: str | None
    seconds: float


class Launcher:
    """Runs cells, ``workers`` at once; who calls sees to it that no more are under way."""

    def __init__(self, workers: int, run_cell: RunCell) -> None:
        self.workers, self.run_cell = workers, run_cell

    def submit(self, cell: Cell, folder: Path) -> Future[Outcome]:
        """Start a cell in its place under ``folder``; the future never raises."""
        return _in_thread(self._run, *self._arguments(cell, folder))

    def runs_alone(self, cell: Cell) -> bool:
        """Whether nothing may run beside ``cell``; a cluster finds each job and task its place."""
        return False

    def close(self) -> None:
        """End what is under way."""

    def _arguments(self, cell: Cell, folder: Path) -> tuple[Any, ...]:
        """Those with which ``attempt`` runs a cell."""
        return self.run_cell, cell.overrides, str(folder / "cells" / cell.study / cell.hash)

    def _run(self, *arguments: Any) -> Outcome:
        """What comes of ``attempt`` where it is called elsewhere."""
        raise NotImplementedError


@contextmanager
def open_launcher(
    name: str,
    workers: int,
    run_cell: RunCell,
    folder: Path,
    *,
    devices: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Iterator[Launcher]:
    """The launcher ``name`` (local, slurm, ray); what it runs ends with the context, whatever happens in it.

    Args:
        run_cell: what runs a cell; found by its name in another process, so it lies at the top of a module.
        folder: the grid's; submitit keeps its files in ``folder/jobs``.
        devices: for local, the GPUs to pin workers to.
        options: for slurm and ray, see ``Submitit`` and ``Ray``.

    Raises:
        ConfigError: the engine is not installed, not to be reached, or refuses an option.
    """
    launcher: Launcher
    if name == "slurm":
        launcher = Submitit(workers, run_cell, folder / "jobs", options or {})
    elif name == "ray":
        launcher = Ray(workers, run_cell, options or {})
    else:
        launcher = Pool(workers, run_cell, devices)
    try:
        yield launcher
    finally:
        launcher.close()


def devices_of(overrides: Sequence[str]) -> int:
    """The number of devices that the last ``trainer.devices`` override asks for; 1 where none does.

    >>> devices_of(["trainer.devices=4", "seed=1", "trainer.devices=2"]), devices_of(["seed=1"])
    (2, 1)
    """
    given = settings(overrides).get("trainer.devices", "")
    return int(given) if given.isdecimal() else 1


def attempt(run: Callable[..., Any], *arguments: Any) -> Outcome:
    """``run(*arguments)`` where this is called; an exception is an outcome."""
    started = time.perf_counter()
    try:
        result = run(*arguments)
    except Exception as error:
        return Outcome(None, one_line(error), time.perf_counter() - started)
    return Outcome(result, None, time.perf_counter() - started)


def one_line(error: BaseException) -> str:
    """An exception's kind and words, without line ends."""
    return " ".join(f"{type(error).__name__}: {error}".split())


# --- this machine


class Pool(Launcher):
    """Worker processes that live for the whole grid, because importing the training stack costs seconds.

    Where one dies, all are replaced, and the cells that were under way come back as ``WORKER_DIED``. With ``devices``
    (values of ``CUDA_VISIBLE_DEVICES``) each worker sees one of them, in turn. A cell that asks for several devices gets
    a launch of its own in place of the workers: what runs it starts processes itself.
    """

    def __init__(self, workers: int, run_cell: RunCell, devices: Sequence[str] = ()) -> None:
        super().__init__(workers, run_cell)
        self.devices = tuple(devices)
        self.executor: ProcessPoolExecutor | None = None

    def submit(self, cell: Cell, folder: Path) -> Future[Outcome]:
        """As ``Launcher.submit``: in a worker, or, where a cell runs alone, in processes of its own."""
        arguments = self._arguments(cell, folder)
        if self.runs_alone(cell):
            self.close()  # idle workers would keep the devices' memory
            return _in_thread(attempt, *arguments)
        if self.executor is None:
            self.executor = self._start()
        try:
            return _in_thread(_from_worker, self.executor.submit(attempt, *arguments))
        except BrokenProcessPool:  # a worker died since the last look
            self.close()
            return self.submit(cell, folder)

    def runs_alone(self, cell: Cell) -> bool:
        """Whether the cell asks for several devices."""
        return devices_of(cell.overrides) > 1

    def close(self) -> None:
        """End the workers, without waiting for cells that have not begun."""
        if self.executor is not None:
            processes = list((self.executor._processes or {}).values())  # shutdown forgets them
            self.executor.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()  # SIGTERM would only stop the cell that it is in
            self.executor = None

    def _start(self) -> ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")
        places = None
        if self.devices:
            places = spawn.SimpleQueue()
            for i in range(self.workers):
                places.put(self.devices[i % len(self.devices)])
        return ProcessPoolExecutor(self.workers, spawn, initializer=_start_worker, initargs=(os.getpid(), places))


def _start_worker(parent: int, places: Any) -> None:
    if places is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = places.get()  # torch is not imported yet
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; it kills its workers
    logging.disable(logging.INFO)
    end_with(parent)


def end_with(parent: int) -> None:
    """End this process when ``parent`` is no longer its parent: killed outright, perhaps before this process began."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _from_worker(future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except BrokenProcessPool:
        return Outcome(None, WORKER_DIED, 0.0)


def _in_thread(function: Callable[..., Outcome], *arguments: Any) -> Future[Outcome]:
    """``function(*arguments)`` in a thread that does not keep this process alive; what it raises is an outcome."""
    future: Future[Outcome] = Future()

    def work() -> None:
        whole = attempt(function, *arguments)
        future.set_result(whole.result or whole)

    threading.Thread(target=work, daemon=True).start()
    return future


# --- a cluster


class Submitit(Launcher):
    """Slurm jobs, one a cell, by submitit (https://github.com/facebookincubator/submitit).

    ``options`` are those of its ``update_parameters`` (``slurm_partition``, ``timeout_min``, ``gpus_per_node`` …; an hour
    a job unless said otherwise), and ``cluster``: ``slurm``, or, to try it without one, ``local`` (processes of this
    machine) or ``debug`` (this process). The folder must be one that the nodes see. Jobs are cancelled with the grid; a
    grid that was killed outright leaves them in the queue, under the name minitx.
    """

    def __init__(self, workers: int, run_cell: RunCell, folder: Path, options: Mapping[str, Any]) -> None:
        super().__init__(workers, run_cell)
        try:
            import submitit
        except ImportError:
            raise ConfigError(_not_installed("slurm", "submitit")) from None
        parameters = {"name": "minitx", "timeout_min": 60, **options}
        cluster = str(parameters.pop("cluster", "slurm"))
        if cluster not in _CLUSTERS:
            raise ConfigError(f"ablation.launcher_options.cluster={cluster} is not allowed: one of {', '.join(_CLUSTERS)}")
        try:
            self.executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self.executor.update_parameters(**parameters)
        except (RuntimeError, NameError, AssertionError) as error:
            raise ConfigError(f"ablation.launcher=slurm with launcher_options={dict(options)}: {error}") from None
        self.folder, self.in_process = folder, cluster == "debug"
        self.jobs = set[Any]()
        self.closed = False
        self.lock = threading.Lock()  # submitit keeps one book for all jobs

    def submit(self, cell: Cell, folder: Path) -> Future[Outcome]:
        """As ``Launcher.submit``: a job of its own."""
        if not self.in_process:
            return super().submit(cell, folder)
        future: Future[Outcome] = Future()
        future.set_result(self.executor.submit(attempt, *self._arguments(cell, folder)).result())
        return future

    def close(self) -> None:
        """Cancel the jobs that are under way."""
        with self.lock:
            self.closed = True
            for job in self.jobs:
                job.cancel(check=False)

    def _run(self, *arguments: Any) -> Outcome:
        started = time.perf_counter()
        stopped = Outcome(None, "the job died: the grid was stopped", 0.0)
        with self.lock:
            if self.closed:
                return stopped
            job = self.executor.submit(attempt, *arguments)
            self.jobs.add(job)
        patience = 5.0  # once cancelled: a job that had not begun never says that it is over
        try:
            while not self._over(job):
                if self.closed and patience <= 0.0:
                    return stopped
                patience -= 0.5 if self.closed else 0.0
                time.sleep(0.5)
            with self.lock:
                outcome = job.result()
        except Exception as error:
            return Outcome(None, f"the job died: {first_line(error)}", time.perf_counter() - started)
        finally:
            with self.lock:
                self.jobs.discard(job)
        for path in self.folder.glob(f"{job.job_id}_*") if outcome.error is None else ():
            path.unlink()  # four files a job; those of a job that failed stay
        return outcome

    def _over(self, job: Any) -> bool:
        with self.lock:
            return bool(job.done())


class Ray(Launcher):
    """Ray tasks, one a cell (https://docs.ray.io); Ray keeps its worker processes between cells.

    ``options`` are those of ``ray.init`` (``address`` of a cluster; without one Ray starts on this machine), and ``task``,
    those of ``ray.remote`` (``{num_gpus: 1}``: without it Ray shows a cell no GPU). The folder must be one that the nodes
    see.
    """

    def __init__(self, workers: int, run_cell: RunCell, options: Mapping[str, Any]) -> None:
        super().__init__(workers, run_cell)
        try:
            import ray
        except ImportError:
            raise ConfigError(_not_installed("ray", "ray")) from None
        place = {"log_to_driver": False, "logging_level": logging.ERROR, **options}
        task = {"num_cpus": 1, "max_retries": 0, **place.pop("task", {})}
        if "address" not in place:
            place.setdefault("include_dashboard", False)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            ray.init(**place)
            self.remote = ray.remote(**task)(attempt)
        except (RuntimeError, ConnectionError, TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"ablation.launcher=ray with launcher_options={dict(options)}: {one_line(error)}") from None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)  # Ray installs its own, which would exit at once
        self.shutdown = ray.shutdown

    def close(self) -> None:
        """Leave the cluster, or end the one that was started here."""
        self.shutdown()

    def _run(self, *arguments: Any) -> Outcome:
        started = time.perf_counter()
        try:
            outcome: Outcome = self.remote.remote(*arguments).future().result()
        except Exception as error:
            return Outcome(None, f"the task died: {first_line(error)}", time.perf_counter() - started)
        return outcome


def _not_installed(launcher: str, package: str) -> str:
    return f"ablation.launcher={launcher} needs the package {package}, which is not installed: pip install minitx[{launcher}]"
