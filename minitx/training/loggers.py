"""The folder of a run, the summary before its first step, its result, and uploads to wandb. For ``metrics.csv``, see ``metrics_csv``."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from torch import Tensor, nn

from minitx.config import ConfigError, Part
from minitx.crash_safe import replacing
from minitx.data.datamodule import DataModule
from minitx.training import StoppedError, rank
from minitx.training.checkpoints import clean_up
from minitx.training.devices import device_name
from minitx.training.metrics_csv import finite, read_metrics
from minitx.training.module import TrainingModule
from minitx.training.optimizers import describe_decay

# --- the folder of a run, with the log of each process


@contextmanager
def run_folder(folder: Path, files: Mapping[str, str]) -> Iterator[None]:
    """A context that creates the run's folder and its text files, and copies the log of each process to ``logs/rank_N.log``.

    If an error occurs before the first step, a new folder is removed. The traceback of an error is written only to the log
    file. While the context lasts, no other process can enter it for the same folder and rank.

    Raises:
        ConfigError: the folder cannot be created or written, or another process trains in it.
    """
    path = folder / "logs" / f"rank_{rank()}.log"
    try:
        new_folders = [place for place in (folder, *folder.parents) if not place.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"output_dir={folder} cannot be written: {error.strerror}") from None
    with closing(handler), _locked(handler, folder):
        try:
            with _log_to(handler):
                if not rank():
                    _write(folder, files)
                yield
        except ConfigError:
            if not rank() and (not (folder / "metrics.csv").exists() or not read_metrics(folder / "metrics.csv")):
                for new_folder in new_folders:
                    with suppress(OSError):  # others already use a parent folder
                        shutil.rmtree(new_folder) if new_folder == folder else new_folder.rmdir()
            raise


@contextmanager
def _locked(handler: logging.FileHandler, folder: Path) -> Iterator[None]:
    """A context in which this process has locked its log. The lock ends with the process, and its children do not have it."""
    assert handler.stream is not None
    try:
        fcntl.lockf(handler.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):  # others: a file system without locks
            raise ConfigError(f"output_dir={folder}: another process is training in this folder") from None
    yield


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write the text files of a run, and remove what a killed run left."""
    try:
        clean_up(folder / "checkpoints")
        for name, text in files.items():
            with replacing(folder / name) as new:
                new.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output_dir={folder} cannot be written: {error.strerror}") from None


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignore a full disk here: the run stops when a metric or a checkpoint cannot be written."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def _log_to(handler: logging.FileHandler) -> Iterator[None]:
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    except Exception as error:
        handler.emit(logging.makeLogRecord({"msg": error, "exc_info": (type(error), error, error.__traceback__)}))
        raise
    finally:
        root.removeHandler(handler)


# --- the summary before the first step


def summary(trainer: L.Trainer, module: TrainingModule, data: DataModule, training: str, folder: Path, done: int) -> str:
    """Return the lines to log before the first step: model, device, data, training, steps and folder.

    Args:
        trainer: the trainer of the run.
        module: the module of the run, with the unsharded model.
        data: the data of the run.
        training: the result of ``describe_training``.
        folder: the folder of the run.
        done: the number of steps before the checkpoint that is resumed, or 0.
    """
    options = module.options
    tokenizer = data.task.tokenizer
    every = f"every {options.val_every:,}" if options.val_every else "at the end"
    lines = {
        "model": module.net.describe(),
        "device": describe_device(trainer),
        "data": describe_data(data, options.val_batches),
        **{f"  {split}": "; ".join(sentences) for split, sentences in data.task.left_out.items() if sentences},
        "tokenizer": f"{tokenizer.vocab_size:,} tokens" if tokenizer else None,
        "training": training,
        "steps": f"{options.max_steps:,}{f' ({done:,} done)' if done else ''}, validation {every}",
        "folder": str(folder),
    }
    return "\n".join(f"{name:9}  {line}" for name, line in lines.items() if line is not None)


