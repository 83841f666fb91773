"""What a grid leaves in its folder, and the report written again from it."""

from __future__ import annotations

import csv
import json
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import pytest

from minitx.ablation.launchers import Outcome
from minitx.ablation.records import key_of
from minitx.ablation.runner import kind_of
from minitx.cli import ablate
from minitx.config import ConfigError, RunConfig, StudyConfig

REPORT = ("report.html", "summary.md", "cells.csv")


class Here:
    """A pool that makes results up at once, in this process."""

    workers = 1

    def __init__(self, results):
        self.results, self.ran = results, []

    def submit(self, cell, folder):
        future = Future()
        result = self.results[key_of(cell.describe())]
        self.ran += [cell] if result else []
        future.set_result(Outcome(result, None if result else "ValueError: no luck", 1.0))
        return future

    def runs_alone(self, cell):
        return False

    def close(self):
        pass


@pytest.fixture
def without_figures(monkeypatch):
    monkeypatch.setattr("minitx.ablation.report.draw_all", lambda findings: [])


@pytest.fixture
def lab(tmp_path, fabricate, make_grid, monkeypatch):
    """``lab(report_only=True, command="a")`` runs a grid of eight cells, or reports it again; gives the pool that ran it."""
    rates = {"1e-3": (), "3e-3": ()}
    text = StudyConfig(
        base=("trainer.max_steps=5",), arms=("inv_sqrt", "unscaled"), factors={"lr": rates}, seeds=(0, 1), score="loss"
    )
    grid = make_grid(studies={"text": text}, comparisons=())
    results = {key_of(record): record["result"] for record in fabricate(grid)[0]}
    monkeypatch.setattr(ablate.time, "strftime", lambda *_: "2026-11-21")  # two launches may lie on both sides of midnight
    monkeypatch.setattr(ablate, "plan", lambda pool, grid, common, folder, whole: (ablate.cells(grid, common=common), None))

    def run(command="train.py", failing=(), **changes):
        pool = Here({key: None if key in failing else result for key, result in results.items()})

        @contextmanager
        def opened(*args, **options):
            yield pool

        with monkeypatch.context() as patch:
            patch.setattr(ablate, "open_launcher", opened)
            ablate.run_ablation(RunConfig(ablation=replace(grid, **changes)), tmp_path, [], command)
        return pool

    run.keys = list(results)
    return run


def report_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".png" or path.name in REPORT}


def remove_report(folder):
    for name in report_in(folder):
        (folder / name).unlink()


def statuses(folder):
    with (folder / "cells.csv").open() as file:
        return [row["status"] for row in csv.DictReader(file)]


def test_a_report_written_again_is_the_same_byte_for_byte_and_runs_nothing(lab, tmp_path):
    assert len(lab().ran) == 8
    first = report_in(tmp_path)
    assert set(first) > set(REPORT)
    records = (tmp_path / "cells.jsonl").read_bytes()
    remove_report(tmp_path)
    assert lab(command="another command", report_only=True).ran == []
    assert report_in(tmp_path) == first
    assert (tmp_path / "cells.jsonl").read_bytes() == records


@pytest.mark.usefixtures("without_figures")
def test_a_report_written_again_counts_what_is_not_there_as_missing(lab, tmp_path):
    lab()
    path = tmp_path / "cells.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    lab(report_only=True)
    assert sorted(statuses(tmp_path)) == ["done"] * 5 + ["missing"] * 3
    assert b"8 expected, 5 done, 0 failed, 3 missing" in (tmp_path / "report.html").read_bytes()


@pytest.mark.usefixtures("without_figures")
def test_a_report_written_again_finds_cells_by_their_place_whatever_the_code(lab, tmp_path, monkeypatch):
    lab()
    first = report_in(tmp_path)
    monkeypatch.setattr("minitx.ablation.grid.code_fingerprint", lambda: "another code")
    lab(report_only=True)
    assert report_in(tmp_path) == first


@pytest.mark.usefixtures("without_figures")
def test_of_two_records_of_a_place_the_newest_that_finished_is_reported(lab, tmp_path):
    lab()
    path = tmp_path / "cells.jsonl"
    one = json.loads(path.read_text().splitlines()[0])
    newer = {**one, "cell": "f" * 16, "result": {**one["result"], "val_loss": 1.125}}
    failed = {**one, "cell": "e" * 16, "status": "failed", "error": "no luck", "result": None}
    with path.open("a") as file:
        file.write(json.dumps(newer) + "\n" + json.dumps(failed) + "\n")
    lab(report_only=True)
    with (tmp_path / "cells.csv").open() as file:
        rows = {row["cell"]: row for row in csv.DictReader(file)}
    assert rows["f" * 16]["val_loss"] == "1.125"
    assert not {one["cell"], "e" * 16} & set(rows)
    assert len(rows) == 8


