"""What a user installs: the wheel, the sdist and a clone (``pip install -e``), each in an environment made here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import minitx
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SITE = Path(str(distribution("torch").locate_file("")))
SHIPPED = {"minitx": "minitx", "configs": "minitx/configs"}  # folder of the checkout: folder of the package
FOLDERS = ("minitx", "benchmarks", "configs", "data", "docs", "examples", "scripts", "tests")  # at the top of a clone
PROGRAMS = ("train", "evaluate", "generate", "view", "export", "check")
slow = pytest.mark.slow


def test_the_lock_of_uv_has_the_versions_of_the_constraints_and_the_requirements_of_the_project():
    """``python tests/tools/lock.py`` writes it anew."""
    locked = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split())
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    found = [(package["name"], package.get("version")) for package in locked["package"]]
    assert [(name, version) for name, version in found if pins.get(name, version) != version] == []
    (own,) = (package for package in locked["package"] if package["name"] == "minitx")
    asked = [Requirement(text) for text in PROJECT["dependencies"]]
    asked += [Requirement(text) for texts in PROJECT["optional-dependencies"].values() for text in texts]
    wanted = {(canonicalize_name(each.name), each.specifier) for each in asked}
    assert {(each["name"], SpecifierSet(each.get("specifier", ""))) for each in own["metadata"]["requires-dist"]} == wanted


def source_files() -> set[str]:
    """What the package must hold, by its path in the wheel."""
    kinds = {".py", ".yaml", ".html", ".css", ".js", ".json", ".j2", ".po", ".toml", ".typed"}
    every = {inside: (ROOT / folder, (ROOT / folder).rglob("*")) for folder, inside in SHIPPED.items()}
    return {f"{inside}/{p.relative_to(top)}" for inside, (top, paths) in every.items() for p in paths if p.suffix in kinds}


def run(*command: object, folder: Path, code: int | None = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in ``folder`` that is told of no checkout."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "COV_"))}
    environment = {**clean, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert code is None or done.returncode == code, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the checkout: building leaves files behind."""
    place = tmp_path_factory.mktemp("source") / "my projects" / "minitx"
    for name in FOLDERS:  # not runs and environments
        data = {path.name for path in (ROOT / "data").iterdir()} - {"README.md"} if name == "data" else ()
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__", *data))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, place)
    return place


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, clone) -> Path:
    """The wheel that is built from an sdist, as ``python -m build`` does."""
    into = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", into, clone, folder=into)
    (found,) = into.glob("*.whl")
    return found


def environment(folder: Path, wheel: Path, packages: Path) -> Path:
    """The ``bin`` of a new environment with the wheel in it, which sees ``packages`` as well."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder.parent)
    python = folder / "bin/python"
    install = ("-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    run(sys.executable, *install, folder=folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{packages}\n")  # a .pth in there is not read: no editable minitx comes with it
    return folder / "bin"


def needed_by(name: str, known: dict[str, Distribution]) -> dict[str, Distribution]:
    """A distribution and what it needs, without extras, on this machine."""
    found = known[name] = distribution(name)
    for requirement in map(Requirement, found.requires or ()):
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in known:
            needed_by(requirement.name, known)
    return known


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory, wheel) -> Path:
    """An environment with minitx, torch, and what torch needs."""
    packages = tmp_path_factory.mktemp("torch_alone")
    for found in needed_by("torch", {}).values():
        for top in {path.parts[0] for path in found.files or () if path.parts[0] not in ("..", "__pycache__")}:
            where = Path(str(found.locate_file(top)))
            if where.exists() and not (packages / top).exists():
                (packages / top).symlink_to(where)
    return environment(tmp_path_factory.mktemp("bare") / "venv", wheel, packages)


@pytest.fixture(scope="module")
def with_train(tmp_path_factory, wheel) -> Path:
    """An environment with minitx from the wheel and the packages that the tests have."""
    return environment(tmp_path_factory.mktemp("train") / "venv", wheel, SITE)


@pytest.fixture(scope="module")
def editable(tmp_path_factory, clone) -> Path:
    """The same with the clone, as ``pip install -e`` does it."""
    into = tmp_path_factory.mktemp("editable")
    run(sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_editable({str(into)!r})", folder=clone)
    (wheel,) = into.glob("*.whl")
    return environment(into / "venv", wheel, SITE)


@pytest.fixture(params=["editable", "with_train"])
def installed(request) -> tuple[Path, Path]:
    """The ``bin`` of an environment, and the folder that its ``minitx`` is in."""
    found = request.getfixturevalue(request.param)
    if request.param == "editable":
        return found, request.getfixturevalue("clone")
    return found, next(found.parent.glob("lib/python*/site-packages"))


@pytest.fixture
def empty(tmp_path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


@slow
def test_the_wheel_holds_every_file_of_the_package_and_nothing_else_and_needs_torch_alone(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    info = {name for name in names if ".dist-info/" in name}
    assert names - info == source_files()
    assert any(name.endswith("licenses/LICENSE") for name in info)
    (found,) = Distribution.discover(path=[str(wheel)])
    assert found.version == minitx.__version__
    assert [line for line in found.requires or () if "extra" not in line] == ["torch<2.16,>=2.10"]


@slow
def test_with_torch_alone_a_block_of_the_wheel_runs_forward_and_backward(torch_alone, empty):
    code = """
