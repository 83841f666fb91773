"""``examples/own_project``: a model, data, objective, optimizer and callback of the user's own, from a folder outside of the checkout."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minitx.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]
CONF = "--config-dir=conf"
SHORT = (
    "trainer.max_steps=6",
    "trainer.val_every=3",
    "trainer.log_every=1",
    "trainer.accelerator=cpu",
    "callbacks.progress=false",
)


@pytest.fixture
def project(place, monkeypatch):
    """A copy of the project in the current folder."""
    shutil.copytree(ROOT / "examples" / "own_project", place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    yield place
    sys.modules.pop("own", None)


def script(program, *arguments, cwd, **environment):
    """A program as a user starts it."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / f"{program}.py"), *arguments],
        cwd=cwd, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )  # fmt: skip


def losses(folder):
    return [row["train_loss"] for row in read_metrics(Path(folder) / "metrics.csv")]


def test_a_module_data_module_optimizer_callback_and_logger_of_ones_own_train(cli, project):
    said = cli(CONF, "experiment=sorted", *SHORT, "output_dir=run")
    assert said.code == 0, said
    assert "go: step 0" in said.out  # the callback
    rows = read_metrics(project / "run" / "metrics.csv")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["train_accuracy"] is not None and row["mfu"] is None for row in rows)
    assert rows[-1]["val_accuracy"] is not None
    tables = list((project / "run").rglob("lightning_logs/version_0/metrics.csv"))
    assert len(tables) == 1  # the CSVLogger
    with tables[0].open() as file:
        assert "train_loss" in next(csv.reader(file))
    state = torch.load(project / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["minitx"]["model"] == {"vocab_size": 11, "num_classes": 2, "_target_": "own.Net", "width": 32} or (
        state["minitx"]["model"]["_target_"] == "own.Net"
    )
    assert "momentum_buffer" in state["optimizer_states"][0]["state"][0]  # torch.optim.SGD


def test_it_resumes_and_says_that_the_order_of_the_data_does_not(cli, project, caplog):
    caplog.set_level("INFO")
    assert cli(CONF, "experiment=sorted", *SHORT, "output_dir=run").code == 0
    said = cli(CONF, "experiment=sorted", *SHORT, "output_dir=run", "ckpt_path=last", "trainer.max_steps=9")
    assert said.code == 0, said
    assert "go: step 6" in said.out
    assert "order of the data" in caplog.text
    assert len(losses("run")) == 9


def test_evaluate_asks_for_trust(cli, project):
    assert cli(CONF, "experiment=sorted", *SHORT, "output_dir=run").code == 0
    path = "ckpt_path=run/checkpoints/last.ckpt"
    refused = cli(path, program="evaluate")
    assert refused.code == 2
    assert "own.Net" in refused.err
    assert "trust=true" in refused.err
    said = cli(path, "trust=true", "output=found.json", program="evaluate")
    assert said.code == 0, said
    found = json.loads((project / "found.json").read_text())
    wanted = read_metrics(project / "run" / "metrics.csv")[-1]
    assert found["metrics"]["accuracy"]["value"] == pytest.approx(wanted["val_accuracy"])
    assert found["metrics"]["loss"]["value"] == pytest.approx(wanted["val_loss"])


@pytest.mark.parametrize("program", ["view", "generate"])
def test_what_cannot_be_done_with_a_model_of_ones_own_is_one_sentence(cli, project, program):
    assert cli(CONF, "experiment=sorted", *SHORT, "output_dir=run").code == 0
    words = {"view": ["text=1 2"], "generate": ["prompt=1 2"]}[program]
    said = cli("ckpt_path=run/checkpoints/last.ckpt", "trust=true", *words, program=program)
    assert said.code == 2
    assert len(said.err.strip().splitlines()) == 1


def test_with_a_task_and_an_objective_of_ones_own_a_run_resumes_bit_for_bit(cli, project):
    whole = (CONF, "experiment=sorted_task", *SHORT, "trainer.accumulate=2")
    assert cli(*whole, "output_dir=whole", "trainer.max_steps=9").code == 0
    assert cli(*whole, "output_dir=part", "trainer.max_steps=4").code == 0
    assert cli(*whole, "output_dir=part", "trainer.max_steps=9", "ckpt_path=last").code == 0
    assert losses("part") == losses("whole")
    ours, theirs = (torch.load(f"{name}/checkpoints/last.ckpt", weights_only=True)["state_dict"] for name in ("part", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_task_gives_the_same_run_however_a_step_is_cut(cli, project):
    for name, parts in {"one": 1, "four": 4}.items():
        assert cli(CONF, "experiment=sorted_task", *SHORT, f"trainer.accumulate={parts}", f"output_dir={name}", "trainer.precision=64-true").code == 0  # fmt: skip
    assert losses("four") == pytest.approx(losses("one"), rel=1e-12)


def test_a_sweep_has_a_folder_for_each_job(cli, project):
    said = cli("-m", CONF, "experiment=sorted_task", *SHORT, "optimizer.lr=.1,.5", "hydra.sweep.dir=swept")
    assert said.code == 0, said
    first, second = losses("swept/0"), losses("swept/1")
    assert first[0] == second[0]
    assert first[-1] != second[-1]
    refused = cli("-m", CONF, "experiment=sorted_task", *SHORT, "optimizer.lr=.1,.5", "output_dir=fixed")
    assert refused.code == 2
    assert "output_dir=fixed" in refused.err
    assert not (project / "fixed").exists()


def test_hydras_own_folder_is_taken_and_a_mistake_leaves_none(cli, project):
    assert cli(CONF, "experiment=sorted_task", *SHORT, "hydra.run.dir=mine/here").code == 0
    assert (project / "mine" / "here" / "metrics.csv").exists()
    assert cli(CONF, "experiment=sorted_task", *SHORT, "hydra.run.dir=yours", "model.width=-3").code == 2
    assert not (project / "yours").exists()


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ("model._target_=own.Nett", "model._target_=own.Nett"),
        ("model.width=three", "model._target_=own.Net"),
        ("data._target_=nowhere.Module", "data._target_=nowhere.Module"),
        ("+model.depth=3", "model._target_=own.Net"),
        ("optimizer.lr=-1", "optimizer._target_=torch.optim.SGD"),
        ("callbacks.announce._target_=own.Silence", "callbacks.announce._target_=own.Silence"),
    ],
)
def test_a_mistake_in_a_part_is_one_sentence_with_its_key(cli, project, changed, key):
    said = cli(CONF, "experiment=sorted", *SHORT, changed, "output_dir=run")
    assert said.code == 2, said
    assert key in said.err
    assert len(said.err.strip().splitlines()) <= 3
    assert not (project / "run").exists()


def test_a_forward_that_needs_what_no_batch_has_is_named(cli, project):
    source = (project / "own.py").read_text()
    (project / "own.py").write_text(source.replace("def forward(self, input_ids: torch.Tensor)", "def forward(self, words)"))
    for experiment in ("sorted", "sorted_task"):
        said = cli(CONF, f"experiment={experiment}", *SHORT, "output_dir=run")
        assert said.code == 2, said
        assert "needs words" in said.err
        assert not (project / "run").exists()


def test_a_grid_has_it_as_an_arm(project):
    done = script("train", CONF, "experiment=scaling_ablation", "ablation=widths", "output_dir=grid", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = [json.loads(line) for line in (project / "grid" / "cells.jsonl").read_text().splitlines()]
    assert sorted((cell["arm"], cell["seed"]) for cell in cells) == [("narrow", 0), ("narrow", 1), ("wide", 0), ("wide", 1)]
    assert {cell["status"] for cell in cells} == {"done"}


def test_a_sweep_by_joblib_exits_with_3_where_a_job_fails(project):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    sweep = (
        "-m",
        CONF,
        "experiment=sorted_task",
        *SHORT,
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "hydra.sweep.dir=swept",
    )
    good = script("train", *sweep, "optimizer.lr=.1,.5", cwd=project)
    assert good.returncode == 0, good.stdout + good.stderr
    assert len(losses(project / "swept" / "0")) == len(losses(project / "swept" / "1")) == 6
    bad = script("train", *sweep, "optimizer.lr=.1,1e30", "trainer.clip=null", "hydra.sweep.dir=other", cwd=project)
    assert bad.returncode == 3, bad.stdout + bad.stderr
    assert "not finite" in bad.stderr


def test_nothing_of_the_users_takes_the_place_of_a_library(project):
    (project / "random.py").write_text("raise ImportError('this file shadows a library')\n")
    assert script("train", CONF, "experiment=sorted", *SHORT, "output_dir=run", cwd=project).returncode == 0


def test_from_python_the_same_with_objects(project, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(project))
    import own

    from minitx.config import ConfigError, RunConfig, TrainerConfig
    from minitx.training.run import train
    from minitx.training.stored import load_model

    config = RunConfig(trainer=TrainerConfig(max_steps=3, accelerator="cpu", log_every=1), data={"_target_": "own.load_task"})
    result = train(config, tmp_path / "run", model=own.Net(), data=own.load_task(), objective=own.Focal())
    assert result["steps"] == 3
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    with pytest.raises(ConfigError, match=r"own\.Net.*trust=true"):
        load_model(path)
    assert isinstance(load_model(path, model=own.Net())[0], own.Net)


def test_optuna_searches_for_the_least_validation_loss(project):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = (
        "-m",
        CONF,
        "experiment=sorted_task",
        *SHORT,
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
        "hydra.sweep.dir=swept",
    )
    done = script("train", *words, "hydra.sweeper.n_jobs=1", "optimizer.lr=interval(0.01,0.5)", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    best = (project / "swept" / "optimization_results.yaml").read_text()
    found = [read_metrics(project / "swept" / str(job) / "metrics.csv")[-1]["val_loss"] for job in (0, 1)]
    assert f"best_value: {min(found)}" in best


EVIL = {
    "model": [
        {"_target_": "torch.hub.load", "repo_or_dir": "x", "model": "y"},
        {"_target_": "os.system", "command": "touch owned"},
        {"_target_": "torch.load", "f": "x"},
        {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "os.system", "command": "touch owned"}]},
        {"_target_": "${oc.env:EVIL}", "command": "touch owned"},
        {"_target_": "own.Net"},
    ],
    "data": [{"_target_": "os.system", "command": "touch owned"}],
    "objective": [{"_target_": "os.system", "command": "touch owned"}],
}


@pytest.mark.parametrize(("node", "named"), [(node, named) for node, each in EVIL.items() for named in each])
def test_a_checkpoint_that_names_code_is_refused_by_name_and_nothing_runs(cli, place, monkeypatch, node, named):
    from minitx.config import RunConfig, to_dict
    from minitx.training.checkpoint import AtomicCheckpointIO

    monkeypatch.setenv("EVIL", "os.system")
    config = {**to_dict(RunConfig()), "imports": ["antigravity"]}
    config[node] = named
    state = {"config": config, "model": config["model"], "tokenizer": None, "format": 1}
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "global_step": 1, "minitx": state}, place / "evil.ckpt")
    for program in ("evaluate", "generate", "view"):
        said = cli("ckpt_path=evil.ckpt", *(["text=a"] if program == "view" else []), program=program)
        assert said.code == 2, said
        assert named["_target_"] in said.err or "os.system" in said.err
        assert "trust=true" in said.err
    assert [path.name for path in place.iterdir()] == ["evil.ckpt"]
    assert "antigravity" not in sys.modules


def test_a_part_named_on_the_command_line_needs_no_trust(cli, project):
    assert cli(CONF, "experiment=sorted_task", *SHORT, "output_dir=run").code == 0
    parts = ("model._target_=own.Net", "model.width=32", "data._target_=own.load_task", "objective._target_=own.Focal")
    said = cli("ckpt_path=run/checkpoints/last.ckpt", *parts, program="evaluate")
    assert said.code == 0, said
    assert "accuracy" in said.out


@pytest.mark.parametrize("preset", ["overfit", "anomaly", "profile"])
def test_presets_for_debugging_run(cli, project, preset):
    said = cli(
        CONF, "experiment=sorted_task", f"debug={preset}", "trainer.max_steps=4", "trainer.accelerator=cpu", "output_dir=run"
    )
    assert said.code == 0, said
    assert len(list((project / "run").glob("*profile*.txt"))) == (preset == "profile")


def test_any_other_argument_of_lightnings_trainer_is_passed_on(cli, project):
    words = (CONF, "experiment=sorted_task", *SHORT, "output_dir=run")
    assert cli(*words, "+trainer.extra.limit_predict_batches=3").code == 0
