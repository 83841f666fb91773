"""A grid that is killed again and again, at any moment, ends in the report of one that was left alone."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minitx.ablation.runner import read_records
from minitx.config import StudyConfig, to_dict
from tests.waiting import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]
RATES = ("3e-4", "1e-3", "3e-3", "1e-2")

# What workers import: without torch, so that a launch begins at once. Where a file of permits lies beside the grid, cells
# wait while the grid has as many lines as the file has bytes: so no grid is over before it is killed.
CELLS = """
import json, time
from pathlib import Path

def run_cell(overrides, folder):
    grid = Path(folder).parents[2]
    permits, lines = Path(f"{grid.name}.permits"), grid / "cells.jsonl"
    while permits.exists() and lines.exists() and lines.read_bytes().count(b"\\n") >= permits.stat().st_size:
        time.sleep(0.02)
    name = " ".join(text for text in overrides if text.startswith(("arm=", "lr=", "seed=")))
    return json.loads(Path("results.json").read_text())[name]
"""

# Imports everything once; each line that it is sent makes a new process that runs the grid, then it tells how that ended.
PROGRAM = """
import os, sys

if __name__ == "__main__":
    import json, logging
    from pathlib import Path
    from cells import run_cell
    from minitx.cli import ablate
    from minitx.cli.errors import exit_code
    from minitx.config.schema import from_dict
    from minitx.config import AblationConfig, RunConfig

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    ablate.run_cell = run_cell
    config = RunConfig(ablation=from_dict(AblationConfig, json.loads(Path("grid.json").read_text())))
    ablate.code_fingerprint()
    for line in sys.stdin:
        folder = Path(line.strip()).absolute()
        pid = os.fork()
        if pid == 0:
            job = lambda _: ablate.run_ablation(config, folder, [], "train.py")
            sys.exit(exit_code(lambda guarded: guarded(None), job))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Launches:
    """Starts the grid, one launch at a time."""

    def __init__(self, place, grid, results):
        (place / "cells.py").write_text(CELLS)
        (place / "program.py").write_text(PROGRAM)
        (place / "grid.json").write_text(json.dumps(to_dict(grid)))
        (place / "results.json").write_text(json.dumps(results))
        self.log = (place / "log.txt").open("w+")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "program.py"], cwd=place, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip

    def start(self, name):
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def exit_code(self):
        return int(self.process.stdout.readline())

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def close(self):
        self.process.stdin.close()
        self.process.wait(PATIENCE)
        self.process.stdout.close()
        self.log.close()


def children_of(pid):
    """Processes below ``pid``, by /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
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


def without_times(folder):
    """The files of a report, but for seconds, wall time and date."""
    files = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    rows = list(csv.DictReader(io.StringIO((folder / "cells.csv").read_text())))
    files["cells.csv"] = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
    for name in ("report.html", "summary.md"):
        text = (folder / name).read_text()
        text, times = re.subn(r"(wall time.*?)\d[\d,]* s", r"\1", text)
        assert times == 1, text
        files[name] = re.sub(r"\d{4}-\d{2}-\d{2}", "", text)
    return files


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_grid_killed_ten_times_leaves_no_process_and_ends_in_the_same_report(tmp_path, fabricate, make_grid):
    arms = {name: (f"arm={name}",) for name in ("inv_sqrt", "unscaled")}
    text = StudyConfig(
        base=("data.context_len=64", "trainer.max_steps=5"), arms=tuple(arms), factors={"lr": {lr: (f"lr={lr}",) for lr in RATES}},
        seeds=tuple(range(7)), score="loss",
    )  # fmt: skip
    grid = make_grid(arms=arms, studies={"text": text}, comparisons=(), workers=2)
    results = {f"arm={r['arm']} lr={r['factors']['lr']} seed={r['seed']}": r["result"] for r in fabricate(grid)[0]}
    launches = Launches(tmp_path, grid, results)
    try:
        launches.start("whole")
        assert launches.exit_code() == 0, launches.said()
        killed = kill_ten_times(launches, tmp_path / "killed", random.Random(5))
        launches.start("killed")
        assert launches.exit_code() == 0, launches.said()
    finally:
        launches.close()
    records = read_records(tmp_path / "killed" / "cells.jsonl")
    assert len(results) == 56 == len({record["cell"] for record in records if record["status"] == "done"})
    assert sorted(killed) == ["parent SIGKILL"] * 5 + ["parent SIGTERM"] * 4 + ["worker SIGKILL"]
    whole = without_times(tmp_path / "whole")
    assert without_times(tmp_path / "killed") == whole
    assert any(name.endswith(".png") for name in whole)
    assert "56 expected, 56 done, 0 failed, 0 missing" in whole["report.html"]


def kill_ten_times(launches, folder, rng):
    """Kills in random order, each at a random moment after 0, 1 or 2 more cells; the grid has cells to run until the last."""
    kills = [("parent", signal.SIGKILL)] * 5 + [("parent", signal.SIGTERM)] * 4 + [("worker", signal.SIGKILL)]
    rng.shuffle(kills)
    pid, counts, permits = None, [0], folder.with_name(f"{folder.name}.permits")

    def lines():
        return len(read_records(folder / "cells.jsonl"))

    def wait_for_lines(number):
        permits.write_bytes(b"x" * (number + 1))
        wait_for(lambda: lines() >= number or not alive(pid))
        assert alive(pid), launches.said()

    for whom, number in kills:
        wanted = lines() + rng.randint(0, 2)
        permits.write_bytes(b"x" * (wanted + 1))
        pid = pid or launches.start(folder.name)
        wait_for_lines(wanted)
        time.sleep(rng.uniform(0.0, 0.5))  # a random moment; nothing waits for it
        if whom == "worker":
            wait_for(lambda pid=pid: len(workers_of(pid)) == 2)
            os.kill(rng.choice(workers_of(pid)), number)
            wait_for_lines(lines() + 3)
            continue  # the grid goes on; the next kill is for it
        processes = children_of(pid)
        os.kill(pid, number)
        code = launches.exit_code()
        assert code in ((143, -15) if number == signal.SIGTERM else (-9,)), launches.said()  # -15: it had hardly begun
        wait_for(lambda processes=processes: not any(map(alive, processes)))  # no worker outlives its grid
        counts.append(lines())
        pid = None
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        launches.exit_code()
    permits.unlink()
    assert counts == sorted(counts)
    assert 0 < counts[-1] < 56
    return [f"{whom} {number.name}" for whom, number in kills]
