"""One run in several processes: who starts them, what a sweep does, and what becomes of the others when one dies."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from minitx.cli import launch
from minitx.config import ConfigError, TrainerConfig
from minitx.training.checkpoint import read_checkpoint
from minitx.training.metrics import read_metrics
from tests.cli.processes import OF_LAUNCHERS, run, start
from tests.waiting import PATIENCE, wait_for

TINY = [
    "data=kv_lookup", "data.batch_size=8", "data.val_size=8", "model.embed_dim=8", "model.num_heads=2", "model.num_layers=1",
    "trainer=ddp_cpu", "trainer.threads=1", "trainer.val_batches=1", "trainer.val_every=0", "callbacks.progress=false", "trainer.log_every=5",
]  # fmt: skip
ENDLESS = ["trainer.max_steps=10000000", "trainer.ckpt_every=100000"]


@pytest.fixture
def place_of(monkeypatch):
    """``place_of(RANK="1")`` puts this process where torchrun or srun would; without arguments, alone."""

    def put(**names):
        for name in OF_LAUNCHERS:
            monkeypatch.delenv(name, raising=False)
        for name, value in names.items():
            monkeypatch.setenv(name, value)

    put()
    return put


def losses(folder):
    return [row["train_loss"] for row in read_metrics(folder / "metrics.csv")]


def test_two_devices_need_two_processes_unless_torchrun_or_srun_started_them(place_of):
    assert not launch.needs_launch(TrainerConfig())
    assert launch.needs_launch(TrainerConfig(devices=2))
    place_of(SLURM_NTASKS="2", SLURM_PROCID="1")
    assert (launch.started_from_outside(), launch.rank()) == (2, 1)
    assert not launch.needs_launch(TrainerConfig(devices=2))
    place_of(
        SLURM_NTASKS="2", SLURM_PROCID="1", SLURM_JOB_NAME="interactive"
    )  # a shell on a node, in which srun starts nothing
    assert launch.needs_launch(TrainerConfig(devices=2))
    place_of(TORCHELASTIC_RUN_ID="x", WORLD_SIZE="4", RANK="3")
    assert (launch.started_from_outside(), launch.rank()) == (4, 3)


@pytest.mark.parametrize(("devices", "nodes"), [(1, 1), (4, 1), (2, 2)])
def test_another_number_of_processes_than_was_asked_for_is_refused(place_of, devices, nodes):
    place_of(TORCHELASTIC_RUN_ID="x", WORLD_SIZE="2")
    with pytest.raises(ConfigError, match=rf"trainer\.devices={devices} x trainer\.num_nodes={nodes}"):
        launch.needs_launch(TrainerConfig(devices=devices, num_nodes=nodes))
    place_of()
    with pytest.raises(ConfigError, match=r"trainer\.num_nodes=2"):
        launch.needs_launch(TrainerConfig(num_nodes=2))


def test_a_sweep_under_torchrun_is_refused(cli, place, place_of):
    place_of(TORCHELASTIC_RUN_ID="x", WORLD_SIZE="2", RANK="0")
    said = cli("-m", *TINY, "seed=1,2")
    assert said.code == 2
    assert "(-m)" in said.err
    assert not list(place.rglob("metrics.csv"))


def started_processes(process):
    """The processes of the run by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            settings = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == process.pid:
            found |= {int(s[5:]): int(folder.name) for s in settings if s.startswith(b"RANK=")}
    return found


