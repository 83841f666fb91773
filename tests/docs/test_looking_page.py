"""The Python of the page on looking runs, and makes the pictures of attention that it shows."""

import re
import runpy
from pathlib import Path

import pytest
from page_blocks import ROOT, blocks, commands, read

from minitx.cli.compose import compose_config
from minitx.training.run import train

PAGE = "docs/looking.md"
PYTHON = [block.text for block in blocks(PAGE, "python")]
RUNS = [words[2:] for block in blocks(PAGE, "bash") for words in commands(block) if "experiment=induction" in words]
SHORT = "trainer.max_steps=2 trainer.val_every=0 trainer.accelerator=cpu trainer.threads=1 schedule.warmup_steps=1 callbacks.progress=false"
SHOWN = sorted(re.findall(r"\]\(figures/(\w+\.png)\)", read(PAGE)))


@pytest.mark.filterwarnings("ignore:matplotlib has no font")  # of the machine
@pytest.mark.slow
def test_the_code_on_the_page_makes_every_picture_that_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert len(RUNS) == 2
    for *words, place in RUNS:
        train(compose_config([*words, *SHORT.split()]), place.removeprefix("output_dir="))
    names: dict[str, object] = {}
    for text in PYTHON:
        exec(compile(text, PAGE, "exec"), names)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == SHOWN
    assert [layer.shape for layer in names["attention"]] == [(1, 4, 39, 39)] * 2


@pytest.mark.slow
def test_the_program_of_the_record_says_what_each_head_carries():
    names = runpy.run_path(str(ROOT / "tests" / "tools" / "patched_heads.py"))
    assert names["effects"](10).mean.shape == (2, 2)


def test_the_pictures_are_there_and_small():
    pictures = list((ROOT / "docs" / "figures").iterdir())
    assert sorted(path.name for path in pictures) == SHOWN
    assert sum(path.stat().st_size for path in pictures) < 600_000
