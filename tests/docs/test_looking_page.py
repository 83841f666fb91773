"""The Python of the page on looking runs, and makes the pictures of attention that it shows."""

import re
import runpy
from pathlib import Path

import pytest
from page_blocks import ROOT, blocks, read

PAGE = "docs/looking.md"
ABSENT = ("bertviz", "circuitsvis")  # no dependency of ours: their calls are only parsed
PYTHON = [block.text for block in blocks(PAGE, "python")]
SHOWN = sorted(re.findall(r"\]\(figures/(\w+\.png)\)", read(PAGE)))


@pytest.mark.filterwarnings("ignore:matplotlib has no font")  # of the machine
@pytest.mark.slow
def test_the_code_on_the_page_makes_every_picture_that_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert sum(len(re.findall(r"STEPS = \d+", text)) for text in PYTHON) == 1
    names: dict[str, object] = {}
    for text in PYTHON:
        code = compile(re.sub(r"STEPS = \d+", "STEPS = 2", text), PAGE, "exec")
        if not any(f"from {package}" in text for package in ABSENT):
            exec(code, names)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == SHOWN
    assert [layer.shape for layer in names["attention"]] == [(1, 4, 25, 25)] * 2


@pytest.mark.slow
def test_the_program_of_the_record_says_what_each_head_carries():
    names = runpy.run_path(str(ROOT / "tests" / "tools" / "patched_heads.py"))
    assert names["effects"](10).mean.shape == (2, 2)


def test_the_pictures_are_there_and_small():
    pictures = list((ROOT / "docs" / "figures").iterdir())
    assert sorted(path.name for path in pictures) == SHOWN
    assert sum(path.stat().st_size for path in pictures) < 600_000
