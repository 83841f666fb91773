"""The four recipes of CONTRIBUTING, followed to the letter in a copy of the package, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import ROOT, read

from minitx.ablation.design import AblationConfig, StudyConfig
from minitx.ablation.measures import check_measures
from minitx.cli.compose import compose_config
from minitx.config import ConfigError
from minitx.nn import backend_names
from tests.waiting import PATIENCE

HEADING = re.compile(r"^### (.*): (one|two) files?$", re.MULTILINE)
FILE = re.compile(r"`([\w/.]+)`[^`\n]*:\n\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A path at the end of a paragraph, and the block below it."""
COPIED = ("minitx", "configs", "scripts")
TINY = (
    *(
        "data=kv_lookup",
        "data.val_size=16",
        "data.batch_size=8",
        "model.embed_dim=8",
        "model.num_heads=2",
        "model.num_layers=1",
    ),
    *("trainer.max_steps=2", "trainer.val_every=0", "trainer.accelerator=cpu", "trainer.threads=1", "trainer.log_every=1"),
    *("schedule.warmup_steps=1", "callbacks.progress=false"),
)


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
    """The package in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder / "copy", folder / "runs"
        self.runs.mkdir()
        for name in COPIED:
            shutil.copytree(ROOT / name, self.folder / name)
        (self.folder / "minitx" / "configs").symlink_to(self.folder / "configs")  # as in the wheel

    def follow(self, recipe: str) -> None:
        for name, language, text in FILE.findall(recipe):
            path = self.folder / name
            assert path.exists() == (language == "diff"), name
            path.write_text(patched(path.read_text(encoding="utf-8"), text) if language == "diff" else text, encoding="utf-8")

    def touched(self) -> set[str]:
        """The files that are not as they were."""
        found = [
            path for name in COPIED for path in (self.folder / name).rglob("*.*") if path.is_file() and path.suffix != ".pyc"
        ]
        names = [path.relative_to(self.folder) for path in found]
        return {
            str(name)
            for name in names
            if not (ROOT / name).exists() or (ROOT / name).read_bytes() != (self.folder / name).read_bytes()
        }

    def run(self, code: str) -> str:
        """What Python prints; ``program(NAME, *WORDS)`` runs a script of the copy."""
        start = (
            "import runpy, sys\n"
            "def program(name, *words):\n"
            f"    sys.argv = [f'{self.folder}/scripts/{{name}}.py', *words]\n"
            "    try:\n"
            "        runpy.run_path(sys.argv[0], run_name='__main__')\n"
            "    except SystemExit as end:\n"
            "        assert not end.code, (sys.argv, end.code)\n"
            "if __name__ == '__main__':\n"
        )
        path = self.runs / "start.py"
        path.write_text(start + "".join(f"    {line}\n" for line in code.strip().splitlines()), encoding="utf-8")
        clean = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, path], cwd=self.runs, env=clean, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def followed(request: pytest.FixtureRequest, tmp_path: Path) -> Copy:
    """A copy of the package in which the recipe was followed that the test's parameter names; it touched as many files as it says."""
    files, recipe = recipes()[request.param]
    copy = Copy(tmp_path)
    assert copy.touched() == set()
    copy.follow(recipe)
    assert len(copy.touched()) == files
    return copy


