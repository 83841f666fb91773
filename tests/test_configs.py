"""The YAML files: every option composes, mirrors its dataclass, and every experiment runs a step."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest
import yaml

from minitx.cli.ablate import run_cell
from minitx.cli.compose import compose_config
from minitx.cli.train import run_training
from minitx.config import (
    CallbacksConfig,
    KeyValueDataConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TextDataConfig,
    TrainerConfig,
    TransformerConfig,
    to_dict,
)
from minitx.config.schema import from_dict
from minitx.data.tokenizers import train_tokenizer
from minitx.interop import save_pretrained
from minitx.nn import DecoderLM

CONFIGS = Path(__file__).parents[1] / "configs"
GROUPS = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and not path.name.startswith("_"))
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))]
EXPERIMENTS = [name for group, name in OPTIONS if group == "experiment"]
# the option of a group that states every key with the dataclass's own defaults
BASES = {
    "model/char_small": TransformerConfig(),
    "optimizer/adamw": OptimizerConfig(),
    "schedule/cosine": ScheduleConfig(),
    "trainer/default": TrainerConfig(),
    "objective/cross_entropy": ObjectiveConfig(),
    "callbacks/default": CallbacksConfig(),
    "data/kjv": TextDataConfig(),
    "data/kv_lookup": KeyValueDataConfig(),
}
DELIBERATE = {"trainer/default": {"val_batches": 100, "val_batch_size": 64}}  # what suits the default run


def overrides_for(group, option):
    needs_path = group == "data" and option in ("text", "pairs", "images", "hf")
    extra = ["data.path=some.txt"] if needs_path or option == "finetune" else []
    extra += ["model.pretrained=some_folder"] if option == "finetune" else []
    return [f"experiment={option}" if group == "experiment" else f"{group}={option}", *extra]


def test_the_groups_are_those_of_the_design():
    expected = {"model", "data", "objective", "optimizer", "schedule", "trainer", "logger", "callbacks", "experiment", "ablation", "debug"}  # fmt: skip
    assert set(GROUPS) == expected


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group, option):
    config = compose_config(overrides_for(group, option))
    assert isinstance(config, RunConfig)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_says_what_it_is(group, option):
    text = (CONFIGS / group / f"{option}.yaml").read_text(encoding="utf-8")
    assert isinstance(yaml.safe_load(text), dict | None)
    if group in ("experiment", "debug"):
        assert text.startswith("# @package _global_\n"), "experiments write over the whole config"


@pytest.mark.parametrize("name", BASES)
def test_the_keys_and_defaults_of_a_base_option_are_those_of_its_dataclass(name):
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    base = BASES[name]
    assert list(values) == [field.name for field in dataclasses.fields(base)]
    stated = to_dict(from_dict(type(base), values))
    assert stated == {**to_dict(base), **DELIBERATE.get(name, {})}


@pytest.mark.parametrize("name", BASES)
def test_what_may_be_chosen_stands_beside_the_key(name):
    """Each word of a Literal is in the comment of its key, or is an option of the group."""
    lines = {line.split(":")[0]: line for line in (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()}
    options = {path.stem for path in (CONFIGS / name.split("/")[0]).glob("*.yaml")}
    for key, hint in typing.get_type_hints(type(BASES[name])).items():
        kinds = [hint, *typing.get_args(hint)]
        words = [word for kind in kinds if typing.get_origin(kind) is typing.Literal for word in typing.get_args(kind)]
        for word in words:
            assert str(word) in lines[key] or str(word) in options, (key, word)


def test_the_top_level_keys_are_those_of_the_run():
    values = yaml.safe_load((CONFIGS / "train.yaml").read_text(encoding="utf-8"))
    plain = {key: value for key, value in values.items() if key not in ("defaults", "hydra")}
    assert plain == {name: to_dict(RunConfig())[name] for name in plain}
    assert set(plain) | set(GROUPS) - {"debug"} == {field.name for field in dataclasses.fields(RunConfig)}


@pytest.fixture(scope="module")
def data_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def somebodys_model(folder):
    """A folder to start from and a text, as overrides."""
    text = "In the beginning was the Word. " * 99
    (folder / "text.txt").write_text(text, encoding="utf-8")
    tokenizer = train_tokenizer("char", [text])
    sizes = {"vocab_size": tokenizer.vocab_size, "embed_dim": 12, "num_heads": 3, "num_layers": 1, "max_len": 128}
    save_pretrained(DecoderLM(TransformerConfig(**sizes)), folder / "theirs", tokenizer=tokenizer)
    return [f"model.pretrained={folder / 'theirs'}", f"data.path={folder / 'text.txt'}"]


QUICK = ("char_lm", "kv_lookup", "vit_digits", "finetune")
STEPS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EXPERIMENTS if name != "scaling_ablation"
]


@pytest.mark.parametrize("experiment", STEPS)
def test_every_experiment_runs_one_step(experiment, tmp_path, monkeypatch, data_cache):
    monkeypatch.setattr("minitx.data.load.data_dir", lambda: data_cache)
    shown = ["debug=one_step", "trainer.accelerator=cpu", "callbacks.progress=false"]
    config = compose_config(
        [f"experiment={experiment}", *shown, *(somebodys_model(tmp_path) if experiment == "finetune" else [])]
    )
    result = run_training(config, tmp_path / "run", "a test")
    assert result["steps"] == 1
    assert result["outcome"] != "NONFINITE"
    assert result["val_loss"] is not None
    assert config.experiment == experiment


GRIDS = [
    pytest.param(name, marks=[] if name in ("quick", "vision", "speedrun") else [pytest.mark.slow])
    for group, name in OPTIONS
    if group == "ablation"
]


@pytest.mark.parametrize("grid", GRIDS)
def test_a_cell_of_every_study_of_every_grid_composes(grid):
    from minitx.ablation.grid import cells

    config = compose_config(["experiment=scaling_ablation", f"ablation={grid}"])
    found = cells(config.ablation)
    assert {cell.study for cell in found} == set(config.ablation.studies)
    kinds = {(cell.study, cell.arm, *cell.factors.values()): cell for cell in found}
    assert len(kinds) >= 4
    for cell in list(kinds.values())[:: max(1, len(kinds) // 6)]:
        composed = compose_config([*cell.overrides, "callbacks.progress=false", "trainer.threads=1"])
        assert composed.seed == cell.seed
        assert composed.on_nonfinite == "record"
        assert composed.trainer.clip is None  # clipping is off in the comparison
        assert composed.trainer.max_steps == cell.steps()


def test_the_smoke_grid_is_small_and_has_a_study_of_each_kind():
    from minitx.ablation.grid import cells

    found = cells(compose_config(["experiment=scaling_ablation", "ablation=smoke"]).ablation)
    assert len(found) <= 20 and {cell.study for cell in found} == {"null_control", "init_sweep", "text", "recall"}


def test_an_arm_is_one_switch(tmp_path):
    """The scaled and the unscaled cell differ in model.scale alone."""
    from minitx.ablation.grid import cells

    found = cells(compose_config(["experiment=scaling_ablation"]).ablation)
    pairs = {}
    for cell in found:
        if cell.arm in ("inv_sqrt", "unscaled") and cell.seed == 0:
            pairs.setdefault((cell.study, *cell.factors.values()), {})[cell.arm] = cell
    whole = [pair for pair in pairs.values() if len(pair) == 2]
    assert len(whole) >= 10
    for pair in whole[::16]:
        a, b = (to_dict(compose_config(pair[arm].overrides)) for arm in ("inv_sqrt", "unscaled"))
        assert (a["model"].pop("scale"), b["model"].pop("scale")) == ("inv_sqrt", "unscaled")
        assert a == b


def test_a_cell_is_an_ordinary_run(tmp_path):
    result = run_cell(["experiment=scaling_cell_recall", "trainer.max_steps=2", "callbacks.progress=false", "seed=3"], str(tmp_path / "cell"))  # fmt: skip
    assert result["steps"] == 2
    assert [probe["step"] for probe in result["probes"]] == [0, 1, 2]
    assert "seed=3" in (tmp_path / "cell" / "command.txt").read_text()
