"""The YAML files: every option composes, and every experiment runs a step."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from minitx.ablation.grid import NEW_DATA, cells
from minitx.cli.compose import compose_cell, compose_config, compose_grid
from minitx.cli.launch import run_training
from minitx.config import ConfigError, RunConfig, to_dict
from minitx.config.part import find_target
from minitx.config.signatures import parameter_names
from minitx.data.tokenizer import train_tokenizer

CONFIGS = Path(__file__).parents[1] / "configs"
GROUPS = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and not path.name.startswith("_"))
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))]
WHOLE = ("experiment", "ablation")
OF_OWN_FILES = ("text", "pairs", "images", "hf", "chat", "classify", "translate_text")


# composed by the tests below, in every tier
RUN = ("char_lm", "kv_lookup", "vit_digits", "finetune", "quick")
ALONE = [(option,) for option in OPTIONS if option[0] in WHOLE and option[1] not in RUN]
BESIDE = itertools.zip_longest(*([one for one in OPTIONS if one[0] == group] for group in GROUPS if group not in WHOLE))


@pytest.mark.parametrize("options", [*BESIDE, *ALONE], ids=lambda some: "-".join(name for _, name in filter(None, some)))
def test_every_option_composes(options):
    """Those of groups that know nothing of each other beside each other."""
    chosen = [f"{group}={name}" for group, name in filter(None, options)]
    own_file = any(name in OF_OWN_FILES and group != "ablation" for group, name in filter(None, options))
    chosen += ["data.path=some.txt"] if own_file else []
    chosen += ["model.path=FOLDER"] if "model=hf" in chosen else []
    chosen += ["model.max_len=1024"] if "data=chat" in chosen else []
    assert isinstance(compose_config(chosen), RunConfig)


def test_a_run_without_a_word_has_the_defaults_of_the_dataclasses():
    assert compose_config([]) == RunConfig()


def small_llama(folder):
    """A model of Hugging Face with a tokenizer that knows every byte."""
    transformers = pytest.importorskip("transformers")
    tokenizer = train_tokenizer("bpe", ["in the beginning"], vocab_size=260)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    size |= {"vocab_size": tokenizer.vocab_size, "bos_token_id": None, "eos_token_id": None}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)).save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


def in_tier(name):
    return pytest.param(name, marks=() if name in RUN else pytest.mark.slow)


# finetune needs weights: tests/cli/test_finetune.py
STEPS = [in_tier(name) for group, name in OPTIONS if group == "experiment" and name not in ("scaling_ablation", "finetune")]


@pytest.mark.parametrize("experiment", STEPS)
def test_every_experiment_runs_one_step(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr("minitx.data.token_cache.data_dir", lambda: tmp_path / "data")
    words = [f"experiment={experiment}", "debug=one_step", "trainer.accelerator=cpu", "callbacks.progress=false"]
    if experiment == "scaling_cell_real":  # the weights of a real model do not lie in the project
        words.append(f"model.path={small_llama(tmp_path / 'llama')}")
    if experiment in OF_OWN_FILES:
        (tmp_path / "own.tsv").write_text("text\tlabel\n" + "".join(f"word {n}\t{n % 3}\n" for n in range(211)))
        words.append(f"data.path={tmp_path / 'own.tsv'}")
    config = compose_config(words)
    result = run_training(config, tmp_path / "run", "a test")
    assert (result["steps"], result["nonfinite_step"], config.experiment) == (1, None, experiment)
    assert result["val_loss"] is not None


def test_every_option_of_optimizer_and_schedule_fits_every_experiment():
    """speedrun_char is an exception: its published grid takes its keys to AdamW and to a cosine."""
    exceptions = {("speedrun_char", "optimizer", "sgd"), ("speedrun_char", "schedule", "constant")}
    refused = set()
    for experiment in (CONFIGS / "experiment").glob("*.yaml"):
        values = OmegaConf.load(experiment)
        for group in ("objective", "optimizer", "schedule"):
            for option in (CONFIGS / group).glob("*.yaml"):
                known = parameter_names(find_target(OmegaConf.load(option)["_target_"], group))
                if not {*(values.get(group) or ())} <= known:
                    refused.add((experiment.stem, group, option.stem))
    assert refused == exceptions


def test_the_warm_up_of_an_experiment_is_cut_to_a_tenth_of_fewer_steps_and_a_users_is_refused(tmp_path, caplog):
    caplog.set_level("INFO")
    words = ["experiment=kv_lookup", "trainer.max_steps=12"]
    assert compose_config(words).schedule.get("warmup_steps") == 1
    assert "schedule.warmup_steps=15 of the experiment exceeds trainer.max_steps=12: shortened to 1" in caplog.text
    assert compose_config([*words, "trainer.max_steps=15"]).schedule.get("warmup_steps") == 15
    assert compose_config([*words, "schedule.warmup_steps=0.25"]).schedule.get("warmup_steps") == 0.25
    typed = compose_config([*words, "schedule.warmup_steps=13", "data.val_size=8"])
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults: [kv_lookup]\nschedule: {warmup_steps: 13}\ntrainer: {max_steps: 12}\n"
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(text)
    in_a_file = compose_config([f"--config-dir={tmp_path / 'conf'}", "experiment=mine", "data.val_size=8"])
    for config in (typed, in_a_file):
        with pytest.raises(ConfigError, match=r"^schedule\.warmup_steps=13 must not exceed trainer\.max_steps=12"):
            run_training(config, tmp_path / "run", "a test")


@pytest.mark.parametrize("grid", [in_tier(name) for group, name in OPTIONS if group == "ablation" and name != "rate"])
def test_a_cell_of_every_study_of_every_grid_composes(grid):
    config = compose_grid(["experiment=scaling_ablation", f"ablation={grid}"])
    found = cells(config)
    assert {cell.place.study for cell in found} == set(config.studies)
    kinds = {dataclasses.replace(cell.place, seed=0): cell for cell in found}
    assert len(kinds) >= 4
    for cell in list(kinds.values())[:: max(1, len(kinds) // 3)]:
        words = [*cell.overrides, "callbacks.progress=false", "trainer.threads=1"]
        composed = compose_config(words)
        assert compose_cell(words) == composed
        assert composed.seed == cell.place.seed + (NEW_DATA if cell.start else 0)
        assert (composed.trainer.max_steps, composed.on_nonfinite) == (cell.steps(), "record")
        assert composed.trainer.clip is None  # clipping is off in the comparison


def test_the_check_of_an_equal_start_finds_weights_that_only_an_experiment_names(tmp_path):
    found = cells(compose_grid(["experiment=scaling_ablation", "ablation=real"]))
    folded = next(cell for cell in found if cell.place.arm == "unscaled")
    words = [*folded.words(tmp_path), "callbacks.progress=false"]
    for config in (compose_config(words), compose_cell(words)):
        assert config.callbacks["same_start"].get("path") == config.model.get("path") == "data/smollm2"


def test_an_arm_is_one_switch():
    """The scaled and the unscaled cell differ in model.scale alone, and thresholds in the rate at which their search begins."""
    pairs = {}
    for cell in cells(compose_grid(["experiment=scaling_ablation"])):
        if cell.place.arm in ("inv_sqrt", "unscaled"):
            pairs.setdefault(dataclasses.replace(cell.place, arm="", seed=0), {})[cell.place.arm] = cell
    whole = [pair for pair in pairs.values() if len(pair) == 2]
    assert len(whole) == 6 and sum(pair["inv_sqrt"].threshold is not None for pair in whole) == 3
    for pair in whole[::2]:
        a, b = (to_dict(compose_config(pair[arm].overrides)) for arm in ("inv_sqrt", "unscaled"))
        if pair["inv_sqrt"].threshold is not None:
            del a["optimizer"]["lr"], b["optimizer"]["lr"]
        assert (a["model"].pop("scale"), b["model"].pop("scale")) == ("inv_sqrt", "unscaled")
        assert a == b
