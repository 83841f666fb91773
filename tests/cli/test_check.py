"""``check.py``: what is typed, what is shown, and the exit code."""

import json
import sys

import pytest

from minitx.cli import check

SOURCE = """
def right(q, k, v, mask=None):
    from minitx.nn import scaled_dot_product_attention
    return scaled_dot_product_attention(q, k, v, mask)

def no_scale(q, k, v):
    return (q @ k.mT).softmax(-1) @ v

number = 3
"""


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """Run ``check.py`` beside ``mine.py``: its exit code, what it shows, and its complaint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def attention(q, k, v:\n")
    (tmp_path / "model.py").write_text("from torch import nn\nmodel = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))\n")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["check.py", *words])
        code = check.main()
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    yield run
    for name in ("mine", "broken", "model"):
        sys.modules.pop(name, None)


def test_the_exit_code_is_1_only_where_something_is_wrong(program):
    code, shown, _ = program("mine.py:right")
    assert code == 0 and shown.startswith("right, seed 0\ncalled as  right(q, k, v, mask)")
    code, shown, _ = program("mine.py:no_scale", "seed=4")
    assert code == 1 and "no_scale, seed 4" in shown and "wrong      no scale" in shown


def test_a_stage_is_graded_into_a_file(program, tmp_path):
    code, shown, _ = program("mine.py:no_scale", "stage=2", "json=out.json")
    read = json.loads((tmp_path / "out.json").read_text())
    assert code == 1 and "points     0 of 3 in stage 2" in shown
    assert read["points"] == {"reached": 0, "most": 3} and not read["is_right"]


def test_help_says_that_the_file_runs(program):
    code, shown, _ = program("--help")
    assert code == 0 and "Python runs the file" in shown and "stage=" in shown


@pytest.mark.parametrize(("words", "complaint"), [
    ([], "FILE.py:NAME is missing"),
    (["mine.py"], "mine.py must be FILE.py:NAME"),
    (["nowhere.py:right"], "nowhere.py does not exist"),
    (["mine.py:rigth"], "mine.py does not define rigth; did you mean right?"),
    (["mine.py:number"], "a function, a class or a module is needed, not int"),
    (["broken.py:attention"], "broken.py cannot be imported: SyntaxError"),
    (["model.py:model"], "is a model with the embedding"),
    (["mine.py:right", "stag=3"], "did you mean stage?"),
    (["mine.py:right", "stage=6"], "stage=6 must be"),
    (["mine.py:right", "mask=show"], "mask=show must be keep or hide"),
    (["mine.py:right", "stage=1", "strict=true"], "exclude each other"),
    (["mine.py:right", "json=nowhere/out.json"], "in a folder that does not exist"),
])  # fmt: skip
def test_what_is_mistyped_ends_with_one_sentence_and_the_exit_code_2(program, words, complaint):
    code, shown, error = program(*words)
    assert code == 2 and shown == "" and complaint in error
    assert error.startswith("error: ") and error.count("\n") == 1
