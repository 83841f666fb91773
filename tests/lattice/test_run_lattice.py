"""The lattice of runs: a few cheap points by default, the others in the slow tier, two processes before a release."""

import dataclasses
import random
import re

import pytest

from minitx.config import TrainerConfig
from tests.lattice.engine import FEWEST, matches
from tests.lattice.runs import AXES, RUNS, Run

SEED = 0
QUICK = 5
"""Points of the default tier."""

PARTS = 12
"""Tests into which the slow points are divided."""

COSTLY = ({"workers": "2|spawn"}, {"compile": "yes"}, {"network": "hf|lora"}, {"data": "pictures"})
PROCESSES = {"place": "ddp_cpu|fsdp"}

BESIDE = {
    "num_nodes": "several machines",
    "accelerator": "the device: tests/training/test_accelerator.py",
    "shard": "names of classes: tests/training/test_devices.py",
    "plugins": "objects for Lightning: tests/training/test_parts.py",
    "threads": "each run has one",
    "ckpt_every": "each run has checkpoints every two steps, and option=minutes after each step",
}
"""Fields of TrainerConfig that are on no axis."""


def points(tier):
    """The points of a tier: quick, slow or processes."""
    served = RUNS.points(SEED)
    several = [point for point in served if matches(PROCESSES, point)]
    one = [point for point in served if point not in several]
    cheap = [point for point in one if RUNS.serves(point) and not any(matches(where, point) for where in COSTLY)]
    quick = random.Random(SEED).sample(cheap, QUICK)
    return {"quick": quick, "slow": [point for point in one if point not in quick], "processes": several}[tier]


@pytest.mark.parametrize("number", range(QUICK))
def test_a_cheap_point_has_every_property(number):
    RUNS.check(points("quick")[number])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_point_of_one_process_has_every_property(part):
    assert_all(points("slow")[part::PARTS])


@pytest.mark.release
@pytest.mark.parametrize("part", range(PARTS))
def test_every_point_of_two_processes_has_every_property(part):
    assert_all(points("processes")[part::PARTS])


def assert_all(some):
    failures = []
    for point in some:
        try:
            RUNS.check(point)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n".join(failures)


def test_every_field_of_the_trainer_is_on_an_axis_or_has_a_reason_why_not():
    words = " ".join(word for values in AXES.values() for word in values.values())
    on_axes = set(re.findall(r"trainer\.(\w+)", words))
    fields = {field.name for field in dataclasses.fields(TrainerConfig)}
    assert on_axes <= fields
    assert fields - on_axes <= BESIDE.keys(), "an option of the trainer is on no axis"
    assert BESIDE.keys() <= fields - on_axes, "a reason for a field that needs none"


def test_every_oracle_is_asked_at_enough_points():
    few = {name: count for name, count in RUNS.asked(RUNS.points(SEED)).items() if count < FEWEST}
    assert not few


def test_the_plain_command_line_is_the_base_alone():
    words = Run(RUNS.plain).words()
    assert not [word for word in words if word.startswith(("init_from", "evaluation", "objective"))]
