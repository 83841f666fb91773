"""``examples/own_project``: a model, data, objective, optimizer and callback of the user's own, from a folder outside of the checkout."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from minitx.cli.compose import compose_config
from minitx.config import ConfigError, RunConfig, TrainerConfig, TransformerConfig, to_dict
from minitx.training.checkpoint_files import write_checkpoint
from minitx.training.checkpoints import load_model
from minitx.training.metrics_csv import read_metrics
from minitx.training.run import train
from tests.cli.conftest import TINY, assert_named, copy_example, losses
from tests.cli.processes import run

SHORT = ("trainer.max_steps=6", "trainer.val_every=3", "trainer.log_every=1", "trainer.accelerator=cpu", "callbacks.progress=false")  # fmt: skip
LAST = "ckpt_path=run/checkpoints/last.ckpt"


@pytest.fixture
def project(place, monkeypatch):
    """A copy of the project in the current folder."""
    copy_example("own_project", place)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    return place


def arguments(experiment, *words):
    return ["--config-dir=conf", f"experiment={experiment}", *words]


@pytest.fixture
def own(cli, project):
    """``own("sorted", ...)``: what ``train.py`` says of a short run of that experiment, which ends with ``code``."""

    def start(experiment, *words, code=0):
        said = cli(*arguments(experiment, *SHORT, *words))
        assert said.code == code, said
        assert code == 0 or len(said.err.strip().splitlines()) <= 3
        return said

    return start


@pytest.fixture
def script(project):
    """``script("sorted", ...)``: the same in a process of its own."""

    def start(experiment, *words):
        code, out, err = run(arguments(experiment, *words), project)
        assert code == 0, out + err

    return start


def test_parts_of_ones_own_train_resume_and_are_evaluated_with_trust(cli, own, project):
    """A network, a data module, torch's SGD, a callback and a CSVLogger."""
    assert "go: step 0" in own("sorted", "output_dir=run").out  # the callback
    rows = read_metrics(project / "run" / "metrics.csv")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["train_accuracy"] is not None and row["mfu"] is None for row in rows)
    (table,) = (project / "run").rglob("lightning_logs/version_0/metrics.csv")
    assert "train_loss" in table.read_text().partition("\n")[0]
    state = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    assert state["minitx"]["model"]["_target_"] == "own.Net"
    assert "momentum_buffer" in state["optimizer_states"][0]["state"][0]  # torch.optim.SGD
    refused = {"evaluate": [], "view": ["trust=true", "text=1 2"], "generate": ["trust=true", "prompt=1 2"]}
    for program, words in refused.items():
        said = cli(LAST, *words, program=program)
        assert (said.code, len(said.err.strip().splitlines())) == (2, 1), said
        assert words or ("own." in said.err and "trust=true" in said.err)
    assert cli(LAST, "trust=true", "output=found.json", program="evaluate").code == 0
    found = json.loads((project / "found.json").read_text())["metrics"]
    for name in ("accuracy", "loss"):
        assert found[name]["value"] == pytest.approx(rows[-1][f"val_{name}"])
    assert "go: step 6" in own("sorted", "output_dir=run", "ckpt_path=last", "trainer.max_steps=9").out
    own("sorted", "output_dir=whole", "trainer.max_steps=9")
    assert losses("run") == losses("whole") and len(losses("run")) == 9


