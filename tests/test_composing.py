"""Hydra's compositions that the tests keep are those that it makes."""

from typing import Any

import pytest
from omegaconf import DictConfig

from minitx.cli.compose import composed
from minitx.config import ConfigError
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
        made = composed(words.split())
    first, second = composed(words.split()), composed(words.split())
    assert described(first) == described(made)
    assert described(second) == described(made)
    assert first == made


def test_a_change_of_a_composed_config_stays_there():
    first = composed(["experiment=char_lm"])
    first.trainer.clear()
    assert composed(["experiment=char_lm"]).trainer


def test_a_file_of_a_user_that_changed_is_read_again(tmp_path):
    file = tmp_path / "experiment" / "own.yaml"
    file.parent.mkdir()
    for seed in (3, 5, 3):
        file.write_text(f"# @package _global_\nexperiment: own\nseed: {seed}\n", encoding="utf-8")
        for _ in range(2):
            assert composed([f"--config-dir={tmp_path}", "experiment=own"]).seed == seed


def test_a_mistake_in_a_kept_composition_is_named_as_hydra_names_it():
    for words in (["experiment=char_lm", "optimizer=adamw", "optimiser.lr=1"], ["experiment=nothing"]):
        with composing_anew(), pytest.raises(ConfigError) as made:
            composed(words)
        for _ in range(2):
            with pytest.raises(ConfigError) as kept:
                composed(words)
            assert str(kept.value) == str(made.value)
