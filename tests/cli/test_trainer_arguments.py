"""Every argument of Lightning's Trainer has one place here: a key of ours, or ``trainer.extra``."""

import re

import lightning.pytorch as L
import pytest

from minitx.cli.compose import compose_config
from minitx.config import ConfigError, RunConfig, TrainerConfig, to_dict
from minitx.config.part import defaults
from minitx.config.signatures import parameter_names
from minitx.config.training import REPLACED
from minitx.training.run import train
from minitx.training.trainer import build_trainer
from minitx.training.unsupported import UNSUPPORTED, check_extra

ARGUMENTS = sorted(parameter_names(L.Trainer) - {*UNSUPPORTED})
WITHOUT_EFFECT = sorted(parameter_names(L.Trainer) & {*UNSUPPORTED})


def refused(check, argument):
    """The key that the message advises to use, or None if the argument is accepted."""
    try:
        check(argument)
    except ConfigError as error:
        return re.search(r": use (\S+)$", str(error))[1]
    return None


def exists(key):
    """Whether the command line accepts a key."""
    node = to_dict(RunConfig())
    for name in key.split("."):
        node = node[name]
    return True


QUICK = ("gradient_clip_val", "devices", "detect_anomaly", "max_time", "logger")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ARGUMENTS])
def test_an_argument_of_lightnings_trainer_is_passed_on_or_refused_with_the_key_to_use(name):
    extra, has_key = f"trainer.extra.{name}", name in defaults(TrainerConfig)
    key = refused(check_extra, {name: 1})
    assert key is None or (key != extra and exists(key))
    assert (key is None) == (name not in REPLACED and not has_key)
    if name in REPLACED:
        assert refused(compose_config, [f"trainer.{name}=1"]) == key


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_an_argument_without_an_effect_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match=rf"^trainer\.extra\.{name} {UNSUPPORTED[name]}$"):
        check_extra({name: 1})


def test_every_entry_is_an_argument_of_the_trainer_or_a_callback_of_lightning():
    assert all(name in WITHOUT_EFFECT or issubclass(getattr(L.callbacks, name), L.Callback) for name in UNSUPPORTED)


def test_what_is_replaced_are_arguments_of_lightnings_trainer():
    assert set(REPLACED) < set(ARGUMENTS)


SAID = {
    "max_steps": "use trainer.max_steps",
    "callbacks": "use callbacks",
    "benchmrk": "did you mean benchmark",
    "max_stepz": "did you mean max_steps",
}


def test_an_argument_that_has_a_key_or_does_not_exist_is_refused_from_python_before_anything_is_read(tmp_path):
    for name, said in SAID.items():
        config = RunConfig(trainer=TrainerConfig(extra={name: 3}), data={"_target_": "minitx.data.kjv"})
        with pytest.raises(ConfigError, match=f"^trainer.extra.{name} .*{said}"):
            train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_value_that_lightning_refuses_is_named_by_its_key(tmp_path):
    options = TrainerConfig(max_steps=3, extra={"max_time": "bogus"})
    with pytest.raises(ConfigError, match=r"^trainer: .*'bogus'.* is not a valid duration"):
        build_trainer(options, tmp_path, [], [], 0)
    second = TrainerConfig(max_steps=3, plugins=({"_target_": "lightning.pytorch.plugins.TorchCheckpointIO"},))
    with pytest.raises(ConfigError, match=r"^trainer: .*multiple values for CheckpointIO"):
        build_trainer(second, tmp_path, [], [], 0)
