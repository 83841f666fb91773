"""Config dataclasses: what they take, what they refuse, and by which key."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from minitx.config import (
    CallbacksConfig,
    ConfigError,
    KeyValueDataConfig,
    OptimizerConfig,
    ParameterRule,
    RunConfig,
    ScheduleConfig,
    StopAtConfig,
    TrainerConfig,
    TransformerConfig,
    evaluate_factor,
    from_dict,
    to_dict,
    unknown_key,
)

SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}


def test_configs_need_the_standard_library_alone():
    code = "import sys, minitx.config, minitx.ablation.design; print({'torch', 'numpy', 'hydra', 'omegaconf', 'pandas'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_config_survives_the_way_through_plain_data():
    config = RunConfig(
        model=TransformerConfig(scale=0.5, num_heads=8, qk_norm="rms"),
        data=KeyValueDataConfig(num_pairs=5),
        optimizer=OptimizerConfig(rules=(ParameterRule(match="q_proj", lr="head_dim^-0.25"),), betas=(0.8, 0.9)),
        trainer=TrainerConfig(stop_at=StopAtConfig(value=0.5), plugins=(SGD,), extra={"detect_anomaly": True}),
        callbacks=CallbacksConfig(parts={"mine": {"_target_": "my.Callback"}, "off": None}),
        logger={"wandb": {"_target_": "x", "tags": ["a"]}},
        schedule=SGD,
    )
    plain = json.loads(json.dumps(to_dict(config)))
    assert plain["callbacks"]["mine"] == {"_target_": "my.Callback"}
    assert from_dict(RunConfig, plain) == config


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TrainerConfig(max_steps="sixty"), "max_steps=sixty must be a whole number, got str"),
        (lambda: TrainerConfig(overfit="no"), "overfit=no must be true or false"),
        (lambda: OptimizerConfig(betas=("a", 0.9)), "betas="),
        (lambda: RunConfig(model="net"), "model=net must be a config of minitx or a mapping, got str"),
        (lambda: RunConfig(trainer={"max_steps": 3}), "trainer={'max_steps': 3} must be a config of minitx, got dict"),
        (lambda: RunConfig(imports="mine"), "imports=mine must be a list"),
    ],
)
def test_a_value_of_another_python_type_is_named(make, said):
    with pytest.raises(ConfigError) as refused:
        make()
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("group", ["model", "data", "objective", "optimizer", "schedule"])
def test_a_group_is_one_of_ours_or_a_part_of_the_users_which_is_left_as_it_is(group):
    assert getattr(from_dict(RunConfig, {group: SGD}), group) == SGD
    with pytest.raises(ConfigError, match=group):
        from_dict(RunConfig, {group: {"target": "torch.optim.SGD"}})


@pytest.mark.parametrize("scale", [None, "none", "1", True, float("nan"), float("inf"), [1]])
def test_what_is_no_scale_is_refused(scale):
    with pytest.raises(ConfigError, match=r"scale=.*unscaled"):
        TransformerConfig(scale=scale)


def test_defaults_that_depend_on_other_fields():
    config = TransformerConfig(embed_dim=96, num_heads=6)
    assert (config.width_per_head, config.kv_heads, config.ffn_width) == (16, 6, 384)
    gated = TransformerConfig(embed_dim=100, num_heads=4, activation="swiglu", head_dim=7, num_kv_heads=2)
    assert (gated.width_per_head, gated.kv_heads, gated.ffn_width) == (7, 2, 272)  # 8 · ⌈100 / 3⌉
    assert TransformerConfig(embed_dim=7, num_heads=3, head_dim=5).width_per_head == 5


FITS = {
    "data": {"name": "text", "path": "x", "context_len": 64, "batch_size": 12},
    "model": {"max_len": 64},
    "schedule": {"warmup_steps": 5},
    "trainer": {"max_steps": 5, "accumulate": 3, "devices": 4, "strategy": "sharded", "plugins": [SGD]},
    "callbacks": {"probe": {"every": 3}, "mine": SGD, "off": None},
    "logger": {"a": SGD, "b": None},
}


@pytest.mark.parametrize(
    ("group", "changed", "key"),
    [
        ("schedule", {"warmup_steps": 6}, "schedule.warmup_steps=6"),
        ("data", {"batch_size": 18}, "data.batch_size=18"),
        ("model", {"max_len": 63}, "model.max_len=63"),
        ("optimizer", {"name": "muon"}, "optimizer.name=muon"),
        ("callbacks", {"prob": {"every": 3}}, "callbacks.prob .*callbacks.probe"),
        ("callbacks", {"mine": 3}, "callbacks.mine=3"),
        ("trainer", {"plugins": [{"a": 1}]}, r"trainer.plugins\[0\]"),
        ("trainer", {"extra": {"max_steps": 3}}, "trainer.extra.max_steps"),
        ("model", {"num_heads": 7}, "num_heads=7"),
        ("model", {"dropout": math.nan}, "model.dropout=nan"),
        ("model", {"init": "lecunn"}, "did you mean lecun?"),
        ("optimizer", {"lr": 0}, "optimizer.lr=0"),
        ("optimizer", {"rules": [{"match": "a"}, {"matc": "b"}]}, r"optimizer.rules\[1\].matc"),
        ("optimizer", {"rules": [{"match": "("}]}, r"optimizer.rules\[0\].match=\("),
        ("init_from", {"fold_scale": True}, "fold_scale"),
    ],
)
def test_what_does_not_fit_together_is_named_by_its_key(group, changed, key):
    from_dict(RunConfig, FITS).check_data()
    with pytest.raises(ConfigError, match=key):
        from_dict(RunConfig, {**FITS, group: {**FITS.get(group, {}), **changed}}).check_data()


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: ScheduleConfig(name="cos"), "name=cos is not allowed: one of cosine, "),
        (lambda: TransformerConfig(qk_norm="rmss"), "qk_norm=rmss .*did you mean rms"),
        (lambda: TransformerConfig(attention=None), "attention=None is not allowed"),
        (lambda: RunConfig(on_nonfinite="raise"), "on_nonfinite=raise"),
    ],
)
def test_from_python_too_a_word_must_be_one_of_those_that_its_field_knows(made, said):
    TransformerConfig(qk_norm=None, attention={"_target_": "mine.Core"})
    with pytest.raises(ConfigError, match=said):
        made()


def test_a_factor_is_a_number_or_a_power_of_the_heads_width_and_no_expression():
    for factor, value in ((2, 2.0), ("head_dim^0.5", 4.0), ("head_dim^-1", 1 / 16), (" head_dim^2 ", 256.0)):
        assert evaluate_factor(factor, head_dim=16) == value
    for factor in ("head_dim", "2*head_dim", "__import__('os')", "head_dim^1e3", ""):
        with pytest.raises(ConfigError, match="factor="):
            evaluate_factor(factor, head_dim=16)


def test_an_unknown_key_is_answered_with_its_neighbour():
    assert unknown_key(RunConfig, "model.num_head") == "model.num_head is not a key (did you mean model.num_heads?)"
    assert "trainer.stop_at.value" in unknown_key(RunConfig, "trainer.stop_at.valu")
    assert "trainer.stop_at={value: VALUE}" in unknown_key(RunConfig, "trainer.stop_at.value")


def test_numbers_that_yaml_reads_as_words_are_numbers_and_nothing_else_is():
    for text, number in (("1e-3", 1e-3), ("1.5E+2", 150.0), (3, 3.0)):
        assert from_dict(OptimizerConfig, {"lr": text}).lr == number
    for value in ("1_000", "0x10", "1e-3x", "one", True, None, [1e-3]):
        with pytest.raises(ConfigError, match=r"^lr="):
            from_dict(OptimizerConfig, {"lr": value})
