"""A command line that Hydra cannot compose is answered with a key, group or option that the command line accepts."""

import random
import re

import pytest

from minitx.cli.compose import compose_config, explaining
from minitx.config import ConfigError
from minitx.config.failures import FailedRunError
from tests.cli.conftest import RESULT, assert_named, put


def refusal(*words):
    with pytest.raises(ConfigError) as caught:
        compose_config(words)
    return str(caught.value)


def mistyped(name, seed):
    """``name`` with two letters swapped, or with a letter lost, twice or wrong."""
    draw = random.Random(f"{name} {seed}")
    i = draw.randrange(1, len(name) - 1)
    changed = [name[:i] + name[i + 1] + name[i] + name[i + 2 :], name[:i] + name[i + 1 :], name[:i] + name[i:i + 1] + name[i:], name[:i] + "q" + name[i + 1 :]]  # fmt: skip
    return draw.choice([word for word in changed if word != name])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("key", ["model.num_layers=3", "trainer.max_steps=9", "optimizer.lr=0.1", "data.context_len=9", "callbacks.probe.every=2",
                                 "schedule.warmup_steps=0", "evaluation.num_shown=1", "seed=3", "output_dir=a"])  # fmt: skip
def test_for_a_mistyped_group_a_key_is_suggested_that_is_accepted(key, seed):
    name, _, value = key.partition("=")
    head, dot, rest = name.partition(".")
    suggested = re.search(r"\(did you mean (\S+)\?\)$", refusal(f"{mistyped(head, seed)}{dot}{rest}={value}"))[1]
    assert suggested == name
    compose_config([f"{suggested}={value}"])


@pytest.mark.parametrize(("typed", "suggested"), {
    "num_layers": "model.num_layers", "max_steps": "trainer.max_steps", "lr": "optimizer.lr", "expriment": "experiment", "optimiser": "optimizer",
}.items())  # fmt: skip
def test_for_a_key_without_its_group_and_for_a_mistyped_group_the_whole_key_is_suggested(typed, suggested):
    assert f"(did you mean {suggested}?)" in refusal(f"{typed}=1")


@pytest.mark.parametrize("choice", ["trainer=ddp_cpu", "schedule=linear", "experiment=char_lm", "logger=[csv,wandb]"])
def test_for_a_mistyped_option_one_is_suggested_that_is_accepted(choice):
    option = re.search(r"(\w+)\]?$", choice)[1]
    wrong = choice.replace(option, mistyped(option, 0))
    assert refusal(wrong).endswith(f"(did you mean {option}?)")
    compose_config([choice])


def test_options_and_keys_of_a_users_configs_are_suggested(tmp_path):
    put(tmp_path / "conf" / "experiment" / "mine.yaml", "# @package _global_\nseed: 3\n")
    put(tmp_path / "conf" / "team" / "red.yaml", "size: 3\n")
    folder = f"--config-dir={tmp_path / 'conf'}"
    assert "(did you mean mine?)" in refusal(folder, "experiment=mime")
    assert "(did you mean red?)" in refusal(folder, "+team=rd")
    assert "use +team=red" in refusal(folder, "team=red")


def test_a_variable_of_a_users_config_is_set_as_a_key_is_and_swept_and_a_typo_of_it_is_refused(cli, place, monkeypatch):
    seen = []
    result = {**RESULT, "val_loss": 1.0, "metrics": {"val_loss": 1.0}}
    monkeypatch.setattr(
        "minitx.cli.train.run_training", lambda config, *_: seen.append(config.model.fields.embed_dim) or result
    )
    put(place / "conf" / "primary.yaml", "defaults: [train, _self_]\nwidth: 32\nmodel: {embed_dim: '${width}'}\n")
    words = "--config-dir=conf", "--config-name=primary"
    for typed in ([], ["width=64"], ["-m", "width=16,48"]):
        assert cli(*words, *typed).code == 0
    assert seen == [32, 64, 16, 48]
    assert_named(cli(*words, "widht=64"), "widht is not a key")
    for mistake, said in (
        ("model.max_len=${model.max_ln}", "max_ln' not found"),
        ("trainer=nope", "trainer must be one of"),
        ("--config-name=no", "no"),
    ):
        ran = cli(*words, "width=64", mistake)  # of another word than the variable
        assert_named(ran, said)
        assert "width" not in ran.err


@pytest.mark.parametrize(("words", "said"), {
    "+seed=1": "remove the +", "+experiment=kv_lookup": "remove the +", "seed=1,2": "-m", "data=kjv,text": "-m",
    "seed=${sed}": "(did you mean seed?)", "seed=${seed}": "seed: Recursive interpolation", "data.path=${modle.num_layers}": "(did you mean model.num_layers?)",
    "model=null": "must name an option", "logger=[csv,3]": "must name an option", "model=zzz": "char_small", "zzz=1": "--help",
    "+debug=one_step": "remove the +", "model@left=gpt2": "Did you mean to override model?", "hydra/sweeper=optunaa": "optuna", "~zzz": "'zzz' does not exist", "seed=3 modle.num_layers=2": "(did you mean model.num_layers?)",
    "trainer=cpu model.num_layers=3 modle=gpt2": "(did you mean model?)",
}.items())  # fmt: skip
def test_what_is_wrong_with_the_form_of_a_word_is_said(words, said):
    assert said in refusal(*words.split())


def test_an_error_that_is_already_a_sentence_is_not_explained():
    for kind in (ConfigError, FailedRunError):
        with pytest.raises(kind, match=r"^mine$"), explaining(["modle.num_layers=2"]):
            raise kind("mine")


@pytest.mark.parametrize(
    "typed",
    [
        "modle.num_layers=2",
        "-m seed=1,2 model=nope",
        "-m seed=1,2 modle=gpt2",
        "-m model=char_small,nope",
    ],
)
def test_a_mistake_ends_a_run_and_a_sweep_with_a_suggestion(cli, place, typed, monkeypatch):
    monkeypatch.setattr("minitx.cli.train.run_training", lambda *args, **kwargs: pytest.fail("the run began"))
    said = cli(*typed.split())
    assert_named(said, "did you mean" if "nope" not in typed else "char_small")


WRONG_FILES = {  # the text of conf/experiment/mine.yaml, and the end of the message
    "defaults:\n  - override /data: kv_lokup\n": "(did you mean kv_lookup?)",
    "defaults:\n  - override /callbacks: [default, sample]\n": "(did you mean samples?)",
    "trainer: {max_steps: 3}\ntrainer: {max_steps: 4}\n": "mine.yaml, line 3: found duplicate key trainer",
    "trainer:\n\tmax_steps: 3\n": "mine.yaml, line 3: found character '\\t' that cannot start any token",
}


@pytest.mark.parametrize(("text", "end"), WRONG_FILES.items())
def test_a_fault_in_a_file_is_told_with_its_line_or_a_similar_option(cli, place, text, end):
    put(place / "conf" / "experiment" / "mine.yaml", f"# @package _global_\n{text}")
    ran = cli("--config-dir=conf", "experiment=mine")
    assert_named(ran, end)
    assert ran.err.rstrip().endswith(end)
