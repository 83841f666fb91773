"""One run in several processes: who starts them, what a sweep does, and what becomes of the others when one dies."""

import json
import math
import os
import signal
import socket
import threading
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from minitx.cli import launch, train
from minitx.cli.compose import compose_config
from minitx.config import ConfigError, TrainerConfig
from minitx.training import rank
from minitx.training.metrics_csv import read_metrics
from tests.cli.conftest import RESULT, losses
from tests.cli.conftest import TINY as ALONE
from tests.cli.processes import OF_LAUNCHERS, ROOT, run, start
from tests.waiting import PATIENCE, wait_for

TINY = (*ALONE, "trainer=ddp_cpu", "trainer.val_batches=1", "trainer.val_every=0", "trainer.log_every=5")


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


def test_two_devices_need_two_processes_unless_torchrun_or_srun_started_them(place_of):
    assert not launch.needs_launch(TrainerConfig())
    assert launch.needs_launch(TrainerConfig(devices=2))
    place_of(SLURM_NTASKS="2", SLURM_PROCID="1")
    assert (launch.started_from_outside(), rank()) == (2, 1)
    assert not launch.needs_launch(TrainerConfig(devices=2))
    place_of(SLURM_NTASKS="2", SLURM_PROCID="1", SLURM_JOB_NAME="interactive")  # a shell on a node: srun starts nothing in it
    assert launch.needs_launch(TrainerConfig(devices=2))
    place_of(TORCHELASTIC_RUN_ID="x", WORLD_SIZE="4", RANK="3")
    assert (launch.started_from_outside(), rank()) == (4, 3)


def test_another_number_of_processes_than_was_asked_for_is_refused(place_of):
    place_of(TORCHELASTIC_RUN_ID="x", WORLD_SIZE="2")
    for devices, nodes in ((1, 1), (2, 2)):
        with pytest.raises(ConfigError, match=rf"trainer\.devices={devices} x trainer\.num_nodes={nodes}"):
            launch.needs_launch(TrainerConfig(devices=devices, num_nodes=nodes))
    place_of()
    with pytest.raises(ConfigError, match=r"trainer\.num_nodes=2"):
        launch.needs_launch(TrainerConfig(num_nodes=2))


def test_the_folder_of_a_run_is_named_by_its_job_where_torchrun_or_srun_started_it(cli, place, place_of, monkeypatch):
    folders = []
    monkeypatch.setattr("minitx.cli.train.run_training", lambda config, folder, command: folders.append(folder) or RESULT)
    torchrun = {"TORCHELASTIC_RUN_ID": "night", "WORLD_SIZE": "2"}
    srun = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train"}
    for names in (torchrun, srun):
        for number in ("0", "1"):
            place_of(**names, **{"RANK" if names is torchrun else "SLURM_PROCID": number})
            assert cli(*TINY).code == 0
    place_of(**torchrun | {"TORCHELASTIC_RUN_ID": "none"}, RANK="0")  # what torchrun calls all runs by default
    said = cli(*TINY)
    assert said.code == 2 and "output_dir=FOLDER" in said.err
    assert cli(*TINY, "output_dir=run").code == 0
    runs = place / "runs" / "default"
    assert folders == [runs / "night", runs / "night", runs / "7_3", runs / "7_3", place / "run"]


def test_a_sweep_under_torchrun_is_refused(cli, place, place_of):
    place_of(TORCHELASTIC_RUN_ID="x", WORLD_SIZE="2", RANK="0")
    said = cli("-m", *TINY, "seed=1,2")
    assert said.code == 2 and "(-m)" in said.err
    assert not list(place.rglob("metrics.csv"))


def test_under_nohup_the_processes_go_on_when_the_terminal_closes(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda config, _: seen.append(config) or print)
    seen, before = [], signal.signal(signal.SIGHUP, signal.SIG_IGN)
    launch.launch([], 2, tmp_path)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    launch.launch([], 2, tmp_path)
    signal.signal(signal.SIGHUP, before)
    assert ["SIGHUP" in each.signals_to_handle for each in seen] == [False, True]


def test_a_run_of_several_processes_is_resumed_in_its_folder_and_not_repeated_there(cli, place, monkeypatch):
    launched = []

    def launch(words, processes, folder):
        launched.append(words)
        (folder / "result.json").write_text(json.dumps(RESULT))

    monkeypatch.setattr("minitx.cli.train.launch", launch)
    (place / "run").mkdir()
    (place / "run" / "metrics.csv").write_text("step\n1\n")
    words = [*TINY, "output_dir=run"]
    assert cli(*words, "ckpt_path=last").code == 0
    assert "ckpt_path=last" in launched[0]
    said = cli(*words)
    assert said.code == 2 and "ckpt_path=last" in said.err
    assert len(launched) == 1


