"""A grid from the command line: what it keeps of its launches, and what reaches its runs."""

from __future__ import annotations

import json

import pytest

from minitx.ablation.grid import Runs, cells
from minitx.cli import ablate
from minitx.cli.compose import compose_grid
from minitx.config import ConfigError
from tests.ablation import made_up

SMOKE = ["experiment=scaling_ablation", "ablation=smoke"]


class StoppedError(Exception):
    """Before anything is run."""


def test_what_computes_a_grid_and_its_own_seed_reach_no_run_and_all_else_reaches_every_run(tmp_path, monkeypatch):
    def stop(grid, chosen, folder):
        found.append((grid.workers, [cell.hash for cell in chosen], {"model.dropout=0.1" in cell.overrides for cell in chosen}))
        raise StoppedError

    found = []
    monkeypatch.setattr(ablate, "pool_of", stop)
    monkeypatch.setattr(ablate, "check", lambda cells: None)  # composes every run
    slurm = ["ablation.launcher=slurm", "+ablation.launcher_options.cluster=local", "ablation.workers=7", "seed=5"]
    for more in ([], [*slurm, f"output_dir={tmp_path}"], ["model.dropout=0.1"]):
        words = [*SMOKE, *more]
        with pytest.raises(StoppedError):
            ablate.run_ablation(compose_grid(words), tmp_path / "grid", words, "train.py")
    plain, slurm, dropout = found
    assert plain[1] == slurm[1] and not set(plain[1]) & set(dropout[1])
    assert (plain[0], slurm[0]) == (None, 7)
    assert (plain[2], dropout[2]) == ({False}, {True})


@pytest.mark.parametrize(("word", "message"), [
    ("ablation.report_only=true", r"no cells\.jsonl: first run the grid"),
    ("ablation.about=minitx.ablation.scalling", r"about=minitx\.ablation\.scalling cannot be imported"),
    ("ablation.about=os", "about=os must define at least one of sentences, figure"),
    ("ablation.about=.x", r"about=\.x cannot be imported"),
    ("ablation.studies.recall.factors.head_dim.128=['model.num_headz=2']", r"recall, arm \w+, head_dim 128, lr [\d.]+: .*num_headz"),
    ("ablation.studies.recall.solved.window=21", r"recall\.solved\.window=21 is longer than its runs of 20 steps"),
    ("ablation.arms.unscaled=['model.scale=unscaled','trainer.max_steps=9']", r"solved\.window=16 is longer than its runs of 9 steps"),
    ("ablation.arms.unscaled=['trainer.threads=2']", r"arm unscaled and the command line or the lab itself both set trainer\.threads"),
    ("ablation.studies.sgd.threshold.window=11", r"sgd\.threshold\.window=11 is longer than its runs of 10 steps"),
    ("ablation.studies.recall.solved.value=90", r"recall\.solved\.value=90 must lie in \(0, 1\]"),
    ("+ablation.studies.text={base:['trainer.max_steps=500'],arms:[unscaled],scores:[loss],measures:[loss_at_9]}",
     r"text\.measures=\['loss_at_9'\] are not measured"),
    ("ablation.studies.recall.base=[]", r"ablation\.studies\.recall\.base must set trainer\.max_steps"),
])  # fmt: skip
def test_a_grid_that_cannot_be_run_or_shown_makes_no_folder(tmp_path, word, message):
    with pytest.raises(ConfigError, match=message):
        ablate.run_ablation(compose_grid([*SMOKE, word]), tmp_path / "grid", SMOKE, "train.py")
    assert not (tmp_path / "grid").exists()


def test_a_report_alone_is_about_the_grid_as_it_is_now_and_says_what_it_was_before(tmp_path, caplog):
    before, now = (cells(made_up.grid("text", arms={"inv_sqrt": (), "unscaled": (word,)})) for word in ("a=1", "a=2"))
    path = tmp_path / "cells.jsonl"

    def write(*lists):
        rows = [{**cell.describe(tmp_path), "status": "done", "result": {"now": of is now}} for of in lists for cell in of]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    write(now, before)  # changed, and changed back
    runs = Runs.of([cell.place for cell in now], ablate.stored_records(now, path))
    changed = runs.select("text", "unscaled")
    assert all(run.result["now"] for run in changed) and not caplog.messages
    write(before)
    ablate.stored_records(now, path)
    counted = f"{len(changed)} of {len(now)} runs have other overrides than the current grid"
    assert caplog.messages == [f"{counted}; the first: {changed[0]}"]
