"""Config dataclasses: what they take, what they refuse, and by which key."""

from __future__ import annotations

import json
import pickle
import re
from typing import Literal

import pytest

from minitx.config import ConfigError, Part, TransformerConfig, evaluate_factor, from_dict, node, to_dict
from minitx.config.part import Takes, defaults
from minitx.config.schema import Count, check_choice, read_call, takes_fields_of
from minitx.config.training import NODES, ParameterRule, RunConfig, StopAtConfig, TrainerConfig
from minitx.training.samples import SamplesOptions

SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}
LINEAR = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}


def test_a_config_survives_the_way_through_plain_data():
    config = RunConfig(
        model={"_target_": "minitx.nn.build_model", "scale": 0.5, "num_heads": 8, "qk_norm": "rms"},
        data={"_target_": "minitx.data.kv_lookup", "num_pairs": 5},
        optimizer={
            "_target_": "minitx.training.optimizers.adamw",
            "rules": [to_dict(ParameterRule(match="q_proj", lr="head_dim^-0.25"))],
        },
        trainer=TrainerConfig(stop_at=StopAtConfig(value=0.5), plugins=(LINEAR,), extra={"detect_anomaly": True}),
        callbacks={"mine": {"_target_": "lightning.pytorch.callbacks.Timer"}, "off": None},
        logger={"wandb": {"_target_": "lightning.pytorch.loggers.WandbLogger", "tags": ["a"]}},
        schedule={"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 3},
    )
    plain = json.loads(json.dumps(to_dict(config)))
    assert plain["callbacks"]["mine"] == {"_target_": "lightning.pytorch.callbacks.Timer"}
    assert from_dict(RunConfig, plain) == config
    assert pickle.loads(pickle.dumps(config)) == config  # it is sent to workers of a grid


@pytest.mark.parametrize(("make", "said"), [
    (lambda: TrainerConfig(max_steps="sixty"), "max_steps=sixty must be a whole number, got str"),
    (lambda: TrainerConfig(overfit="no"), "overfit=no must be true or false"),
    (lambda: RunConfig(model="net"), "model=net must be a group of keys"),
    (lambda: RunConfig(trainer=3), "trainer=3 must be a group of keys"),
    (lambda: RunConfig(imports="mine"), "imports=mine must be a list"),
    (lambda: TransformerConfig(qk_norm="rmss"), "qk_norm=rmss .*did you mean rms"),
    (lambda: TransformerConfig(attention=None), "attention=None is not allowed"),
    (lambda: TransformerConfig(scale=True), "scale=true must be one of inv_sqrt"),
])  # fmt: skip
def test_a_value_of_another_type_or_a_word_that_its_field_does_not_know_is_named_from_python_too(make, said):
    TransformerConfig(qk_norm=None, attention={"_target_": "torch.nn.Identity"})
    with pytest.raises(ConfigError, match=f"^{said}"):
        make()


@pytest.mark.parametrize("group", NODES)
def test_a_node_of_a_run_becomes_a_part_with_its_path_and_its_target(group):
    part = getattr(from_dict(RunConfig, {group: {"_target_": "builtins.dict", "config": 3}}), group)
    assert (part.path, part.name, part.target, part.get("config")) == (group, "builtins.dict", dict, 3)
    with pytest.raises(ConfigError, match=f"^{group} has no _target_"):
        from_dict(RunConfig, {group: {"target": "torch.optim.SGD"}})


class Shape(TransformerConfig):
    """Stands for a config whose fields are the keys of a node."""


@takes_fields_of(Shape)
def of_shape(shape, core=None):
    """Takes a dataclass first."""


def test_a_target_may_take_the_fields_of_a_dataclass():
    made = node(of_shape, embed_dim=12, num_heads=3)
    assert (made.name, made.target, made.arguments) == (f"{__name__}.of_shape", of_shape, {"embed_dim": 12, "num_heads": 3})
    assert Part.from_plain(made, "model").fields == Shape(embed_dim=12, num_heads=3)
    assert read_call(of_shape, {"embed_dim": 12, "num_heads": 3}) == {"shape": Shape(embed_dim=12, num_heads=3)}
    assert defaults(of_shape)["embed_dim"] == TransformerConfig().embed_dim
    with pytest.raises(ConfigError, match=r"^model.num_head is not a key \(did you mean model.num_heads\?\)"):
        read_call(of_shape, {"num_head": 2}, "model.")


def test_a_node_names_the_shortest_module_that_has_its_target():
    assert node(from_dict).name == "minitx.config.from_dict"
    assert node(read_call).name == "minitx.config.schema.read_call"
    assert node(from_dict, rule=ParameterRule(match="a")).plain()["rule"]["match"] == "a"


def scaled(values, seed: int = 7, *, by: Count = 2, kind: Literal["a", "b"] = "a"):
    """Stands for a part."""
    return [by * value for value in values], seed, kind


def test_a_part_is_built_with_what_the_run_offers_to_the_arguments_that_it_names():
    part = Part.from_plain(node(scaled, by=3), "data", Takes(first=1, offers=("seed", "size")))
    assert part.build([1, 2], seed=5, size=4) == ([3, 6], 5, "a")
    assert part.with_(seed=1).build([1], seed=5) == ([3], 1, "a")  # the config comes before the run
    assert part.plain() == {"_target_": f"{__name__}.scaled", "by": 3, "kind": "a"}  # the seed is the run's
    assert part == Part.from_plain(node(scaled, by=3.0, kind="a"), "other", Takes(first=1)) != part.with_(kind="b")
    assert part.differences({"_target_": f"{__name__}.scaled", "by": 4}) == ["data.by 4 != 3"]
    with pytest.raises(ConfigError, match=r"^data\.by=x must be a whole number"):
        part.with_(by="x")


def test_a_function_of_python_without_a_name_in_a_module_is_a_part_too():
    part = node(lambda size, *, inner=None: (size, inner), inner=node(lambda: 5))
    assert Part.from_plain(part.with_(size=4), "data").build() == part.build(size=4) == (4, 5)


def test_a_bug_of_a_target_is_told_with_how_to_find_it_and_a_wrong_argument_without():
    def broken(size):
        return sise + size  # noqa: F821

    def strict(size):
        raise ValueError(f"size={size} is odd")

    for target, said in (
        (broken, "NameError: name 'sise' is not defined (traceback=true shows where)"),
        (strict, "size=3 is odd"),
    ):
        part = Part.from_plain(node(target, size=3), "data")
        with pytest.raises(ConfigError, match=re.escape(f"cannot be built: {said}") + "$"):
            part.build()


def test_a_part_may_be_a_partial_function_and_take_arguments_by_position():
    nodes = {"_target_": "builtins.list", "_args_": [[{"_target_": "functools.reduce", "_partial_": True, "_args_": [max]}]]}
    (made,) = Part.of(nodes, "data").build()
    assert made([3, 7, 5]) == 7


def test_defaults_that_depend_on_other_fields():
    config = TransformerConfig(embed_dim=96, num_heads=6)
    assert (config.width_per_head, config.kv_heads, config.ffn_width) == (16, 6, 384)
    gated = TransformerConfig(embed_dim=100, num_heads=4, activation="swiglu", head_dim=7, num_kv_heads=2)
    assert (gated.width_per_head, gated.kv_heads, gated.ffn_width) == (7, 2, 272)  # 8 · ⌈100 / 3⌉
    assert TransformerConfig(embed_dim=7, num_heads=3, head_dim=5).width_per_head == 5


FITS = {
    "trainer": {"max_steps": 5, "accumulate": 3, "devices": 4, "strategy": "sharded", "plugins": [LINEAR]},
    "callbacks": {"probe": {"every": 3}, "mine": LINEAR, "off": None},
    "logger": {"a": LINEAR, "b": None},
}


@pytest.mark.parametrize(("group", "changed", "key"), [
    ("callbacks", {"prob": {"every": 3}}, "callbacks.prob .*callbacks.probe"),
    ("trainer", {"stop_at": {"valu": 1}}, r"^trainer.stop_at.valu is not a key \(did you mean trainer.stop_at.value\?\)$"),
    ("callbacks", {"mine": 3}, "callbacks.mine=3"),
    ("trainer", {"plugins": [{"a": 1}]}, r"trainer.plugins\[0\]"),
    ("init_from", {"fold_scale": True}, "^init_from.fold_scale=true needs init_from.path"),
    ("init_from", {"overrides": {"a": 1}}, "^init_from.overrides={'a': 1} needs init_from.path"),
    ("init_from", {"ignore": ["a"]}, "^init_from.ignore=.* needs init_from.path"),
    ("trainer", {"shard": ["Block"], "strategy": "ddp"}, "^trainer.shard=.* belongs to strategy=sharded, got strategy=ddp"),
])  # fmt: skip
def test_what_does_not_fit_together_is_named_by_its_key(group, changed, key):
    from_dict(RunConfig, FITS)
    with pytest.raises(ConfigError, match=key):
        from_dict(RunConfig, {**FITS, group: {**FITS.get(group, {}), **changed}})


@pytest.mark.parametrize(("given", "said"), [
    ({"rotary_base": 500.0}, "rotary_base=500.0 belongs to position=rotary, got position=learned"),
    ({"position": "rotary", "num_buckets": 8}, "num_buckets=8 belongs to position=t5"),
    ({"position": "rotary", "position_offset": 2}, "position_offset=2 belongs to position=learned or sinusoidal"),
    ({"position": "rotary", "rotary_low": 2.0}, "rotary_low=2.0 belongs to rotary_scaling=yarn or llama3"),
    ({"num_features": 7}, "num_features=7 belongs to attention=performer, got attention=exact"),
    ({"attention": "additive", "backend": "math"}, "backend=math belongs to attention=exact"),
    ({"qk_norm_eps": 0.1}, "qk_norm_eps=0.1 belongs to qk_norm=rms or layer or l2, got qk_norm=null"),
    ({"architecture": "encoder", "scale_logits": True}, "scale_logits=true belongs to architecture=decoder"),
    ({"patch_size": 4}, "patch_size=4 belongs to architecture=vision"),
])  # fmt: skip
def test_a_field_of_a_model_that_would_have_no_effect_is_refused(given, said):
    with pytest.raises(ConfigError, match=f"^{said}"):
        TransformerConfig(**given)


def test_a_factor_is_a_number_or_a_power_of_the_heads_width_and_no_expression():
    for factor, value in ((2, 2.0), ("head_dim^0.5", 4.0), ("head_dim^-1", 1 / 16), (" head_dim^2 ", 256.0)):
        assert evaluate_factor(factor, head_dim=16) == value
    for factor in ("head_dim", "2*head_dim", "__import__('os')", "head_dim^1e3", ""):
        with pytest.raises(ConfigError, match="factor="):
            evaluate_factor(factor, head_dim=16)


def own_part(first, *, size: Count, rate: float = 0.5, kind: Literal["big", "small"] = "big", sides: tuple[int, ...] = (1, 2),
             name: str | None = None, inside: object = None, anything=None):  # fmt: skip
    """A function of a user's own."""


class OwnClass:
    size: str  # of the class, and not of its arguments

    def __init__(self, size: int = 3) -> None: ...


@pytest.mark.parametrize(("given", "said"), [
    ({"size": 3, "weather": 1}, "data.weather is not a key; allowed here: size, rate, kind"),
    ({"size": 3, "kind": "bigg"}, "data.kind=bigg is not allowed: one of big, small (did you mean big?)"),
    ({"size": 3, "sides": [1, "a"]}, "data.sides[1]=a must be a whole number, got str"),
    ({"size": 3, "name": 4}, "data.name=4 must be a word, got int"),
])  # fmt: skip
def test_the_signature_of_a_users_function_is_read_as_a_config_is(given, said):
    with pytest.raises(ConfigError) as refused:
        read_call(own_part, given, "data.", positional=1)
    assert str(refused.value).startswith(said)


def test_arguments_are_converted_by_the_hints_and_left_alone_where_there_are_none():
    node = {"_target_": "torch.nn.Linear"}
    given = {"size": 3.0, "rate": "1e-3", "sides": [5, 7], "inside": node, "anything": {"a": 1}}
    assert read_call(own_part, given, positional=1) == {**given, "size": 3, "rate": 1e-3, "sides": (5, 7)}
    assert read_call(own_part, {}, positional=1, offers=["size"]) == {}
    assert read_call(OwnClass, {"size": 5}) == {"size": 5}
    assert read_call(lambda **rest: None, {"any": 3}) == {"any": 3}
    assert read_call(max, {"any": 3}) == {"any": 3}  # without a signature
    with pytest.raises(ConfigError, match=r"^size=x"):
        read_call(OwnClass, {"size": "x"})


def test_numbers_that_yaml_reads_as_words_are_numbers_and_nothing_else_is():
    for text, number in (("1e-3", 1e-3), ("1.5E+2", 150.0), (3, 3.0)):
        assert from_dict(SamplesOptions, {"temperature": text}).temperature == number
    for value in ("1_000", "0x10", "1e-3x", "one", True, None, [1e-3]):
        with pytest.raises(ConfigError, match=r"^temperature="):
            from_dict(SamplesOptions, {"temperature": value})


def test_the_allowed_values_of_a_choice_may_be_an_iterator():
    check_choice("name", "b", iter("ab"))
    with pytest.raises(ConfigError, match=r"^name=c is not allowed: one of a, b$"):
        check_choice("name", "c", iter("ab"))


@pytest.mark.parametrize("value", ["abc", None, [1], {"a": 1}, 1.5])
def test_a_value_of_no_type_of_a_union_is_refused_with_what_its_bound_allows(value):
    node = {"_target_": NODES["schedule"], "warmup_steps": value}
    with pytest.raises(ConfigError, match=r"^schedule\.warmup_steps=.* must be a whole number of steps, or a share"):
        from_dict(RunConfig, {"schedule": node})
    assert from_dict(RunConfig, {"schedule": {**node, "warmup_steps": "0.5"}}).schedule.get("warmup_steps") == 0.5