def test_with_a_task_and_an_objective_of_ones_own_a_run_resumes_bit_for_bit(own, cli):
    own("sorted_task", "trainer.accumulate=2", "output_dir=whole", "trainer.max_steps=9")
    own("sorted_task", "trainer.accumulate=2", "output_dir=part", "trainer.max_steps=4")
    own("sorted_task", "trainer.accumulate=2", "output_dir=part", "trainer.max_steps=9", "ckpt_path=last")
    assert losses("part") == losses("whole")
    first, then = Path("part/command.txt").read_text(encoding="utf-8").splitlines()  # the commands that made the run
    assert "trainer.max_steps=4" in first and "ckpt_path=last" in then
    parts = ("model._target_=own.Net", "model.width=32", "data._target_=own.load_task", "objective._target_=own.Focal")
    # what the command line names needs no trust
    said = cli("ckpt_path=whole/checkpoints/last.ckpt", *parts, program="evaluate")
    assert said.code == 0 and "accuracy" in said.out
    ours, theirs = (torch.load(f"{name}/checkpoints/last.ckpt", weights_only=True)["state_dict"] for name in ("part", "whole"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_hydras_own_folder_is_taken_and_a_mistake_leaves_none(own, project):
    own("sorted_task", "debug=profile", "hydra.run.dir=mine/here", "+trainer.extra.limit_predict_batches=3")  # Lightning's
    assert (project / "mine" / "here" / "metrics.csv").exists()
    assert len(list((project / "mine" / "here").glob("*profile*.txt"))) == 1
    own("sorted_task", "hydra.run.dir=yours", "model.width=-3", code=2)
    assert not (project / "yours").exists()


def test_a_mistake_in_a_part_is_one_sentence_with_its_key(own, project):
    said = {
        "model._target_=own.Nett": "did you mean own.Net?",
        "optimizer.lr=-1": "optimizer._target_=torch.optim.SGD",
        "callbacks.announce._target_=own.Silence": "callbacks.announce._target_=own.Silence",
    }
    for changed, key in said.items():
        assert key in own("sorted", changed, "output_dir=run", code=2).err
    source = (project / "own.py").read_text()
    (project / "own.py").write_text(source.replace("def forward(self, input_ids: torch.Tensor)", "def forward(self, words)"))
    sys.modules.pop("own")
    assert "needs words" in own("sorted", "output_dir=run", code=2).err
    assert not (project / "run").exists()


@pytest.mark.release
def test_a_grid_has_it_as_an_arm(script, project):
    script("scaling_ablation", "ablation=widths", "output_dir=grid")
    cells = [json.loads(line) for line in (project / "grid" / "cells.jsonl").read_text().splitlines()]
    assert sorted((cell["arm"], cell["seed"]) for cell in cells) == [("narrow", 0), ("narrow", 1), ("wide", 0), ("wide", 1)]
    assert {cell["status"] for cell in cells} == {"done"}


@pytest.mark.slow
def test_a_sweep_by_joblib_exits_with_3_where_a_job_fails(own, project):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    sweep = ("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1", "hydra.sweep.dir=swept")
    said = own("sorted_task", *sweep, "optimizer.lr=.1,1e30", "trainer.clip=null", code=3)
    assert "not finite" in said.err
    assert len(losses("swept/0")) == 6
    assert "output_dir=fixed" in own("sorted_task", "-m", "optimizer.lr=.1,.5", "output_dir=fixed", code=2).err
    assert not (project / "fixed").exists()


@pytest.mark.release
def test_a_data_module_of_ones_own_gives_two_processes_rows_of_their_own(script, project):
    source = (project / "own.py").read_text()
    note = 'open(f"rows_{os.environ[\'LOCAL_RANK\']}", "a").write("".join(f"{row}\\n" for row in input_ids.tolist() if self.training))'
    changed = source.replace("        return self.head(", f"        {note}\n        return self.head(")
    assert changed != source
    (project / "own.py").write_text(f"import os\n{changed}")
    script("sorted", *SHORT, "trainer=ddp_cpu", "trainer.threads=1", "output_dir=run")
    first, second = (set((project / f"rows_{rank}").read_text().splitlines()) for rank in (0, 1))
    assert len(first) > 90 and len(second) > 90
    assert len(first & second) < 10  # rows that happen to be alike
    assert read_metrics(project / "run" / "metrics.csv")[0]["tokens"] == 2 * 32


@pytest.mark.release
def test_a_launcher_runs_the_jobs_of_a_sweep_in_processes(script, project):
    script("sorted_task", *SHORT, "-m", "hydra/launcher=submitit_local", "hydra.sweep.dir=swept", "optimizer.lr=.1,.5")
    first, second = (losses(f"{project}/swept/{job}") for job in (0, 1))
    assert first[0] == second[0] and first[-1] != second[-1]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # sqlalchemy's, which Optuna imports
def test_optuna_searches_for_the_least_validation_loss(own, project):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    search = ("-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1", "hydra.sweep.dir=swept")
    own("sorted_task", *search, "optimizer.lr=interval(0.01,0.5)")
    best = (project / "swept" / "optimization_results.yaml").read_text()
    found = [read_metrics(project / "swept" / str(job) / "metrics.csv")[-1]["val_loss"] for job in (0, 1)]
    assert f"best_value: {min(found)}" in best


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_search_goes_on_after_a_trial_that_diverges_and_does_not_minimize_an_accuracy(cli, own, project):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    search = ("-m", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "hydra.sweep.dir=swept", "hydra.sweeper.sampler.seed=0")
    own("sorted_task", *search, "hydra.sweeper.n_trials=3", "optimizer.lr=choice(1e30,0.01)", "on_nonfinite=stop")
    assert "optimizer.lr: 0.01" in (project / "swept" / "optimization_results.yaml").read_text()
    said = cli(*arguments("sorted_task", *SHORT, *search, "optimizer.lr=choice(0.1,0.2)", "optimized_metric=val_accuracy"))
    assert said.code == 2
    assert said.err.strip().endswith("set hydra.sweeper.direction=maximize")


def test_a_config_of_ones_own_has_variables_resolvers_and_numbers_of_the_environment(own, project, monkeypatch):
    monkeypatch.setenv("TASK", "3")
    (project / "resolvers.py").write_text(
        "from omegaconf import OmegaConf\nOmegaConf.register_new_resolver('twice', lambda value: 2 * value, replace=True)\n"
    )
    (project / "conf" / "experiment" / "vars.yaml").write_text(
        "# @package _global_\ndefaults: [sorted_task, _self_]\nimports: [resolvers]\nbase: 0.01\nseed: ${oc.env:TASK}\n"
        "optimizer: {lr: '${twice:${base}}'}\n"
    )
    own("vars", "output_dir=run")
    stored = json.loads(json.dumps(load_model(project / LAST.partition("=")[2], trust=True)[2]["config"]))
    assert (stored["seed"], stored["optimizer"]["lr"], "base" in stored) == (3, 0.02, False)
    (project / "conf" / "experiment" / "vars.yaml").write_text(
        "# @package _global_\ndefaults: [sorted_task, _self_]\nbase: 0.01\n"
    )
    assert "base is not a key" in own("vars", code=2).err


def test_nothing_of_the_users_takes_the_place_of_a_library(own, project, monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)  # of the standard library
    (project / "colorsys.py").write_text("raise ImportError('this file shadows a library')\n")
    (project / "own.py").write_text("import colorsys\n" + (project / "own.py").read_text())
    own("sorted", "output_dir=run")
    assert sys.modules["own"].colorsys.__file__ != str(project / "colorsys.py")


def test_from_python_the_same_with_objects_which_the_programs_ask_for(cli, project, monkeypatch):
    monkeypatch.syspath_prepend(str(project))
    import own

    config = RunConfig(trainer=TrainerConfig(max_steps=3, accelerator="cpu", log_every=1, val_every=0))
    result = train(config, "run", model=own.Net(), data=own.load_task(), objective=own.Focal())
    assert result["steps"] == 3
    path = project / LAST.partition("=")[2]
    with pytest.raises(ConfigError, match=r"own\.Net.*trust=true"):
        load_model(path)
    assert isinstance(load_model(path, model=own.Net())[0], own.Net)
    for given, asked in (([], "data"), (["data._target_=own.load_task"], "objective")):
        said = cli(LAST, "trust=true", *given, program="evaluate")
        assert_named(said, f"{asked} passed from Python")
        assert f"{asked}._target_=" in said.err
    assert "data has no _target_" in cli(LAST, "trust=true", "data.path=x", program="evaluate").err  # one of ours
    parts = "data._target_=own.load_task", "objective._target_=own.Focal"
    assert "128 rows" in cli(LAST, "trust=true", *parts, program="evaluate").out


def test_from_python_a_run_is_not_replaced_but_goes_on(project, monkeypatch):
    monkeypatch.syspath_prepend(str(project))
    import own

    config = RunConfig(data={"_target_": "own.load_task"}, trainer=TrainerConfig(max_steps=2, accelerator="cpu", log_every=1))
    train(config, "run", model=own.Net(), objective=own.Focal())  # on the data of the config
    assert torch.load("run/checkpoints/last.ckpt", weights_only=True)["minitx"]["config"]["data"] == config.data.plain()
    before = losses("run")
    with pytest.raises(ConfigError, match=r"^output_dir=run already contains a run: resume it with ckpt_path=last"):
        train(config, "run", model=own.Net(), objective=own.Focal())
    assert losses("run") == before
    longer = dataclasses.replace(config, ckpt_path="last", trainer=dataclasses.replace(config.trainer, max_steps=3))
    assert train(longer, "run", model=own.Net(), objective=own.Focal())["steps"] == 3


def test_what_python_gives_of_another_kind_is_named(project):
    config = compose_config(TINY)
    for name, given in {"config": {}, "model": "net", "data": [1], "objective": 3}.items():
        with pytest.raises(ConfigError, match=f"^{name}"):
            train(**{"config": config, "folder": "run", name: given})
    assert not (project / "run").exists()


SHELL = {"_target_": "os.system", "command": "touch owned"}


@pytest.mark.parametrize(
    ("node", "named"), [("model", {**SHELL, "_target_": "${oc.env:EVIL}"}), ("data", SHELL), ("objective", SHELL)]
)
def test_a_checkpoint_that_names_code_is_refused_by_name_and_nothing_runs(cli, place, monkeypatch, node, named):
    monkeypatch.setenv("EVIL", "os.system")
    config = {**to_dict(RunConfig()), "imports": ["antigravity"]}
    config[node] = named
    state = {"config": config, "model": config["model"], "tokenizer": None, "format": 1}
    write_checkpoint({"state_dict": {}, "global_step": 1, "minitx": state}, place / "evil.ckpt")
    for program in ("evaluate", "generate", "view"):
        said = cli("ckpt_path=evil.ckpt", *(["text=a"] if program == "view" else []), program=program)
        assert said.code == 2, said
        assert named["_target_"] in said.err or "os.system" in said.err
        assert "trust=true" in said.err
    assert [path.name for path in place.iterdir()] == ["evil.ckpt"]
    assert "antigravity" not in sys.modules


def test_the_weights_of_a_checkpoint_bring_no_code_into_a_run(cli, place):
    """``init_from`` also takes the shape of the model from it."""
    shape = {**to_dict(TransformerConfig(vocab_size=11)), "attention": SHELL}
    state = {"config": {}, "model": {"_target_": "minitx.nn.build_model", **shape}, "tokenizer": None, "format": 1}
    write_checkpoint({"state_dict": {}, "global_step": 1, "minitx": state}, place / "evil.ckpt")
    assert_named(cli("init_from.path=evil.ckpt", "data=kv_lookup", "trainer.accelerator=cpu"), "os.system")
    assert [path.name for path in place.iterdir()] == ["evil.ckpt"]


# --- a project in the shape of lightning-hydra-template


@pytest.mark.slow
def test_a_project_in_the_shape_of_the_template_moves_over_with_one_yaml_file(cli, place, monkeypatch):
    pytest.importorskip("sklearn")
    copy_example("from_template", place)
    for name in [name for name in sys.modules if name.partition(".")[0] == "src"]:
        monkeypatch.delitem(sys.modules, name)
    words = arguments("digits", "trainer.accelerator=cpu", "callbacks.progress=false", "output_dir=run")
    assert cli(*words, "trainer.max_epochs=2").code == 0
    result = json.loads((place / "run" / "result.json").read_text())
    assert result["steps"] == 41 and result["val_accuracy"] > 0.8 and result["metrics"]["test_accuracy"] > 0.8
    assert sorted(path.name for path in (place / "run" / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert "tags:\n- digits\n" in (place / "run" / "config.yaml").read_text()
    assert cli(*words, "trainer.max_epochs=3", "ckpt_path=last").code == 0
    assert json.loads((place / "run" / "result.json").read_text())["steps"] == 61
    assert cli(*words[:-1], "debug=one_step", "evaluation.test=best", "data.batch_size=5", "output_dir=one").code == 0
    found = cli(*words[:-1], "trainer.max_epochs=1", "trainer.monitor=nothing", "evaluation.test=best", "output_dir=none")
    assert_named(found, "trainer.monitor=nothing is not logged, but the schedule needs it; logged are: train_loss")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    swept = cli("-m", *words[:-1], "trainer.max_epochs=1", "optimized_metric=val/none", "hydra.sweep.dir=sweep")
    assert swept.code == 2 and "optimized_metric=val/none is not logged; logged are: train_loss" in swept.err
