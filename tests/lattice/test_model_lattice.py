"""Every promise about models, at points where two unusual things meet. ``python tests/lattice/models.py`` runs one point again."""

import dataclasses
import random
import typing

import pytest
import torch

from minitx.config import TransformerConfig
from tests.lattice.engine import matches
from tests.lattice.models import AXES, MODELS
from tests.lattice.networks import CHANGES, FAMILIES, OURS, SIZES, Subject, joined, options_of, refused_by_tables

SEED = 61
QUICK, SLOW = 20, 120
PARTS = 4  # tests into which the changes of a model alone are divided
SLOW_TO_START = {"wrapper": "lora|quantised|compile|inductor"}
RELEASE = ({"model": joined(FAMILIES)}, {"wrapper": "inductor|ddp|fsdp"})

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of torch and transformers about wrappers, of ours about padding that a model counts
]


def tiers():
    """The points of the suite's seed: the quick ones, those of the slow tier, and those of the release tier.

    Quick and slow ones are drawn from our own models under wrappers that cost little. Points that are refused cost nothing.
    """
    points = MODELS.points(SEED)
    own = [point for point in points if not any(matches(where, point) for where in RELEASE)]
    refused = [point for point in own if not MODELS.serves(point)]
    cheap = [point for point in own if MODELS.serves(point) and not matches(SLOW_TO_START, point)]
    random.Random(SEED).shuffle(cheap)
    quick, slow = cheap[:QUICK], cheap[QUICK : QUICK + SLOW] + refused
    return quick, slow, [point for point in points if point not in quick and point not in slow]


QUICK_POINTS, SLOW_POINTS, RELEASE_POINTS = tiers()


OF_OTHERS = MODELS.point_of("model=hf_per_head mode=train rows=left look=residual")
"""A model of transformers for the default tier, whose norms of queries and keys have two axes."""


@pytest.mark.parametrize("point", [*QUICK_POINTS, OF_OTHERS], ids=MODELS.words)
def test_a_model_has_all_properties_wherever_two_options_meet(point):
    MODELS.check(point)


@pytest.mark.slow
@pytest.mark.parametrize("point", SLOW_POINTS, ids=MODELS.words)
def test_each_pair_of_options_of_our_models_keeps_all_properties(point):
    MODELS.check(point)


@pytest.mark.release
@pytest.mark.parametrize("point", RELEASE_POINTS, ids=MODELS.words)
def test_each_pair_of_options_keeps_all_properties(point, process_group):
    MODELS.check(point)


@pytest.mark.release
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", OURS)
def test_every_change_of_a_model_alone_keeps_all_properties(name, part):
    costly = (SLOW_TO_START, *RELEASE)
    points = [
        point for point in MODELS.pairs() if point["model"] == name and not any(matches(where, point) for where in costly)
    ]
    for point in points[part::PARTS]:
        MODELS.check(point)


def test_each_oracle_is_asked_often():
    assert MODELS.seldom(SEED) == {}, MODELS.advice(SEED)


def test_every_entry_of_the_tables_meets_a_point():
    points = [*MODELS.points(SEED), *MODELS.pairs()]
    served = [point for point in points if MODELS.serves(point)]
    for oracle in MODELS.oracles:
        asked = [point for point in served if not oracle.where or any(matches(where, point) for where in oracle.where)]
        unused = [where for where in oracle.where if not any(matches(where, point) for point in served)]
        unused += [where for where in oracle.unless if not any(matches(where, point) for point in asked)]
        assert unused == [], oracle.name
    assert [entry.where for entry in MODELS.refusals if not any(matches(entry.where, point) for point in points)] == []


ON_AN_AXIS = {"backend", "checkpointing", "dropout"}
NOT_HERE = {
    "pad_id": "belongs to the data",
    "bos_id": "begins a target in generation, and models are given one here",
    "eos_id": "ends a text in generation, and texts have a fixed length here",
    "init_zero_outputs": "an initial value, and all values that start alike are drawn anew here",
}


def test_every_option_of_a_model_is_on_an_axis_or_in_a_named_configuration():
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    named = [entry for options in (SIZES, *OURS.values(), *CHANGES.values()) for entry in options.items()]
    set_somewhere = {name for name, value in named if value != defaults[name]}
    missing = defaults.keys() - set_somewhere - ON_AN_AXIS - NOT_HERE.keys()
    assert missing == set(), "add these fields to a configuration of OURS or to CHANGES in tests/lattice/networks.py"
    assert not (set_somewhere | ON_AN_AXIS) & NOT_HERE.keys()
    assert ON_AN_AXIS - {"dropout"} <= AXES.keys()


UNREAD = "{} has no effect: a line of minitx/nn/layers.py must read the field, with values for which it matters"


def differ(one, other):
    """Whether two models have other parameters, or another answer with the same random numbers."""
    one, other = Subject(one), Subject(other)
    shapes, others = ({name: p.shape for name, p in s.model.named_parameters()} for s in (one, other))
    return shapes != others or not torch.equal(one.answer(one.inputs()), other.answer(other.inputs()))


@pytest.mark.parametrize("change", [change for change in CHANGES if change != "nothing"])
def test_a_change_of_a_model_changes_it(change):
    assert differ(MODELS.plain, MODELS.plain | {"change": change}), UNREAD.format(change)


NEEDED = {"num_labels", "num_slots", "num_buckets", "image_size", "num_channels", "rotary_original_len", "vocab_size"}
"""Fields without which a configuration that sets them cannot be built."""


@pytest.mark.parametrize("name", OURS)
def test_each_option_of_a_named_configuration_has_an_effect(name, monkeypatch):
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    for option, value in OURS[name].items():
        monkeypatch.setitem(CHANGES, without := f"without {option}", {option: defaults[option]})
        point = MODELS.plain | {"model": name, "mode": "train" if option == "stochastic_depth" else "eval"}
        if value == defaults[option] or option in NEEDED or refused_by_tables(options_of(point | {"change": without})):
            continue
        assert differ(point, point | {"change": without}), UNREAD.format(option)


def literals(hint):
    """The values of each ``Literal`` in a type."""
    parts = typing.get_args(hint)
    return set(parts) if typing.get_origin(hint) is typing.Literal else set().union(*map(literals, parts))


def test_every_word_that_an_option_of_a_model_takes_is_in_a_named_configuration():
    hints = typing.get_type_hints(TransformerConfig)
    missing = {
        (field.name, word)
        for field in dataclasses.fields(TransformerConfig)
        for word in literals(hints[field.name]) - {field.default}
        if field.name not in ON_AN_AXIS | NOT_HERE.keys() | {"init"}  # all weights are drawn anew here
        and all(options.get(field.name) != word for options in (*OURS.values(), *CHANGES.values()))
    }
    assert missing == set(), "add these values to a configuration of OURS or to CHANGES in tests/lattice/networks.py"