@pytest.mark.parametrize("number", ["0", "1"])
def test_each_task_of_srun_refuses_the_folder_of_another_run_without_waiting_for_the_first(cli, place, place_of, number):
    place_of(SLURM_JOB_ID="7", SLURM_STEP_ID="3", SLURM_NTASKS="2", SLURM_JOB_NAME="train", SLURM_PROCID=number)
    (place / "run").mkdir()
    (place / "run" / "metrics.csv").write_text("step\n1\n")
    said = cli(*TINY, "output_dir=run")
    assert said.code == 2 and "ckpt_path=last" in said.err


def test_a_process_whose_launcher_is_gone_stops_as_by_sigterm(monkeypatch):
    parents, stopped = iter([1, 1, 2]), threading.Event()
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(
        os, "kill", lambda process, number: (process, number) == (os.getpid(), signal.SIGTERM) and stopped.set()
    )
    launch.stop_with_parent()
    assert stopped.wait(PATIENCE)


def rank_of(folder, parent):
    """The rank of the process whose folder in /proc this is; None for one that ``parent`` did not start."""
    try:
        settings, state = (folder / "environ").read_bytes().split(b"\0"), (folder / "stat").read_text()
    except OSError:
        return None
    child = int(state.rpartition(")")[2].split()[1]) == parent
    return next((int(one[5:]) for one in settings if one.startswith(b"RANK=")), None) if child else None


