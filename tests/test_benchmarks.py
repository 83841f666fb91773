"""The arithmetic behind the benchmarks, without a stop-watch: what a ratio, its interval, its control and its verdict are; and their page."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pretend

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def load():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def harness(load):
    return load("harness")


def seconds(harness, a, b, pairs, drift=0.0):
    """Blocks of a machine that needs ``a`` and ``b`` seconds and becomes slower by ``drift`` a block."""
    return [(side, (a, b)[side] * (1.0 + drift * i)) for i, side in enumerate(harness.turns(pairs))]


def test_the_ratio_is_the_first_sides_seconds_over_the_seconds_and_the_control_is_one(harness):
    found = harness.compared(seconds(harness, 3.0, 1.5, 20))
    assert (found["pairs"], found["seconds"]) == (20, [3.0, 1.5])
    assert found["ratio"] == pytest.approx({"median": 2.0, "low": 2.0, "high": 2.0})
    assert found["control"] == pytest.approx({"median": 1.0, "low": 1.0, "high": 1.0})


def test_a_control_that_one_side_always_wins_does_not_hold(harness):
    blocks = seconds(harness, 1.0, 1.0, 40)
    for first in range(0, len(blocks), 4):  # of the two blocks of A in four, the one that the control divides
        own = [i for i in range(first, first + 4) if blocks[i][0] == 0]
        slow = own[0] if first // 4 % 4 < 2 else own[1]
        blocks[slow] = (0, 1.3)
    found = harness.row("P1", "ours over theirs", "small", harness.compared(blocks), ">= 1.0")
    assert found["control"]["median"] == pytest.approx(1.3) and not found["control_holds"]


def test_a_target_counts_as_met_when_the_whole_interval_meets_it(harness):
    verdicts = {">= 1.25": "met", ">= 1.35": "missed", "<= 1.55": "met", "<= 1.45": "missed", None: ""}
    found = {"median": 1.4, "low": 1.3, "high": 1.5}
    assert {wanted: harness.verdict(harness.row("P1", "speed", "", found, wanted)) for wanted in verdicts} == verdicts


def test_where_less_is_better_a_row_is_our_time_over_theirs(harness):
    found = harness.compared(seconds(harness, 1.0, 2.0, 4))
    medians = [harness.row("P4", "ours over theirs", "", found, wanted)["median"] for wanted in ("<= 3", ">= 3")]
    assert medians == pytest.approx([2.0, 0.5])
    assert harness.over(1.0, {"median": 2.0, "low": 1.0, "high": 4.0}) == {"median": 0.5, "low": 0.25, "high": 1.0}


def test_a_run_takes_the_place_of_older_rows_of_the_same_name_and_leaves_the_others(harness, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "ROOT", tmp_path)

    def rows(value, *labels):
        return [harness.row("P1", "speed", label, harness.exact(value), None) for label in labels]

    harness.write("step", rows(1.0, "small", "large"))
    harness.write("step", rows(2.0, "large"))
    runs = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))["runs"]
    assert [[(one["label"], one["median"]) for one in run["rows"]] for run in runs] == [[("small", 1.0)], [("large", 2.0)]]
    assert all({"hardware", "versions", "commit", "date", "command", "threads"} <= set(run) for run in runs)


def test_tokens_to_a_loss_are_read_off_a_line_in_the_logarithm_of_tokens(load):
    def loss(tokens):
        return 5.0 - 0.3 * math.log(tokens)

    points = {tokens: loss(tokens) for tokens in (100_000, 300_000)}
    for wanted in (2e5, 9e5):  # between the two runs, and beyond the longer one
        assert load("quality").reached(loss(wanted), points) == pytest.approx(wanted)


def test_a_target_that_a_program_does_not_measure_is_named_with_those_it_does(harness, capsys):
    parser = harness.parser("", ("P5", "P6"))
    assert (parser.parse_args([]).only, parser.parse_args(["--only", "P6"]).only) == (("P5", "P6"), ["P6"])
    with pytest.raises(SystemExit, match=r"^2$"):
        parser.parse_args(["--only", "P99"])
    said = capsys.readouterr().err
    assert "'P99'" in said and "P5" in said and "P6" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({path.stem for path in BENCHMARKS.glob("*.py")} - {"harness", "peers", "report"}))
def test_every_benchmark_imports_and_answers_help(name, load, monkeypatch, capsys):
    """What imports a name that is gone fails here, not after an hour."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        load(name).main()
    assert capsys.readouterr().out.startswith("usage:")


@pytest.mark.release
@pytest.mark.parametrize("device", ["cpu", pytest.param(pretend.NAME, marks=pretend.is_needed)])
def test_each_part_of_the_benchmark_of_a_gpu_runs(device):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--quick", "--pairs", "4"]
    done = subprocess.run(command, env={**os.environ, "DEVICE": device}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("# ")]
    assert parts == ["# calls", "# ceilings", "# P5", "# P8", "# P1 and P9", "# P4", "# P11", "# P6"]


def test_the_committed_page_is_what_the_recorded_files_give(load):
    report = load("report")
    text = report.PAGE.read_text(encoding="utf-8")
    assert text == report.between(text, report.table(report.read())), "run python benchmarks/report.py"


def test_settings_are_left_out_only_where_they_equal_those_of_the_line_above(load):
    run = {"hardware": "machine", "versions": {}, "command": "c", "threads": 1, "date": "d", "commit": "e"}
    row = {"target": "P5", "median": 2.0, "low": 2.0, "high": 2.0, "wanted": ">= 1.0", "run": run}
    slow = {"median": 0.5, "low": 0.5, "high": 0.5}
    rows = [{**row, "what": what, "label": label} for label in ("short", "long") for what in ("a", "b")]
    lines = load("report").table([*rows, {**row, **slow, "what": "c", "label": "long"}]).splitlines()
    a, b, c = (line for line in lines if line.startswith("| P5 "))
    assert a == "| P5 a, ≥ 1.0 | short: 2.000<br>long: 2.000 |"
    assert b == "| P5 b, ≥ 1.0 | 2.000<br>2.000 |"
    assert c == "| P5 c, ≥ 1.0 | long: 0.500, **missed** |"


def test_a_slow_first_call_makes_no_block_shorter(harness, monkeypatch):
    clock, calls = [0.0], []

    def work():
        calls.append(1)
        clock[0] += 0.01 if len(calls) > 1 else 0.2

    def other():
        clock[0] += 0.01

    monkeypatch.setattr(harness, "now", lambda: clock[0])
    harness.compare(work, other, pairs=2, block=0.1, warm=1)
    assert len(calls) > 20, "ten calls a block"
