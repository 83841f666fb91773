"""A grid that is stopped or killed at any moment goes on where it was, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pretend import alive, comparable, grid, run

from minitx.ablation.grid import cells
from minitx.ablation.records import read_records
from tests.waiting import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")

# What workers import. Runs wait while the grid has as many lines as a file of permits has bytes: no grid is over before it is
# killed.
GATED = """
import time
from pathlib import Path
from pretend import pretend

def gated(words, folder, *arguments):
    grid = Path(folder).parents[1]
    permits, lines = Path("permits"), grid / "cells.jsonl"
    while permits.exists() and lines.exists() and lines.read_bytes().count(b"\\n") >= permits.stat().st_size:
        time.sleep(0.02)
    return pretend(words, folder, *arguments)
"""

PROGRAM = """
import sys

if __name__ == "__main__":
    import dataclasses, functools, logging
    from pathlib import Path
    import pretend
    from gated import gated
    from minitx.cli import ablate
    from minitx.cli.errors import exit_code

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    ablate.run_cell, ablate.check, ablate.report = gated, lambda cells: None, lambda *findings: None
    ablate.run_cells = functools.partial(ablate.run_cells, projection=pretend.free)
    real = ablate.cells
    ablate.cells = lambda grid, common: real(grid)
    two = dataclasses.replace(pretend.grid(), workers=2)
    sys.exit(exit_code(lambda: ablate.run_ablation(two, Path("killed").absolute(), [], "train.py")))
"""


class Launch:
    """The grid in the folder ``killed`` of ``place``, in a process of its own; it stops after so many lines more."""

    def __init__(self, place, more):
        (place / "gated.py").write_text(GATED)
        (place / "program.py").write_text(PROGRAM)
        self.path, self.permits = place / "killed" / "cells.jsonl", place / "permits"
        self.allow(more)
        paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
        with (place / "log.txt").open("w") as log:
            self.process = subprocess.Popen([sys.executable, "program.py"], cwd=place, env=environment, stdout=log, stderr=log)
        self.log = place / "log.txt"

    def allow(self, more):
        self.wanted = len(read_records(self.path)) + more
        self.permits.write_bytes(b"x" * (self.wanted + 1))

    def wait(self):
        wait_for(lambda: len(read_records(self.path)) >= self.wanted or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()

    def end(self, number):
        """Send a signal. Gives the exit code, and what was said."""
        processes = children_of(self.process.pid)
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        wait_for(lambda: not any(map(alive, processes)))  # no worker outlives its grid
        return code, self.log.read_text()


def stat_of(pid):
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1], Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return ("", b"")


def children_of(pid, name=b""):
    """Processes that ``pid`` has started, by a part of their command."""
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [child for child in found if (stat := stat_of(child))[0] == str(pid) and name in stat[1]]


@pytest.mark.slow
def test_a_grid_that_is_stopped_or_killed_goes_on_and_ends_in_the_records_of_one_left_alone(tmp_path):
    (tmp_path / "whole").mkdir()
    whole = comparable(run(tmp_path / "whole"), tmp_path / "whole")
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)):
        launch = Launch(tmp_path, more=2)
        launch.wait()
        if number == signal.SIGKILL:
            wait_for(lambda pid=launch.process.pid: len(children_of(pid, b"spawn_main")) == 2)
            os.kill(children_of(launch.process.pid, b"spawn_main")[0], signal.SIGKILL)
            launch.allow(3)
            launch.wait()  # the grid goes on
        found, said = launch.end(number)
        assert found == code, said
        assert "Traceback" not in said
        assert code < 0 or f"stopped by {number.name}; the finished runs are kept: the same command goes on" in said
    assert 0 < len(read_records(launch.path)) < len(cells(grid()))
    launch = Launch(tmp_path, len(whole))
    assert launch.process.wait(PATIENCE) == 0, launch.log.read_text()
    records = read_records(launch.path)
    assert len(records) == len(whole)  # nothing was run twice
    found = comparable(records, tmp_path / "killed")
    for record in (*whole.values(), *found.values()):
        record["command"] = None  # it names the folder, relative to where the program was started
    assert found == whole
