"""The cells of a grid. Each is an ordinary training run with its own overrides."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minitx.ablation.design import AblationConfig, StudyConfig, ThresholdConfig
from minitx.ablation.records import Place
from minitx.config import CONFIG_DIR, to_dict
from minitx.config.schema import require

NEW_DATA = 1000
"""Added to the seed of a run that starts from another run's weights. Its batches are therefore new, and the same for all arms."""

# what decides the result of a run, below the package and its configs
_LOOKS = ("capture", "statistics", "gradients", "snapshot", "counting")  # what probes and measures read
_CODE = (
    *("nn", "data", "training", "config", "interop"),
    *(f"ablation/{name}.py" for name in ("measures", "thresholds", "scaling/updates")),
    *(f"analysis/{name}.py" for name in _LOOKS),
)
_CONFIGS = ("callbacks", "data", "experiment", "model", "objective", "optimizer", "schedule", "trainer", "train.yaml")


@dataclass(frozen=True)
class Cell:
    """One training run of a grid, or one threshold: its place, its overrides, and the run whose weights it starts from."""

    place: Place
    overrides: tuple[str, ...]
    start: Cell | None = None
    keeps_weights: bool = False
    threshold: ThresholdConfig | None = field(default=None, hash=False)

    @cached_property
    def hash(self) -> str:
        """A hash of the place and of everything that decides the result: overrides, code, and the run that it starts from."""
        keys = [text for text in self.overrides if not text.startswith(CONFIG_DIR)]
        own = [folder_fingerprint(text.removeprefix(CONFIG_DIR)) for text in self.overrides if text.startswith(CONFIG_DIR)]
        place = [self.place.study, self.place.arm, self.place.factors, self.place.seed]
        parts = [*place, keys, code_fingerprint(), *own, self.start.hash if self.start else None]
        if self.threshold is not None:
            parts.append({**to_dict(self.threshold), "first": self.threshold.first[self.place.arm]})
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def folder(self, grid: Path) -> Path:
        """The run's folder, relative to that of the grid."""
        return grid / "cells" / self.hash

    def weights(self, grid: Path) -> Path:
        """The checkpoint that other runs start from."""
        return self.folder(grid) / "checkpoints" / "last.ckpt"

    def words(self, grid: Path) -> list[str]:
        """The overrides, with those that load the weights of ``start``. Where the scale is folded, the run checks that it starts as the same function."""
        own, load = settings(self.overrides), list[str]()
        folded = (node for node in ("init_from", "model") if own.get(f"{node}.fold_scale", "").lower() == "true")
        if self.start is not None:
            path = str(self.start.weights(grid))
            load = [f"init_from.path={_quoted(path)}", "init_from.fold_scale=true"]
        elif node := next(folded, None):
            path = own.get(f"{node}.path", f"${{{node}.path}}").strip("\"'")  # an experiment may name it
        else:
            return list(self.overrides)
        check = f"+callbacks.same_start={{_target_: minitx.ablation.measures.SameStart, path: {_quoted(path)}}}"
        return [*self.overrides, *load, check]

    def steps(self) -> int:
        """The number of steps in the last ``trainer.max_steps`` override.

        Raises:
            ConfigError: there is none, or it is not a whole number.
        """
        given, study = settings(self.overrides).get("trainer.max_steps", "missing"), f"ablation.studies.{self.place.study}"
        require(given.isdecimal(), f"{study}.base must set trainer.max_steps to a whole number; it is {given}")
        return int(given)

    def describe(self, grid: Path) -> dict[str, Any]:
        """Return the cell as plain data, as in ``cells.jsonl``."""
        return {
            "cell": self.hash,
            **{**vars(self.place), "factors": dict(self.place.factors)},
            "overrides": list(self.overrides),
            "command": command_of(self.words(grid)),
            "start": self.start.hash if self.start else None,
        }


def _quoted(path: str) -> str:
    """In quotes, as Hydra reads them. It knows no escapes but that of the quote."""
    return '"' + path.replace('"', r"\"") + '"'


def settings(overrides: Iterable[str]) -> dict[str, str]:
    """Return the values that overrides set, by key. The last one for a key counts.

    >>> settings(["seed=1", "+data.path=a=b", "seed=2"])
    {'seed': '2', 'data.path': 'a=b'}
    """
    pairs = (text.lstrip("+").partition("=") for text in overrides)
    return {key: value for key, _, value in pairs}


def command_of(words: Sequence[str]) -> str:
    """Return the command for these overrides. ``--config-dir`` comes first, as argparse requires."""
    return shlex.join(["python", "scripts/train.py", *sorted(words, key=lambda text: not text.startswith(CONFIG_DIR))])


