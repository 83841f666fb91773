"""A grid as data: from an ``AblationConfig`` to cells, each an ordinary training run with overrides of its own."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minitx.config import CONFIG_DIR, AblationConfig, ConfigError, StudyConfig

# what decides a run, below the package and its configs; of looking, what probes and measures read
_LOOKS = ("capture", "statistics", "gradients", "snapshot", "attention_cost")
_CODE = ("nn", "data", "training", "config", *(f"analysis/{name}.py" for name in _LOOKS))
_CONFIGS = ("callbacks", "data", "experiment", "model", "objective", "optimizer", "schedule", "trainer", "train.yaml")
_JUDGES = "config/ablation.py"  # decides how a grid is judged; its cells are in the hash anyway


@dataclass(frozen=True)
class Cell:
    """One training run of a grid: where it stands, and the overrides that make it."""

    study: str
    arm: str
    factors: Mapping[str, str]
    seed: int
    overrides: tuple[str, ...]

    @property
    def hash(self) -> str:
        """Names the cell by its place and what decides its result, overrides and code; a finished one is never run again."""
        code = code_fingerprint()
        keys = [text for text in self.overrides if not text.startswith(CONFIG_DIR)]
        own = [folder_fingerprint(text.removeprefix(CONFIG_DIR)) for text in self.overrides if text.startswith(CONFIG_DIR)]
        text = json.dumps([self.study, self.arm, dict(self.factors), keys, code, *own])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def command(self) -> str:
        """The command that runs this cell alone."""
        return command_of(self.overrides)

    def steps(self) -> int:
        """The number of optimizer steps that the last ``trainer.max_steps`` override asks for.

        Raises:
            ConfigError: none does, so that the grid's time cannot be projected.
        """
        given = settings(self.overrides).get("trainer.max_steps")
        if given is None:
            raise ConfigError(
                f"ablation.studies.{self.study}.base must set trainer.max_steps, so that its time can be projected"
            )
        if not given.isdecimal():
            raise ConfigError(f"ablation.studies.{self.study}: trainer.max_steps={given} must be a whole number")
        return int(given)

    def describe(self) -> dict[str, Any]:
        """The cell as plain data, as it stands in ``cells.jsonl``."""
        return {
            "cell": self.hash,
            "study": self.study,
            "arm": self.arm,
            "factors": dict(self.factors),
            "seed": self.seed,
            "overrides": list(self.overrides),
            "command": self.command,
        }


def settings(overrides: Iterable[str]) -> dict[str, str]:
    """The values that overrides set, by key; of several for one key the last.

    >>> settings(["seed=1", "+data.path=a=b", "seed=2"])
    {'seed': '2', 'data.path': 'a=b'}
    """
    pairs = (text.lstrip("+").partition("=") for text in overrides)
    return {key: value for key, _, value in pairs}


def command_of(overrides: Sequence[str]) -> str:
    """The command that runs these overrides; a folder of configs among them stands first, as argparse wants it."""
    words = sorted(overrides, key=lambda text: not text.startswith(CONFIG_DIR))
    return shlex.join(["python", "scripts/train.py", *words])


def cells(grid: AblationConfig, *, common: Sequence[str] = (), trimmed: bool = False) -> list[Cell]:
    """Every cell of the grid, in seed blocks: all arms of the first seed of every study, then of the second …; seeds to
    tune on come first.

    A grid that is cut off is therefore still balanced. Overrides apply in the order base, arm, factors, trim, seed.

    Args:
        common: overrides for every cell, last. trimmed: whether ``grid.trim`` applies.

    Raises:
        ConfigError: the same cell twice, or a ``skip`` that names no factor or no level of it.
    """
    blocks: dict[int, list[Cell]] = {}
    for name, study in grid.studies.items():
        trim = grid.trim.get(name, ()) if trimmed else ()
        for block, seed in enumerate((*study.tune_seeds, *study.seeds)):
            for arm, factors in _combinations(name, study):
                levels = [override for factor, level in factors.items() for override in study.factors[factor][level]]
                overrides = (*study.base, *grid.arms[arm], *levels, *trim, f"seed={seed}", *common)
                blocks.setdefault(block, []).append(Cell(name, arm, factors, seed, overrides))
    result = [cell for block in sorted(blocks) for cell in blocks[block]]
    twins = {cell.hash for cell in result}
    if len(twins) != len(result):
        raise ConfigError("ablation.studies names a seed or a level twice: two cells of the grid are the same run")
    return result


def _combinations(name: str, study: StudyConfig) -> Iterator[tuple[str, dict[str, str]]]:
    for skip in study.skip:
        unknown = [key for key in skip if key != "arm" and key not in study.factors]
        if unknown:
            raise ConfigError(f"ablation.studies.{name}.skip names {unknown[0]}; it has arm, {', '.join(study.factors)}")
        for key, levels in skip.items():
            there = study.arms if key == "arm" else tuple(study.factors[key])
            missing = [level for level in levels if level not in there]
            if missing:
                raise ConfigError(f"ablation.studies.{name}.skip names {key} {missing[0]}; it has {', '.join(there)}")
    for levels in itertools.product(*study.factors.values()):
        factors = dict(zip(study.factors, levels, strict=True))
        for arm in study.arms:
            place = {"arm": arm, **factors}
            if not any(all(place[key] in allowed for key, allowed in skip.items()) for skip in study.skip):
                yield arm, factors


@cache
def code_fingerprint(*more: str) -> str:
    """A digest of the code that decides a run's result, and of torch's version.

    A change of the report's page keeps it, and one of a comment or docstring.

    ``more`` are further files, by their path in the package.
    """
    import torch

    package = Path(__file__).resolve().parent.parent
    configs = Path(str(find_spec("minitx.configs").origin)).parent  # type: ignore[union-attr]
    found = {
        f"{part}/{path.relative_to(root)}": path
        for root, part, names in ((package, "minitx", (*_CODE, *more)), (configs, "configs", _CONFIGS))
        for name in names
        for path in ([root / name] if (root / name).is_file() else (root / name).rglob("*.*"))
        if path.suffix in (".py", ".yaml")
    }
    found.pop(f"minitx/{_JUDGES}", None)
    return _digest(found, torch.__version__)


@cache
def folder_fingerprint(folder: str) -> str:
    """A digest of the configs in a folder of the user's, but for the grids in its ``ablation/``, wherever it lies."""
    found = {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*.yaml")}
    return _digest({name: path for name, path in found.items() if not name.startswith("ablation/")})


def _digest(files: Mapping[str, Path], first: str = "") -> str:
    """Of names and contents, in the order of the names; of Python, what is executed."""
    digest = hashlib.sha256(first.encode())
    for name in sorted(files):
        digest.update(name.encode())
        content = files[name].read_bytes()
        digest.update(_executed(content) if files[name].suffix == ".py" else content)
    return digest.hexdigest()[:16]


def _executed(source: bytes) -> bytes:
    """Python without comments, docstrings and layout, none of which decides a run."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).encode()
