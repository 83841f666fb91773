"""The four recipes of CONTRIBUTING, followed to the letter in a copy of the package, each in a process of its own."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import yaml
from page_blocks import ROOT, read

from minitx.config.part import find_target
from minitx.data.task import Task
from tests.cli.conftest import TINY as SMALL
from tests.waiting import PATIENCE

HEADING = re.compile(r"^### (.*): (one|two) files?$", re.MULTILINE)
FILE = re.compile(r"`([\w/.]+)`[^`\n]*:\n\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A path at the end of a paragraph, and the block below it."""
TINY = [*SMALL, "schedule.warmup_steps=1", "trainer.max_steps=2", "trainer.val_every=0"]


def recipes() -> dict[str, tuple[int, str]]:
    """The number of files that each recipe promises, and its text, by its name."""
    page = read("CONTRIBUTING.md").partition("\n## Four recipes\n")[2].partition("\n## ")[0]
    parts = HEADING.split(page)[1:]
    return {parts[i]: (("one", "two").index(parts[i + 1]) + 1, parts[i + 2]) for i in range(0, len(parts), 3)}


def patched(text: str, diff: str) -> str:
    """``text`` with the changes of a diff, whose hunks are separated by ``@@``. Each must fit in one place."""
    for hunk in diff.split("@@\n"):
        before, after = (re.findall(rf"^[ {sign}](.*\n)", hunk, flags=re.MULTILINE) for sign in "-+")
        assert text.count("".join(before)) == 1, f"not in one place of the file:\n{hunk}"
        text = text.replace("".join(before), "".join(after))
    return text


class Copy:
    """The package in a folder of its own, and a folder ``runs`` beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder / "copy", folder / "runs"
        self.runs.mkdir()
        for name in ("minitx", "configs", "scripts"):
            shutil.copytree(ROOT / name, self.folder / name)

    def follow(self, recipe: str) -> None:
        """Write the blocks of a recipe, which must touch as many files as it says."""
        count, text = recipes()[recipe]
        found = FILE.findall(text)
        assert len({name for name, _, _ in found}) == count, found
        for name, language, block in found:
            path = self.folder / name
            assert path.exists() == (language == "diff"), name
            path.write_text(patched(path.read_text(encoding="utf-8"), block) if language == "diff" else block, encoding="utf-8")

    def run(self, code: str) -> None:
        """Run Python in ``runs``. ``program(NAME, *WORDS)`` is a script of the copy, which must end well."""
        path = self.runs / "start.py"
        path.write_text(f"{PROGRAM}if __name__ == '__main__':  # workers of a grid import it\n{indent(code, '    ')}", "utf-8")
        clean = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, path]
        done = subprocess.run(command, cwd=self.runs, env=clean, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr

    def read(self, name: str) -> Any:
        """A file of ``runs``; JSON as data."""
        text = (self.runs / name).read_text(encoding="utf-8")
        return json.loads(text) if name.endswith(".json") else text


PROGRAM = """
import runpy, sys
from pathlib import Path

def program(name, *words):
    sys.argv = [f"{sys.path[1]}/scripts/{name}.py", *words]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, words

"""
KERNEL = """
import torch
from minitx.nn import explain_backends, scaled_dot_product_attention
from minitx.check import check_attention

def attention(query, key, value, *, attn_mask=None, is_causal=False, scale=None):
    return scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale, backend="plain")

query = torch.randn(1, 2, 5, 8)
lines = [str(line) for options in ({}, {"softcap": 30.0}) for line in explain_backends(query, query, query, backend="plain", **options)]
found = sorted({check.status.value for check in check_attention(attention, strict=True).checks})
with torch.autocast("cpu", torch.bfloat16):
    is_equal = torch.allclose(attention(query, query, query), scaled_dot_product_attention(query, query, query, backend="math"), atol=1e-6)
