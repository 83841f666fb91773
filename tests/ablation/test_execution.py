"""The runner: which runs are left out, what a failure costs, and that a grid that was stopped goes on where it was."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
from pretended_runs import Here, StoppedError, comparable, grid, pretend, ran, run

from minitx.ablation.design import settings
from minitx.ablation.grid import cells
from minitx.config import ConfigError
from minitx.training.json_lines import read_json_lines


@pytest.fixture(autouse=True, scope="module")
def without_waiting():
    """Not for the disk, as no test here outlives the machine, and not for runs, as they are in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minitx.ablation.execution.os.fsync", lambda _: None)
        patch.setattr("minitx.ablation.execution.time.sleep", lambda _: None)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The records of a grid that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    return comparable(run(folder), folder)


def reasons(records):
    """{(study, seed): reason} of the runs that were left out."""
    return {(r["study"], r["seed"]): r["reason"] for r in records if r["status"] == "not run"}


def test_every_run_gets_one_line_and_records_keep_the_order_of_the_grid(tmp_path):
    records = run(tmp_path, Here(3, seed=1))
    found = cells(grid())
    assert [record["cell"] for record in records] == [cell.hash for cell in found]
    assert sorted(record["cell"] for record in read_json_lines(tmp_path / "cells.jsonl")) == sorted(cell.hash for cell in found)
    assert all(cell.describe(tmp_path).items() <= record.items() for record, cell in zip(records, found, strict=True))
    assert all((record["result"] is None) == (record["status"] == "not run") for record in records)
    assert sorted(ran(tmp_path)) == sorted(r["cell"] for r in records if r["status"] == "done")  # each once


def test_a_run_waits_for_the_one_it_starts_from_and_is_left_out_if_that_did_not_solve_its_task(whole):
    records = list(whole.values())
    assert reasons(records) == {("second", 5): "the run that it starts from did not solve the task"}
    started = [r for r in records if r["study"] == "second" and r["status"] == "done"]
    assert len(started) == 8 and all(r["result"]["low"] == 0.1 for r in started)


def test_runs_are_rehearsed_until_one_of_their_arm_is_done(tmp_path):
    asked = []

    def fails_at_first(job):
        asked.append((settings(job.words)["study"], settings(job.words)["arm"], job.rehearses))
        if len(asked) == 1:
            raise ValueError("no luck")
        return pretend(job)

    run(tmp_path, run_cell=fails_at_first)
    arms = {arm[:2]: [rehearse for *other, rehearse in asked if tuple(other) == arm[:2]] for arm in asked}
    first = asked[0][:2]
    assert arms.pop(first)[:3] == [True, True, False]
    assert all(rehearsed == [True] + [False] * (len(rehearsed) - 1) for rehearsed in arms.values())


@pytest.mark.parametrize("workers", [1, 3])
def test_a_grid_that_is_stopped_again_and_again_ends_in_the_same_records_and_runs_nothing_twice(tmp_path, whole, workers):
    """Whatever the order in which runs end, and the number of workers."""
    for stops in range(6):
        with pytest.raises(StoppedError):
            run(tmp_path, Here(workers, stops), stop_after=7)
    records = run(tmp_path, Here(workers, 6))
    assert comparable(records, tmp_path) == whole
    assert len(read_json_lines(tmp_path / "cells.jsonl")) == len(records)  # nothing twice
    before = ran(tmp_path)
    assert run(tmp_path) == records and ran(tmp_path) == before


def test_a_line_cut_anywhere_costs_its_run_and_no_other(tmp_path, whole):
    records = run(tmp_path)
    path = tmp_path / "cells.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if json.loads(line)["status"] == "done" and json.loads(line)["start"])
    lost = sum(json.loads(line)["status"] == "done" for line in lines[place:])
    for end in range(1, len(lines[place]), 150):
        path.write_bytes(b"".join(lines[:place]) + lines[place][:end])
        known = len(ran(tmp_path))
        assert comparable(run(tmp_path), tmp_path) == whole
        run(tmp_path)  # what was cut has swallowed no line
        assert len(ran(tmp_path)) == known + lost
    path.write_bytes(b"".join(lines)[:-1])  # the line is whole and its end is missing
    assert run(tmp_path) == records
    assert len(ran(tmp_path)) == known + lost


@pytest.mark.parametrize("line", ["3", "{}", '{"cell": "x", "study": "first"}'])
def test_a_whole_line_that_is_no_record_is_named(tmp_path, line):
    (tmp_path / "cells.jsonl").write_text(f"\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cells\.jsonl: line 2 is not a record of a run"):
        run(tmp_path)


def test_a_run_that_fails_is_recorded_and_named_and_tried_again_with_all_that_it_decides(tmp_path, whole, caplog):
    (tmp_path / "broken").write_text("first")
    with caplog.at_level(logging.INFO):
        records = run(tmp_path, Here(2, seed=3))
    assert f"{len(records)} of {len(records)} runs, 100%" in caplog.messages[-1]
    assert sum("failed: first: scaled, seed 3: ValueError: no luck at all" in line for line in caplog.messages) == 1
    failed = [(record["reason"], record["result"]) for record in records if record["status"] == "failed"]
    assert set(failed) == {("ValueError: no luck at all", None)}
    assert set(reasons(records).values()) == {"the run that it starts from is missing"}
    (tmp_path / "broken").unlink()
    assert comparable(run(tmp_path, Here(2, seed=4)), tmp_path) == whole


def test_a_first_phase_whose_weights_are_gone_is_run_again_for_a_new_run_alone(tmp_path):
    def all_but_weights(config):
        before = len(ran(tmp_path))
        for path in tmp_path.rglob("last.ckpt"):
            path.unlink()
        return run(tmp_path, Here(3, seed=0), config=config), ran(tmp_path)[before:]

    config = grid()
    small = replace(config.studies["second"], factors={"decay": {"0": ()}})
    all_but_weights(replace(config, studies={**config.studies, "second": small}))
    records, new = all_but_weights(config)
    firsts = [record["cell"] for record in records if record["study"] == "first"]
    assert sorted(cell for cell in new if cell in firsts) == sorted(firsts) and len(firsts) == 3
    assert {record["status"] for record in records} == {"done", "not run"}
    assert all_but_weights(config)[1] == []  # nothing starts from them any more


def test_a_record_of_other_code_is_not_taken_for_this_grids(tmp_path, whole, monkeypatch):
    run(tmp_path)
    monkeypatch.setattr("minitx.ablation.grid.code_fingerprint", lambda: "another")
    before = len(ran(tmp_path))
    records = run(tmp_path)
    assert len(ran(tmp_path)) == 2 * before and {r["status"] for r in records} == {"done", "not run"}
