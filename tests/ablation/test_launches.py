"""A grid from the command line: what it keeps of its launches, and what reaches its runs."""

from __future__ import annotations

import json

import pytest

from minitx.cli import ablate
from minitx.cli.compose import compose_grid
from minitx.config import ConfigError

SMOKE = ["experiment=scaling_ablation", "ablation=smoke"]


class StoppedError(Exception):
    """Before anything is run."""


def test_what_computes_a_grid_and_its_own_seed_reach_no_run_and_all_else_reaches_every_run(tmp_path, monkeypatch):
    def stop(grid, chosen, folder):
        found.append((grid.workers, [cell.hash for cell in chosen], {"model.dropout=0.1" in cell.overrides for cell in chosen}))
        raise StoppedError

    found = []
    monkeypatch.setattr(ablate, "pool_of", stop)
    slurm = ["ablation.launcher=slurm", "+ablation.launcher_options.cluster=local", "ablation.workers=7", "seed=5"]
    for more in ([], [*slurm, f"output_dir={tmp_path}"], ["model.dropout=0.1"]):
        words = [*SMOKE, *more]
        with pytest.raises(StoppedError):
            ablate.run_ablation(compose_grid(words), tmp_path / "grid", words, "train.py")
    plain, slurm, dropout = found
    assert plain[1] == slurm[1]
    assert (plain[0], slurm[0]) == (None, 7)
    assert (plain[2], dropout[2]) == ({False}, {True})
    assert not set(plain[1]) & set(dropout[1])


def test_a_report_alone_needs_records_and_makes_no_folder(tmp_path):
    grid = compose_grid([*SMOKE, "ablation.report_only=true"])
    with pytest.raises(ConfigError, match=r"has no cells\.jsonl: run the grid first, without ablation\.report_only=true"):
        ablate.run_ablation(grid, tmp_path / "grid", SMOKE, "train.py")
    assert not (tmp_path / "grid").exists()


def test_launches_of_one_kind_share_an_entry_and_their_seconds_add_up(tmp_path, monkeypatch):
    path = tmp_path / "launches.json"
    monkeypatch.setattr(ablate, "facts", lambda command: {"commit": "c0ffee", "command": command, "date": "d", "hardware": "h", "versions": {"a": command}})  # fmt: skip
    ablate.Launch(path, "one")
    assert not path.exists()  # it has run nothing
    ablate.Launch(path, "one").keep()
    (first,) = json.loads(path.read_text())
    path.write_text(json.dumps([{**first, "wall_seconds": 1000.0}]))
    again = ablate.Launch(path, "one")
    again.keep()
    again.keep()  # a second run of this launch
    (whole,) = json.loads(path.read_text())
    assert 1000.0 <= whole["wall_seconds"] < 2000.0
    ablate.Launch(path, "two").keep()
    meta = ablate.read_meta(path)
    assert (meta["commit"], meta["command"], meta["versions"]) == ("c0ffee", "one; two", {"a": "two"})
    assert meta["wall_seconds"] == pytest.approx(whole["wall_seconds"], abs=60.0)


def test_the_length_of_a_grid_is_checked_before_a_folder_is_made(tmp_path):
    grid = compose_grid([*SMOKE, "ablation.studies.recall.base=[]"])

    with pytest.raises(ConfigError, match=r"ablation\.studies\.recall\.base must set trainer\.max_steps"):
        ablate.run_ablation(grid, tmp_path / "grid", SMOKE, "train.py")
    assert not (tmp_path / "grid").exists()
