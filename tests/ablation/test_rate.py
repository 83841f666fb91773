"""``ablation=rate``: the largest stable learning rate of any experiment."""

import pytest

from minitx.ablation.grid import Runs, cells
from minitx.ablation.judge import judge
from minitx.ablation.report import write_report
from minitx.cli.compose import compose_cell, compose_grid
from minitx.config import ConfigError
from tests.ablation.made_up import META

WORDS = ["experiment=kv_lookup", "ablation=rate", "model.num_heads=1", "seed=7"]


def run(rate, losses, rise, stable):
    return {"rate": rate, "stable": stable, "steps": len(losses), "nonfinite_step": None, "worst": rise, "loss": losses}


def test_the_runs_are_those_of_the_experiment_with_what_was_typed():
    (cell,) = cells(compose_grid(WORDS), common=["model.num_heads=1"])
    config, plain = compose_cell(cell.words(None)), compose_cell(["experiment=kv_lookup", "model.num_heads=1", "seed=7"])
    assert config == plain and cell.steps() == plain.trainer.max_steps


def test_a_rate_belongs_to_an_experiment():
    with pytest.raises(ConfigError, match=r"^ablation\.studies\.rate is for any experiment: add experiment=NAME$"):
        compose_grid(["ablation=rate"])


def test_the_report_names_the_bracket_of_all_seeds_and_the_largest_rise(tmp_path):
    grid = compose_grid([*WORDS, "ablation.studies.rate.seeds=[0,1]"])
    runs = [run(0.01, [2.0, 1.0], 0.11, True), run(0.02, [2.0, 1.5], 0.23, True), run(0.04, [2.0, None], None, False)]
    records = [
        {**cell.describe(tmp_path), "status": "done", "reason": None, "seconds": 61.0, "result": {
            "low": 0.02 + cell.place.seed, "high": 0.04 + cell.place.seed, "above": [], "first": 0.01, "start": 2.0, "cap": 2,
            "parameters": 5, "start_error": None, "runs": runs}}
        for cell in cells(grid)
    ]  # fmt: skip
    findings = judge(grid, Runs.of([cell.place for cell in cells(grid)], records))
    bracket, stable, cost = write_report(findings, tmp_path, meta=META)
    assert bracket.startswith("The largest stable learning rate of kv_lookup is 0.02 to 1.04 (2 seeds, bracket of 4.4%")
    assert bracket.endswith("The config has 0.01.") and "The largest rise of a stable run was 0.23." in stable
    assert cost.startswith("6 runs took 02:02.") and cost.endswith("0.01 ends with the lowest loss, 1.5.")
    assert (tmp_path / "figures" / "rate.png").is_file()
