"""Hydra's compositions that the tests keep are those that it makes."""

from typing import Any

import pytest
from omegaconf import DictConfig

from minitx.cli import train
from minitx.cli.compose import hydra_config
from minitx.config import ConfigError
from tests.cli.conftest import RESULT
from tests.composing import composing_anew

WORDS = (
    "",
    "experiment=char_lm trainer.max_steps=3 seed=11",
    "experiment=char_lm trainer.max_steps=5 +trainer.extra.x=3 ~schedule",
    "experiment=scaling_ablation ablation=quick",
    "data=digits model=vit_small model.patch_size=4 optimizer=sgd trainer=ddp",
    "debug=overfit hydra.job.chdir=true logger=[csv,wandb]",
)


def described(node: Any) -> Any:
    """A node of a config with its content, as it was written, and its flags."""
    metadata = node._metadata
    own = (type(node), metadata.flags, metadata.ref_type, metadata.object_type, metadata.optional)
    content = node._content if isinstance(node, DictConfig) else None
    return (
        *own,
        {key: described(value) for key, value in content.items()} if isinstance(content, dict) else str(node._value()),
    )


@pytest.mark.parametrize("words", WORDS)
def test_a_kept_composition_is_what_hydra_composes(words):
    with composing_anew():
        made = hydra_config(words.split())
    first, second = hydra_config(words.split()), hydra_config(words.split())
    assert described(first) == described(made)
    assert described(second) == described(made)
    assert first == made


def test_a_change_of_a_composed_config_stays_there():
    first = hydra_config(["experiment=char_lm"])
    first.trainer.clear()
    assert hydra_config(["experiment=char_lm"]).trainer


def test_a_file_of_a_user_that_changed_is_read_again(tmp_path):
    file = tmp_path / "experiment" / "own.yaml"
    file.parent.mkdir()
    for seed in (3, 5, 3):
        file.write_text(f"# @package _global_\nexperiment: own\nseed: {seed}\n", encoding="utf-8")
        for _ in range(2):
            assert hydra_config([f"--config-dir={tmp_path}", "experiment=own"]).seed == seed


def test_the_mode_that_a_word_or_a_file_of_a_user_sets_is_read(tmp_path, monkeypatch):
    file = tmp_path / "experiment" / "own.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\nexperiment: own\nhydra: {mode: MULTIRUN}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    seeds = []
    monkeypatch.setattr("minitx.cli.train.run_training", lambda config, *_: seeds.append(config.seed) or RESULT)
    for words, code in ((["hydra.mode=MULTIRUN"], 0), (["--config-dir=.", "experiment=own"], 0), ([], 2)):
        monkeypatch.setattr("sys.argv", ["train.py", *words, "seed=3,5", "callbacks.progress=false"])
        assert train.main() == code, words
    assert seeds == [3, 5] * 2


def test_an_option_of_a_user_that_names_another_choice_is_that_choice(tmp_path):
    for name, content in {
        "experiment/own.yaml": "# @package _global_\ndefaults: [{/mine: 'like_${experiment}'}]\nexperiment: own\n",
        "mine/like_own.yaml": "# @package _global_\nseed: 5\n",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert hydra_config([f"--config-dir={tmp_path}", "experiment=own"]).seed == 5


def test_a_mistake_in_a_kept_composition_is_named_as_hydra_names_it():
    for words in (["experiment=char_lm", "optimizer=adamw", "optimiser.lr=1"], ["experiment=nothing"]):
        with composing_anew(), pytest.raises(ConfigError) as made:
            hydra_config(words)
        for _ in range(2):
            with pytest.raises(ConfigError) as kept:
                hydra_config(words)
            assert str(kept.value) == str(made.value)
