"""What a user installs: the wheel and the sdist, in environments made here, from folders that know nothing of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
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
SITE = Path(sysconfig.get_path("purelib"))
SHIPPED = {"minitx": "minitx", "configs": "minitx/configs"}  # folder of the checkout: folder of the package
PROGRAMS = ("train", "evaluate", "generate", "view", "export")
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
    kinds = {".py", ".yaml", ".html", ".css", ".js", ".json", ".j2", ".typed"}
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
def wheel(tmp_path_factory) -> Path:
    """The wheel that is built from an sdist, as ``python -m build`` does."""
    place = tmp_path_factory.mktemp("source") / "minitx"
    place.mkdir()
    for path in ROOT.iterdir():  # a copy: setuptools leaves build folders behind; data, runs and environments are not looked at
        if path.name in {"minitx", "configs", "tests", "docs", "scripts", "examples"}:
            shutil.copytree(path, place / path.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.is_file():
            shutil.copy(path, place)
    (place / "minitx/configs").unlink(missing_ok=True)
    into = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", into, place, folder=into)
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
    assert [line for line in found.requires or () if "extra" not in line] == ["torch>=2.10"]


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
        assert re.fullmatch(r"error: minitx-\w+ needs the package \w+, .* install minitx with the extra train\n", done.stderr)
        assert done.stdout == "" and list(empty.iterdir()) == []


def test_the_site_is_made_with_the_extras_of_its_pages_and_of_the_page_to_play_with():
    assert all(f'".[{extra}]"' in run("make", "-n", "site", "VENV=none", folder=ROOT).stdout for extra in ("docs", "train"))


@pytest.mark.release
def test_with_train_the_wheel_runs_the_scaling_ablation_from_an_empty_folder(with_train, empty):
    where = run(with_train / "python", "-c", "import minitx; print(minitx.__file__)", folder=empty).stdout
    assert Path(where.strip()).is_relative_to(with_train.parent)  # and not the checkout
    cache = {"XDG_CACHE_HOME": str(empty.parent / "cache")}
    run(with_train / "minitx-train", "experiment=scaling_ablation", "ablation=smoke", folder=empty, **cache)
    (report,) = empty.rglob("report.html")
    assert report.stat().st_size > 10_000
    assert [path.name for path in empty.iterdir()] == ["runs"]


def test_dev_has_every_extra_but_trained_models_and_the_programs_that_no_test_starts():
    extras = PROJECT["optional-dependencies"]
    whole, left_out = next(line for line in extras["dev"] if line.startswith("minitx[")), {"dev", "models", "notebook", "docs"}
    assert set(whole.removeprefix("minitx[").removesuffix("]").split(",")) == set(extras) - left_out
