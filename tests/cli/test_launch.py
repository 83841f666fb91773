"""One run in several processes: who starts them, what a sweep does, and what becomes of the others when one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minitx.cli import launch
from minitx.config import ConfigError, TrainerConfig
from minitx.training.checkpoint import read_checkpoint
from minitx.training.metrics import read_metrics
from tests.waiting import PATIENCE, wait_for

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"
TINY = [
    "data=kv_lookup", "data.batch_size=8", "data.val_size=8", "model.embed_dim=8", "model.num_heads=2", "model.num_layers=1",
    "trainer.threads=1", "trainer.val_batches=1", "trainer.val_every=0", "callbacks.progress=false", "trainer.log_every=5",
]  # fmt: skip
PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_NAME")


@pytest.fixture
def alone(monkeypatch):
    for name in PLACES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_one_process_starts_no_other(alone):
    assert not launch.needs_launch(TrainerConfig())
    assert launch.needs_launch(TrainerConfig(devices=2))
    assert launch.rank() == 0


def test_what_torchrun_or_srun_started_is_not_started_again(alone):
    alone.setenv("SLURM_NTASKS", "2")
    alone.setenv("SLURM_PROCID", "1")
    assert (launch.started_from_outside(), launch.rank()) == (2, 1)
    assert not launch.needs_launch(TrainerConfig(devices=2))
    alone.setenv("SLURM_JOB_NAME", "interactive")  # a shell on a node, in which srun starts nothing
    assert launch.needs_launch(TrainerConfig(devices=2))
    alone.setenv("TORCHELASTIC_RUN_ID", "x")
    alone.setenv("WORLD_SIZE", "4")
    alone.setenv("RANK", "3")
    assert (launch.started_from_outside(), launch.rank()) == (4, 3)


@pytest.mark.parametrize(("started", "devices", "nodes"), [(2, 1, 1), (2, 4, 1), (2, 2, 2)])
def test_another_number_of_processes_than_was_asked_for_is_refused(alone, started, devices, nodes):
    alone.setenv("TORCHELASTIC_RUN_ID", "x")
    alone.setenv("WORLD_SIZE", str(started))
    with pytest.raises(ConfigError, match=rf"trainer.devices={devices} x trainer.num_nodes={nodes} is .* but 2 processes"):
        launch.needs_launch(TrainerConfig(devices=devices, num_nodes=nodes))


def test_several_machines_need_a_program_that_reaches_them(alone):
    with pytest.raises(ConfigError, match=r"trainer.num_nodes=2: .* torchrun or srun"):
        launch.needs_launch(TrainerConfig(num_nodes=2))


def start(arguments, folder, *, program=(str(SCRIPT),), **environment):
    """``train.py`` in a process of its own, in a session of its own."""
    clean = {name: value for name, value in os.environ.items() if name not in PLACES}
    command = [sys.executable, *program, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command, cwd=folder, env={**clean, "HF_HUB_OFFLINE": "1", **environment}, **pipes)


def run(arguments, folder, **options):
    process = start(arguments, folder, **options)
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def ranks_of(process):
    """Processes of the run by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            settings = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(stat[1]) == process.pid:
            found |= {int(s[5:]): int(folder.name) for s in settings if s.startswith(b"RANK=")}
    return found


def steps_of(folder):
    path = folder / "metrics.csv"
    return [row["step"] for row in read_metrics(path)] if path.exists() else []


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_others_with_the_reason(victim, tmp_path):
    process = start([*TINY, "trainer=ddp_cpu", "trainer.max_steps=10000000", "output_dir=run"], tmp_path)
    wait_for(lambda: max(steps_of(tmp_path / "run"), default=0) >= 10, process)
    processes = ranks_of(process)
    assert set(processes) == {0, 1}
    os.kill(processes[victim], signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3
    assert err.startswith(f"error: process {victim} of the run was ended by SIGKILL and the others were stopped; see ")
    assert err.count("\n") == 1, err
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes.values())
    assert sorted(p.name for p in (tmp_path / "run" / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]


@pytest.mark.long
def test_a_signal_stops_all_and_the_run_goes_on(tmp_path):
    common = [*TINY, "trainer=ddp_cpu", "model.dropout=0.1", "schedule=constant", "trainer.ckpt_every=100000"]
    process = start([*common, "trainer.max_steps=10000000", "output_dir=cut"], tmp_path)
    wait_for(lambda: max(steps_of(tmp_path / "cut"), default=0) >= 10, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    assert err == "stopped by SIGTERM; ckpt_path=last goes on from the last checkpoint\n"
    step = read_checkpoint(tmp_path / "cut" / "checkpoints" / "last.ckpt")["global_step"]
    assert step % 5 == 0  # where several processes agree
    common.append(f"trainer.max_steps={step + 10}")  # the signal may come after any step: the end follows from it
    assert run([*common, "output_dir=cut", "ckpt_path=last"], tmp_path)[0] == 0
    assert run([*common, "output_dir=whole"], tmp_path)[0] == 0
    cut, whole = (read_checkpoint(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("cut", "whole"))
    assert all(torch.equal(cut["state_dict"][name], weight) for name, weight in whole["state_dict"].items())


@pytest.mark.long
def test_each_run_of_a_sweep_has_processes_of_its_own(tmp_path):
    common = [*TINY, "trainer=ddp_cpu", "trainer.max_steps=5"]
    code, _, err = run(["-m", *common, "seed=1,2", "hydra.sweep.dir=sweep"], tmp_path)
    assert (code, err) == (0, "")
    assert run([*common, "seed=2", "output_dir=alone"], tmp_path)[0] == 0
    losses = [[row["train_loss"] for row in read_metrics(tmp_path / name / "metrics.csv")] for name in ("sweep/0", "sweep/1", "alone")]  # fmt: skip
    assert losses[1] == losses[2] != losses[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone", "sweep"]  # no job took part in another


@pytest.mark.long
def test_a_mistake_that_every_process_finds_is_said_once(tmp_path):
    code, _, err = run([*TINY, "trainer=ddp_cpu", "model.backend=nonsense", "output_dir=run"], tmp_path)
    assert code == 2
    assert err.startswith("error: model cannot be built: backend='nonsense'")
    assert err.count("\n") == 1, err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_torchrun_and_srun_share_one_folder(tmp_path):
    arguments = [*TINY, "trainer=ddp_cpu", "trainer.max_steps=5"]
    for name in ("torchrun", "srun"):
        (tmp_path / name).mkdir()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT))
    code, _, err = run(arguments, tmp_path / "torchrun", program=torchrun, OMP_NUM_THREADS="1")
    assert code == 0, err
    # Lightning makes a port of the job's number: two suites on one machine must not have the same
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODELIST": "localhost", "SLURM_JOB_NAME": "train", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}  # fmt: skip
    tasks = [start(arguments, tmp_path / "srun", **job, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in (0, 1)]
    for task in tasks:
        _, err = task.communicate(timeout=PATIENCE)
        assert task.returncode == 0, err
    rows = []
    for name in ("torchrun", "srun"):
        (metrics,) = (tmp_path / name).rglob("metrics.csv")
        assert len(list((metrics.parent / "logs").iterdir())) == 2
        rows.append([row["train_loss"] for row in read_metrics(metrics)])
    assert rows[0] == rows[1]


def test_a_sweep_under_torchrun_is_refused(cli, place, alone):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0"}.items():
        alone.setenv(name, value)
    said = cli("-m", *TINY, "trainer=ddp_cpu", "seed=1,2")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "a sweep (-m) starts the processes of each of its runs" in said.err
    assert not list(place.rglob("metrics.csv"))
