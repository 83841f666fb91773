"""What a run survives: 240 kills and stops, and 20,000 steps without a leak.

    python tests/tools/endurance.py kills     # benchmarks/results/kills.json; about 20 minutes on one core, goes on where it stopped
    python tests/tools/endurance.py soak      # benchmarks/results/soak.json; about 5 minutes on one core

``kills``: runs of 400 steps with dropout; 200 are ended by SIGKILL (100 after a random step, 100 inside a save of a checkpoint;
TMPDIR on the run's filesystem and on another one by turns), 20 stopped by SIGTERM, 20 by SIGINT. Each then goes on from its
``last.ckpt``; weights, moments, schedule and every logged number must equal, bit for bit, those of the run that was left alone.

``soak``: memory, open files and threads of a run with validation, checkpoints, probes and recorded attention.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "training"), str(ROOT / "benchmarks")]

from harness import about, save  # noqa: E402

STEPS, SEED = 400, 20261121


def kills() -> dict[str, Any]:
    from killing import blows, hit_and_go_on, length_of, result_of, run

    work = ROOT / "runs" / "endurance"
    work.mkdir(parents=True, exist_ok=True)
    (work / "tmp").mkdir(exist_ok=True)
    cache, record = work / "caches", work / f"kills-{SEED}.jsonl"
    run(length_of(1), work / "warm", cache)
    whole = work / f"whole-{time.time_ns()}"
    began = time.perf_counter()
    assert run(length_of(STEPS), whole, cache) == 0
    seconds, wanted = time.perf_counter() - began, result_of(whole)
    done = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    other = "/dev/shm"
    planned = blows(SEED, 200, 20, 20, [str(work / "tmp"), other])
    for i, blow in list(enumerate(planned))[len(done) :]:
        folder = Path(tempfile.mkdtemp(dir=work)) / "run"
        found = hit_and_go_on(STEPS, folder, cache, blow)
        row = {"signal": blow.number, "in_a_save": blow.save is not None, **found, "equal": found["result"] == wanted}
        done.append(row)
        with record.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if not row["equal"]:
            print(f"run {i} differs: {folder}", flush=True)
        if i % 20 == 0:
            print(f"{i} of {len(planned)}", flush=True)
    names = {number: signal.Signals(number).name for number in (9, 15, 2)}
    by_signal = {name: [row for row in done if row["signal"] == number] for number, name in names.items()}
    return {
        "steps": STEPS,
        "seed": SEED,
        "signals": {n: {"runs": len(rows), "equal": sum(row["equal"] for row in rows)} for n, rows in by_signal.items()},
        "in_a_save": sum(row["in_a_save"] for row in done),
        "hit_while_running": sum(row["code"] != 0 for row in done),
        "before_the_first_checkpoint": sum(row["code"] != 0 and row["went_on_from"] is None for row in done),
        "half_a_file_left": sum(row["left"] != ["best.ckpt", "last.ckpt"] for row in done),
        "seconds_of_a_run": round(seconds, 2),
        "filesystems": [_filesystem(work), _filesystem(Path(other))],
    }


def _filesystem(path: Path) -> str:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return max((m for m in mounts if str(path.resolve()).startswith(m[1])), key=lambda m: len(m[1]))[2]


def soak(steps: int = 20_000, warm: int = 2_000) -> dict[str, Any]:
    import numpy as np
    import torch

    from minitx.cli.compose import compose_config
    from minitx.cli.launch import run_training
    from minitx.training.module import TrainingModule

    torch.set_num_threads(1)
    rows: list[tuple[int, int, int, int]] = []
    page, step = os.sysconf("SC_PAGE_SIZE"), TrainingModule.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.global_step % 100 == 0:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
            rows.append((self.global_step, resident, len(os.listdir("/proc/self/fd")), threading.active_count()))
        return step(self, batch, batch_idx)

    TrainingModule.training_step = training_step  # type: ignore[method-assign]
    from killing import RUN

    words = ["trainer.ckpt_every=500", "trainer.val_every=200"]
    words += ["callbacks.probe.every=100", "callbacks.probe.weights_every=1000"]
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*RUN, f"trainer.max_steps={steps}", *words]
        began = time.perf_counter()
        run_training(compose_config(overrides), Path(folder) / "run", "endurance")
        seconds = time.perf_counter() - began
    late = np.array([row for row in rows if row[0] >= warm])
    slope = np.polyfit(late[:, 0], late[:, 1], 1)[0]
    return {
        "overrides": overrides,
        "steps": steps,
        "bytes_a_step_after_2000": round(float(slope), 2),
        "resident_MiB": {str(step): round(resident / 2**20, 1) for step, resident, *_ in rows[:: len(rows) // 10]},
        "open_files": sorted({int(row[2]) for row in late.tolist()}),
        "threads": sorted({int(row[3]) for row in late.tolist()}),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["kills", "soak"])
    name = parser.parse_args().name
    found = {"kills": kills, "soak": soak}[name]()
    print(save(name, {**about(), **found}).read_text(encoding="utf-8"))
