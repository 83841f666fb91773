"""The arithmetic behind the benchmarks, without a stop-watch: what a ratio, its interval and its control are."""

import importlib
import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def load():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))


def seconds(a, b, pairs, drift=0.0):
    """Blocks of a machine that needs ``a`` and ``b`` seconds and becomes slower by ``drift`` a block."""
    sides = [side for index in range(pairs // 2) for side in ((0, 1, 1, 0) if index % 2 == 0 else (1, 0, 0, 1))]
    return [(side, (a, b)[side] * (1.0 + drift * i)) for i, side in enumerate(sides)]


def test_the_ratio_is_the_first_sides_seconds_over_the_seconds_and_the_control_is_one(load):
    found = load("measure").compared(seconds(3.0, 1.5, 20))
    assert found["pairs"] == 20
    assert found["ratio"] == pytest.approx({"median": 2.0, "low": 2.0, "high": 2.0})
    assert found["control"] == pytest.approx({"median": 1.0, "low": 1.0, "high": 1.0})
    assert (found["a_seconds"], found["b_seconds"]) == (3.0, 1.5)


def test_a_machine_that_slows_down_does_not_move_the_ratio_away_from_the_truth(load):
    found = load("measure").compared(seconds(3.0, 1.5, 40, drift=0.01))
    assert found["ratio"]["low"] <= 2.0 <= found["ratio"]["high"]
    assert found["control_holds"]


def test_a_control_that_one_side_always_wins_does_not_hold(load):
    blocks = seconds(1.0, 1.0, 40)
    for first in range(0, len(blocks), 4):  # of the two blocks of A in four, the one that the control divides
        own = [i for i in range(first, first + 4) if blocks[i][0] == 0]
        slow = own[0] if first // 4 % 4 < 2 else own[1]
        blocks[slow] = (0, 1.3)
    found = load("measure").compared(blocks)
    assert found["control"]["median"] == pytest.approx(1.3) and not found["control_holds"]


def test_both_sides_take_their_turns_in_blocks_that_last_long_enough(load, monkeypatch):
    measure = load("measure")
    clock, calls = [0.0], []

    def work(side, takes):
        def run():
            calls.append(side)
            clock[0] += takes

        return run

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    found = measure.compare(work("a", 0.25), work("b", 0.125), pairs=4, block=0.5, warm=1)
    assert found["ratio"]["median"] == pytest.approx(2.0)
    warm, blocks = calls[:4], calls[4:]
    assert sorted(warm) == ["a", "a", "b", "b"]  # to warm up, and to see how long one call takes
    assert ["".join(group) for _, group in itertools.groupby(blocks)] == ["aa", "b" * 8, "aa" + "", "b" * 4, "aaaa", "b" * 4]


@pytest.mark.parametrize(
    ("wanted", "met"), [(">= 1.25", True), (">= 1.35", False), ("<= 1.55", True), ("<= 1.45", False), (None, None)]
)
def test_a_target_counts_as_met_when_the_whole_interval_meets_it(load, wanted, met):
    row = load("measure").judged("speed", {"median": 1.4, "low": 1.3, "high": 1.5}, wanted)
    assert row.get("met") is met


def test_the_inverse_of_a_ratio_has_its_ends_in_order(load):
    found = load("measure").inverse({"median": 2.0, "low": 1.0, "high": 4.0})
    assert found == {"median": 0.5, "low": 0.25, "high": 1.0}


def test_tokens_to_a_loss_are_read_off_a_line_in_the_logarithm_of_tokens(load):
    def loss(tokens):
        return 5.0 - 0.3 * math.log(tokens)

    points = {tokens: loss(tokens) for tokens in (100_000, 300_000)}
    for wanted in (2e5, 9e5):  # between the two runs, and beyond the longer one
        assert load("measure").reached(loss(wanted), points) == pytest.approx(wanted)


def test_regret_is_measured_on_other_rounds_than_those_that_chose_the_best(load):
    regret = load("kernel_choice").regret
    lucky = [1.0, 1.0, 9.0, 9.0] * 5  # looks best in one half of the rounds, and only there
    ratios, best = regret("steady", {"steady": [2.0] * 20, "lucky": lucky})
    assert best == ["lucky", "steady"]
    assert sorted(set(ratios)) == [pytest.approx(2.0 / 9.0), 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_every_benchmark_imports_and_answers_help(name):
    """What imports a name that is gone fails here, not after an hour."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), "--help"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    if '__name__ == "__main__"' in (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8"):
        assert done.stdout.startswith("usage:")