def follows(recipe: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("followed", [recipe], indirect=True)


@follows("A data set")
def test_a_data_set_trains_and_its_checkpoint_is_read_without_trust(followed: Copy) -> None:
    (command,) = re.findall(r"`python scripts/train.py (.*?)`", recipes()["A data set"][1])
    words = [*command.split(), *(word for word in TINY if not word.startswith("data")), "data.val_size=16", "output_dir=run"]
    followed.run(f"program('train', *{words})\nprogram('evaluate', 'ckpt_path=run/checkpoints/last.ckpt', 'output=found.json')")
    stored = (followed.runs / "run" / "config.yaml").read_text(encoding="utf-8")
    assert "_target_: minitx.data.parity.parity" in stored and "length: 5" in stored
    result = json.loads((followed.runs / "run" / "result.json").read_text())
    found = json.loads((followed.runs / "found.json").read_text())["metrics"]
    assert result["steps"] == 2 and found["loss"]["value"] == pytest.approx(result["val_loss"])


@follows("An option of a run")
def test_an_option_of_a_run_has_its_effect(followed: Copy) -> None:
    words = [*TINY, "trainer.max_steps=5"]
    followed.run(
        f"program('train', *{words}, 'output_dir=a')\nprogram('train', *{words}, 'trainer.max_minutes=1e-6', 'output_dir=b')"
    )
    assert [json.loads((followed.runs / name / "result.json").read_text())["steps"] for name in "ab"] == [5, 1]


@follows("A backend")
def test_a_backend_is_listed_trains_and_equals_the_definition(followed: Copy) -> None:
    (words,) = re.findall(r"`(imports=.*?)`", recipes()["A backend"][1])
    said = followed.run(
        f"program('train', *{[*TINY, *words.split(), 'output_dir=run']})\n"
        "import torch\n"
        "from minitx.nn import explain_backends, scaled_dot_product_attention\n"
        "from minitx.testing import check_kernel\n"
        "def attention(query, key, value, *, attn_mask=None, is_causal=False, scale=None):\n"
        "    return scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale, backend='plain')\n"
        "print({result.status for result in check_kernel(attention)})\n"
        "query = torch.randn(1, 2, 5, 8)\n"
        "for options in ({}, {'softcap': 30.0}):\n"
        "    print(*explain_backends(query, query, query, backend='plain', **options), sep='\\n')\n"
    )
    assert (followed.runs / "run" / "result.json").exists()
    assert "-> plain          can     it holds the whole L x S matrix" in said
    assert "   plain          cannot  it has no soft-cap" in said
    assert "{'passed', 'skipped'}" in said or "{'skipped', 'passed'}" in said


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
    measures: [weight_norm]
comparisons:
  - {{study: lookup, arms: [wide, narrow]}}
"""


@follows("An endpoint of the lab")
def test_an_endpoint_of_the_lab_is_judged_and_reported(followed: Copy) -> None:
    (callback,) = re.findall(r"`(\+callbacks.*?)`", recipes()["An endpoint of the lab"][1])
    path = followed.runs / "conf" / "ablation" / "recipe.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(GRID.format(base=json.dumps([*TINY, callback])), encoding="utf-8")
    words = ["--config-dir=conf", "experiment=scaling_ablation", "ablation=recipe", "output_dir=grid"]
    followed.run(f"program('train', *{words})")
    cells = [json.loads(line) for line in (followed.runs / "grid" / "cells.jsonl").read_text().splitlines()]
    norms = {cell["arm"]: cell["result"]["measures"]["weight_norm"] for cell in cells}
    assert norms["wide"] > norms["narrow"] > 0
    assert "weight_norm" in (followed.runs / "grid" / "report.html").read_text(encoding="utf-8")


def test_nothing_that_a_recipe_adds_is_there_already():
    for words in (["data=parity"], ["trainer.max_minutes=30"]):
        with pytest.raises(Exception, match=r"parity|max_minutes"):
            compose_config(words)
    assert "plain" not in backend_names()
    study = StudyConfig(arms=("a",), scores=("loss",), measures=("weight_norm",))
    with pytest.raises(ConfigError, match=r"measures=\['weight_norm'\] must be among loss_at_N"):
        check_measures(AblationConfig(arms={"a": ()}, studies={"s": study}))


def test_a_diff_that_fits_nowhere_or_twice_is_seen():
    assert patched("a\nb\nc\n", " a\n-b\n+d\n@@\n c\n+e\n") == "a\nd\nc\ne\n"
    for text in ("a\nc\n", "a\nb\na\nb\n"):
        with pytest.raises(AssertionError, match="not in one place"):
            patched(text, " a\n-b\n+d\n")