@pytest.mark.slow
def test_a_run_whose_process_dies_or_that_is_preempted_ends_in_a_sentence_and_resumes_to_the_same_losses(tmp_path):
    words, metrics = (
        [*TINY, "trainer.max_steps=60", "trainer.log_every=1", "trainer.ckpt_every=4"],
        tmp_path / "run" / "metrics.csv",
    )

    def hit(number, rank, *more):
        """Send a signal to the launcher, or to a process of the run after some steps; its exit code and last words."""
        slow = ["+callbacks.slow._target_=tests.cli.processes.Slow", "imports=[tests.cli.processes]"]
        done = metrics.read_text().count("\n") if metrics.exists() else 0
        process = start([*words, *slow, "output_dir=run", *more], tmp_path, PYTHONPATH=str(ROOT))
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > done + 6, process)
        ranks = {rank_of(folder, process.pid): int(folder.name) for folder in Path("/proc").glob("[0-9]*")}
        assert ranks.pop(None) and set(ranks) == {0, 1}
        os.kill(process.pid if rank is None else ranks[rank], number)
        _, err = process.communicate(timeout=PATIENCE)
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
        return process.returncode, err

    code, err = hit(signal.SIGKILL, 1)
    assert code == 3 and "process 1" in err and "SIGKILL" in err
    assert sorted(p.name for p in (tmp_path / "run" / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    code, err = hit(signal.SIGUSR1, None, "ckpt_path=last")
    assert code == 138 and "stopped by SIGUSR1" in err
    code, _, err = run([*words, "output_dir=run", "ckpt_path=last"], tmp_path)
    assert code == 0, err
    code, _, err = run([*words, "output_dir=whole"], tmp_path)
    assert code == 0, err
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


OF_EIGHT = (*TINY, "trainer.max_steps=8", "trainer.log_every=1", "trainer.ckpt_every=2", "imports=[tests.cli.processes]")


def hit_by(callback):
    """Words for a callback of ``tests.cli.processes``."""
    return [*OF_EIGHT, f"+callbacks.hit._target_=tests.cli.processes.{callback}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of a run of eight steps in two processes."""
    folder = tmp_path_factory.mktemp("whole")
    code, _, err = run([*OF_EIGHT, "output_dir=run"], folder, PYTHONPATH=str(ROOT))
    assert code == 0, err
    return losses(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("callback", "reason"),
    [
        ("FullDisk", "last.ckpt could not be written: File too large; the previous checkpoint is intact"),
        ("Moved", "metrics.csv"),
    ],
)
def test_a_full_disk_and_a_folder_that_is_gone_end_all_processes_in_a_sentence_and_lose_no_step(
    tmp_path, whole, callback, reason
):
    code, _, err = run([*hit_by(callback), "output_dir=run"], tmp_path, PYTHONPATH=str(ROOT))
    assert (code, len(err.splitlines())) == (3, 1) and reason in err, err
    folder = next(path.parent.name for path in tmp_path.glob("*/metrics.csv"))
    code, _, err = run([*OF_EIGHT, f"output_dir={folder}", "ckpt_path=last"], tmp_path, PYTHONPATH=str(ROOT))
    assert code == 0, err
    assert losses(tmp_path / folder) == whole


@pytest.mark.slow
def test_a_second_job_in_the_folder_of_two_processes_is_refused_and_changes_nothing(tmp_path, whole):
    metrics = tmp_path / "run" / "metrics.csv"
    first = start([*hit_by("Waiting"), "output_dir=run"], tmp_path, PYTHONPATH=str(ROOT))
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") == 5, first)
    code, _, err = run([*OF_EIGHT, "output_dir=run", "ckpt_path=last"], tmp_path, PYTHONPATH=str(ROOT))
    assert (code, len(err.splitlines())) == (2, 1) and "another process is training in this folder" in err, err
    (tmp_path / "go").touch()
    _, err = first.communicate(timeout=PATIENCE)
    assert first.returncode == 0, err
    assert losses(tmp_path / "run") == whole


@pytest.mark.parametrize("other", [-signal.SIGTERM, 128 + signal.SIGTERM, 3])
def test_a_killed_process_is_the_reason_also_where_all_end_in_one_second(other, tmp_path):
    for victim in (0, 1):
        codes = {victim: -signal.SIGKILL, 1 - victim: other}
        failures = {n: ProcessFailure(n, 1, codes[n], str(tmp_path / "none")) for n in (0, 1)}
        for failure in failures.values():
            failure.timestamp = 1
        said = launch._failure(failures, tmp_path)
        assert said.exit_code == 3 and f"process {victim}" in str(said) and "SIGKILL" in str(said)


def test_a_lost_connection_is_not_the_reason_where_another_process_has_one(tmp_path):
    failures = {n: ProcessFailure(n, 1, 3, str(tmp_path / "none")) for n in (0, 1)}
    for number, reason in ((0, launch.LOST), (1, "model: a gets no gradient")):
        failures[number].timestamp = number
        failures[number].error_file_data = {"message": {"message": reason}}
    assert str(launch._failure(failures, tmp_path)) == "model: a gets no gradient"


def test_a_sweeper_is_told_nan_of_a_diverged_run_on_several_devices(cli, place, monkeypatch):
    words = [*TINY, "trainer=cpu", "trainer.max_steps=10"]
    calls = (compose_config([*words, *wild]) for wild in ([], ["optimizer.lr=1e30", "on_nonfinite=record"]))
    monkeypatch.setattr("minitx.cli.train.launch", lambda words, processes, folder: train.run_training(next(calls), folder, ""))
    values, ask = [], train.run_on_devices
    monkeypatch.setattr("minitx.cli.train.run_on_devices", lambda *given: values.append(ask(*given)))
    for folder in ("well", "wild"):
        assert cli(*TINY, f"output_dir={folder}").code == 0
    assert values == pytest.approx([read_metrics(place / "well" / "metrics.csv")[-1]["val_loss"], math.nan], nan_ok=True)
    assert json.loads((place / "wild" / "result.json").read_text())["nonfinite_step"] is not None


@pytest.mark.release
@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_and_srun_train_on_one_node_and_on_two_as_one_process_does(tmp_path, nodes):
    """Two nodes are two groups of processes, which know each other only by what torchrun and srun tell them."""
    words = [*TINY, "trainer.max_steps=5", f"trainer.num_nodes={nodes}"]
    for name in ("torchrun", "srun", "one"):
        (tmp_path / name).mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = [f"--nnodes={nodes}", "--rdzv-id=job", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", *meeting)
    agents = [start(words, tmp_path / "torchrun", by=torchrun, OMP_NUM_THREADS="1") for _ in range(nodes)]
    # Lightning makes a port of the job's number: two suites on one machine must not have the same
    job = {
        "JOB_ID": os.getpid(),
        "NTASKS": 2 * nodes,
        "NTASKS_PER_NODE": 2,
        "NODELIST": "localhost",
        "JOB_NAME": "train",
        "NNODES": nodes,
    }
    ranks = [{**job, "NODEID": i // 2, "PROCID": i, "LOCALID": i % 2} for i in range(2 * nodes)]
    slurm = [{f"SLURM_{name}": str(value) for name, value in rank.items()} for rank in ranks]
    tasks = [start(words, tmp_path / "srun", **names) for names in slurm]
    alone = start([*TINY, "trainer=cpu", "trainer.max_steps=5", "output_dir=run"], tmp_path / "one")
    for process in (*agents, *tasks, alone):
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
    one, by_torchrun, by_srun = (next((tmp_path / name).rglob("metrics.csv")).parent for name in ("one", "torchrun", "srun"))
    assert losses(by_torchrun) == losses(by_srun) == pytest.approx(losses(one), rel=1e-5)
    for folder in (by_torchrun, by_srun):
        assert len(list((folder / "logs").iterdir())) == 2 * nodes
