"""Several processes for one run: who starts them, where they write, and what becomes of the others when one dies.

``train.py trainer=ddp`` starts them itself with torch's elastic agent, one launch for each run of a sweep, so that no job of
``-m`` ever meets the processes of another. Where torchrun or srun has started them already, they only agree on a folder.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from minitx.config import ConfigError, TrainerConfig

FOLDER = "MINITX_LAUNCHED_FOLDER"
"""In the environment of a process that ``launch`` started: the folder of its run."""

_GRACE = "50"  # seconds between asking the other processes to stop and killing them
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class RankFailedError(RuntimeError):
    """A process of the run failed; ``code`` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class ProgramStoppedError(RuntimeError):
    """What this program had started was stopped by the signal ``number``; ``advice`` says how it goes on."""

    def __init__(self, number: int, advice: str) -> None:
        super().__init__(number, advice)
        self.number = number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}; {self.args[1]}"


def rank() -> int:
    """This process's number among those of the run, 0 where it is alone."""
    return int(next((os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ), "0"))


def started_from_outside() -> int:
    """How many processes torchrun or srun has started for this run; 0 where none did."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    return tasks if tasks > 1 and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive") else 0


def needs_launch(options: TrainerConfig) -> bool:
    """Whether this process must start the others.

    Raises:
        ConfigError: another number of processes was started than the config asks for, or several machines and none was.
    """
    outside, wanted = started_from_outside(), options.world_size
    if outside and outside != wanted:
        said = f"trainer.devices={options.devices} x trainer.num_nodes={options.num_nodes}"
        raise ConfigError(f"{said} is {wanted}, but {outside} processes were started")
    if outside or wanted == 1 or "LOCAL_RANK" in os.environ:
        return False
    if options.num_nodes > 1:
        raise ConfigError(
            f"trainer.num_nodes={options.num_nodes}: processes on several machines are started by torchrun or srun"
        )
    return True


def launch(overrides: Sequence[str], processes: int, folder: Path) -> None:
    """``train.py OVERRIDES`` in ``processes`` processes of this machine, which share ``folder``.

    Raises:
        RankFailedError: one of them failed; the others were ended (asked, and after 50 s killed).
        ProgramStoppedError: SIGINT or SIGTERM; the processes had 50 s to write their checkpoint.
    """
    from hydra.core.utils import env_override
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).disabled = True  # the agent's own account; the run's sentence says it
    config = LaunchConfig(
        *(1, 1, processes),
        run_id=f"minitx-{os.getpid()}-{time.time_ns()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    program = "import sys; from minitx.cli.train import main; sys.exit(main())"
    with env_override({FOLDER: str(folder), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _GRACE}):
        try:
            elastic_launch(config, sys.executable)("-c", program, *overrides)
        except ChildFailedError as error:
            raise _failure(error.failures, folder) from None
        except SignalException as stop:
            raise ProgramStoppedError(int(stop.sigval), "ckpt_path=last goes on from the last checkpoint") from None


def _failure(failures: Mapping[int, Any], folder: Path) -> RankFailedError:
    """What to say of the run. The agent's clock counts whole seconds and it ends the others by SIGTERM: their ends come last."""
    stopped = {-signal.SIGTERM, 128 + signal.SIGTERM}
    number, failure = min(failures.items(), key=lambda f: (f[1].exitcode in stopped, f[1].exitcode > 0, f[1].timestamp))
    said = failure.error_file_data.get("message")
    if isinstance(said, dict) and failure.exitcode > 0:  # a sentence of ours
        return RankFailedError(said["message"], failure.exitcode)
    how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with exit code {failure.exitcode}"
    text = f"process {number} of the run {how} and the others were stopped; see {folder / 'logs'}"
    return RankFailedError(text, 3)


def tell_launcher(message: str) -> None:
    """Leave the reason of a failure where the program that started this process looks for it."""
    path = os.environ.get(_ERROR_FILE)
    if path:
        extra = {"timestamp": str(int(time.time())), "py_callstack": ""}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")


def shared_folder(folder: Path) -> Path:
    """Under torchrun and srun each process would name a folder by its own clock: the first one's counts for all."""
    from lightning.fabric.plugins.environments import SLURMEnvironment
    from torch.distributed import TCPStore, rendezvous

    wait, processes = timedelta(minutes=10), started_from_outside()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        store, _, _ = next(rendezvous("env://", timeout=wait))  # that of torchrun
    else:
        place = SLURMEnvironment(auto_requeue=False)
        store = TCPStore(place.main_address, place.main_port + 1, processes, is_master=rank() == 0, timeout=wait)
    if rank() == 0:
        store.set("minitx/folder", str(folder))
        store.wait([f"minitx/read/{i}" for i in range(1, processes)], wait)  # it may live in this process
        return folder
    found = Path(store.get("minitx/folder").decode())
    store.set(f"minitx/read/{rank()}", "")
    return found
