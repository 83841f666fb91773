"""Attention at the points of its lattice: ``calls.py`` has the axes and the oracles."""

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from minitx import nn as mx
from tests import pretend
from tests.lattice import calls
from tests.lattice.calls import CALLS, COMPILES
from tests.lattice.engine import FEWEST, Point, matches

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in calls.WARNINGS]
SEED = 0
ALL = {CALLS.words(point): point for point in CALLS.points(SEED)}
ALONE = {CALLS.words(point): point for point in CALLS.pairs() if not matches(COMPILES, point)}
BASIC = ("backend", "dtype", "causal", "heads", "scale", "dropout", "around")
SQUARE = {"causal": "yes", "shape": "5x5"}  # torch's kernels have a flag for it, and no mask
TILES = {"backend": "chunked", "tiles": "2x2"}


def basic_points() -> Iterator[Point]:
    """A backend beside another value of ``BASIC``, in a plain and in a square causal call, and small tiles beside any other value."""
    for point in CALLS.pairs():
        if point["backend"] != CALLS.plain["backend"] and point == CALLS.plain | {axis: point[axis] for axis in BASIC}:
            yield from (point, point | SQUARE)
    yield from (
        CALLS.plain | TILES | {axis: value} for axis, values in CALLS.axes.items() if axis not in TILES for value in values
    )


BASICS = {CALLS.words(point): point for point in basic_points() if CALLS.serves(point) and not matches(COMPILES, point)}
KERNELS = {CALLS.words(point): point for name in ("sdpa", "chunked") for point in CALLS.pairs(backend=name)}
EVERY = ALL | ALONE | KERNELS | BASICS
TRACED = {"backend": "flex"}  # torch's tracer runs at each call, which takes longer than all oracles
EAGER = [words for words, point in ALL.items() if not matches(COMPILES, point) and not matches(TRACED, point)]
QUICK = list(dict.fromkeys([*BASICS, *EAGER[2::4]]))
"""The basic points, and each fourth of the array without flex. The release tier has the rest, and the compilers."""


@pytest.mark.parametrize("words", QUICK, ids=str)
def test_a_call_keeps_every_promise(words):
    CALLS.check(EVERY[words])


@pytest.mark.release
@pytest.mark.parametrize("words", [words for words in ALL if words not in QUICK], ids=str)
def test_a_call_keeps_every_promise_with_all_pairs_of_values_and_compiled(words):
    CALLS.check(EVERY[words])


@pytest.mark.release
@pytest.mark.parametrize("words", [words for words in ALONE if words not in ALL and words not in QUICK], ids=str)
def test_two_values_keep_every_promise_where_all_else_is_plain(words):
    CALLS.check(EVERY[words])


def on_an_accelerator(*options):
    """Run the program on the pretended accelerator, in a process of its own."""
    command = [sys.executable, calls.__file__, f"--seed={SEED}", *options]
    done = subprocess.run(command, env={**os.environ, "DEVICE": pretend.NAME}, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pretend.is_needed
@pytest.mark.slow
def test_calls_keep_every_promise_on_an_accelerator():
    on_an_accelerator()


@pretend.is_needed
@pytest.mark.release
def test_two_values_keep_every_promise_on_an_accelerator_where_all_else_is_plain():
    on_an_accelerator("--pairs")


def test_each_oracle_is_asked_at_enough_points():
    counts = CALLS.asked(EVERY[words] for words in QUICK)
    assert min(counts.values()) >= FEWEST, counts


def test_each_entry_of_the_tables_matches_a_point():
    for refusal in CALLS.refusals:
        assert any(matches(refusal.where, point) for point in ALL.values()), refusal
    for oracle in CALLS.oracles:
        for where in (*oracle.where, *oracle.unless):
            assert any(matches(where, point) for point in ALL.values()), (oracle.name, where)


def test_every_backend_mask_bias_and_argument_is_on_an_axis():
    assert set(mx.backend_names()) < set(CALLS.axes["backend"])
    call = calls.Call(CALLS.plain)

    def classes(rule):
        members = getattr(rule, "members", ())
        return {type(rule)}.union(*map(classes, members))

    exported = {getattr(mx, name) for name in mx.__all__}
    for base, made in (
        (mx.Mask, [build(call) for build in calls.MASKS.values()]),
        (mx.Bias, [build(call, call.dtype) for build in calls.BIASES.values()]),
    ):
        wanted = {kind for kind in exported if isinstance(kind, type) and issubclass(kind, base) and kind is not base}
        assert wanted <= set().union(*map(classes, made)), wanted
    arguments = {
        **dict.fromkeys(("query", "key", "value"), ("dtype", "heads", "shape", "width", "layout")),
        **{"attn_mask": ("mask",), "dropout_p": ("dropout",), "is_causal": ("causal",), "attn_bias": ("bias",)},
        **{name: (name,) for name in ("scale", "softcap", "sinks", "backend")},
        "need_weights": (),  # two oracles ask for them
    }
    assert set(arguments) == set(inspect.signature(mx.scaled_dot_product_attention).parameters)
    assert {axis for axes in arguments.values() for axis in axes} == set(CALLS.axes) - {"tiles", "around"}
