"""The grid runner: resumable, patient with failures, and gone when it is told to go."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from minitx.ablation.grid import Cell
from minitx.ablation.launchers import Launcher, Outcome, Pool, _watch, open_launcher
from minitx.ablation.runner import project, projected_seconds, read_records, run_cells
from tests.waiting import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]


def cell(name, steps=5, study="main", **factors):
    return Cell(study, "a", factors, 0, (f"name={name}", f"trainer.max_steps={steps}"))


def value_of(overrides, key):
    return [text.partition("=")[2] for text in overrides if text.startswith(f"{key}=")][-1]


# What workers run: at the top of the module, so that a new process finds it.


def well_behaved(overrides, folder):
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with (path / "ran").open("a") as file:
        file.write("x")
    return {"name": value_of(overrides, "name"), "steps": int(value_of(overrides, "trainer.max_steps")), "pid": os.getpid()}


def moody(overrides, folder):
    """Does what the cell's name says."""
    name = value_of(overrides, "name")
    repaired = (Path(folder).parents[2] / "repaired").exists()
    if name.startswith("raise") and not repaired:
        raise ValueError(f"no luck\nwith {name}")
    if name.startswith("die") and not repaired:
        os._exit(7)
    if name.startswith("unpicklable") and not repaired:

        class LocalError(Exception):
            def __init__(self, a, b):
                super().__init__(a)

        raise LocalError("cannot", "travel")
    if name.startswith("slow"):
        time.sleep(0.5)
    return well_behaved(overrides, folder)


def run(tmp_path, todo, run_cell=well_behaved, workers=2):
    with open_launcher("local", workers, run_cell, tmp_path) as pool:
        return run_cells(pool, todo, tmp_path)


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]


def ran(tmp_path, one):
    path = tmp_path / "cells" / one.study / one.hash / "ran"
    return len(path.read_text()) if path.exists() else 0


def test_every_cell_gets_one_line_and_records_keep_the_order_of_the_grid(tmp_path):
    todo = [cell(name) for name in "edcba"]
    records = run(tmp_path, todo)
    assert [record["result"]["name"] for record in records] == list("edcba")
    assert sorted(line["cell"] for line in lines(tmp_path)) == sorted(one.hash for one in todo)
    for record, one in zip(records, todo, strict=True):
        assert {name: record[name] for name in one.describe()} == one.describe()
        assert (record["status"], record["error"]) == ("done", None)
        assert record["seconds"] >= 0


def test_workers_are_processes_that_live_for_the_whole_grid(tmp_path):
    records = run(tmp_path, [cell(str(i)) for i in range(8)], workers=1)
    pids = {record["result"]["pid"] for record in records}
    assert len(pids) == 1
    assert os.getpid() not in pids


def test_a_grid_that_goes_on_runs_only_what_is_missing(tmp_path):
    todo = [cell(name) for name in "abcd"]
    first = run(tmp_path, todo[:2])
    records = run(tmp_path, todo)
    assert records[:2] == first
    assert [ran(tmp_path, one) for one in todo] == [1, 1, 1, 1]
    assert run(tmp_path, todo) == records
    assert len(lines(tmp_path)) == 4


def test_a_line_cut_by_a_crash_costs_its_cell_and_no_other(tmp_path):
    todo = [cell(name) for name in "abc"]
    run(tmp_path, todo)
    path = tmp_path / "cells.jsonl"
    text = path.read_text()
    path.write_text(text[: text.rstrip("\n").rindex("\n") + 40])  # the third line ends in its middle
    assert len(read_records(path)) == 2
    records = run(tmp_path, todo)
    assert sorted(ran(tmp_path, one) for one in todo) == [1, 1, 2]
    found = {record["cell"]: record for record in read_records(path)}
    assert [found[one.hash] for one in todo] == records
    run(tmp_path, todo)
    assert sorted(ran(tmp_path, one) for one in todo) == [1, 1, 2]


def test_a_cell_that_fails_is_recorded_the_others_finish_and_it_is_tried_again(tmp_path):
    todo = [cell(name) for name in ("a", "raise", "b", "unpicklable", "c")]
    records = run(tmp_path, todo, moody)
    assert [record["status"] for record in records] == ["done", "failed", "done", "failed", "done"]
    assert records[1]["error"] == "ValueError: no luck with raise"
    assert records[3]["error"].startswith("LocalError: ")
    assert records[1]["result"] is None
    (tmp_path / "repaired").touch()
    again = run(tmp_path, todo, moody)
    assert [record["status"] for record in again] == ["done"] * 5
    assert [ran(tmp_path, one) for one in todo] == [1] * 5


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_dies_costs_its_own_cell_alone(tmp_path, workers):
    todo = [cell(name) for name in ("slow 1", "die", "slow 2", "a", "b")]
    records = run(tmp_path, todo, moody, workers=workers)
    assert {record["overrides"][0]: record["status"] for record in records} == {
        "name=slow 1": "done", "name=die": "failed", "name=slow 2": "done", "name=a": "done", "name=b": "done",
    }  # fmt: skip
    assert records[1]["error"] == "a worker process died"


