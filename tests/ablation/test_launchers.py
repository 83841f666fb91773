"""Where cells run: every launcher gives the same records, and the death of what runs a cell is an outcome."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

from minitx.ablation.grid import Cell
from minitx.ablation.launchers import devices_of, open_launcher
from minitx.ablation.runner import project, run_cells
from minitx.config import ConfigError
from tests.waiting import PATIENCE, wait_for

needs_submitit = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="pip install minitx[slurm]")
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install minitx[ray]")


def cell(name, *changes, seed=0):
    return Cell("main", name, {}, seed, (f"name={name}", "trainer.max_steps=5", *changes))


# What another process runs: at the top of the module, so that it is found there.


def what_it_sees(overrides, folder):
    name = overrides[0].removeprefix("name=")
    if name.startswith("raise"):
        raise ValueError("no luck")
    if name.startswith("die"):
        os._exit(7)
    place = Path(folder).parents[2]  # the grid's
    if name.startswith("slow"):
        (place / "begun").touch()
        time.sleep(PATIENCE)
    if name.startswith("meet"):  # until three processes have come here
        (place / f"{os.getpid()}.here").touch()
        wait_for(lambda: len(list(place.glob("*.here"))) == 3)
    begun = time.monotonic()
    time.sleep(0.2 if "wait" in name else 0.0)  # two of these that run at once overlap
    return {
        "name": name,
        "pid": os.getpid(),
        "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "torch": "torch" in sys.modules,
        "span": [begun, time.monotonic()],
    }


@pytest.fixture
def elsewhere(monkeypatch):
    """Jobs and tasks are new processes: they find this module as this process does."""
    here = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*here, os.environ.get("PYTHONPATH", "")]))


# --- devices


@pytest.mark.parametrize(
    ("overrides", "count"),
    [([], 1), (["trainer.devices=2"], 2), (["trainer.devices=2", "trainer.devices=1"], 1), (["+trainer.devices=3"], 3),
     (["trainer.devices=auto", "xtrainer.devices=5"], 1)],
)  # fmt: skip
def test_the_last_override_says_how_many_devices_a_cell_takes(overrides, count):
    assert devices_of(overrides) == count


def test_each_worker_sees_one_device_before_torch_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "not this")
    todo = [cell(f"meet {i}") for i in range(9)]
    with open_launcher("local", 3, what_it_sees, tmp_path, devices=["0", "1", "MIG-5"]) as pool:
        results = [record["result"] for record in run_cells(pool, todo, tmp_path)]
    seen = {(result["pid"], result["gpu"]) for result in results}
    assert sorted(gpu for _, gpu in seen) == ["0", "1", "MIG-5"]  # and a worker keeps its own
    assert not any(result["torch"] for result in results)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "not this"


def test_workers_that_replace_dead_ones_are_pinned_again(tmp_path):
    with open_launcher("local", 1, what_it_sees, tmp_path, devices=["7"]) as pool:
        records = run_cells(pool, [cell("die"), cell("a")], tmp_path)
    assert [record["status"] for record in records] == ["failed", "done"]
    assert records[1]["result"]["gpu"] == "7"


def test_cells_of_several_devices_come_last_one_by_one_and_not_in_a_worker(tmp_path):
    several = [cell(f"wait several {i}", "trainer.devices=2") for i in range(2)]
    single = [cell(f"wait {i}") for i in range(4)]
    with open_launcher("local", 2, what_it_sees, tmp_path, devices=["0", "1"]) as pool:
        records = run_cells(pool, [*several, *single], tmp_path)
    spans = [record["result"]["span"] for record in records]
    assert max(end for _, end in spans[2:]) <= min(begin for begin, _ in spans[:2])
    (_, first_end), (second_begin, _) = sorted(spans[:2])
    assert first_end <= second_begin
    assert [record["result"]["pid"] == os.getpid() for record in records] == [True] * 2 + [False] * 4


def test_a_projection_measures_cells_of_several_devices_apart(tmp_path):
    todo = [cell("a"), cell("b", "trainer.devices=2"), cell("c")]
    with open_launcher("local", 2, what_it_sees, tmp_path) as pool:
        assert set(project(pool, todo, tmp_path)) == {("main", "", 1), ("main", "", 2)}


TINY = ["experiment=scaling_cell_recall", "data.num_pairs=3", "data.num_keys=8", "data.num_values=4", "data.val_size=8",
        "data.batch_size=4", "model.embed_dim=8", "model.num_heads=1", "model.ffn_dim=8", "trainer.max_steps=3",
        "trainer.threads=1", "schedule.warmup_steps=0", "callbacks.progress=false", "callbacks.probe.every=0", "seed=3"]  # fmt: skip


@pytest.mark.long
def test_a_cell_of_two_devices_is_a_program_of_its_own_and_gives_the_losses_of_one(tmp_path):
    from minitx.cli.ablate import run_cell

    two = Cell("main", "two", {}, 3, (*TINY, "trainer.accelerator=cpu", "trainer.devices=2", "trainer.strategy=ddp"))
    wrong = Cell("main", "wrong", {}, 3, (*two.overrides, "model.num_heads=3"))
    with open_launcher("local", 2, run_cell, tmp_path) as pool:
        records = run_cells(pool, [two, wrong], tmp_path)
    assert records[0]["error"] is None
    assert records[1]["error"].startswith("RuntimeError: the run on several devices ended with exit code 1: ")
    assert "num_heads=3" in records[1]["error"]
    one = run_cell(TINY, str(tmp_path / "one"))
    assert records[0]["result"]["steps"] == 3
    for name in ("val_loss", "initial_loss"):
        assert records[0]["result"][name] == pytest.approx(one[name], abs=1e-5)
    assert records[0]["result"].keys() == one.keys()


# --- engines


@pytest.mark.parametrize(("name", "package"), [("slurm", "submitit"), ("ray", "ray")])
def test_an_engine_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with (
        pytest.raises(ConfigError, match=rf"launcher={name} needs the package {package}, .* pip install minitx\[{name}\]"),
        open_launcher(name, 2, what_it_sees, tmp_path),
    ):
        pass


def check_engine(name, tmp_path, options):
    """Two at a time; a cell that raises and one whose process dies are records, and the grid goes on."""
    todo = [cell(text) for text in ("wait a", "raise", "die", "wait b")]
    with open_launcher(name, 2, what_it_sees, tmp_path, options=options) as launcher:
        records = run_cells(launcher, todo, tmp_path)
        assert [record["status"] for record in records] == ["done", "failed", "failed", "done"]
        assert records[0]["result"]["name"] == "wait a"
        assert records[0]["result"]["pid"] != os.getpid()
        assert records[1]["error"] == "ValueError: no luck"
        assert " died: " in records[2]["error"]
        assert "\n" not in records[2]["error"]
    return records


@needs_submitit
@pytest.mark.slow
def test_submitit_runs_cells_as_jobs_and_a_job_that_dies_is_a_failed_cell(tmp_path, elsewhere):
    check_engine("slurm", tmp_path, {"cluster": "local", "slurm_partition": "debug", "timeout_min": int(PATIENCE // 60)})
    left = {path.name.split("_")[0] for path in (tmp_path / "jobs").iterdir()}
    assert len(left) == 2  # what the failed jobs said


@needs_submitit
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit forgets a process that it ended
def test_closing_submitit_cancels_its_jobs(tmp_path, elsewhere):
    with open_launcher("slurm", 1, what_it_sees, tmp_path, options={"cluster": "local"}) as launcher:
        future = launcher.submit(cell("slow"), tmp_path)
        wait_for((tmp_path / "begun").exists)
    assert " died: " in future.result(PATIENCE).error
    del launcher
    gc.collect()  # what submitit leaves is noticed here and not in another test


@needs_submitit
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves its log files open
def test_submitit_in_this_process(tmp_path):
    with open_launcher("slurm", 1, what_it_sees, tmp_path, options={"cluster": "debug"}) as launcher:
        (record,) = run_cells(launcher, [cell("a")], tmp_path)
    assert record["result"]["pid"] == os.getpid()


@needs_submitit
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": "pbs"}, "launcher_options.cluster=pbs is not allowed: one of slurm, local, debug"),
        ({"cluster": "local", "colour": "red"}, "'colour' need to be prefixed"),
        ({"cluster": "local", "timeout_min": "long"}, "timeout_min"),
        ({"cluster": "local", "slurm_colour": "red"}, "slurm_colour"),
    ],
)
def test_what_submitit_refuses_is_a_config_error(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message), open_launcher("slurm", 1, what_it_sees, tmp_path, options=options):
        pass


@needs_ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_runs_cells_as_tasks_and_one_that_dies_is_a_failed_cell(tmp_path, elsewhere):
    import signal

    before = signal.getsignal(signal.SIGTERM)
    options = {"num_cpus": 2, "_temp_dir": f"/tmp/ray-{os.getpid()}"}
    try:
        check_engine("ray", tmp_path, options)
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        import shutil

        shutil.rmtree(options["_temp_dir"], ignore_errors=True)


@needs_ray
@pytest.mark.filterwarnings("ignore")
def test_what_ray_refuses_is_a_config_error(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"launcher=ray with launcher_options=\{'colour': 'red'\}"),
        open_launcher("ray", 1, what_it_sees, tmp_path, options={"colour": "red"}),
    ):
        pass


def test_the_launcher_reaches_no_cell(tmp_path, monkeypatch):
    """The same cells, whatever runs them: their hashes stay, and so does the report."""
    from minitx.cli import ablate
    from minitx.cli.compose import compose_config

    found = {}
    typed = {
        "local": [],
        "slurm": [
            "ablation.launcher=slurm",
            "+ablation.launcher_options={cluster: local, timeout_min: 3}",
            "ablation.workers=7",
        ],
        "ray": ["ablation.launcher=ray", "+ablation.launcher_options.task={num_gpus: 1}"],
    }

    class ReachedError(Exception):
        pass

    def opened(name, workers, run_cell, folder, *, devices, options):
        found[name]["got"] = (name, workers, options)
        raise ReachedError

    def planned(grid, *, common, trimmed=False):
        cells = real(grid, common=common, trimmed=trimmed)
        found[grid.launcher] = {"hashes": [one.hash for one in cells]}
        return cells

    real = ablate.cells
    monkeypatch.setattr(ablate, "cells", planned)
    monkeypatch.setattr(ablate, "open_launcher", opened)
    for overrides in typed.values():
        words = ["experiment=scaling_ablation", "ablation=smoke", *overrides]
        with pytest.raises(ReachedError):
            ablate.run_ablation(compose_config(words), tmp_path / "grid", words, "train.py")
    assert found["local"]["hashes"] == found["slurm"]["hashes"] == found["ray"]["hashes"]
    assert found["slurm"]["got"] == ("slurm", 7, {"cluster": "local", "timeout_min": 3})
    assert found["ray"]["got"][2] == {"task": {"num_gpus": 1}}


def test_options_of_a_cluster_are_refused_on_this_machine():
    from minitx.config import AblationConfig

    with pytest.raises(ConfigError, match=r"launcher_options=\{'cluster': 'local'\} are for launcher=slurm or ray"):
        AblationConfig(launcher_options={"cluster": "local"})