@pytest.mark.usefixtures("without_figures")
def test_a_report_of_a_part_leaves_the_cells_of_the_other_studies_out(lab, tmp_path):
    lab()
    other = {**json.loads((tmp_path / "cells.jsonl").read_text().splitlines()[0]), "study": "elsewhere"}
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write(json.dumps(other) + "\n")
    lab(report_only=True, only=("text",))
    assert b"0 that belong to no cell of the grid" in (tmp_path / "report.html").read_bytes()


def test_a_folder_without_records_is_refused_in_a_sentence(lab, tmp_path):
    with pytest.raises(ConfigError, match=r"holds no cells.jsonl: run the grid first, without ablation.report_only=true"):
        lab(report_only=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_figures")
def test_a_report_keeps_who_made_the_cells_and_adds_up_the_seconds_of_all_launches(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(ablate, "_commit", lambda: "c0ffee")
    with pytest.raises(ablate.CellsFailedError):
        lab(failing=lab.keys[:2])
    (first,) = json.loads((tmp_path / "meta.json").read_text())["launches"]
    assert (first["commit"], first["command"]) == ("c0ffee", "train.py")
    path = tmp_path / "meta.json"
    path.write_text(json.dumps({"launches": [{**first, "wall_seconds": 1000.0}]}))
    assert len(lab().ran) == 2  # the same command goes on: one entry
    (whole,) = json.loads(path.read_text())["launches"]
    assert 1000.0 < whole["wall_seconds"] < 2000.0
    assert {**whole, "wall_seconds": 0} == {**first, "wall_seconds": 0}
    kept = path.read_bytes()
    monkeypatch.setattr(ablate, "_commit", lambda: "decade")
    assert lab().ran == []  # nothing to run: nothing to note
    lab(report_only=True, command="later")
    assert path.read_bytes() == kept
    page = (tmp_path / "report.html").read_text()
    assert "c0ffee" in page
    assert "c0ffee, judged and written again by decade" in page


def test_launches_that_differ_are_listed_and_those_of_other_code_left_out_of_a_new_run(tmp_path):
    def launch(commit, seconds, code):
        return {"commit": commit, "code": code, "command": "train.py", "date": "2026-11-21", "hardware": "h", "versions": {"a": commit}, "wall_seconds": seconds}  # fmt: skip

    path = tmp_path / "meta.json"
    path.write_text(
        json.dumps({"launches": [launch("one", 10.0, "old"), launch("two", 5.0, "new"), launch("three", 2.5, "new")]})
    )
    everything, new = ablate.read_meta(path), ablate.read_meta(path, code="new")
    assert (everything["commit"], everything["wall_seconds"], everything["command"]) == ("one; two; three", 17.5, "train.py")
    assert (new["commit"], new["wall_seconds"], new["versions"]) == ("two; three", 7.5, {"a": "three"})
    assert ablate.read_meta(tmp_path / "none.json") == {}


@pytest.mark.parametrize(("limit", "trimmed"), [(50.0, True), (1000.0, False)])
def test_a_part_is_shortened_when_the_whole_grid_would_take_too_long(tmp_path, make_grid, monkeypatch, limit, trimmed):
    study = StudyConfig(base=("trainer.max_steps=5",), arms=("inv_sqrt",), seeds=(0, 1))
    long = replace(study, base=("trainer.max_steps=500",))
    trim = {"short": ("trainer.max_steps=3",)}
    whole = make_grid(studies={"short": study, "long": long}, comparisons=(), only=("short",), trim=trim, time_limit=limit)
    monkeypatch.setattr(ablate, "project", lambda launcher, found, folder: {kind_of(cell): (0.0, 0.1) for cell in found})
    chosen, _ = ablate.plan(Here({}), whole.chosen(), [], tmp_path, whole=whole)
    assert [cell.steps() for cell in chosen] == [3 if trimmed else 5] * 2
    assert ablate.was_trimmed(tmp_path) == trimmed
