"""Runs that pretend to train, and a pool that ends them in any order: what the runner, the pools and kills are tested with."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from minitx.ablation.design import AblationConfig, StartConfig, StudyConfig, ThresholdConfig, settings
from minitx.ablation.execution import run_cells
from minitx.ablation.grid import cells
from minitx.config.training import WindowConfig
from minitx.training.json_lines import read_json_lines
from tests.waiting import PATIENCE, wait_for

SMALL = ["experiment=scaling_cell_recall", "data.num_pairs=3", "data.num_keys=8", "data.num_values=4", "data.val_size=8",
         "data.batch_size=4", "model.embed_dim=32", "model.num_heads=2", "model.ffn_dim=8", "trainer.threads=1",
         "trainer.rehearse=false", "callbacks.progress=false", "schedule.warmup_steps=0"]  # fmt: skip
"""Overrides of a small run that does train."""
ARMS = ("scaled", "unscaled")


def grid():
    """Three studies, of which one starts from the runs of another, which one seed does not solve."""
    arms = {name: (f"arm={name}",) for name in ARMS}
    base = ("trainer.max_steps=4",)
    solved = WindowConfig(value=0.9, window=2)
    rates = {name: (f"lr={name}",) for name in ("0.1", "0.2", "0.3", "0.4", "0.5")}
    learn = StudyConfig(base=(*base, "study=learn"), arms=ARMS, factors={"lr": rates}, seeds=(1, 2, 3, 4), scores=("time",))
    first = StudyConfig(base=(*base, "study=first"), arms=("scaled",), seeds=(3, 4, 5), solved=solved)
    start, threshold = StartConfig(study="first", arm="scaled"), ThresholdConfig(first={"scaled": 0.1, "unscaled": 0.2})
    second = replace(
        first,
        base=(*base, "study=second"),
        arms=ARMS,
        factors={"decay": {"0": (), "0.3": ()}},
        start=start,
        threshold=threshold,
    )
    return AblationConfig(arms=arms, studies={"second": second, "learn": learn, "first": first})


def from_start(path):
    """The overrides of a run that starts from a checkpoint, and checks that it starts as the same function."""
    check = f"+callbacks.same_start={{_target_: minitx.ablation.measures.SameStart, path: {json.dumps(str(path))}}}"
    return [f"init_from.path={path}", "init_from.fold_scale=true", check]


def pretend(job):
    """One run or threshold: what it loads must be there, what others load is written, and ``broken`` beside the grid makes it fail."""
    place, asked = job.folder, settings(job.words)
    broken, permits, lines = (place.parents[1] / name for name in ("broken", "permits", "cells.jsonl"))
    if permits.exists():  # the runs of a grid that is to be killed wait while it has as many lines as there are permits
        waits = permits.with_name(f"{os.getpid()}.waits")
        waits.touch()
        wait_for(lambda: len(read_json_lines(lines)) < permits.stat().st_size)
        waits.unlink()
    if broken.exists() and broken.read_text() in (asked["study"], asked.get("lr")):
        raise ValueError("no luck\nat all")
    if "init_from.path" in asked:
        assert Path(json.loads(asked["init_from.path"])).read_text() == "weights"
    weights = place / "checkpoints" / "last.ckpt"
    if job.keeps_weights:
        weights.parent.mkdir(parents=True, exist_ok=True)
        weights.write_text("weights")
    place.parents[1].mkdir(parents=True, exist_ok=True)
    with (place.parents[1] / "ran").open("a") as file:
        file.write(f"{place.name}\n")
    if job.threshold is not None:
        assert float(asked["optimizer.lr"]) == job.threshold.first[asked["arm"]]
        return {"low": 0.1, "high": 0.2, "cap": job.steps}
    accuracy = 0.1 if asked["study"] == "first" and asked["seed"] == "5" else 1.0  # seed 5 learns nothing
    return {"steps": job.steps, "accuracy": [accuracy] * job.steps, "nonfinite_step": None, "loss": [0.0] * job.steps}


def act(job):
    """Does what the arm is called, in a process of its own."""
    name, place = settings(job.words)["arm"], job.folder.parents[1]
    if name.startswith("raise"):
        raise ValueError("no luck")
    if name.startswith("die"):
        os._exit(7)
    if name.startswith("slow"):
        (place / "begun").touch()
        time.sleep(PATIENCE)
    if name.startswith("meet"):  # until three processes have come here
        (place / f"{os.getpid()}.here").touch()
        wait_for(lambda: len(list(place.glob("*.here"))) == 3)
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"name": name, "steps": job.steps, "pid": os.getpid(), "gpu": gpu, "torch": "torch" in sys.modules}


class Here:
    """A pool of this process. Its runs end in a random order, unless there is no ``seed``: then at once."""

    def __init__(self, workers=1, seed=None):
        self.workers, self.draw = workers, None if seed is None else random.Random(seed)

    def submit(self, function, *arguments):
        return SimpleNamespace(done=self.ended, result=partial(function, *arguments))

    def ended(self):
        return self.draw is None or self.draw.random() < 0.3

    def wait(self, calls):
        pass

    def close(self):
        pass


class StoppedError(Exception):
    """A grid was stopped."""


def run(folder, pool=None, *, config=None, run_cell=pretend, stop_after=None):
    """Run a grid; stop it after so many runs."""
    config = config or grid()
    left = itertools.count(1)

    def count():
        if next(left) == stop_after:
            raise StoppedError

    folder.mkdir(parents=True, exist_ok=True)
    return run_cells(pool or Here(), config, cells(config), folder, run_cell, after_line=count)


def comparable(records, folder):
    """Records without seconds and without the path of the grid's folder."""
    text = json.dumps([{**record, "seconds": None} for record in records]).replace(str(folder), "FOLDER")
    return {(r["study"], r["arm"], *sorted(r["factors"].items()), r["seed"]): r for r in json.loads(text)}


def ran(folder):
    """Names of the runs that ended, in their order."""
    path = folder / "ran"
    return path.read_text().splitlines() if path.exists() else []


def alive(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