def describe_training(module: TrainingModule, data: DataModule, optimizer: Part, schedule: Part) -> str:
    """Return the objective with the divisor of its sum, the optimizer, its frozen weights and decays, the schedule and the clipping."""
    objective = module.objective
    clip = module.options.clip
    loss = getattr(objective, "loss", getattr(objective, "func", objective))  # a loss of torch, or a partial function
    divisor = f"sum / {'rows' if unit_of(data.probe_batch(1)['labels']) == 'rows' else 'labels'} of a step"
    name = getattr(loss, "__name__", type(loss).__name__)
    parts = (
        f"{name}, {divisor}",
        describe_part(optimizer),
        describe_decay(module.make_optimizer(module.network), module.network),
        describe_part(schedule),
        f"clip {clip:g}" if clip else "no clip",
    )
    return " · ".join(filter(None, parts))


def describe_part(part: Part) -> str:
    """Return the last name of the target of a part, its nonzero numbers and strings, and the weights that its rules freeze.

    >>> from minitx.config.part import Takes
    >>> describe_part(Part.of({"_target_": "torch.optim.SGD", "lr": 0.1}, "optimizer", Takes(first=1)))
    'SGD, lr 0.1'
    """
    plain = part.plain()
    values = {name: value for name, value in plain.items() if name[0] != "_" and value and not isinstance(value, bool)}
    words = [f"{name} {value:g}" for name, value in values.items() if isinstance(value, int | float)]
    words += [f"{name} {value}" for name, value in values.items() if isinstance(value, str)]
    words += [f"without {rule['match']}" for rule in plain.get("rules", ()) if not rule.get("trainable", True)]
    return ", ".join([part.name.rpartition(".")[2], *words])


def describe_data(data: DataModule, val_batches: int | None = None) -> str:
    """Return the name and the sizes of a task, and the number of rows of one validation."""
    rows = f"{len(data.task.train):,} rows" if hasattr(data.task.train, "__len__") else "new examples at every step"
    parts = f" in {data.accumulate} parts" if data.accumulate > 1 else ""
    total = data.val_source().num_rows
    read = min(total, (val_batches or total) * data.val_batch_size(1))
    validated = f"{total:,}" if read == total else f"the first {read:,} of {total:,}"
    return f"{data.task.name}: {rows}, {validated} to validate; {data.batch_size} a step{parts}"


def describe_device(trainer: L.Trainer) -> str:
    """Return the processes, the device, the precision and the strategy of a run, and a warning if the CPU is busy.

    The threads of a step wait for each other at every product. If another program occupies one of their cores, all of them
    wait: with 2 threads on 2 busy cores, ``kv_lookup`` was 70 times slower than with 1 thread.
    """
    device = trainer.strategy.root_device
    count = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    strategy = f", {type(trainer.strategy).__name__}" if trainer.world_size > 1 else ""
    number = torch.get_num_threads()
    threads = f", {number} thread{'s' * (number > 1)}" if device.type == "cpu" else ""
    load = os.getloadavg()[0] if device.type == "cpu" and number > 1 and hasattr(os, "getloadavg") else 0.0
    is_crowded = load + number > (os.cpu_count() or number) + 0.5
    busy = f"; other programs use these cores (load {load:.1f}): trainer.threads=1 may be many times faster"
    return f"{count}{device_name(device)}{threads}, {trainer.precision}{strategy}{busy if is_crowded else ''}"


def unit_of(labels: Tensor) -> str:
    """Return the unit of a batch's targets: ``rows`` if a row has one label, ``labels`` if labels are floating-point, else ``tokens``."""
    if labels.dim() < 2:
        return "rows"
    return "labels" if labels.is_floating_point() else "tokens"


# --- the result


