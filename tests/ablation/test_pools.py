"""Where runs are computed: every pool gives the same records, and the death of what computes a run is an answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from pretended_runs import act, alive, run

from minitx.ablation.design import AblationConfig, StudyConfig
from minitx.ablation.execution import CellJob, LocalPool, SlurmPool
from minitx.ablation.grid import cells
from minitx.cli import ablate
from minitx.config import ConfigError
from tests.waiting import PATIENCE, wait_for


def grid_of(*names):
    arms = {name: (f"arm={name}",) for name in names}
    return AblationConfig(arms=arms, studies={"main": StudyConfig(base=("trainer.max_steps=5",), arms=names)})


def results(pool, folder, *names):
    """{name: result, or the reason why there is none}."""
    try:
        records = run(folder, pool, config=grid_of(*names), run_cell=act)
    finally:
        pool.close()
    return {record["arm"]: record["result"] or record["reason"] for record in records}


def test_each_worker_lives_for_the_whole_grid_and_sees_one_device_before_torch_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "not this")
    found = results(LocalPool(3, ["0", "1", "MIG-5"]), tmp_path, *(f"meet {i}" for i in range(9)))
    seen = {(result["pid"], result["gpu"]) for result in found.values()}
    assert sorted(gpu for _, gpu in seen) == ["0", "1", "MIG-5"]  # and a worker keeps its own
    assert not any(result["torch"] or result["pid"] == os.getpid() for result in found.values())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "not this"


VISIBLE = {
    (0, None): [],
    (0, ""): [],
    (2, None): ["0", "1"],
    (2, "3, 1"): ["3", "1"],
    (1, "5,-1,6"): ["5"],
    (1, "MIG-7"): ["MIG-7"],
}


@pytest.mark.parametrize(("count", "visible"), VISIBLE)
def test_the_gpus_of_workers_are_those_that_this_process_may_use(count, visible):
    assert ablate.visible_gpus(count, visible) == VISIBLE[count, visible]


def test_a_grid_has_gpus_if_one_of_its_studies_takes_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for accelerators, found in {("auto",): ["0", "1"], ("cpu", "gpu"): ["0", "1"], ("cpu",): [], ("mps",): []}.items():
        studies = {name: StudyConfig(base=(f"trainer.accelerator={name}",), arms=("a",)) for name in accelerators}
        assert ablate.gpus(cells(AblationConfig(arms={"a": ()}, studies=studies))) == found


def test_a_worker_that_dies_costs_its_own_run_alone_and_its_successor_sees_the_same_device(tmp_path):
    found = results(LocalPool(2, ["7"]), tmp_path, "a", "die", "raise", "b", "c")
    assert {name: result["gpu"] for name, result in found.items() if isinstance(result, dict)} == dict.fromkeys("abc", "7")
    assert (found["raise"], found["die"][:18]) == ("ValueError: no luck", "the process died: ")


def test_an_interrupt_from_the_terminal_does_not_reach_a_worker_even_while_it_starts():
    pool, before = LocalPool(1), {*multiprocessing.active_children()}
    call = pool.submit(os.getpid)
    (worker,) = {*multiprocessing.active_children()} - before
    os.kill(worker.pid, signal.SIGINT)
    assert call.result() == worker.pid
    os.kill(worker.pid, signal.SIGINT)
    assert pool.submit(os.getpid).result() == worker.pid
    pool.close()


def test_closing_a_pool_ends_its_workers_whatever_they_do(tmp_path):
    pool = LocalPool(1)
    worker = pool.submit(os.getpid).result()
    pool.submit(act, CellJob(["arm=slow"], tmp_path / "cells" / "slow", 1))
    wait_for((tmp_path / "begun").exists)
    assert alive(worker)
    pool.close()
    wait_for(lambda: not alive(worker))


# --- Slurm, by submitit


@pytest.mark.release
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit leaves its log files open
def test_jobs_of_submitit_answer_as_workers_do_and_are_cancelled_with_their_pool(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr("submitit.core.core.Job._results_timeout_s", 0.5)  # it waits 15 s for the answer of a dead job
    here = [str(Path(__file__).parent), str(Path(__file__).parents[2])]  # jobs are new processes
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*here, os.environ.get("PYTHONPATH", "")]))
    pool = SlurmPool(2, tmp_path / "jobs", {"cluster": "local", "timeout_min": int(PATIENCE // 60)})
    found = results(pool, tmp_path, "a", "raise", "die")
    assert (found["a"]["name"], found["raise"]) == ("a", "ValueError: no luck")
    assert found["die"].startswith("the process died: ") and "\n" not in found["die"]
    job = pool.submit(act, CellJob(["arm=slow"], tmp_path / "cells" / "slow", 1))
    wait_for((tmp_path / "begun").exists)
    pool.close()
    with pytest.raises(submitit.core.utils.UncompletedJobError):
        job.result()


def test_what_submitit_refuses_is_a_config_error_and_without_submitit_its_extra_is_named(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    for options in ({"cluster": "pbs"}, {"cluster": "local", "timeout_min": "long"}):
        with pytest.raises(ConfigError, match=f"launcher_options=.*{[*options.values()][-1]}"):
            SlurmPool(1, tmp_path, options)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"with the extra slurm"):
        SlurmPool(1, tmp_path, {})
