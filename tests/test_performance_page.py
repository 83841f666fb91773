"""docs/dev/performance.md says what the recorded files say."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def report():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import report
    finally:
        sys.path.remove(str(BENCHMARKS))
    return report


@pytest.fixture
def rows():
    """Rows as ``report.read`` gives them."""
    run = {"hardware": "a box, 2 cores", "threads": 2, "versions": {"torch": "2"}, "date": "2026-01-02", "commit": "abc"}
    common = {"target": "P4", "label": "small", "run": {**run, "command": "python benchmarks/step.py"}}
    return [
        {**common, "what": "kept", "median": 1.4, "low": 1.3, "high": 1.5, "wanted": ">= 1.2"},
        {**common, "what": "broken", "median": 1.1, "low": 1.0, "high": 1.15, "wanted": "<= 1.1"},
        {**common, "what": "beside", "median": 0.003, "low": 0.003, "high": 0.003, "wanted": None},
    ]


def test_the_committed_page_is_what_the_recorded_files_give(report):
    for path, new in report.pages(report.read()).items():
        text = path.read_text(encoding="utf-8")
        assert text == report.between(text, new), "run python benchmarks/report.py"


def test_every_target_has_a_line_and_those_without_a_record_say_so(report, rows):
    lines = report.table(rows).splitlines()[2:-2]
    targets = [target for target in report.TARGETS for _ in range(3 if target == "P4" else 1)]
    assert [line.split(" | ")[0] for line in lines] == [f"| {target}" for target in targets]
    assert ["not recorded yet" in line for line in lines] == [target != "P4" for target in targets]


def test_a_row_says_met_or_missed_and_one_that_nothing_was_wanted_of_says_neither(report, rows):
    page = report.table(rows)
    assert "| kept | small | 1.400 (1.300 to 1.500) | ≥ 1.2 | met |" in page
    assert "| broken | small | 1.100 (1.000 to 1.150) | ≤ 1.1 | missed |" in page
    assert "| beside | small | 0.003 |  |  |" in page
    assert "1. `python benchmarks/step.py`: a box, 2 cores, 2 threads, torch 2; 2026-01-02, commit abc\n" in page


def test_the_readme_has_the_rows_farthest_above_and_below_what_was_wanted(report, rows):
    text = report.between(f"above\n{report.BEGIN}old\n{report.END}\nbelow\n", report.headlines(rows))
    assert "old" not in text and text.startswith("above\n") and text.endswith("\nbelow\n")
    assert "| a step under the trainer over a raw loop | broken; small | 1.100 (1.000 to 1.150) | ≤ 1.1, missed |" in text
    others = [{**rows[1], "target": f"P{n}", "median": 1.1 + n / 10, "what": f"r{n}"} for n in (5, 6, 7)]
    lines = report.headlines([*rows, *others], "zh").splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["kept; small", "r7; small", "r6; small"]
    assert lines[1].endswith("| 1.800 (1.000 ～ 1.150) | ≤ 1.1, 未达到 |")