def begun(folder, *more):
    """A run without an end, after its first steps."""
    process = start([*TINY, *ENDLESS, *more, f"output_dir={folder}"], folder.parent)
    metrics = folder / "metrics.csv"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, process)
    return process


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_dies_ends_the_others_with_the_reason(victim, tmp_path):
    process = begun(tmp_path / "run")
    ranks = started_processes(process)
    assert set(ranks) == {0, 1}
    os.kill(ranks[victim], signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3
    assert f"process {victim}" in err
    assert "SIGKILL" in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    assert sorted(p.name for p in (tmp_path / "run" / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]


@pytest.mark.parametrize("other", [-signal.SIGTERM, 128 + signal.SIGTERM, 3])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_the_reason_also_where_all_end_in_one_second(victim, other, tmp_path):
    codes = {victim: -signal.SIGKILL, 1 - victim: other}
    failures = {n: ProcessFailure(n, 1, codes[n], str(tmp_path / "none")) for n in (0, 1)}
    for failure in failures.values():
        failure.timestamp = 1
    said = launch._failure(failures, tmp_path)
    assert said.code == 3
    assert f"process {victim}" in str(said)
    assert "SIGKILL" in str(said)


@pytest.mark.long
def test_a_signal_stops_all_and_the_run_goes_on(tmp_path):
    process = begun(tmp_path / "cut")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err.count("\n")) == (143, 1), err
    step = read_checkpoint(tmp_path / "cut" / "checkpoints" / "last.ckpt")["global_step"]
    assert step % 5 == 0  # where several processes agree
    assert run([*TINY, f"trainer.max_steps={step + 10}", "output_dir=cut", "ckpt_path=last"], tmp_path)[0] == 0
    rows = read_metrics(tmp_path / "cut" / "metrics.csv")
    assert [row["step"] for row in rows] == list(range(5, step + 11, 5))


@pytest.mark.long
def test_each_run_of_a_sweep_has_processes_of_its_own(tmp_path):
    code, _, err = run(["-m", *TINY, "trainer.max_steps=5", "seed=1,2", "hydra.sweep.dir=sweep"], tmp_path)
    assert (code, err) == (0, "")
    assert run([*TINY, "trainer.max_steps=5", "seed=2", "output_dir=alone"], tmp_path)[0] == 0
    assert losses(tmp_path / "sweep" / "1") == losses(tmp_path / "alone") != losses(tmp_path / "sweep" / "0")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone", "sweep"]


@pytest.mark.long
def test_a_mistake_that_every_process_finds_is_said_once(tmp_path):
    code, _, err = run([*TINY, "model.backend=nonsense", "output_dir=run"], tmp_path)
    assert code == 2
    assert err.count("\n") <= 2, err  # a line of Hydra's, and the sentence
    assert "nonsense" in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_torchrun_and_srun_share_one_folder(tmp_path):
    words = [*TINY, "trainer.max_steps=5"]
    for name in ("torchrun", "srun"):
        (tmp_path / name).mkdir()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    code, _, err = run(words, tmp_path / "torchrun", by=torchrun, OMP_NUM_THREADS="1")
    assert code == 0, err
    # Lightning makes a port of the job's number: two suites on one machine must not have the same
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODELIST": "localhost", "SLURM_JOB_NAME": "train", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}  # fmt: skip
    tasks = [start(words, tmp_path / "srun", **job, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in (0, 1)]
    for task in tasks:
        _, err = task.communicate(timeout=PATIENCE)
        assert task.returncode == 0, err
    (one,), (other,) = (list((tmp_path / name).rglob("metrics.csv")) for name in ("torchrun", "srun"))
    assert losses(one.parent) == losses(other.parent)
    for metrics in (one, other):
        assert len(list((metrics.parent / "logs").iterdir())) == 2


@pytest.mark.long
def test_32_rows_at_once_are_32_micro_batches_are_two_processes_of_16(tmp_path):
    lines = [json.dumps({"text": "word " * (1 + 7 * i % 11) + str(i)}) for i in range(211)]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines), encoding="utf-8")
    kept = [word for word in TINY if not word.startswith(("data", "trainer=", "trainer.val_batches", "trainer.log_every"))]
    packed = ["data=hf", "data.path=documents.jsonl", "data.tokenizer=char", "data.context_len=48", "data.batch_size=32"]
    splits = {"one": ["trainer=cpu"], "micro": ["trainer=cpu", "trainer.accumulate=32"], "ranks": ["trainer=ddp_cpu"]}
    found = {}
    for name, split in splits.items():
        words = [*packed, *kept, *split, "trainer.max_steps=3", "trainer.log_every=1", f"output_dir={name}"]
        code, out, err = run(words, tmp_path)
        assert code == 0, (out, err)
        found[name] = read_metrics(tmp_path / name / "metrics.csv")
    for name in ("micro", "ranks"):
        for got, want in zip(found[name], found["one"], strict=True):
            assert got["tokens"] == want["tokens"]
            assert got["train_loss"] == pytest.approx(want["train_loss"], rel=1e-5)
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
