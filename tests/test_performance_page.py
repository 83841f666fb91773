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


def test_the_committed_page_is_what_the_recorded_files_give(report):
    text = report.PAGE.read_text(encoding="utf-8")
    assert text == report.between(text, report.table(report.read())), "run python benchmarks/report.py"
