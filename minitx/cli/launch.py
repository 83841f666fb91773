"""Run one training in this process, or in several: start them, name their folder, and stop the others when one dies.

``train.py trainer=ddp`` starts them with torch's elastic agent. There is one launch for each run of a sweep, so the jobs of
``-m`` never share processes. If torchrun or srun has started the processes, the run's folder has the name of their job.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from minitx.config import ConfigError, RunConfig, TrainerConfig, to_dict
from minitx.config.schema import require
from minitx.training import rank

FOLDER = "MINITX_LAUNCHED_FOLDER"
"""The environment variable with the run's folder, in processes that ``launch`` started."""

_GRACE = "50"  # seconds between asking the other processes to stop and killing them
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class RankFailedError(RuntimeError):
    """A process of the run failed. ``code`` is its exit code."""

    def __init__(self, message: str, code: int = 3) -> None:  # a default, so that it can be pickled
        super().__init__(message)
        self.code = code


class ProgramStoppedError(RuntimeError):
    """The processes of this program were stopped by the signal ``number``. ``advice`` tells how to continue."""

    def __init__(self, number: int, advice: str) -> None:
        super().__init__(number, advice)
        self.number = number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}; {self.args[1]}"


def started_from_outside() -> int:
    """Return the number of processes that torchrun or srun has started for this run, or 0."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    return tasks if tasks > 1 and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive") else 0


def needs_launch(options: TrainerConfig) -> bool:
    """Return whether this process must start the others.

    Raises:
        ConfigError: the number of started processes does not match the config, or a run on several machines was started without
            torchrun or srun.
    """
    outside, wanted = started_from_outside(), options.world_size
    nodes = f"trainer.num_nodes={options.num_nodes}"
    require(
        outside in (0, wanted),
        f"trainer.devices={options.devices} x {nodes} is {wanted}, but {outside} processes were started",
    )
    if outside or wanted == 1 or "LOCAL_RANK" in os.environ:
        return False
    require(options.num_nodes == 1, f"{nodes}: processes on several machines are started by torchrun or srun")
    return True


def launch(overrides: Sequence[str], processes: int, folder: Path) -> None:
    """Run ``train.py OVERRIDES`` in ``processes`` processes of this machine that share ``folder``.

    Raises:
        RankFailedError: a process failed. The others were stopped, and killed after 50 s.
        ProgramStoppedError: SIGINT or SIGTERM. The processes had 50 s to write their checkpoint.
    """
    from hydra.core.utils import env_override
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).disabled = True  # the agent's log repeats the run's sentence
    config = LaunchConfig(
        *(1, 1, processes),
        run_id=f"minitx-{os.getpid()}-{time.time_ns()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        # nohup ignores SIGHUP
        signals_to_handle="SIGTERM,SIGINT,SIGQUIT" + ",SIGHUP" * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN),
    )
    program = f"import sys; sys.argv[0] = {sys.argv[0]!r}; from minitx.cli.train import main; sys.exit(main())"
    with env_override({FOLDER: str(folder), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _GRACE}):
        try:
            elastic_launch(config, sys.executable)("-c", program, *overrides)
        except ChildFailedError as error:
            raise _failure(error.failures, folder) from None
        except SignalException as stop:
            advice = "ckpt_path=last goes on from the last checkpoint, if there is one"
            raise ProgramStoppedError(int(stop.sigval), advice) from None


def _failure(failures: Mapping[int, Any], folder: Path) -> RankFailedError:
    """Return the error of the run. The agent's clock counts whole seconds, and it ends the others by SIGTERM: their ends come last."""
    stopped = {-signal.SIGTERM, 128 + signal.SIGTERM}
    number, failure = min(failures.items(), key=lambda f: (f[1].exitcode in stopped, f[1].exitcode > 0, f[1].timestamp))
    said = failure.error_file_data.get("message")
    if isinstance(said, dict) and failure.exitcode > 0:  # a sentence of ours
        return RankFailedError(said["message"], failure.exitcode)
    how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with exit code {failure.exitcode}"
    text = f"process {number} of the run {how} and the others were stopped; see {folder / 'logs'}"
    return RankFailedError(text)


def tell_launcher(message: str) -> None:
    """Write the reason of a failure to the file that the program which started this process reads."""
    path = os.environ.get(_ERROR_FILE)
    if path:
        extra = {"timestamp": str(int(time.time())), "py_callstack": ""}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")


def job_name() -> str:
    """Return the name that torchrun or srun gave this run. All processes of the run have the same name, and no other run has it.

    Raises:
        ConfigError: torchrun gave it none.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return "_".join(os.environ[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if name in os.environ)
    name = os.environ["TORCHELASTIC_RUN_ID"]
    if name == "none":  # torchrun's default
        raise ConfigError(
            "torchrun gave this run no name, so its processes cannot name one folder: set output_dir=FOLDER, or start torchrun "
            "with --standalone or --rdzv-id=NAME"
        )
    return name


def run_training(config: RunConfig, folder: Path, command: str) -> dict[str, Any]:
    """Run one training in ``folder``, with its config and command. Return the result, as in ``result.json``."""
    from minitx.training.metrics_csv import naming
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
