"""The code on the page of figures runs, and makes the pictures that it shows."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "figures.md"
ABSENT = ("bertviz", "circuitsvis")  # no dependency of ours: their calls are only parsed


def blocks():
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_the_code_on_the_page_makes_every_picture_that_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "STEPS = 500" in blocks()[0]
    names: dict[str, object] = {}
    for block in blocks():
        code = compile(block.replace("STEPS = 500", "STEPS = 2"), str(PAGE), "exec")
        if not any(f"from {package}" in block for package in ABSENT):
            exec(code, names)
    shown = re.findall(r"\]\(figures/(\w+\.png)\)", PAGE.read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(path.name for path in tmp_path.iterdir())
    assert [layer.shape for layer in names["attention"]] == [(1, 4, 25, 25)] * 2


def test_the_pictures_are_there_and_small():
    pictures = list((PAGE.parent / "figures").iterdir())
    assert {path.name for path in pictures} == set(re.findall(r"\]\(figures/(\w+\.png)\)", PAGE.read_text(encoding="utf-8")))
    assert sum(path.stat().st_size for path in pictures) < 600_000


@pytest.mark.parametrize("package", ABSENT)
def test_the_page_shows_the_call_of_other_viewers(package):
    assert any(f"from {package}" in block for block in blocks())