def summarise(
    folder: Path,
    steps: int,
    nonfinite_step: int | None,
    metrics: Mapping[str, Any],
    floors: Mapping[str, float],
    network: nn.Module,
) -> dict[str, Any]:
    """Return the result of a run as plain data without NaN.

    ==================  =====================================================================================
    ``steps``           number of updates; in a non-finite run, number of updates before the first non-finite step
    ``nonfinite_step``  the first step whose loss or gradient was not finite, or None
    ``train_loss``      the loss in the last row of ``metrics.csv``
    ``val_loss, val_accuracy``  results of the last validation; None without a validation, or in a non-finite run
    ``floors``          losses of simple baselines, in nats, by name
    ``num_parameters``  number of parameters of the network
    ``metrics``         the last value of every column of ``metrics.csv``, and of every other logged metric
    ==================  =====================================================================================
    """
    rows = read_metrics(folder / "metrics.csv")
    last = {name: float(value) for name, value in metrics.items()}
    for row in rows:
        last |= {name: value for name, value in row.items() if value is not None and name != "step"}
    finite_metrics = {
        name: finite(value) for name, value in last.items() if nonfinite_step is None or not name.startswith("val_")
    }
    return {
        "steps": steps if nonfinite_step is None else nonfinite_step - 1,
        "nonfinite_step": nonfinite_step,
        **{name: finite_metrics.get(name) for name in ("train_loss", "val_loss", "val_accuracy")},
        "floors": dict(floors),
        "num_parameters": sum(p.numel() for p in network.parameters()),
        "metrics": finite_metrics,
    }


# --- trackers


def send_facts(trainer: L.Trainer, config: Mapping[str, Any], command: str | None) -> None:
    """Send the config, the command and the commit to Weights & Biases and MLflow. Curves are sent by the loggers themselves."""
    trackers = [logger for logger in trainer.loggers if not rank() and isinstance(logger, WandbLogger | MLFlowLogger)]
    facts = {"command": command, "commit": git_commit()} if trackers else {}
    for logger in trackers:
        logger.log_hyperparams({**config, **{name: text for name, text in facts.items() if text}})
        if isinstance(logger, WandbLogger):
            logger.experiment.define_metric("val_loss", summary="min")


def resuming(loggers: Mapping[str, Part | None], folder: Path) -> dict[str, Part | None]:
    """Return the parts of loggers. A ``WandbLogger`` gets the ``id`` of the last run in ``folder``, and so resumes it."""
    resumed = dict(loggers)
    for file in folder.glob("wandb/latest-run/run-*.wandb"):
        for name, part in loggers.items():
            if part is not None and isinstance(part.target, type) and issubclass(part.target, WandbLogger):
                resumed[name] = part.with_(**{"id": file.stem.removeprefix("run-"), **part.arguments})
    return resumed


def wandb_loggers(trainer: L.Trainer) -> list[WandbLogger]:
    """Return the wandb loggers on rank 0, and [] on other ranks."""
    return [logger for logger in trainer.loggers if trainer.is_global_zero and isinstance(logger, WandbLogger)]


def git_commit(folder: Path | None = None) -> str | None:
    """Return the commit of ``folder`` from ``git describe``, with ``-dirty`` for uncommitted changes; None outside of a repository.

    Args:
        folder: a folder in the repository. Default: the current folder.
    """
    try:
        command = ["git", "describe", "--always", "--dirty", "--tags"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, cwd=folder).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@contextmanager
def finish_wandb() -> Iterator[None]:
    """A context that finishes the wandb run with the exit code of the program: 0, 2 (invalid config), 3 (failed), or 128 + signal.

    A run that was open before is left open.
    """
    before = _wandb_run()
    code = 3
    try:
        yield
        code = 0
    except (ConfigError, KeyboardInterrupt) as error:
        code = 2 if isinstance(error, ConfigError) else 130
        raise
    except StoppedError as error:
        code = 128 + error.number
        raise
    finally:
        if _wandb_run() is not None and before is None:
            sys.modules["wandb"].finish(exit_code=code)


def _wandb_run() -> Any:
    return getattr(sys.modules.get("wandb"), "run", None)