Path("kernel.txt").write_text("\\n".join([*lines, f"autocast {is_equal}", " ".join(found)]))
"""
"""What ``explain_backends`` says of the backend of the recipe, and how its results compare with the definition."""


def quoted(recipe: str, begin: str) -> list[str]:
    """The words of the one piece of code in a recipe that begins with ``begin``, without it."""
    (found,) = re.findall(rf"`{re.escape(begin)}([^`]*)`", recipes()[recipe][1])
    return found.split() if begin.endswith(" ") else [begin + found]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy in which all recipes but the lab's were followed, and what comes of them was run."""
    copy = Copy(tmp_path_factory.mktemp("recipes"))
    for recipe in ("A data set", "An option of a run", "A backend"):
        copy.follow(recipe)
    shape = [word for word in TINY if not word.startswith("data=")]
    data = [*quoted("A data set", "python scripts/train.py "), *shape, "output_dir=data"]
    limited = [*TINY, "trainer.max_steps=5", "trainer.max_minutes=1e-6", "output_dir=option"]
    (words,) = quoted("A backend", "imports=")
    copy.run(
        f"program('train', *{data})\n"
        "program('evaluate', 'ckpt_path=data/checkpoints/last.ckpt', 'output=found.json')\n"
        f"program('train', *{limited})\n"
        f"program('train', *{[*TINY, *words.split(), 'output_dir=backend']})\n{KERNEL}"
    )
    return copy


@pytest.mark.slow
def test_a_data_set_trains_and_its_checkpoint_is_read_without_trust(followed: Copy) -> None:
    stored, result = followed.read("data/config.yaml"), followed.read("data/result.json")
    assert "_target_: minitx.data.parity.parity" in stored and "length: 5" in stored
    assert result["steps"] == 2
    assert followed.read("found.json")["metrics"]["accuracy"]["value"] == pytest.approx(result["val_accuracy"])


@pytest.mark.slow
def test_an_option_of_a_run_has_its_effect(followed: Copy) -> None:
    assert followed.read("option/result.json")["steps"] == 1  # of five


@pytest.mark.slow
def test_a_backend_is_listed_trains_and_equals_the_definition(followed: Copy) -> None:
    assert followed.read("backend/result.json")["steps"] == 2
    lines = followed.read("kernel.txt").splitlines()
    assert "-> plain          can     it holds the whole L x S matrix" in lines
    assert "   plain          cannot  it has no soft-cap" in lines
    assert lines[-2] == "autocast True"
    assert lines[-1] == "not tried passed"  # and none failed or was refused


GRID = """
defaults: [/schema@_here_: ablation, _self_]
name: recipe
arms: {{wide: [model.ffn_dim=32], narrow: [model.ffn_dim=8]}}
workers: 1
studies:
  lookup:
    base: {base}
    arms: [wide, narrow]
    seeds: [0, 1]
    scores: [loss]
    measures: {measures}
comparisons:
  - {{study: lookup, arms: [wide, narrow]}}
"""


@pytest.mark.slow
def test_an_endpoint_of_the_lab_is_judged_and_reported(tmp_path: Path) -> None:
    copy, recipe = Copy(tmp_path), "An endpoint of the lab"
    copy.follow(recipe)
    base, (measures,) = [*TINY, *quoted(recipe, "+callbacks.measures=")], quoted(recipe, "measures: ")
    path = copy.runs / "conf" / "ablation" / "recipe.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(GRID.format(base=json.dumps(base), measures=measures), encoding="utf-8")
    words = ["--config-dir=conf", "experiment=scaling_ablation", "ablation=recipe", "output_dir=grid"]
    copy.run(f"program('train', *{words})")
    cells = [json.loads(line) for line in copy.read("grid/cells.jsonl").splitlines()]
    norms = {cell["arm"]: cell["result"]["measures"]["weight_norm"] for cell in cells}
    assert len(cells) == 4 and norms["wide"] > norms["narrow"] > 0
    assert "weight_norm" in copy.read("grid/report.html")


def test_a_recipe_touches_as_many_files_as_it_says(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    for recipe in recipes():
        copy.follow(recipe)
    assert len(recipes()) == 4, "the heading promises four"


def test_a_data_set_of_ours_and_one_of_a_users_are_the_same_two_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "own_project"))
    for path in ("configs/data/kv_lookup.yaml", "examples/own_project/conf/data/rows.yaml"):
        node = yaml.safe_load(read(path))
        assert set(node) == {"_target_", "batch_size"}
        assert inspect.signature(find_target(node["_target_"], "data")).return_annotation in (Task, "Task")
    del sys.modules["own"]


def test_a_diff_that_fits_nowhere_or_twice_is_seen():
    for text in ("a\nc\n", "a\nb\na\nb\n"):
        with pytest.raises(AssertionError, match="not in one place"):
            patched(text, " a\n-b\n+d\n")
