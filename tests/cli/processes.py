"""The programs in processes of their own, as a user starts them."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as L

from tests.waiting import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]
OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_NAME")
"""Names in the environment by which torchrun and srun tell a process its place."""

# a shell starts what runs in its background deaf to SIGINT, and children inherit that
LISTENING = (
    "-c",
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')",
)


class Slow(L.Callback):
    """Waits in each step, after the tenth of a process for longer, so that a signal comes before the end."""

    steps = 0

    def on_train_batch_start(self, *_: object) -> None:
        self.steps += 1
        time.sleep(0.1 if self.steps <= 10 else 2.0)


class FullDisk(L.Callback):
    """From step 5 on, the first process can write no file beyond 8 KiB."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == 4 and trainer.is_global_zero:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**13, resource.RLIM_INFINITY))


class Moved(L.Callback):
    """In step 5, the last process renames the folder of the run."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        folder = Path(trainer.default_root_dir)
        if trainer.global_step == 4 and trainer.global_rank == trainer.world_size - 1:
            folder.rename(folder.with_name("moved"))


class Waiting(L.Callback):
    """Waits in step 5 for a file ``go`` beside the folder of the run."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == 4:
            wait_for(Path(trainer.default_root_dir).with_name("go").exists)


def start(
    arguments: Sequence[str], folder: Path, *, program: str = "train", by: Sequence[str] = LISTENING, **environment: str
) -> subprocess.Popen[str]:
    """``scripts/PROGRAM.py ARGUMENTS`` in ``folder``, in a session of its own; ``by`` stands between Python and the script."""
    clean = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
    return subprocess.Popen(
        [sys.executable, *by, str(ROOT / "scripts" / f"{program}.py"), *arguments],
        cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True,
        env={**clean, "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "", **environment},
    )  # fmt: skip


def run(arguments: Sequence[str], folder: Path, **options: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of ``start`` with these options."""
    process = start(arguments, folder, **options)  # type: ignore[arg-type]
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err
