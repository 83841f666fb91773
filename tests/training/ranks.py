"""Several processes on one machine, as torchrun would start them, from a server that has imported torch once."""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed import TCPStore

from minitx.cli.compose import compose_config
from minitx.cli.launch import run_training
from tests.waiting import PATIENCE

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["minitx.training.run", "minitx.cli.train", "minitx.cli.compose", "torch.distributed.fsdp"])


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun tells a process."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in (places | meeting | {"TORCHELASTIC_RUN_ID": "test"}).items()}


class Ranks:
    """Processes that wait for functions to call. All that they call has one process group. After a failure they are gone."""

    def __init__(self, world: int) -> None:
        # as torchrun does: no other program gets this port
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._traces = tempfile.TemporaryDirectory(prefix="ranks")
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(world):
            ours, theirs = _SERVER.Pipe()
            settings = environment(rank, world, self._store.port) if world > 1 else {}
            # not a daemon, because a daemon cannot start workers
            process = _SERVER.Process(target=_serve, args=(theirs, settings, self._trace(rank)))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    @property
    def is_open(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def call(self, function: Callable[..., Any], *arguments: Any, patience: float = PATIENCE, **options: Any) -> list[Any]:
        """What ``function(*arguments, **options)`` returns in each process.

        Raises:
            AssertionError: one of them raised (with its traceback), or was not done in time (with the lines where each one waits).
            EOFError: one of them died.
        """
        results: dict[int, Any] = {}
        end = time.monotonic() + patience
        try:
            for pipe in self.pipes:
                pipe.send((partial(function, **options), arguments))
            while len(results) < len(self.pipes):
                open_pipes = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
                ready = wait(open_pipes, max(0.0, end - time.monotonic()))
                late = ", ".join(str(rank) for rank in range(len(self.pipes)) if rank not in results)
                assert ready, f"rank {late} was not done after {patience:.0f} s\n{self._where_they_wait()}"
                for pipe in ready:
                    rank = self.pipes.index(pipe)
                    good, results[rank] = pipe.recv()
                    assert good, f"rank {rank} raised:\n{results[rank]}"
        except BaseException:
            self.close()
            raise
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that load its batches
            process.kill()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []
        with contextlib.suppress(OSError):
            self._traces.cleanup()

    def _trace(self, rank: int) -> str:
        return f"{self._traces.name}/{rank}"

    def _where_they_wait(self) -> str:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGQUIT)
        time.sleep(1.0)  # faulthandler writes at once
        return "\n".join(f"rank {rank}: {_lines(self._trace(rank))}" for rank in range(len(self.processes)))


def _lines(path: str) -> str:
    """The lines of the package and of the tests in a trace, the innermost first."""
    lines = Path(path).read_text(errors="replace").splitlines() if Path(path).exists() else []
    places = [line.partition("File ")[2] for line in lines if "minitx/" in line or "tests/" in line]
    return " < ".join(f"{place.split(chr(34))[1].rpartition('/')[2]}:{place.partition('line ')[2]}" for place in places[:5])


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """What ``function(*arguments, **options)`` returns in each of ``world`` new processes. For errors, see ``Ranks.call``."""
    ranks = Ranks(world)
    try:
        return ranks.call(function, *arguments, **options)
    finally:
        ranks.close()


def _serve(pipe: Connection, settings: Mapping[str, str], trace: str) -> None:
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type] # as in a process of torchrun: workers are forked
    os.environ.update(settings)
    rank_zero_only.rank = int(settings.get("RANK", 0))  # Lightning reads it at import, and the server has imported Lightning
    say_nothing()
    torch.set_num_threads(1)
    with contextlib.suppress(FileNotFoundError):
        faulthandler.register(signal.SIGQUIT, Path(trace).open("w"))  # noqa: SIM115 (it stays open)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can wait for the interpreter for ever while it ends


def say_nothing() -> None:
    """The server keeps the output of the test that it was started in; what its processes print belongs to no test."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)


def train_as(overrides: list[str], folder: Path, data: Path) -> dict[str, Any]:
    """``train.py OVERRIDES`` in ``folder``, with caches of data in ``data``; the run's result."""
    import minitx.data.token_cache

    minitx.data.token_cache.data_dir = lambda: data  # type: ignore[assignment]
    return run_training(compose_config(overrides), folder, "command")
