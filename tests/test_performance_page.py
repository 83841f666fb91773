"""docs/dev/performance.md says what the recorded files say."""

import json
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
def result():
    """A file as ``measure.write`` leaves it."""
    rows = [
        {"name": "kept", "median": 1.4, "low": 1.3, "high": 1.5, "wanted": ">= 1.2", "met": True},
        {"name": "broken", "median": 1.1, "low": 1.0, "high": 1.15, "wanted": "<= 1.1", "met": False},
        {"name": "beside", "median": 0.003, "low": 0.003, "high": 0.003, "wanted": None},
    ]
    about = {
        "hardware": "a box, 2 cores",
        "versions": {"torch": "2"},
        "date": "2026-01-02",
        "command": "python benchmarks/a.py",
    }
    return {**about, "target": "P4", "title": "steps", "rows": rows}


def test_the_committed_page_is_what_the_recorded_files_give(report):
    assert report.PAGE.read_text(encoding="utf-8") == report.page(report.read()), "run python benchmarks/report.py"
    for language, path in report.READMES.items():
        text = path.read_text(encoding="utf-8")
        assert text == report.readme(text, report.read(), language), "run python benchmarks/report.py"


def test_every_target_has_a_line_and_those_without_a_file_are_not_measured(report, result):
    lines = report.summary([result]).splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == [f"| P{n}" for n in (1, 2, 3, 4, *range(4, 13))]  # P4 has two rows
    assert [line.endswith("| not measured |") for line in lines] == [True] * 3 + [False] * 2 + [True] * 8


def test_a_row_says_met_or_missed_and_one_that_nothing_was_wanted_of_says_neither(report, result):
    summary, whole = report.summary([result]), report.section(result)
    assert "| kept | 1.400 (1.300 to 1.500) | ≥ 1.2 | met |" in summary
    assert "| broken | 1.100 (1.000 to 1.150) | ≤ 1.1 | missed |" in summary
    assert "| beside |" not in summary and "| beside | 0.003 |  |  |  |" in whole


def test_files_of_another_kind_are_passed_over_and_the_others_stand_in_the_order_of_the_targets(report, result, tmp_path):
    files = {"z": result, "a": {**result, "target": "P10"}, "b": {**result, "target": "P2"}, "other": {"signals": 3}}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    assert [one["file"] for one in report.read(tmp_path)] == ["b", "z", "a"]


def test_the_readme_has_the_rows_farthest_above_and_below_what_was_wanted(report, result):
    text = report.readme(f"above\n{report.BEGIN}old\n{report.END}\nbelow\n", [result])
    assert "old" not in text and text.startswith("above\n") and text.endswith("\nbelow\n")
    assert "| a step under the trainer over a raw loop | broken | 1.100 (1.000 to 1.150) | ≤ 1.1, missed |" in text
    row = result["rows"][1]
    others = [{**result, "target": f"P{n}", "rows": [{**row, "median": 1.1 + n / 10, "name": f"r{n}"}]} for n in (5, 6, 7)]
    lines = report.headlines([result, *others], "zh").splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["kept", "r7", "r6"]
    assert lines[1].endswith("| 1.800 (1.000 ～ 1.150) | ≤ 1.1, 未达到 |")


def test_both_languages_name_every_target(report):
    assert list(report.CHINESE) == list(report.TARGETS)


def test_a_section_names_hardware_versions_date_and_command(report, result):
    said = report.section({**result, "threads": 2})
    assert said.startswith("a box, 2 cores; 2 threads, torch 2; 2026-01-02.\n\n    python benchmarks/a.py\n")