def test_a_worker_that_is_killed_between_two_cells_is_replaced(tmp_path):
    with open_launcher("local", 1, well_behaved, tmp_path) as pool:
        first = pool.submit(cell("a"), tmp_path).result().result
        os.kill(first["pid"], signal.SIGKILL)
        wait_for(lambda: pool.executor._broken)
        second = run_cells(pool, [cell("b")], tmp_path)[0]
        assert second["status"] == "done"
        assert second["result"]["pid"] != first["pid"]


class Told(Launcher):
    """Says what a cell takes: 3 s and half a second for each step but the first, and 100 s to import in the first cell."""

    imports = 100.0

    def submit(self, cell, folder):
        future = Future()
        future.set_result(Outcome({}, None, 3.0 + 0.5 * (cell.steps() - 1) + self.imports))
        self.imports = 0.0
        return future


def test_a_projection_measures_fixed_cost_and_cost_of_a_step(tmp_path):
    todo = [cell("a", 1001), cell("b", 1001), cell("c", 11, study="other")]
    costs = project(Told(1, well_behaved), todo, tmp_path)
    assert costs == {("main", "", 1): (3.0, 0.5), ("other", "", 1): (3.0, 0.5)}
    costs = {("main", "", 1): (3.0, 0.5), ("other", "", 1): (1.0, 2.0)}
    assert projected_seconds(todo, costs, launcher=Launcher(2, well_behaved)) == (503.0 * 2 + 21.0) / 2


def test_a_projection_survives_cells_that_fail_or_die(tmp_path):
    todo = [cell("raise"), cell("die", study="deadly"), cell("a", study="good")]
    with open_launcher("local", 1, moody, tmp_path) as pool:
        costs = project(pool, todo, tmp_path)
        assert set(costs) == {("main", "", 1), ("deadly", "", 1), ("good", "", 1)}
        assert [record["status"] for record in run_cells(pool, todo, tmp_path)] == ["failed", "failed", "done"]


def test_closing_a_pool_ends_its_workers_whatever_they_do(tmp_path):
    pool = Pool(1, moody)
    pool.submit(cell("a"), tmp_path).result()
    (process,) = pool.executor._processes.values()
    pool.submit(cell("slow"), tmp_path)
    pool.close()
    process.join(PATIENCE)
    assert process.exitcode is not None
    pool.close()  # once more does no harm


def test_a_worker_whose_parent_was_killed_before_it_began_ends_at_once(monkeypatch, tmp_path):
    """Its first look at its parent would show the process that adopted it."""
    ended = []
    monkeypatch.setattr("minitx.ablation.launchers.os.getppid", lambda: 1)

    def end(code):
        ended.append(code)
        raise SystemExit

    monkeypatch.setattr("minitx.ablation.launchers.os._exit", end)
    with pytest.raises(SystemExit):
        _watch(os.getpid())
    assert ended == [1]
    with open_launcher("local", 1, well_behaved, tmp_path) as pool:
        pool.submit(cell("a"), Path("/nonexistent")).exception(PATIENCE)
        assert pool.executor._initargs == (os.getpid(), None)


# The real thing: cells are training runs.

TINY = ["data.num_pairs=3", "data.num_keys=8", "data.num_values=4", "data.val_size=8", "data.batch_size=4", "model.embed_dim=8",
        "model.num_heads=1", "model.ffn_dim=8"]  # fmt: skip
CELL = ["experiment=scaling_cell_recall", *TINY, "trainer.threads=1", "callbacks.progress=false"]


def digest_in_a_new_process(overrides, folder):
    code = (
        "import json, sys\nfrom minitx.cli.ablate import run_cell\n"
        "print(json.dumps(run_cell(json.loads(sys.argv[1]), sys.argv[2])['loss_digest']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(overrides), str(folder)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_used_worker_a_new_process_and_the_stored_command_give_equal_bits(tmp_path):
    from minitx.cli.ablate import run_cell

    def make(name, *changes):
        return Cell("main", name, {}, 3, (*CELL, "trainer.max_steps=6", "model.dropout=0.1", *changes, "seed=3"))

    wanted = make("wanted", "optimizer.rules=[{match: '(q|k)_proj', lr: 'head_dim^-0.25'}]")
    same = Cell("main", "again", {}, 3, wanted.overrides)
    todo = [make("other", "model.scale=unscaled"), wanted, make("clipped", "trainer.clip=0.1"), same]
    records = run(tmp_path, todo, run_cell, workers=1)
    assert [record["error"] for record in records] == [None] * 4
    digests = {record["arm"]: record["result"]["loss_digest"] for record in records}
    assert digests["wanted"] == digests["again"]
    assert len(set(digests.values())) == 3
    words = shlex.split(wanted.command)
    assert digest_in_a_new_process(words[2:], tmp_path / "alone") == digests["wanted"]
