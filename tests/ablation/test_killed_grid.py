"""A grid that is stopped or killed at any moment goes on where it was, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pretended_runs import alive, comparable, run

from minitx.training.json_lines import read_json_lines
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")

PROGRAM = """
import dataclasses, functools, logging, sys
from pathlib import Path
import pretended_runs
from minitx.ablation import grid
from minitx.cli import ablate
from minitx.cli.exit_codes import exit_code

grid.code_fingerprint, ablate.facts = lambda: "code", lambda command: {}  # torch and Lightning take seconds
logging.basicConfig(level=logging.INFO, format="%(message)s")
ablate.run_cell, ablate.check, ablate.write_findings = pretended_runs.pretend, lambda cells: None, lambda *findings: None
ablate.check_judged = lambda grid, cells: None
real = ablate.cells
ablate.cells = lambda grid, common: real(grid)
two = dataclasses.replace(pretended_runs.grid(), workers=2)
sys.exit(exit_code(lambda: ablate.run_ablation(two, Path("killed").absolute(), [], "train.py")))
"""
LINES, PERMITS = Path("killed", "cells.jsonl"), Path("killed", "permits")


def children_of(pid):
    """The processes that ``pid`` has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def two_waiting(process):
    """Both workers, once their runs wait: a worker that is only starting would print that its parent is gone."""
    wait_for(lambda: len(waiting(process.pid)) == 2, process)
    return waiting(process.pid)


def waiting(pid):
    """The workers of ``pid`` whose runs wait."""
    return [child for child in children_of(pid) if LINES.with_name(f"{child}.waits").exists()]


def go_on(process, more):
    """Let the grid run until it has so many lines more; its next runs wait."""
    wanted = len(read_json_lines(LINES)) + more
    PERMITS.write_bytes(b"x" * (wanted + 1))
    wait_for(lambda: len(read_json_lines(LINES)) >= wanted, process)


@pytest.mark.slow
def test_a_grid_that_is_stopped_or_killed_goes_on_and_ends_in_the_records_of_one_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("minitx.ablation.grid.code_fingerprint", lambda: "code")
    whole = comparable(run(Path("whole")), "whole")
    PERMITS.parent.mkdir()
    here = [str(Path(__file__).parents[2]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(here)}
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        PERMITS.write_bytes(b"x")
        with Path("log.txt").open("w") as log:
            process = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=log, stderr=log)
        go_on(process, 2)
        if number == signal.SIGKILL:
            os.kill(two_waiting(process)[0], signal.SIGKILL)
            go_on(process, 3)
        two_waiting(process)
        processes = children_of(process.pid)
        process.send_signal(number)
        found, said = process.wait(PATIENCE), Path("log.txt").read_text()
        assert found == code, said
        assert "Traceback" not in said
        assert code < 0 or "stopped by SIGINT; finished runs are kept: to resume, repeat the command" in said
        wait_for(lambda those=processes: not any(map(alive, those)))  # no worker outlives its grid
    assert 0 < len(read_json_lines(LINES)) < len(whole)
    PERMITS.unlink()
    records = run(LINES.parent)
    assert len(read_json_lines(LINES)) == len(whole)  # nothing was run twice
    assert comparable(records, "killed") == whole
