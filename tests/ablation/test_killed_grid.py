"""A grid that is stopped or killed at any moment goes on where it was, and leaves no process behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pretend import comparable, grid, run

from minitx.ablation.grid import cells
from minitx.ablation.records import read_records
from tests.waiting import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")

# What workers import: without torch, so that a launch begins at once. Where a file of permits lies beside the grid, runs wait
# while the grid has as many lines as the file has bytes: so no grid is over before it is killed.
GATED = """
import time
from pathlib import Path
from pretend import pretend

def gated(words, folder, *arguments):
    grid = Path(folder).parents[1]
    permits, lines = Path(f"{grid}.permits"), grid / "cells.jsonl"
    while permits.exists() and lines.exists() and lines.read_bytes().count(b"\\n") >= permits.stat().st_size:
        time.sleep(0.02)
    return pretend(words, folder, *arguments)
"""

# Imports everything once; each line that it is sent makes a new process that runs the grid, then it says how that ended.
PROGRAM = """
import os, sys

if __name__ == "__main__":
    import dataclasses, functools, logging
    from pathlib import Path
    import pretend
    from gated import gated
    from minitx.ablation.grid import code_fingerprint
    from minitx.cli import ablate
    from minitx.cli.errors import exit_code

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    ablate.run_cell, ablate.check, ablate.report = gated, lambda cells: None, lambda *findings: None
    ablate.run_cells = functools.partial(ablate.run_cells, projection=pretend.free)
    real = ablate.cells
    ablate.cells = lambda grid, common: real(grid)
    code_fingerprint()
    for line in sys.stdin:
        folder = Path(line.strip()).absolute()
        pid = os.fork()
        if pid == 0:
            sys.exit(exit_code(lambda: ablate.run_ablation(dataclasses.replace(pretend.grid(), workers=2), folder, [], "train.py")))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Launches:
    """Starts the grid in ``folder``, one launch at a time."""

    def __init__(self, place, name):
        (place / "gated.py").write_text(GATED)
        (place / "program.py").write_text(PROGRAM)
        self.folder, self.permits, self.log = place / name, place / f"{name}.permits", (place / "log.txt").open("w+")
        paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(
            [sys.executable, "program.py"], cwd=place, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.stdin.close()
        self.process.wait(PATIENCE)
        self.process.stdout.close()
        self.log.close()

    def start(self):
        self.process.stdin.write(f"{self.folder}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def exit_code(self):
        return int(self.process.stdout.readline())

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def lines(self):
        return len(read_records(self.folder / "cells.jsonl"))

    def wait_for_lines(self, number, pid):
        """Until the grid has this many lines; it cannot have many more."""
        self.permits.write_bytes(b"x" * (number + 1))
        wait_for(lambda: self.lines() >= number or not alive(pid))
        assert alive(pid), self.said()


def children_of(pid):
    """Processes below ``pid``, by /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
        except (OSError, IndexError):
            continue
    return found


def workers_of(pid):
    return [child for child in children_of(pid) if b"spawn_main" in command_of(child)]


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_proc
@pytest.mark.slow
def test_signals_stop_a_grid_with_their_exit_code_and_it_goes_on(tmp_path):
    with Launches(tmp_path, "grid") as launches:
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            before = launches.lines()
            launches.permits.write_bytes(b"x" * (before + 3))
            pid = launches.start()
            launches.wait_for_lines(before + 2, pid)
            processes = children_of(pid)
            os.kill(pid, number)
            assert launches.exit_code() == code, launches.said()
            wait_for(lambda processes=processes: not any(map(alive, processes)))
            assert f"stopped by {number.name}; the finished runs are kept: the same command goes on" in launches.said()
            assert "Traceback" not in launches.said()


@needs_proc
@pytest.mark.long
def test_a_grid_killed_ten_times_leaves_no_process_and_ends_in_the_records_of_one_left_alone(tmp_path):
    (tmp_path / "whole").mkdir()
    whole = comparable(run(tmp_path / "whole"), "whole")
    with Launches(tmp_path, "killed") as launches:
        killed = kill_ten_times(launches, random.Random(5))
        launches.start()
        assert launches.exit_code() == 0, launches.said()
    assert sorted(killed) == ["parent SIGKILL"] * 5 + ["parent SIGTERM"] * 4 + ["worker SIGKILL"]
    records = read_records(tmp_path / "killed" / "cells.jsonl")
    assert len({record["cell"] for record in records}) == len(cells(grid())) == len(whole)
    found = comparable(records, "killed")
    for records in (whole, found):
        for record in records.values():
            record["command"] = None  # it names the folder
    assert found == whole


def kill_ten_times(launches, rng):
    """Kills in random order, each at a random moment after 0, 1 or 2 more runs; the grid has runs to do until the last."""
    kills = [("parent", signal.SIGKILL)] * 5 + [("parent", signal.SIGTERM)] * 4 + [("worker", signal.SIGKILL)]
    rng.shuffle(kills)
    pid, counts = None, [0]
    for whom, number in kills:
        wanted = launches.lines() + rng.randint(0, 2)
        launches.permits.write_bytes(b"x" * (wanted + 1))
        pid = pid or launches.start()
        launches.wait_for_lines(wanted, pid)
        time.sleep(rng.uniform(0.0, 0.5))  # a random moment; nothing waits for it
        if whom == "worker":
            wait_for(lambda pid=pid: len(workers_of(pid)) == 2)
            os.kill(rng.choice(workers_of(pid)), number)
            launches.wait_for_lines(launches.lines() + 3, pid)
            continue  # the grid goes on; the next kill is for it
        processes = children_of(pid)
        os.kill(pid, number)
        code = launches.exit_code()
        assert code in ((143, -15) if number == signal.SIGTERM else (-9,)), launches.said()  # -15: it had hardly begun
        wait_for(lambda processes=processes: not any(map(alive, processes)))  # no worker outlives its grid
        counts.append(launches.lines())
        pid = None
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        launches.exit_code()
    launches.permits.unlink()
    assert counts == sorted(counts)
    assert 0 < counts[-1] < len(cells(grid()))
    return [f"{whom} {number.name}" for whom, number in kills]
