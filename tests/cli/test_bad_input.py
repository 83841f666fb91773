"""A mistake in what was typed gets one line that names key, value and what is allowed, exit code 2, and no folder.

The cases are in ``bad_input_cases.py``, and what they print is in ``docs/errors.md``.
"""

from __future__ import annotations

import subprocess
import sys
from io import IOBase
from pathlib import Path

import errors_page
import pytest
import torch
from bad_input_cases import CASES, TINY, Case

from tests.waiting import PATIENCE, wait_for

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"
COMMITTED = errors_page.rows_in(errors_page.committed())


@pytest.fixture(scope="module")
def rows():
    """What the cases print, by what is wrong; written to the page where that was asked for."""
    found = dict(COMMITTED)
    yield found
    if errors_page.WRITES:
        errors_page.PATH.write_text(errors_page.page_of(found), encoding="utf-8")


@pytest.fixture
def once(monkeypatch):
    """Hydra composes everything twice, the first time to see whether the config asks for a sweep; here none does."""
    monkeypatch.setattr("hydra._internal.hydra.Hydra.get_mode", lambda *args, **kwargs: None)


def assert_one_line(said, parts, code=2):
    assert said.code == code, said
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1, said.err
    assert "Traceback" not in said.out + said.err
    for part in parts:
        assert part in said.err, (part, said.err)


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases], ids=lambda case: case.wrong)
def test_a_mistake_gets_one_line_that_names_it(cli, place, monkeypatch, once, rows, case: Case):
    for name, content in case.files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    prepared = case.prepare(place, monkeypatch) if case.prepare is not None else None
    if not case.builds:  # a mistake that slips through would train for minutes
        for name in ("minitx.cli.train.run_training", "minitx.cli.ablate.open_launcher"):
            monkeypatch.setattr(name, lambda *args, **kwargs: pytest.fail("the run began"))
    before = sorted(place.rglob("*"))
    said = cli(*case.arguments, program=case.program)
    if isinstance(prepared, IOBase):
        prepared.close()
    if case.code:
        assert_one_line(said, case.names, case.code)
    else:
        assert (said.code, said.err) == (0, ""), said
    if case.code == 2:
        assert sorted(place.rglob("*")) == before
    rows[case.wrong] = errors_page.row_of(case, said.err, place)
    if not errors_page.WRITES:
        assert COMMITTED.get(case.wrong) == rows[case.wrong], f"if this is meant: {errors_page.COMMAND}"


@pytest.mark.skipif(errors_page.WRITES, reason="the page is being written")
def test_the_page_holds_these_cases_and_no_others():
    names = [case.wrong for cases in CASES.values() for case in cases]
    assert len(set(names)) == len(names) == len(COMMITTED)
    assert errors_page.committed() == errors_page.page_of(COMMITTED), errors_page.COMMAND


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without a GPU")
def test_a_gpu_that_is_not_there_is_named(cli, place):
    assert_one_line(cli(*TINY, "trainer.accelerator=gpu"), ("trainer.accelerator=gpu", "0 usable GPUs"))
    assert list(place.iterdir()) == []


def test_a_folder_that_holds_a_run_is_not_written_over(cli, place):
    assert cli(*TINY, "output_dir=run").code == 0
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert_one_line(cli(*TINY, "output_dir=run"), ("output_dir=", "holds a run already", "ckpt_path=last"))
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_traceback_shows_where_an_error_came_from(cli):
    said = cli("traceback=true", "model.num_heads=abc")
    assert said.code == 2
    assert "Traceback (most recent call last)" in said.err
    assert said.err.rstrip().splitlines()[-1].startswith("error: model.num_heads=abc")
    assert "Traceback" not in cli("model.num_heads=abc").err


def test_a_run_that_stops_being_finite_exits_with_3_and_one_line(cli):
    said = cli(*TINY, "trainer.max_steps=4", "optimizer.lr=1e30", "model.norm_position=post", "trainer.ckpt_every=1")
    assert said.code == 3, said
    assert "not finite" in said.err
    assert said.err.count("\n") == 1


def test_a_run_that_records_ends_with_0(cli):
    arguments = (*TINY, "trainer.max_steps=4", "optimizer.lr=1e30", "model.norm_position=post", "on_nonfinite=record")
    said = cli(*arguments)
    assert (said.code, said.err) == (0, "")


# --- as processes of their own


def script(*arguments, wait=True):
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    return (process.communicate(timeout=PATIENCE)[1], process.returncode) if wait else process


@pytest.mark.parametrize(
    ("content", "arguments", "part"),
    [
        ("", ["--config-dir=.", "--config-name=mine"], "mine.yaml chooses no model and no data"),
        pytest.param(
            "seed: 1",
            [*TINY[1:], "data=text", "data.path=gone.txt"],
            "data.path=gone.txt does not exist",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_script_itself_says_one_line(place, content, arguments, part):
    (place / "mine.yaml").write_text(content, encoding="utf-8")
    said, code = script(*arguments)
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith("error: ") and part in said
    assert [path.name for path in place.iterdir()] == ["mine.yaml"]


@pytest.mark.slow
def test_a_folder_belongs_to_one_run_until_that_is_dead(place):
    steps = ("trainer.max_steps=1000000", "trainer.ckpt_every=0", "trainer.log_every=1")
    arguments = (*(a for a in TINY if a != "debug=one_step"), *steps, "output_dir=run")
    first = script(*arguments, wait=False)
    try:
        wait_for((place / "run" / "metrics.csv").is_file, first)
        said, code = script(*arguments, "ckpt_path=last")
        assert code == 2 and "belongs to a run that is going on" in said
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    said, code = script(*arguments)
    assert code == 2 and "holds a run already" in said