import sys, torch, minitx.nn as nn
block = nn.Block(nn.MultiHeadAttention(16, 4), nn.FeedForward(16, 37), norm=lambda: torch.nn.LayerNorm(16), causal=True)
x = torch.randn(2, 5, 16, requires_grad=True)
block(x).square().sum().backward()
assert all(p.grad is not None and p.grad.isfinite().all() for p in [x, *block.parameters()])
print(nn.__file__, [name for name in ('numpy', 'hydra', 'lightning') if name in sys.modules])
"""
    said = run(torch_alone / "python", "-W", "ignore:Failed to initialize NumPy", "-c", code, folder=empty).stdout
    assert said == f"{next(torch_alone.parent.glob('lib/python*'))}/site-packages/minitx/nn/__init__.py []\n"


@slow
def test_with_torch_alone_a_program_says_what_to_install(torch_alone, empty):
    scripts = [(torch_alone / "python", script) for script in ROOT.glob("scripts/*.py")]
    for command in (*scripts, *((torch_alone / f"minitx-{program}",) for program in PROGRAMS)):
        done = run(*command, "model=char_small", folder=empty, code=2)
        assert re.fullmatch(r"error: minitx-\w+ needs the package [\w-]+: install minitx with the extra train\n", done.stderr)
        assert done.stdout == "" and list(empty.iterdir()) == []


# --- where Python finds a clone and a wheel

SAY = """
import json, os, importlib.util
from minitx.config.shipped import shipped_configs
names = ("minitx", "minitx.config", "minitx.data.task", "minitx.nn")
print(json.dumps([os.getcwd(), str(shipped_configs()), *(importlib.util.find_spec(name).origin for name in names)]))
"""
PLACES = {"above": "..", "in": ".", "below": "docs/dev"}  # of the clone
IN_A_KERNEL = """
import sys, nbformat.v4 as v4
from nbclient import NotebookClient
made = v4.new_notebook(cells=[v4.new_code_cell(open("my.py").read())])
NotebookClient(made, timeout=None, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
print(made.cells[0].outputs[0].text, end="")
"""


@slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["script", "command", "notebook"])
def test_python_finds_the_package_and_its_configs_from_a_folder_above_a_clone_in_it_and_below_it(installed, clone, way, place):
    (binary, home), folder = installed, (clone / PLACES[place]).resolve()
    script = folder / "my.py"
    script.write_text(SAY)
    words = {"script": [script.name], "command": ["-c", SAY], "notebook": ["-c", IN_A_KERNEL]}
    try:
        here, configs, *files = json.loads(run(binary / "python", *words[way], folder=folder).stdout)
    finally:
        script.unlink()
    if place == "in":  # Python looks there first
        home = clone
    assert here == str(folder)
    assert configs == str(home / ("configs" if home == clone else "minitx/configs")) and Path(configs, "train.yaml").is_file()
    expected = ("__init__.py", "config/__init__.py", "data/task.py", "nn/__init__.py")
    assert files == [str(home / "minitx" / name) for name in expected]


def test_no_folder_at_the_top_of_the_checkout_but_minitx_is_a_package():
    """The path of an editable install would make it importable in every program, before a folder of the user's."""
    assert [path.parent.name for path in ROOT.glob("*/__init__.py")] == ["minitx"]


@slow
def test_no_folder_of_a_clone_hides_a_folder_of_that_name_of_the_user_with_or_without_an_init_file(editable, clone, empty):
    names = [name for name in FOLDERS if name != "minitx"]
    for name in names:
        (empty / name).mkdir()
        (empty / name / "mine.py").touch()
        (empty / "late" / name).mkdir(parents=True)
        (empty / "late" / name / "__init__.py").touch()
        for file in (clone / name).glob("*.py"):  # of the same name
            shutil.copy(file, empty / name)
    code = f"""
import importlib.util, sys
from pathlib import Path
import minitx
for name in {names}:
    for file in Path(name).glob("*.py"):
        assert Path(importlib.util.find_spec(f"{{name}}.{{file.stem}}").origin) == file.absolute(), file
    sys.path[0], first = "/nowhere", sys.path[0]
    sys.path.append("late")
    del sys.modules[name]
    assert importlib.util.find_spec(name).origin == str(Path("late", name, "__init__.py").absolute()), name
    sys.path.remove("late")
    sys.path[0] = first
print("done")
"""
    (empty / "my.py").write_text(code)
    assert run(editable / "python", "my.py", folder=empty).stdout == "done\n"


def test_the_site_is_made_with_the_extras_of_its_pages_and_of_the_page_to_play_with():
    assert all(f'".[{extra}]"' in run("make", "-n", "site", "VENV=none", folder=ROOT).stdout for extra in ("docs", "train"))


def test_help_has_a_line_for_each_command():
    commands = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
    lines = run("make", "-s", "help", folder=ROOT).stdout.splitlines()
    assert sorted(line.split()[1] for line in lines) == sorted({*commands} - {"help"})


@pytest.mark.release
def test_the_wheel_runs_the_scaling_ablation_from_an_empty_folder(with_train, empty):
    cache = {"XDG_CACHE_HOME": str(empty.parent / "cache")}
    run(with_train / "minitx-train", "experiment=scaling_ablation", "ablation=smoke", folder=empty, **cache)
    (report,) = empty.rglob("report.html")
    assert report.stat().st_size > 10_000
    assert [path.name for path in empty.iterdir()] == ["runs"]


@pytest.mark.release
def test_ranks_and_workers_find_the_package_from_the_folder_that_holds_a_clone(editable, clone, tmp_path):
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    few = ["trainer.max_steps=2", "schedule.warmup_steps=1", "data.num_workers=1"]
    for name, words in {
        "ranks": ["experiment=kv_lookup", "trainer=ddp_cpu", "trainer.devices=2", *few],
        "grid": ["experiment=scaling_ablation", "ablation=smoke", "ablation.workers=2"],
    }.items():
        run(editable / "minitx-train", *words, f"output_dir={tmp_path / name}", folder=clone.parent, **cache)
    assert json.loads((tmp_path / "ranks/result.json").read_text())["steps"] == 2
    assert (tmp_path / "grid/report.html").stat().st_size > 10_000


def test_dev_has_every_extra_but_trained_models_and_the_programs_that_no_test_starts():
    extras = PROJECT["optional-dependencies"]
    whole, left_out = next(line for line in extras["dev"] if line.startswith("minitx[")), {"dev", "models", "notebook", "docs"}
    assert set(whole.removeprefix("minitx[").removesuffix("]").split(",")) == set(extras) - left_out
