"""Config dataclasses: what they refuse, and what they say."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from minitx.config import (
    AblationConfig,
    ConfigError,
    KeyValueDataConfig,
    OptimizerConfig,
    ParameterRule,
    RunConfig,
    ScheduleConfig,
    TextDataConfig,
    TrainerConfig,
    TransformerConfig,
    evaluate_factor,
    to_dict,
)
from minitx.config.checks import first_line
from minitx.config.schema import from_dict, unknown_key


def test_the_config_module_needs_the_standard_library_alone():
    code = "import sys, minitx.config, minitx.config.schema; print([m for m in ('torch', 'numpy', 'hydra', 'omegaconf') if m in sys.modules])"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TransformerConfig().scale = "unscaled"


def test_a_config_survives_the_way_through_plain_data():
    config = RunConfig(
        model=TransformerConfig(scale=0.5, num_heads=8, qk_norm="rms"),
        data=KeyValueDataConfig(num_pairs=5),
        optimizer=OptimizerConfig(rules=(ParameterRule(match="q_proj", lr="head_dim^-0.25"),), betas=(0.8, 0.9)),
        ablation=AblationConfig(arms={"a": ("seed=1",)}),
        logger={"wandb": {"_target_": "x", "tags": ["a"]}},
    )
    plain = json.loads(json.dumps(to_dict(config)))
    assert from_dict(RunConfig, plain) == config


@pytest.mark.parametrize("scale", ["inv_sqrt", "unscaled", "inv", "learned", "log_length", 1, 1.0, 0, -2.5])
def test_the_scale_is_a_word_or_a_number(scale):
    assert TransformerConfig(scale=scale).scale == scale


@pytest.mark.parametrize("scale", [None, "none", "null", "", "1", True, float("nan"), float("inf"), [1]])
def test_what_is_no_scale_is_refused(scale):
    with pytest.raises(ConfigError, match=r"scale=.* is not allowed: one of inv_sqrt"):
        TransformerConfig(scale=scale)


def test_none_gets_a_hint_because_it_must_not_be_confused():
    with pytest.raises(ConfigError, match="use 'unscaled' for no scaling"):
        TransformerConfig(scale=None)


def test_defaults_that_depend_on_other_fields():
    config = TransformerConfig(embed_dim=96, num_heads=6)
    assert (config.width_per_head, config.kv_heads, config.ffn_width) == (16, 6, 384)
    gated = TransformerConfig(embed_dim=100, num_heads=4, activation="swiglu", head_dim=7, num_kv_heads=2, ffn_dim=None)
    assert (gated.width_per_head, gated.kv_heads, gated.ffn_width) == (7, 2, 272)  # 8 · ⌈100 / 3⌉
    assert TransformerConfig(embed_dim=7, num_heads=3, head_dim=5).width_per_head == 5


def test_a_warm_up_as_long_as_the_run_is_allowed_and_one_step_more_is_not():
    RunConfig(schedule=ScheduleConfig(warmup_steps=5), trainer=TrainerConfig(max_steps=5))
    with pytest.raises(ConfigError, match=r"schedule.warmup_steps=6 must not exceed trainer.max_steps=5"):
        RunConfig(schedule=ScheduleConfig(warmup_steps=6), trainer=TrainerConfig(max_steps=5))


def test_the_batch_must_divide_among_micro_batches_and_devices():
    RunConfig(trainer=TrainerConfig(accumulate=3, devices=4))
    with pytest.raises(ConfigError, match=r"data.batch_size=12 must be divisible by trainer.accumulate=3 x trainer.devices=3"):
        RunConfig(trainer=TrainerConfig(accumulate=3, devices=3))


def test_rows_longer_than_the_position_table_are_refused_unless_positions_need_none():
    data = TextDataConfig(context_len=64)
    with pytest.raises(ConfigError, match=r"model.max_len=63 must reach the rows of the data, which have 64 tokens"):
        RunConfig(model=TransformerConfig(max_len=63), data=data)
    for position in ("rotary", "sinusoidal", "none"):
        RunConfig(model=TransformerConfig(max_len=63, position=position), data=data)
    with pytest.raises(ConfigError, match="17 tokens"):
        RunConfig(model=TransformerConfig(max_len=16), data=KeyValueDataConfig(num_pairs=16))


@pytest.mark.parametrize(
    ("factor", "value"), [(2, 2.0), ("head_dim^0.5", 4.0), ("head_dim^-1", 1 / 16), (" head_dim^2 ", 256.0)]
)
def test_factors(factor, value):
    assert evaluate_factor(factor, head_dim=16) == value


@pytest.mark.parametrize("factor", ["head_dim", "head_dim^", "2*head_dim", "d_k^2", "__import__('os')", "head_dim^1e3", ""])
def test_a_factor_is_no_expression(factor):
    with pytest.raises(ConfigError, match="must be a number or head_dim"):
        evaluate_factor(factor, head_dim=16)


def test_an_unknown_key_is_answered_with_its_neighbour():
    assert "did you mean model.num_heads?" in unknown_key(RunConfig, "model.num_head")
    assert "did you mean data.num_pairs?" in unknown_key(RunConfig, "data.num_pair") or "allowed here" in unknown_key(RunConfig, "data.num_pair")  # fmt: skip


@pytest.mark.parametrize(("text", "number"), [("1e-3", 1e-3), ("1.5E+2", 150.0), (3, 3.0)])
def test_numbers_that_yaml_reads_as_words_are_numbers(text, number):
    assert from_dict(OptimizerConfig, {"lr": text}).lr == number


@pytest.mark.parametrize("value", ["1_000", "0x10", "1e-3x", "one", True, None, [1e-3]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ConfigError, match=r"^lr="):
        from_dict(OptimizerConfig, {"lr": value})


def test_a_list_of_rules_is_checked_entry_by_entry():
    with pytest.raises(ConfigError, match=r"^optimizer\.rules\[1\]\.trainable=perhaps must be true or false"):
        from_dict(OptimizerConfig, {"rules": [{"match": "a"}, {"match": "b", "trainable": "perhaps"}]}, "optimizer.")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError(), "ValueError"),
        (ValueError(" \n"), "ValueError"),
        (RuntimeError("sizes differ:\n\tq_proj\nthird"), "sizes differ: q_proj"),
    ],
)
def test_an_error_is_told_in_one_line_also_where_it_says_nothing(error, line):
    assert first_line(error) == line
