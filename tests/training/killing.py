"""Runs that are killed or stopped after a random step and go on: the harness of the suite and of ``tests/tools/endurance.py``.

Each run is a process of its own, forked by a server that has imported everything once.
"""

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ranks import _SERVER, say_nothing, train_as

from minitx.training import StoppedError
from minitx.training.checkpoint_files import read_checkpoint
from minitx.training.metrics_csv import OF_THE_MACHINE, read_metrics
from minitx.training.module import TrainingModule
from minitx.training.trainer import AtomicCheckpointIO
from tests.waiting import PATIENCE

RUN = [
    "data=kv_lookup", "data.batch_size=8", "data.val_size=8", "model.embed_dim=8", "model.num_heads=2", "model.num_layers=1",
    "model.dropout=0.1", "trainer.accelerator=cpu", "trainer.threads=1", "trainer.log_every=1", "trainer.val_batches=1",
    "callbacks.progress=false", "trainer.clip=0.5",
]  # fmt: skip


@dataclass(frozen=True)
class Blow:
    """How a run is hit: which signal, and after which share of its steps, or (``save``) in its n-th save of a checkpoint."""

    number: int
    after: float
    save: int | None = None
    tmpdir: str | None = None


def length_of(steps: int) -> list[str]:
    """A run of ``steps``, with a checkpoint and a validation now and then, at different steps."""
    every = [f"trainer.ckpt_every={max(steps // 16, 1)}", f"trainer.val_every={max(steps // 10, 1)}"]
    return [*RUN, f"trainer.max_steps={steps}", *every]


def _child(overrides: list[str], folder: Path, cache: Path, blow: Blow | None, step: int, ready: Any) -> None:
    """Trains, and says through ``ready`` when the blow is due: before ``step`` (0: before the run begins), or in its save."""
    say_nothing()
    torch.set_num_threads(1)
    if blow is not None and blow.tmpdir is not None:
        tempfile.tempdir = os.environ["TMPDIR"] = blow.tmpdir
    try:
        if blow is not None and blow.save is not None:
            _announce(AtomicCheckpointIO, "save_checkpoint", blow.save, ready)
        elif blow is not None and step:
            _announce(TrainingModule, "training_step", step, ready)
        elif blow is not None:
            ready.send(0)
        train_as(overrides, folder, cache)
        os._exit(0)
    except StoppedError as error:
        os._exit(128 + error.number)
    except KeyboardInterrupt:  # before the run listens
        os._exit(130)


def _announce(owner: type, name: str, number: int, ready: Any) -> None:
    """Make the ``number``-th call of a method say that it begins."""
    calls, method = itertools.count(1), getattr(owner, name)

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            ready.send(number)
        return method(self, *arguments, **options)

    setattr(owner, name, counted)


def run(overrides: list[str], folder: Path, cache: Path, blow: Blow | None = None, step: int = 0) -> int:
    """One process: its exit code, negative for the signal that ended it; ``blow`` hits it in ``step`` or in a save."""
    ours, theirs = _SERVER.Pipe()
    process = _SERVER.Process(target=_child, args=(overrides, folder, cache, blow, step, theirs))
    process.start()
    theirs.close()
    if blow is not None:
        assert ours.poll(PATIENCE), "the run neither came to its blow nor ended"
        time.sleep(blow.after * 0.01)  # a random moment in the step or in the save; nothing waits for it
        if process.exitcode is None and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid, blow.number)
    process.join(PATIENCE)
    assert process.exitcode is not None, "the run did not end"
    return process.exitcode


def result_of(folder: Path) -> str:
    """A digest of everything that a finished run leaves: weights, moments, schedule, and every row but its time."""
    checkpoint = read_checkpoint(folder / "checkpoints" / "last.ckpt")
    left = {name: checkpoint[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}
    left["rows"] = [{k: v for k, v in row.items() if k not in OF_THE_MACHINE} for row in read_metrics(folder / "metrics.csv")]
    plain = json.dumps(left, default=lambda value: value.tolist() if isinstance(value, torch.Tensor) else str(value))
    return hashlib.sha256(plain.encode()).hexdigest()


def hit_and_go_on(steps: int, folder: Path, cache: Path, blow: Blow) -> dict[str, Any]:
    """A run that ``blow`` hits, continued until it is done: how it ended, where it went on, and what it came to."""
    overrides, last = length_of(steps), folder / "checkpoints" / "last.ckpt"
    code = run(overrides, folder, cache, blow, int(blow.after * steps))
    step = int(read_checkpoint(last)["global_step"]) if code and last.exists() else None
    if code and step is None:
        shutil.rmtree(folder, ignore_errors=True)  # before the first checkpoint there is nothing to go on from
    if code:
        assert run([*overrides, *([f"ckpt_path={last}"] if step is not None else [])], folder, cache) == 0
    left = sorted(p.name for p in last.parent.iterdir())
    return {"code": code, "went_on_from": step, "left": left, "result": result_of(folder)}


def blows(seed: int, kills: int, terms: int, interrupts: int, tmpdirs: list[str | None]) -> list[Blow]:
    """Random moments; half of the kills are aimed into saves."""
    draw = random.Random(seed)
    found = []
    for i in range(kills):
        save = draw.randint(1, 16) if i % 2 else None
        found.append(Blow(signal.SIGKILL, draw.random(), save, tmpdirs[i // 2 % len(tmpdirs)]))
    found += [Blow(signal.SIGTERM, draw.random()) for _ in range(terms)]
    return found + [Blow(signal.SIGINT, draw.random()) for _ in range(interrupts)]
