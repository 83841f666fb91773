"""Several processes on one machine, as torchrun would start them, from a server that has imported torch once."""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
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


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """What ``function(*arguments, **options)`` returns in each of ``world`` processes.

    Raises:
        AssertionError: one of them raised (with its traceback), or was not done in time.
        EOFError: one of them died.
    """
    # as torchrun does: no other program gets this port
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = _SERVER.Pipe()
        settings = environment(rank, world, store.port) if world > 1 else {}
        process = _SERVER.Process(
            target=_run, args=(theirs, settings, partial(function, **options), arguments)
        )  # a daemon could start no workers
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results = []
    try:
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(PATIENCE), f"rank {rank} was not done after {PATIENCE} s"
            good, value = pipe.recv()
            assert good, f"rank {rank} raised:\n{value}"
            results.append(value)
    finally:
        for process in processes:
            process.kill()
    return results


def _run(pipe: Connection, settings: Mapping[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(settings)
    rank_zero_only.rank = int(settings.get("RANK", 0))  # Lightning reads it at import, and the server has imported Lightning
    say_nothing()
    torch.set_num_threads(1)
    try:
        pipe.send((True, function(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can wait for the interpreter for ever while it ends


def say_nothing() -> None:
    """The server keeps the output of the test that it was started in; what its processes print belongs to no test."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)


def train_as(overrides: list[str], folder: Path, data: Path) -> dict[str, Any]:
    """``train.py OVERRIDES`` in ``folder``, with caches of data in ``data``; the run's result."""
    import minitx.data.corpus

    minitx.data.corpus.data_dir = lambda: data  # type: ignore[assignment]
    return run_training(compose_config(overrides), folder, "command")
