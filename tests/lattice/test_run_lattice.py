"""The lattice of runs: a few cheap points by default, the others before a release."""

import dataclasses
import re

import pytest

from minitx.config import TrainerConfig
from tests.lattice.engine import matches
from tests.lattice.runs import AXES, RUNS, Run

SEED = 0
QUICK = (
    "ends=crash_after optimizer=muon network=own start=init_from log_every=3 precision=bf16-true schedule=plateau asked=evaluated "
    "validation=end",
    "ends=nonfinite clip=.5 start=init_from log_every=3 data=drawn accumulate=3 objective=smoothed asked=top_k",
    "data=classify network=hf optimizer=sgd objective=smoothed precision=bf16-true schedule=plateau clip=.5 log_every=3 "
    "asked=evaluated ends=stop_at",
    "ends=crash_before data=chat accumulate=2 schedule=plateau start=folded log_every=3 asked=evaluated clip=.5 "
    "objective=smoothed option=all_rows optimizer=sgd",
    "ends=hup asked=early log_every=3",
)
"""Points of the default tier: cheap ones of a covering array. Written down, so that a new axis does not draw others."""

PARTS = 12
"""Tests into which the other points are divided."""

SLOW = 4
"""The part of the points without compiler that the slow tier has."""

PROCESSES = {"place": "!one|pretended"}

QUICK_OF_SEVERAL = (
    "place=ddp_cpu processes=2 ends=stop_at accumulate=2 data=noisy user=callback objective=own late=writing log_every=3",
)
"""Points of the default tier in one pair of processes."""

SLOW_OF_SEVERAL = (
    "place=fsdp processes=2 ends=nonfinite accumulate=2 clip=.5 rules=factor",
    "place=ddp_cpu processes=4 ends=stop_at accumulate=3 data=module objective=own asked=probe user=averager log_every=3",
    "place=fsdp processes=4 ends=usr1 data=drawn asked=early log_every=3 option=all_rows",
    "place=ddp_cpu processes=2 ends=term_first data=pairs asked=tested workers=2 dropout=yes user=logger late=writing",
    "place=fsdp processes=2 ends=crash_inside accumulate=3 data=padded asked=top_k user=averager rules=frozen precision=64-true",
    "place=ddp_cpu processes=4 ends=crash_after data=text asked=ema clip=.5 network=normed user=callback",
    "place=fsdp processes=2 ends=hup data=stream workers=2 validation=3",
    "place=fsdp_named processes=2 ends=usr2 network=normed accumulate=2 validation=3 late=reading",
    "place=ddp_unused processes=2 ends=int data=chat asked=samples accumulate=2 optimizer=sgd schedule=plateau option=monitor log_every=3",
)
"""Points of the slow tier in several processes: both strategies, a rank without rows or targets, ends of each kind."""

BESIDE = {
    "num_nodes": "several machines",
    "plugins": "objects for Lightning: tests/training/test_parts.py",
    "threads": "each run has one",
    "plan": "nothing is trained: tests/training/test_plan.py",
    "ckpt_every": "each run has checkpoints every two steps, and option=minutes after each step",
}
"""Fields of TrainerConfig that are on no axis."""


def points(several):
    """The points of other processes, or of this one."""
    return [point for point in RUNS.points(SEED) if matches(PROCESSES, point) == several]


@pytest.mark.parametrize("words", [*QUICK, *QUICK_OF_SEVERAL])
def test_a_cheap_point_has_every_property(words):
    point = RUNS.point_of(words)
    assert RUNS.serves(point)
    RUNS.check(point)


@pytest.mark.parametrize("words", ["optimizer=two_modes", "data=pairs files=torn"])
def test_a_refusal_that_costs_nothing_has_its_message(words):
    point = RUNS.point_of(words)
    assert RUNS.exists(point) and not RUNS.serves(point)
    RUNS.check(point)


@pytest.mark.slow
def test_a_part_of_the_points_of_one_process_has_every_property():
    assert_all([point for point in points(several=False) if point["compile"] == "no" and point["place"] == "one"][SLOW::PARTS])


@pytest.mark.slow
@pytest.mark.parametrize("words", SLOW_OF_SEVERAL)
def test_a_point_of_several_processes_has_every_property(words):
    test_a_cheap_point_has_every_property(words)


@pytest.mark.release
@pytest.mark.parametrize("part", range(PARTS))
def test_every_point_of_one_process_has_every_property(part):
    assert_all(points(several=False)[part::PARTS])


@pytest.mark.release
@pytest.mark.parametrize("part", range(PARTS))
def test_every_point_of_several_processes_has_every_property(part):
    assert_all(points(several=True)[part::PARTS])


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
    assert fields - on_axes <= BESIDE.keys(), (
        "add the option to the words of an axis in tests/lattice/runs.py, or to BESIDE with a reason"
    )
    assert BESIDE.keys() <= fields - on_axes, "a reason for a field that needs none"


def test_every_oracle_is_asked_at_enough_points():
    assert RUNS.seldom(SEED) == {}, RUNS.advice(SEED)


def test_the_plain_command_line_is_the_base_alone():
    words = Run(RUNS.plain).words()
    assert not [word for word in words if word.startswith(("init_from", "evaluation", "objective"))]