def cells(grid: AblationConfig, *, common: Sequence[str] = ()) -> list[Cell]:
    """Return all cells of the grid's chosen studies, ordered by seed: all studies at their first seed, then at their second, and so on.

    A grid that is interrupted is therefore still balanced. A cell comes after the one that it starts from. Overrides apply in the order base, arm, factors, seed, common.

    Args:
        common: overrides for every cell.

    Raises:
        ConfigError: two cells are the same, two of arm, factors, seeds, threshold and ``common`` set the same key, or the grid does
            not contain the run that a cell starts from.
    """
    found, blocks = dict[Place, Cell](), dict[Place, int]()
    studies = grid.chosen()
    starts = {(study.start.study, study.start.arm) for study in studies.values() if study.start}
    for name, study in sorted(studies.items(), key=lambda item: len(grid.phases(item[0]))):
        where = f"ablation.studies.{name}"
        places = [*_places(name, study)]
        require(bool(places), f"{where} has no run: it needs arms, seeds, and levels that skip does not leave out")
        for place in places:
            require(place not in found, f"{where} names a seed or a level twice: {place}")
            factors, first = dict(place.factors), None
            if study.start is not None:
                shared = tuple(pair for pair in place.factors if pair[0] in grid.studies[study.start.study].factors)
                first = Place(study.start.study, study.start.arm, shared, place.seed)
                require(first in found, f"{where}.start: the grid has no run {first}")
            parts = {
                "base": study.base,
                f"arm {place.arm}": grid.arms[place.arm],
                **{f"factor {factor}": of_level[factors[factor]] for factor, of_level in study.factors.items()},
                "threshold": [f"optimizer.lr={study.threshold.first[place.arm]:g}"] if study.threshold else [],
                "seeds": [f"seed={place.seed + NEW_DATA if first else place.seed}"],
                "the command line or the lab itself": common,
            }
            _check_apart(where, parts)
            overrides = tuple(itertools.chain(*parts.values()))
            start, keeps = found[first] if first else None, (name, place.arm) in starts
            found[place] = Cell(place, overrides, start, keeps, study.threshold)
            blocks[place] = max(study.seeds.index(place.seed), blocks[first] if first else 0)
    return sorted(found.values(), key=lambda cell: blocks[cell.place])


def _check_apart(where: str, parts: Mapping[str, Iterable[str]]) -> None:
    """Of two parts that set one key, the first has no effect. That is what ``base`` is for, but a seed in it."""
    keys = {name: {*settings(overrides)} for name, overrides in parts.items()}
    keys["base"] &= {"seed"}
    for one, other in itertools.combinations(keys, 2):
        both = ", ".join(sorted(keys[one] & keys[other]))
        require(not both, f"{where}: {one} and {other} both set {both}")


def _places(name: str, study: StudyConfig) -> Iterator[Place]:
    """The places of a study by seed, without those that it skips."""
    combined = itertools.product(*study.factors.values(), study.arms)
    for seed, (*levels, arm) in itertools.product(study.seeds, combined):
        factors = dict(zip(study.factors, levels, strict=True))
        place = {"arm": arm, "seed": str(seed), **factors}
        if not any(all(place[key] in allowed for key, allowed in skip.items()) for skip in study.skip):
            yield Place(name, arm, tuple(sorted(factors.items())), seed)


@cache
def code_fingerprint() -> str:
    """Return a digest of the code and configs that decide a run's result, and of torch's version.

    Changes of comments, docstrings or the report do not change it.
    """
    import torch

    package = Path(__file__).resolve().parent.parent
    configs = Path(str(find_spec("minitx.configs").origin)).parent  # type: ignore[union-attr]
    found = {
        f"{part}/{path.relative_to(root)}": path
        for root, part, names in ((package, "minitx", _CODE), (configs, "configs", _CONFIGS))
        for name in names
        for path in ([root / name] if (root / name).is_file() else (root / name).rglob("*.*"))
        if path.suffix in (".py", ".yaml")
    }
    return _digest(found, torch.__version__)


@cache
def folder_fingerprint(folder: str) -> str:
    """Return a digest of the configs in a folder of the user's, without the grids in its ``ablation/``, and of the user's own code.

    That is each module or package that a ``_target_`` there names, in the current folder, else in this one, else in the one above
    it. Where the folders are has no influence.
    """
    found = {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*.yaml")}
    named = {name for path in found.values() for name in re.findall(r"_target_\W+(\w+)", path.read_text(encoding="utf-8"))}
    found = {name: path for name, path in found.items() if not name.startswith("ablation/")}
    for place in (Path(folder).parent, Path(folder), Path.cwd()):
        for name in named - {"minitx"}:
            code = (place / f"{name}.py", *(place / name).rglob("*.py"))
            found |= {path.relative_to(place).as_posix(): path for path in code if path.is_file()}
    return _digest(found)


def _digest(files: Mapping[str, Path], first: str = "") -> str:
    """Of names and contents, in the order of the names; of Python, of what is executed."""
    digest = hashlib.sha256(first.encode())
    for name in sorted(files):
        digest.update(name.encode())
        content = files[name].read_bytes()
        digest.update(_executed(content) if files[name].suffix == ".py" else content)
    return digest.hexdigest()[:16]


def _executed(source: bytes) -> bytes:
    """Python without comments, docstrings and layout, none of which decides a run."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # something else below a folder of the user's
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).encode()
