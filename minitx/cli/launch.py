"""Run a training in this process or in several processes: start them, name their folder, and stop all of them if one fails.

``train.py trainer=ddp`` starts the processes with torch's elastic agent. Each run of a sweep (``-m``) has its own processes. If
torchrun or srun has started the processes, the folder of the run has the name of their job.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from minitx.cli import importing
from minitx.config import ConfigError, RunConfig, TrainerConfig, to_dict
from minitx.config.failures import FailedRunError
from minitx.config.schema import require
from minitx.crash_safe import naming
from minitx.training import StoppedError, rank, stop_signals

FOLDER = "MINITX_LAUNCHED_FOLDER"
"""The environment variable for the folder of the run, in processes that ``launch`` started."""

_GRACE = "50"  # seconds from SIGTERM to SIGKILL for the other processes
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def started_from_outside() -> int:
    """Return the number of processes that torchrun or srun started for this run, or 0."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    return tasks if tasks > 1 and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive") else 0


def needs_launch(options: TrainerConfig) -> bool:
    """Return whether this process must start the processes of the run.

    Raises:
        ConfigError: the number of started processes does not match the config, or a run on several machines was not started
            with torchrun or srun.
    """
    started = started_from_outside()
    require(
        started in (0, options.world_size),
        f"trainer.devices={options.devices} x trainer.num_nodes={options.num_nodes} is {options.world_size}, but {started} processes "
        "were started",
    )
    if started or options.world_size == 1 or "LOCAL_RANK" in os.environ:
        return False
    require(
        options.num_nodes == 1,
        f"trainer.num_nodes={options.num_nodes}: start processes on several machines with torchrun or srun",
    )
    return True


def launch(overrides: Sequence[str], processes: int, folder: Path) -> None:
    """Run ``train.py OVERRIDES`` in ``processes`` processes of this machine that share ``folder``.

    Raises:
        FailedRunError: a process failed. The others were stopped, and killed after 50 s.
        StoppedError: a signal of ``stop_signals``. The processes had 50 s to write their checkpoint.
    """
    from hydra.core.utils import env_override
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).disabled = True  # the agent repeats the message of the run
    config = LaunchConfig(
        *(1, 1, processes),
        run_id=f"minitx-{os.getpid()}-{time.time_ns()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        signals_to_handle=",".join(["SIGQUIT", *(each.name for each in stop_signals())]),
    )
    program = f"import sys; sys.argv[0] = {sys.argv[0]!r}; from minitx.cli.train import main; sys.exit(main())"
    with env_override({FOLDER: str(folder), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _GRACE}):
        try:
            elastic_launch(config, sys.executable)("-c", program, *overrides)
        except ChildFailedError as error:
            raise _failure(error.failures, folder) from None
        except SignalException as stop:
            ending = "; to resume from the last checkpoint, if there is one, set ckpt_path=last"
            raise StoppedError(int(stop.sigval), ending) from None


def stop_with_parent() -> None:
    """Stop this process as SIGTERM does when the process that started it is gone, for example by SIGKILL."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


LOST = "another process of this run has ended, and this one cannot continue alone"
"""The reason of a process whose collective operation failed. It is never the first reason."""


def is_of_a_lost_process(error: BaseException) -> bool:
    """Return whether gloo or NCCL raised ``error`` because the connection to another process was lost."""
    return type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError") or "gloo/transport" in str(error)


def _failure(failures: Mapping[int, Any], folder: Path) -> FailedRunError:
    """Return the error of the process that failed first.

    The agent's timestamps are whole seconds, and it stops the other processes with SIGTERM, so processes that ended by SIGTERM
    come last, and before them those that lost the connection to another process.
    """
    stopped = {-signal.SIGTERM, 128 + signal.SIGTERM}

    def order(failure: Any) -> tuple[bool, bool, bool, int]:
        is_lost = LOST in str(failure.error_file_data.get("message"))
        return failure.exitcode in stopped, is_lost, failure.exitcode > 0, failure.timestamp

    number, failure = min(failures.items(), key=lambda item: order(item[1]))
    message = failure.error_file_data.get("message")
    if isinstance(message, dict) and failure.exitcode > 0:  # a message of tell_launcher
        error = FailedRunError(message["message"])
        error.exit_code = failure.exitcode
        return error
    ending = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with exit code {failure.exitcode}"
    return FailedRunError(f"process {number} of the run {ending} and the others were stopped; see {folder / 'logs'}")


def tell_launcher(message: str) -> None:
    """Write the reason for a failure to the file that the launcher of this process reads, if there is a launcher."""
    path = os.environ.get(_ERROR_FILE)
    if path:
        extra = {"timestamp": str(int(time.time())), "py_callstack": ""}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")


def job_name() -> str:
    """Return the name that torchrun or srun gave to this run. It is the same in all processes of the run, and unique among runs.

    Raises:
        ConfigError: torchrun gave it no name.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return "_".join(os.environ[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if name in os.environ)
    name = os.environ["TORCHELASTIC_RUN_ID"]
    if name == "none":  # torchrun's default
        raise ConfigError(
            "torchrun gave this run no name, so its processes cannot agree on a folder: set output_dir=FOLDER, or start torchrun "
            "with --standalone or --rdzv-id=NAME"
        )
    return name


def run_training(config: RunConfig, folder: Path, command: str) -> dict[str, Any]:
    """Run a training in ``folder``, and write its config, command and result there. Return the result, as in ``result.json``."""
    with importing("lightning"):
        from minitx.training.run import train
    commands = folder / "command.txt"
    earlier = commands.read_text(encoding="utf-8") if config.ckpt_path is not None and commands.exists() else ""
    files = {"config.yaml": OmegaConf.to_yaml(OmegaConf.create(to_dict(config))), "command.txt": f"{earlier}{command}\n"}
    result = train(config, folder, files=files)
    if not rank():
        path = folder / "result.json"
        with naming(path):
            path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result
